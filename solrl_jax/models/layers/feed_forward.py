"""The feed-forward layers (MLPs) of the networks."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation, as_lazy
from solrl_jax.models.layers.conv import DepthwiseConv
from solrl_jax.models.layers.linear import Linear
from solrl_jax.quant.gated_conv import gated_conv


def silu_gate(gate: Float[Array, "..."], value: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `silu(gate) * value`, the gate of a SwiGLU layer (arXiv 2002.05202).

    Args:
        gate: The factor to which SiLU is applied.
        value: The other factor, of the same shape and dtype.

    Returns:
        The product, of the same shape and dtype.
    """
    return jax.nn.silu(gate) * value


class FeedForward(nnx.Module):
    """An MLP: linear layer, GELU (tanh form, arXiv 1606.08415), linear layer.

    Both linear layers have biases. In checkpoints, they are `net.0.proj` and `net.2`.

    Args:
        d: The number of input and output features.
        hidden: The number of hidden features. None: `4 d`.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int | None = None, *, rngs: nnx.Rngs):
        hidden = hidden or 4 * d
        layers: dict[str, Any] = {
            "0": nnx.Dict(proj=Linear(d, hidden, rngs=rngs)),
            "2": Linear(hidden, d, rngs=rngs),
        }
        self.net = nnx.Dict(layers)

    def __call__(self, x: Activation) -> Float[Array, "b s d"]:
        """Applies the MLP to each token. The input is not added.

        Args:
            x: The tokens [b, s, d], an array or a lazy activation (one that is computed when it is
                read).

        Returns:
            An array of the shape and dtype of `x`, even for a lazy input.
        """
        return self.net["2"](self.net["0"].proj.activated(x, jax.nn.gelu))


class GatedFeedForward(nnx.Module):
    """A gated MLP (SwiGLU, arXiv 2002.05202): `w2(silu(w1(x)) * w3(x))` with three linear layers
    without biases.

    Args:
        d: The number of input and output features.
        hidden: The number of hidden features, which `w1` and `w3` return.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.w1, self.w3 = (Linear(d, hidden, bias=False, rngs=rngs) for _ in range(2))
        self.w2 = Linear(hidden, d, bias=False, rngs=rngs)

    def __call__(self, x: Activation) -> Float[Array, "b s d"]:
        """Computes `w2(silu(w1(x)) * w3(x))` for each token. The input is not added.

        Args:
            x: The tokens [b, s, d], an array or a lazy activation (one that is computed when it is
                read).

        Returns:
            An array of the shape and dtype of `x`, even for a lazy input.
        """
        return self.w2(self.w1.lazy(x).combine(silu_gate, self.w3.lazy(x)))


class FusedGatedFeedForward(nnx.Module):
    """A gated MLP (SwiGLU) in which one linear layer computes both gate and value.

    It computes `linear_out(silu(gate) * value)`, where gate is the first and value the second half
    of `linear_in(x)`. There are no biases.

    Args:
        d: The number of input and output features.
        hidden: The number of hidden features. `linear_in` returns twice as many.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.linear_in = Linear(d, 2 * hidden, bias=False, rngs=rngs)
        self.linear_out = Linear(hidden, d, bias=False, rngs=rngs)
        self.hidden = hidden

    def __call__(self, x: Activation) -> Float[Array, "b s d"]:
        """Computes `linear_out(silu(gate) * value)` for each token, where gate is the first and
        value the second half of `linear_in(x)`. The input is not added.

        Args:
            x: The tokens [b, s, d], an array or a lazy activation (one that is computed when it is
                read).

        Returns:
            An array of the shape and dtype of `x`, even for a lazy input.
        """
        gate, value = self.linear_in.lazy(x).split_columns(self.hidden, self.hidden)
        return self.linear_out(gate.combine(silu_gate, value))


class GLUMBConv(nnx.Module):
    """SANA's gated MLP with a depthwise 3x3 convolution inside (arXiv 2410.10629, section 2.2).

    A 1x1 convolution to `2 * hidden` channels is followed by SiLU and the depthwise convolution.
    The first half of its channels is multiplied by SiLU of the second half, and a 1x1 convolution
    leads back to d channels. Only this last convolution has no bias. The input is not added. The
    name is that of diffusers.

    Args:
        d: The number of input and output features.
        hidden: The number of channels after the gate.
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
        """Applies the gated MLP to images whose pixels are given as tokens. The input is not added.

        Args:
            x: The pixels [b, n, d], row by row, an array or a lazy activation (one that is computed
                when it is read).
            grid: (rows, columns) of the image, whose product is n. Under sequence parallelism, `x`
                and `grid` describe the rows that this device has; the rows next to them, which the
                convolution reads, are fetched from other devices.

        Returns:
            The output [b, n, d], in the dtype of `x`.
        """
        bias = self.conv_depth.bias
        assert bias is not None
        kernel = self.conv_depth.kernel.get_value()
        pixels = dataclasses.replace(as_lazy(x), grid=grid)
        hidden = gated_conv(self.conv_inverted.lazy(pixels), grid, kernel, bias.get_value())
        return self.conv_point(hidden)
