"""An experiment of full size without a file: the released configurations, random weights, random encodings of prompts."""

import dataclasses
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solrl_jax.config.schema import Config
from solrl_jax.parallel import sharding
from solrl_jax.planning.abstract import experiment as of_shapes
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.devices import DEVICES, Machine
from solrl_jax.planning.stages import Stages
from solrl_jax.policy.state import TrainState, init_state
from solrl_jax.training.experiment import Experiment, device_facts, open_mesh

SIZE = 0.02  # of weights and encodings: nothing overflows, and no time depends on it


def random_experiment(config: Config) -> Experiment:
    """What `experiment.build` makes of `config`, on this machine's devices; of rewards, those in JAX. Raises InputError."""
    pipeline = open_configurations(config.model.path, config.model.remat)
    shapes = of_shapes(config, pipeline, this_machine(), open_mesh(config))
    backbone, reward = shapes.backbone, shapes.reward
    encodings = Encodings(Stages(shapes, sharding.row_groups(backbone.mesh), backbone.mesh.shape["tensor"]).negative)
    backbone = dataclasses.replace(
        backbone, transformer=fill(backbone.transformer), vae=fill(backbone.vae), text_encoders=encodings
    )
    drafts = backbone
    if shapes.drafts is not shapes.backbone:
        drafts = dataclasses.replace(backbone, pipeline=shapes.drafts.pipeline, vae=fill(shapes.drafts.vae))
    reward = dataclasses.replace(reward, params=fill(reward.params))
    return dataclasses.replace(shapes, backbone=backbone, drafts=drafts, reward=reward, evaluated=reward)


def fresh_state(experiment: Experiment) -> TrainState:
    """Before the first iteration."""
    config, backbone = experiment.config, experiment.backbone
    key, targets = jax.random.key(config.seed), list(experiment.targets)
    return init_state(key, backbone.transformer, targets, config.lora, config.optimizer, backbone.mesh)


@dataclasses.dataclass(frozen=True)
class Encodings:
    """Stands where the text encoders do: an encoding of the right shape for any text. one: shapes of a single row."""

    one: Any

    def encode(self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None) -> tuple[Any, int]:
        """max_tokens: the configuration's, which `one` was made for."""
        rows = [jax.tree.map(partial(self._row, zlib.crc32(prompt.encode())), self.one) for prompt in prompts]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *rows), len(prompts)

    def _row(self, seed: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if like.dtype == bool:
            return np.ones(like.shape, bool)
        return (SIZE * np.random.default_rng(seed).standard_normal(like.shape, np.float32)).astype(like.dtype)


def this_machine() -> Machine:
    """The kind of the devices here; of the rest of a `Machine` nothing is read."""
    device = device_facts()
    there = {"platform": device.platform, "kind": device.kind, "capability": device.capability}
    return dataclasses.replace(DEVICES["h100"], name="here", **there)


def fill(tree: Any) -> Any:
    """Arrays for shapes, where the shapes say. Arrays that are there already stay."""

    def one(path: Any, leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        return jax.jit(partial(_draw, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)(jax.random.key(seed))

    return jax.tree_util.tree_map_with_path(one, tree)


def _draw(shape: tuple[int, ...], dtype: Any, key: jax.Array) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    if len(shape) < 3:
        return (SIZE * jax.random.normal(key, shape)).astype(dtype)
    # a layer at a time: random bits take four bytes an element
    return jax.lax.map(lambda k: (SIZE * jax.random.normal(k, shape[1:])).astype(dtype), jax.random.split(key, shape[0]))
