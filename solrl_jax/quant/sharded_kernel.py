"""Kernels in Pallas on several devices: XLA cannot divide one, so each device is given its rows."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array

from solrl_jax.quant import tensor_parallel


def power_of_two(count: int, least: int = 1) -> int:
    """The power of two that holds `count` elements, `least` or more: Triton's arrays have no other sizes."""
    return 1 << (max(count, least) - 1).bit_length()


def shard_map_kernel(f: Callable[..., Any], *, by_heads: bool = False) -> Callable[..., Any]:
    """`f` on each device's rows. An axis that `jax.vmap` maps is a part of the rows; arrays with one row belong to all.

    by_heads: the second axis of arrays with four, and of the results, is divided too, over the mesh axis `tensor`. An axis that
    does not come out even is whole on every device.
    """

    @custom_vmap
    def mapped(*arrays: Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        batch = max(x.shape[0] for x in arrays)
        names = tuple(name for name in mesh.axis_names if name != tensor_parallel.TENSOR)
        rows = names if batch % math.prod(mesh.shape[name] for name in names) == 0 else None
        if mesh.empty or (rows is None and not by_heads):
            return f(*arrays)
        heads = (
            tensor_parallel.TENSOR
            if by_heads and arrays[0].shape[1] % mesh.shape[tensor_parallel.TENSOR] == 0
            else None
        )

        def of(x):
            return PartitionSpec(rows if x.shape[0] == batch else None, *(heads,) * (x.ndim == 4))

        out = PartitionSpec(rows, heads) if by_heads else PartitionSpec(rows)
        return jax.shard_map(f, in_specs=tuple(map(of, arrays)), out_specs=out, check_vma=False)(
            *arrays
        )

    @mapped.def_vmap
    def fold(size: int, is_mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        batch = max(x.shape[has] for x, has in zip(arrays, is_mapped, strict=True))

        def folded(x: Array, has: bool) -> Array:
            if not has and len(x) == 1 and not by_heads:
                return x
            of_row = x.shape[1 + has :]
            return jnp.broadcast_to(x if has else x[None], (size, batch, *of_row)).reshape(
                size * batch, *of_row
            )

        out = mapped(*map(folded, arrays, is_mapped))
        out = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped
