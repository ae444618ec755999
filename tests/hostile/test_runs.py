"""Runs that have nothing to learn from any more, prompts that change, interruptions: no failure
ends as success.
"""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from solrl_jax.errors import RunError
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.rl.iteration import iterate
from solrl_jax.runs import checkpoint, metrics, profiling, trainer
from tests.hostile.cases_models import not_finite
from tests.hostile.harness import call
from tests.small import SMALL
from tests.toys import TOY

pytestmark = pytest.mark.slow

NAN = "tests.hostile.outside:nothing_finite"


def train(folder, *overrides: str):
    arguments = [
        "train",
        "tiny",
        *SMALL,
        "eval.num_grid_images=0",
        "run.checkpoint_every=1",
        f"run.dir={folder}",
        *overrides,
    ]
    return call(arguments, 300)


def saved(folder) -> list[int]:
    return [
        checkpoint.iteration_of(path)
        for path in checkpoint.list_checkpoints(folder / "checkpoints")
    ]


@pytest.mark.exhaustive
def test_a_run_whose_adapters_are_not_finite_fails_and_saves_nothing(tmp_path):
    result = train(
        tmp_path,
        "optimizer.learning_rate=1e30",
        "optimizer.max_grad_norm=1e30",
        "train.iterations=2",
    )
    assert (result.code, saved(tmp_path)) == (1, [])
    message = (
        "solrl: iteration 1: the trained parameters are not finite after the update;"
        " nothing is saved"
    )
    assert message in result.error


@pytest.mark.exhaustive  # the next test has the failure after three iterations
@pytest.mark.parametrize(("iterations", "least"), [(5, 3), (2, 2)])
def test_a_run_without_a_finite_reward_fails_after_three_iterations_or_at_its_end(
    iterations, least, tmp_path
):
    result = train(tmp_path, f"reward={NAN}", f"train.iterations={iterations}")
    assert (result.code, saved(tmp_path)) == (1, [])
    message = (
        f"iteration {least}: no finite reward in {least} iteration(s) in a row,"
        " first in phase 'explore'"
    )
    assert message in result.error


@pytest.mark.usefixtures("toy_model")
def test_the_last_finite_checkpoint_is_kept_and_named(tmp_path):
    """A finished run goes on, and its reward is finite no more."""
    whole = train(
        tmp_path,
        *TOY,
        f"reward={NAN}",
        f"reward.options.{NAN}.file={tmp_path / 'broken'}",
        "train.iterations=1",
    )
    assert whole.code == 0, whole.error
    (tmp_path / "broken").touch()
    more = [
        *TOY,
        f"reward={NAN}",
        f"reward.options.{NAN}.file={tmp_path / 'broken'}",
        "train.iterations=9",
        "run.keep_checkpoints=1",
    ]
    result = train(tmp_path, *more)
    assert (result.code, saved(tmp_path)) == (1, [1])
    assert "iteration 4: no finite reward in 3" in result.error
    assert f"the last finite checkpoint is {tmp_path}/checkpoints/000001" in result.error
    assert "Traceback" not in result.error


