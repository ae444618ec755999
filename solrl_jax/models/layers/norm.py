"""Normalisation layers."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from solrl_jax.models.layers.parameter import param
from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import LazyActivation, layer_norm
from solrl_jax.quant.leaf import MATMUL


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis (arXiv 1607.06450), float32 inside. affine: with a weight and a bias."""

    def __init__(self, features: int, *, eps: float, affine: bool = True):
        self.scale = param(jnp.ones(features), "weight") if affine else None
        self.bias = param(jnp.zeros(features), "bias") if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = layer_norm(x.astype(jnp.float32), self.eps)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale.get_value().astype(jnp.float32) + self.bias.get_value().astype(
                jnp.float32
            )
        return y.astype(x.dtype)

    def pending(self, x: Float[Array, "b s d"]) -> LazyActivation:
        """The same, not in memory yet."""
        norm = partial(layer_norm, eps=self.eps, width=x.shape[-1])
        return LazyActivation.of(x).map(norm) if self.scale is None else LazyActivation.of(self(x))


def rms_norm(
    x: Float[Array, "... d"],
    scale: Float[Array, "..."],
    eps: float,
    width: int | None = None,
    keep: bool = False,
) -> Float[Array, "... d"]:
    """`scale x / rms(x)` in float32.

    width: that of `x` before zeros filled it up. keep: sums of squares are written to memory, and kept for the gradient.
    """
    x32 = x.astype(jnp.float32)
    n = x.shape[-1] if width is None else width
    squares = (x32**2).sum(-1, keepdims=True)
    if keep:
        squares = checkpoint_name(jax.lax.optimization_barrier(squares), MATMUL)
    return x32 * jax.lax.rsqrt(squares / n + eps) * scale


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467): `x / rms(x) * (offset + scale) + bias`, in float32.

    offset: 1 where the file stores the weight minus one (Gemma), else 0.
    """

    def __init__(self, features: int, *, eps: float, bias: bool = False, offset: float = 0.0):
        self.scale = param(jnp.full(features, 1.0 - offset), "weight")
        self.bias = param(jnp.zeros(features), "bias") if bias else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = rms_norm(x, self.offset + self.scale.get_value().astype(jnp.float32), self.eps)
        if self.bias is not None:
            y = y + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)

    def pending(self, x: Float[Array, "b s d"]) -> LazyActivation:
        """The same without a bias, not in memory yet."""

        def f(y, scale):
            return rms_norm(y, self.offset + scale, self.eps, x.shape[-1]).astype(y.dtype)

        return LazyActivation.of(x).map(f, self.scale.get_value()[None, None])

    def by_head(self, x: LazyActivation) -> LazyActivation:
        """The same of each head, where heads lie side by side."""

        def heads(x, scale):
            return x.reshape(*x.shape[:-1], -1, scale.shape[-1])

        keep = (
            x.exact and compile_target.platform() == "gpu"
        )  # there it saves a pass over `x` (docs/compiled.md)

        def f(x, scale):
            return (
                rms_norm(heads(x, scale), scale, self.eps, keep=keep)
                .astype(x.dtype)
                .reshape(x.shape)
            )

        return x.map(f, self.scale.get_value()[None, None])
