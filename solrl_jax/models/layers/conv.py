"""Two-dimensional convolutions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.parameter import param
from solrl_jax.quant import compile_target
from solrl_jax.quant.gated_conv import depthwise_conv

_LAYOUT = ("NHWC", "HWIO", "NHWC")  # of inputs, kernels and outputs


class Conv(nnx.Module):
    """A 2-D convolution of images [b, h, w, channels], with zero padding of `kernel // 2` on each
    side.

    It computes in the dtype of its input. The weight is [kernel, kernel, n_in, n_out]. The bias is
    zero at first.

    Args:
        n_in: The number of input channels.
        n_out: The number of output channels.
        kernel: The side of the kernel, an odd number.
        stride: The stride. 1 keeps the size of images, 2 halves it, rounded up.
        bias: Whether to add a bias.
        rngs: Random number generators for the initial weight, which has PyTorch's default
            distribution.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        *,
        stride: int = 1,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        shape = (kernel, kernel, n_in, n_out)
        self.kernel = param(init(rngs.params(), shape, jnp.float32), "weight", "conv")
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.stride = stride
        self.padding = kernel // 2

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        """Convolves images, zero-padded on each side by half of the kernel's side (rounded down).
        Adds the bias if there is one.

        Args:
            x: The images, with `n_in` channels.

        Returns:
            Images with `n_out` channels, in the dtype of `x`. With stride 1 they have the size of
            `x`; with stride 2, half of it, rounded up.
        """
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel.get_value().astype(x.dtype),
            window_strides=(self.stride, self.stride),
            padding=[(self.padding, self.padding)] * 2,
            dimension_numbers=_LAYOUT,
        )
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)

    def apply_upsampled(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b 2*h 2*w n_out"]:
        """Upsamples `x` by two with nearest-neighbor interpolation and convolves it. The bias is
        added, if there is one.

        For layers with a 3x3 kernel and stride 1, which is not checked. Except on CPUs, both steps
        are one transposed convolution (`conv_upsampled`), which needs no upsampled image in memory,
        but rounds differently than the two steps would.

        Args:
            x: The images before upsampling.

        Returns:
            The images, twice as high and wide as `x`, in the dtype of `x`.
        """
        if compile_target.platform() == "cpu":
            return self(x.repeat(2, axis=1).repeat(2, axis=2))
        y = conv_upsampled(x, self.kernel.get_value())
        if self.bias is not None:
            y = y + self.bias.get_value().astype(x.dtype)
        # Without the barrier, XLA would write the float32 that a norm after this layer reads.
        return jax.lax.optimization_barrier(y)


def conv_upsampled(
    x: Float[Array, "b h w n_in"], kernel: Float[Array, "3 3 n_in n_out"]
) -> Float[Array, "b 2*h 2*w n_out"]:
    """Upsamples `x` by two (nearest neighbor) and applies a 3x3 convolution, both as one transposed
    convolution.

    Where several taps of the kernel read copies of the same pixel of `x`, their sum, rounded to the
    dtype of `x`, is one tap of the transposed convolution. Each output pixel then takes four taps
    instead of nine, and there is no upsampled image in memory. On a CPU it is slower than two
    separate steps.

    Args:
        x: The images before upsampling.
        kernel: The kernel of the 3x3 convolution, with stride 1 and zero padding of 1.

    Returns:
        The convolved images, twice as high and wide as `x`, in the dtype of `x`.
    """
    padded = jnp.pad(kernel.astype(jnp.float32), ((1, 1), (1, 1), (0, 0), (0, 0)))
    rows = padded[:-1] + padded[1:]
    taps = (rows[:, :-1] + rows[:, 1:]).astype(x.dtype)
    # The kernel is reversed twice because XLA recognizes a transposed convolution, which cuDNN then
    # runs natively, by the reversal of its kernel.
    reversed_taps = jax.lax.optimization_barrier(jax.lax.rev(taps, (0, 1)))
    return jax.lax.conv_general_dilated(
        x,
        jax.lax.rev(reversed_taps, (0, 1)),
        window_strides=(1, 1),
        padding=[(2, 2)] * 2,
        lhs_dilation=(2, 2),
        dimension_numbers=_LAYOUT,
    )


class DepthwiseConv(nnx.Module):
    """A convolution with one filter per channel, stride 1 and zero padding.

    Images keep their size. It computes in float32 and rounds once, to the dtype of its input (on a
    TPU, the filters for BF16 images may be rounded to BF16 first). The bias is zero at first.

    Args:
        channels: The number of channels.
        kernel: The side of the filters, an odd number.
        bias: Whether to add a bias.
        rngs: Random number generators for the initial weight, which has PyTorch's default
            distribution.
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = True, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        shape = (kernel, kernel, 1, channels)
        self.kernel = param(init(rngs.params(), shape, jnp.float32), "weight", "conv")
        self.bias = param(jnp.zeros(channels), "bias") if bias else None

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        """Convolves each channel, padded with zeros, with the filter of the channel, and adds the
        bias if there is one.

        Args:
            x: The images.

        Returns:
            An array of the shape and dtype of `x`.
        """
        bias = None if self.bias is None else self.bias.get_value()
        return depthwise_conv(x, self.kernel.get_value(), bias)
