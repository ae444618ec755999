"""`Activation`: what layers pass to each other, an array or a value that the next layer computes.

A quantized linear layer reads its input once, and computes, scales and encodes it in one kernel
(`solrl_jax.quant.lazy`). So the layer before it, for example a modulated norm, may leave the
computation to it. Networks do not distinguish the two cases: they pass activations from layer to
layer.
"""

from typing import TypeAlias

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from solrl_jax.quant.lazy import LazyActivation

Activation: TypeAlias = Float[Array, "b s d"] | LazyActivation


def as_lazy(x: Activation, dtype: DTypeLike | None = None) -> LazyActivation:
    """Wraps an activation in a `LazyActivation`.

    A lazy activation is an array [b, s, d] that is not computed until a layer reads it; that
    layer's kernel then computes it on the fly. Further functions along the last axis, such as
    norms, can be appended to it before that.

    Args:
        x: An array [b, s, d] or a lazy activation.
        dtype: For an array: the dtype of the lazy activation; None: that of the array. The
            functions that are appended compute in the array's own dtype (in kernels in float32),
            and only their result is cast to `dtype`. Ignored if `x` is lazy.

    Returns:
        `x` itself if it is lazy, otherwise a lazy activation with the values of `x`.
    """
    if isinstance(x, LazyActivation):
        return x
    return LazyActivation.from_array(x, dtype=dtype)


def concat_features(first: Activation, *others: Activation, dtype: DTypeLike) -> Activation:
    """Concatenates activations along the feature axis as one lazy activation.

    A lazy activation is not computed, nor written to memory, until a layer reads it.

    Args:
        first: An activation [b, s, d], an array or a lazy activation.
        *others: The activations [b, s, d_i] that follow it, each an array or lazy, of any dtype.
        dtype: The dtype of the result if `first` is an array: E4M3 results of FP8 attention, for
            example, become BF16. Not read if `first` is lazy.

    Returns:
        The lazy activation [b, s, d + sum of d_i], in the dtype of `first` if this is lazy,
        otherwise in `dtype`. A layer that materializes it (its `value`) casts all features to that
        dtype; a layer whose kernel reads it computes in float32.
    """
    result = as_lazy(first, dtype)
    for other in others:
        result = result.concat(as_lazy(other, dtype))
    return result
