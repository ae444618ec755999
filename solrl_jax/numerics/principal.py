"""The principal directions of a linear's inputs, which a quantised product may leave to an exact one of low rank.

    y = (x U) (U^T W) + Q(x - x U U^T) Q(W - U U^T W)                 U [in, r], orthonormal

Inputs of a linear hold most of their energy in few directions, and those are the ones that cost: rounding errors are in
proportion to what is rounded. The first product has them, in the dtype of `x`; the second is the format's own, of remainders
that are smaller on both sides. SVDQuant (arXiv 2411.05007, eq. 4) gives such a branch the largest directions of the weight;
the inputs' are fewer.

U is found by orthogonal iteration, `U <- orthonormal(X^T X U)`, and `X^T X U` of every linear of a network at once by its
gradient: a weight that is a `Probe` has it for the gradient of its basis.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics.blocks import nbytes


@partial(jax.tree_util.register_dataclass, data_fields=["remainder", "basis", "carried"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Corrected:
    """A quantised weight matrix [in, out] with what goes past it.

    remainder: `W - U U^T W` in a format; basis: U [..., in, r]; carried: `U^T W` [..., r, out], both in the training precision.
    """

    remainder: Any
    basis: Float[Array, "... n_in r"]
    carried: Float[Array, "... r n_out"]

    @property
    def nbytes(self) -> int:
        return nbytes(self)


def correct(
    quantize: Callable[[Array], Any], w: Float[Array, "... n_in n_out"], basis: Float[Array, "... n_in r"],
    whole: Callable[[Array], Array] = lambda x: x,
) -> Corrected:  # fmt: skip
    """`w` (float32) quantised but for the directions of `basis`, in whose dtype these are kept.

    whole: constrains a value to be whole on every device. In parts, sums round as these are, and a last bit can tip a code.
    """
    exact, w = basis.astype(jnp.float32), whole(w)  # as it is stored, so that the two products add up to `x w` but for codes
    carried = whole(exact.swapaxes(-1, -2) @ w).astype(basis.dtype)
    return Corrected(quantize(w - whole(exact @ carried.astype(jnp.float32))), basis, carried)


def divide(x: Float[Array, "rows n_in"], w: Corrected) -> tuple[Float[Array, "rows r"], Float[Array, "rows n_in"]]:
    """`x U`, and what is left of `x` without it, in the dtype of `x`."""
    inner = x @ w.basis.astype(x.dtype)
    along = jnp.dot(inner, w.basis.astype(x.dtype).T, preferred_element_type=jnp.float32)
    return inner, (x.astype(jnp.float32) - along).astype(x.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "basis"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Probe:
    """A weight [in, out] that multiplies as it would without a `basis` [in, r], float32, whose gradient is `X^T X basis`.

    X are all rows that the weight multiplies. The gradient is no derivative: it does not depend on what is differentiated.
    """

    weight: Array
    basis: Float[Array, "... n_in r"]


@jax.custom_vjp
def probe(x: Float[Array, "rows n_in"], w: Float[Array, "n_in n_out"], basis: Array) -> Float[Array, "rows n_out"]:
    """`x @ w`; see `Probe`."""
    return x @ w


def _probe_forward(x, w, basis):
    return x @ w, (x, w, basis)


def _probe_backward(saved, g):
    x, w, basis = saved
    rows = x.astype(jnp.float32)
    return g @ w.T, jnp.zeros_like(w), rows.T @ (rows @ basis)


probe.defvjp(_probe_forward, _probe_backward)
