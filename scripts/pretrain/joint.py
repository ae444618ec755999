"""The trainings of `tiny-flux` and `tiny-sd3`: the autoencoder that they share, then transformer and text encoders together."""

import dataclasses
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models.pipeline import open_pipeline
from models.weights import Params
from pretrain.blueprints import BLUEPRINTS, KL, Blueprint
from pretrain.networks import Network
from pretrain.stages import encode_all, flow_loss, picture_batches, picture_loss, row_drawer
from pretrain.training import train
from pretrain.words import SHORT

GUIDANCE = 1.0  # that a network with embedded guidance is told, here and in the recipe
STREAMS = {"tiny-flux": 6, "tiny-sd3": 7}  # of random numbers; below are those of the other stages


@dataclasses.dataclass(frozen=True)
class Latents:
    """A trained KL autoencoder, and its latents [n, 16, 16, 4] of all pictures as a transformer sees them: of unit size."""

    vae: Params
    values: np.ndarray
    scale: float
    shift: float


def train_kl(args: Namespace, images: np.ndarray) -> Params:
    network = Network.of(KL.make)

    def loss(params, batch, key):
        vae = network(params)
        mean, logvar = vae.encode(batch)
        # more noise than the posterior's own: the decoder has to forgive a flow that is not quite there
        variance = jnp.exp(logvar) + (0.1 * jax.lax.stop_gradient(mean.std())) ** 2
        decoded = vae.decode(mean + jnp.sqrt(variance) * jax.random.normal(key, mean.shape))
        divergence = (mean**2 + jnp.exp(logvar) - 1 - logvar).mean() / 2  # from a standard normal
        return picture_loss(decoded, batch) + 1e-3 * divergence

    params, batches = KL.initialise(args.seed + 3), picture_batches(images, args.seed, 5)
    return train("kl", params, loss, batches, args.kl_steps, 2e-3, args.work)


def encode_kl(args: Namespace, vae: Params, images: np.ndarray) -> Latents:
    network = Network.of(KL.make)
    encode = lambda x: network(vae).encode(x).mean
    values = encode_all(encode, images, args.work / "kl-latents.npy", args.work / "kl.safetensors")
    scale, shift = round(float(1 / values.std()), 5), round(float(values.mean()), 5)
    return Latents(vae, (values - np.float32(shift)) * np.float32(scale), scale, shift)


def train_joint(args: Namespace, name: str, latents: Latents, captions: list[str]) -> None:
    """Trains the pipeline `name` through its own functions, those that sample from it later, and writes it to `args.out`."""
    blueprint = BLUEPRINTS[name].scaled(latents.scale, latents.shift)
    stage = name.removeprefix("tiny-")
    options = ("steps", "focus", "balance", "noise", "stop", "more", "matrices")
    steps, focus, balance, noise, stop, more, matrices = (getattr(args, f"{stage}_{which}") for which in options)
    folder = args.work / name
    blueprint.write(folder)
    pipeline = open_pipeline(folder)
    tokens = pipeline.tokenize(["", *captions], SHORT)
    params, positions = initialise(blueprint, args.seed)

    def loss(params, batch, key):
        x0, tokens = batch

        def velocity(x, sigma):
            conditioning = pipeline.encode_text(params["text"], tokens)
            transformer = with_positions(params["transformer"], positions)
            return pipeline.velocity(transformer, x, conditioning, 1000 * sigma, jnp.float32(GUIDANCE))

        return flow_loss(velocity, x0, key)

    draw = row_drawer(captions, args.seed, STREAMS[name], args.batch, focus, balance, noise)

    def batches(i):
        rows, prompts = draw(i)
        return latents.values[rows], {part: ids[prompts] for part, ids in tokens.items()}

    trained = train(stage, params, loss, batches, steps, 1e-3, args.work, stop, more, matrices)
    export(blueprint, trained, positions, latents.vae, args.out / name)


def initialise(blueprint: Blueprint, seed: int) -> tuple[Params, Params]:
    """What is trained (`transformer`, and `text` by folder), and the transformer's positions, which SD3's files hold."""
    transformer = blueprint.parts["transformer"].initialise(seed)
    positions = {}
    if "pos_embed" in transformer:
        positions["pos_embed"] = transformer["pos_embed"].pop("pos_embed")
    encoders = blueprint.text_encoders.items()
    text = {name: part.initialise(seed + i) for i, (name, part) in enumerate(encoders, start=1)}
    return {"transformer": transformer, "text": text}, positions


def with_positions(transformer: Params, positions: Params) -> Params:
    """The whole transformer."""
    if not positions:
        return transformer
    return transformer | {"pos_embed": transformer["pos_embed"] | positions}


def export(blueprint: Blueprint, trained: Params, positions: Params, vae: Params, folder: Path) -> None:
    """Writes the pipeline as diffusers would, in BF16 as FLUX.1 and SD3.5 are released."""
    blueprint.write(folder)
    networks = {"transformer": with_positions(trained["transformer"], positions), "vae": vae} | trained["text"]
    for name, part in blueprint.parts.items():
        part.save(folder / name, networks[name], jnp.bfloat16)
