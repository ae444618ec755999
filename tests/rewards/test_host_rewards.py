"""Rewards outside JAX run while the devices work. Chunks and workers change no score, and a failure
stops the run or is skipped.
"""

import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError
from solrl_jax.rewards import host
from solrl_jax.rewards.host import RewardError, open_scoring, score_gray_images
from solrl_jax.rewards.mixture import add_total
from solrl_jax.rewards.protocol import HostReward, HostRewards
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.generate import SeedBatch, generate, prepare
from solrl_jax.rl.iteration import iterate
from solrl_jax.runs import checkpoint, metrics
from solrl_jax.runs import trainer as trainer
from solrl_jax.runs.progress import TerminalProgress
from tests import outside
from tests.rewards.opening import open_reward
from tests.small import small_config
from tests.toys import toy_config, toy_model

PROMPTS = [Prompt(f"a {'very ' * i}red circle", {"score": i / 4}) for i in range(7)]
PICTURES = np.random.default_rng(0).random((7, 8, 8, 3), np.float32)
FAILING = "tests.outside:failing"
WRONG = {
    "raise": r"ValueError: no such thing",
    "hang": r"no answer within reward.timeout=2 seconds",
    "exit": r"its process ended with exit code 3",
    "leave": r"SystemExit: 3",
    "length": r"returned shape \(1,\) for 2 images",
    "words": r"returned \['good', 'good'\]: no numbers",
    "nothing": r"returned None: no numbers",
    "nameless": r"returned \['score'\] without 'reward'",
}


# Processes and seconds. Nearly all tests share them, because processes take a second to start.
WORKERS = (2, 2.0)


@pytest.fixture(autouse=True, scope="module")
def _closed():
    yield
    host.shared_workers(*WORKERS).close()


def reward(function: str, others=(), batch=16, name="some", **options) -> HostReward:
    return HostReward(name, f"tests.outside:{function}", options, others, batch)


def scores(rewards, workers=WORKERS, chunk=4, skip=False, pictures=PICTURES, prompts=PROMPTS):
    with open_scoring(HostRewards(tuple(rewards), {}, *workers, skip), prompts) as outside_jax:
        for start in range(0, len(pictures), chunk):
            outside_jax.add(pictures[start : start + chunk])
        return outside_jax.finish(), outside_jax.failed


@pytest.mark.slow
def test_scores_do_not_depend_on_chunks_batches_or_workers():
    expected = outside.mean(PICTURES, PROMPTS, [], scale=0.5)
    alone = (1, 20.0)
    try:
        for workers, chunk, batch in (
            (WORKERS, 7, 16),
            (WORKERS, 3, 16),
            (WORKERS, 7, 1),
            (alone, 4, 16),
            (alone, 4, 3),
        ):
            padded = np.concatenate(
                [PICTURES, PICTURES[:2]]
            )  # pictures beyond the last prompt are padding
            got, failed = scores(
                [reward("mean", scale=0.5, batch=batch)], workers, chunk, pictures=padded
            )
            np.testing.assert_array_equal(got["some"], expected.astype(np.float32))
            assert failed == {"some": 0}
    finally:
        host.shared_workers(*alone).close()


def test_a_function_gets_metadata_and_may_return_several_scores():
    got, _ = scores([reward("metadata_scores", name="metadata_scores"), reward("several", None)])
    np.testing.assert_array_equal(got["metadata_scores"], [p.metadata["score"] for p in PROMPTS])
    np.testing.assert_allclose(got["some/green"], PICTURES[..., 1].mean((1, 2)), rtol=1e-6)
    summed = add_total({"metadata_scores": 2.0, "some/green": -1.0}, got)
    np.testing.assert_allclose(
        summed["reward"], 2 * got["metadata_scores"] - got["some/green"], rtol=1e-6
    )
    assert summed["reward"].dtype == np.float32


def test_a_picture_with_nan_has_no_score():
    pictures = PICTURES.copy()
    pictures[2, 0, 0, 0] = np.nan
    got, failed = scores([reward("metadata_scores")], pictures=pictures)
    np.testing.assert_array_equal(np.isnan(got["some"]), np.arange(7) == 2)
    assert failed == {"some": 0}


