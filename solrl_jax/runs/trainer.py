"""The training loop: it resumes, runs iterations, evaluates, records and saves.

This module knows the files of a run and nothing about the algorithm. It reads in the order in which
a run executes: `run` opens everything, `_train` loops over iterations, and the functions that they
call follow in the order of the calls.

    run.dir/config.yaml             the resolved configuration
    run.dir/run.json                versions, devices, and whether exploration is native or emulated
    run.dir/metrics.jsonl           one row per iteration (row 0: before training)
    run.dir/tensorboard/            the same values for TensorBoard, if configured
    run.dir/ledger/                 every candidate of every iteration, as Parquet
    run.dir/checkpoints/000010/     the state after iteration 10
    run.dir/profile/                traces of the iterations that were requested
    run.dir/pictures/               images of fixed prompts and seeds, and of candidate pools
    run.dir/report.html             all of this on one page, if requested
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
from solrl_jax.data.prompts import Prompt, draw_prompts
from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.parallel import hosts
from solrl_jax.rl.experiment import (
    Experiment,
    build,
    fit_prompt_counts,
    fresh_state,
    load_prompt_sets,
    state_shapes,
)
from solrl_jax.rl.explore.monitor import WINDOW, next_level
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.state import TrainState
from solrl_jax.runs import checkpoint, image_files, ledger, profiling, record
from solrl_jax.runs.evaluate import base_parameters_like, evaluate, sample_grid
from solrl_jax.runs.hacking import hacking_alarms
from solrl_jax.runs.identity import (
    check_record,
    fingerprint,
    refuse_another_run,
    write_config,
)
from solrl_jax.runs.inputs import hash_inputs, refuse_changed_inputs
from solrl_jax.runs.metrics import Metrics, import_wandb
from solrl_jax.runs.metrics import read as read_metrics
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.runs.report import NAME, HtmlReport, is_page
from solrl_jax.runs.saver import Saver
from solrl_jax.storage import files
from solrl_jax.storage.stores import RunPath, StorePath, run_path

Row = dict[str, float]

# A run ends after this many iterations in a row from which nothing could be learned.
MAX_FAILED_ITERATIONS = 3


class Diverged(RunError):
    """The rewards, the loss or the trained parameters are no longer finite.

    The state is not saved, so the last checkpoint is from before the divergence. The message is one
    line with the iteration, the problem and that checkpoint.
    """


@dataclasses.dataclass
class _Run:
    """The objects of a run in this process, and how far training has come.

    Attributes:
        experiment: The models, rewards, prompts and the configuration (`config`), with which the
            run generates, scores and updates.
        folder: The run directory, `run.dir` as a path.
        metrics: Writes `metrics.jsonl`. Only the first process opens it. In the others, its `rows`
            are empty.
        saver: Writes the checkpoints.
        progress: The output in the terminal. It also notes interruptions by signals.
        html_report: The page `report.html`, which the first process refreshes after every
            iteration. None: no page was requested.
        profile: The numbers of the iterations, from 1, whose traces are written to `profile/`.
            Empty: none.
        input_hashes: The hashes of the run's input files, 16 hexadecimal digits each, by name, e.g.
            "prompts", "weights/vae" or "code/MODULE:FUNCTION". They are stored with every
            checkpoint.
        state: The training state after iteration `done`: the trainable parameters, those of the
            older policy that generates samples, the EMA, and the optimizer's state.
        done: The number of complete iterations.
        checked: The last iteration after which `state` was found to be finite.
        evaluation_is_saved: Whether the checkpoint that this start continues from has an
            evaluation. False if there is no checkpoint.
    """

    experiment: Experiment
    folder: RunPath
    metrics: Metrics
    saver: Saver
    progress: TerminalProgress
    html_report: HtmlReport | None
    profile: Collection[int]
    input_hashes: Mapping[str, str]
    state: TrainState
    done: int
    checked: int
    evaluation_is_saved: bool

    @property
    def config(self) -> Config:
        """The configuration that this process trains with.

        It is the configuration of `experiment`: the one that `run` was given, with its numbers of
        prompts reduced to the available prompts. Settings that are "auto" still say "auto".
        """
        return self.experiment.config

    def log(self, row: Row) -> None:
        """Appends a row to `metrics.jsonl` (and further outputs), as that of iteration `done`.

        Every process calls this; the first one writes.

        Args:
            row: The values by name, e.g. "kept/reward" or "eval/reward". Values that are not finite
                are recorded as null. "iteration" is added.

        Raises:
            RunError: In all processes, if the disk refuses. An error of Weights & Biases propagates
                unchanged in the first process, and is a RunError in the others.
        """
        hosts.run_on_first(lambda: self.metrics.log(self.done, row))

    def refresh_report(self, *, last: bool = False) -> None:
        """Rewrites the HTML report in the first process, unless it is too soon or `html_report` is
        None.

        `HtmlReport.refresh` decides whether it is too soon, so that all refreshes together take at
        most about 1 % of the time. An InputError, a RunError (such as a full disk) or a ConfigError
        (if `config.yaml` has become invalid since the run started) is only printed.

        Args:
            last: Whether the run ends here. The page is then written even if it is too soon, and is
                no longer marked as live.
        """
        if self.html_report is None or not hosts.is_first():
            return
        problem = self.html_report.refresh(last=last)
        if problem:
            self.progress.line(problem)


def run(
    config: Config,
    progress: TerminalProgress,
    profile: Collection[int] = (),
    html_report: bool = False,
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Trains the run that `config` describes, or resumes it from its newest usable checkpoint.

    Every process of a run calls this with the same arguments. The run directory is created if
    necessary, and the first process locks it (`.lock`). Functions outside the package that the
    configuration names are imported. Missing files of models, rewards and prompt sets are
    downloaded from the hub. Rewards are tried before training, which also sends requests to judges
    and services. Once all input has been accepted, `config.yaml` and `run.json` are written to the
    directory, and rows and ledger files after the checkpoint are dropped.

    Each iteration adds a row to `metrics.jsonl` and a file to `ledger/`; some also save a
    checkpoint or write images (`pictures/`). After the last iteration, even if an earlier start ran
    it, `pictures/before-after.png` (unless `eval.num_grid_images` is 0) and the entry
    "finished_after_iteration" of `run.json` are written.

    If training is interrupted (Ctrl-C or SIGTERM), the last complete iteration is saved and the
    function returns. If training fails, the last complete iteration is saved too (unless its
    parameters are not finite, or after Diverged) and the error is raised again. A stop within an
    update leaves only the last checkpoint.

    Args:
        config: The resolved configuration (a preset with its overrides, in which values may be
            "auto"). `run.dir` is the run directory. If the configuration asks for more prompts than
            there are, the run uses fewer and prints a line; `config.yaml` then has the reduced
            numbers (`fit_prompt_counts`).
        progress: The output in the terminal, entered as a context manager by the caller.
        profile: Numbers of the iterations, from 1, to trace to `profile/`. They must not be
            complete yet.
        html_report: Whether `report.html` is kept up to date, in at most 1 % of the time.
        force: Whether to continue in three cases that otherwise raise InputError: input files
            (prompts, instruction, base weights, plug-ins, questions of judges) have changed since
            the last checkpoint, the run is estimated not to fit into memory, or solrl_jax did not
            write the `report.html` that the report would replace.

    Returns:
        The summary of the run, a dict: "run" (its directory as text), "iterations" (the number of
        complete ones), "interrupted" (bool), "saved" (bool, False after an interruption before the
        end of the first iteration or within an update), "trained_in_full" (the number of arrays
        that are trained without an adapter), and "before" and "after": the first and the last
        recorded evaluation, each a dict of metrics whose names begin with "eval/", None where one
        was not finite ({} if there is no evaluation).

    Raises:
        InputError: If the configuration, the run directory or an input file cannot be used, or if
            another process uses the directory.
        ConfigError: If the configuration of the run that is in the directory is invalid, or if
            `config` becomes invalid with the available prompts or the imported objective.
        RunError: If the run fails for another reason, such as a full disk, damaged checkpoints, a
            reward that fails (RewardError) or a process that gives no answer.
        Diverged: If rewards, loss or trained parameters stop being finite. It is a RunError.
        OSError: If the file system does not support locks, or a folder of the cache of prompts may
            not be searched.
    """
    folder = run_path(config.run.dir)
    if isinstance(folder, Path) and "\\" in str(folder.absolute()):
        # TensorStore, which writes the arrays, would take it for a slash.
        raise InputError(f"run.dir={folder.absolute()}: expected a path without a backslash")
    if config.run.wandb:
        import_wandb()  # fails early if it is not installed: loading a model takes minutes
    # Before the directory is read, because it records the numbers of prompts that the run takes.
    counts = hosts.from_first(lambda: [len(prompts) for prompts in load_prompt_sets(config)])
    config, notes = fit_prompt_counts(config, *counts)
    check_record(config)
    with contextlib.ExitStack() as stack:
        for note in notes:
            progress.line(note)
        # Refuse whatever would lose data before any model is loaded.
        hosts.run_on_first(
            lambda: profiling.check_traced_iterations(profile, folder, config.train.iterations)
        )
        hosts.run_on_first(
            lambda: stack.enter_context(files.exclusive_lock(files.writable_directory(folder)))
        )
        if isinstance(folder, StorePath):
            # Every process uploads its part of a checkpoint.
            hosts.run_on_every(lambda: files.writable_directory(folder))
        hosts.run_on_first(lambda: refuse_another_run(folder, config))
        if html_report:
            hosts.run_on_first(lambda: _refuse_foreign_report(folder / NAME, force))

        # Load the models and the state to continue from.
        experiment = build(config, force=force)
        backbone = experiment.backbone
        input_hashes = hosts.from_first(
            lambda: hash_inputs(
                config, backbone.pipeline, experiment.train_prompts, backbone.instruction
            )
        )
        state, done, evaluation_is_saved = _restore(
            experiment, input_hashes, folder, progress, force
        )

        # All input has been accepted, so the directory may be written to from here on.
        hosts.run_on_first(lambda: write_config(folder, config))
        facts = record.write_and_print(experiment, folder, done, progress)
        metrics = Metrics(
            folder,
            tensorboard=config.run.tensorboard,
            wandb=config.run.wandb,
            resume_after=done if done else -1,
        )
        hosts.run_on_first(lambda: stack.enter_context(metrics))
        _report_lost_rows(metrics, done, progress)
        saver = Saver(
            folder / "checkpoints", keep=config.run.keep_checkpoints, best=config.run.keep_best
        )
        stack.enter_context(saver)
        hosts.run_on_first(lambda: ledger.discard_after(folder / "ledger", done))

        this = _Run(
            experiment=experiment,
            folder=folder,
            metrics=metrics,
            saver=saver,
            progress=progress,
            html_report=HtmlReport(folder) if html_report else None,
            profile=profile,
            input_hashes=input_hashes,
            state=state,
            done=done,
            checked=done,
            evaluation_is_saved=evaluation_is_saved,
        )
        del state  # `this.state` is the only reference, because each update deletes the old arrays
        interrupted = False
        saved = True
        try:
            _train(this)
        except KeyboardInterrupt as stop:
            interrupted = True
            saved = _save_after_stop(this, stop)
        except Exception as failure:
            _save_after_stop(this, failure)
            raise
        saver.wait()
        if not interrupted:
            _save_before_after(this)
            record.write(folder, facts | {"finished_after_iteration": this.done})
        this.refresh_report(last=True)
        return hosts.from_first(lambda: _summary(this, interrupted, saved))


