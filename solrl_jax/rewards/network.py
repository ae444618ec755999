"""`NetworkReward`: a reward computed by scoring networks, such as CLIP."""

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
    """A reward computed by one or several networks, such as a CLIP.

    It is a `Reward` that knows its networks before their parameters are read; `load` reads them.
    All other fields are those of `Reward`. Every field is passed by keyword.

    Attributes:
        params: None before `load`. Afterwards, for each network by its name, a nested dictionary of
            its parameters: arrays, or `jax.ShapeDtypeStruct`s in a plan.
        networks: The networks by name, e.g. "clip". Each is a `Component`: the structure of a
            network and the place of its files, without parameters.
    """

    params: Any = None
    networks: Mapping[str, Component]

    def load(self, mesh: Mesh | None, dtype: DTypeLike) -> Reward:
        """Reads the parameters of the networks, and casts some of them to a 16-bit `dtype`.

        If the source of a network is in the package's directory of configurations, which has no
        weights (for `solrl plan`), its parameters are abstract (`jax.ShapeDtypeStruct`), and no
        file is read. In a run of several processes, each calls it, and reads only the parts that
        its own devices hold.

        Args:
            mesh: The mesh that the parameters are placed on: arrays of at least 4096 elements are
                split over its axes by the rules of `sharding.parameter_sharding`; smaller ones are
                on every device. None: JAX's default device.
            dtype: float32, float16 or bfloat16. With a 16-bit dtype, the weights of linear layers
                inside stacks of transformer layers are stored in it (`HalfPrecisionWeight`), and
                their matmuls round their inputs to it. All other parameters are float32.

        Returns:
            A copy of the reward with the field `params` set.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file cannot be read, or has other tensors or shapes than the network.
                The message lists all such tensors.
        """
        place = None if mesh is None else sharding.parameter_placement(mesh)

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
        build: Constructs the network, given random number generators as the keyword argument
            `rngs`. It is only traced for its shapes.
        source: A safetensors file, or a directory with safetensors files. Nothing is checked for a
            path in the package's directory of configurations, which has no weights.
        locate: Finds the tensors of the network in its files. The default suits files whose tensors
            are named after the network's modules, as in transformers and diffusers. It is a
            function (source, abstract state of the network) -> (list with a `ParameterEntry` per
            parameter, dict with the `StoredTensor` of each tensor by its name in the files).

    Returns:
        The network as a `Component`: its structure, the path and shape of each parameter, and its
        source, without parameters.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file or an index cannot be read, or has other tensors or shapes than the
            network. The message lists all such tensors.
    """
    component = Component.from_builder(source, build, locate)
    if not hub.is_carried(source):
        component.check_files()
    return component


def score_in_parts(
    score: Callable[[Any, tuple[Array, Any]], Scores], params: Any, images: Array, prepared: Any
) -> Scores:
    """Scores images in parts of 4 per device (`IMAGES_PER_DEVICE`), to bound memory, under jit.

    All parts have this size, so the score of an image does not depend on the part it is in. The
    last one, even if it is the only one, is padded by repeating images. A gradient computes the
    scores of each part once more.

    Args:
        score: A function (params, (images, prepared)) -> scores, an array by name with one row per
            image, which depends on this image alone.
        params: The parameters of the networks, by name, passed on to `score`.
        images: Images [b, H, W, 3] in [0, 1]. The number b is a multiple of the devices of
            the current mesh (`jax.set_mesh`), whose axes `sequence` and `tensor` have size 1
            (`parallel.sharding.row_mesh`). Without a mesh there is one device.
        prepared: A pytree of arrays with one row per image: the prepared prompt of each.

    Returns:
        Arrays [b] by the name of the score, in the order of the images.
    """
    return sharding.map_rows(partial(score, params), (images, prepared), IMAGES_PER_DEVICE)


def in_half_precision(network: Component, params: Params, dtype: DTypeLike) -> Params:
    """Casts the weights of linear layers inside stacks of transformer layers to 16 bits.

    A stack is a list of equal layers whose parameters are stored as one array with a leading axis.
    Biases, norms, embeddings and layers outside of stacks keep their dtype.

    Args:
        network: The network that the parameters belong to.
        params: The parameters of the network in float32, or `jax.ShapeDtypeStruct`s, as a nested
            dictionary, which is not changed.
        dtype: float16 or bfloat16.

    Returns:
        A new nested dictionary, in which each cast weight [layers, in, out] is a
        `HalfPrecisionWeight`.
    """

    def cast(x: Any) -> Any:
        return x.astype(dtype) if isinstance(x, jax.Array) else x.update(dtype=dtype)

    table = parameter_table(network.state)
    linear_layers = {entry.path for entry in table if entry.stacked and entry.layout == "linear"}
    flat = flatten_dict(params)
    for path in linear_layers & flat.keys():
        flat[path] = HalfPrecisionWeight(cast(flat[path]))
    return unflatten_dict(flat)
