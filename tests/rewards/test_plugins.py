"""Rewards of users: functions, entry points, services, their options, and how a configuration names
them.
"""

import base64
import http.server
import inspect
import io
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import reward_server
from PIL import Image

from solrl_jax.config.presets import override, resolve
from solrl_jax.config.serialization import from_yaml, to_yaml
from solrl_jax.config.values import ConfigError
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError
from solrl_jax.rewards import registry
from solrl_jax.rewards.host import ScoringFailure, open_scoring, shared_workers
from solrl_jax.rewards.http import http as service_scores
from solrl_jax.rewards.protocol import score_images
from tests import outside
from tests.rewards.opening import open_reward

PICTURES = (
    np.random.default_rng(1).integers(0, 256, (5, 6, 7, 3)).astype(np.float32) / 255
)  # as PNG holds them
PROMPTS = [Prompt(f"{'very ' * i}red", {"n": i}) for i in range(5)]


def opened(weights, **settings):
    return open_reward(weights, {}, **settings).load(None)


def test_a_function_outside_jax_and_its_options():
    names = {"tests.outside:mean": 1.0, "tests.outside:several/green": 2.0, "geneval/strict": 1.0}
    host = opened(names, options={"tests.outside:mean": {"scale": 2.0}}).trained.host
    rewards = {r.name: (r.target, dict(r.options), r.others) for r in host.rewards}
    assert rewards == {
        "tests.outside:mean": ("tests.outside:mean", {"scale": 2.0}, ()),
        "tests.outside:several": ("tests.outside:several", {}, ("green",)),
        "geneval": ("solrl_jax.rewards.geneval:geneval", {}, ("strict",)),
    }
    assert host.weights == names