@pytest.mark.exhaustive
def test_prompts_that_changed_are_refused_unless_said(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue square\ntwo green triangles\n")
    assert train(tmp_path / "run", f"prompts.train={prompts}", "train.iterations=1").code == 0
    prompts.write_text("a red circle\na blue square\ntwo red triangles\n")
    result = train(tmp_path / "run", f"prompts.train={prompts}", "train.iterations=2")
    assert (result.code, saved(tmp_path / "run")) == (2, [1])
    assert (
        f"solrl: prompts.train='{prompts}': its prompts have changed since iteration 1; "
        in result.error
    )
    for _ in range(2):  # once it is said, the new prompts are the run's
        extra = ["--force"] if saved(tmp_path / "run") == [1] else []
        assert (
            train(tmp_path / "run", f"prompts.train={prompts}", "train.iterations=2", *extra).code
            == 0
        )
    assert saved(tmp_path / "run") == [2, 1]


@pytest.mark.exhaustive
def test_a_run_that_never_has_enough_finite_rewards_to_train_on_fails(tmp_path):
    """All candidates are to be kept, and some of each prompt have no score."""
    reward = "tests.hostile.inside:bright"
    settings = [
        f"reward={reward}",
        f"reward.options.{reward}.least=0.89",
        "rollout.kept=8",
        "train.iterations=2",
    ]
    result = train(tmp_path, *settings)
    rows = metrics.read(tmp_path)
    assert (result.code, saved(tmp_path)) == (1, [])
    assert all(row["pool/reward"] is not None and row["kept/spread"] is None for row in rows[1:])
    message = (
        "iteration 2: no prompt with rollout.kept=8 finite rewards in 2 iteration(s) in a row;"
        " nothing"
    )
    assert message in result.error


@pytest.mark.exhaustive
def test_adapters_that_are_not_finite_are_not_saved_because_their_evaluation_fails(
    tmp_path, monkeypatch
):
    def stopped(experiment, ema, progress):
        raise RunError("no score")

    assert train(tmp_path, "train.iterations=1", "run.keep_checkpoints=1").code == 0
    monkeypatch.setattr(trainer, "evaluate", stopped)
    monkeypatch.setattr(trainer, "iterate", lambda *arguments: _not_finite(*iterate(*arguments)))
    result = train(tmp_path, "train.iterations=2", "run.keep_checkpoints=1")
    assert (result.code, saved(tmp_path)) == (1, [1])
    message = (
        "iteration 2: the trained parameters are not finite after the update;"
        " the last finite checkpoint is"
    )
    assert message in result.error


@pytest.mark.exhaustive
def test_adapters_that_are_not_finite_are_not_saved_because_their_ledger_fails(
    tmp_path, monkeypatch
):
    def full(root, iteration, columns):
        raise RunError("disk full")

    assert train(tmp_path, "train.iterations=1").code == 0
    monkeypatch.setattr(trainer.ledger, "write", full)
    monkeypatch.setattr(trainer, "iterate", lambda *arguments: _not_finite(*iterate(*arguments)))
    result = train(tmp_path, "train.iterations=2")
    assert (result.code, saved(tmp_path)) == (1, [1])
    assert "failed with parameters that are not finite: nothing is saved" in result.error


def _not_finite(state, outcome):
    return dataclasses.replace(
        state, adapters=jax.tree.map(lambda x: x * np.nan, state.adapters)
    ), outcome


@pytest.mark.exhaustive
def test_the_record_has_an_iteration_whose_ledger_could_not_be_written(tmp_path, monkeypatch):
    def full(root, iteration, columns):
        raise RunError("disk full")

    monkeypatch.setattr(trainer.ledger, "write", full)
    result = train(tmp_path, "train.iterations=1")
    assert (result.code, saved(tmp_path)) == (1, [1])
    assert [row["iteration"] for row in metrics.read(tmp_path) if "fidelity/spearman" in row] == [1]


@pytest.mark.exhaustive
def test_a_trace_that_cannot_be_written_is_reported_and_the_run_goes_on(tmp_path, monkeypatch):
    def full() -> None:  # as in JAX, whose session then goes on
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(profiling, "stop_trace", full)
        try:
            options = ("run.checkpoint_every=9", "--profile", "1,2")
            result = train(tmp_path, "train.iterations=2", *options)
        finally:
            jax.profiler.stop_trace()
    shutil.rmtree(tmp_path / "profile" / ".partial-iteration-000001")
    assert (result.code, saved(tmp_path)) == (0, [2])
    assert "no trace of iteration 1: disk full while writing" in result.error
    assert "no trace of iteration 2: " in result.error
    assert [row["iteration"] for row in metrics.read(tmp_path) if "seconds" in row] == [1, 2]
    assert not list((tmp_path / "profile").iterdir())


@pytest.mark.exhaustive
def test_a_trace_that_cannot_be_begun_is_reported_and_the_run_goes_on(tmp_path):
    assert train(tmp_path, "train.iterations=1").code == 0
    (tmp_path / "profile").write_text("in the way")
    result = train(tmp_path, "train.iterations=2", "--profile", "2")
    assert (result.code, saved(tmp_path)) == (0, [2, 1])
    assert "no trace of iteration 2: " in result.error


@pytest.mark.exhaustive
def test_an_instruction_that_changed_is_refused_unless_said(tmp_path):
    text = tmp_path / "text"
    text.write_text("Paint it.")
    settings = [f"model.instruction={text}", "model.max_sequence_length=24"]
    assert train(tmp_path / "run", *settings, "train.iterations=1").code == 0
    text.write_text("Draw it.")
    result = train(tmp_path / "run", *settings, "train.iterations=2")
    assert (result.code, saved(tmp_path / "run")) == (2, [1])
    assert (
        f"solrl: model.instruction='{text}': its text has changed since iteration 1; "
        in result.error
    )
    assert train(tmp_path / "run", *settings, "train.iterations=2", "--force").code == 0


@pytest.mark.exhaustive
def test_weights_that_became_nan_end_a_run_and_its_checkpoint_is_kept(tmp_path):
    shutil.copytree(EMBEDDED_FOLDER / "tiny-sana", tmp_path / "model")
    settings = [f"model.path={tmp_path / 'model'}", "eval.num_prompts=1", "run.keep_checkpoints=1"]
    assert train(tmp_path / "run", *settings, "train.iterations=1").code == 0
    not_finite(tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    refused = train(tmp_path / "run", *settings, "train.iterations=9")
    assert (refused.code, saved(tmp_path / "run")) == (2, [1])
    assert "the weights of transformer have changed since iteration 1; " in refused.error
    result = train(tmp_path / "run", *settings, "train.iterations=9", "--force")
    assert (result.code, saved(tmp_path / "run")) == (1, [1])
    assert (
        "iteration 4: no finite reward in 3 iteration(s) in a row, first in phase 'explore'; "
        in result.error
    )
    assert f"the last finite checkpoint is {tmp_path}/run/checkpoints/000001" in result.error


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setting", "what"),
    [
        (
            "rollout.guidance_scale=1e38",
            "reward in 1 iteration(s) in a row, first in phase 'explore'",
        ),
        ("lora.alpha=3e38", "loss in 1 "),
    ],
)
def test_what_overflows_ends_a_run_and_is_named(setting, what, tmp_path):
    result = train(tmp_path, setting, "train.iterations=1")
    assert (result.code, saved(tmp_path)) == (1, [])
    assert f"iteration 1: no finite {what}" in result.error
    assert "; nothing is saved" in result.error


def test_no_secret_of_an_address_is_shown(tmp_path):
    for address in ("http://me:hunter2@localhost:1/", "http://localhost:1/?api_key=hunter2"):
        result = train(tmp_path, f"reward={address}")
        assert result.code == 2
        assert "hunter2" not in result.error
        assert "netrc" in result.error
        assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])


