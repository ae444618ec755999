"""What the rewards do with a scoring network: check its files, load it in float32, and score a few pictures at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from solrl_jax.models.component import Component, Find
from solrl_jax.models.weights import Params, find_component
from solrl_jax.parallel import sharding
from solrl_jax.rewards.protocol import Scores
from solrl_jax.storage import hub

ROWS = 8  # pictures that a device scores at once


def open_network(build: Callable[[nnx.Rngs], nnx.Module], source: Path, find: Find = find_component) -> Component:
    """The network that `build` makes, with the parameters of a file or a directory. Nothing is loaded.

    Raises ValueError that lists every tensor that does not fit.
    """
    component = Component.of(source, build, find)
    if not hub.is_carried(source):
        component.check()
    return component


def load_network(component: Component, mesh: Mesh | None) -> Params:
    """The parameters in float32, in which the original libraries score too. Placed as the policy's base is; None: one device.

    Of a network whose configuration alone is there (for a plan) the parameters are abstract.
    """
    place = None if mesh is None else sharding.placement(mesh)
    if hub.is_carried(component.source):
        return component.abstract(jnp.float32, place)
    return component.load(jnp.float32, place)


def in_rows(score: Callable[[Params, Array, Any], Scores]) -> Callable[[Params, Array, Any], Scores]:
    """`score` on `ROWS` pictures a device at a time. This bounds memory, and a score does not depend on the chunk it is in."""
    return lambda params, images, prepared: sharding.map_rows(lambda rows: score(params, *rows), (images, prepared), ROWS)
