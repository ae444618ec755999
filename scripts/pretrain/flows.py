"""Trains a pipeline's transformer and text encoders together.

The training uses the functions that sample from the pipeline later.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrain.autoencoders import Latents
from pretrain.blueprints import BLUEPRINTS, Blueprint
from pretrain.data import Draw
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


def train_pipeline(
    settings: Settings, name: str, latents: Latents, captions: list[str], draw: Draw
) -> None:
    """Trains a pipeline and writes it to `settings.out`.

    Args:
        settings: Where files are kept.
        name: The name of the pipeline, a key of `RECIPES`.
        latents: The latents of all images or clips, with their autoencoder.
        captions: The captions of all images or clips.
        draw: Maps a step to its batch: indices of latents, and of prompts in `["", *captions]`.
    """
    recipe = RECIPES[name]
    if recipe.teacher and recipe.curriculum.wrong:
        raise ValueError(f"{name}: wrong captions have no effect with a teacher")
    blueprint = BLUEPRINTS[name].with_vae(latents.config)
    blueprint.write(settings.work / name)
    pipeline = open_pipeline(settings.work / name)
    prompts = ["", *captions]
    data = {"latents": latents.values, "tokens": pipeline.tokenize(prompts, recipe.max_tokens)}
    teacher = None
    if recipe.teacher:
        teacher = Teacher(open_pipeline(settings.out / recipe.teacher))
        data["teacher"] = teacher.load(prompts, recipe.max_tokens)
    params, positions = _initialize(blueprint, settings.seed)

    def velocity(
        transformer: Params, x: jax.Array, text: Any, sigma: jax.Array, guidance: jax.Array
    ) -> jax.Array:
        return pipeline.velocity(
            _with_positions(transformer, positions), x, text, 1000 * sigma, guidance
        )

    def encode(text_encoders: Params, tokens: Any, rows: jax.Array) -> Any:
        return pipeline.encode_text(text_encoders, jax.tree.map(lambda ids: ids[rows], tokens))

    def loss(
        params: Params, data: Any, batch: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> jax.Array:
        rows, text_rows = batch
        x, sigma, target = noised(data["latents"][rows], key, recipe.shift)
        if teacher is not None:
            target = teacher.velocity(data["teacher"], text_rows, x, sigma)
        text = encode(params["text"], data["tokens"], text_rows)
        return (
            (velocity(params["transformer"], x, text, sigma, jnp.float32(PLAIN)) - target) ** 2
        ).mean()

    trained = train(name, params, loss, data, draw, recipe.schedule, settings)
    if recipe.distillation:
        distill = guidance_loss(velocity)

        def guided_loss(
            params: Params, data: Any, batch: tuple[jax.Array, jax.Array], key: jax.Array
        ) -> jax.Array:
            rows, text_rows = batch
            text, empty = (
                encode(data["text"], data["tokens"], prompts)
                for prompts in (text_rows, jnp.zeros_like(text_rows))
            )
            x0 = data["latents"][rows]
            return distill(params, (x0, text, empty, data["transformer"]), key)

        trained["transformer"] = train(
            f"{name}-guided",
            trained["transformer"],
            guided_loss,
            data | trained,
            lambda step: draw(recipe.schedule.last + step),
            recipe.distillation,
            settings,
        )
    networks = {
        "transformer": _with_positions(trained["transformer"], positions),
        "vae": latents.vae,
    } | trained["text"]
    blueprint.save(settings.out / name, networks)


def noised(
    x0: jax.Array, key: jax.Array, shift: float = 1.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Interpolates between latents and noise, for flow matching (arXiv 2210.02747).

    Args:
        x0: Clean latents [b, ..., h, w, c].
        key: The key of the noise and of the noise levels, which are logit-normal (arXiv 2403.03206,
            eq. 19 with m = log(shift), s = 1).
        shift: The factor of sigma / (1 - sigma).

    Returns:
        x = (1 - sigma) x0 + sigma noise [b, ..., h, w, c], sigma [b], and the velocity noise - x0
        [b, ..., h, w, c].
    """
    noise_key, sigma_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, x0.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, (len(x0),)) + math.log(shift))
    at = sigma.reshape(-1, *[1] * (x0.ndim - 1))
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

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline

    def load(self, prompts: list[str], max_tokens: int) -> Params:
        """Returns the arrays that `velocity` reads: parameters, and the tokens of the prompts."""
        pipeline = self._pipeline
        float32 = jnp.dtype(jnp.float32)
        return {
            "transformer": pipeline.transformer.load(float32),
            "text": {name: part.load(float32) for name, part in pipeline.text_encoders.items()},
            "tokens": pipeline.tokenize(prompts, max_tokens),
        }

    def velocity(
        self, arrays: Params, rows: jax.Array, x: jax.Array, sigma: jax.Array
    ) -> jax.Array:
        """Returns the velocity at latents.

        Args:
            arrays: The result of `load`.
            rows: The indices [b] of the prompts.
            x: The latents [b, h, w, c].
            sigma: The noise levels [b].
        """
        tokens = jax.tree.map(lambda ids: ids[rows], arrays["tokens"])
        text = self._pipeline.encode_text(arrays["text"], tokens)
        scale = jnp.float32(TEACHING)
        return self._pipeline.velocity(arrays["transformer"], x, text, 1000 * sigma, scale)


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
