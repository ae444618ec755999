"""A network that is trained from scratch, and how its files are written."""

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.weights import Params, parameter_table, to_torch_order
from solrl_jax.storage.files import atomic, atomic_write


@dataclasses.dataclass(frozen=True)
class Part:
    """A network of a pipeline.

    Attributes:
        library: The library of its class: "diffusers" or "transformers".
        network: The class of the module.
        config_type: The class of its configuration.
        config: The content of config.json without the class name.
    """

    library: str
    network: type
    config_type: Any
    config: dict[str, Any]

    def __call__(self, params: Params) -> Any:
        """Returns the network with the given parameters."""
        return nnx.merge(self._graph[0], params)

    def initialize(self, seed: int) -> Params:
        """Returns initial parameters, computed by one program."""
        return jax.jit(lambda: nnx.to_pure_dict(nnx.split(self._make(nnx.Rngs(seed)))[1]))()

    def load(self, folder: Path) -> Params:
        """Reads parameters that `save` wrote, in float32."""
        return Component(*self._graph, folder).load(jnp.float32)

    @property
    def stored_config(self) -> dict[str, Any]:
        """The content of config.json."""
        name = self.network.__name__
        if self.library == "diffusers":
            return {"_class_name": name} | self.config
        return {"architectures": [name]} | self.config

    def save(self, folder: Path, params: Params, dtype: Any) -> None:
        """Writes config.json and the weights in `dtype`."""
        file = (
            "diffusion_pytorch_model.safetensors"
            if self.library == "diffusers"
            else "model.safetensors"
        )
        save_component(folder, file, self.stored_config, to_torch(self._graph[1], params), dtype)

    def _make(self, rngs: nnx.Rngs) -> nnx.Module:
        return self.network(self.config_type.from_dict(self.config), rngs=rngs)

    @cached_property
    def _graph(self) -> tuple[nnx.GraphDef, nnx.State]:
        """The graph of the network and its abstract state."""
        return nnx.split(nnx.eval_shape(lambda: self._make(nnx.Rngs(0))))


def to_torch(state: nnx.State, params: Params) -> dict[str, np.ndarray]:
    """Converts parameters to the tensors of a released file, with PyTorch's names and axis order.

    Args:
        state: The abstract state of the network.
        params: The parameters.
    """
    flat = flatten_dict(params)
    out = {}
    for e in parameter_table(state):
        value = np.asarray(flat[e.path])
        for name, tensor in zip(e.names, value if e.stacked else value[None], strict=True):
            # `ascontiguousarray` would add an axis to a scalar.
            out[name] = np.asarray(to_torch_order(np.asarray(tensor), e.layout), order="C")
    return out


def save_component(
    folder: Path, filename: str, config: dict, tensors: Mapping[str, np.ndarray], dtype: DTypeLike
) -> None:
    """Writes config.json and the tensors in `dtype`. Each file is written atomically."""
    stored = {name: np.asarray(tensor).astype(dtype) for name, tensor in tensors.items()}
    with atomic(folder / filename) as partial:
        save_file(stored, partial, metadata={"format": "pt"})
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
