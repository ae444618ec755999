"""Trains the autoencoders and encodes all images and clips.

`tiny-sana` has a small DC-AE. `tiny-flux` and `tiny-sd3` share a small KL autoencoder. Both map 32
x 32 pixels to 8 x 8 latents of 8 channels. That of `tiny-wan` maps clips of 5 frames of this size
to 3 such latents. Noise on the latents makes the decoders robust to the errors of a transformer.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pretrain import recipe
from pretrain.blueprints import DC, KL, WAN
from pretrain.clips import SCENES, render
from pretrain.data import row_batches, to_signed
from pretrain.networks import Part
from pretrain.recipe import Settings
from pretrain.training import train
from solrl_jax.models.loading.weights import Params
from solrl_jax.rewards import motion

# The largest standard deviation of the noise on latents with which the decoder of clips is trained
# further, as a share of that of each channel.
DECODER_NOISE = 0.4


@dataclasses.dataclass(frozen=True)
class Latents:
    """A trained autoencoder and the latents of all images or clips.

    Attributes:
        vae: The parameters of the autoencoder.
        values: The latents, float32 [n, 8, 8, 8] or [n, 3, 8, 8, 8], scaled to unit variance as for
            a transformer.
        config: The scaling factors in the autoencoder's config.json.
    """

    vae: Params
    values: np.ndarray
    config: dict[str, Any]


def dc_latents(settings: Settings, images: np.ndarray) -> Latents:
    """Trains the DC-AE on images [n, 32, 32, 3] (uint8) and encodes them."""

    def loss(params: Params, images: jax.Array, rows: jax.Array, key: jax.Array) -> jax.Array:
        batch = to_signed(images[rows])
        vae = DC(params)
        z = vae.encode(batch)
        noisy = z + 0.1 * jax.lax.stop_gradient(z.std()) * jax.random.normal(key, z.shape)
        # A weak penalty keeps the scale of the latents from drifting.
        return _picture_loss(vae.decode(noisy), batch) + 1e-3 * (z**2).mean()

    batches = row_batches(len(images), settings.seed, 1)
    vae = train("vae", DC.initialize(settings.seed), loss, images, batches, recipe.VAE, settings)
    values = _encode_all(settings, "vae", lambda x: DC(vae).encode(x), images)
    scale = _rounded(1 / values.std())
    return Latents(vae, values * np.float32(scale), {"scaling_factor": scale})


def kl_latents(settings: Settings, images: np.ndarray) -> Latents:
    """Trains the KL autoencoder on images [n, 32, 32, 3] (uint8) and encodes them."""

    vae = train(
        "kl",
        KL.initialize(settings.seed + 3),
        partial(_kl_loss, KL, 0.15),
        images,
        row_batches(len(images), settings.seed, 5),
        recipe.KL,
        settings,
    )
    values = _encode_all(settings, "kl", lambda x: KL(vae).encode(x).mean, images)
    scale = _rounded(1 / values.std())
    shift = _rounded(values.mean())
    unit = (values - np.float32(shift)) * np.float32(scale)
    return Latents(vae, unit, {"scaling_factor": scale, "shift_factor": shift})


def wan_latents(settings: Settings, clips: np.ndarray) -> Latents:
    """Trains the autoencoder of clips on clips [n, 5, 32, 32, 3] (uint8), encodes them, and trains
    the decoder further.
    """
    vae = train(
        "wan-vae",
        WAN.initialize(settings.seed + 5),
        partial(_kl_loss, WAN, 0.3),
        clips,
        row_batches(len(clips), settings.seed, 10),
        recipe.WAN_VAE,
        settings,
    )
    values = _encode_all(settings, "wan-vae", lambda x: WAN(vae).encode(x).mean, clips)
    vae = _refine_decoder("wan-decoder", settings, vae, values, clips)
    channels = values.reshape(-1, values.shape[-1])
    mean = [_rounded(value) for value in channels.mean(0)]
    std = [_rounded(value) for value in channels.std(0)]
    unit = (values - np.array(mean, np.float32)) / np.array(std, np.float32)
    return Latents(vae, unit, {"latents_mean": mean, "latents_std": std})


def refine_pipeline(settings: Settings, source: Path, clips: np.ndarray) -> None:
    """Trains the decoder of a finished `tiny-wan` further, and writes the pipeline to
    `settings.out`. Prints how many reconstructions are right, before and after.

    Args:
        settings: Where files are kept, and limits of steps and time.
        source: The directory of the pipeline.
        clips: The clips [n, 5, 32, 32, 3] (uint8).

    Raises:
        SystemExit: If `settings.work` holds a refinement, which may be that of another decoder.
    """
    state = settings.work / "wan-refine.safetensors"
    if state.exists():
        raise SystemExit(f"--work: {state} exists; a refinement needs a folder without one")
    vae = WAN.load(source / "vae")
    values = _encode_all(settings, "wan-refine", lambda x: WAN(vae).encode(x).mean, clips)
    vae = _refine_decoder("wan-refine", settings, vae, values, clips)
    folder = settings.out / "tiny-wan"
    if source.resolve() != folder.resolve():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "vae" / "config.json").read_text())
    before = reconstruction_scores(source)
    dataclasses.replace(WAN, config=config).save(folder / "vae", vae, jnp.bfloat16)
    after = reconstruction_scores(folder)
    for name in before:
        print(f"reconstructions: {name} {before[name]:.3f} -> {after[name]:.3f}", flush=True)


def reconstruction_scores(pipeline: Path) -> dict[str, float]:
    """Scores what the autoencoder of a `tiny-wan` makes of clips that show their captions.

    Args:
        pipeline: The directory of the pipeline.

    Returns:
        The mean scores of the reward `motion`, by name, of the reconstructions of two clips of
        every scene. No clip is in the training data.
    """
    scenes = 2 * SCENES
    clips = render(list(scenes), np.random.default_rng((0, 12)))
    vae = WAN.load(pipeline / "vae")
    reconstruct = jax.jit(lambda x: WAN(vae).decode(WAN(vae).encode(x).mean))
    decoded = reconstruct(to_signed(jnp.asarray(clips)))
    images = jnp.clip(decoded / 2 + 0.5, 0, 1)
    scores = motion.score(None, images, motion.prepare([scene.caption for scene in scenes]))
    return {name: float(values.mean()) for name, values in scores.items()}


def _refine_decoder(
    name: str, settings: Settings, vae: Params, latents: np.ndarray, clips: np.ndarray
) -> Params:
    """Trains the decoder of the autoencoder of clips alone.

    The encoder stays as it is. So the latents do too, and a transformer that was trained on them
    remains valid. Each clip of a batch has its own level of noise on its latents, because those
    that a transformer generates are noisy.

    Args:
        name: The name of the training's state.
        settings: Where files are kept, and limits of steps and time.
        vae: The parameters of the autoencoder.
        latents: The unscaled latents [n, 3, 8, 8, 8] of the clips.
        clips: The clips [n, 5, 32, 32, 3] (uint8).

    Returns:
        The parameters of the autoencoder, with those of the new decoder.
    """
    std = latents.std(axis=(0, 1, 2, 3))
    decoder = {name: vae[name] for name in ("post_quant_conv", "decoder")}
    encoder = {name: part for name, part in vae.items() if name not in decoder}

    def loss(
        params: Params, data: tuple[jax.Array, jax.Array], rows: jax.Array, key: jax.Array
    ) -> jax.Array:
        z, batch = (x[rows] for x in data)
        level_key, noise_key = jax.random.split(key)
        level = jax.random.uniform(level_key, (len(rows), 1, 1, 1, 1), maxval=DECODER_NOISE)
        noisy = z + level * std * jax.random.normal(noise_key, z.shape)
        return _picture_loss(WAN(encoder | params).decode(noisy), to_signed(batch))

    batches = row_batches(len(clips), settings.seed, 11, recipe.WAN_DECODER_BATCH)
    return encoder | train(
        name, decoder, loss, (latents, clips), batches, recipe.WAN_DECODER, settings
    )


def _kl_loss(
    part: Part, noise: float, params: Params, images: jax.Array, rows: jax.Array, key: jax.Array
) -> jax.Array:
    """The loss of an autoencoder with a Gaussian latent.

    Args:
        part: The autoencoder.
        noise: The standard deviation of additional noise on the latents, as a share of their own.
        params: The parameters.
        images: All images [n, 32, 32, 3] or clips [n, 5, 32, 32, 3], uint8.
        rows: The indices [b] of those of the batch.
        key: The key of the noise.
    """
    batch = to_signed(images[rows])
    vae = part(params)
    mean, logvar = vae.encode(batch)
    variance = jnp.exp(logvar) + (noise * jax.lax.stop_gradient(mean.std())) ** 2
    decoded = vae.decode(mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape))
    divergence = (mean**2 + jnp.exp(logvar) - 1 - logvar).mean() / 2  # KL to a standard normal
    return _picture_loss(decoded, batch) + 1e-3 * divergence


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def _picture_loss(decoded: jax.Array, image: jax.Array) -> jax.Array:
    error = decoded - image
    return jnp.abs(error).mean() + 2 * (error**2).mean()


def _encode_all(
    settings: Settings, name: str, encode: Callable[[jax.Array], jax.Array], images: np.ndarray
) -> np.ndarray:
    """Returns the unscaled latents [n, ..., 8, 8, 8] of all images or clips.

    They are cached in a file until the autoencoder is trained again.
    """
    path = settings.work / f"{name}-latents.npy"
    state = settings.work / f"{name}.safetensors"
    if path.exists() and state.exists() and path.stat().st_mtime > state.stat().st_mtime:
        latents = np.load(path)
        if len(latents) == len(images):
            return latents
    chunks = np.split(images, range(500, len(images), 500))
    compiled = jax.jit(lambda chunk: encode(to_signed(chunk)))
    latents = np.concatenate(
        [np.asarray(compiled(chunk)) for chunk in tqdm(chunks, desc=f"{name} latents")]
    )
    np.save(path, latents)
    return latents