def _refuse_foreign_report(path: RunPath, force: bool) -> None:
    """Checks that a report would replace nothing but an earlier report of solrl_jax, which is
    recognized by the title of the page.

    Args:
        path: The file that the report would replace, `report.html` in the run directory. It need
            not exist.
        force: Whether another file may be replaced. A directory never is.

    Raises:
        InputError: If `path` is a directory, or if it is another file (or a link that leads
            nowhere) and `force` is False.
        OSError: If the file cannot be read.
    """
    if not files.exists(path) or is_page(path):
        return
    if path.is_dir():
        raise InputError(f"html_report=True: {path} is a directory; move it away")
    if not force:
        raise InputError(
            f"html_report=True: {path} exists and is no report; move it away, or replace the file "
            "by force=True"
        )


def _restore(
    experiment: Experiment,
    input_hashes: Mapping[str, str],
    folder: RunPath,
    progress: TerminalProgress,
    force: bool,
) -> tuple[TrainState, int, bool]:
    """Restores the newest usable checkpoint of a run, or creates the state of a new run.

    Every process calls this, and all get the state of the same checkpoint.

    Args:
        experiment: The loaded experiment. Its models and configuration give the structure, shapes
            and shardings of the state, and the fingerprint (a hash of the settings that trained
            parameters depend on) that the checkpoint must have, also with `force`.
        input_hashes: The hashes of the input files now, by name (e.g. "prompts" or
            "weights/transformer"). They are compared with those that the checkpoint was saved with.
        folder: The run directory.
        progress: The output in the terminal. It prints which checkpoint is used, and which damaged
            ones are skipped.
        force: Whether to continue if the input files have changed.

    Returns:
        The state, the number of complete iterations (0 if there is no checkpoint), and whether the
        checkpoint has an evaluation (False if there is none).

    Raises:
        InputError: If the checkpoint is from another run, if the input files have changed and
            `force` is False, or if the LoRA of `lora.path`, from which a new run starts, cannot be
            used.
        RunError: If there are checkpoints and none can be used.
    """
    expected = {"fingerprint": fingerprint(experiment.config, experiment.explorer.format.name)}
    restored = checkpoint.restore_latest(folder / "checkpoints", state_shapes(experiment), expected)
    if restored is None:
        return fresh_state(experiment), 0, False
    state, meta, warnings = restored
    if not force:
        refuse_changed_inputs(experiment.config, meta, input_hashes)
    for warning in warnings:
        progress.line(warning)
    progress.line(f"resuming after iteration {meta['iteration']}")
    return state, meta["iteration"], meta.get("evaluation") is not None


