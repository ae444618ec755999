"""The loop around `rl.iteration.iterate`: resuming, evaluating, recording, saving. Knows paths; knows no algorithm.

run.dir/config.yaml             the resolved configuration
run.dir/run.json                versions, devices, what is native and what is emulated
run.dir/metrics.jsonl           one row an iteration (0: before training), and TensorBoard's files
run.dir/ledger/                 every candidate of every iteration, Parquet
run.dir/checkpoints/000010/     the state after iteration 10
run.dir/profile/                traces of the iterations that were asked for
run.dir/pictures/               fixed prompts and seeds before, during and after; pools
run.dir/report.html             all of this as one page, if asked for
"""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solrl_jax.config.schema import Config
from solrl_jax.config.sizes import training_sizes
from solrl_jax.data.prompts import draw_prompts
from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.parallel import hosts
from solrl_jax.rl.experiment import Experiment, build, fresh_state, state_shapes
from solrl_jax.rl.explore.monitor import WINDOW, level_after
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.state import TrainState
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.runs import checkpoint, image_files, ledger, profiling, record
from solrl_jax.runs.checkpoint_writer import Saver
from solrl_jax.runs.evaluate import evaluate, sample_grid
from solrl_jax.runs.hacking import hacking_alarms
from solrl_jax.runs.identity import claim, fingerprint, refuse_another_run
from solrl_jax.runs.metrics import Metrics, import_wandb
from solrl_jax.runs.metrics import read as read_metrics
from solrl_jax.runs.progress import Stopped, TerminalProgress
from solrl_jax.runs.report import NAME, HtmlReport, is_page
from solrl_jax.storage import files

Row = dict[str, float]
MOST_BLANK = 3  # iterations in a row without a finite reward, after which a run ends


class Diverged(RunError):
    """Rewards or adapters are no longer finite. The state is not saved."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one start of a run holds open."""

    experiment: Experiment
    folder: Path
    metrics: Metrics
    saver: Saver
    report: TerminalProgress
    profile: Collection[int]
    page: HtmlReport | None  # the report that is refreshed; None: not asked for

    @property
    def config(self) -> Config:
        return self.experiment.config

    def log(self, done: int, row: Row) -> None:
        hosts.write(lambda: self.metrics.log(done, row))

    def refresh(self, *, last: bool = False) -> None:
        if self.page is not None and hosts.first() and (problem := self.page.refresh(last=last)):
            self.report.line(problem)


