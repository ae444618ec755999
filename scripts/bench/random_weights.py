"""Builds full-size experiments without weight files.

They have the released configurations, random weights and random prompt encodings.
"""

import dataclasses
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solrl_jax.config.schema import Config
from solrl_jax.models.locate import mhla_override
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.text_encoders.encode import TextEncoders
from solrl_jax.planning.abstract import abstract_experiment, open_configurations
from solrl_jax.planning.phases import Phases
from solrl_jax.rl.experiment import Experiment, first_device_info, open_mesh
from solrl_jax.rl.gradient_checkpointing import open_for_training
from solrl_jax.rl.memory_check import device_memory

SIZE = 0.02  # standard deviation of weights and encodings, small enough not to overflow


def random_experiment(config: Config) -> Experiment:
    """Builds an experiment on the devices of this machine, with the rewards inside JAX.

    Args:
        config: The configuration of the run.

    Raises:
        InputError: If the configuration does not fit these devices.
    """
    shapes = shapes_of_experiment(config)
    decoder = dataclasses.replace(
        shapes.backbone.decoder, params=fill(shapes.backbone.decoder.params)
    )
    reward = dataclasses.replace(shapes.reward, params=fill(shapes.reward.params))
    backbone = dataclasses.replace(shapes.backbone, decoder=decoder)
    return with_weights(
        dataclasses.replace(shapes, backbone=backbone, reward=reward, evaluation_reward=reward)
    )


def shapes_of_experiment(config: Config) -> Experiment:
    """Builds an experiment on the devices of this machine with abstract arrays.

    The pipeline is the one that a run trains, with the gradient checkpointing that fits the memory
    of these devices.

    Args:
        config: The configuration of the run.

    Raises:
        InputError: If the configuration does not fit these devices.
    """
    mesh = open_mesh(config)
    mhla = mhla_override(config.model)

    def open_with(gradient_checkpointing: str) -> Pipeline:
        return open_configurations(config.model.path, gradient_checkpointing, mhla)

    pipeline = open_for_training(config, mesh, device_memory(), open_with)
    return abstract_experiment(config, pipeline, first_device_info(), mesh)


def with_weights(shapes: Experiment) -> Experiment:
    """Fills the transformer of an abstract experiment and adds prompt encodings.

    The decoder and the rewards stay abstract.
    """
    backbone = dataclasses.replace(
        shapes.backbone,
        transformer=fill(shapes.backbone.transformer),
        text_encoders=RandomEncodings(shapes.backbone.text_encoders, encoding_shapes(shapes)),
    )
    return dataclasses.replace(shapes, backbone=backbone)


def encoding_shapes(shapes: Experiment) -> Any:
    """Returns the abstract encoding of one prompt, whose leaves have one row."""
    return Phases(shapes).conditions.uncond


class RandomEncodings(TextEncoders):
    """Text encoders without weights, which return random encodings that depend on the prompt."""

    def __init__(self, encoders: TextEncoders, one: Any):
        """Replaces the text encoders of an experiment.

        Args:
            encoders: The text encoders that are replaced.
            one: The abstract encoding of one prompt.
        """
        super().__init__(encoders.pipeline, encoders.mesh, encoders.dtype, cache=None)
        self._one = one

    def encode(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> tuple[Any, int]:
        """Returns random encodings, one row per prompt.

        `max_tokens` must be that of the configuration.
        """
        rows = [
            jax.tree.map(partial(self._row, zlib.crc32(prompt.encode())), self._one)
            for prompt in prompts
        ]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *rows), len(prompts)

    def _row(self, seed: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if like.dtype == bool:
            return np.ones(like.shape, bool)
        return (SIZE * np.random.default_rng(seed).standard_normal(like.shape, np.float32)).astype(
            like.dtype
        )


def fill(tree: Any) -> Any:
    """Replaces abstract arrays by random ones with the same sharding.

    The programs that draw them are compiled in threads.

    Args:
        tree: A tree of arrays and abstract arrays. Arrays are kept.
    """
    shapes = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.ShapeDtypeStruct)]
    kinds = list(dict.fromkeys((x.shape, x.dtype, x.sharding) for x in shapes))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        drawn_by = dict(zip(kinds, threads.map(_drawing, kinds), strict=True))

    def one(path: Any, leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        seed = zlib.crc32(jax.tree_util.keystr(path).encode())
        return drawn_by[leaf.shape, leaf.dtype, leaf.sharding](jax.random.key(seed))

    return jax.tree_util.tree_map_with_path(one, tree)


def _drawing(kind: tuple[tuple[int, ...], Any, Any]) -> Any:
    """Compiles a function from a key to a random array of a shape, a dtype and a sharding."""
    shape, dtype, where = kind
    return (
        jax.jit(partial(_draw, shape, dtype), out_shardings=where)
        .lower(jax.random.key(0))
        .compile()
    )


def _draw(shape: tuple[int, ...], dtype: Any, key: jax.Array) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    if len(shape) < 3:
        return (SIZE * jax.random.normal(key, shape)).astype(dtype)
    # One layer at a time, because random bits take four bytes per element.
    return jax.lax.map(
        lambda k: (SIZE * jax.random.normal(k, shape[1:])).astype(dtype),
        jax.random.split(key, shape[0]),
    )