def test_workers_leave_accelerators_and_results_alone(monkeypatch, capfd):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    workers = (1, 21.0)  # of this test alone: they start in the environment above
    got, _ = scores([reward("where")], workers)
    host.shared_workers(*workers).close()
    np.testing.assert_array_equal(got["some"], 1)
    output = capfd.readouterr()
    assert (output.out, "here" in output.err) == ("", True)


def told_of(how):
    return rf"reward 'some': {WRONG[how]} \(prompt 'a red circle' and 1 more\)"


@pytest.mark.parametrize("how", sorted(WRONG.keys() - {"hang", "exit"}))
def test_a_failure_costs_a_score(how, capsys):
    """Seven pictures are four calls with at most two pictures each; the first call fails."""
    bad = reward("failing", how=how, prompt=PROMPTS[1])
    got, failed = scores([bad, reward("mean", name="other")], skip=True)
    np.testing.assert_array_equal(np.isnan(got["some"]), np.arange(7) < 2)
    assert np.isfinite(got["other"]).all()
    assert failed == {"some": 2, "other": 0}
    message = f"skipped 2 of 7 images, which have no score: {told_of(how)}\n"
    assert re.fullmatch(message, capsys.readouterr().err)


@pytest.mark.slow
def test_or_a_failure_stops_the_run_and_the_workers():
    host.shared_workers(*WORKERS).close()
    others = set(
        multiprocessing.active_children()
    )  # workers with other settings, of tests that ran before in this process
    with pytest.raises(RewardError, match=f"^{told_of('raise')}$"):
        scores([reward("failing", how="raise", prompt=PROMPTS[1])])
    for _ in range(100):  # a killed process may be seen for a moment
        if not set(multiprocessing.active_children()) - others:
            return
        time.sleep(0.1)
    assert not set(multiprocessing.active_children()) - others


def test_the_sums_of_a_run_count_failures_together():
    opened = open_reward({"tests.outside:mean": 1.0}, eval_only=("jpeg_compressibility",))
    opened = dataclasses.replace(opened, explore={"jpeg_compressibility": 1.0})
    counters = [[s.host.failures_in_a_row for s in opened.load(None)] for _ in range(2)]
    assert len({id(counter) for counter in counters[0]}) == 1
    assert counters[0][0] is not counters[1][0]


def test_a_score_that_does_not_come_is_a_failure():
    with pytest.raises(RewardError, match=r"reward 'some': returned no 'strict'"):
        score_gray_images(
            HostRewards((reward("mean", ("strict",)),), {"some/strict": 1.0}, *WORKERS, False),
            PROMPTS[:2],
            (8, 8),
        )


def test_processes_that_do_not_start_are_a_failure(monkeypatch):
    monkeypatch.setattr("solrl_jax.rewards.host._set_up", os.abort)
    with pytest.raises(RewardError, match=r"do not start, or end by themselves"):
        scores([reward("mean")], (1, 22.0))


def test_a_masked_score_is_no_number():
    with pytest.raises(host.ScoringFailure, match="no numbers"):
        host.to_scores(np.ma.masked_invalid([np.nan, 1]), 2)


