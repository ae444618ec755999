"""Runs with a judge: they train, are interrupted, resume from the cache and end with the same
adapters; a cheap reward ranks what a judge scores; `solrl doctor`; the report.
"""

import contextlib
import itertools
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from solrl_jax.cli import main
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.rl.experiment import build, state_shapes
from solrl_jax.runs import checkpoint, metrics, report, trainer
from solrl_jax.runs.identity import fingerprint
from solrl_jax.runs.progress import TerminalProgress
from tests.rewards import tiny_vlm
from tests.rewards.judge_server import completion, reply, serving, yes
from tests.small import small_config
from tests.toys import toy_config


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def judged(run_dir, url, cache, model, *overrides):
    """The configuration of a run of a toy with a judge, or of `tiny` with a judge that is
    served.
    """
    options = f"{{base_url: '{url}', model: '{model}', cache: '{cache}'"
    served = os.sep in model
    if served:  # the model with random weights answers with three digits
        options += ", score: json, scale: [111, 999], max_tokens: 3, concurrency: 2"
    configure = small_config if served else toy_config
    return configure(
        run_dir,
        "train.iterations=2",
        "eval.num_grid_images=0",
        "reward=judge",
        f"reward.options.judge={options}}}",
        *overrides,
    )


def train(config, stop_in=None):
    """Trains; stop_in: interrupts the second iteration in this phase, as Ctrl-C does."""

    class Progress(TerminalProgress):
        phases = 0

        def phase(self, name, total, done):
            super().phase(name, total, done)
            if name == stop_in and done == 0:
                self.phases += 1
                if self.phases == 2:
                    raise KeyboardInterrupt

    with Progress(bars=False) as progress:
        return trainer.run(config, progress)


def arrays(config):
    path = checkpoint.list_checkpoints(Path(config.run.dir) / "checkpoints")[0]
    state, _ = checkpoint.restore(path, state_shapes(build(config)))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def num_cached(cache):
    with contextlib.closing(sqlite3.connect(cache / "scores.sqlite")) as database:
        return database.execute("SELECT count(*) FROM scores").fetchone()[0]


