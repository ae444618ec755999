"""`NetworkReward`: a reward that is computed by scoring networks, such as CLIP."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
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
from solrl_jax.rewards.protocol import Reward, Scores
from solrl_jax.storage import hub

# Images that one device scores at a time. This bounds the memory, and because every matmul has the
# same number of rows, the score of an image does not depend on the chunk that it is in.
IMAGES_PER_DEVICE = 4


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NetworkReward(Reward):
    """A reward that is computed by one or several networks.

    Before `load` there are no parameters. Then there are those of each network under its name.
    The function `score` uses `score_in_parts`.

    Attributes:
        networks: The networks by name.
    """

    params: Any = None
    networks: Mapping[str, Component]

    def load(self, mesh: Mesh | None, dtype: DTypeLike) -> Reward:
        """Reads the parameters of the networks.

        They are read in float32, in which the original libraries score too. If there are only
        configurations (for a plan), they are abstract.

        Args:
            mesh: The mesh that they are divided over, like the base of a policy. None: JAX's
                default device.
            dtype: float32, or a dtype of 16 bits for the linear layers inside stacks of transformer
                layers. Sums and norms of these layers stay in float32.
        """
        place = None if mesh is None else sharding.placement(mesh)

        params = {}
        for name, network in self.networks.items():
            if hub.is_carried(network.source):
                params[name] = network.abstract_params(jnp.float32, place)
            else:
                params[name] = network.load(jnp.float32, place)
            if dtype != jnp.float32:
                params[name] = in_half_precision(network, params[name], dtype)
        return dataclasses.replace(self, params=params)


def open_network(
    build: Callable[..., nnx.Module], source: Path, locate: TensorLocator = locate_tensors
) -> Component:
    """Opens a network and checks that its files hold its tensors. No tensor is read.

    Args:
        build: Constructs the network, given random number generators as `rngs`.
        source: A safetensors file, or a directory with safetensors files. Nothing is checked for a
            configuration that the package carries.
        locate: Finds the tensors in `source`.

    Raises:
        ValueError: If tensors do not fit. The message lists all of them.
    """
    component = Component.from_builder(source, build, locate)
    if not hub.is_carried(source):
        component.check_files()
    return component


def score_in_parts(
    score: Callable[[Any, tuple[Array, Any]], Scores], params: Any, images: Array, prepared: Any
) -> Scores:
    """Scores images, `IMAGES_PER_DEVICE` per device at a time.

    Args:
        score: The function (params, (images, prepared)) -> scores.
        params: The parameters of the networks.
        images: Images [b, H, W, 3] in [0, 1].
        prepared: A pytree of arrays with one row per image.
    """
    return sharding.map_rows(partial(score, params), (images, prepared), IMAGES_PER_DEVICE)


def in_half_precision(network: Component, params: Params, dtype: DTypeLike) -> Params:
    """Casts the linear layers inside stacks of layers to 16 bits, as `HalfPrecisionWeight`.

    Args:
        network: The network.
        params: Its parameters in float32, or their shapes.
        dtype: float16 or bfloat16.
    """

    def cast(x: Any) -> Any:
        return x.astype(dtype) if isinstance(x, jax.Array) else x.update(dtype=dtype)

    table = parameter_table(network.state)
    linear_layers = {entry.path for entry in table if entry.stacked and entry.layout == "linear"}
    flat = flatten_dict(params)
    for path in linear_layers & flat.keys():
        flat[path] = HalfPrecisionWeight(cast(flat[path]))
    return unflatten_dict(flat)