def _report_lost_rows(metrics: Metrics, done: int, progress: TerminalProgress) -> None:
    """Prints a line if `metrics.jsonl` was damaged, or if it lacks rows of complete iterations.

    Args:
        metrics: The metrics of the run. In the first process they are open, with the rows up to
            iteration `done`; in the others they have no rows.
        done: The number of complete iterations.
        progress: Prints the line, in the first process.
    """
    if metrics.set_aside is not None:
        progress.line(
            f"metrics.jsonl was damaged: it was moved to {metrics.set_aside}, and its readable "
            "rows were kept"
        )
    elif hosts.is_first():
        recorded = {row["iteration"] for row in metrics.rows}
        missing = [i for i in range(1, done + 1) if i not in recorded]
        if missing:
            progress.line(
                f"metrics.jsonl lacks {len(missing)} of {done} iterations, and continues without "
                "them"
            )


def _train(this: _Run) -> None:
    """Runs the iterations from `this.done + 1` to the last: trains, records, evaluates and saves.

    Every process calls this. First, prompts are encoded and exploration is calibrated if necessary,
    and the policy is evaluated if that is due and not recorded yet. Each iteration writes its file
    of the ledger and its metrics, even if its evaluation fails, and refreshes the HTML report. One
    with an evaluation also writes images of its candidates, unless `eval.num_grid_images` is 0.

    A checkpoint is saved whenever `_checkpoint_is_due` says so, but not after an iteration from
    which nothing could be learned. The checkpoint that this start continues from is saved once more
    if it lacks its evaluation, which an earlier start has missed or has recorded without saving it.

    Args:
        this: The run. `state` and `done` are always those of the last complete iteration, also
            after an exception; only a stop within an update leaves the arrays of `state` deleted.

    Raises:
        KeyboardInterrupt: After a signal, between batches or iterations.
        Diverged: If the parameters are not finite, or nothing could be learned too often.
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If the disk refuses, or another part of the run fails.
        Exception: Any error of Weights & Biases, unchanged, in the first process.
    """
    config = this.config
    progress = this.progress
    progress.start(config.train.iterations, this.done)
    try:
        _prepare(this)
        if _evaluation_is_due(config, this.done) and not _recorded_evaluation(this):
            this.log(_evaluate(this))
        if this.done and not this.evaluation_is_saved and _recorded_evaluation(this):
            _save(this)  # once more, now with its evaluation
        failures = 0  # iterations in a row from which nothing could be learned
        reported_no_advantage = False
        # The others follow the gradient of the reward, which equal rewards have too.
        learns_from_advantages = config.algorithm.trains_on != "reward_gradients"
        while this.done < config.train.iterations:
            level = hosts.from_first(lambda: _choose_exploration_level(this))
            draws_pools = config.eval.num_grid_images and _evaluation_is_due(config, this.done + 1)
            # A copy, because `iterate` deletes the arrays of the state that it is given.
            old_policy = jax.tree.map(jnp.copy, this.state.old) if draws_pools else None
            with profiling.traced(this.folder, this.done + 1, this.profile, progress.line):
                this.state, result = iterate(
                    this.experiment, this.state, this.done + 1, level, progress.phase
                )
                # `done` changes together with `state`, so that Ctrl-C while the trace is written
                # can save this iteration.
                this.done += 1
            row = result.metrics
            failures = failures + 1 if _learned_nothing(row) else 0
            if (
                learns_from_advantages
                and not failures
                and not reported_no_advantage
                and _all_advantages_are_zero(result.ledger)
            ):
                progress.line(
                    f"iteration {this.done}: all rewards of each prompt are equal, so there is "
                    "nothing to learn from; check the reward (this is reported once)"
                )
                reported_no_advantage = True
            try:
                hosts.run_on_first(
                    partial(ledger.write, this.folder / "ledger", this.done, result.ledger)
                )
                # Before the evaluation, because a state that is saved after a failed evaluation
                # must be known to be finite.
                _stop_if_diverged(this, row, failures)
                if _evaluation_is_due(config, this.done):
                    row = row | _evaluate(this)
                if old_policy is not None:
                    record.draw_pools(
                        this.experiment,
                        this.folder,
                        old_policy,
                        level,
                        result.ledger,
                        this.done,
                    )
            finally:
                # Also after a failure. The next start repeats an evaluation that is missing.
                this.log(row)
            if _checkpoint_is_due(config, this.done) and not failures:
                _save(this)
                if config.run.checkpoint_every == 1:
                    # If every iteration is saved, one that was reported is never lost.
                    this.saver.wait()
            this.refresh_report()
            progress.iteration(this.done, row)
    finally:
        progress.stop()


