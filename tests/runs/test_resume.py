"""Stopping and going on: SIGKILL at any moment, Ctrl-C, a longer run, another run's directory, a
full disk.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from solrl_jax.cli import main
from solrl_jax.config.schema import Config
from solrl_jax.errors import InputError, RunError
from solrl_jax.rl.experiment import build, state_shapes
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.rl.trainable.trainable import flatten
from solrl_jax.runs import checkpoint, checkpoint_writer, metrics
from solrl_jax.runs import trainer as trainer
from solrl_jax.runs.directory import find_checkpoint, read_run
from solrl_jax.runs.progress import TerminalProgress
from solrl_jax.storage import files
from tests.small import SMALL, small_config
from tests.toys import TOY, toy_model

ITERATIONS = 5
REWARD = "tests.outside:in_jax"  # of the runs of a toy
# `solrl` with a toy in place of the model, in a process of its own
TOY_PROGRAM = """
from solrl_jax.cli.main import main
from tests.toys import toy_model

with toy_model():
    main()
"""


def settings(run_dir: Path, *overrides: str) -> tuple[str, ...]:
    """The overrides of a run of a toy: five iterations, scored inside JAX."""
    return (
        *TOY,
        f"reward={REWARD}",
        f"train.iterations={ITERATIONS}",
        f"run.dir={run_dir}",
        *overrides,
    )


def toy_command(run_dir: Path, *overrides: str) -> list[str]:
    options = [*SMALL, *settings(run_dir, *overrides)]
    return [sys.executable, "-c", TOY_PROGRAM, "train", "tiny", *options, "--json"]


def command(run_dir: Path, *overrides: str) -> list[str]:
    options = [*SMALL, f"train.iterations={ITERATIONS}", f"run.dir={run_dir}", *overrides]
    return [sys.executable, "-m", "solrl_jax", "train", "tiny", *options, "--json"]


def run(run_dir: Path, *overrides: str) -> dict:
    """Runs a toy in this process."""
    with toy_model():
        return train(small_config(run_dir, *settings(run_dir, *overrides)))


def run_tiny(run_dir: Path, *overrides: str) -> dict:
    return train(small_config(run_dir, f"train.iterations={ITERATIONS}", *overrides))


def train(config: Config) -> dict:
    with TerminalProgress(bars=False) as progress:
        return trainer.run(config, progress)


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """The last checkpoint's arrays, by key path, as stored."""
    path = checkpoint.list_checkpoints(run_dir / "checkpoints")[0]
    checkpoint.verify(path)
    config = read_run(run_dir)
    is_toy = REWARD in config.reward.weights
    with toy_model() if is_toy else contextlib.nullcontext():
        state, meta = checkpoint.restore(path, state_shapes(build(config)))
    assert meta["iteration"] == int(path.name)
    return {
        jax.tree_util.keystr(k): np.asarray(v)
        for k, v in jax.tree_util.tree_leaves_with_path(state)
    }


