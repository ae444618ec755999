"""Exploration at full size with random weights: a step of the network in each format, and the rollout phase of the families.

    python scripts/bench_rollout.py flux1_sol_rl_hpsv2 --peer --out benchmarks/rollout-flux1-h200.json
    python scripts/bench_rollout.py flux1_sol_rl_hpsv2 model.height=512 model.width=512
    python scripts/bench_rollout.py tiny rollout.candidates=24 --formats nvfp4 --repeat 2

* step: the velocity of --rows pictures, of the base in BF16 (`plain_step`), and of the policy in each format. Reported:
  seconds, pictures a second, operations a second, their share of the best rate at which this run multiplied BF16 matrices,
  and how many times as fast as the base in BF16. (In `bf16` the policy has its adapters beside the base; in the other formats
  they are merged.)
* rollout: exploring the pool of one prompt and regenerating the kept candidates, decoded and scored, in each format. It is
  compared with sampling the pool in BF16 with all steps and regenerating nothing (`naive_scaling`).

--peer runs scripts/bench_peer_torch.py on the same shapes first, in a process of its own.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench.random_weights import random_experiment
from bench.timing import best_matmul_rate, finish, operations, parser, rate, seconds

from solrl_jax.config.presets import resolve
from solrl_jax.models.loading.weights import Params
from solrl_jax.parallel import sharding
from solrl_jax.quant.formats import FORMATS, resolve_format
from solrl_jax.rl.experiment import Experiment, fresh_state
from solrl_jax.rl.explore.monitor import ExplorationSetting
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.state import TrainState


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    experiment: (
        Experiment  # its format quantises; the formats that are measured are named beside it
    )
    state: TrainState
    rows: int  # pictures of a step
    repeat: int
    best: float  # operations a second of the best BF16 product

    def step(self, params: Params) -> dict[str, float]:
        """One evaluation of the network. params: the policy, in any format."""
        backbone = self.experiment.backbone
        shape = self._full("step").shape
        conditioning = backbone.encode(
            [""] * self.rows, self.experiment.config.model.max_sequence_length
        )
        latents = jax.random.normal(jax.random.key(0), (self.rows, *shape))

        def velocity(params, x, conditioning):
            return backbone.velocity(params, x, conditioning, jnp.float32(500), jnp.float32(1))

        program = sharding.jit(velocity)
        with jax.set_mesh(backbone.mesh):
            elapsed = seconds(lambda: program(params, latents, conditioning), self.repeat)
            count = operations(velocity, params, latents, conditioning)
        return {"seconds": elapsed, "pictures_per_second": round(self.rows / elapsed, 4)} | rate(
            count, elapsed, self.best
        )

    def pool(self) -> float:
        """Seconds for all candidates of one prompt with all steps, in the training precision."""
        return self._rolled_out(self._full("pool"), self.experiment.config.rollout.candidates)

    def rollout(self, precision: str) -> dict[str, float]:
        """Seconds for exploring all candidates of one prompt in `precision`, and for regenerating those that are kept."""
        rollout = self.experiment.config.rollout
        exploring = self.experiment.explorer.sampler(
            self.state.old, ExplorationSetting(precision, rollout.explore.num_steps)
        )
        explore = self._rolled_out(exploring, rollout.candidates)
        regenerate = self._rolled_out(self._full("regenerate"), rollout.kept)
        return {"explore": explore, "regenerate": regenerate, "seconds": explore + regenerate}

    def format(self, name: str, plain: float, whole: float) -> dict[str, Any]:
        """A format's results. plain: seconds of a step of the base in BF16; whole: of the pool in BF16."""
        explorer = self.experiment.explorer
        sync = seconds(lambda: explorer.policy(self.state.old, name), self.repeat)
        step = self.step(explorer.policy(self.state.old, name))
        rollout = self.rollout(name)
        return {
            "means": FORMATS[name].describe(self.experiment.device),
            "sync_seconds": sync,
            "step": step | {"times_bf16": round(plain / step["seconds"], 3)},
            "rollout": rollout | {"times_naive_scaling": round(whole / rollout["seconds"], 3)},
        }

    def _full(self, name: str) -> Sampler:
        return self.experiment.sampler(
            name, self.state.old, self.experiment.config.rollout.num_steps
        )

    def _rolled_out(self, stage: Sampler, candidates: int) -> float:
        experiment = self.experiment
        prompts = self.experiment.train_prompts[:1]
        prompted = experiment.encode_prompts(prompts, experiment.reward)
        seeds = experiment.seeds("candidate", prompts, candidates, iteration=1)
        return seconds(
            lambda: (
                generate(
                    experiment.backbone,
                    stage,
                    prompted,
                    SeedBatch.from_seeds(seeds),
                    experiment.reward,
                ).latents
            ),
            self.repeat,
        )


def run_peer(arguments: list[str]) -> dict[str, Any]:
    """The peer's report on the same shapes."""
    script = Path(__file__).with_name("bench_peer_torch.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--rows", type=int, help="pictures of a step (default: rollout.per_device_batch_size)"
    )
    options.add_argument(
        "--formats", default="auto,fp8,nvfp4", help="with commas; bf16 is always measured"
    )
    options.add_argument(
        "--peer", action="store_true", help="measure diffusers with torch.compile too"
    )
    args = options.parse_args(arguments)
    # a format that quantises: the experiment then knows which linears are quantised
    config = resolve(args.preset, (*args.overrides, "rollout.explore.precision=nvfp4"))
    rows = args.rows or config.rollout.per_device_batch_size
    peer = None
    if args.peer:  # before JAX takes the device's memory
        peer = run_peer(
            [args.preset, *args.overrides, "--rows", str(rows), "--repeat", str(args.repeat)]
        )
    experiment = random_experiment(config)
    bench = Bench(
        experiment, fresh_state(experiment), rows, args.repeat, best_matmul_rate(args.repeat)
    )
    plain = bench.step(experiment.backbone.transformer)
    whole = bench.pool()
    named = [
        resolve_format(name, experiment.device).name for name in ("bf16", *args.formats.split(","))
    ]
    result = {
        "preset": args.preset,
        "overrides": args.overrides,
        "size": list(experiment.size),
        "rows": rows,
        "parameters": experiment.backbone.pipeline.transformer.num_parameters,
        "best_matmul_tflops": round(bench.best / 1e12, 4),
        "plain_step": plain,
        "naive_scaling_seconds": whole,
        "formats": {
            name: bench.format(name, plain["seconds"], whole) for name in dict.fromkeys(named)
        },
    }
    if peer is not None:
        result |= {"peer": peer, "times_peer": round(peer["seconds"] / plain["seconds"], 3)}
    finish(result, args.out)


if __name__ == "__main__":
    main()
