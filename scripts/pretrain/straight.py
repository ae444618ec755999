"""Straighter paths: a pipeline learns to lead its noise to its own pictures along a line (rectified flow, arXiv 2209.03003).

Then its weights are averaged with those from before (arXiv 2109.01903): straightened alone, a network this small is right less
often, and three tenths of the way most is won that there is to win for a preview's ranking, in BF16 and in four bits.
"""

import dataclasses
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import trange

from pretrain.blueprints import DIFFUSERS
from pretrain.joint import curved, with_positions, without_positions
from pretrain.stages import between, row_drawer
from pretrain.teaching import SCALES
from pretrain.training import train
from solrl_jax.conditioning.prompts import Prompt
from solrl_jax.config.presets import resolve
from solrl_jax.models.pipeline import open_pipeline, read_json
from solrl_jax.models.weights import Params, save_component, to_torch
from solrl_jax.numerics.randomness import initial_noise
from solrl_jax.rollout.generate import Prompted, generate, prepare
from solrl_jax.training.experiment import Experiment, build

GROUP = 480  # couples drawn at a time, told the same scale of guidance
AT_NOISE = 1 / 8  # of a batch: every sample's first step, which has the most to say, starts there

Couples = dict[str, np.ndarray]  # noise, latents [n, h, w, c], prompts [n] (rows of the conditioning), guidance [n], right [n]


@dataclasses.dataclass(frozen=True)
class Round:
    """One reflow: couples drawn, a network trained on them, and averaged with itself from before."""

    stream: int  # of random numbers; below are those of the trainings
    couples: int
    wrong: float  # share of the couples that are wrong and yet learned from
    steps: int
    weight: float  # of the straightened weights in the mean


ROUNDS = {
    "tiny-sana": (Round(11, 48_000, 1.0, 1600, 0.3),),
    "tiny-flux": (Round(9, 30_000, 0.6, 2000, 0.3),),
    "tiny-sd3": (Round(10, 30_000, 0.25, 2500, 0.3), Round(12, 48_000, 0.25, 1800, 0.4)),
}


def straighten(args: Namespace, name: str, captions: list[str]) -> None:
    """Takes `curved(args, name)` through its rounds and writes the pipeline to `args.out`."""
    source = curved(args, name)
    for number, round_ in enumerate(ROUNDS[name], start=1):
        label = f"{name}-straight-{number}"
        last = number == len(ROUNDS[name])
        target = args.out / name if last else args.work / label
        reflow(args, name, label, round_, source, target, captions)
        source = target


def reflow(
    args: Namespace, name: str, label: str, round_: Round, source: Path, target: Path, captions: list[str]
) -> None:  # fmt: skip
    """Trains the transformer of `source` on couples of its own, and writes the mean of before and after to `target`."""
    couples, conditioning = draw_couples(args, name, label, round_, source, captions)
    learned = learned_rows(couples["right"], round_.wrong, args.seed)
    pipeline = open_pipeline(source)
    params, positions = without_positions(pipeline.transformer.load(jnp.float32))

    def loss(params: Params, batch: Any, key: jax.Array) -> jax.Array:
        noise, x0, text, guidance = batch
        sigma = sigmas(key, len(x0))
        transformer = with_positions(params, positions)
        v = pipeline.velocity(transformer, between(x0, noise, sigma), text, 1000 * sigma, guidance)
        return ((v - (noise - x0)) ** 2).mean()

    def batches(i: int) -> Any:
        rows = np.random.default_rng((args.seed, round_.stream, i)).choice(learned, size=args.batch)
        noise, latents, prompts, guidance = (couples[part][rows] for part in ("noise", "latents", "prompts", "guidance"))
        return noise, latents, jax.tree.map(lambda leaf: leaf[prompts], conditioning), guidance

    trained = train(label, params, loss, batches, round_.steps, 1e-3, args.work)
    mixed = jax.tree.map(lambda before, after: (1 - round_.weight) * before + round_.weight * after, params, trained)
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = to_torch(pipeline.transformer.state, with_positions(mixed, positions))
    folder = target / "transformer"
    save_component(folder, DIFFUSERS, read_json(folder / "config.json"), tensors, jnp.bfloat16)