def _prepare(this: _Run) -> None:
    """Encodes the prompts that the rest of the run needs, and calibrates exploration if necessary.

    Every process calls this. With a prompt cache (`model.prompt_cache_dir`), the training, test and
    calibration prompts and the empty prompt are encoded, if the cache lacks them; then the text
    encoders are freed. Without a cache, prompts are encoded later, when they are needed.
    Exploration is calibrated, for every image size, only if its options need it and iterations are
    left.

    Args:
        this: The run. Its experiment's prompt cache is filled, and its explorers keep the solver
            schedule and the quantizer that their options measured. `state` and `done` do not
            change.

    Raises:
        InputError: If the prompts cannot be encoded, for example because a file of a text encoder
            is missing or its arrays have other shapes than its configuration says.
        RunError: If the measured values of the calibration are not finite, or an encoding cannot be
            written to the cache.
        PermissionError: If a folder of the cache may not be searched.
        KeyboardInterrupt: After a signal.
    """
    experiment = this.experiment
    config = this.config
    encoders = experiment.backbone.text_encoders
    explorer = experiment.explorer
    calibrates = explorer.calibrates and this.done < config.train.iterations
    calibration_prompts = explorer.calibration.prompts if calibrates else []
    num_test_prompts = max(config.eval.num_prompts, config.eval.num_grid_images)
    prompts = [
        *_remaining_prompts(experiment, this.done),
        *experiment.test_prompts[:num_test_prompts],
        *calibration_prompts,
    ]
    unique = list(dict.fromkeys(prompts))
    show = partial(this.progress.phase, "encode")
    length = config.model.max_sequence_length
    encoders.encode_ahead([""], length, None, show)
    encoders.encode_ahead(unique, length, experiment.backbone.instruction, show)
    if not calibrates:
        return
    this.progress.phase("calibrate", len(calibration_prompts), 0)
    try:
        for size in training_sizes(config):
            experiment.with_size(size).explorer.calibrate()
    except np.linalg.LinAlgError as error:
        raise RunError(
            f"phase 'calibrate': the measured values are not finite ({first_line(error)})"
        ) from error


