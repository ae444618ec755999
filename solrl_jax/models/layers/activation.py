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
    """Returns the activation as a `LazyActivation`, which later layers can extend and read in one
    pass.

    Args:
        x: An array [b, s, d] or a lazy activation.
        dtype: The dtype that the values of an array are cast to when they are read. None: the dtype
            of the array. A lazy activation keeps its dtype, whatever this is.

    Returns:
        `x` itself if it is a lazy activation, otherwise one whose value is `x` in `dtype`.
    """
    if isinstance(x, LazyActivation):
        return x
    return LazyActivation.from_array(x, dtype=dtype)


def concat_features(first: Activation, *others: Activation, dtype: DTypeLike) -> Activation:
    """Concatenates activations along the feature axis, without writing the result to memory.

    Args:
        first: An activation [b, s, d].
        *others: Activations [b, s, d_i] that follow it.
        dtype: The dtype that arrays among the activations are cast to as they are read. FP8
            attention, for example, returns E4M3 arrays, which are read as BF16 where this is BF16.
            It is also the dtype of the result if `first` is an array. If `first` is lazy, the
            result has the dtype of `first`.

    Returns:
        The lazy activation [b, s, d + sum of d_i].
    """
    result = as_lazy(first, dtype)
    for other in others:
        result = result.concat(as_lazy(other, dtype))
    return result
