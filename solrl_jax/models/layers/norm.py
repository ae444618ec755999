"""Normalization layers. All of them compute in float32."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation
from solrl_jax.models.layers.heads import split_heads
from solrl_jax.models.layers.modulation import Modulate, modulate
from solrl_jax.models.layers.parameter import param
from solrl_jax.quant import compile_target
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.leaf import MATMUL


def layer_norm(
    x: Float[Array, "... n"], eps: float, width: int | None = None
) -> Float[Array, "... n"]:
    """Applies layer normalization over the last axis (arXiv 1607.06450), without weights. It
    computes in float32.

    Args:
        x: The input, of any floating-point dtype.
        eps: Added to the variance.
        width: The number of leading columns that are not padding, over which mean and variance are
            taken. Kernels pad rows with zeros. The padding must be zero, and stays zero. None: all
            columns.

    Returns:
        The normalized input, in the dtype of `x`.
    """
    x32 = x.astype(jnp.float32)
    n = x.shape[-1] if width is None else width
    centered = x32 - x32.sum(-1, keepdims=True) / n
    if n < x.shape[-1]:
        column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        centered = jnp.where(column < n, centered, 0.0)
    variance = (centered**2).sum(-1, keepdims=True) / n
    return (centered * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis (arXiv 1607.06450).

    It computes in float32 and rounds once, to the dtype of its input. The weight `scale` is 1 and
    the bias 0 at first.

    Args:
        features: The size of the last axis.
        eps: Added to the variance.
        affine: Whether there are a weight and a bias.
    """

    def __init__(self, features: int, *, eps: float, affine: bool = True):
        self.scale = param(jnp.ones(features), "weight") if affine else None
        self.bias = param(jnp.zeros(features), "bias") if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Subtracts the mean of the last axis and divides by the standard deviation. Then applies
        weight and bias if the norm has them.

        Args:
            x: An array of any rank and floating-point dtype.

        Returns:
            An array of the shape and dtype of `x`, computed in float32 and rounded once.
        """
        y = layer_norm(x.astype(jnp.float32), self.eps)
        if self.scale is not None and self.bias is not None:
            scale = self.scale.get_value().astype(jnp.float32)
            y = y * scale + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)

    def modulated(
        self,
        x: Float[Array, "b s d"],
        shift: Float[Array, "b 1 d"],
        scale: Float[Array, "b 1 d"],
        modulate: Modulate = modulate,
    ) -> Activation:
        """Returns `norm(x) (1 + scale) + shift` as a lazy activation, which is not computed until a
        layer reads it.

        If the norm has learned weights, only the modulation is lazy.

        Args:
            x: The input, of any floating-point dtype.
            shift: The shift of each sample and feature.
            scale: The scale of each sample and feature, before 1 is added. It is not the learned
                weight of the norm.
            modulate: Computes `x (1 + scale) + shift` from (x, shift, scale): `modulate` (the
                default) rounds after each operation, `modulate_rounding_once` at the end.

        Returns:
            The lazy activation [b, s, d], in the dtype of `x`.
        """
        return self._lazy(x).map(modulate, shift, scale)

    def scaled(self, x: Float[Array, "b s d"], factor: Float[Array, "b 1 d"]) -> Activation:
        """Returns `norm(x) * factor` as a lazy activation, which is not computed until a layer
        reads it.

        If the norm has learned weights, only the factor is lazy.

        Args:
            x: Activations before the norm, of any floating-point dtype. `norm(x)` is rounded to
                this dtype before the multiplication, except in a kernel that computes the norm too,
                in float32.
            factor: One factor per feature of each sample, the same for all tokens.

        Returns:
            The lazy activation [b, s, d], in the dtype of `x`.
        """
        return self._lazy(x).map(jnp.multiply, factor)

    def _lazy(self, x: Float[Array, "b s d"]) -> LazyActivation:
        """Returns the normalized `x` as a lazy activation, which is not computed until a layer
        reads it.

        If the norm has learned weights, the result (weight and bias included) is computed at once
        instead, and the lazy activation wraps it.

        Args:
            x: activations before the norm, of any floating-point dtype.

        Returns:
            The lazy activation [b, s, d], in the dtype of `x`.
        """
        if self.scale is not None:
            return LazyActivation.from_array(self(x))
        norm = partial(layer_norm, eps=self.eps, width=x.shape[-1])
        return LazyActivation.from_array(x).map(norm)


def rms_norm(
    x: Float[Array, "... d"],
    scale: Float[Array, "..."],
    eps: float,
    width: int | None = None,
    save_squares: bool = False,
) -> Float[Array, "... d"]:
    """Applies root-mean-square normalization over the last axis (arXiv 1910.07467).

    Args:
        x: The input, of any floating-point dtype.
        scale: The weight, one factor per column, which broadcasts against `x`.
        eps: Added to the mean of the squares.
        width: The number of leading columns that are not padding, over which the mean of the
            squares is taken. Kernels pad rows with zeros. The padding must be zero, and stays zero.
            None: all columns.
        save_squares: Whether, with gradient checkpointing "matmuls", the backward pass reads the
            sums of squares from memory instead of computing them again. The result is the same.

    Returns:
        `scale * x / sqrt(mean of x**2 + eps)` in float32, of the shape of `x`.
    """
    x32 = x.astype(jnp.float32)
    n = x.shape[-1] if width is None else width
    squares = (x32**2).sum(-1, keepdims=True)
    if save_squares:
        squares = checkpoint_name(jax.lax.optimization_barrier(squares), MATMUL)
    return x32 * jax.lax.rsqrt(squares / n + eps) * scale


class RMSNorm(nnx.Module):
    """Root-mean-square normalization (arXiv 1910.07467): `x / rms(x) * (offset + scale) + bias`.

    It computes in float32. At first `offset + scale` is 1 and the bias 0.

    Args:
        features: The size of the last axis.
        eps: Added to the mean of the squares.
        bias: Whether to add a bias.
        offset: Added to the stored weight: 1.0 for checkpoints that store the weight minus one
            (Gemma), otherwise 0.0.
    """

    def __init__(self, features: int, *, eps: float, bias: bool = False, offset: float = 0.0):
        self.scale = param(jnp.full(features, 1.0 - offset), "weight")
        self.bias = param(jnp.zeros(features), "bias") if bias else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Divides by the root mean square of the last axis (with `eps` added to the mean of the
        squares), multiplies by the weight plus `offset`, and adds the bias if there is one.

        Args:
            x: An array of any rank and floating-point dtype.

        Returns:
            An array of the shape and dtype of `x`, computed in float32 and rounded once.
        """
        y = rms_norm(x, self.offset + self.scale.get_value().astype(jnp.float32), self.eps)
        if self.bias is not None:
            y = y + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)

    def scaled(
        self, x: Float[Array, "b s d"], factor: Float[Array, "b 1 d"] | None = None
    ) -> Activation:
        """Returns `norm(x) * factor` as a lazy activation, which is not computed until a layer
        reads it.

        The norm includes its weight (plus `offset`, the constructor's constant). A bias is ignored.

        Args:
            x: Activations before the norm, of any floating-point dtype.
            factor: One factor per feature of each sample, the same for all tokens. None: no factor.

        Returns:
            The lazy activation [b, s, d], in the dtype of `x`.
        """
        width = x.shape[-1]

        def norm(y: Array, scale: Array) -> Array:
            return rms_norm(y, self.offset + scale, self.eps, width).astype(y.dtype)

        normed = LazyActivation.from_array(x).map(norm, self.scale.get_value()[None, None])
        return normed if factor is None else normed.map(jnp.multiply, factor)

    def per_head(self, x: LazyActivation) -> LazyActivation:
        """Normalizes each attention head on its own.

        The weight has the size of one head, and is the same for all heads. The norm must have no
        bias and no `offset` (the constant that is added to the weight): both would be ignored.

        Args:
            x: Queries or keys [b, s, n * features], heads side by side; `features` is the size of a
                head.

        Returns:
            The normalized activation, lazy like `x` (not computed until a layer reads it), with its
            shape and dtype.
        """
        # on a GPU, the saved sums spare the gradient one pass over `x` (docs/kernels.md)
        save_squares = x.exact and compile_target.platform() == "gpu"

        def norm(y: Array, scale: Array) -> Array:
            heads = split_heads(y, scale.shape[-1])
            normed = rms_norm(heads, scale, self.eps, save_squares=save_squares)
            return normed.astype(y.dtype).reshape(y.shape)

        return x.map(norm, self.scale.get_value()[None, None])
