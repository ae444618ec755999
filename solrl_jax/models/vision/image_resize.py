"""Pictures for a vision tower: pictures of any size are resized, cropped or padded to a square, and normalised.

The released scorers were used with two libraries, whose results differ by more than rounding:

* Pillow resizes 8-bit pictures, first along rows, then along columns, and rounds to 8 bits after each (`eight_bit`). This port
  is exact, in integers. (Since version 13.0, Pillow takes columns first where that is less work; this matters for tall
  pictures. The scorers were released with the other order.)
* PyTorch (torchvision's `resize` of a float tensor with antialiasing) rounds nothing, and keeps the overshoots of the bicubic
  kernel.

Both weight the same inputs by the same kernel, which is widened where the picture shrinks. So a resize is a product with two
small dense matrices. They are made on the host in float64, and contain the crop or the padding. The product is fast on every
backend.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Kernel = Literal["bilinear", "bicubic"]

MEAN = np.array(
    [0.48145466, 0.4578275, 0.40821073], np.float32
)  # of CLIP's training pictures, for each channel
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}  # half the width of a kernel, in pixels
BITS = 22  # Pillow's weights are integers over 2 ** BITS
LOW = 2**11  # a weight is split into a multiple of LOW and a rest


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """From pictures [b, H, W, 3] in [0, 1] to pixels [b, size, size, 3], normalised; both float32."""

    size: int
    kernel: Kernel
    eight_bit: bool  # as Pillow does it; else as PyTorch
    # "crop": the shorter edge becomes `size`, and the centre is kept; "pad": the longer edge does, with black around
    fit: Literal["crop", "pad"]
    # how half a pixel to crop is rounded: down in transformers, to even in torchvision
    odd: Literal["down", "even"] = "even"

    def __call__(self, images: Float[Array, "b H W 3"]) -> Float[Array, "b size size 3"]:
        height, width = images.shape[1:3]
        out = self.resized(height, width)
        rows = self._place(height, out[0])
        columns = self._place(width, out[1])
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
        """The matrix for one axis: of the resize, without the cropped rows, or with rows of zeros as padding."""
        matrix = resize_matrix(n_in, n_out, self.kernel)
        if self.fit == "pad":
            before = (self.size - n_out) // 2
            return np.pad(matrix, ((before, self.size - n_out - before), (0, 0)))
        spare = n_out - self.size
        first = spare // 2 if self.odd == "down" else round(spare / 2)
        return matrix[first : first + self.size]


def resize_matrix(n_in: int, n_out: int, kernel: Kernel) -> Float[np.ndarray, "n_out n_in"]:
    """The weight of each input in each output along one axis, float64. SeedBatch sum to 1.

    The centre of output i is at (i + 1/2) n_in / n_out. Where the picture shrinks, the kernel is widened by the same factor
    (antialiasing). At the border the kernel is cut off, and the remaining weights are scaled up.
    """
    scale = n_in / n_out
    wide = max(scale, 1.0)
    centre = (np.arange(n_out) + 0.5) * scale
    reach = SUPPORT[kernel] * wide
    first = np.maximum(np.floor(centre - reach + 0.5), 0)
    last = np.minimum(np.floor(centre + reach + 0.5), n_in)  # exclusive
    inputs = np.arange(n_in)
    weights = _kernel(np.abs(inputs + 0.5 - centre[:, None]) / wide, kernel)
    weights = np.where((inputs >= first[:, None]) & (inputs < last[:, None]), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def _kernel(x: np.ndarray, kernel: Kernel) -> np.ndarray:
    """The weight at distance `x`. "bicubic": Keys' kernel with a = -1/2 (doi 10.1109/TASSP.1981.1163711)."""
    if kernel == "bilinear":
        return np.maximum(1 - x, 0)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _product(x: Array, matrix: np.ndarray, axes: str) -> Array:
    # in full float32, also on backends that multiply in less by default
    return jnp.einsum(axes, x, matrix.astype(np.float32), precision=jax.lax.Precision.HIGHEST)


def _levels(x: Array, matrix: np.ndarray, axes: str) -> Array:
    """One pass of Pillow over levels 0, 1, ..., 255 (as float32), exactly.

    Pillow's sums do not fit in float32. The sums over the upper and the lower halves of the weights do. They are exact in any
    order, hence the same on every backend and in every batch.
    """
    weights = np.trunc(matrix * 2**BITS + np.copysign(0.5, matrix))
    upper = np.round(weights / LOW)
    high, low = (
        _product(x, part, axes).astype(jnp.int32) for part in (upper, weights - upper * LOW)
    )
    total = (high * LOW + low + 2 ** (BITS - 1)) >> BITS
    return jnp.clip(total, 0, 255).astype(jnp.float32)