def _remaining_prompts(experiment: Experiment, done: int) -> Sequence[Prompt]:
    """Returns the training prompts that the rest of the run draws, or all of them.

    Args:
        experiment: The experiment of the run, which has the training prompts, the seed and the
            number of iterations.
        done: The number of iterations that are done.

    Returns:
        The prompts of the remaining iterations, in order and with repetitions. If these would be
        at least twice as many as there are training prompts, all training prompts, once each.
    """
    train = experiment.config.train
    remaining = range(done, train.iterations)
    if len(remaining) * train.num_prompts >= 2 * len(experiment.train_prompts):
        return experiment.train_prompts
    seed = experiment.config.seed
    return [
        prompt
        for index in remaining
        for prompt in draw_prompts(experiment.train_prompts, seed, index, train.num_prompts)
    ]


def _choose_exploration_level(this: _Run) -> int:
    """Chooses the precision and number of steps that the next iteration explores with.

    If the cheap rewards of exploration have ranked candidates too badly, a more faithful setting is
    chosen. If they have ranked well for long, a less faithful one is tried again (`next_level`).
    Also prints a line if the setting differs from that of the last iteration.

    Args:
        this: The run. The rank correlations ("fidelity/spearman") and settings ("fidelity/level")
            of earlier iterations are read from its metrics, so only the first process calls this.

    Returns:
        The index in `Explorer.settings`: 0 is the configured setting, larger ones are more
        faithful. Always 0 unless `rollout.explore.min_rank_correlation` sets a floor.
    """
    floor = this.config.rollout.explore.min_rank_correlation
    if floor is None:
        return 0
    settings = this.experiment.explorer.settings
    history = exploration_history(this.metrics.rows, len(settings))
    index = next_level(history, floor, len(settings) - 1)
    if history and index != history[-1][0]:
        values = ", ".join(f"{correlation:.2f}" for _, correlation in history[-WINDOW:])
        chosen = settings[index]
        this.progress.line(
            f"exploring in {chosen.precision}, {chosen.steps} steps from now on: Spearman over "
            f"kept samples was {values}, the floor is {floor:g}"
        )
    return index


def exploration_history(
    rows: Sequence[Mapping[str, Any]], num_settings: int
) -> list[tuple[int, float]]:
    """Reads from the metrics of a run how well each iteration's exploration ranked candidates.

    Args:
        rows: The rows of `metrics.jsonl` in order. "fidelity/level" is the index of the setting
            that an iteration explored with. Rows without a valid index are left out. If several
            rows of an iteration have a valid index, the last of them counts.
        num_settings: The number of exploration settings. Valid indices are whole numbers from 0 to
            `num_settings` - 1.

    Returns:
        For each iteration from 1 on that has a row with a valid index, ascending, a pair: the index
        of its setting, and the rank correlation of its explored and regenerated rewards
        ("fidelity/spearman"; NaN if unknown).
    """
    rows_by_iteration = {}
    for row in rows:
        if row["iteration"] > 0 and row.get("fidelity/level") in range(num_settings):
            rows_by_iteration[row["iteration"]] = row
    history = []
    for _, row in sorted(rows_by_iteration.items()):
        correlation = row.get("fidelity/spearman")
        history.append(
            (int(row["fidelity/level"]), math.nan if correlation is None else correlation)
        )
    return history


