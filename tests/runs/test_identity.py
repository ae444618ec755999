"""Whether a run may write to a directory: nothing that another program or another run wrote is
lost.
"""

import json
import shutil

import pytest

from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.runs import ledger, metrics
from solrl_jax.runs.identity import RECORDS, refuse_another_run, write_config
from tests.small import small_config


@pytest.fixture
def folder(tmp_path):
    """The directory of a run that has claimed it and has done nothing else."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(folder, small_config(folder))
    return folder


def refuse(folder) -> None:
    refuse_another_run(folder, small_config(folder))


def refusal(folder) -> str:
    """The one line with which a start in the directory is refused; nothing in it has changed."""

    def contents():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    with pytest.raises((InputError, ConfigError)) as error:
        refuse(folder)
    assert contents() == before
    assert "\n" not in str(error.value)
    return str(error.value)


def log(folder, iterations: int) -> None:
    """The record of a run that has done so many iterations."""
    with metrics.Metrics(folder, resume_after=-1) as record:
        for iteration in range(iterations + 1):
            record.log(iteration, {"reward": 0.5})


def save(folder, iteration: int) -> None:
    """Something that is named like a checkpoint; whether it is whole is judged elsewhere."""
    (folder / "checkpoints" / f"{iteration:06d}").mkdir()


def finish(folder) -> None:
    (folder / "run.json").write_text(json.dumps({"finished_after_iteration": 3}))


def test_an_empty_directory_and_one_with_other_files_are_free(tmp_path):
    refuse(tmp_path)
    refuse(tmp_path / "absent")
    (tmp_path / "thesis.txt").write_text("unrelated")
    (tmp_path / "ledger").mkdir()
    refuse(tmp_path)


@pytest.mark.parametrize("record", RECORDS)
def test_files_of_unknown_origin_are_not_overwritten(tmp_path, record):
    path = tmp_path / record
    if path.suffix:
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").touch()
    assert refusal(tmp_path) == (
        f"run.dir={str(tmp_path)!r} has {record} but no config.yaml, so it may not be a run's;"
        " name another directory"
    )


@pytest.mark.parametrize("content", [b"mine: true", b"\xff\xfe\x00", b"[", b"a: {b"])
def test_a_config_of_another_program_is_not_overwritten(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path / 'config.yaml'}: ")


def test_a_run_goes_on_and_another_does_not(folder):
    log(folder, 4)
    save(folder, 4)
    refuse(folder)
    with pytest.raises(
        InputError,
        match=r"holds another run \(optimizer.learning_rate: 0.001 there, 0.002 here\); name",
    ):
        refuse_another_run(folder, small_config(folder, "optimizer.learning_rate=2e-3"))


def test_a_run_that_was_killed_before_its_first_save_starts_over(folder):
    refuse(folder)
    log(folder, 3)
    refuse(folder)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("records", ["metrics.jsonl", "ledger"])
def test_a_run_whose_checkpoints_were_moved_away_does_not_start_over(folder, finished, records):
    if records == "ledger":
        (folder / "ledger").mkdir()
        ledger.path_of(folder / "ledger", 4).touch()
    else:
        log(folder, 4)
    if finished:  # its checkpoints may also have been moved one by one
        finish(folder)
    else:
        shutil.rmtree(folder / "checkpoints")
    assert refusal(folder) == (
        f"run.dir={str(folder)!r} records 4 iterations, but {folder / 'checkpoints'} holds no"
        " checkpoint; put the checkpoints back, or name another directory"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"exploration": null}', b"\xff", json.dumps("x").encode()],
)
def test_a_damaged_run_json_is_set_aside(folder, content):
    (folder / "run.json").write_bytes(content)
    refuse(folder)
