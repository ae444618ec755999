"""Measures the phases of an iteration on a CPU, and compares sampling with diffusers.

    python scripts/bench_cpu.py tiny --out benchmarks/cpu.json

* phases: the median seconds of each phase of an iteration, including scoring, after a first
  iteration that compiles; the operations of its matmuls as compiled by XLA; and their rate as a
  share of the best rate of square matmuls in this run, in BF16 or in float32.
* sampling: the seconds of `--steps` steps for `--pictures` images with each embedded pipeline, from
  encoded prompts to pixels, in BF16 and in float32. diffusers' pipelines run in PyTorch eager mode
  with two threads, in both dtypes. `times_diffusers` compares the same dtype,
  `best_times_diffusers` the faster dtype of each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from bench.timing import PACKAGES, best_matmul_rate, finish, operations, parser, rate

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.planning.abstract import abstract_experiment, open_configurations
from solrl_jax.planning.phases import Phases, Program
from solrl_jax.rl.experiment import build, first_device_info, fresh_state, open_mesh
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.iteration import iterate

MODELS = ("tiny-sana", "tiny-flux", "tiny-sd3")
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
THREADS = 2  # of PyTorch and OpenMP


def phases(config: Config, repeat: int, best: float) -> dict[str, Any]:
    """Measures the phases of an iteration.

    Args:
        config: The configuration of the run.
        repeat: The number of iterations whose median is taken, after one that compiles.
        best: The best matmul rate of this machine, in operations per second.

    Returns:
        By phase, the seconds and the operations, with their rate as a share of `best`.
    """
    counts = counted(config)
    experiment = build(config)
    state = fresh_state(experiment)
    rows = []
    for iteration in range(1, repeat + 2):
        state, outcome = iterate(experiment, state, iteration)
        rows.append(outcome.metrics)
    took = {name: statistics.median(row[f"seconds/{name}"] for row in rows[1:]) for name in counts}
    return {
        name: {"seconds": round(took[name], 4)} | rate(counts[name], took[name], best)
        for name in counts
    }


def counted(config: Config) -> dict[str, int]:
    """Counts the operations of the matmuls in each phase. Both rollout phases include scoring."""
    shapes = abstract_experiment(
        config, open_configurations(config.model.path), first_device_info(), open_mesh(config)
    )
    planned = Phases(shapes)
    counts = Counter[str]()
    codes = planned.codes()

    def count(program: Program) -> int:
        with jax.set_mesh(program.mesh):
            return operations(program.function, *program.arguments)

    for phase in ("encode", "sync", "explore", "regenerate", "update"):
        if planned.has(phase):
            counts[phase] = sum(
                count(program) * program.calls for program in planned.programs(phase, codes)
            )
    scored = sum(map(count, planned.programs("score", codes)))
    for phase, chunks in zip(
        ("explore", "regenerate"), planned.num_batches(planned.rows_mesh.size), strict=True
    ):
        counts[phase] += scored * chunks
    return dict(counts)


def seconds(run: Callable[[], Any], repeat: int) -> float:
    """The median time of `repeat` calls, after two calls that compile and warm up."""
    times = []
    for _ in range(repeat + 2):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def sampling(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures an embedded pipeline. Returns our seconds and those of diffusers, by dtype."""
    ours = {}
    for precision in PRECISIONS:
        experiment = build(resolve("tiny", (f"model={model}", f"rollout.precision={precision}")))
        prompts = experiment.train_prompts[: args.pictures]
        prompted = experiment.encode_prompts(prompts)
        rows = SeedBatch.from_seeds(experiment.seeds("candidate", prompts, 1))
        sampler = experiment.sampler("sample", fresh_state(experiment).ema, args.steps)

        def make():
            return generate(experiment.backbone, sampler, prompted, rows, keep_images=True)

        ours[precision] = seconds(make, args.repeat)
    command = [
        sys.executable,
        __file__,
        "tiny",
        "--peer",
        model,
        "--pictures",
        str(args.pictures),
        "--steps",
        str(args.steps),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    process = subprocess.run(
        [*command, "--repeat", str(args.repeat)],
        stdout=subprocess.PIPE,
        check=True,
        env=environment,
    )
    theirs = json.loads(process.stdout)
    return {
        "seconds": ours,
        "diffusers_seconds": theirs,
        "times_diffusers": {name: round(theirs[name] / ours[name], 2) for name in PRECISIONS},
        "best_times_diffusers": round(min(theirs.values()) / min(ours.values()), 2),
    }


def peer(model: str, args: argparse.Namespace) -> dict[str, float]:
    """Measures diffusers' pipeline on encoded prompts. Returns the seconds by dtype."""
    import diffusers
    import torch

    torch.set_num_threads(THREADS)
    config = resolve("tiny", (f"model={model}",))
    size = {"height": config.model.height, "width": config.model.width, "output_type": "pt"}
    texts = ["a red circle above a blue square"] * args.pictures
    took = {}
    for precision, dtype in PRECISIONS.items():
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            EMBEDDED_FOLDER / model, torch_dtype=getattr(torch, dtype)
        )
        pipeline.set_progress_bar_config(disable=True)

        def encode(**more):
            return pipeline.encode_prompt(
                texts, max_sequence_length=config.model.max_sequence_length, **more
            )

        with torch.inference_mode():
            if model == "tiny-sana":
                embeds, mask, *_ = encode(do_classifier_free_guidance=False)
                conditioning = {
                    "prompt_embeds": embeds,
                    "prompt_attention_mask": mask,
                    "use_resolution_binning": False,
                }
            elif model == "tiny-flux":
                embeds, pooled, _ = encode(prompt_2=None)
                conditioning = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
            else:
                embeds, _, pooled, _ = encode(
                    prompt_2=None, prompt_3=None, do_classifier_free_guidance=False
                )
                conditioning = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
            guided = {
                "guidance_scale": config.rollout.guidance_scale,
                "num_inference_steps": args.steps,
            }
            took[precision] = seconds(
                lambda: pipeline(**conditioning, **guided, **size), args.repeat
            )
    return took


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--pictures", type=int, default=48)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--models", default=",".join(MODELS), help="with commas")
    options.add_argument("--peer", choices=MODELS, help=argparse.SUPPRESS)
    args = options.parse_args(arguments)
    if args.peer:
        print(json.dumps(peer(args.peer, args)))
        return
    rates = {
        "bf16": best_matmul_rate(args.repeat),
        "fp32": best_matmul_rate(args.repeat, jnp.float32),
    }
    result = {
        "preset": args.preset,
        "overrides": args.overrides,
        "load": os.getloadavg()[0],
        "best_matmul_tflops": {name: round(value / 1e12, 4) for name, value in rates.items()},
        "phases": phases(
            resolve(args.preset, tuple(args.overrides)), args.repeat, max(rates.values())
        ),
        "pictures": args.pictures,
        "steps": args.steps,
        "sampling": {model: sampling(model, args) for model in args.models.split(",")},
    }
    finish(result, args.out, (*PACKAGES, "torch", "diffusers"))


if __name__ == "__main__":
    main()
