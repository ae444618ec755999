"""Every kind of leaf, by name, for the tests that hold for all of them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from solrl_jax.quant.formats import FORMATS
from solrl_jax.quant.leaf import Leaf
from solrl_jax.quant.low_rank import LowRank
from solrl_jax.rl.explore.options.correction import Probe, correct

RANK = 4
QUANTIZING = [name for name, form in FORMATS.items() if form.quantize]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flipped(Leaf):
    """A kind that the product knows nothing of: a matrix held with its outputs first."""

    output_axes = {"rows": -2}  # noqa: RUF012

    rows: jax.Array

    def matmul(self, x):
        return x @ self.rows.T.astype(x.dtype)

    def dequantize(self):
        return self.rows.swapaxes(-1, -2).astype(jnp.float32)


def normal(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _basis(w: jax.Array) -> jax.Array:
    return jnp.linalg.qr(normal(*w.shape[:-1], RANK, seed=8))[0]


def _low_rank(w: jax.Array) -> Leaf:
    return LowRank(
        w,
        normal(*w.shape[:-1], RANK, seed=8),
        normal(*w.shape[:-2], RANK, w.shape[-1], seed=9),
        0.5,
    )


def _corrected(w: jax.Array) -> Leaf:
    def one(w, basis):
        return correct(FORMATS["nvfp4"].quantize, w.astype(jnp.float32), basis.astype(w.dtype))

    return (jax.vmap(one) if w.ndim == 3 else one)(w, _basis(w))


# name: from a matrix [..., in, out], float32 or BF16, to a leaf
MAKE: dict[str, Callable[[jax.Array], Leaf]] = {
    **{name: FORMATS[name].quantize for name in QUANTIZING},
    "low rank": _low_rank,
    "corrected": _corrected,
    "probe": lambda w: Probe(w, _basis(w)),
    "another kind": lambda w: Flipped(w.swapaxes(-1, -2)),
}
# error of a product with gaussian activations, of the product's size: that of the activations in
# the format; else none
BOUND = {"nvfp4": 0.11, "corrected": 0.11, "fp8": 0.03, "int8": 0.01}
EXACT = 1e-6
