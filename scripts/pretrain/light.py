"""A light decoder for candidates: it learns to draw what `tiny-sana`'s own decoder draws of the same latents.

As DC-AE-Lite is to SANA's autoencoder: the same encoder, hence the same latents, and less of a decoder. It shows candidates to
a reward (`rollout.explore.vae`), which only has to rank them.
"""

from argparse import Namespace

import jax
import jax.numpy as jnp
import numpy as np

from pretrain.networks import VAE, Network, initialise
from pretrain.stages import picture_batches, picture_loss
from pretrain.training import train
from solrl_jax.models.autoencoder_dc import AutoencoderDC, AutoencoderDCConfig
from solrl_jax.models.autoencoders import open_autoencoder
from solrl_jax.models.weights import save_component, to_torch

LIGHT = VAE | {"decoder_block_out_channels": [8, 16, 32], "decoder_layers_per_block": [1, 1, 1]}
STREAM = 13  # of random numbers; those below are of the other trainings
NOISE = 0.1  # of the latents' deviation: what a preview ends on is not quite what the encoder makes


def train_light(args: Namespace, images: np.ndarray) -> None:
    """Writes `tiny-light` to `args.out`; `tiny-sana` is there."""
    teacher = open_autoencoder(args.out / "tiny-sana" / "vae").component
    whole = teacher.load(jnp.dtype(jnp.float32))
    make = lambda rngs: AutoencoderDC(AutoencoderDCConfig.from_dict(LIGHT), rngs=rngs)
    network = Network.of(make)
    fresh = initialise(make, args.seed)

    def loss(decoder, batch, key):
        z = teacher(whole).encode(batch)
        noisy = z + NOISE * z.std() * jax.random.normal(key, z.shape)
        return picture_loss(network(fresh | {"decoder": decoder}).decode(noisy), teacher(whole).decode(noisy))

    batches = picture_batches(images, args.seed, STREAM)
    decoder = train("light", fresh["decoder"], loss, batches, args.light_steps, 3e-3, args.work)
    config = {"_class_name": "AutoencoderDC"} | LIGHT
    trained = to_torch(network.state, {"encoder": whole["encoder"], "decoder": decoder})
    save_component(args.out / "tiny-light", "diffusion_pytorch_model.safetensors", config, trained, jnp.bfloat16)