def sigmas(key: jax.Array, count: int) -> jax.Array:
    """Noise levels [count]: evenly spread, and pure noise in `AT_NOISE` of them."""
    first, level = jax.random.split(key)
    return jnp.where(jax.random.uniform(first, (count,)) < AT_NOISE, 1.0, jax.random.uniform(level, (count,)))


def learned_rows(right: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The couples [m] to learn from: those that are right [n], and a `share` of the others.

    A straightened network was found to be less often right than its couples are; so these are right more often.
    """
    return np.flatnonzero(right | (np.random.default_rng(seed).random(len(right)) < share))


def draw_couples(
    args: Namespace, name: str, label: str, round_: Round, source: Path, captions: list[str]
) -> tuple[Couples, Any]:  # fmt: skip
    """Noise and what the pipeline `source` makes of it, as its recipe samples; and the conditioning of their prompts.

    Couples are kept in `args.work` until the pipeline is newer.
    """
    path = args.work / f"{label}-couples-{round_.couples}-{args.seed}.npz"
    experiment = build(resolve("tiny", [f"model={name}", f"model.path={source}", "eval.every=0"]))
    _, rows = row_drawer(captions, args.seed, round_.stream, round_.couples, 0, 0, [])(0)
    texts, prompts = np.unique(np.array(["", *captions])[rows], return_inverse=True)
    prompted = prepare(experiment.backbone, None, [Prompt(str(text)) for text in texts], experiment.config.model.max_tokens)
    judged = experiment.reward.prepare([Prompt(str(text or texts[-1])) for text in texts])  # of nothing asked nothing is judged
    if not path.exists() or path.stat().st_mtime < (source / "transformer" / DIFFUSERS).stat().st_mtime:
        rng = np.random.default_rng((args.seed, round_.stream))
        couples = sample(experiment, dataclasses.replace(prompted, prepared=judged), prompts, rng)
        couples["right"] |= texts[prompts] == ""
        partial_path = path.with_suffix(".partial.npz")
        np.savez(partial_path, **couples)
        partial_path.replace(path)
    widened = lambda leaf: leaf.astype(np.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    conditioning = jax.tree.map(lambda leaf: widened(np.asarray(leaf)), prompted.conditioning)
    with np.load(path) as file:
        return dict(file), conditioning


def sample(experiment: Experiment, prompted: Prompted, prompts: np.ndarray, rng: np.random.Generator) -> Couples:
    """A couple for each of `prompts` [n]. A network that is told a guidance scale is told all of `SCALES`."""
    backbone, config, count = experiment.backbone, experiment.config, len(prompts)
    whole = experiment.grid(config.rollout.steps)
    seeds = rng.integers(2**32, size=(count, 2), dtype=np.uint32)
    guidance = np.full(count, whole.guidance, np.float32)
    if backbone.pipeline.embedded_guidance:
        guidance = np.repeat(rng.uniform(*SCALES, size=-(-count // GROUP)), GROUP)[:count].astype(np.float32)
    latents, right = [], []
    for at in trange(0, count, GROUP, desc=f"{config.model.name} couples"):
        rows, grid = slice(at, at + GROUP), dataclasses.replace(whole, guidance=float(guidance[at]))
        drawn = generate(
            backbone, backbone.transformer, grid, prompted, prompts[rows], seeds[rows], experiment.size, config.rollout.chunk,
            experiment.reward,
        )  # fmt: skip
        latents.append(drawn.latents)
        right.append(drawn.scores["shapes/strict"] == 1)
    noise = np.asarray(initial_noise(seeds, latents[0].shape[1:]))
    return {
        "noise": noise, "latents": np.concatenate(latents), "prompts": prompts, "guidance": guidance,
        "right": np.concatenate(right),
    }  # fmt: skip
