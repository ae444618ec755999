"""`solrl`: the command line. Exit code 0; 1: the run failed; 2: bad input. Results on standard output, progress on error."""

import logging
import os
import sys
from pathlib import Path
from typing import Any, get_args

import click

from solrl_jax.commands.cli_files import convert, export, presets
from solrl_jax.commands.options import (
    bar,
    checkpoint_option,
    finish,
    finite,
    hosts_options,
    iterations,
    join_hosts,
    json_option,
    machine_options,
    overrides_argument,
)  # fmt: skip
from solrl_jax.config.schema import ConfigError, Precision
from solrl_jax.storage.errors import InputError, RunError, first_line

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we fork nothing, and it warns as if we did
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it says at import that PyTorch is absent: so it should be


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="solrl_jax")
def cli() -> None:
    """RL post-training of text-to-image flow models: explore in FP4, train in BF16."""


@cli.command()
@click.argument("preset")
@overrides_argument
@click.option(
    "--profile", multiple=True, metavar="ITER", callback=iterations,
    help="Write a trace of that iteration for TensorBoard and Perfetto; may be repeated, or several with commas.",
)  # fmt: skip
@hosts_options
@json_option
def train(
    preset: str, overrides: tuple[str, ...], profile: tuple[int, ...], hosts: str | None, host: int | None,
    coordinator: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Train PRESET (see `solrl presets`); the same command resumes.

    \b
    solrl train tiny
    solrl train tiny family=naive_quant train.iterations=20 run.dir=runs/x seed=1
    srun solrl train flux1_sol_rl_hpsv2 --hosts auto mesh.fsdp=8 run.dir=/shared/run
    """
    from solrl_jax.config.presets import resolve
    from solrl_jax.run import loop as trainer
    from solrl_jax.run.progress import Reporter

    config = resolve(preset, overrides)
    join_hosts(hosts, host, coordinator)
    with Reporter() as report:
        summary = trainer.run(config, report, profile)
    if report.speaks:
        finish(summary, as_json, f"{'interrupted' if summary['interrupted'] else 'done'}: {summary['run']}")


@cli.command()
@click.argument("preset")
@overrides_argument
@json_option
def encode(preset: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Fill the cache with PRESET's encoded prompts: training then never loads the text encoders.

    \b
    solrl encode flux1_sol_rl_pickscore model.cache=/data/prompts
    """
    from solrl_jax.config.presets import resolve
    from solrl_jax.training.experiment import fill_cache

    with bar(None, "encode", "prompt") as shown:
        summary = fill_cache(resolve(preset, overrides), shown.update)
    size = f"{summary['bytes_each'] / 1e6:.2g} MB each"
    finish(summary, as_json, f"{summary['prompts']} prompts, {summary['encoded']} new, {size}: {summary['cache']}")


@cli.command(name="eval")
@click.argument("target", metavar="RUN_OR_MODEL")
@overrides_argument
@click.option("--preset", default="tiny", show_default=True, help="Prompts, reward and sampler for a bare model directory.")
@checkpoint_option
@json_option
def evaluate(target: str, overrides: tuple[str, ...], preset: str, checkpoint: str, as_json: bool) -> None:
    """Score a run's averaged policy, or a model directory, on the test prompts."""
    from solrl_jax.run.directory import configuration, find_checkpoint, load_policy
    from solrl_jax.training.evaluate import evaluate as score
    from solrl_jax.training.experiment import build

    config, run = configuration(target, overrides, preset)
    chosen = find_checkpoint(target, checkpoint)
    experiment = build(config)
    adapters, iteration = load_policy(run, config, experiment.backbone, chosen)
    with bar(config.eval.prompts * config.eval.images_per_prompt, "evaluate") as shown:
        result = score(experiment, experiment.policy(adapters), shown.update)
    lines = [f"{name}: {mean:.4f} ± {result.errors[name]:.4f}" for name, mean in result.means.items()]
    summary = {"target": target, "iteration": iteration, "images": config.eval.prompts * config.eval.images_per_prompt}
    finish(summary | {"means": result.means, "standard_errors": result.errors}, as_json, "\n".join(lines))


@cli.command()
@click.argument("target", metavar="RUN_OR_PRESET")
@overrides_argument
@click.option("--prompts", default=8, show_default=True, type=click.IntRange(1), help="Test prompts, each with a whole pool.")
@click.option("--formats", metavar="F,F,...", help="Formats to explore in (default: the run's).")
@click.option("--steps", metavar="S,S,...", help="Numbers of steps to explore with (default: the run's).")
@click.option("--exact-steps", metavar="E,E,...", help="How many of them, the first ones, are exact (default: the run's).")
@click.option("--sigmas", metavar="own,first", help="How their sigmas are chosen (default: the run's).")
@click.option("--candidates", metavar="N,N,...", help="Sizes of the pools (default: the run's).")
@click.option("--out", type=click.Path(path_type=Path), help="Where tables and pictures go (default: the run, or runs/rank).")
@json_option
def rank(
    target: str, overrides: tuple[str, ...], prompts: int, formats: str | None, steps: str | None,
    exact_steps: str | None, sigmas: str | None, candidates: str | None, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure how well exploration ranks candidates: whole pools, explored and regenerated in full.

    \b
    solrl rank tiny prompts.test=embedded:shapes-train --prompts 64 --formats nvfp4,fp8,bf16 --steps 4,6,10
    """
    from solrl_jax.numerics.formats import FORMATS
    from solrl_jax.run.directory import configuration, load_policy, output_directory
    from solrl_jax.training import rank as ranking
    from solrl_jax.training.experiment import build

    config, run = configuration(target, overrides, None)
    settings = ranking.settings(config.rollout, formats, steps, exact_steps, sigmas, candidates)
    folder = output_directory(out or run or Path("runs/rank"))
    experiment = build(config)
    if prompts > len(experiment.test_prompts):
        raise InputError(f"--prompts {prompts}: there are {len(experiment.test_prompts)} test prompts")
    adapters, _ = load_policy(run, config, experiment.backbone)
    total = ranking.rounds(settings) * prompts * max(s.candidates for s in settings)
    with bar(total, "rank") as shown:
        show = lambda stage, rows, done: shown.update(done)
        pools = ranking.explore_and_regenerate(experiment, adapters, prompts, settings, show)
    results = [ranking.summarise(pools, setting, config.rollout.kept) for setting in settings]
    ranking.write(folder, results, pools)
    means = {s.precision: FORMATS[s.precision].describe(experiment.device) for s in settings}
    text = "\n".join([ranking.table(results), *(f"{name}: {how}" for name, how in means.items())])
    finish({"out": str(folder), "formats": means, "settings": ranking.without_prompts(results)}, as_json, text)


@cli.command()
@click.argument("preset")
@overrides_argument
@machine_options
@json_option
def plan(preset: str, overrides: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """What training PRESET would need: memory, operations, messages, time; from shapes, on no device. Needs no weights.

    \b
    solrl plan flux1_sol_rl_hpsv2 --devices 8 --memory 80GB
    solrl plan flux1_sol_rl_hpsv2 mesh.fsdp=4 --device tpu-v6e --hosts 32
    """
    from solrl_jax.config.presets import resolve
    from solrl_jax.planning.devices import machine as describe
    from solrl_jax.planning.devices import pretend

    config, machine = resolve(preset, overrides), describe(**options)
    pretend(machine.count)
    from solrl_jax.planning import plan as planning

    with bar(None, "plan", "step") as shown:

        def show(doing: str) -> None:
            shown.set_postfix_str(doing)
            shown.update()

        summary = planning.plan(config, machine, show)
    finish(summary, as_json, planning.table(summary))


@cli.command()
@click.argument("target", metavar="RUN_OR_PRESET")
@overrides_argument
@click.option("--errors", is_flag=True, help="Load the weights, a run's averaged policy merged, and measure what each loses.")
@json_option
def linears(target: str, overrides: tuple[str, ...], errors: bool, as_json: bool) -> None:
    """List the linears of a model: quantised or not and why, and the bytes they take before and after. Loads no weights.

    \b
    solrl linears tiny rollout.explore.precision=mxfp4 --errors
    """
    import dataclasses

    from solrl_jax.backbone.backbone import DTYPES, load_backbone, open_model
    from solrl_jax.explore import linears as lines
    from solrl_jax.numerics.formats import resolve
    from solrl_jax.parallel.sharding import make_mesh
    from solrl_jax.run.directory import configuration, load_policy
    from solrl_jax.training.experiment import device_facts

    config, run = configuration(target, overrides, None)
    device = device_facts()
    form = resolve(config.rollout.explore.precision, device)
    pipeline = open_model(config.model.path)
    shapes = pipeline.transformer.shapes(DTYPES[config.rollout.precision])
    try:
        rows = lines.report(shapes, config.model.quantize, form, config.rollout.explore.correction)
    except ValueError as error:
        raise InputError(str(error)) from error
    if errors:
        backbone = load_backbone(pipeline, config.rollout.precision, make_mesh(-1, 1))
        adapters, _ = load_policy(run, config, backbone)
        rows = lines.with_errors(rows, backbone.transformer, adapters, config.lora.alpha / config.lora.rank, form)
    summary = {"exploration": form.describe(device), **lines.totals(rows), "per_linear": list(map(dataclasses.asdict, rows))}
    finish(summary, as_json, lines.table(rows, form))


@cli.command()
@click.argument("target", metavar="RUN_OR_MODEL_DIR")
@click.option("--prompts", required=True, help="Text file of one prompt a line, or embedded:NAME.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for the PNGs and arrays.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1))
@click.option("--guidance", default=1.0, show_default=True, type=click.FloatRange(0.0), callback=finite, help="1: unguided.")
@click.option(
    "--true-cfg", default=1.0, show_default=True, type=click.FloatRange(0.0), callback=finite,
    help="For FLUX.1, whose guidance is embedded: classifier-free guidance as well.",
)  # fmt: skip
@click.option("--negative", default="", help="What guidance leads away from (default: the empty prompt).")
@click.option("--instruction", metavar="FILE", help="SANA: a file with the instruction that goes before every prompt.")
@click.option("--tile", metavar="PIXELS", type=click.IntRange(1), help="Decode in tiles of that side, which needs less memory.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1))
@click.option("--size", metavar="HxW", help="Pixels, e.g. 1024x1024 (default: the run's or the model's).")
@click.option("--latents", type=click.Path(path_type=Path), help="Initial noise: .npy, float32 [N, C, h, w].")
@click.option(
    "--precision", default="bf16", show_default=True, type=click.Choice(get_args(Precision)),
    help="Of all steps; a four-bit one without what a run's exploration corrects.",
)  # fmt: skip
@click.option("--lora", type=click.Path(path_type=Path), help="For a model: a LoRA file or folder of diffusers or PEFT.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest prompt (default: the run's or the model's).")
@checkpoint_option
@json_option
def sample(target: str, size: str | None, as_json: bool, **options: Any) -> None:
    """Make pictures of prompts with a run's averaged policy, or with a diffusers model directory."""
    from solrl_jax.commands.sample import Request
    from solrl_jax.commands.sample import sample as make

    height_width = None
    if size is not None:
        parts = size.lower().split("x")
        if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise InputError(f"--size {size!r}: expected HEIGHTxWIDTH in pixels, e.g. 512x768")
        height_width = (int(parts[0]), int(parts[1]))
    with bar(None, "sample") as shown:
        summary = make(target, Request(size=height_width, **options), shown.update)
    finish(summary, as_json, f"{summary['images']} images in {summary['out']}, {summary['precision']}")


for command in (export, convert, presets):
    cli.add_command(command)


def main() -> None:
    """The entry point: a user's mistake is one line on standard error, never a traceback."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # says that there is no TPU
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(1)
    except click.ClickException as error:
        if "\n" in (message := error.format_message()):  # the help page, for a command without arguments
            error.show()
            sys.exit(error.exit_code)
        fail(message, error.exit_code)
    except (ConfigError, InputError) as error:
        fail(str(error), 2)
    except RunError as error:
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("interrupted", 1)
    except MemoryError as error:
        fail(f"out of memory: {first_line(error)}; a smaller rollout.chunk or optimizer.micro_batch needs less", 1)


def fail(message: str, code: int) -> None:
    click.echo(f"solrl: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