def _learned_nothing(row: Row) -> bool:
    """Whether an iteration could not update the parameters because its numbers were not finite.

    There are two such cases:

    * no loss, or no gradient of a reward, was finite: some micro-batches were skipped
      ("skipped_micro_batches" above 0) or some samples were left out ("nonfinite_targets" above 0),
      and "grad_norm" is 0;
    * no prompt had `rollout.kept` finite rewards: "kept/spread" is NaN.

    Args:
        row: The metrics of the iteration by name. "nonfinite_targets" may be missing and counts as
            0 then.
    """
    left_out = row["skipped_micro_batches"] + row.get("nonfinite_targets", 0.0)
    return (left_out > 0 and row["grad_norm"] == 0) or math.isnan(row["kept/spread"])


def _all_advantages_are_zero(candidates: Mapping[str, Any]) -> bool:
    """Whether the advantages of all kept samples of an iteration are 0, as they are if the rewards
    of each prompt are equal.

    Args:
        candidates: The columns of the iteration's ledger by name, of which "advantage" is read: a
            masked float array with one entry per candidate, masked where the candidate was not
            kept; 0 where its reward is not finite.

    Returns:
        Whether all advantages that are not masked are 0. True also if all are masked.
    """
    return not np.any(candidates["advantage"].compressed())


def _stop_if_diverged(this: _Run, row: Row, failures: int) -> None:
    """Ends a run whose state is not finite, or that has learned nothing too often.

    Every process calls this.

    Args:
        this: The run, after the iteration. All arrays of its `state` are checked (`_is_finite`). If
            they are finite, `checked` becomes `done`.
        row: The metrics of the iteration by name. After too many failures, they decide which
            problem the message names. If "kept/spread" is not NaN, there was no finite loss
            ("skipped_micro_batches" above 0) or no finite gradient of the reward (0). If it is NaN,
            exploration gave no finite reward ("pool/reward" is NaN), no prompt had `rollout.kept`
            finite rewards ("unusable_prompts" is the number of all prompts), or else the
            regeneration gave no finite reward.
        failures: The number of iterations in a row, up to this one, from which nothing could be
            learned. Three (`MAX_FAILED_ITERATIONS`) end the run. If this is the last iteration of
            the run, a single one raises Diverged.

    Raises:
        Diverged: If the run must end. The message names the iteration, the problem and the last
            checkpoint.
    """
    max_failures = MAX_FAILED_ITERATIONS if this.done < this.config.train.iterations else 1
    in_a_row = f"in {failures} iteration(s) in a row"
    if _is_finite(this.state):
        this.checked = this.done
    if this.checked != this.done:
        problem = "the trained parameters are not finite after the update"
    elif failures < max_failures:
        return
    elif not math.isnan(row["kept/spread"]):
        what = "loss" if row["skipped_micro_batches"] else "gradient of the reward"
        problem = f"no finite {what} {in_a_row}"
    elif math.isnan(row["pool/reward"]):
        problem = f"no finite reward {in_a_row}, first in phase 'explore'"
    elif row["unusable_prompts"] == this.config.train.num_prompts:
        kept = this.config.rollout.kept
        problem = f"no prompt with rollout.kept={kept} finite rewards {in_a_row}"
    else:
        problem = f"no finite reward {in_a_row}, first in phase 'regenerate'"
    last = next(iter(checkpoint.list_checkpoints(this.folder / "checkpoints")), None)
    checkpoint_note = f"the last finite checkpoint is {last}" if last else "nothing is saved"
    raise Diverged(f"iteration {this.done}: {problem}; {checkpoint_note}")