def record(run_dir: Path) -> list[dict]:
    """The metrics, without what a clock measured."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in metrics.read(run_dir)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder)
    return folder


def assert_same_run(run_dir: Path, reference: Path) -> None:
    ours = arrays(run_dir)
    theirs = arrays(reference)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)
    assert record(run_dir) == record(reference)
    assert pq.read_table(run_dir / "ledger").equals(pq.read_table(reference / "ledger"))


def kill_and_start_again(arguments: list[str], longest: float) -> None:
    """Starts a run, kills it within so many seconds of its first line of progress (its saves and
    writes included), and starts it again.
    """
    for kills in (True, False):
        with subprocess.Popen(
            arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            if kills:
                for line in process.stderr:
                    if line.startswith("iteration"):
                        break
                time.sleep(random.Random(0).uniform(0, longest))
                process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
        assert process.returncode == (-signal.SIGKILL if kills else 0), errors


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_ends_bit_identical(tmp_path, uninterrupted):
    kill_and_start_again(toy_command(tmp_path), 0.1)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.exhaustive
def test_a_killed_run_of_tiny_reads_its_prompts_from_the_cache_to_the_bit(tmp_path):
    run_tiny(tmp_path / "reference")
    cache = tmp_path / "cache"
    arguments = command(tmp_path / "run", f"model.prompt_cache_dir={cache}")
    kill_and_start_again(arguments, 1.0)
    assert len(list(cache.glob("*/*.safetensors"))) > ITERATIONS
    assert_same_run(tmp_path / "run", tmp_path / "reference")


@pytest.mark.exhaustive
def test_a_run_that_trains_in_full_goes_on_to_the_bit_and_is_exported_whole(tmp_path):
    """Some parameters in full, adapters on others; the directory is what is sampled and what
    diffusers loads.
    """
    from diffusers import SanaTransformer2DModel

    some = (
        "train.parameters=.*(scale_shift_table|ff/conv_point/kernel)",
        "train.iterations=2",
        "optimizer.learning_rate=0.01",
    )
    for folder, lengths in (("once", (2,)), ("twice", (1, 2))):
        for last in lengths:
            summary = run_tiny(tmp_path / folder, *some, f"train.iterations={last}")
            assert summary["trained_in_full"] == 3
    config = small_config(tmp_path / "once", *some)
    experiment = build(config)
    states = [
        checkpoint.restore(tmp_path / folder / "checkpoints" / "000002", state_shapes(experiment))[
            0
        ]
        for folder in ("once", "twice")
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    trained = states[0].ema
    path = "transformer_blocks/ff/conv_point/kernel"
    base = flatten(experiment.backbone.transformer)[path]
    assert np.abs(np.asarray(trained[path]) - np.asarray(base, np.float32)).max() > 1e-3
    result = CliRunner().invoke(
        main.cli, ["export", str(tmp_path / "once"), "--out", str(tmp_path / "out"), "--json"]
    )
    assert json.loads(result.stdout)["trained_in_full"] == 3
    network = SanaTransformer2DModel.from_pretrained(tmp_path / "out")
    for layer, block in enumerate(network.transformer_blocks):
        np.testing.assert_array_equal(
            block.ff.conv_point.weight[:, :, 0, 0].detach().numpy().T, trained[path][layer]
        )
    adapters, _ = import_lora(
        tmp_path / "out" / "pytorch_lora_weights.safetensors", experiment.backbone.parameter_table()
    )
    assert adapters.keys() == set(experiment.trained_paths.adapted)
    jax.tree.map(np.testing.assert_array_equal, adapters, {p: trained[p] for p in adapters})
    for option in (("--format", "peft"), ("--fold-alpha",)):
        result = CliRunner().invoke(
            main.cli, ["export", str(tmp_path / "once"), "--out", str(tmp_path / "no"), *option]
        )
        assert isinstance(result.exception, InputError)
        assert f"{'='.join(option)}: {tmp_path / 'once'} trains 3 parameter(s) in full" in str(
            result.exception
        )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("toy_model")
def test_an_iteration_is_reported_when_its_checkpoint_is_whole_if_every_one_is_saved(
    tmp_path, monkeypatch
):
    on_the_disk = {}
    write_manifest = files.write_manifest

    def slow(folder: Path) -> None:
        time.sleep(1.0)
        write_manifest(folder)

    def noting(every: int):
        class Noting(TerminalProgress):
            def iteration(self, number: int, row: dict[str, float]) -> None:
                names = [
                    path.name
                    for path in checkpoint.list_checkpoints(tmp_path / str(every) / "checkpoints")
                ]
                on_the_disk[every, number] = f"{number:06d}" in names
                super().iteration(number, row)

        return Noting(bars=False)

    monkeypatch.setattr(files, "write_manifest", slow)
    for every in (1, 2):
        with noting(every) as report:
            folder = tmp_path / str(every)
            overrides = ("train.iterations=2", f"run.checkpoint_every={every}")
            trainer.run(small_config(folder, *settings(folder, *overrides)), report)
    assert on_the_disk == {(1, 1): True, (1, 2): True, (2, 1): False, (2, 2): False}


@pytest.mark.exhaustive
def test_ctrl_c_saves_exits_cleanly_and_goes_on(tmp_path, uninterrupted):
    with subprocess.Popen(
        toy_command(tmp_path, "run.checkpoint_every=5"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("iteration 2"):
                break
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate()
    assert process.returncode == 130, errors
    summary = json.loads(out.strip().splitlines()[-1])
    assert summary["interrupted"]
    assert 2 <= summary["iterations"] < ITERATIONS
    assert "Traceback" not in errors
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == [
        f"{summary['iterations']:06d}"
    ]
    run(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_refused_and_the_last_good_one_used(
    tmp_path, uninterrupted, capsys
):
    run(tmp_path, "train.iterations=3")
    newest = checkpoint.list_checkpoints(tmp_path / "checkpoints")[0]
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    run(tmp_path)
    errors = capsys.readouterr().err
    assert "skipped checkpoint" in errors
    assert newest.name in errors
    assert "resuming after iteration 2" in errors
    assert_same_run(tmp_path, uninterrupted)


def test_a_finished_run_started_again_changes_nothing(tmp_path, uninterrupted):
    before = {p: p.read_bytes() for p in (uninterrupted / "ledger").iterdir()}
    summary = run(uninterrupted)
    assert summary["iterations"] == ITERATIONS
    assert {p: p.read_bytes() for p in (uninterrupted / "ledger").iterdir()} == before


def test_another_run_is_not_overwritten(uninterrupted):
    with pytest.raises(
        InputError, match=r"holds another run.*optimizer.learning_rate: 0.001 there, 0.002 here"
    ):
        run(uninterrupted, "optimizer.learning_rate=2e-3")


def test_a_finished_run_whose_checkpoints_were_moved_away_keeps_its_records(
    tmp_path, uninterrupted
):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(
        InputError, match=r"records 5 iterations, but .*/checkpoints holds no checkpoint; put"
    ):
        run(folder)
    assert record(folder) == record(uninterrupted)
    assert pq.read_table(folder / "ledger").equals(pq.read_table(uninterrupted / "ledger"))


@pytest.mark.exhaustive
def test_a_full_disk_while_saving_ends_the_run_with_one_line_and_loses_nothing(
    tmp_path, uninterrupted, monkeypatch, capsys
):
    original = checkpoint_writer.start_writing
    saves = []

    def third(folder, state):
        saves.append(folder)
        wait, merge = original(folder, state)

        def full() -> None:
            wait()  # or its threads would go on writing into the folder while it is removed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return (full if len(saves) >= 3 else wait), merge

    monkeypatch.setattr(checkpoint_writer, "start_writing", third)
    with pytest.raises(
        RunError, match=r"^disk full while writing .*000003; the last checkpoint is .*000002$"
    ):
        run(tmp_path)
    assert len(saves) == 4  # tried again at the end
    assert "saved after" not in capsys.readouterr().err
    monkeypatch.undo()
    run(tmp_path)
    assert_same_run(tmp_path, uninterrupted)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that SIGTERM reached while the save after iteration 2 was under way, and that was then
    started again.

    Returns its directory, what it said when it was stopped, and the names and the newest meta of
    its checkpoints then.
    """
    folder = tmp_path_factory.mktemp("stopped")
    original = checkpoint_writer.start_writing
    options = (
        "eval.every=2",
        "run.keep_best=2",
        "run.keep_checkpoints=1",
        "run.checkpoint_every=9",
    )

    def slow(path, state):
        wait, merge = original(path, state)

        def terminated() -> None:
            if path.parent.name.endswith("000002"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2.0)  # until the phase under way has seen it
            wait()

        return terminated, merge

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "start_writing", slow)
        summary = run(folder, *options)
    (path,) = checkpoint.list_checkpoints(folder / "checkpoints")
    checkpoint.verify(path)
    meta = checkpoint.meta_of(path)
    run(folder, *options)
    return folder, summary, meta


