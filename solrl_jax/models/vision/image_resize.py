"""Preprocessing of images for a vision tower: resizing, cropping or padding, and normalisation.

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
    """Converts images [b, H, W, 3] in [0, 1] to normalised pixels [b, size, size, 3], float32.

    Attributes:
        size: Side of the result in pixels.
        kernel: Resampling kernel: "bilinear" or "bicubic".
        eight_bit: Whether to clip and round to 8 bits as Pillow does; otherwise the result is
            PyTorch's, which is not clipped.
        fit: "crop": the shorter edge becomes `size` and the centre is kept. "pad": the longer edge
            becomes `size`, with black around the image, which is in the centre.
        odd: How half a pixel at the left or top edge of a crop is rounded: "down" as in
            transformers, "even" (to the even number of pixels) as in torchvision. With "pad" it has
            no effect: half a pixel before the image is rounded down.
    """

    size: int
    kernel: Kernel
    eight_bit: bool
    fit: Literal["crop", "pad"]
    odd: Literal["down", "even"] = "even"

    def __call__(self, images: Float[Array, "b H W 3"]) -> Float[Array, "b size size 3"]:
        """Resizes images, crops or pads them to a square, and normalises them.

        Args:
            images: RGB in [0, 1], of any floating-point dtype. With `eight_bit`, other values are
                clipped.

        Returns:
            The pixels, float32, less the mean of CLIP's training images and divided by their
            standard deviation, by channel.
        """
        height, width = images.shape[1:3]
        resized_height, resized_width = self.resized(height, width)
        row_matrix = self._matrix(height, resized_height)
        column_matrix = self._matrix(width, resized_width)
        x = images.astype(jnp.float32)
        if self.eight_bit:
            x = jnp.clip(jnp.round(255 * x), 0, 255)
            x = _resample_8bit(x, column_matrix, "bHWc,wW->bHwc")
            x = _resample_8bit(x, row_matrix, "bHwc,hH->bhwc") / 255
        else:
            x = _resample(x, column_matrix, "bHWc,wW->bHwc")
            x = _resample(x, row_matrix, "bHwc,hH->bhwc")
        return (x - MEAN) / STD

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width in pixels after resizing, before cropping or padding.

        With `fit` "crop", the shorter edge becomes `size`, and the longer edge is rounded down.
        With "pad", the longer edge becomes `size`, and the shorter edge is rounded to the nearest
        integer.

        Args:
            height: Height of the image in pixels.
            width: Width of the image in pixels.

        Returns:
            The height, then the width: one of them is `size`, and the other at least (with "crop")
            or at most (with "pad") `size`.
        """
        if self.fit == "pad":
            scale = self.size / max(height, width)
            return round(height * scale), round(width * scale)
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)

    def _matrix(self, n_in: int, n_out: int) -> Float[np.ndarray, "size n_in"]:
        """Returns the matrix that resizes one axis and then crops or pads it to `size` pixels.

        Args:
            n_in: Number of pixels of the image along the axis.
            n_out: Number of pixels to resize to, before cropping or padding: at least `size` with
                "crop", at most `size` with "pad".

        Returns:
            The weights of the input pixels in each output pixel, float64. A row for padding is
            zero.
        """
        matrix = resize_matrix(n_in, n_out, self.kernel)
        if self.fit == "pad":
            before = (self.size - n_out) // 2
            return np.pad(matrix, ((before, self.size - n_out - before), (0, 0)))
        spare = n_out - self.size
        first = spare // 2 if self.odd == "down" else round(spare / 2)
        return matrix[first : first + self.size]


def resize_matrix(n_in: int, n_out: int, kernel: Kernel) -> Float[np.ndarray, "n_out n_in"]:
    """Returns the weight of each input pixel in each output pixel along one axis.

    The centre of output i is at `(i + 1/2) n_in / n_out`. Where the image shrinks, the kernel is
    widened by the same factor (antialiasing). At the border the kernel is cut off, and the
    remaining weights are scaled up.

    Args:
        n_in: Number of input pixels.
        n_out: Number of output pixels.
        kernel: Resampling kernel: "bilinear" or "bicubic".

    Returns:
        The weights in float64. Rows sum to 1. Some are negative for "bicubic".
    """
    scale = n_in / n_out
    widening = max(scale, 1.0)
    centre = (np.arange(n_out) + 0.5) * scale
    reach = SUPPORT[kernel] * widening
    first = np.maximum(np.floor(centre - reach + 0.5), 0)
    last = np.minimum(np.floor(centre + reach + 0.5), n_in)  # exclusive
    inputs = np.arange(n_in)
    weights = _kernel(np.abs(inputs + 0.5 - centre[:, None]) / widening, kernel)
    weights = np.where((inputs >= first[:, None]) & (inputs < last[:, None]), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def _kernel(x: np.ndarray, kernel: Kernel) -> np.ndarray:
    """Returns the weights of a resampling kernel, not yet scaled to the sum 1.

    Args:
        x: Distances in pixels of the kernel, not negative, of any shape.
        kernel: "bilinear", or "bicubic", which is Keys' kernel with a = -1/2 (doi
            10.1109/TASSP.1981.1163711). They are zero from the distance 1 or 2 on.

    Returns:
        An array of the shape of `x`. The weight at the distance 0 is 1.
    """
    if kernel == "bilinear":
        return np.maximum(1 - x, 0)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _resample(x: Array, matrix: np.ndarray, axes: str) -> Array:
    """Multiplies images by a resizing matrix along one axis, in full float32 on every backend.

    Args:
        x: Images in float32.
        matrix: The resizing matrix, [pixels out, pixels in]. It is rounded to float32.
        axes: The einsum of image and matrix, which says the axis: "bHWc,wW->bHwc" resizes the
            width, and "bHwc,hH->bhwc" the height.

    Returns:
        The images in float32, with the number of output pixels along this axis.
    """
    # in full float32, also on backends whose default is less
    return jnp.einsum(axes, x, matrix.astype(np.float32), precision=jax.lax.Precision.HIGHEST)


def _resample_8bit(x: Array, matrix: np.ndarray, axes: str) -> Array:
    """Resamples the levels 0, 1, ..., 255 (as float32) along one axis as Pillow does, exactly.

    Pillow's sums do not fit into float32, but the sums over the upper and over the lower parts of
    the weights do. They are exact in any order, hence the same on every backend and in every batch.

    Args:
        x: Images with values 0, 1, ..., 255 in float32.
        matrix: The resizing matrix, [pixels out, pixels in]. Its weights are rounded to multiples
            of 2**-22, as Pillow's are.
        axes: The einsum of image and matrix, which says the axis: "bHWc,wW->bHwc" resizes the
            width, and "bHwc,hH->bhwc" the height.

    Returns:
        The images, rounded and clipped to 0, 1, ..., 255, in float32.
    """
    weights = np.trunc(matrix * 2**PILLOW_BITS + np.copysign(0.5, matrix))
    upper = np.round(weights / LOW_PART)
    lower = weights - upper * LOW_PART
    upper_sum = _resample(x, upper, axes).astype(jnp.int32)
    lower_sum = _resample(x, lower, axes).astype(jnp.int32)
    half = 2 ** (PILLOW_BITS - 1)
    total = (upper_sum * LOW_PART + lower_sum + half) >> PILLOW_BITS
    return jnp.clip(total, 0, 255).astype(jnp.float32)