@jax.jit
def _is_finite(state: TrainState) -> jax.Array:
    """Whether all values of a state, and the sum of squares of each of its arrays, are finite.

    Every process calls this.

    Args:
        state: The training state, which is not donated.

    Returns:
        A boolean scalar on the devices. False also if a sum of squares overflows the array's dtype.
        Arrays of integers count as finite.
    """
    return jnp.all(
        jnp.array([jnp.isfinite(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(state)])
    )


def _evaluation_is_due(config: Config, done: int) -> bool:
    """Whether the policy is evaluated after `done` iterations.

    The policy is evaluated before the first iteration (0) and after the last one. If `eval.every`
    is above 0, it is also evaluated every `eval.every` iterations.

    Args:
        config: The configuration, of which `train.iterations` and `eval.every` are read.
        done: The number of complete iterations.
    """
    if done in (0, config.train.iterations):
        return True
    return config.eval.every > 0 and done % config.eval.every == 0


def _recorded_evaluation(this: _Run) -> Row:
    """Returns the evaluation of the current state (after `this.done` iterations) if it is recorded.

    Every process calls this, and all get what the first one has recorded.

    Args:
        this: The run. The last two rows of its metrics are searched, because an iteration that a
            later start has evaluated has two.

    Returns:
        The values whose names begin with "eval/", by name, None where one was not finite; {} if
        there is no such evaluation.
    """

    def find() -> Row:
        evaluation: Row = {}
        for row in this.metrics.rows[-2:]:  # an iteration, and its evaluation by a later start
            if row["iteration"] == this.done and "eval/reward" in row:
                evaluation |= {k: v for k, v in row.items() if k.startswith("eval/")}
        return evaluation

    return hosts.from_first(find)


def _evaluate(this: _Run) -> Row:
    """Scores the EMA policy on the test prompts and prints the means.

    Also writes a grid of images to `pictures/` unless `eval.num_grid_images` is 0, and prints a
    warning if a score that is not trained on falls or stops rising while the trained reward rises
    (`runs.hacking`). Every process calls this.

    Args:
        this: The run, whose EMA `state.ema` is evaluated on the first `eval.num_prompts` test
            prompts. Its earlier metrics are read for the warnings.

    Returns:
        The values to record, by name (they are not recorded here):
          * "eval/NAME" and "eval/NAME/standard_error": the mean of each score over the images where
            it is finite ("reward", the weighted sum, and every single one), and its standard error,
            for which all images count as independent;
          * "eval/reward_failures/NAME": for each reward outside of JAX, the number of images (for
            clips, the number of scored frames) that it could not score;
          * "eval/reward_cost/NAME/COUNTER": what it cost, e.g. "eval/reward_cost/judge/requests";
          * "eval/hacking": 1 if there was a warning, else 0; only if `reward.eval_only` names
            scores.

    Raises:
        KeyboardInterrupt: After a signal.
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        RunError: If the disk refuses, or a reward outside JAX fails while `reward.on_failure` is
            "stop", or 32 times in a row.
    """
    config = this.config
    progress = this.progress
    total = config.eval.num_prompts * config.eval.num_images_per_prompt
    progress.phase("evaluate", total, 0)
    result = evaluate(this.experiment, this.state.ema, partial(progress.phase, "evaluate", total))
    if config.eval.num_grid_images:
        _save_grid(this)
    means = ", ".join(
        f"{name} {mean:.3f} ± {result.errors[name]:.3f}" for name, mean in result.means.items()
    )
    progress.line(f"evaluation after iteration {this.done}: {means}")
    row = {f"eval/{name}": mean for name, mean in result.means.items()}
    for name, error in result.errors.items():
        row[f"eval/{name}/standard_error"] = error
    for name, count in result.failed.items():
        row[f"eval/reward_failures/{name}"] = float(count)
    for name, cost in result.usage.items():
        row[f"eval/reward_cost/{name}"] = cost
    watched = config.reward.eval_only
    if watched:
        alarms = hosts.from_first(lambda: hacking_alarms(this.metrics.rows, row, watched))
        for alarm in alarms:
            progress.line(alarm)
        row["eval/hacking"] = float(bool(alarms))
    return row


def _save_grid(this: _Run) -> None:
    """Writes images of fixed test prompts and seeds to `pictures/iteration-NNNNNN.png`.

    They are images of the EMA policy, with one row of up to four per prompt and the prompt as
    caption. For each image, the file stores the facts "prompt" and "right" (whether the first of
    its scores named ".../strict" is above 0.5; None if it has none). Clips are also written as a
    moving grid, with the ending ".webp". Every process calls this; the first one writes.

    Args:
        this: The run. `eval.num_grid_images`, the largest number of images, must not be 0.

    Raises:
        RunError: If the disk refuses, or if a reward outside JAX that has a score ".../strict" (no
            other is called) fails while `reward.on_failure` is "stop", or 32 times in a row.
    """
    grid = sample_grid(this.experiment, this.state.ema)
    columns = grid.images.shape[1]
    images = grid.images.reshape(-1, *grid.images.shape[2:])
    captions = [prompt for prompt in grid.prompts for _ in range(columns)]
    facts = [
        {"prompt": prompt, "right": mark} for prompt, mark in zip(captions, grid.marks, strict=True)
    ]
    path = this.folder / "pictures" / f"iteration-{this.done:06d}.png"
    frames_per_second = this.experiment.backbone.pipeline.frames_per_second
    hosts.run_on_first(
        lambda: image_files.save_grid(
            path, images, columns, captions, facts, frames_per_second=frames_per_second
        )
    )


def _checkpoint_is_due(config: Config, done: int) -> bool:
    """Whether the state is saved after `done` iterations.

    The state is saved after the last iteration, every `run.checkpoint_every` (at least 1)
    iterations, and, if `run.keep_best` is above 0, after every evaluation.

    Args:
        config: The configuration, of which `train.iterations`, `run.checkpoint_every`,
            `run.keep_best` and `eval.every` are read.
        done: The number of complete iterations, at least 1.
    """
    if done == config.train.iterations or done % config.run.checkpoint_every == 0:
        return True
    return config.run.keep_best > 0 and _evaluation_is_due(config, done)


def _save(this: _Run) -> None:
    """Starts to save the state after iteration `this.done`, with its evaluation if there is one.

    Every process calls this. Waits for the previous save; the rest happens in a thread.

    Args:
        this: The run. Its state and `done` are saved, and as metadata its "fingerprint", its input
            hashes by name and "evaluation" (None if there is none).

    Raises:
        RunError: If the disk refuses, or refused the previous save.
    """
    config = this.config
    meta = {
        "fingerprint": fingerprint(config, this.experiment.explorer.format.name),
        **this.input_hashes,
        "evaluation": _recorded_evaluation(this) or None,
    }
    this.saver.save(this.done, this.state, meta)


def _save_after_stop(this: _Run, cause: BaseException) -> bool:
    """Saves the last complete iteration after an interruption or a failure, and prints a line
    about it (except after Diverged).

    Every process calls this. After a failure, it also waits for any save in progress. Nothing is
    saved in these cases:

    * no iteration is complete;
    * the stop was within an update, which deletes the arrays of the state;
    * the cause is Diverged;
    * the state is not finite, which is checked here if the stop came before `_stop_if_diverged`.

    Args:
        this: The run, with the state of its last complete iteration.
        cause: What stopped `_train`: KeyboardInterrupt, or the error.

    Returns:
        Whether the iteration is saved. False after a stop within an update, even if an earlier save
        has the iteration.

    Raises:
        RunError: After an interruption, if the state cannot be saved. After a failure, an error of
            saving is only printed, unless it repeats the message of `cause` (for example, the disk
            is still full). In the cases above in which nothing is saved, the error of an earlier
            save that was still in progress is raised after a failure.
    """
    interrupted = isinstance(cause, KeyboardInterrupt)
    what = "interrupted" if interrupted else "failed"
    leaves = jax.tree.leaves(this.state)
    deleted = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)
    saved = False
    if isinstance(cause, Diverged):
        pass
    elif not this.done:
        this.progress.line(f"{what} before the end of the first iteration: nothing to save")
    elif deleted:
        this.progress.line(
            f"{what} within the update: the same command continues from the last checkpoint"
        )
    elif this.checked != this.done and not _is_finite(this.state):
        this.progress.line(f"{what} with parameters that are not finite: nothing is saved")
    else:
        try:
            _save(this)
            this.saver.wait()
            saved = True
            this.progress.line(
                f"{what}: saved after iteration {this.done}; the same command continues from there"
            )
        except RunError as error:
            if interrupted or str(error) == str(cause):
                raise
            this.progress.line(f"{what} and could not be saved: {error}")
    if not interrupted:
        this.saver.wait()
    return saved