@pytest.mark.exhaustive
def test_sigterm_while_a_save_is_under_way_waits_for_it(stopped, uninterrupted):
    folder, summary, meta = stopped
    assert (summary["interrupted"], summary["iterations"], meta["iteration"]) == (True, 2, 2)
    ours = arrays(folder)
    theirs = arrays(uninterrupted)
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)


@pytest.mark.exhaustive
def test_the_best_are_kept_beside_the_newest_and_hold_their_evaluation(stopped):
    folder, _, meta = stopped
    scores = {
        row["iteration"]: {k: v for k, v in row.items() if k.startswith("eval/")}
        for row in metrics.read(folder)
    }
    assert meta["evaluation"] == scores[2]
    evaluated = sorted(
        (2, 4, 5), key=lambda iteration: (-scores[iteration]["eval/reward"], -iteration)
    )
    root = folder / "checkpoints"
    assert {path.name for path in checkpoint.list_checkpoints(root)} == {
        "000005",
        *(f"{i:06d}" for i in evaluated[:2]),
    }
    assert find_checkpoint(folder, "best") == root / f"{evaluated[0]:06d}"


@pytest.mark.parametrize("keep", [0, 1])
def test_an_evaluation_that_could_not_be_saved_is_saved_by_the_next_start(
    tmp_path, monkeypatch, keep
):
    options = ("train.iterations=1", "eval.every=1", f"run.keep_best={keep}")
    evaluate = trainer._evaluate

    def fails_after_the_iteration(this):
        if this.done:
            raise RunError("no evaluation")
        return evaluate(this)

    def has_no_room(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_evaluate", fails_after_the_iteration)
        with pytest.raises(RunError, match="no evaluation"):
            run(tmp_path, *options)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "start_writing", has_no_room)
        with pytest.raises(RunError, match="disk full"):
            run(tmp_path, *options)
    root = tmp_path / "checkpoints"
    assert checkpoint.meta_of(root / "000001")["evaluation"] is None
    run(tmp_path, *options)
    row = metrics.read(tmp_path)[-1]
    assert checkpoint.meta_of(root / "000001")["evaluation"]["eval/reward"] == row["eval/reward"]
    assert find_checkpoint(tmp_path, "best") == root / "000001"


