"""The loop around `train.iterate`: resuming, evaluating, recording, saving. Knows paths and clocks; knows no algorithm.

run.dir/config.yaml             the resolved configuration
run.dir/run.json                versions, devices, what is native and what is emulated
run.dir/metrics.jsonl, .csv     one row an iteration (0: before training), and TensorBoard's files
run.dir/ledger/                 every candidate of every iteration, Parquet
run.dir/checkpoints/000010/     the state after iteration 10
run.dir/profile/                traces of the iterations that were asked for
run.dir/pictures/               fixed prompts and seeds before, during and after; the reward curve
"""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from solrl_jax.conditioning.prompts import draw_prompts
from solrl_jax.config.presets import to_yaml
from solrl_jax.config.schema import Config, batch_line
from solrl_jax.explore.linears import report as report_linears
from solrl_jax.explore.linears import totals
from solrl_jax.explore.monitor import WINDOW, level_after
from solrl_jax.parallel import hosts
from solrl_jax.parallel.sharding import row_groups
from solrl_jax.policy.lora import Adapters
from solrl_jax.policy.state import TrainState, abstract_state, init_state, read_start
from solrl_jax.rewards.host import RewardError
from solrl_jax.run import checkpoint, ledger, pictures, profiling
from solrl_jax.run.hacking import hacking
from solrl_jax.run.identity import fingerprint, refuse_another_run
from solrl_jax.run.metrics import Metrics
from solrl_jax.run.metrics import read as read_metrics
from solrl_jax.run.progress import Interrupted, Reporter
from solrl_jax.run.writer import Saver
from solrl_jax.storage import files
from solrl_jax.storage.files import atomic_write
from solrl_jax.training.evaluate import evaluate, sample_grid
from solrl_jax.training.experiment import Experiment, build
from solrl_jax.training.iteration import iterate

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers")


def run(config: Config, report: Reporter, profile: Collection[int] = ()) -> dict[str, Any]:
    """Trains, or goes on with, the run that `config` describes; returns what `--json` prints.

    An interruption saves the last whole iteration and returns with "interrupted" true; so does a reward that fails, but that
    it is raised then. Raises InputError for what the user can mend, RunError when the run failed for another reason.
    profile: the iterations of which a trace is written.
    """
    folder = Path(config.run.dir)
    with contextlib.ExitStack() as stack:
        hosts.write(lambda: profiling.refuse(profile, folder, config.train.iterations))
        hosts.write(lambda: stack.enter_context(files.only_user(files.writable_directory(folder))))
        hosts.write(lambda: refuse_another_run(folder, config))
        experiment = build(config)
        state, done = _restore(experiment, folder, report)
        # the directory is this run's once all input has been accepted
        hosts.write(lambda: atomic_write(folder / "config.yaml", to_yaml(config)))
        _describe(experiment, folder, done, report)
        metrics = Metrics(folder, tensorboard=config.run.tensorboard, wandb=config.run.wandb, resume_after=done if done else -1)
        hosts.write(lambda: stack.enter_context(metrics))
        saver = stack.enter_context(Saver(folder / "checkpoints", keep=config.run.keep_checkpoints, best=config.run.keep_best))
        hosts.write(lambda: ledger.discard_after(folder / "ledger", done))
        try:
            state, done = _loop(experiment, folder, state, done, metrics, saver, report, profile)
            interrupted, failure = False, None
        except Interrupted as stop:
            state, done, interrupted = stop.state, stop.done, True
            failure = stop.__cause__ if isinstance(stop.__cause__, RewardError) else None
            what = "interrupted" if failure is None else "failed"
            if done:
                _save(saver, folder, experiment, state, done)
                saver.wait()
                report.line(f"{what}: saved after iteration {done}; the same command goes on from there")
            else:
                report.line(f"{what} before the end of the first iteration: nothing to save")
        saver.wait()
        hosts.write(metrics.write_csv)
        if failure is not None:
            raise failure
        if not interrupted:
            _finish(experiment, folder, state)
        return hosts.agreed(lambda: _summary(folder, done, interrupted))


def _loop(
    experiment: Experiment, folder: Path, state: TrainState, done: int, metrics: Metrics, saver: Saver, report: Reporter,
    profile: Collection[int],
):  # fmt: skip
    """From iteration `done` + 1 to the last."""
    config = experiment.config
    report.start(config.train.iterations, done)
    try:
        _prepare(experiment, done, report)
        if _is_due(config, done) and not _evaluation(folder, done):
            _log(metrics, done, _evaluate(experiment, folder, state.ema, done, report))
            if done and config.run.keep_best:
                _save(saver, folder, experiment, state, done)  # again, with its evaluation
        while done < config.train.iterations:
            level = hosts.agreed(lambda: _level(experiment, folder, report))
            with profiling.traced(folder, done + 1, profile):
                after, outcome = iterate(experiment, state, done + 1, report.stage, level)
            state, done = after, done + 1
            hosts.write(partial(ledger.write, folder / "ledger", done, outcome.ledger))
            row = outcome.metrics
            try:
                if _is_due(config, done):
                    row = row | _evaluate(experiment, folder, state.ema, done, report)
            finally:  # an evaluation that does not end is made up for by the next start
                _log(metrics, done, row)
            evaluated = config.run.keep_best and _is_due(config, done)
            if done == config.train.iterations or done % config.run.checkpoint_every == 0 or evaluated:
                _save(saver, folder, experiment, state, done)
                if config.run.checkpoint_every == 1:
                    saver.wait()  # then an iteration that is reported is one that no kill takes back
            report.iteration(done, row)
        return state, done
    except (KeyboardInterrupt, RewardError) as error:
        raise Interrupted(state, done) from error
    finally:
        report.stop()


