"""Two-dimensional convolutions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.parameter import param
from solrl_jax.quant import compile_target
from solrl_jax.quant.gated_conv import convolved


class Conv(nnx.Module):
    """A 2-D convolution with zero padding of `kernel // 2`: stride 1 keeps the size, stride 2 halves an even one."""

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
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(
            scale(rngs.params(), (kernel, kernel, n_in, n_out), jnp.float32), "weight", "conv"
        )
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.stride = stride
        self.padding = kernel // 2

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        y = jax.lax.conv_general_dilated(
            x, self.kernel.get_value().astype(x.dtype), (self.stride, self.stride), [(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)

    def apply_upsampled(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b 2*h 2*w n_out"]:
        """The convolution (stride 1) of `x` with each pixel as a square of 2 x 2."""
        if compile_target.platform() == "cpu":
            return self(x.repeat(2, axis=1).repeat(2, axis=2))
        y = conv_upsampled(x, self.kernel.get_value())
        # written in the dtype of `x`: XLA would write the float32 that a norm after it reads
        return jax.lax.optimization_barrier(
            y if self.bias is None else y + self.bias.get_value().astype(x.dtype)
        )


def conv_upsampled(
    x: Float[Array, "b h w n_in"], kernel: Float[Array, "3 3 n_in n_out"]
) -> Float[Array, "b 2*h 2*w n_out"]:
    """A 3x3 convolution of `x` with each pixel as a square of 2 x 2, as one transposed convolution.

    A tap of it is the sum of those that meet the same pixel: four products for nine, and no squares in memory. A CPU is slower
    so.
    """
    wide = jnp.pad(kernel.astype(jnp.float32), ((1, 1), (1, 1), (0, 0), (0, 0)))
    rows = wide[:-1] + wide[1:]
    taps = (rows[:, :-1] + rows[:, 1:]).astype(x.dtype)
    # turned twice: XLA knows a transposed convolution for cuDNN by a kernel that is turned
    turned = jax.lax.rev(jax.lax.optimization_barrier(jax.lax.rev(taps, (0, 1))), (0, 1))
    return jax.lax.conv_general_dilated(
        x, turned, (1, 1), [(2, 2)] * 2, lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip


class DepthwiseConv(nnx.Module):
    """A convolution with one `kernel` x `kernel` filter for each channel; stride 1, zero padding."""

    def __init__(self, channels: int, kernel: int, *, bias: bool = True, rngs: nnx.Rngs):
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(
            scale(rngs.params(), (kernel, kernel, 1, channels), jnp.float32), "weight", "conv"
        )
        self.bias = param(jnp.zeros(channels), "bias") if bias else None

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        bias = None if self.bias is None else self.bias.get_value()
        return convolved(x, self.kernel.get_value(), bias)
