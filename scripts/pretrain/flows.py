"""Trains a pipeline's transformer and text encoders together.

The training uses the functions that sample from the pipeline later.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrain.autoencoders import Latents
from pretrain.blueprints import BLUEPRINTS, Blueprint
from pretrain.data import BATCH, caption_batches
from pretrain.recipe import RECIPES, Settings
from pretrain.training import train
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.models.registry import open_pipeline

PLAIN = 1.0  # input guidance scale before the guidance distillation
SCALES = 1.0, 4.0  # range of the distilled guidance scales; 1 is no guidance
TEACHING = 3.0  # input guidance scale of a teacher

# A function of the transformer's parameters, x, the text conditioning, sigma [b] and guidance [b].
Velocity = Callable[[Params, jax.Array, Any, jax.Array, jax.Array], jax.Array]


def train_pipeline(settings: Settings, name: str, latents: Latents, captions: list[str]) -> None:
    """Trains a pipeline and writes it to `settings.out`.

    Args:
        settings: Where files are kept.
        name: The name of the pipeline, a key of `RECIPES`.
        latents: The latents [n, 8, 8, 8] of all images, with their autoencoder.
        captions: The captions of all images.
    """
    recipe = RECIPES[name]
    blueprint = BLUEPRINTS[name].with_vae(latents.config)
    blueprint.write(settings.work / name)
    pipeline = open_pipeline(settings.work / name)
    prompts = ["", *captions]
    tokens = pipeline.tokenize(prompts, recipe.max_tokens)
    teacher = (
        Teacher(open_pipeline(settings.out / recipe.teacher), prompts, recipe.max_tokens)
        if recipe.teacher
        else None
    )
    draw = caption_batches(captions, recipe.curriculum, settings.seed)
    params, positions = _initialize(blueprint, settings.seed)

    def velocity(
        transformer: Params, x: jax.Array, text: Any, sigma: jax.Array, guidance: jax.Array
    ) -> jax.Array:
        return pipeline.velocity(
            _with_positions(transformer, positions), x, text, 1000 * sigma, guidance
        )

    def loss(params: Params, batch: tuple[jax.Array, Any, Any], key: jax.Array) -> jax.Array:
        x0, tokens, lesson = batch
        x, sigma, target = noised(x0, key)
        if lesson is not None and teacher is not None:
            target = teacher.velocity(lesson, x, sigma)
        text = pipeline.encode_text(params["text"], tokens)
        return (
            (velocity(params["transformer"], x, text, sigma, jnp.float32(PLAIN)) - target) ** 2
        ).mean()

    def batches(step: int) -> tuple[np.ndarray, Any, Any]:
        rows, text_rows = draw(step)
        # With wrong captions the target is the velocity of the images, not the teacher's.
        lesson = (
            teacher.lesson(text_rows) if teacher and step not in recipe.curriculum.wrong else None
        )
        return latents.values[rows], {part: ids[text_rows] for part, ids in tokens.items()}, lesson

    trained = train(name, params, loss, batches, recipe.schedule, settings)
    if recipe.distillation:
        encode = jax.jit(partial(pipeline.encode_text, trained["text"]))
        empty = encode({part: np.repeat(ids[:1], BATCH, 0) for part, ids in tokens.items()})
        before = trained["transformer"]

        def guided_batches(step: int) -> tuple[np.ndarray, Any, Any, Params]:
            x0, text_rows, _ = batches(recipe.schedule.last + step)
            return x0, encode(text_rows), empty, before

        trained["transformer"] = train(
            f"{name}-guided",
            before,
            guidance_loss(velocity),
            guided_batches,
            recipe.distillation,
            settings,
        )
    networks = {
        "transformer": _with_positions(trained["transformer"], positions),
        "vae": latents.vae,
    } | trained["text"]
    blueprint.save(settings.out / name, networks)


def noised(x0: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Interpolates between latents and noise, for flow matching (arXiv 2210.02747).

    Args:
        x0: Clean latents [b, h, w, c].
        key: The key of the noise and of the noise levels, which are logit-normal (arXiv 2403.03206,
            eq. 19 with m = 0, s = 1).

    Returns:
        x = (1 - sigma) x0 + sigma noise [b, h, w, c], sigma [b], and the velocity noise - x0 [b, h,
        w, c].
    """
    noise_key, sigma_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, x0.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, (len(x0),)))
    at = sigma[:, None, None, None]
    return (1 - at) * x0 + at * noise, sigma, noise - x0


