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
    """A network without its parameters, and the files that hold them.

    `load` reads the parameters, and `component(params)` is the callable network.

    Attributes:
        graphdef: static structure of the network: its modules and attributes, without arrays.
        state: abstract state of the network: the path and shape of each parameter, with its name
            and order of axes in PyTorch as metadata.
        source: a directory with safetensors files, or one safetensors file. It need not exist until
            the files are checked or loaded.
        locate: finds the network's tensors in the files: a function `(source, state)` that returns
            a list with a `ParameterEntry` per parameter, and a dictionary with the position
            (`StoredTensor`) of each tensor under its name. It reads headers of files only.
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
        """Makes a component of the network that `build` constructs, without computing a parameter
        or reading a file.

        Args:
            source: a directory with safetensors files, or one safetensors file. It need not exist
                yet.
            build: constructs the network: a function whose only argument is the keyword argument
                `rngs` (random number generators). It is only traced for its shapes.
            locate: finds the network's tensors in the files: a function `(source, state of the
                network)` that returns a list with a `ParameterEntry` per parameter, and a
                dictionary with the position (`StoredTensor`) of each tensor under its name. It
                raises ValueError for tensors that do not fit. `check_files` and `load` call it. The
                default expects the tensor names of PyTorch.

        Returns:
            The component, with the structure and the abstract state of the network.
        """
        graphdef, state = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
        return cls(graphdef, state, source, locate)

    def __call__(self, params: Params) -> Any:
        """Returns the network with given parameters, a module that can be called under jit.

        Args:
            params: The parameters in the form that `load` returns: nested dictionaries keyed by
                module name or, in a list of modules, by index (an int). A leaf may also be a
                quantized weight or a weight with its LoRA adapter. All must be present.

        Returns:
            An `nnx.Module` of the class that `build` constructed, whose parameters are those in
            `params`.

        Raises:
            ValueError: `params` has fewer or more parameters than the network. Wrong names are not
                noticed if the number is right.
        """
        return nnx.merge(self.graphdef, params)

    def check_files(self) -> None:
        """Checks that the files hold the tensors that the network needs. Only the headers of the
        files are read.

        Raises:
            FileNotFoundError: the weights are missing, are PyTorch pickles, or are several files
                without a standard name.
            ValueError: the header of a file or an index of files cannot be read; or tensors are
                missing (for a parameter without an initial value), unexpected, stored twice, of
                another shape than in the network, or of a dtype other than BF16, F16, F32 and F64.
                The message lists all such tensors.
        """
        self.locate(self.source, self.state)

    def load(self, dtype: DTypeLike, place: Placement | None = None) -> Params:
        """Reads the parameters from the files onto the devices.

        A parameter that the files lack gets the initial value that the network declares for it; if
        the network declares none, that is an error. With `place`, all processes of a run must call
        it, and each reads only the rows of the stored tensors that its own devices need.

        Args:
            dtype: dtype to which the parameters are cast. Values beyond its range become infinite.
            place: gives each parameter's sharding: a function `(path, shape)` that returns a
                `NamedSharding`. The path is a tuple such as ("layers", "mlp", "up_proj", "kernel"),
                and the shape of a stacked parameter begins with the number of layers. None: all
                parameters are on JAX's default device, in each process.

        Returns:
            The parameters as nested dictionaries keyed by module name or, in a list of modules, by
            index (an int). A stack of layers is one parameter with a leading axis of layers.

        Raises:
            FileNotFoundError: the weights are missing, are PyTorch pickles, or are several files
                without a standard name.
            OSError: reading the tensors fails.
            ValueError: the header of a file or an index of files cannot be read, or a file ends
                within a tensor; or tensors are missing, unexpected, stored twice, or of another
                shape or dtype than the network takes. The message lists all such tensors.
        """
        return load_tensors(*self.locate(self.source, self.state), dtype, place)

    def abstract_params(self, dtype: DTypeLike, place: Placement | None = None) -> Params:
        """Describes what `load` would return, without reading a file.

        Args:
            dtype: dtype of the parameters.
            place: gives each parameter's sharding: a function `(path, shape)` that returns a
                `NamedSharding`. The path is a tuple such as ("layers", "mlp", "up_proj", "kernel"),
                and the shape of a stacked parameter begins with the number of layers. None: no
                shardings.

        Returns:
            Nested dictionaries keyed by module name or, in a list of modules, by index (an int),
            with a `ShapeDtypeStruct` per parameter. A stack of layers is one parameter with a
            leading axis of layers.
        """
        params = {}
        for entry in parameter_table(self.state):
            sharding = None if place is None else place(entry.path, entry.full_shape)
            params[entry.path] = jax.ShapeDtypeStruct(entry.full_shape, dtype, sharding=sharding)
        return unflatten_dict(params)

    @property
    def num_parameters(self) -> int:
        """The number of values in all parameters of the network, all layers of a stack included.

        Arrays that are buffers in PyTorch, but are read from the files, count too.
        """
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state))

    @functools.cached_property
    def stack_paths(self) -> frozenset[tuple[str, ...]]:
        """The path of each stack of blocks in the parameter tree, a tuple of strings such as
        ("layers",).

        A stack of blocks is a module whose parameters have a leading axis of blocks. The set is
        empty for a network without stacks.
        """
        paths = set()
        for path, variable in nnx.to_flat_state(self.state):
            depth = variable.get_metadata()["below_stack"]
            if depth:
                paths.add(tuple(map(str, path[:-depth])))
        return frozenset(paths)

    def gather(self, params: Params, path: tuple[str, ...] = ()) -> Params:
        """Gathers sharded parameters into whole arrays on every device. For use under jit.

        Stacks of blocks stay sharded, because `scan_blocks` gathers one block at a time. Under
        tensor parallelism (a mesh axis `tensor` of more than one device), linear layers stay
        sharded over that axis. Without a mesh (`jax.set_mesh`), nothing changes.

        Args:
            params: the network's parameters: nested dictionaries keyed by module name. A leaf may
                be an array, a quantized weight or a weight with its LoRA adapter.
            path: for the recursion over subtrees: the position of `params` in the network's
                parameter tree. Callers leave it at (), the whole tree.

        Returns:
            The same parameters with sharding constraints.
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
