"""Trains the two autoencoders and encodes all images.

`tiny-sana` has a small DC-AE. `tiny-flux` and `tiny-sd3` share a small KL autoencoder. Both map 32
x 32 pixels to 8 x 8 latents of 8 channels. Noise on the latents makes the decoders robust to the
errors of a transformer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pretrain import recipe
from pretrain.blueprints import DC, KL
from pretrain.data import picture_batches, to_signed
from pretrain.recipe import Settings
from pretrain.training import train
from solrl_jax.models.loading.weights import Params


@dataclasses.dataclass(frozen=True)
class Latents:
    """A trained autoencoder and the latents of all images.

    Attributes:
        vae: The parameters of the autoencoder.
        values: The latents, float32 [n, 8, 8, 8], scaled to unit variance as for a transformer.
        config: The scaling factors in the autoencoder's config.json.
    """

    vae: Params
    values: np.ndarray
    config: dict[str, float]


def dc_latents(settings: Settings, images: np.ndarray) -> Latents:
    """Trains the DC-AE on images [n, 32, 32, 3] (uint8) and encodes them."""

    def loss(params: Params, batch: jax.Array, key: jax.Array) -> jax.Array:
        vae = DC(params)
        z = vae.encode(batch)
        noisy = z + 0.1 * jax.lax.stop_gradient(z.std()) * jax.random.normal(key, z.shape)
        # A weak penalty keeps the scale of the latents from drifting.
        return _picture_loss(vae.decode(noisy), batch) + 1e-3 * (z**2).mean()

    batches = picture_batches(images, settings.seed, 1)
    vae = train("vae", DC.initialize(settings.seed), loss, batches, recipe.VAE, settings)
    values = _encode_all(settings, "vae", lambda x: DC(vae).encode(x), images)
    scale = _rounded(1 / values.std())
    return Latents(vae, values * np.float32(scale), {"scaling_factor": scale})


def kl_latents(settings: Settings, images: np.ndarray) -> Latents:
    """Trains the KL autoencoder on images [n, 32, 32, 3] (uint8) and encodes them."""

    def loss(params: Params, batch: jax.Array, key: jax.Array) -> jax.Array:
        vae = KL(params)
        mean, logvar = vae.encode(batch)
        variance = jnp.exp(logvar) + (0.15 * jax.lax.stop_gradient(mean.std())) ** 2
        decoded = vae.decode(mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape))
        divergence = (mean**2 + jnp.exp(logvar) - 1 - logvar).mean() / 2  # KL to a standard normal
        return _picture_loss(decoded, batch) + 1e-3 * divergence

    batches = picture_batches(images, settings.seed, 5)
    vae = train("kl", KL.initialize(settings.seed + 3), loss, batches, recipe.KL, settings)
    values = _encode_all(settings, "kl", lambda x: KL(vae).encode(x).mean, images)
    scale = _rounded(1 / values.std())
    shift = _rounded(values.mean())
    unit = (values - np.float32(shift)) * np.float32(scale)
    return Latents(vae, unit, {"scaling_factor": scale, "shift_factor": shift})


def _rounded(value: Any) -> float:
    return round(float(value), 5)


def _picture_loss(decoded: jax.Array, image: jax.Array) -> jax.Array:
    error = decoded - image
    return jnp.abs(error).mean() + 2 * (error**2).mean()


def _encode_all(
    settings: Settings, name: str, encode: Callable[[jax.Array], jax.Array], images: np.ndarray
) -> np.ndarray:
    """Returns the unscaled latents [n, 8, 8, 8] of all images.

    They are cached in a file until the autoencoder is trained again.
    """
    path = settings.work / f"{name}-latents.npy"
    state = settings.work / f"{name}.safetensors"
    if path.exists() and state.exists() and path.stat().st_mtime > state.stat().st_mtime:
        latents = np.load(path)
        if len(latents) == len(images):
            return latents
    chunks = np.split(images, range(500, len(images), 500))
    compiled = jax.jit(encode)
    latents = np.concatenate(
        [np.asarray(compiled(to_signed(chunk))) for chunk in tqdm(chunks, desc=f"{name} latents")]
    )
    np.save(path, latents)
    return latents
