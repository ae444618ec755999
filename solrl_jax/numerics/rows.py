"""Kernels in Pallas on several devices: XLA cannot divide one, so each device is given its rows."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array

from solrl_jax.numerics import split


def on_rows(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` on each device's rows. An axis that `jax.vmap` maps is a part of the rows; arrays with one row belong to all."""

    @custom_vmap
    def mapped(*arrays: Array) -> Any:
        mesh, batch = jax.sharding.get_abstract_mesh(), max(x.shape[0] for x in arrays)
        names = tuple(name for name in mesh.axis_names if name != split.TENSOR)
        if mesh.empty or batch % math.prod(mesh.shape[name] for name in names):
            return f(*arrays)
        specs = tuple(PartitionSpec(names if x.shape[0] == batch else None) for x in arrays)
        return jax.shard_map(f, in_specs=specs, out_specs=PartitionSpec(names), check_vma=False)(*arrays)

    @mapped.def_vmap
    def fold(size: int, is_mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        batch = max(x.shape[has] for x, has in zip(arrays, is_mapped, strict=True))

        def folded(x: Array, has: bool) -> Array:
            if not has and len(x) == 1:
                return x
            of_row = x.shape[1 + has :]
            return jnp.broadcast_to(x if has else x[None], (size, batch, *of_row)).reshape(size * batch, *of_row)

        out = mapped(*map(folded, arrays, is_mapped))
        out = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped
