"""`HalfPrecisionWeight`: a weight of a network in float32 whose products are in 16 bits."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.leaf import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HalfPrecisionWeight(Leaf):
    """A weight matrix [in, out] in FP16 or BF16, for input in float32: that is rounded, and the product is summed in float32.

    The result has the dtype of the weight, unlike that of other leaves. What the network adds it to, its norms and its softmax
    stay in float32. A stream in 16 bits would round at each layer, and the errors of all layers would add up.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"weight": -1}

    weight: Float[Any, "... n_in n_out"]  # plans hold its shape alone

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        return tensor_parallel.matmul(x.astype(self.weight.dtype), self.weight)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return self.weight.astype(jnp.float32)
