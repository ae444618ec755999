"""Preprocessing of images for a vision tower: resizing, cropping or padding, and normalization.

The released scorers were used with two libraries, whose results differ by more than rounding:

* Pillow resizes 8-bit images, first along rows, then along columns, and rounds to 8 bits after each
  (`eight_bit`). This port is exact, in integers. (Since version 13.0, Pillow starts with the
  columns where that is less work, which matters for tall images. The scorers were released with the
  other order.)
* PyTorch (torchvision's antialiased `resize` of a float tensor) rounds nothing, and keeps the
  overshoots of the bicubic kernel.

Both weight the same inputs by the same kernel, which is widened where the image shrinks. So a
resize is a multiplication by two small dense matrices. They are computed on the host in float64 and
include the crop or the padding.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Kernel = Literal["bilinear", "bicubic"]

# Mean and standard deviation of the channels of CLIP's training images.
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0}  # half the width of a kernel, in pixels
PILLOW_BITS = 22  # Pillow's weights are integers over 2**22
LOW_PART = 2**11  # a weight is split into a multiple of this and a remainder


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Converts images [b, H, W, 3] in [0, 1] to the input of a vision tower: resized, cropped or
    padded to a square, and normalized per channel as for CLIP. An instance is called with images.

    Attributes:
        size: Height and width of the result in pixels.
        kernel: Resampling kernel, with antialiasing: "bilinear" or "bicubic".
        eight_bit: Whether to work on 8-bit images, as Pillow does: the image times 255 is rounded
            to integers (half to even), then resized along the width, then along the height, each
            time with rounding (half up). Each of these three results is clipped to 0 to 255. The
            last one is divided by 255 and normalized. False: as PyTorch does, without rounding and
            clipping.
        fit: How an image becomes square. "crop": its shorter edge is resized to `size`, and the
            center is kept. "pad": its longer edge is resized to `size`, and black is added on both
            sides before the normalization (of an odd number of pixels, one more at the right or
            bottom).
        crop_rounding: For "crop", how the position of the left or top edge is rounded if an odd
            number of pixels is cut off: "down" as in transformers, or "even" (half to even) as in
            torchvision.
    """

    size: int
    kernel: Kernel
    eight_bit: bool
    fit: Literal["crop", "pad"]
    crop_rounding: Literal["down", "even"] = "even"

    def __call__(self, images: Float[Array, "b H W 3"]) -> Float[Array, "b size size 3"]:
        """Resizes images, crops or pads them (`fit`) to `size` by `size` pixels, and normalizes
        them.

        Args:
            images: Finite RGB images in [0, 1], of any size and floating-point dtype.

        Returns:
            The pixels, float32, minus the mean of CLIP's training images and divided by their
            standard deviation, per channel. With the field `eight_bit`, images are rounded to 8
            bits, which has no gradient, so the pixels have the gradient of the same resize without
            rounding and clipping.
        """
        height, width = images.shape[1:3]
        resized_height, resized_width = self.resized_size(height, width)
        row_matrix = self._matrix(height, resized_height)
        column_matrix = self._matrix(width, resized_width)
        x = images.astype(jnp.float32)
        resized = _resample(x, column_matrix, "bHWc,wW->bHwc")
        resized = _resample(resized, row_matrix, "bHwc,hH->bhwc")
        if self.eight_bit:
            x = jnp.clip(jnp.round(255 * x), 0, 255)
            x = _resample_8bit(x, column_matrix, "bHWc,wW->bHwc")
            x = _resample_8bit(x, row_matrix, "bHwc,hH->bhwc") / 255
            resized = _straight_through(resized, x)
        return (resized - MEAN) / STD

    def resized_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size to which an image is resized, before cropping or padding.

        Args:
            height: Height of the image in pixels.
            width: Width of the image in pixels.

        Returns:
            (height, width) in pixels. With `fit` "crop", the shorter edge is `size` and the longer
            one rounded down. With "pad", the longer edge is `size` and the shorter one rounded to
            the nearest integer (half to even), at least 1.
        """
        if self.fit == "pad":
            scale = self.size / max(height, width)
            return max(1, round(height * scale)), max(1, round(width * scale))
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)

    def _matrix(self, n_in: int, n_out: int) -> Float[np.ndarray, "size n_in"]:
        """Returns the matrix that resizes one axis of images, then crops or pads it to `size`
        pixels.

        Args:
            n_in: Number of pixels of the image along the axis.
            n_out: Number of pixels after resizing, before cropping or padding.

        Returns:
            The weight of each input pixel in each output pixel, [size, n_in], float64. Rows of
            padding are zero.
        """
        matrix = resize_matrix(n_in, n_out, self.kernel)
        if self.fit == "pad":
            before = (self.size - n_out) // 2
            return np.pad(matrix, ((before, self.size - n_out - before), (0, 0)))
        spare = n_out - self.size
        first = spare // 2 if self.crop_rounding == "down" else round(spare / 2)
        return matrix[first : first + self.size]


def resize_matrix(n_in: int, n_out: int, kernel: Kernel) -> Float[np.ndarray, "n_out n_in"]:
    """Returns the matrix that resizes one axis of images: the weight of each input pixel in each
    output pixel.

    As in Pillow and PyTorch with antialiasing: the kernel of output pixel i is centered at `(i +
    0.5) n_in / n_out`, and input pixel j is at j + 0.5; when an image shrinks, the kernel is
    widened by the same factor, and at the border it is cut off and rescaled.

    Args:
        n_in: Number of input pixels.
        n_out: Number of output pixels.
        kernel: Resampling kernel: "bilinear" or "bicubic".

    Returns:
        The weights [n_out, n_in] in float64. Rows sum to 1. Some weights are negative for
        "bicubic".
    """
    scale = n_in / n_out
    widening = max(scale, 1.0)
    center = (np.arange(n_out) + 0.5) * scale
    reach = SUPPORT[kernel] * widening
    first = np.maximum(np.floor(center - reach + 0.5), 0)
    last = np.minimum(np.floor(center + reach + 0.5), n_in)  # exclusive
    inputs = np.arange(n_in)
    weights = _kernel(np.abs(inputs + 0.5 - center[:, None]) / widening, kernel)
    weights = np.where((inputs >= first[:, None]) & (inputs < last[:, None]), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def _kernel(x: np.ndarray, kernel: Kernel) -> np.ndarray:
    """Evaluates a resampling kernel.

    Args:
        x: Distances in pixels, divided by the factor by which the kernel is widened; not negative,
            of any shape.
        kernel: "bilinear" (zero from distance 1 on), or "bicubic" (Keys' kernel with a = -1/2, zero
            from distance 2 on).

    Returns:
        The weights, of the shape of `x`: 1 at the distance 0. They are not yet scaled to the sum 1.
    """
    if kernel == "bilinear":
        return np.maximum(1 - x, 0)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


@jax.custom_jvp
def _straight_through(smooth: Array, rounded: Array) -> Array:
    """Returns `rounded` with the gradient of `smooth` (a straight-through estimator).

    XLA does not compute `smooth` in programs that take no gradient.

    Args:
        smooth: An array that the gradient is taken of.
        rounded: An array of the same shape and dtype, whose own gradient is dropped.
    """
    return rounded


@_straight_through.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Computes the derivative of `_straight_through`: the value is the second argument, the tangent
    that of the first.

    Args:
        primals: The two arguments.
        tangents: Their tangents, of which the second one is not used.

    Returns:
        The value and its tangent.
    """
    return primals[1], tangents[0]


