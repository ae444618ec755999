"""`matmul(x, w)`: the product of every linear layer, chosen by what kind of leaf the weight is.

Precision is a leaf type. The BF16 policy, its LoRA-adapted form and its NVFP4 copy are one network with other leaves:
an array, a `LowRank`, a `QTensor`.
"""

import dataclasses
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.numerics.nvfp4 import QTensor, scaled_matmul


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A weight with a low-rank correction: `base + scale * a b` (LoRA; Hu et al. 2021, eq. 3, with our a, b = A^T, B^T).

    base: [..., in, out], frozen, any dtype; a: [..., in, rank] and b: [..., rank, out], float32, trained; scale = alpha / rank.
    """

    base: Array
    a: Float[Array, "... n_in rank"]
    b: Float[Array, "... rank n_out"]
    scale: float


Weight: TypeAlias = Array | LowRank | QTensor


def matmul(x: Float[Array, "... n_in"], w: Weight) -> Float[Array, "... n_out"]:
    """`x @ w` in the dtype of `x`, for any kind of weight leaf."""
    # rows flattened: XLA then sees a plain matrix product forwards and backwards, three times faster on CPU
    rows = x.reshape(-1, x.shape[-1])
    return _product(rows, w).reshape(*x.shape[:-1], -1)


def _product(x: Float[Array, "rows n_in"], w: Weight) -> Float[Array, "rows n_out"]:
    if isinstance(w, QTensor):
        return scaled_matmul(x, w)
    if isinstance(w, LowRank):
        low = (x @ w.a.astype(x.dtype)) @ w.b.astype(x.dtype)
        return x @ w.base.astype(x.dtype) + low * jnp.asarray(w.scale, x.dtype)
    return x @ w.astype(x.dtype)