def test_a_backslash_in_the_path_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"^run\.dir=.*: expected a path without a backslash$"):
        run(tmp_path / "a\\b")
    assert not list(tmp_path.iterdir())


def test_of_a_record_that_somebody_wrote_only_levels_that_there_are_count():
    rows = [
        {"iteration": 1},
        *({"iteration": 2, "fidelity/level": level} for level in (-5, 99, 0.5, None, 1.0)),
    ]
    ((level, correlation),) = trainer.exploration_history(rows, 2)
    assert level == 1
    assert np.isnan(correlation)
    rows = [
        {"iteration": i, "fidelity/level": 0, "fidelity/spearman": i / 10} for i in (2, 1, 1, -1)
    ]
    assert trainer.exploration_history(rows, 2) == [(0, 0.1), (0, 0.2)]  # each once, in order


def test_two_processes_do_not_share_a_directory(tmp_path):
    from solrl_jax.storage.files import exclusive_lock

    with exclusive_lock(tmp_path), pytest.raises(InputError, match=r"(?i)use|process"):
        run(tmp_path)


def test_a_directory_in_place_of_the_report_must_be_moved_away(tmp_path):
    (tmp_path / "report.html").mkdir()
    message = r"^html_report=True: \S+report.html is a directory; move it away$"
    with TerminalProgress(bars=False) as progress, pytest.raises(InputError, match=message):
        trainer.run(small_config(tmp_path), progress, html_report=True, force=True)