def guidance_loss(
    velocity: Velocity,
) -> Callable[[Params, tuple[jax.Array, Any, Any, Params], jax.Array], jax.Array]:
    """Returns the loss of guidance distillation (arXiv 2210.03142), as used for FLUX.1-dev.

    For a guidance scale in `SCALES`, one evaluation of the network learns the result of two
    evaluations of the network before the distillation: empty + scale (prompt - empty).

    Args:
        velocity: The velocity of the network.

    Returns:
        A function of the transformer's parameters, a batch and a key. A batch holds latents [b, h,
        w, c], the conditioning of their prompts, that of b empty prompts, and the transformer's
        parameters before the distillation.
    """

    def loss(
        params: Params, batch: tuple[jax.Array, Any, Any, Params], key: jax.Array
    ) -> jax.Array:
        x0, text, empty, before = batch
        noise_key, scale_key = jax.random.split(key)
        x, sigma, _ = noised(x0, noise_key)
        scale = jax.random.uniform(scale_key, (len(x0),), minval=SCALES[0], maxval=SCALES[1])
        plain_scale = jnp.full_like(scale, PLAIN)
        without, conditional = (
            velocity(before, x, prompts, sigma, plain_scale) for prompts in (empty, text)
        )
        target = without + scale[:, None, None, None] * (conditional - without)
        return ((velocity(params, x, text, sigma, scale) - target) ** 2).mean()

    return loss


class Teacher:
    """A trained pipeline with embedded guidance whose velocity another network learns.

    The velocity of a teacher has a lower variance than `noise - x0` of single images (distillation,
    arXiv 1503.02531), and it includes the effect of guidance.
    """

    def __init__(self, pipeline: Pipeline, prompts: list[str], max_tokens: int):
        self._pipeline = pipeline
        self._tokens = pipeline.tokenize(prompts, max_tokens)
        self._text = {
            name: part.load(jnp.dtype(jnp.float32)) for name, part in pipeline.text_encoders.items()
        }
        self._transformer = pipeline.transformer.load(jnp.dtype(jnp.float32))
        self._encode = jax.jit(pipeline.encode_text)

    def lesson(self, rows: np.ndarray) -> tuple[Params, Any]:
        """Returns the arguments of `velocity` for some prompts.

        Args:
            rows: The indices [b] of the prompts.

        Returns:
            The transformer's parameters and the conditioning of the prompts.
        """
        return self._transformer, self._encode(
            self._text, {part: ids[rows] for part, ids in self._tokens.items()}
        )

    def velocity(self, lesson: tuple[Params, Any], x: jax.Array, sigma: jax.Array) -> jax.Array:
        """The velocity [b, h, w, c] at latents x [b, h, w, c] and noise levels sigma [b]."""
        transformer, text = lesson
        return self._pipeline.velocity(transformer, x, text, 1000 * sigma, jnp.float32(TEACHING))


def _initialize(blueprint: Blueprint, seed: int) -> tuple[Params, Params]:
    """Initializes a pipeline.

    Returns:
        The trained parameters ("transformer", and "text" by folder), and SD3's table of positions,
        which is not trained.
    """
    transformer = blueprint.parts["transformer"].initialize(seed)
    positions = {}
    if "pos_embed" in transformer:  # only SD3 stores its table
        rest = dict(transformer["pos_embed"])
        positions = {"pos_embed": rest.pop("pos_embed")}
        transformer = transformer | {"pos_embed": rest}
    encoders = blueprint.text_encoders.items()
    text = {name: part.initialize(seed + i) for i, (name, part) in enumerate(encoders, start=1)}
    return {"transformer": transformer, "text": text}, positions


def _with_positions(transformer: Params, positions: Params) -> Params:
    if not positions:
        return transformer
    return transformer | {"pos_embed": transformer["pos_embed"] | positions}
