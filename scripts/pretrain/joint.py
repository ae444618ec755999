"""The trainings of `tiny-flux` and `tiny-sd3`: the autoencoder that they share, then transformer and text encoders together."""

import dataclasses
from argparse import Namespace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pretrain.blueprints import BLUEPRINTS, KL, Blueprint
from pretrain.networks import Network
from pretrain.stages import encode_all, erring, flow_loss, picture_batches, picture_loss, row_drawer
from pretrain.teaching import Teacher, guidance_loss
from pretrain.training import train
from pretrain.words import SHORT
from solrl_jax.models.pipeline import open_pipeline
from solrl_jax.models.weights import Params

GUIDANCE = 1.0  # that a network with embedded guidance is told, until it learns what to make of it
STREAMS = {"tiny-flux": 6, "tiny-sd3": 7}  # of random numbers; below are those of the other stages


@dataclasses.dataclass(frozen=True)
class Latents:
    """A trained KL autoencoder, and its latents [n, 8, 8, 8] of all pictures as a transformer sees them: of unit size."""

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
        variance = jnp.exp(logvar) + (0.15 * jax.lax.stop_gradient(mean.std())) ** 2
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
    """Trains the pipeline `name` through its own functions, those that sample from it later, and writes it (`curved`)."""
    blueprint = BLUEPRINTS[name].scaled(latents.scale, latents.shift)
    stage = name.removeprefix("tiny-")
    option = lambda which: getattr(args, f"{stage}_{which}")
    folder = args.work / name
    blueprint.write(folder)
    pipeline = open_pipeline(folder)
    prompts = ["", *captions]
    tokens = pipeline.tokenize(prompts, SHORT)
    teacher = Teacher(curved(args, option("teacher")), prompts) if option("teacher") else None
    draw = row_drawer(captions, args.seed, STREAMS[name], args.batch, option("focus"), option("balance"), option("noise"))
    params, positions = initialise(blueprint, args.seed)

    def velocity(transformer, x, text, sigma, guidance):
        return pipeline.velocity(with_positions(transformer, positions), x, text, 1000 * sigma, guidance)

    def loss(params, batch, key):
        x0, tokens, lesson = batch
        text = pipeline.encode_text(params["text"], tokens)
        ours = lambda x, sigma: velocity(params["transformer"], x, text, sigma, jnp.float32(GUIDANCE))
        return flow_loss(ours, x0, key, partial(teacher.velocity, lesson) if lesson is not None else None)

    def batches(i):
        rows, asked = draw(i)
        lesson = teacher.lesson(asked) if teacher and not erring(i, option("noise")) else None  # a teacher never errs
        return latents.values[rows], {part: ids[asked] for part, ids in tokens.items()}, lesson

    stop, more, guided = option("stop"), option("more"), option("guided")
    trained = train(stage, params, loss, batches, option("steps"), 1e-3, args.work, stop, more)
    if guided:
        encode = jax.jit(partial(pipeline.encode_text, trained["text"]))
        empty = encode({part: np.repeat(ids[:1], args.batch, 0) for part, ids in tokens.items()})
        before = trained["transformer"]

        def guided_batches(i):
            x0, asked, _ = batches(stop + sum(more) + i)
            return x0, encode(asked), empty, before

        after = train(f"{stage}-guided", before, guidance_loss(velocity, GUIDANCE), guided_batches, guided, 3e-4, args.work)
        trained = trained | {"transformer": after}
    export(blueprint, trained, positions, latents.vae, curved(args, name))


def curved(args: Namespace, name: str) -> Path:
    """Where the pipeline `name` lies before its paths are straightened (`pretrain.straight`)."""
    return args.work / "curved" / name


def initialise(blueprint: Blueprint, seed: int) -> tuple[Params, Params]:
    """What is trained (`transformer`, and `text` by folder), and the transformer's positions, which SD3's files hold."""
    transformer = blueprint.parts["transformer"].initialise(seed)
    transformer, positions = without_positions(transformer)
    encoders = blueprint.text_encoders.items()
    text = {name: part.initialise(seed + i) for i, (name, part) in enumerate(encoders, start=1)}
    return {"transformer": transformer, "text": text}, positions


def without_positions(transformer: Params) -> tuple[Params, Params]:
    """What is trained, and SD3's table of positions apart, which is not."""
    if "pos_embed" not in transformer:
        return transformer, {}
    rest = dict(transformer["pos_embed"])
    table = {"pos_embed": rest.pop("pos_embed")}
    return transformer | {"pos_embed": rest}, table


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
