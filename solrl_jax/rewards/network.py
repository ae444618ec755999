"""What the rewards do with a scoring network: check its files, load it, and score a few pictures at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from solrl_jax.models.loading.component import Component, TensorLocator
from solrl_jax.models.loading.weights import Params, locate_tensors, parameter_table
from solrl_jax.parallel import sharding
from solrl_jax.quant.half_precision import HalfPrecisionWeight
from solrl_jax.rewards.protocol import Loader, Reward, Scores
from solrl_jax.storage import hub

ROWS = 4  # pictures that a device scores at once


def open_network(
    build: Callable[[nnx.Rngs], nnx.Module], source: Path, find: TensorLocator = locate_tensors
) -> Component:
    """The network that `build` makes, with the parameters of a file or a directory. Nothing is loaded.

    Raises ValueError that lists every tensor that does not fit.
    """
    component = Component.from_builder(source, build, find)
    if not hub.is_carried(source):
        component.check_files()
    return component


def loader(
    networks: Any,
    prepare: Callable[[Sequence[str]], Any],
    score: Callable[[Any, Array, Any], Scores],
) -> Loader:
    """Loads the reward that `score(params, images, prepared)` makes with `networks`, one or a tree of them.

    Parameters are in float32, in which the original libraries score too, and placed as the policy's base is. Those of a network
    whose configuration alone is there (for a plan) are abstract. `score` gets `ROWS` pictures a device at a time: this bounds
    memory, and a score does not depend on the chunk it is in.
    With a dtype of 16 bits, so are the products of transformers' layers; the layers' sums and norms stay in float32.
    """

    def load(mesh: Mesh | None, dtype: DTypeLike) -> Reward:
        place = None if mesh is None else sharding.placement(mesh)

        def read(network: Component) -> Any:
            params = (network.abstract_params if hub.is_carried(network.source) else network.load)(
                jnp.float32, place
            )
            return params if dtype == jnp.float32 else rounded(network, params, dtype)

        return Reward(jax.tree.map(read, networks), prepare, in_rows)

    def in_rows(params: Any, images: Array, prepared: Any) -> Scores:
        return sharding.map_rows(lambda rows: score(params, *rows), (images, prepared), ROWS)

    return load


def rounded(network: Component, params: Params, dtype: DTypeLike) -> Params:
    """The parameters, or their shapes, with the linears of stacks of layers as `HalfPrecisionWeight` to `dtype`."""

    def half(x):
        return x.astype(dtype) if isinstance(x, jax.Array) else x.update(dtype=dtype)

    stacked = {e.path for e in parameter_table(network.state) if e.stacked and e.layout == "linear"}
    flat = flatten_dict(params)
    return unflatten_dict(
        {path: HalfPrecisionWeight(half(x)) if path in stacked else x for path, x in flat.items()}
    )