HOLDER = """
import sys

import numpy as np

from solrl_jax.data.prompts import Prompt
from solrl_jax.rewards.host import Workers
from solrl_jax.rewards.protocol import HostReward

if __name__ == "__main__":
    workers = Workers(1, 100.0)
    start = lambda name, **options: workers.start(
        HostReward("some", name, options, ()), np.zeros((1, 2, 2, 3), np.float32), [Prompt("a")]
    )
    print(int(start("tests.outside:pid")().answer["reward"][0]), flush=True)
    start(sys.argv[1], begun=sys.argv[2])
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.parametrize("how", ["patient", "deaf"])
def test_workers_end_with_the_program(how, end, tmp_path):
    """They end during a call, whether the program ends by itself or is killed, also while no Python
    code runs in them.
    """
    (tmp_path / "holder.py").write_text(HOLDER)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [
        sys.executable,
        tmp_path / "holder.py",
        f"tests.hostile.outside:{how}",
        begun := tmp_path / "begun",
    ]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        worker = int(process.stdout.readline())
        while not begun.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        assert is_running(worker)
        if end == "kill":
            process.kill()
        process.stdin.close()
        process.wait()
    deadline = time.monotonic() + 5
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# in a run


@pytest.fixture(scope="module")
def built():
    with toy_model():
        return experiments.build(toy_config("unused", "reward=tests.outside:in_jax"))


def with_reward(built, weights, options=None, skip=False):
    """The experiment with another reward, without loading it again."""
    count, timeout = WORKERS
    run = dict(workers=count, timeout=timeout, on_failure="skip" if skip else "stop")
    opened = open_reward(weights, options=options or {}, **run).load(built.backbone.mesh)
    return dataclasses.replace(built, reward=opened.trained, evaluation_reward=opened.evaluated)


@pytest.mark.slow
def test_a_reward_that_scores_nothing_is_found_before_the_weights_are(monkeypatch):
    monkeypatch.delattr(experiments, "load_backbone")
    options = json.dumps({FAILING: {"how": "length"}})
    with pytest.raises(RewardError, match=r"returned shape \(0,\) for 1 images \(prompt '"):
        experiments.build(small_config("unused", f"reward={FAILING}", f"reward.options={options}"))


@pytest.mark.exhaustive
def test_scoring_a_chunk_overlaps_making_the_next(built, tmp_path):
    """The score of the first chunk waits for a file, which is written after the second chunk is
    generated.
    """
    name = "tests.outside:waiting"
    file = tmp_path / "go"
    experiment = with_reward(built, {name: 1.0}, {name: {"file": str(file)}})
    prompted = prepare(
        built.backbone,
        experiment.reward,
        built.train_prompts[:1],
        built.config.model.max_sequence_length,
    )
    chunks = []

    def progress(rows):
        chunks.append(rows)
        if len(chunks) == 3:  # the third chunk is on its way, so the second is made
            file.touch()

    sampler = built.sampler("some", fresh_state(built).adapters, 3)
    rows = SeedBatch.from_seeds(built.seeds("candidate", built.train_prompts[:1], 6))
    assert sampler.samples_per_device == 2
    samples = generate(
        built.backbone,
        sampler,
        prompted,
        rows,
        experiment.reward,
        progress=progress,
        keep_images=True,
    )
    np.testing.assert_allclose(samples.reward, samples.images.mean((1, 2, 3)), rtol=1e-6)


@pytest.mark.exhaustive
def test_the_sum_is_of_what_was_scored_in_jax_and_outside(built):
    weights = {
        "tests.outside:in_jax": 0.5,
        "tests.outside:mean": 2.0,
        "tests.outside:several/green": -1.0,
    }
    experiment = with_reward(built, weights)
    _, outcome = iterate(experiment, fresh_state(experiment), 1)
    m = outcome.metrics
    assert m["pool/reward"] == pytest.approx(
        sum(w * m[f"pool/{name}"] for name, w in weights.items()), rel=1e-5
    )
    assert {"pool/tests.outside:several", "kept/tests.outside:mean"} <= m.keys()
    assert m["reward_failures/tests.outside:mean"] == m["nonfinite_rewards"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "hang",
        # the services below and tests/hostile/test_services.py fail in these ways too
        *(
            pytest.param(how, marks=pytest.mark.exhaustive)
            for how in ("nan", "raise", "exit", "length")
        ),
    ],
)
def test_what_has_no_score_is_not_trained_on(how, built, tmp_path):
    """Scoring one image fails once, or several rewards are NaN. The run continues or stops, as
    configured.
    """
    once = {} if how == "nan" else {"file": str(tmp_path / "broken"), "once": True}

    def experiment(skip):
        return with_reward(built, {FAILING: 1.0}, {FAILING: {"how": how, **once}}, skip=skip)

    (tmp_path / "broken").touch()
    state, outcome = iterate(experiment(skip=how != "nan"), fresh_state(built), 1)
    bad = ~np.isfinite(outcome.ledger["proxy_reward"])
    assert bad.sum() == 1 if how != "nan" else 0 < bad.sum() < bad.size
    assert outcome.metrics["nonfinite_rewards"] >= bad.sum()
    assert outcome.metrics[f"reward_failures/{FAILING}"] == (0 if how == "nan" else 1)
    assert not (outcome.ledger["kept"] & bad).any()
    assert outcome.ledger["kept"].any()
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))
    if how != "nan":
        (tmp_path / "broken").touch()
        with pytest.raises(
            RewardError, match=WRONG[how].replace("for 2", "for 1").replace("(1,", "(0,")
        ):
            iterate(experiment(skip=False), fresh_state(built), 1)


@pytest.mark.slow
def test_if_all_scoring_fails_the_run_goes_on(built):
    weights = {
        FAILING: 1.0,
        f"{FAILING}/strict": 1.0,
    }  # its scores are unknown before the first answer
    experiment = with_reward(built, weights, {FAILING: {"how": "raise"}}, skip=True)
    state, outcome = iterate(experiment, fresh_state(experiment), 1)
    assert outcome.metrics["nonfinite_rewards"] == 16
    assert outcome.metrics["unusable_prompts"] == 2
    # Padding is scored too, because the regeneration has the same shapes in every iteration.
    assert outcome.metrics[f"reward_failures/{FAILING}"] == 16 + 8
    assert not outcome.ledger["kept"].any()
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))


class Breaking(TerminalProgress):
    """Writes a file when a phase begins for the `at`-th time. From then on, the reward fails."""

    def __init__(self, file: Path, phase: str, at: int) -> None:
        super().__init__(bars=False)
        self.file = file
        self.breaks = phase
        self.remaining = at

    def phase(self, name: str, rows: int, done: int) -> None:
        if (name, done) == (self.breaks, 0):
            self.remaining -= 1
            if self.remaining == 0:
                self.file.touch()
        super().phase(name, rows, done)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_reward_that_fails_stops_the_run_which_then_goes_on(tmp_path, capsys):
    """It fails in the second iteration, and in the evaluation after it. The result equals that of a
    run without failures.
    """
    broken = tmp_path / "broken"
    options = json.dumps({FAILING: {"how": "raise", "file": str(broken)}})
    overrides = [
        "train.iterations=2",
        "run.checkpoint_every=9",
        "eval.num_grid_images=0",
        f"reward={FAILING}",
    ]
    overrides.append(f"reward.options={options}")

    def run(phase: str, at: int, *more: str) -> dict:
        broken.unlink(missing_ok=True)
        with Breaking(broken, phase, at) as report:
            return trainer.run(toy_config(tmp_path / "run", *overrides, *more), report)

    run("never", 1)
    (tmp_path / "run").rename(tmp_path / "whole")
    for phase, at, completed in (("explore", 2, 1), ("evaluate", 1, 2)):
        with pytest.raises(RewardError, match=r"ValueError: no such thing \(prompt 'a"):
            run(phase, at)
        assert (
            f"failed: saved after iteration {completed}; the same command continues from there"
            in capsys.readouterr().err
        )
    last = tmp_path / "run" / "checkpoints" / "000002"
    assert checkpoint.meta_of(last)["evaluation"] is None
    run(
        "never",
        1,
        "reward.workers=1",
        "reward.on_failure=skip",
        "reward.eval_only=[jpeg_compressibility]",
        "run.keep_best=1",
    )
    assert (
        checkpoint.meta_of(last)["evaluation"]["eval/reward"]
        == metrics.read(tmp_path / "run")[-1]["eval/reward"]
    )
    assert {"eval/jpeg_compressibility", "eval/hacking"} <= metrics.read(tmp_path / "run")[
        -1
    ].keys()
    assert rows(tmp_path / "run", "jpeg_comp") == rows(tmp_path / "whole")
    assert pq.read_table(tmp_path / "run" / "ledger").equals(
        pq.read_table(tmp_path / "whole" / "ledger")
    )
    with pytest.raises(
        InputError,
        match=r"holds another run \(reward.options.*failing.how: 'raise' there, 'hang' here",
    ):
        run("never", 1, f"reward.options.{FAILING}.how=hang")


def rows(run_dir: Path, watched: str = "watched") -> dict[int, dict]:
    """The metrics by iteration, without times and without what is only watched."""
    merged = {}
    for row in metrics.read(run_dir):
        kept = {
            k: v for k, v in row.items() if not ("second" in k or watched in k or "hacking" in k)
        }
        merged.setdefault(row["iteration"], {}).update(kept)
    return merged


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_run_says_once_that_equal_rewards_teach_nothing(tmp_path, capsys):
    """The reward is -1 for every prompt without metadata, whatever the image shows."""
    overrides = [
        "train.iterations=2",
        "eval.num_grid_images=0",
        "reward=tests.outside:metadata_scores",
    ]
    with TerminalProgress(bars=False) as progress:
        trainer.run(toy_config(tmp_path / "run", *overrides), progress)
    lines = capsys.readouterr().err.splitlines()
    messages = [line for line in lines if "all rewards of each prompt are equal" in line]
    assert len(messages) == 1
    assert messages[0].startswith("iteration 1: ")