@pytest.mark.exhaustive
def test_pictures_of_a_run_are_made_with_its_own_settings(run, tmp_path):
    (tmp_path / "p.txt").write_text("a red circle\n")
    (tmp_path / "two.txt").write_text("a red circle\ntwo blue squares\n")
    options = {
        "own": [],
        "said": ["--num-steps", "3", "--guidance-scale", "1"],
        "other": ["--num-steps", "2"],
        "two": [],
    }
    images = {}
    for name, more in options.items():
        prompts = tmp_path / ("two.txt" if name == "two" else "p.txt")
        result = call(
            [
                "generate",
                str(run),
                "--prompts",
                str(prompts),
                "--out",
                str(tmp_path / name),
                "--json",
                *more,
            ],
            120,
        )
        assert result.code == 0, result.error
        images[name] = np.load(tmp_path / name / "images.npy")
    assert json.loads(result.out)["steps"] == 3
    np.testing.assert_array_equal(images["own"], images["said"])
    assert np.abs(images["own"] - images["other"]).max() > 0.01
    np.testing.assert_allclose(
        images["two"][0], images["own"][0], atol=0.02
    )  # another chunk rounds otherwise


@pytest.mark.exhaustive
def test_a_closed_pipe_loses_nothing(tmp_path):
    command = [
        sys.executable,
        "-m",
        "solrl_jax",
        "train",
        "tiny",
        *SMALL,
        "eval.num_grid_images=0",
        f"run.dir={tmp_path}",
    ]
    command += ["train.iterations=50", "run.checkpoint_every=50"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stderr:
            if line.startswith("iteration 2"):
                break
        process.stderr.close()
        assert process.wait(120) == 1
    assert saved(tmp_path)[0] >= 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_has_a_code_of_its_own(number, tmp_path):
    command = [
        sys.executable,
        "-m",
        "solrl_jax",
        "train",
        "tiny",
        *SMALL,
        "eval.num_grid_images=0",
        f"run.dir={tmp_path}",
        "--json",
    ]
    before = signal.signal(
        number, signal.default_int_handler
    )  # else the run would ignore what nohup ignores here
    with subprocess.Popen(
        [*command, "train.iterations=50"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        signal.signal(number, before)
        for line in process.stderr:
            if line.startswith("iteration 2"):
                break
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert json.loads(out.splitlines()[-1])["interrupted"]
