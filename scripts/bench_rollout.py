"""Measures exploration at full size with random weights, in each format.

    python scripts/bench_rollout.py flux1_sol_rl_hpsv2 --peer --out rollout-flux1.json
    python scripts/bench_rollout.py flux1_sol_rl_hpsv2 model.height=512 model.width=512
    python scripts/bench_rollout.py tiny rollout.candidates=24 --formats nvfp4 --repeat 2

* step: one evaluation of the network for `--rows` samples, by the base in BF16 (`plain_step`) and
  by the policy in each format. The result has the seconds, images and operations per second, their
  share of the best rate of BF16 matmuls in this run, and the speed-up over the base in BF16. In
  `bf16` the policy keeps its adapters beside the base; in the other formats they are merged.
* rollout: exploring the pool of one prompt and regenerating the kept candidates, with decoding and
  scoring, in each format. It is compared with generating the pool in BF16 with all steps
  (`naive_scaling`).

`--peer` first runs scripts/bench_peer_torch.py on the same shapes, in its own process.
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
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.state import TrainState


@dataclasses.dataclass(frozen=True)
class Bench:
    """The experiment and the settings of all measurements.

    Attributes:
        experiment: The experiment. It explores in a quantizing format; the methods take the format
            that is measured.
        state: The initial state of the training.
        rows: The batch size of a step.
        repeat: The number of calls whose median is taken.
        best: The rate of the fastest BF16 matmul, in operations per second.
    """

    experiment: Experiment
    state: TrainState
    rows: int
    repeat: int
    best: float

    def step(self, params: Params) -> dict[str, float]:
        """Measures one evaluation of the network with the parameters of a policy in any format."""
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
        """The seconds to generate all candidates of one prompt in the training precision."""
        return self._rolled_out(self._full("pool"), self.experiment.config.rollout.candidates)

    def rollout(self, precision: str) -> dict[str, float]:
        """The seconds to explore one prompt in a format, and to regenerate the kept candidates."""
        rollout = self.experiment.config.rollout
        exploring = self.experiment.explorer.sampler(
            self.state.old, ExplorationSetting(precision, rollout.explore.num_steps)
        )
        explore = self._rolled_out(exploring, rollout.candidates)
        regenerate = self._rolled_out(self._full("regenerate"), rollout.kept)
        return {"explore": explore, "regenerate": regenerate, "seconds": explore + regenerate}

    def format(self, name: str, plain: float, whole: float) -> dict[str, Any]:
        """Measures a format.

        Args:
            name: The name of the format.
            plain: The seconds of a step of the base in BF16.
            whole: The seconds of generating the pool in BF16.

        Returns:
            The results of `sync`, `step` and `rollout`.
        """
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

    def _rolled_out(self, sampler: Sampler, candidates: int) -> float:
        experiment = self.experiment
        prompts = self.experiment.train_prompts[:1]
        prompted = experiment.encode_prompts(prompts, experiment.reward)
        seeds = experiment.seeds("candidate", prompts, candidates, iteration=1)
        return seconds(
            lambda: (
                generate(
                    experiment.backbone,
                    sampler,
                    prompted,
                    SeedBatch.from_seeds(seeds),
                    experiment.reward,
                ).latents
            ),
            self.repeat,
        )


def run_peer(arguments: list[str]) -> dict[str, Any]:
    """Runs scripts/bench_peer_torch.py with the arguments. Returns its report."""
    script = Path(__file__).with_name("bench_peer_torch.py")
    process = subprocess.run(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--rows", type=int, help="batch size of a step (default: rollout.per_device_batch_size)"
    )
    options.add_argument(
        "--formats", default="auto,fp8,nvfp4", help="separated by commas; bf16 is always measured"
    )
    options.add_argument(
        "--peer", action="store_true", help="also measure diffusers with torch.compile"
    )
    args = options.parse_args(arguments)
    # With a quantizing format the experiment knows which linear layers are quantized.
    config = resolve(args.preset, (*args.overrides, "rollout.explore.precision=nvfp4"))
    rows = args.rows or config.rollout.per_device_batch_size
    peer = None
    if args.peer:  # before JAX allocates the device's memory
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