def run(
    config: Config,
    report: TerminalProgress,
    profile: Collection[int] = (),
    page: bool = False,
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Trains, or goes on with, the run that `config` describes. Returns what `--json` prints.

    An interruption saves the last whole iteration and returns with "interrupted" true. Any other failure saves it too, and is
    raised then. Raises InputError for what the user can mend, RunError when the run failed for another reason.
    profile: the iterations of which a trace is written. page: whether `report.html` is kept up to date. force: also with
    prompts that changed since the last start, and with sizes that cannot fit into memory.
    """
    folder = Path(config.run.dir)
    if config.run.wandb:
        import_wandb()  # before anything is loaded
    with contextlib.ExitStack() as stack:
        hosts.write(lambda: profiling.refuse(profile, folder, config.train.iterations))
        hosts.write(lambda: stack.enter_context(files.only_user(files.writable_directory(folder))))
        hosts.write(lambda: refuse_another_run(folder, config))
        if page and not is_page(folder / NAME):
            hosts.write(lambda: files.refuse_existing("--report", [folder / NAME], force))
        experiment = build(config, force=force)
        state, done = _restore(experiment, folder, report, force)
        # the directory is this run's once all input has been accepted
        hosts.write(lambda: claim(folder, config))
        facts = record.describe(experiment, folder, done, report)
        metrics = Metrics(
            folder,
            tensorboard=config.run.tensorboard,
            wandb=config.run.wandb,
            resume_after=done if done else -1,
        )
        hosts.write(lambda: stack.enter_context(metrics))
        if metrics.set_aside is not None:
            report.line(
                f"metrics.jsonl was damaged: kept as {metrics.set_aside}, and goes on with the rows that can be read"
            )
        elif hosts.first() and (
            lost := done - len({row["iteration"] for row in metrics.rows} & {*range(1, done + 1)})
        ):
            report.line(
                f"metrics.jsonl lacks {lost} of {done} iterations, and goes on without them"
            )
        saver = stack.enter_context(
            Saver(
                folder / "checkpoints", keep=config.run.keep_checkpoints, best=config.run.keep_best
            )
        )
        hosts.write(lambda: ledger.discard_after(folder / "ledger", done))
        this = _Run(
            experiment,
            folder,
            metrics,
            saver,
            report,
            profile,
            HtmlReport(folder) if page else None,
        )
        interrupted = False
        try:
            state, done = _loop(this, state, done)
        except Stopped as stop:
            state = stop.state
            done = stop.done
            interrupted = True
            _save_last(this, stop)
        saver.wait()
        if not interrupted:
            _finish(this, state)
            record.write(folder, facts | {"finished_after_iteration": done})
        this.refresh(last=True)
        return hosts.agreed(lambda: _summary(folder, done, interrupted))


def _loop(this: _Run, state: TrainState, done: int) -> tuple[TrainState, int]:
    """From iteration `done` + 1 to the last. Raises Stopped, with the last whole state, for whatever stops it."""
    config = this.config
    report = this.report
    report.start(config.train.iterations, done)
    try:
        _prepare(this, done)
        if _is_due(config, done) and not _evaluation(this, done):
            this.log(done, _evaluate(this, state.ema, done))
            if done and config.run.keep_best:
                _save(this, state, done)  # again, with its evaluation
        blank = 0  # iterations in a row without a finite reward, or without a finite loss
        while done < config.train.iterations:
            level = hosts.agreed(lambda: _level(this))
            # which `iterate` gives away, for pictures of what it drew
            old = (
                jax.tree.map(jnp.copy, state.old)
                if config.eval.num_grid_images and _is_due(config, done + 1)
                else None
            )
            with profiling.traced(this.folder, done + 1, this.profile):
                state, outcome = iterate(this.experiment, state, done + 1, level, report.stage)
                done += 1  # also if its trace cannot be written
            row = outcome.metrics
            unlearned = (
                row["skipped_micro_batches"] > 0 and row["grad_norm"] == 0
            )  # no loss that is finite
            blank = blank + 1 if unlearned or math.isnan(row["kept/spread"]) else 0
            try:
                hosts.write(partial(ledger.write, this.folder / "ledger", done, outcome.ledger))
                _refuse_blank(
                    this, state, row, done, blank
                )  # first: what stops the rest has the state saved
                if _is_due(config, done):
                    row = row | _evaluate(this, state.ema, done)
                if old is not None:
                    record.draw_pools(
                        this.experiment, this.folder, old, level, outcome.ledger, done
                    )
            finally:  # an evaluation that does not end is made up for by the next start
                this.log(done, row)
            if _is_saved(config, done) and not blank:
                _save(this, state, done)
                if config.run.checkpoint_every == 1:
                    this.saver.wait()  # then no kill takes back an iteration that was reported
            this.refresh()
            report.iteration(done, row)
        return state, done
    except (KeyboardInterrupt, Exception) as error:
        raise Stopped(state, done) from error
    finally:
        report.stop()


def _refuse_blank(this: _Run, state: TrainState, row: Row, done: int, blank: int) -> None:
    """Raises Diverged when the run learns nothing any more: adapters that are not finite, or no finite reward or loss.

    Such iterations are not saved, so the last checkpoint is of before.
    """
    where = "explore" if math.isnan(row["pool/reward"]) else "regenerate"
    what = f"no finite reward in {blank} iteration(s) in a row, first in stage '{where}'"
    if not math.isnan(row["kept/reward"]):
        what = f"no prompt with rollout.kept={this.config.rollout.kept} finite rewards in {blank} iteration(s) in a row"
    if not math.isnan(row["kept/spread"]):
        what = f"no finite loss in {blank} iteration(s) in a row"
    if not _is_finite(state):
        what = "the adapters are not finite after the update"
    elif blank < (MOST_BLANK if done < this.config.train.iterations else 1):
        return
    last = next(iter(checkpoint.candidates(this.folder / "checkpoints")), None)
    raise Diverged(
        f"iteration {done}: {what}; {f'the last finite checkpoint is {last}' if last else 'nothing is saved'}"
    )


@jax.jit
def _is_finite(state: TrainState) -> jax.Array:
    """Whether the state is finite, and small enough for its squares to be."""
    return jnp.all(
        jnp.array([jnp.isfinite(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(state)])
    )


def _save_last(this: _Run, stop: Stopped) -> None:
    """Saves the last whole state of a loop that was stopped, then raises what stopped it, unless that was the user."""
    cause = stop.__cause__
    report = this.report
    what = "interrupted" if isinstance(cause, KeyboardInterrupt) else "failed"
    lost = any(
        isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(stop.state)
    )
    if isinstance(cause, Diverged):
        pass  # its last good state is saved
    elif not stop.done:
        report.line(f"{what} before the end of the first iteration: nothing to save")
    elif lost:
        report.line(f"{what} within the update: the same command goes on from the last checkpoint")
    else:
        try:
            _save(this, stop.state, stop.done)
            this.saver.wait()
            report.line(
                f"{what}: saved after iteration {stop.done}; the same command goes on from there"
            )
        except RunError as error:
            if isinstance(cause, KeyboardInterrupt) or str(error) == str(cause):
                raise
            report.line(f"{what} and could not be saved: {error}")
    if not isinstance(cause, KeyboardInterrupt):
        this.saver.wait()
        assert cause is not None
        raise cause


def _prepare(this: _Run, done: int) -> None:
    """Encodes all that the rest of the run asks for, so that the text encoders need no room beside the policy; calibrates."""
    experiment = this.experiment
    config = this.config
    report = this.report
    last = config.train.iterations
    drawn = [experiment.train_prompts]
    if (last - done) * config.train.num_prompts < 2 * len(
        experiment.train_prompts
    ):  # else all of them, or nearly so, are drawn
        drawn = [
            draw_prompts(experiment.train_prompts, config.seed, i, config.train.num_prompts)
            for i in range(done, last)
        ]
    shown = experiment.test_prompts[: max(config.eval.num_prompts, config.eval.num_grid_images)]
    calibrates = experiment.explorer.calibrates and done < last
    measured = experiment.explorer.calibration.prompts if calibrates else []
    prompts = list(dict.fromkeys([p for part in (*drawn, shown, measured) for p in part]))

    def show(rows, more):
        return report.stage("encode", rows, more)

    encoders = experiment.backbone.text_encoders
    encoders.encode_ahead([""], config.model.max_sequence_length, None, show)
    encoders.encode_ahead(
        prompts, config.model.max_sequence_length, experiment.backbone.instruction, show
    )
    if calibrates:
        report.stage("calibrate", len(measured), 0)
        try:
            for size in training_sizes(config):
                experiment.with_size(size).explorer.calibrate()
        except np.linalg.LinAlgError as error:
            raise RunError(
                f"stage 'calibrate': its values are not finite ({first_line(error)})"
            ) from error


def _level(this: _Run) -> int:
    """How the next iteration explores, of `Explorer.levels`; says so where the level changes."""
    floor = this.config.rollout.explore.min_rank_correlation
    ladder = this.experiment.explorer.settings
    if floor is None:
        return 0
    history = _explored(this.metrics.rows, len(ladder))
    level = level_after(history, floor, len(ladder) - 1)
    if history and level != history[-1][0]:
        values = ", ".join(f"{value:.2f}" for _, value in history[-WINDOW:])
        how = f"{ladder[level].precision}, {ladder[level].steps} steps"
        this.report.line(
            f"exploring in {how} from now on: Spearman over kept samples was {values}, the floor is {floor:g}"
        )
    return level


def _explored(rows: Sequence[Mapping[str, Any]], levels: int) -> list[tuple[int, float]]:
    """ExplorationSetting and correlation of each iteration of a record, once, in order. A row without a level of these is left out."""
    known = {
        row["iteration"]: row
        for row in rows
        if row["iteration"] > 0 and row.get("fidelity/level") in range(levels)
    }

    def correlation(row):
        return math.nan if (value := row.get("fidelity/spearman")) is None else value

    return [(int(row["fidelity/level"]), correlation(row)) for _, row in sorted(known.items())]


def _evaluation(this: _Run, done: int) -> Row:
    """The recorded evaluation after iteration `done`, the same on every host; empty if there was none."""
    rows = hosts.agreed(
        lambda: [
            row
            for row in this.metrics.rows[-2:]
            if row["iteration"] == done and "eval/reward" in row
        ]
    )
    return {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}


def _is_due(config: Config, done: int) -> bool:
    """Whether there is an evaluation after iteration `done`."""
    return done in (0, config.train.iterations) or bool(
        config.eval.every and done % config.eval.every == 0
    )


def _is_saved(config: Config, done: int) -> bool:
    """Whether there is a checkpoint after iteration `done`."""
    evaluated = config.run.keep_best > 0 and _is_due(config, done)
    return done == config.train.iterations or done % config.run.checkpoint_every == 0 or evaluated


def _evaluate(this: _Run, ema: Trainable, done: int) -> Row:
    """Scores of the averaged policy on the test prompts, and its picture."""
    config = this.config
    report = this.report
    total = config.eval.num_prompts * config.eval.num_images_per_prompt
    report.stage("evaluate", total, 0)
    result = evaluate(this.experiment, ema, lambda rows: report.stage("evaluate", total, rows))
    if config.eval.num_grid_images:
        shown = sample_grid(this.experiment, ema)
        path = this.folder / "pictures" / f"iteration-{done:06d}.png"
        columns = shown.images.shape[1]
        captions = [p for p in shown.prompts for _ in range(columns)]
        images = shown.images.reshape(-1, *shown.images.shape[2:])
        facts = [
            {"prompt": prompt, "right": mark}
            for prompt, mark in zip(captions, shown.marks, strict=True)
        ]
        hosts.write(lambda: image_files.save_grid(path, images, columns, captions, facts))
    means = ", ".join(
        f"{name} {mean:.3f} ± {result.errors[name]:.3f}" for name, mean in result.means.items()
    )
    report.line(f"evaluation after iteration {done}: {means}")
    row = {f"eval/{name}": mean for name, mean in result.means.items()}
    row |= {f"eval/{name}/standard_error": error for name, error in result.errors.items()}
    row |= {f"eval/reward_failures/{name}": float(count) for name, count in result.failed.items()}
    if config.reward.eval_only:
        lines = hosts.agreed(
            lambda: hacking_alarms(this.metrics.rows, row, config.reward.eval_only)
        )
        for line in lines:
            report.line(line)
        row["eval/hacking"] = float(bool(lines))
    return row


def _restore(
    experiment: Experiment, folder: Path, report: TerminalProgress, force: bool
) -> tuple[TrainState, int]:
    """The state to go on from, and how many iterations it has behind it. force: also if texts have changed."""
    expected = {"fingerprint": fingerprint(experiment.config, experiment.explorer.format.name)}
    restored = checkpoint.restore_latest(folder / "checkpoints", state_shapes(experiment), expected)
    if restored is None:
        return fresh_state(experiment), 0
    state, meta, warnings = restored
    config = experiment.config
    known = experiment.text_hashes
    read = {
        "prompts": f"prompts.train={config.prompts.train!r}: its prompts have",
        "instruction": f"model.instruction={config.model.instruction!r}: its text has",
    }
    if differing := [
        said
        for name, said in read.items()
        if meta.get(name, known[name]) != known[name] and not force
    ]:
        remedy = "put the file back, or add --force to go on with it"
        raise InputError(f"{differing[0]} changed since iteration {meta['iteration']}; {remedy}")
    for warning in warnings:
        report.line(warning)
    report.line(f"resuming after iteration {meta['iteration']}")
    return state, meta["iteration"]


def _save(this: _Run, state: TrainState, done: int) -> None:
    """Saves the state, with the evaluation after this iteration if there was one.

    The key of the run is its seed, and the cursor through the prompts follows from the iteration: both are named for readers.
    """
    config = this.config
    named = fingerprint(this.config, this.experiment.explorer.format.name)
    meta = {
        "fingerprint": named,
        "key": config.seed,
        "prompt_cursor": done * config.train.num_prompts,
    }
    this.saver.save(
        done,
        state,
        meta | this.experiment.text_hashes | {"evaluation": _evaluation(this, done) or None},
    )


def _finish(this: _Run, state: TrainState) -> None:
    """The picture of the whole run: before and after."""
    if this.config.eval.num_grid_images:
        unchanged = jax.tree.map(
            jnp.zeros_like, state.ema
        )  # the base, through the program that is compiled already
        before = sample_grid(this.experiment, unchanged)
        after = sample_grid(this.experiment, state.ema)
        path = this.folder / "pictures" / "before-after.png"
        pair = (before.images, after.images)
        hosts.write(
            lambda: image_files.save_before_after(
                path, *pair, before.prompts, before.right, after.right
            )
        )


def _summary(folder: Path, done: int, interrupted: bool) -> dict[str, Any]:
    rows = [row for row in read_metrics(folder) if "eval/reward" in row] or [{}]
    before, after = (
        {k: v for k, v in row.items() if k.startswith("eval/")} for row in (rows[0], rows[-1])
    )
    return {
        "run": str(folder),
        "iterations": done,
        "interrupted": interrupted,
        "before": before,
        "after": after,
    }
