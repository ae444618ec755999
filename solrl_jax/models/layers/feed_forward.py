"""Feed-forward layers."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.conv import DepthwiseConv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.quant.gated_conv import gated_conv
from solrl_jax.quant.lazy import LazyActivation


class GLUMBConv(nnx.Module):
    """SANA's gated MLP with a depthwise 3x3 convolution inside: `GLUMBConv` of diffusers (arXiv 2410.10629, section 2.2)."""

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.conv_inverted = Linear(d, 2 * hidden, layout="pointwise", rngs=rngs)
        self.conv_depth = DepthwiseConv(2 * hidden, 3, rngs=rngs)
        self.conv_point = Linear(hidden, d, bias=False, layout="pointwise", rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        b, h, w, _ = x.shape
        return self.of(LazyActivation.of(x.reshape(b, h * w, -1)), (h, w)).reshape(b, h, w, -1)

    def of(self, x: LazyActivation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """The same of n pixels that need not be in memory. grid: their rows and columns."""
        bias = self.conv_depth.bias
        assert bias is not None
        taps = self.conv_depth.kernel.get_value()
        return self.conv_point(
            gated_conv(self.conv_inverted.pending(x), grid, taps, bias.get_value())
        )


def gated(gate: Float[Array, "..."], value: Float[Array, "..."]) -> Float[Array, "..."]:
    """A SiLU-gated linear unit's middle (arXiv 2002.05202): `silu(gate) value`."""
    return jax.nn.silu(gate) * value
