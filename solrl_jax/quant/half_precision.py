"""`HalfPrecisionWeight`: a 16-bit weight in a network whose activations are float32."""

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
    """A weight matrix [in, out] in FP16 or BF16 for float32 inputs.

    The input is cast to the dtype of the weight, and the matmul accumulates in float32. Unlike that
    of other leaves, the result has the dtype of the weight. The residual stream, norms and softmax
    of the network stay in float32: JAX promotes the sum of the float32 stream and a 16-bit result
    to float32. A 16-bit residual stream would be rounded in each layer, and the errors of all
    layers would add up.

    Attributes:
        output_axes: A class attribute: by field, the axis of the outputs, which may be sharded over
            the mesh axis `tensor`: the last of `weight`.
        weight: The matrix [..., in, out] in FP16 or BF16. Programs that are only planned hold a
            `jax.ShapeDtypeStruct`.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"weight": -1}

    weight: Float[Any, "... n_in n_out"]

    def matmul(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        """Computes `x @ w`, with `x` rounded to the dtype of the weight.

        Args:
            x: Activations [rows, n_in]. If the weight is FP16, values beyond its range become
                infinite.

        Returns:
            The result [rows, n_out] in the dtype of the weight, with its columns sharded over the
            mesh axis `tensor` if n_out is a multiple of the size of that axis.
        """
        return tensor_parallel.column_parallel_matmul(x.astype(self.weight.dtype), self.weight)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        """Returns the weight [..., in, out] in float32."""
        return self.weight.astype(jnp.float32)
