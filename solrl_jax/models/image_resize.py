"""What a vision tower is shown: pictures of any size resized, cropped or padded to a square, and normalised.

The released scorers were fed by two libraries, which differ in more than a rounding:

* Pillow resizes 8-bit pictures, first along rows, then along columns, and rounds to 8 bits after each (`eight_bit`). That is
  computed exactly, in integers. (From 13.0 on, Pillow takes columns first where that is less work, which shows in tall
  pictures. The scorers were released and are used with the other order.)
* PyTorch (torchvision's `resize` of a float tensor with antialiasing) rounds nothing, and bicubic overshoots stay.

Both weight the same inputs by the same kernel, stretched by the factor of reduction. So a resize is two small dense matrices,
made on the host in float64, into which the crop or the padding goes as well; a product with them is fast on every backend.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Kernel = Literal["bilinear", "bicubic"]

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)  # of CLIP's training pictures, by channel
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}  # where a kernel ends, in pixels
BITS = 22  # behind the point of Pillow's weights
LOW = 2**11  # what a weight is split by


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """From pictures [b, H, W, 3] in [0, 1] to pixels [b, size, size, 3], normalised; both float32."""

    size: int
    kernel: Kernel
    eight_bit: bool  # as Pillow; else as PyTorch
    fit: Literal["crop", "pad"]  # the shorter edge becomes `size` and the centre is kept; or the longer one, black around it
    odd: Literal["down", "even"] = "even"  # where half a pixel is to be cropped: transformers rounds down, torchvision to even

    def __call__(self, images: Float[Array, "b H W 3"]) -> Float[Array, "b size size 3"]:
        height, width = images.shape[1:3]
        out = self.resized(height, width)
        rows, columns = self._place(height, out[0]), self._place(width, out[1])
        x = images.astype(jnp.float32)
        if self.eight_bit:
            x = jnp.clip(jnp.round(255 * x), 0, 255)
            x = _levels(_levels(x, columns, "bHWc,wW->bHwc"), rows, "bHwc,hH->bhwc") / 255
        else:
            x = _product(_product(x, columns, "bHWc,wW->bHwc"), rows, "bHwc,hH->bhwc")
        return (x - MEAN) / STD

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing, before anything is cropped or padded."""
        if self.fit == "pad":
            scale = self.size / max(height, width)
            return round(height * scale), round(width * scale)
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)

    def _place(self, n_in: int, n_out: int) -> Float[np.ndarray, "size n_in"]:
        """The matrix of one axis: that of the resize without the rows that are cropped, with zeros as padding."""
        matrix = resize_matrix(n_in, n_out, self.kernel)
        if self.fit == "pad":
            before = (self.size - n_out) // 2
            return np.pad(matrix, ((before, self.size - n_out - before), (0, 0)))
        spare = n_out - self.size
        first = spare // 2 if self.odd == "down" else round(spare / 2)
        return matrix[first : first + self.size]


def resize_matrix(n_in: int, n_out: int, kernel: Kernel) -> Float[np.ndarray, "n_out n_in"]:
    """Weights of each input in each output along one axis; rows sum to 1. float64.

    Output i lies at (i + 1/2) n_in / n_out. Where pixels are reduced the kernel is widened by the factor (antialiasing), and it
    ends at the border, where the weights that are left are scaled up.
    """
    scale = n_in / n_out
    wide = max(scale, 1.0)
    centre = (np.arange(n_out) + 0.5) * scale
    reach = SUPPORT[kernel] * wide
    first = np.maximum(np.floor(centre - reach + 0.5), 0)
    last = np.minimum(np.floor(centre + reach + 0.5), n_in)  # exclusive
    inputs = np.arange(n_in)
    weights = _KERNELS[kernel](np.abs(inputs + 0.5 - centre[:, None]) / wide)
    weights = np.where((inputs >= first[:, None]) & (inputs < last[:, None]), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2 (doi 10.1109/TASSP.1981.1163711)."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


_KERNELS = {"bilinear": _bilinear, "bicubic": _bicubic}


def _product(x: Array, matrix: np.ndarray, axes: str) -> Array:
    # in full float32 also on a backend that would rather multiply in less
    return jnp.einsum(axes, x, matrix.astype(np.float32), precision=jax.lax.Precision.HIGHEST)


def _levels(x: Array, matrix: np.ndarray, axes: str) -> Array:
    """One pass of Pillow over levels 0, 1, ..., 255 (as float32), exactly.

    Its weights are integers over 2^22, its sums do not fit in float32. Those of the upper and of the lower half of each
    weight do: they are exact in any order, hence the same on every backend and in every batch.
    """
    weights = np.trunc(matrix * 2**BITS + np.copysign(0.5, matrix))
    upper = np.round(weights / LOW)
    high, low = (_product(x, part, axes).astype(jnp.int32) for part in (upper, weights - upper * LOW))
    total = (high * LOW + low + 2 ** (BITS - 1)) >> BITS
    return jnp.clip(total, 0, 255).astype(jnp.float32)
