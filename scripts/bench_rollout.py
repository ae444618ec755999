"""Exploration at full size with random weights: a step of the network in each format, and the rollout phase of the families.

    python scripts/bench_rollout.py flux1_sol_rl_hpsv2 --peer --out benchmarks/rollout-flux1-h200.json
    python scripts/bench_rollout.py flux1_sol_rl_hpsv2 model.height=512 model.width=512
    python scripts/bench_rollout.py tiny rollout.candidates=24 --formats nvfp4 --repeat 2

* step: the velocity of --rows pictures, of the base in BF16 (`plain_step`) and the policy in each format; seconds, pictures a
  second, operations a second and their share of the best rate at which this run multiplied BF16 matrices, and how many times as
  fast as the base in BF16. (In `bf16` the policy has its adapters beside the base; the others have them merged.)
* rollout: exploring the pool of one prompt and regenerating those that are kept, decoded and scored, against sampling the pool
  in BF16 with all steps and regenerating nothing (`naive_scaling`), of each format.

--peer runs scripts/bench_peer_torch.py on the same shapes beforehand, in a process of its own.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench.random_weights import fresh_state, random_experiment
from bench.timing import best_matmul_rate, finish, operations, parser, rate, seconds

from solrl_jax.config.presets import override, resolve
from solrl_jax.numerics.formats import FORMATS
from solrl_jax.parallel import sharding
from solrl_jax.policy.state import TrainState
from solrl_jax.rollout.generate import prepare
from solrl_jax.training.experiment import Experiment
from solrl_jax.training.iteration import roll_out

silent = lambda stage, rows, done: None


def in_format(experiment: Experiment, name: str) -> Experiment:
    """The same experiment, exploring in another format."""
    return dataclasses.replace(experiment, config=override(experiment.config, (f"rollout.explore.precision={name}",)))


def measure_step(experiment: Experiment, params: Any, rows: int, best: float, repeat: int) -> dict[str, float]:
    """One evaluation of the network. params: the policy, in whatever format."""
    backbone, config = experiment.backbone, experiment.config
    conditioning = backbone.encode([""] * rows, config.model.max_tokens)
    latents = jax.random.normal(jax.random.key(0), (rows, *backbone.pipeline.latent_shape(*experiment.size)))
    velocity = lambda params, x, conditioning: backbone.velocity(params, x, conditioning, jnp.float32(500), jnp.float32(1))
    program = sharding.jit(velocity)
    with jax.set_mesh(backbone.mesh):
        elapsed = seconds(lambda: program(params, latents, conditioning), repeat)
        count = operations(velocity, params, latents, conditioning)
    return {"seconds": elapsed, "pictures_per_second": round(rows / elapsed, 4)} | rate(count, elapsed, best)


def measure_rollout(experiment: Experiment, state: TrainState, params: Any, repeat: int) -> dict[str, float]:
    """The pool of one prompt. params: the policy that explores."""
    rollout, prompts = experiment.config.rollout, experiment.train_prompts[:1]
    prompted = prepare(experiment.backbone, experiment.reward, prompts, experiment.config.model.max_tokens)
    seeds = experiment.seeds(0, 1, prompts, rollout.candidates)
    exact = experiment.policy(state.old)
    run = lambda params, grid, seeds, stage: roll_out(experiment, params, grid, prompted, seeds, stage, silent).latents
    preview, grid = experiment.exploring_grid(rollout.explore.steps), experiment.grid(rollout.steps)
    explore = seconds(lambda: run(params, preview, seeds, "explore"), repeat)
    regenerate = seconds(lambda: run(exact, grid, seeds[:, : rollout.kept], "regenerate"), repeat)
    return {"explore": explore, "regenerate": regenerate, "seconds": explore + regenerate}


def measure_pool(experiment: Experiment, state: TrainState, repeat: int) -> float:
    """The pool of one prompt with all steps, in the training precision."""
    rollout, prompts = experiment.config.rollout, experiment.train_prompts[:1]
    prompted = prepare(experiment.backbone, experiment.reward, prompts, experiment.config.model.max_tokens)
    seeds, exact = experiment.seeds(0, 1, prompts, rollout.candidates), experiment.policy(state.old)
    grid = experiment.grid(rollout.steps)
    return seconds(lambda: roll_out(experiment, exact, grid, prompted, seeds, "", silent).latents, repeat)


def run_peer(arguments: list[str]) -> dict[str, Any]:
    """What the peer says of the same shapes."""
    script = Path(__file__).with_name("bench_peer_torch.py")
    done = subprocess.run([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, help="pictures of a step (default: rollout.chunk)")
    options.add_argument(
        "--formats", default="auto,fp8,nvfp4,nvfp4_46,mxfp8,mxfp4", help="but bf16, which is always there"
    )
    options.add_argument("--peer", action="store_true", help="measure diffusers with torch.compile too")
    args = options.parse_args(arguments)
    config = resolve(args.preset, tuple(args.overrides))
    rows = args.rows or config.rollout.chunk
    beside = {}
    if args.peer:  # before JAX takes the device's memory
        beside = {"peer": run_peer([args.preset, *args.overrides, "--rows", str(rows), "--repeat", str(args.repeat)])}
    experiment = random_experiment(config)
    state, best = fresh_state(experiment), best_matmul_rate(args.repeat)
    names = list(dict.fromkeys(in_format(experiment, name).format.name for name in ["bf16", *args.formats.split(",")]))
    plain = measure_step(experiment, experiment.backbone.transformer, rows, best, args.repeat)
    whole = measure_pool(experiment, state, args.repeat)
    by_format: dict[str, Any] = {}
    for name in names:
        there = in_format(experiment, name)
        sync = seconds(lambda there=there, name=name: there.exploring_policy(state.old, name), args.repeat)
        params = there.exploring_policy(state.old, name)
        step = measure_step(there, params, rows, best, args.repeat)
        rollout = measure_rollout(there, state, there.explorer(state.old, name), args.repeat)
        by_format[name] = {
            "means": FORMATS[name].describe(experiment.device),
            "sync_seconds": sync,
            "step": step | {"times_bf16": round(plain["seconds"] / step["seconds"], 3)},
            "rollout": rollout | {"times_naive_scaling": round(whole / rollout["seconds"], 3)},
        }
        del params
    if beside:
        beside["times_peer"] = round(beside["peer"]["seconds"] / plain["seconds"], 3)
    finish(
        {
            "preset": args.preset,
            "overrides": args.overrides,
            "size": list(experiment.size),
            "rows": rows,
            "parameters": experiment.backbone.pipeline.transformer.size,
            "best_matmul_tflops": round(best / 1e12, 4),
            "plain_step": plain,
            "naive_scaling_seconds": whole,
            "formats": by_format,
            **beside,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
