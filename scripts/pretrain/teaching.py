"""What a network learns from another: the meaning of its guidance scale, from itself, or to draw, from a pipeline that can."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrain.stages import noised
from pretrain.words import SHORT
from solrl_jax.models.pipeline import open_pipeline

SCALES = 1.0, 4.0  # of guidance, told in training, from none on
TEACHING = 3.0  # told a teacher

Velocity = Callable[[Any, jax.Array, Any, jax.Array, jax.Array], jax.Array]


def guidance_loss(velocity: Velocity, plain: float) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """The loss `(params, (x0, text, empty, before), key) -> scalar` of guidance distilled (arXiv 2210.03142), as FLUX.1-dev's.

    velocity(params, x [b, h, w, c], text, sigma [b], scale [b]) is the network's; text and empty are conditionings of the
    prompts and of as many empty ones. Told a scale in `SCALES`, it is to say in one evaluation what it said `before`, told
    `plain`, in two: `empty + scale (prompt - empty)`.
    """

    def loss(params, batch, key):
        x0, text, empty, before = batch
        noise_key, scale_key = jax.random.split(key)
        x, sigma, _ = noised(x0, noise_key)
        scale = jax.random.uniform(scale_key, (len(x0),), minval=SCALES[0], maxval=SCALES[1])
        told = jnp.full_like(scale, plain)
        without, given = (velocity(before, x, prompts, sigma, told) for prompts in (empty, text))
        target = without + scale[:, None, None, None] * (given - without)
        return ((velocity(params, x, text, sigma, scale) - target) ** 2).mean()

    return loss


class Teacher:
    """The pipeline in `folder`, with embedded guidance, and the prompts that it teaches.

    Its velocity in place of a picture's own takes the noise out of the target (arXiv 1503.02531), and the guidance in.
    """

    def __init__(self, folder: Path, prompts: Sequence[str]):
        self._pipeline = open_pipeline(folder)
        self._tokens = self._pipeline.tokenize(prompts, SHORT)
        self._text = {name: part.load(jnp.float32) for name, part in self._pipeline.text_encoders.items()}
        self._transformer = self._pipeline.transformer.load(jnp.float32)
        self._encode = jax.jit(self._pipeline.encode_text)

    def lesson(self, prompts: np.ndarray) -> tuple[Any, Any]:
        """What `velocity` takes besides: parameters, and the conditioning of these prompts, by index [b]."""
        return self._transformer, self._encode(self._text, {part: ids[prompts] for part, ids in self._tokens.items()})

    def velocity(self, lesson: tuple[Any, Any], x: jax.Array, sigma: jax.Array) -> jax.Array:
        transformer, text = lesson
        return self._pipeline.velocity(transformer, x, text, 1000 * sigma, jnp.float32(TEACHING))
