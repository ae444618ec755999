"""`Component`: one network of a pipeline or of a reward, with the released files that hold its parameters."""

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
from solrl_jax.models.loading.tensor_files import Stored
from solrl_jax.models.loading.weights import (
    Entry,
    Params,
    Placement,
    entries,
    find_component,
    load_tensors,
)

# (files, abstract state) -> the network's table of parameters, and by name where each of its tensors lies
Find = Callable[[Path, nnx.State], tuple[list[Entry], dict[str, Stored]]]


@dataclasses.dataclass(frozen=True)
class Component:
    """A network without its parameters. `load` reads them from `source`; `component(params)` is the network that computes."""

    graphdef: nnx.GraphDef  # static
    state: nnx.State  # abstract: each parameter's path, shape and layout
    source: Path  # a directory with safetensors files, or one safetensors file
    find: Find = find_component

    @classmethod
    def of(
        cls, source: Path, build: Callable[[nnx.Rngs], nnx.Module], find: Find = find_component
    ) -> "Component":
        """The network that `build` makes. It is traced for its shapes only: no parameter is computed, no file is read."""
        return cls(*nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0)))), source, find)

    def __call__(self, params: Params) -> Any:
        """The network with these parameters."""
        return nnx.merge(self.graphdef, params)

    def check(self) -> None:
        """Raises what `load` raises for tensors that do not fit. Reads only the headers of the files."""
        self.find(self.source, self.state)

    def load(self, dtype: DTypeLike, place: Placement | None = None) -> Params:
        """The parameters in `dtype`.

        place: gives the sharding of a parameter; None: JAX's default device.
        Raises ValueError that lists every tensor that does not fit, before anything is placed.
        """
        return load_tensors(*self.find(self.source, self.state), dtype, place)

    def abstract(self, dtype: DTypeLike, place: Placement | None = None) -> Params:
        """What `load` would return, as a tree of ShapeDtypeStruct with shardings, if there is a `place`."""

        def where(e):
            return None if place is None else place(e.path, e.full_shape)

        def shape(e):
            return jax.ShapeDtypeStruct(e.full_shape, dtype, sharding=where(e))

        return unflatten_dict({e.path: shape(e) for e in entries(self.state)})

    @property
    def size(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state))

    @functools.cached_property
    def stacks(self) -> frozenset[tuple[str, ...]]:
        """The path of every stack of blocks (`models.layers.stack.stack`) in the tree of parameters."""
        depths = [
            (path, variable.get_metadata()["below_stack"])
            for path, variable in nnx.to_flat_state(self.state)
        ]
        return frozenset(tuple(map(str, path[:-depth])) for path, depth in depths if depth)

    def gathered(self, params: Params, path: tuple[str, ...] = ()) -> Params:
        """The parameters as whole arrays on every device. Stacks stay sharded: their layers are gathered as they run.

        path: of `params` in the network's tree.
        """
        out = {}
        for name, value in params.items():
            here = (*path, str(name))
            if here in self.stacks:
                out[name] = value
            elif isinstance(value, dict) and any(
                stack[: len(here)] == here for stack in self.stacks
            ):
                out[name] = self.gathered(value, here)
            else:
                out |= gather({name: value})
        return out