def test_a_function_that_returns_a_reward_is_scored_in_jax():
    name = "tests.outside:in_jax"
    reward = opened({name: 0.5}, options={name: {"scale": 3.0}}).trained
    out = score_images(
        reward, reward.params, jnp.asarray(PICTURES), reward.prepare(PROMPTS), jnp.arange(5)
    )
    np.testing.assert_allclose(out[name], 3 * PICTURES.mean((1, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(out["reward"], 0.5 * out[name], rtol=1e-6)
    assert reward.host is None


def test_where_all_is_outside_jax_nothing_is_scored_in_it():
    reward = opened({"tests.outside:mean": 1.0}).trained
    assert reward.score is None
    assert reward.prepare(["a"]) == {}


def test_what_is_watched_is_scored_at_evaluations_alone():
    watched = ("tests.outside:in_jax", "jpeg_compressibility")
    loaded = opened({"shapes": 1.0, "tests.outside:mean": 1.0}, eval_only=watched)
    trained = loaded.trained
    evaluated = loaded.evaluated
    assert set(trained.params) == {"shapes"}
    assert set(evaluated.params) == {"shapes", "tests.outside:in_jax"}
    assert [r.name for r in trained.host.rewards] == ["tests.outside:mean"]
    assert [r.name for r in evaluated.host.rewards] == [
        "jpeg_compressibility",
        "tests.outside:mean",
    ]
    assert trained.host.weights == evaluated.host.weights == {"tests.outside:mean": 1.0}
    same = opened({"shapes": 1.0})
    assert same.trained is same.evaluated


def test_a_package_names_rewards_by_entry_points_and_a_folder_by_its_modules(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def bright(images, prompts, metadata):\n    return images.mean((1, 2, 3))\n"
    )
    package = tmp_path / "theirs-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[solrl_jax.rewards]\nbright = mine:bright\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert resolve("tiny", ["reward=bright"]).reward.weights == {"bright": 1.0}
    assert opened({"bright": 1.0}).trained.host.rewards[0].target == "mine:bright"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "here.py").write_text("from mine import bright\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(elsewhere)
    assert opened({"here:bright": 1.0}).trained.host.rewards[0].target == "here:bright"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(weights={"nowhere.at:all": 1.0}),
            "reward 'nowhere.at:all': cannot be imported (ModuleNotFoundError: No module",
        ),
        (
            dict(weights={"tests.outside:gone": 1.0}),
            "reward 'tests.outside:gone': cannot be imported (AttributeError: module",
        ),
        (dict(weights={"tests.outside:time": 1.0}), "is no function"),
        (
            dict(weights={"tests.outside:not_a_reward": 1.0}),
            "returned 3: expected a solrl_jax.rewards.protocol.Reward",
        ),
        (
            dict(weights={"os.path:basename": 1.0}),
            "basename: called as (images, prompts, metadata): too many positional arguments; "
            "accepted: (p)",
        ),
        (
            dict(weights={"shapes": 1.0}, eval_only=("beauty",)),
            "reward.eval_only: unknown reward 'beauty'; available: shapes, ",
        ),
        (
            dict(weights={"shapes": 1.0}, eval_only=("geneval/loose",)),
            "reward.eval_only: unknown score 'geneval/loose'; available: geneval",
        ),
        (
            dict(weights={"shapes": 1.0}, options={"ocr": {}}),
            "reward.options: no reward 'ocr'; available: shapes",
        ),
        (
            dict(weights={"shapes": 1.0}, options={"shapes": {"a": 1}}),
            "reward.options.shapes={'a': 1}: this reward has no options",
        ),
        (
            dict(
                weights={"tests.outside:mean": 1.0}, options={"tests.outside:mean": {"scales": 2}}
            ),
            "(images, prompts, metadata, scales=2): got an unexpected keyword argument 'scales'; "
            "accepted: (images, prompts, "
            "metadata, *, scale=1.0)",
        ),
        (
            dict(weights={"tests.outside:failing": 1.0}),
            "reward.options.tests.outside:failing: called as (images, prompts, metadata): "
            "missing a required argument: 'how'",
        ),
        (
            dict(weights={"tests.outside:with_group": 1.0}),
            "reward 'tests.outside:with_group': group=Reward(",
        ),
        (
            dict(
                weights={"tests.outside:with_group": 1.0},
                options={"tests.outside:with_group": {"alone": True}},
            ),
            "expected None; a reward that compares images has groupwise=True",
        ),
        (
            dict(weights={"http://a": 1.0}, options={"http://a": {"batch": 0}}),
            "reward.options.http://a.batch=0: expected an integer",
        ),
        (
            dict(weights={"http://a": 1.0}, options={"http://a": {"size": 1}}),
            "reward.options.http://a: unknown option 'size'",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(settings, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        opened(**settings)
    assert "\n" not in str(error.value)


def test_what_an_option_lacks_is_said_alike_by_every_version_of_python():
    class Newer(inspect.Signature):
        def bind(self, *_, **__):
            raise TypeError(
                "missing a required keyword-only argument: 'how'"
            )  # in Python 3.11 it is "a required argument"

    with pytest.raises(InputError, match=r"missing a required argument: 'how'; accepted: \(\)$"):
        registry._check_options("mine", Newer(), {}, ())


def test_a_module_that_fails_when_it_is_imported_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"cannot be imported \(RuntimeError: first line second line\); "
    ):
        opened({"failing_module:f": 1.0})


def test_what_a_reward_inside_jax_prints_is_no_result_and_it_goes_nowhere(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "loud_module.py").write_text(
        "import os\nfrom tests.hostile.inside import loud\nprint('imported')\nos.chdir(os.sep)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    reward = opened({"loud_module:loud": 1.0}).trained
    reward.check(PROMPTS[0])
    score_images(
        reward, reward.params, jnp.asarray(PICTURES), reward.prepare(PROMPTS), jnp.arange(5)
    )
    output = capsys.readouterr()
    assert (output.out, output.err.split()) == (
        "",
        ["imported", "made", "checked", "prepared", "traced"],
    )
    assert Path.cwd() == tmp_path


# the configuration


@pytest.mark.parametrize(
    "name", ["my.package.module:score", "http://localhost:8000/score", "https://a.b/c"]
)
def test_a_plugin_is_chosen_as_a_reward_and_survives_the_file(name):
    config = resolve(
        "tiny",
        [
            f"reward={name}",
            f"reward.options.{name}.batch=4",
            f"reward.options.{name}.more=[1, {{a: x}}]",
        ],
    )
    assert config.reward.weights == {name: 1.0}
    assert config.reward.options == {name: {"batch": 4, "more": [1, {"a": "x"}]}}
    assert from_yaml(to_yaml(config)) == config
    assert override(
        config, [f"reward.weights.{name}=2", "reward.weights.shapes=1"]
    ).reward.weights == {
        name: 2.0,
        "shapes": 1.0,
    }
    assert resolve("tiny", [f"reward.options.{name}={{a: 1}}"]).reward.options == {name: {"a": 1}}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "reward.eval_only=[shapes]",
            "reward.eval_only=['shapes']: must not name scores of reward.weights",
        ),
        ("reward.options.ocr=3", "reward.options.ocr=3: expected a mapping"),
        (
            "reward.options={ocr: {a: 2020-01-01}}",
            "reward.options.ocr.a=datetime.date(2020, 1, 1): ",
        ),
        ("reward.workers=0", "reward.workers=0: must be at least 1"),
        ("reward.on_failure=stay", "reward.on_failure='stay': expected 'stop' or 'skip'"),
    ],
)
def test_settings_that_cannot_be_are_named(key, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve("tiny", [key])


# services


@pytest.fixture(scope="module")
def service():
    """The address of scripts/reward_server.py, scoring with a function of the tests."""
    command = [
        sys.executable,
        "scripts/reward_server.py",
        "tests.outside:told_or_mean",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


def ask(url, pictures=PICTURES, prompts=PROMPTS, timeout=2.0):
    return service_scores(
        pictures, prompts, [p.metadata for p in prompts], url=url, timeout=timeout
    )


@pytest.mark.slow
def test_a_service_is_given_what_a_function_is(service):
    host = opened(
        {service: 1.0}, options={service: {"batch": 2}}, workers=1, timeout=20.0
    ).trained.host
    with open_scoring(host, PROMPTS) as outside_jax:
        outside_jax.add(PICTURES)
        got = outside_jax.finish()[service]
    shared_workers(1, 20.0).close()
    expected = outside.told_or_mean(PICTURES, PROMPTS, [p.metadata for p in PROMPTS])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.isnan(got[3])
    assert host.rewards[0].batch == 2


def test_what_a_service_says_of_its_failure_is_passed_on(service):
    with pytest.raises(ScoringFailure, match=r"^status 500 \(ValueError: no such prompt\)$"):
        ask(service, prompts=[Prompt("refused")] * 5)


class Busy(http.server.BaseHTTPRequestHandler):
    """Answers what it is told to, in turn."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def answering():
    with http.server.HTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server, f"http://127.0.0.1:{server.server_port}/score"
        server.shutdown()
        thread.join()


def test_a_busy_service_is_asked_again(answering):
    server, url = answering
    server.answers = [(503, ""), (200, json.dumps({"scores": [1, 2, 3, 4, None]}))]
    np.testing.assert_array_equal(ask(url), [1, 2, 3, 4, np.nan])
    server.answers = [(429, "")] * 9
    with pytest.raises(ScoringFailure, match=r"^status 429 \(Too Many Requests\)$"):
        ask(url)
    assert len(server.answers) == 9 - 3  # asked again at once and after a second: half of the time


@pytest.mark.parametrize("body", ["well", "[1, 2]", "{}", '{"scores": ["good"]}'])
def test_an_answer_that_is_none_is_named(body, answering):
    server, url = answering
    server.answers = [(200, body)]
    with pytest.raises(ScoringFailure, match=re.escape('expected {"scores": [...]} for an answer')):
        ask(url)


def test_a_service_that_is_not_there_is_named():
    with pytest.raises(ScoringFailure, match=r"^no answer \(.*[Cc]onnection refused\)$"):
        ask("http://127.0.0.1:9/", timeout=0.5)


@pytest.mark.parametrize(("mode", "value"), [("RGBA", 1.0), ("LA", 1.0), ("RGB", 0.0)])
def test_the_server_composites_transparent_images_on_white(mode, value):
    """The second pixel is black, and transparent where the mode has an alpha channel."""
    picture = Image.new("RGBA", (2, 1), (255, 255, 255, 255))
    picture.putpixel((1, 0), (0, 0, 0, 0))
    buffer = io.BytesIO()
    picture.convert(mode).save(buffer, "PNG")
    (image,) = reward_server.decode_images([base64.b64encode(buffer.getvalue()).decode()])
    np.testing.assert_array_equal(image, [[[1.0] * 3, [value] * 3]])
