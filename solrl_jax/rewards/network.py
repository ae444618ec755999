"""A scoring network: found and checked at once, loaded when everything else has been, gathered where it computes."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from solrl_jax.models.layers import gather
from solrl_jax.models.open_clip import find_open_clip
from solrl_jax.models.tensor_files import Stored, weight_files
from solrl_jax.models.weights import Entry, Params, abstract_tensors, entries, find_tensors, load_tensors
from solrl_jax.parallel import sharding
from solrl_jax.rewards.protocol import Scores
from solrl_jax.storage import hub

Build = Callable[[nnx.Rngs], nnx.Module]
ROWS = 8  # pictures that a device scores at once


@dataclasses.dataclass(frozen=True)
class Network:
    """The static graph of a network, its table of parameters, and where in which files they lie; None: it is for a plan."""

    graphdef: nnx.GraphDef
    table: Sequence[Entry]
    stored: dict[str, Stored] | None

    @classmethod
    def of(cls, build: Build, source: Path, ignored: Callable[[str], bool] = lambda name: False) -> "Network":
        """The network with the tensors of a file or of a directory's files; ignored: of those it does not have.

        Raises ValueError that lists what does not fit.
        """
        graphdef, table = _abstract(build)
        if hub.is_carried(source):
            return cls(graphdef, table, None)
        files = weight_files(source) if source.is_dir() else [source]
        wanted = {name: e.torch_shape for e in table for name in e.names}
        return cls(graphdef, table, find_tensors(files, wanted, ", ".join(map(str, files)), ignored))

    @classmethod
    def of_open_clip(cls, build: Build, file: Path) -> "Network":
        """A CLIP whose tensors are named and fused as OpenCLIP does it."""
        graphdef, table = _abstract(build)
        if hub.is_carried(file):
            return cls(graphdef, table, None)
        return cls(graphdef, *find_open_clip(table, file))

    def load(self, mesh: Mesh | None) -> Params:
        """The parameters in float32, the precision in which the peers score; on `mesh` as the policy's base is.

        For a plan they are abstract.
        """
        place = None if mesh is None else sharding.placement(mesh)
        if self.stored is None:
            return abstract_tensors(self.table, jnp.float32, place)
        return load_tensors(self.table, self.stored, jnp.float32, place)

    def __call__(self, params: Params) -> Any:
        """The network with these parameters: whole ones, but for stacks, which are gathered a layer at a time as they run."""
        stacks = {e.path for e in self.table if e.stacked}
        whole = lambda path, x: x if tuple(key.key for key in path) in stacks else gather(x)
        return nnx.merge(self.graphdef, jax.tree_util.tree_map_with_path(whole, params))


def _abstract(build: Build) -> tuple[nnx.GraphDef, list[Entry]]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    return graphdef, entries(state)


def in_rows(score: Callable[[Params, Array, Any], Scores]) -> Callable[[Params, Array, Any], Scores]:
    """`score`, with `ROWS` pictures on every device at once: memory is bounded, and a score does not depend on the chunk."""
    return lambda params, images, prepared: sharding.map_rows(lambda rows: score(params, *rows), (images, prepared), ROWS)
