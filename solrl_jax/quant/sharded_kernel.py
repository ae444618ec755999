"""Runs Pallas kernels on several devices.

XLA cannot partition a kernel, so each device gets its own rows.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array

from solrl_jax.quant.mesh_axes import SEQUENCE, TENSOR


def power_of_two(count: int, least: int = 1) -> int:
    """Rounds a size up to a power of two, because Triton arrays have no other sizes.

    Args:
        count: The number of values that the array must hold, 0 or more.
        least: The smallest size to return, itself rounded up to a power of two.

    Returns:
        The smallest power of two that is at least `count` and at least `least`.
    """
    return 1 << (max(count, least) - 1).bit_length()


def silence_triton_deprecation() -> None:
    """Hides JAX's warning that Pallas' lowering to Triton is deprecated, which users cannot act on.

    JAX 0.11 and later warn whenever such a kernel is lowered, which happens after it was traced. A
    kernel therefore calls this while it is traced. As a side effect, the filter stays in the
    process (each call adds it anew); it matches this one DeprecationWarning.
    """
    warnings.filterwarnings(
        "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
    )


def shard_map_kernel(f: Callable[..., Any], *, heads_axis: int | None = None) -> Callable[..., Any]:
    """Wraps a kernel so that each device of the mesh of `jax.set_mesh` runs it on its own rows,
    which are the first axis (batch) of every array.

    Rows are sharded over all mesh axes except `tensor` and `sequence`. An array with a single row
    is given whole to every device. If the number of rows is not a multiple of the number of shards,
    every device computes all rows. Without a mesh, `f` is called directly. Under `jax.vmap`, the
    mapped axis is merged into the rows, and arrays without it are repeated where necessary.

    Args:
        f: The kernel. It takes arrays, and returns an array or a tree of arrays, with rows first.
            No operation may mix rows. On each device it sees the device's own rows alone. Inside
            `shard_tokens`, it may use collectives over `sequence`.
        heads_axis: The axis of the results, and of inputs with four axes, that holds attention
            heads; other inputs have none. Heads are then sharded over the mesh axis `tensor`, which
            the mesh must have (KeyError otherwise), if the number of heads of the first array,
            which has four axes, is a multiple of the size of `tensor`; otherwise every device has
            all heads. None: there are no heads.

    Returns:
        A function with the arguments and results of `f`. It takes positional arrays only.
    """

    @custom_vmap
    def on_shards(*arrays: Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        batch = max(x.shape[0] for x in arrays)
        # Inside `shard_tokens`, `sequence` is a manual axis: a device has its own tokens already.
        axes = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
        row_axes = tuple(name for name in axes if name not in (TENSOR, SEQUENCE))
        num_row_shards = math.prod(mesh.shape[name] for name in row_axes)
        rows = row_axes if batch % num_row_shards == 0 else None
        if not axes or (rows is None and heads_axis is None and not mesh.manual_axes):
            return f(*arrays)
        heads: list[str | None] = []
        if heads_axis is not None:
            shards = mesh.shape[TENSOR]
            divides = arrays[0].shape[heads_axis] % shards == 0
            heads = [*[None] * (heads_axis - 1), TENSOR if divides else None]

        def input_spec(x: Array) -> PartitionSpec:
            first = rows if x.shape[0] == batch else None
            return PartitionSpec(first, *heads) if x.ndim == 4 else PartitionSpec(first)

        sharded = jax.shard_map(
            f,
            in_specs=tuple(map(input_spec, arrays)),
            out_specs=PartitionSpec(rows, *heads),
            axis_names=set(axes),
            check_vma=False,
        )
        return sharded(*arrays)

    @on_shards.def_vmap
    def merge_mapped_axis(size: int, is_mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
        batch = max(x.shape[mapped] for x, mapped in zip(arrays, is_mapped, strict=True))

        def merge(x: Array, mapped: bool) -> Array:
            if not mapped and len(x) == 1 and heads_axis is None:
                return x
            row_shape = x.shape[1 + mapped :]
            x = jnp.broadcast_to(x if mapped else x[None], (size, batch, *row_shape))
            return x.reshape(size * batch, *row_shape)

        out = on_shards(*map(merge, arrays, is_mapped))
        out = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return on_shards
