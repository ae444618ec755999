"""The feed-forward layers (MLPs) of the networks."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation
from solrl_jax.models.layers.conv import DepthwiseConv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.quant.gated_conv import gated_conv


def silu_gate(gate: Float[Array, "..."], value: Float[Array, "..."]) -> Float[Array, "..."]:
    """`silu(gate) * value`, the middle of a SiLU-gated linear unit (SwiGLU, arXiv 2002.05202).

    Args:
        gate: The first factor before its SiLU, which is applied here.
        value: The second factor, of the same shape.

    Returns:
        The product, of the shape of both factors and, if they have one dtype, in that dtype.
    """
    return jax.nn.silu(gate) * value


class FeedForward(nnx.Module):
    """A linear layer to four times the width, GELU (tanh form, arXiv 1606.08415), a linear layer
    back.

    `net` is a list in PyTorch, whose index 1 is a dropout layer.

    Args:
        d: The number of input and output features.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        layers: dict[str, Any] = {
            "0": nnx.Dict(proj=Linear(d, 4 * d, rngs=rngs)),
            "2": Linear(4 * d, d, rngs=rngs),
        }
        self.net = nnx.Dict(layers)

    def __call__(self, x: Activation) -> Float[Array, "b s d"]:
        """Applies a linear layer to four times the width, GELU and a linear layer back. The input
        is not added.

        Args:
            x: The tokens [b, s, d], an array or a lazy activation.

        Returns:
            An array of the shape and dtype of `x`, even for a lazy input.
        """
        return self.net["2"](self.net["0"].proj.activated(x, jax.nn.gelu))


class GatedFeedForward(nnx.Module):
    """A SiLU-gated linear unit (arXiv 2002.05202): `w2(silu(w1(x)) * w3(x))`, without biases.

    Args:
        d: The number of input and output features.
        hidden: The number of hidden features.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.w1, self.w3 = (Linear(d, hidden, bias=False, rngs=rngs) for _ in range(2))
        self.w2 = Linear(hidden, d, bias=False, rngs=rngs)

    def __call__(self, x: Activation) -> Float[Array, "b s d"]:
        """Computes `w2(silu(w1(x)) * w3(x))` for each token. The input is not added.

        Args:
            x: The tokens [b, s, d], an array or a lazy activation.

        Returns:
            An array of the shape and dtype of `x`, even for a lazy input.
        """
        return self.w2(self.w1.lazy(x).combine(silu_gate, self.w3.lazy(x)))


class FusedGatedFeedForward(nnx.Module):
    """`GatedFeedForward` whose gate and value come from one linear layer, the gate first.

    It computes `linear_out(silu(gate) * value)`, without biases.

    Args:
        d: The number of input and output features.
        hidden: The number of hidden features, which is half the output of the first linear layer.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.linear_in = Linear(d, 2 * hidden, bias=False, rngs=rngs)
        self.linear_out = Linear(hidden, d, bias=False, rngs=rngs)
        self.hidden = hidden

    def __call__(self, x: Activation) -> Float[Array, "b s d"]:
        """Computes `linear_out(silu(gate) * value)` for each token, where `linear_in(x)` is the
        gate, then the value. The input is not added.

        Args:
            x: The tokens [b, s, d], an array or a lazy activation.

        Returns:
            An array of the shape and dtype of `x`, even for a lazy input.
        """
        gate, value = self.linear_in.lazy(x).split_columns(self.hidden, self.hidden)
        return self.linear_out(gate.combine(silu_gate, value))


class GLUMBConv(nnx.Module):
    """SANA's gated MLP with a depthwise 3x3 convolution inside (arXiv 2410.10629, section 2.2).

    A 1x1 convolution to `2 * hidden` channels, SiLU, the depthwise convolution, the product of its
    first half with the SiLU of its second half, and a 1x1 convolution back, without a bias. The
    input is not added. The class has the name of its counterpart in diffusers.

    Args:
        d: The number of input and output features.
        hidden: The number of features after the gate.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.conv_inverted = Linear(d, 2 * hidden, layout="pointwise", rngs=rngs)
        self.conv_depth = DepthwiseConv(2 * hidden, 3, rngs=rngs)
        self.conv_point = Linear(hidden, d, bias=False, layout="pointwise", rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        """Applies the gated MLP with a depthwise convolution to images. The input is not added.

        Args:
            x: The images.

        Returns:
            An array of the shape and dtype of `x`.
        """
        b, h, w, d = x.shape
        return self.on_tokens(x.reshape(b, h * w, d), (h, w)).reshape(b, h, w, -1)

    def on_tokens(self, x: Activation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """Applies the gated MLP with a depthwise convolution to images that are given as tokens.

        Args:
            x: The pixels [b, n, d], row by row, an array or a lazy activation.
            grid: The number of rows and of columns of the image, whose product is n.

        Returns:
            The output [b, n, d], to which the input is not added, in the dtype of `x`.
        """
        bias = self.conv_depth.bias
        assert bias is not None
        kernel = self.conv_depth.kernel.get_value()
        hidden = gated_conv(self.conv_inverted.lazy(x), grid, kernel, bias.get_value())
        return self.conv_point(hidden)