def _prepare(experiment: Experiment, done: int, report: Reporter) -> None:
    """Encodes all that the rest of the run asks for, so that the text encoders need no room beside the policy; calibrates."""
    config, backbone = experiment.config, experiment.backbone
    drawn = [
        draw_prompts(experiment.train_prompts, config.seed, i, config.train.prompts)
        for i in range(done, config.train.iterations)
    ]
    shown = experiment.test_prompts[: max(config.eval.prompts, config.eval.grid)]
    measured = experiment.calibration_prompts if done < config.train.iterations else []
    prompts = list(dict.fromkeys([p for part in (*drawn, shown, measured) for p in part]))
    show = lambda rows, more: report.stage("encode", rows, more)
    backbone.text_encoders.encode_ahead([""], config.model.max_tokens, None, show)
    backbone.text_encoders.encode_ahead(prompts, config.model.max_tokens, backbone.instruction, show)
    if measured:
        report.stage("calibrate", len(measured), 0)
        experiment.calibrate()
        if ranks := experiment.correction_ranks:
            least, most = min(ranks.values()), max(ranks.values())
            report.line(f"correction: ranks {least} to {most}, as the energy of the inputs falls off")


def _log(metrics: Metrics, done: int, row: dict[str, float]) -> None:
    hosts.write(lambda: metrics.log(done, row))


def _level(experiment: Experiment, folder: Path, report: Reporter) -> int:
    """How the next iteration explores, of `Experiment.levels`; says so where that is news."""
    floor, ladder = experiment.config.rollout.explore.floor, experiment.levels
    if floor is None:
        return 0
    reported = [(int(row["fidelity/level"]), row["fidelity/spearman"]) for row in read_metrics(folder) if row["iteration"]]
    history = [(level, float("nan") if value is None else value) for level, value in reported]
    level = level_after(history, floor, len(ladder) - 1)
    if history and level != history[-1][0]:
        values = ", ".join(f"{value:.2f}" for _, value in history[-WINDOW:])
        how = f"{ladder[level].precision}, {ladder[level].steps} steps"
        report.line(f"exploring in {how} from now on: Spearman of the kept samples was {values}, the floor is {floor:g}")
    return level


def _evaluation(folder: Path, done: int) -> dict[str, float]:
    """What the record says of the evaluation after iteration `done`, the same on every host; empty if there was none."""

    def find() -> dict[str, float]:
        rows = [row for row in read_metrics(folder) if row["iteration"] == done and "eval/reward" in row]
        return {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}

    return hosts.agreed(find)


def _is_due(config: Config, done: int) -> bool:
    """Whether there is an evaluation after iteration `done`."""
    return done in (0, config.train.iterations) or bool(config.eval.every and done % config.eval.every == 0)


def _evaluate(experiment: Experiment, folder: Path, ema: Adapters, done: int, report: Reporter) -> dict[str, float]:
    """Scores of the averaged policy on the test prompts, and its picture."""
    config, policy = experiment.config, experiment.policy(ema)
    total = config.eval.prompts * config.eval.images_per_prompt
    report.stage("evaluate", total, 0)
    result = evaluate(experiment, policy, lambda rows: report.stage("evaluate", total, rows))
    if config.eval.grid:
        images, prompts = sample_grid(experiment, policy)
        captions, path = [p for p in prompts for _ in range(images.shape[1])], folder / "pictures" / f"iteration-{done:06d}.png"
        hosts.write(lambda: pictures.save_grid(path, images.reshape(-1, *images.shape[2:]), images.shape[1], captions))
    scores = {f"eval/{name}": mean for name, mean in result.means.items()}
    errors = {f"eval/{name}/standard_error": error for name, error in result.errors.items()}
    report.line(
        f"evaluation after iteration {done}: "
        + ", ".join(f"{name} {mean:.3f} ± {result.errors[name]:.3f}" for name, mean in result.means.items())
    )
    row = scores | errors | {f"eval/reward_failures/{name}": float(count) for name, count in result.failed.items()}
    if config.reward.watched:
        lines = hosts.agreed(lambda: hacking(read_metrics(folder), row, config.reward.watched))
        for line in lines:
            report.line(line)
        row["eval/hacking"] = float(bool(lines))
    return row


