"""States for tests of checkpoints, how they are saved, and how two are compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from solrl_jax.runs import checkpoint_writer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Policy:
    weights: dict
    optimizer: tuple
    step: jax.Array


def make_state(number: int) -> Policy:
    """A state of every kind of node and of dtypes that are easily lost; `number` decides its
    values.
    """
    import optax  # slow, and not needed where states are only compared

    key = jax.random.key(number)
    weights = {
        "a/b": {
            "kernel": jax.random.normal(key, (16, 8)),
            "c.d": jax.random.normal(key, (8,), jnp.bfloat16),
        },
        "codes": jax.random.bits(key, (8, 2), jnp.uint8),
        "scales": jax.random.normal(key, (8,)).astype(jnp.float8_e4m3fn),
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf, number]),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "flags": jnp.array([True, False, number % 2 == 0]),
        "list": [jnp.uint32(number), jnp.int32(-number)],
    }
    floats = {"kernel": weights["a/b"]["kernel"]}
    optimizer = optax.adamw(1e-3)
    _, moments = optimizer.update(floats, optimizer.init(floats), floats)
    return Policy(weights, moments, jnp.int32(number))


def save(root: Path, iteration: int, state: Any, meta: Mapping[str, Any], **options: int) -> Path:
    """Saves a checkpoint and waits for it."""
    return checkpoint_writer.begin(root, iteration, state, meta, **options)()


def flat(state) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (key, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), key
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), key


def shardings(state, mesh: Mesh):
    """Shardings over ("data", "fsdp"): of a matrix over both, of a vector over one; what does not
    divide is replicated.
    """

    def place(leaf) -> NamedSharding:
        axes = ("data", "fsdp")[-leaf.ndim :] if 0 < leaf.ndim <= 2 else ()
        fits = all(
            n and n % mesh.shape[axis] == 0 for n, axis in zip(leaf.shape, axes, strict=True)
        )
        return NamedSharding(mesh, PartitionSpec(*axes) if fits else PartitionSpec())

    return jax.tree.map(place, state)


def placed(state, mesh: Mesh):
    """`state`, which every process holds, as arrays that all processes share."""

    def spread(leaf, where):
        return jax.make_array_from_callback(
            leaf.shape, where, lambda index: np.asarray(leaf)[index]
        )

    return jax.tree.map(spread, state, shardings(state, mesh))


def abstract_on(state, mesh: Mesh):
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        state,
        shardings(state, mesh),
    )


def assert_holds(state, expected) -> None:
    """This process's shards of `state` have the bits of `expected`."""
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for (key, leaf), whole in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(whole)[shard.index].tobytes(), key
