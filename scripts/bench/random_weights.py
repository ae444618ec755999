"""An experiment of full size without a weight file: released configurations, random weights, random encodings of prompts."""

import dataclasses
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solrl_jax.conditioning.text_encoders import TextEncoders
from solrl_jax.config.schema import Config
from solrl_jax.planning.abstract import experiment as of_shapes
from solrl_jax.planning.abstract import open_configurations
from solrl_jax.planning.stages import Stages
from solrl_jax.training.experiment import Experiment, device_facts, make_recipe, open_mesh

SIZE = 0.02  # deviation of weights and encodings: nothing overflows, and no time depends on it


def random_experiment(config: Config) -> Experiment:
    """The experiment of `config` on this machine's devices, with the rewards that are scored in JAX. Raises InputError."""
    pipeline = open_configurations(config.model.path, config.model.remat)
    shapes = of_shapes(config, pipeline, device_facts(), open_mesh(config))
    backbone = dataclasses.replace(
        shapes.backbone,
        transformer=fill(shapes.backbone.transformer),
        decoder=dataclasses.replace(shapes.backbone.decoder, params=fill(shapes.backbone.decoder.params)),
        text_encoders=RandomEncodings(shapes.backbone.text_encoders, encoding_shapes(shapes)),
    )
    recipe = make_recipe(config, backbone, shapes.device, shapes.recipe.quantized, shapes.train_prompts)
    reward = dataclasses.replace(shapes.reward, params=fill(shapes.reward.params))
    return dataclasses.replace(shapes, backbone=backbone, recipe=recipe, reward=reward, evaluated=reward)


def encoding_shapes(shapes: Experiment) -> Any:
    """The shapes of the encoding of one prompt: every leaf has one row. shapes: an experiment of shapes."""
    return Stages(shapes).conditions.negative


class RandomEncodings(TextEncoders):
    """Text encoders without weights: numbers of the right shapes that depend on the prompt."""

    def __init__(self, encoders: TextEncoders, one: Any):
        """one: the shapes of the encoding of one prompt."""
        super().__init__(encoders.pipeline, encoders.mesh, encoders.dtype, cache=None)
        self._one = one

    def encode(self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None) -> tuple[Any, int]:
        """max_tokens: the configuration's."""
        rows = [jax.tree.map(partial(self._row, zlib.crc32(prompt.encode())), self._one) for prompt in prompts]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *rows), len(prompts)

    def _row(self, seed: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if like.dtype == bool:
            return np.ones(like.shape, bool)
        return (SIZE * np.random.default_rng(seed).standard_normal(like.shape, np.float32)).astype(like.dtype)


def fill(tree: Any) -> Any:
    """Random arrays for shapes, with the shapes' shardings. Arrays stay."""

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
    # a layer at a time, because random bits take four bytes an element
    return jax.lax.map(lambda k: (SIZE * jax.random.normal(k, shape[1:])).astype(dtype), jax.random.split(key, shape[0]))
