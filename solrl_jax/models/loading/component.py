"""`Component`: one network of a pipeline or of a reward, with the released files that hold its
parameters.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike

from solrl_jax.models.layers.stack import gather
from solrl_jax.models.loading.tensor_files import StoredTensor
from solrl_jax.models.loading.weights import (
    ParameterEntry,
    Params,
    Placement,
    load_tensors,
    locate_tensors,
    parameter_table,
)

# A function (files, abstract state) -> (parameter table of the network, the position of each of its
# tensors by name). It reads headers of files only, and raises ValueError for tensors that do not
# fit the network.
TensorLocator = Callable[[Path, nnx.State], tuple[list[ParameterEntry], dict[str, StoredTensor]]]


@dataclasses.dataclass(frozen=True)
class Component:
    """A network without its parameters. `load` reads the parameters; `component(params)` is the
    callable network.

    Attributes:
        graphdef: static structure of the network: its modules and attributes, without arrays.
        state: abstract state with the path, shape and PyTorch layout of each parameter.
        source: a directory with safetensors files, or one safetensors file. It need not exist until
            the files are checked or loaded.
        locate: a function (`source`, `state`) -> (table of the parameters, position of each of
            their tensors in the files by the tensor's name). It reads headers of files only.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    source: Path
    locate: TensorLocator = locate_tensors

    @classmethod
    def from_builder(
        cls,
        source: Path,
        build: Callable[..., nnx.Module],
        locate: TensorLocator = locate_tensors,
    ) -> "Component":
        """Makes a component of the network that `build` constructs.

        The construction is only traced for its shapes: no parameter is computed and no file is
        read.

        Args:
            source: a directory with safetensors files, or one safetensors file. It need not exist
                yet.
            build: constructs the network. It is called with the keyword argument `rngs`, random
                number generators, alone.
            locate: a function (`source`, abstract state of the network) -> (table of the
                parameters, position of each of their tensors by name). It raises ValueError for
                tensors that are missing, unexpected or of another shape. The default expects the
                names of PyTorch (`models.loading.weights.locate_tensors`).

        Returns:
            A component with the structure and the abstract state of the network, `source` and
            `locate`.
        """
        graphdef, state = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
        return cls(graphdef, state, source, locate)

    def __call__(self, params: Params) -> Any:
        """Returns the network with parameters, a module that can be called under jit.

        Args:
            params: The parameters, a nested dictionary by path as `load` returns it. Leaves may be
                quantized or adapted.

        Returns:
            An `nnx.Module` of the class that the component was built from, whose parameters are the
            values in `params`.
        """
        return nnx.merge(self.graphdef, params)

    def check_files(self) -> None:
        """Checks that the files hold the network's tensors, without reading a tensor.

        Only the headers of the files are read.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file or an index cannot be read; or tensors are missing, unexpected,
                stored twice, or of another shape or dtype than the network takes. The message lists
                all such tensors.
        """
        self.locate(self.source, self.state)

    def load(self, dtype: DTypeLike, place: Placement | None = None) -> Params:
        """Reads the parameters. Those with an initial value that the files lack are initialised.

        In a run of several processes, each reads only what its own devices hold.

        Args:
            dtype: dtype that the parameters are cast to. Values beyond its range become infinite.
            place: a function (path, shape) -> `NamedSharding` of a parameter, where the path is a
                tuple such as ("layers", "mlp", "up_proj", "kernel") and the shape has the axis of
                layers; None: all are on JAX's default device.

        Returns:
            The parameters as a nested dictionary by path, on the devices. A stack of layers is one
            parameter with a leading axis of layers.

        Raises:
            FileNotFoundError: a file is missing.
            OSError: a file cannot be opened or read.
            ValueError: a file or an index cannot be read; or tensors are missing, unexpected,
                stored twice, or of another shape or dtype than the network takes. The message lists
                all such tensors. Nothing has been placed on a device then, except where a file ends
                within a tensor's data.
        """
        table, stored = self.locate(self.source, self.state)
        return load_tensors(table, stored, dtype, place)

    def abstract_params(self, dtype: DTypeLike, place: Placement | None = None) -> Params:
        """Returns what `load` would return, as a tree of ShapeDtypeStruct. No file is read.

        Args:
            dtype: dtype of the parameters.
            place: a function (path, shape) -> `NamedSharding` of a parameter; None: the results
                have no sharding.

        Returns:
            A nested dictionary by path. A stack of layers is one parameter with a leading axis of
            layers.
        """
        params = {}
        for entry in parameter_table(self.state):
            sharding = None if place is None else place(entry.path, entry.full_shape)
            params[entry.path] = jax.ShapeDtypeStruct(entry.full_shape, dtype, sharding=sharding)
        return unflatten_dict(params)

    @property
    def num_parameters(self) -> int:
        """The number of values in all parameters, all layers of a stack counted."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state))

    @functools.cached_property
    def stack_paths(self) -> frozenset[tuple[str, ...]]:
        """The path of each stack of blocks (`models.layers.stack.stack`) in the parameter tree.

        The parts of a path are strings. The set is empty for a network without stacks.
        """
        paths = set()
        for path, variable in nnx.to_flat_state(self.state):
            depth = variable.get_metadata()["below_stack"]
            if depth:
                paths.add(tuple(map(str, path[:-depth])))
        return frozenset(paths)

    def gather(self, params: Params, path: tuple[str, ...] = ()) -> Params:
        """Gathers sharded parameters into whole arrays on every device. For use under jit.

        Stacks of blocks stay sharded: `scan_blocks` gathers one layer at a time. If the mesh has an
        axis `tensor` of more than one device, linear layers stay split over it
        (`models.layers.stack.gather`). Without a mesh, nothing changes.

        Args:
            params: the network's parameters, or the subtree at `path`. Leaves may be quantized or
                adapted.
            path: position of `params` in the network's parameter tree, a tuple of strings; () for
                the whole tree.

        Returns:
            A new tree of the structure of `params`, with a sharding constraint on each parameter
            outside of stacks.
        """
        gathered = {}
        for name, value in params.items():
            full_path = (*path, str(name))
            if full_path in self.stack_paths:
                gathered[name] = value
            elif any(stack[: len(full_path)] == full_path for stack in self.stack_paths):
                gathered[name] = self.gather(value, full_path)
            else:
                gathered |= gather({name: value})
        return gathered
