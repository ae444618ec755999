"""The principal directions of a linear's inputs, multiplied exactly beside a quantised product of low rank.

    y = (x U) (U^T W) + Q(x - x U U^T) Q(W - U U^T W)                 U [in, r], orthonormal

The inputs of a linear have most of their energy in a few directions. Rounding errors are in proportion to what is rounded, so
these directions cost most. The first product computes them in the dtype of `x`. The second product is the format's own, of
remainders that are smaller on both sides. SVDQuant (arXiv 2411.05007, eq. 4) gives the exact branch the largest directions of
the weight; here it has those of the inputs, which are fewer.

U is found by orthogonal iteration, `U <- orthonormal(X^T X U)`. `X^T X U` of every linear of a network is the gradient of one
backward pass: a weight that is a `Probe` returns it as the gradient of its basis.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics import split
from solrl_jax.numerics.leaf import Leaf, Quantized
from solrl_jax.numerics.matmul import Weight, dequantize, product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corrected(Quantized):
    """A quantised weight matrix [in, out] with an exact product of low rank beside it.

    remainder: `W - U U^T W` in a format; basis: U [..., in, r]; carried: `U^T W` [..., r, out], both in the training precision.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"remainder": -1, "carried": -1}

    remainder: Weight
    basis: Float[Array, "... n_in r"]
    carried: Float[Array, "... r n_out"]

    def multiply(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        basis = self.basis.astype(x.dtype)
        inner = x @ basis
        along = jnp.dot(inner, basis.T, preferred_element_type=jnp.float32)
        rest = (x.astype(jnp.float32) - along).astype(x.dtype)
        return product(rest, self.remainder) + inner @ split.place(self.carried, -1).astype(x.dtype)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return dequantize(self.remainder) + self.basis.astype(jnp.float32) @ self.carried.astype(jnp.float32)


def correct(
    quantize: Callable[[Array], Any],
    w: Float[Array, "... n_in n_out"],
    basis: Float[Array, "... n_in r"],
    whole: Callable[[Array], Array] = lambda x: x,
) -> Corrected:
    """`w` (float32), quantised except for the directions of `basis`, which are kept in the dtype of `basis`.

    whole: places a value on every device. Divided values would be added up in parts, and a sum that is rounded otherwise in
    its last bit can change a code.
    """
    exact, w = (
        basis.astype(jnp.float32),
        whole(w),
    )  # as it is stored, so that the two products add up to `x w` but for codes
    carried = whole(exact.swapaxes(-1, -2) @ w).astype(basis.dtype)
    return Corrected(quantize(w - whole(exact @ carried.astype(jnp.float32))), basis, carried)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe(Leaf):
    """A weight [in, out] whose product is the plain one, and whose `basis` [in, r], float32, has the gradient `X^T X basis`.

    X are all rows that the weight multiplies. This gradient is not a derivative: it is the same for any loss.
    """

    output_axes: ClassVar[Mapping[str, int]] = {"weight": -1, "basis": -1}

    weight: Float[Array, "... n_in n_out"]
    basis: Float[Array, "... n_in r"]

    def multiply(self, x: Float[Array, "rows n_in"]) -> Float[Array, "rows n_out"]:
        return _probe(x, self.weight.astype(x.dtype), self.basis)

    def dequantize(self) -> Float[Array, "... n_in n_out"]:
        return self.weight.astype(jnp.float32)


@jax.custom_vjp
def _probe(
    x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"], basis: Float[Array, "n_in r"]
) -> Float[Array, "rows n_out"]:
    return x @ w


def _probe_forward(x, w, basis):
    return x @ w, (x, w, basis)


def _probe_backward(saved, g):
    x, w, basis = saved
    rows = x.astype(jnp.float32)
    return g @ w.T, jnp.zeros_like(w), rows.T @ (rows @ basis)


_probe.defvjp(_probe_forward, _probe_backward)