def _resample(x: Array, matrix: np.ndarray, axes: str) -> Array:
    """Resizes one axis of images by a matrix, in full float32 on every backend.

    Args:
        x: Images in float32.
        matrix: The resizing matrix, [pixels out, pixels in]. It is rounded to float32.
        axes: An einsum of images and matrix that selects the axis: "bHWc,wW->bHwc" for the width,
            "bHwc,hH->bhwc" for the height.

    Returns:
        The resized images in float32.
    """
    # in full float32, also on backends whose default is less
    return jnp.einsum(axes, x, matrix.astype(np.float32), precision=jax.lax.Precision.HIGHEST)


def _resample_8bit(x: Array, matrix: np.ndarray, axes: str) -> Array:
    """Resizes one axis of 8-bit images by a matrix, with exactly the result of Pillow.

    Pillow sums integers that float32 cannot represent exactly. Here each weight is split into a
    multiple of 2**-11 and a remainder. The sum over each part is exact in float32 if no output
    pixel has more than 64 input pixels, thus for reductions of up to 16 times ("bicubic") or 32
    times ("bilinear"). Both sums are added as int32, rounded half up and clipped. So the result has
    the same bits on every backend. For greater reductions, the sums may be rounded, and the result
    may differ from that of Pillow.

    Args:
        x: Images in float32 with the values 0, 1, ..., 255.
        matrix: The resizing matrix, [pixels out, pixels in]. Its weights are rounded to multiples
            of 2**-22, as in Pillow.
        axes: An einsum of images and matrix that selects the axis: "bHWc,wW->bHwc" for the width,
            "bHwc,hH->bhwc" for the height.

    Returns:
        The resized images in float32, with the values 0, 1, ..., 255. Their gradient is zero.
    """
    weights = np.trunc(matrix * 2**PILLOW_BITS + np.copysign(0.5, matrix))
    upper = np.round(weights / LOW_PART)
    lower = weights - upper * LOW_PART
    upper_sum = _resample(x, upper, axes).astype(jnp.int32)
    lower_sum = _resample(x, lower, axes).astype(jnp.int32)
    half = 2 ** (PILLOW_BITS - 1)
    total = (upper_sum * LOW_PART + lower_sum + half) >> PILLOW_BITS
    return jnp.clip(total, 0, 255).astype(jnp.float32)