def _restore(experiment: Experiment, folder: Path, report: Reporter) -> tuple[TrainState, int]:
    """The state to go on from, and how many iterations it has behind it."""
    config, base, mesh = experiment.config, experiment.backbone.transformer, experiment.backbone.mesh
    targets = list(experiment.targets)
    abstract = abstract_state(base, targets, config.lora, config.optimizer, mesh)
    expected = {"fingerprint": fingerprint(config, experiment.format.name)}
    restored = checkpoint.restore_latest(folder / "checkpoints", abstract, expected)
    if restored is None:
        start = read_start(config.lora, targets, experiment.backbone.parameter_table())
        return init_state(jax.random.key(config.seed), base, targets, config.lora, config.optimizer, mesh, start=start), 0
    state, meta, warnings = restored
    for warning in warnings:
        report.line(warning)
    report.line(f"resuming after iteration {meta['iteration']}")
    return state, meta["iteration"]


def _save(saver: Saver, folder: Path, experiment: Experiment, state: TrainState, done: int) -> None:
    """The key of the run is its seed, and the cursor through the prompts is the iteration: both are named for the reader.

    The evaluation after the iteration is in the record already, if there was one.
    """
    config, named = experiment.config, fingerprint(experiment.config, experiment.format.name)
    meta = {"fingerprint": named, "key": config.seed, "prompt_cursor": done * config.train.prompts}
    saver.save(done, state, meta | {"evaluation": _evaluation(folder, done) or None})


def _describe(experiment: Experiment, folder: Path, done: int, report: Reporter) -> None:
    """Says and records what runs where."""
    config, mesh, backbone = experiment.config, experiment.backbone.mesh, experiment.backbone
    device, pipeline = jax.devices()[0], backbone.pipeline
    form, correction = experiment.format, config.rollout.explore.correction
    exact = experiment.exact_steps(form.name)
    first = f", the first {exact} of {config.rollout.explore.steps} steps in {config.rollout.precision}" if exact else ""
    decoded = f", decoded by {config.rollout.explore.vae}" if config.rollout.explore.vae else ""
    rows = report_linears(backbone.transformer, config.model.quantize, form, correction)
    facts = {
        "solrl_jax": importlib.metadata.version("solrl_jax"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": f"{mesh.size} x {device.device_kind}",
        "hosts": jax.process_count(),
        "mesh": dict(mesh.shape),
        "exploration": {
            "precision": config.rollout.explore.precision, "format": form.name, "native": form.native(experiment.device),
            "exact_steps": exact, "vae": config.rollout.explore.vae, "means": form.describe(experiment.device),
        },
        "parameters": {"transformer": pipeline.transformer.size, **{name: c.size for name, c in pipeline.text_encoders.items()},
                       "vae": pipeline.vae.size},
        "adapted": list(experiment.targets),
        "quantized": [row.path for row in rows if not row.kept],
        "linears": totals(rows),
        "started_after_iteration": done,
    }  # fmt: skip
    hosts.write(lambda: atomic_write(folder / "run.json", json.dumps(facts, indent=2) + "\n"))
    report.line(f"{config.preset}: {config.model.name}, {config.family}, {'+'.join(config.reward.weights)} -> {folder}")
    report.line(
        f"devices: {facts['devices']}, mesh {facts['mesh']}; exploration in {form.describe(experiment.device)}{first}{decoded}"
    )
    report.line(batch_line(config, row_groups(mesh)))


def _finish(experiment: Experiment, folder: Path, state: TrainState) -> None:
    """The pictures that tell the run: before and after, and the curves."""
    if experiment.config.eval.grid:
        unchanged = jax.tree.map(jnp.zeros_like, state.ema)  # the base, through the program that is compiled already
        before, prompts = sample_grid(experiment, experiment.policy(unchanged))
        after, _ = sample_grid(experiment, experiment.policy(state.ema))
        hosts.write(lambda: pictures.save_before_after(folder / "pictures" / "before-after.png", before, after, prompts))
    hosts.write(lambda: _draw_curves(experiment, folder))


def _draw_curves(experiment: Experiment, folder: Path) -> None:
    rows = read_metrics(folder)
    name = next(iter(experiment.config.reward.weights))
    strict = {"strict success, held-out": f"eval/{name}/strict"} if any(f"eval/{name}/strict" in row for row in rows) else {}
    pictures.save_curve(
        folder / "pictures" / "reward.png", rows,
        {"explored pool": "pool/reward", "kept, as trained on": "kept/reward", "held-out prompts": "eval/reward"} | strict,
        {"Spearman, proxy and regenerated": "fidelity/spearman"}, labels=("reward", "fidelity"), title=folder.name,
    )  # fmt: skip
    if watched := experiment.config.reward.watched:
        pictures.save_curve(
            folder / "pictures" / "watched.png", rows, {"held-out prompts": "eval/reward"},
            {name: f"eval/{name}" for name in watched}, labels=("trained on", "watched"), title=folder.name,
        )  # fmt: skip


def _summary(folder: Path, done: int, interrupted: bool) -> dict[str, Any]:
    rows = [row for row in read_metrics(folder) if "eval/reward" in row]
    scores = lambda row: {k: v for k, v in row.items() if k.startswith("eval/")}
    return {
        "run": str(folder),
        "iterations": done,
        "interrupted": interrupted,
        "before": scores(rows[0]) if rows else {},
        "after": scores(rows[-1]) if rows else {},
    }