def check_resume(url, model, tmp_path):
    """An interrupted and resumed run pays for the same requests as one that is not interrupted, and
    ends with the same bits.
    """
    whole = judged(tmp_path / "whole", url, tmp_path / "cache-whole", model)
    assert not train(whole)["interrupted"]
    row = metrics.read(tmp_path / "whole")[-1]
    assert row["kept/spread"] > 0  # there is something to learn
    assert row["reward_cost/judge/failures"] == 0

    halves = judged(tmp_path / "halves", url, tmp_path / "cache", model)
    assert train(halves, stop_in="regenerate")["interrupted"]
    paid = num_cached(tmp_path / "cache")
    assert not train(halves)["interrupted"]
    resumed = metrics.read(tmp_path / "halves")[-1]
    # 16 candidates were scored before the interruption, and 8 kept samples are scored now.
    assert resumed["reward_cost/judge/cached"] >= 16
    new = resumed["reward_cost/judge/requests"] + resumed["eval/reward_cost/judge/requests"]
    assert new == num_cached(tmp_path / "cache") - paid
    assert num_cached(tmp_path / "cache") == num_cached(tmp_path / "cache-whole")
    for ours, theirs in zip(arrays(halves), arrays(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    ledgers = [pq.read_table(tmp_path / name / "ledger") for name in ("halves", "whole")]
    assert ledgers[0].equals(ledgers[1])
    return halves


def test_a_run_may_find_its_judge_elsewhere_but_not_be_asked_something_else(tmp_path):
    def run(url, *overrides):
        config = judged(tmp_path, url, tmp_path / "cache", "yes", *overrides)
        return fingerprint(config, "nvfp4")

    assert run("http://127.0.0.1:9/v1") == run("http://127.0.0.1:8/v1")
    assert run("http://127.0.0.1:9/v1", "reward.options.judge.prompt=text") != run(
        "http://127.0.0.1:9/v1"
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("toy_model")
def test_a_run_resumes_from_the_cache(server, tmp_path, capsys):
    config = check_resume(server.url, "yes", tmp_path)
    # The server may move, but the question may not change.
    moved = judged(config.run.dir, "http://127.0.0.1:9/v1", tmp_path / "cache", "yes")
    assert train(moved)["iterations"] == 2
    other = "reward.options.judge.prompt=text"
    with pytest.raises(InputError, match="holds another run"):
        train(judged(config.run.dir, server.url, tmp_path / "cache", "yes", other))
    page = tmp_path / "report.html"
    report.write([Path(config.run.dir)], page)
    text = page.read_text()
    assert "judge: requests per iteration" in text
    assert "judge: seconds waited per iteration" in text


def is_ready(url):
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    return False


@pytest.mark.exhaustive
def test_a_run_resumes_from_the_cache_with_transformers_serve(tmp_path):
    """A real server, with a vision-language model of random weights."""
    tiny_vlm.save(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = "from transformers.cli.transformers import main; main()"
    arguments = ["serve", str(tmp_path / "model"), "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (
        open(tmp_path / "server.log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-c", command, *arguments, "--host", "127.0.0.1"],
            env=environment,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 600
            while not is_ready(url):
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.5)
            check_resume(f"{url}/v1", str(tmp_path / "model"), tmp_path)
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_pairwise_judge_scores_win_rates(server, tmp_path):
    """Both orders are asked, so what the judge prefers about a position cancels."""
    offset = len(server.bodies)
    overrides = (
        "reward.options.judge.prompt=preference",
        "reward.group_size=4",
        "eval.num_prompts=1",
    )
    config = judged(
        tmp_path / "run",
        server.url,
        tmp_path / "cache",
        "brighter",
        "train.iterations=1",
        *overrides,
    )
    train(config)
    ledger = pq.read_table(tmp_path / "run" / "ledger").to_pydict()
    proxy = np.array(ledger["proxy_reward"]).reshape(2, 2, 4)
    # Each of four images wins 0.9 to 0.1 against those that are darker.
    expected = np.sort(0.5 + 0.4 * (2 * np.arange(4) - 3) / 3)
    np.testing.assert_allclose(
        np.sort(proxy, axis=-1), np.broadcast_to(expected, proxy.shape), atol=0.02
    )
    row = metrics.read(tmp_path / "run")[-1]
    # 4 * 3 pairs for each of 2 * 2 groups of candidates and 2 groups of kept samples.
    num_answers = row["reward_cost/judge/requests"] + row.get("reward_cost/judge/cached", 0)
    assert num_answers == 12 * 6
    body = server.bodies[offset]["messages"][0]["content"]
    assert [part.get("text") for part in body[:4]] == ["Image A:", None, "Image B:", None]


# A reward for exploration alone.


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_cheap_reward_ranks_and_the_trained_one_scores_what_is_kept(tmp_path):
    cheap = "tests.outside:mean"
    trained = "tests.outside:in_jax"
    config = toy_config(
        tmp_path / "run",
        "train.iterations=2",
        f"reward={trained}",
        f"rollout.explore.reward={{'{cheap}': 1}}",
    )
    train(config)
    train(toy_config(tmp_path / "plain", "train.iterations=1", f"reward={cheap}"))
    tables = [pq.read_table(tmp_path / name / "ledger").to_pydict() for name in ("run", "plain")]
    ours = np.array(tables[0]["proxy_reward"])[:16]
    # The first iteration ranks as a run would that trains on the proxy.
    np.testing.assert_array_equal(ours, np.array(tables[1]["proxy_reward"]))
    assert tables[0]["kept"][:16] == tables[1]["kept"]
    row = metrics.read(tmp_path / "run")[-1]
    assert row["kept/reward"] == row[f"kept/{trained}"]
    assert f"pool/{trained}" not in row
    assert row["pool/reward"] == row[f"pool/{cheap}"]
    assert f"kept/{cheap}" not in row
    assert f"eval/{trained}" in row


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_judge_is_asked_about_the_kept_samples_alone(server, tmp_path):
    proxy = "rollout.explore.reward={'tests.outside:in_jax': 1}"
    config = judged(
        tmp_path / "run", server.url, tmp_path / "cache", "yes", "train.iterations=1", proxy
    )
    train(config)
    row = metrics.read(tmp_path / "run")[-1]
    assert row["reward_cost/judge/requests"] + row.get("reward_cost/judge/cached", 0) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_second_judge_may_see_small_images(server, tmp_path):
    small = f"{{base_url: '{server.url}', model: 'yes', cache: null, image_size: 4}}"
    config = judged(
        tmp_path / "run",
        server.url,
        tmp_path / "cache",
        "yes",
        "train.iterations=1",
        f"reward.options.judge-small={small}",
        "rollout.explore.reward={judge-small: 1}",
    )
    train(config)
    row = metrics.read(tmp_path / "run")[-1]
    assert row["reward_cost/judge-small/requests"] == 16
    assert row["reward_cost/judge/requests"] + row.get("reward_cost/judge/cached", 0) == 8


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (("rollout.explore.reward={}",), ConfigError, "must not be empty"),
        (
            ("rollout.explore.reward={nonsense: 1}",),
            InputError,
            "rollout.explore.reward: unknown reward",
        ),
        (
            ("rollout.explore.reward={shapes/nonsense: 1}",),
            InputError,
            "rollout.explore.reward: unknown score",
        ),
        (
            (
                "rollout.explore.reward={shapes: 1}",
                "rollout.regenerate=false",
                "rollout.explore.num_steps=3",
            ),
            ConfigError,
            "must be null with rollout.regenerate=false",
        ),
        (
            ("rollout.explore.reward={shapes: 1}", "rollout.explore.min_rank_correlation=0.5"),
            ConfigError,
            "must be null with rollout.explore.min_rank_correlation",
        ),
        (
            ("rollout.explore.reward={'http://u:secret@a/': 1}",),
            ConfigError,
            "no user name, password",
        ),
    ],
)  # fmt: skip
def test_a_reward_of_exploration_that_does_not_fit_is_one_line(overrides, error, message, tmp_path):
    with pytest.raises(error, match=message) as raised:
        build(small_config(tmp_path, *overrides))
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


# `solrl doctor`.


def doctor(url, model, *overrides):
    options = f"reward.options.judge={{base_url: '{url}', model: '{model}', cache: null}}"
    result = CliRunner().invoke(main.cli, ["doctor", "tiny", "reward=judge", options, *overrides])
    lines = [line for line in result.output.splitlines() if line.startswith(("judge", "missing"))]
    return result.exit_code, lines


@pytest.mark.slow
def test_doctor_says_what_an_endpoint_supports(server):
    code, lines = doctor(server.url, "yes")
    assert code == 0, lines
    assert lines[0].startswith(f"judge      {server.url} answers 'Yes' in ")
    assert lines[0].endswith("images yes, log-probabilities 3, seed accepted, fingerprint no")
    num_requests = len(server.bodies)
    _, lines = doctor(server.url, "rubric", "reward.options.judge.prompt=rubric")
    assert "log-probabilities no, schema yes" in lines[0]
    assert len(server.bodies) == num_requests + 1


@pytest.mark.slow
def test_doctor_says_what_an_endpoint_lacks(server):
    def no_logprobs(handler, body):
        if "logprobs" in body:
            return reply(handler, {"error": {"message": "logprobs: unknown field"}}, 400)
        return reply(handler, completion("yes"))

    server.answers["plain"] = no_logprobs
    code, lines = doctor(server.url, "plain")
    assert code == 1
    assert "log-probabilities no, seed accepted" in lines[0]
    assert "status 400 (logprobs: unknown field)" in lines[0]
    code, lines = doctor("http://127.0.0.1:9/v1", "yes")
    assert code == 1
    assert "http://127.0.0.1:9/v1: no answer" in lines[0]
    code, lines = doctor(server.url, "yes", "reward.options.judge.modle=m")
    assert "did you mean 'model'?" in lines[0]


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_server_that_fails_for_a_while_costs_nothing_with_skip(server, tmp_path):
    """Images without a score are not trained on, and a later start asks only for them."""
    count = itertools.count()
    server.answers["flaky"] = lambda handler, body: (
        reply(handler, "", 500) if next(count) % 5 == 4 else reply(handler, yes(body))
    )
    config = judged(
        tmp_path / "run",
        server.url,
        tmp_path / "cache",
        "flaky",
        "train.iterations=1",
        "reward.on_failure=skip",
        "reward.options.judge.retries=0",
    )
    train(config)
    row = metrics.read(tmp_path / "run")[-1]
    assert row["reward_cost/judge/failures"] == row["reward_failures/judge"] > 0
    assert np.isfinite(row["kept/reward"])