def _save_before_after(this: _Run) -> None:
    """Writes `pictures/before-after.png`: images of the base model and of the trained one.

    The base has no adapters, not even those of `lora.path`; the trained model is the EMA policy. If
    there is a score named ".../strict", each image has a tick (score above 0.5) or a cross. Clips
    are shown by their first frames. Every process calls this; the first one writes. Nothing happens
    if `eval.num_grid_images` is 0.

    Args:
        this: The run, whose experiment has the prompts and seeds and whose `state.ema` is the
            trained model.

    Raises:
        RunError: If the disk refuses, or if a reward outside JAX that has a score ".../strict" (no
            other is called) fails while `reward.on_failure` is "stop", or 32 times in a row.
    """
    if not this.config.eval.num_grid_images:
        return
    before = sample_grid(this.experiment, base_parameters_like(this.experiment, this.state.ema))
    after = sample_grid(this.experiment, this.state.ema)
    path = this.folder / "pictures" / "before-after.png"
    hosts.run_on_first(
        lambda: image_files.save_before_after(
            path, before.images, after.images, before.prompts, before.accepted, after.accepted
        )
    )


def _summary(this: _Run, interrupted: bool, saved: bool) -> dict[str, Any]:
    """Returns the summary of a run, which `run` returns and the command line prints.

    Any process may call it, without the others.

    Args:
        this: The run. Its metrics have the evaluations; if they have no rows, as in processes other
            than the first, `metrics.jsonl` is read.
        interrupted: Whether the run was stopped before its end.
        saved: The value of "saved": the result of `_save_after_stop`, or True without a stop.

    Returns:
        A dict of JSON values: "run" (the directory as text), "iterations" (the number of complete
        ones), "interrupted" (bool), "saved" (bool), "trained_in_full" (the number of arrays that
        are trained without an adapter), and "before" and "after": the first and the last recorded
        evaluation, each a dict of values by name, e.g. "eval/reward", None where one was not finite
        ({} if there is no evaluation).
    """
    recorded = this.metrics.rows
    if not recorded:  # as in all processes but the first
        with contextlib.suppress(InputError):  # too large
            recorded = read_metrics(this.folder)
    rows = [row for row in recorded if "eval/reward" in row] or [{}]

    def scores(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name.startswith("eval/")}

    return {
        "run": str(this.folder),
        "iterations": this.done,
        "interrupted": interrupted,
        "saved": saved,
        "trained_in_full": len(this.experiment.trained_paths.whole),
        "before": scores(rows[0]),
        "after": scores(rows[-1]),
    }
