"""The reward `judge`: its formulas, what it sends, its cache, its limits and its messages."""

import contextlib
import gc
import gzip
import itertools
import json
import math
import sqlite3
import time
import warnings

import numpy as np
import pytest

from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError
from solrl_jax.rewards import host, usage
from solrl_jax.rewards.host import RewardError, ScoringFailure, open_scoring
from solrl_jax.rewards.judge import scoring as formulas
from solrl_jax.rewards.judge.cache import Cache
from solrl_jax.rewards.judge.client import MAX_ANSWER_BYTES, find_key
from solrl_jax.rewards.judge.probe import Support, describe, probe
from solrl_jax.rewards.judge.reward import _open_service, judge
from solrl_jax.rewards.judge.settings import Judge, open_judge
from solrl_jax.rewards.judge.templates import SCORES, read_template
from solrl_jax.rewards.protocol import HostRewards
from tests.rewards.judge_server import completion, reply, serving, slowly, yes
from tests.rewards.opening import open_reward

PICTURES = np.linspace(0, 1, 5, dtype=np.float32)[:, None, None, None] * np.ones((1, 8, 8, 3), "f")
LEVELS = np.round(np.linspace(0, 1, 5) * 255) / 255  # as bytes
PROMPTS = [f"image {i}" for i in range(5)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    usage.pop_counts()
    _open_service.cache_clear()


@pytest.fixture(scope="module")
def module_server():
    with serving() as server:
        yield server


@pytest.fixture
def server(module_server):
    module_server.bodies.clear()
    module_server.headers.clear()
    module_server.answers.clear()
    module_server.most_at_once = 0
    return module_server


def ask(
    server, model, prompt="alignment", pictures=PICTURES, prompts=None, concurrency=8, **options
):
    opened = open_judge(
        "judge", {"base_url": server.url, "model": model, "prompt": prompt, **options}
    )
    texts = PROMPTS[: len(pictures)] if prompts is None else prompts
    return judge(
        pictures, texts, [{}] * len(pictures), options=opened.to_json(), concurrency=concurrency
    )


# Formulas.


def test_digits_are_the_expected_value_over_the_digits_alone():
    p = {"1": 0.1, " 2": 0.2, "3": 0.1, "▁3": 0.1, "5": 0.3, "9": 0.1, "the": 0.1}
    tokens = [(token, math.log(x)) for token, x in p.items()]
    mean = (1 * 0.1 + 2 * 0.2 + 3 * 0.2 + 5 * 0.3) / 0.8
    assert formulas.score_digits(tokens, 1, 5) == pytest.approx((mean - 1) / 4)
    assert formulas.score_digits([("0", 0.0)], 0, 9) == 0
    assert formulas.score_digits([("9", -1.0)], 0, 9) == 1


def test_yes_and_preference_are_relative_to_both_words():
    tokens = [("Yes", math.log(0.3)), (" yes", math.log(0.1)), ("NO", math.log(0.1))]
    assert formulas.score_yes(tokens) == pytest.approx(0.8)
    assert formulas.score_yes([("yes", -2.0), ("no", -9999.0)]) == 1
    assert formulas.score_preference([("A", math.log(0.2)), ("B", math.log(0.6))]) == pytest.approx(
        0.25
    )


@pytest.mark.parametrize("tokens", [[], [("The", -0.01), ("yes", -9.0)], [("maybe", 0.0)]])
def test_another_word_is_no_score(tokens):
    with pytest.raises(
        ScoringFailure, match=r"yes or no have probability .* together: expected at least"
    ):
        formulas.score_yes(tokens)
    with pytest.raises(ScoringFailure, match=r"1 to 5 have probability"):
        formulas.score_digits(tokens, 1, 5)


def test_json_is_the_mean_of_the_criteria():
    criteria = {"a": (0.0, 10.0), "b": (1.0, 5.0)}
    for text in (
        '{"a": 5, "b": 2, "c": "why"}',
        '```json\n{"a": 5.0, "b": 2}\n```',
        ' {"b":2,"a":5} ',
    ):
        assert formulas.score_json(text, criteria) == {"reward": 0.375, "a": 0.5, "b": 0.25}
    assert formulas.score_json("7.5", {"score": (0, 10)}) == {"reward": 0.75}
    assert formulas.score_json('{"score": 1}', {"score": (0, 10)}) == {"reward": 0.1}


@pytest.mark.parametrize(
    "text",
    ["", "good", "{", '{"a": 1}', '{"a": "1", "b": 1}', '{"a": true, "b": 1}', '{"a": 11, "b": 1}',
     '{"a": NaN, "b": 1}', "[1, 2]", "3", '{"a": 1, "a": 2, "b": 1}', "[" * 10**5,
     '{"a": 1e999, "b": 1}'],
)  # fmt: skip
def test_other_json_is_no_score(text):
    with pytest.raises(
        ScoringFailure, match=r'answered .*: expected \{"a": 0 to 10, "b": 1 to 5\}'
    ):
        formulas.score_json(text, {"a": (0.0, 10.0), "b": (1.0, 5.0)})


# What is sent, and what comes back.


@pytest.mark.parametrize(
    ("model", "prompt", "expected"),
    [
        ("yes", "alignment", LEVELS),
        ("yes", "text", LEVELS),
        ("digits", "alignment-digits", LEVELS),
        ("digits", "aesthetics", LEVELS),
        ("rubric", "rubric", (LEVELS + 0.5 + 1) / 3),
    ],
)
def test_the_questions_of_the_package(server, model, prompt, expected):
    scores = ask(server, model, prompt)
    np.testing.assert_allclose(scores["reward"], expected, atol=1e-3)
    assert len(server.bodies) == 5
    for body, text in zip(sorted(server.bodies, key=str), PROMPTS, strict=False):
        assert (body["temperature"], body["seed"], body["model"]) == (0, 0, model)
        picture, question = body["messages"][0]["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,")
        assert "{" not in question["text"] or prompt == "rubric"
        assert (text.split()[0] in question["text"]) is (
            prompt != "aesthetics"
        ) or "image" in question["text"]
        assert ("logprobs" in body) is (model != "rubric")
        assert ("response_format" in body) is (model == "rubric")
    counts = usage.pop_counts()
    assert counts.pop("request_seconds") > 0
    assert counts == {
        "requests": 5,
        "prompt_tokens": 500,
        "completion_tokens": 5,
        "retries": 0,
        "failures": 0,
    }


def test_a_question_of_a_user_and_a_number(server, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("How well does this show {prompt}? A number.")
    scores = ask(server, "number", str(file), score="json", structured=False)
    np.testing.assert_allclose(scores["reward"], LEVELS, atol=1e-3)
    assert "How well does this show image 0? A number." in json.dumps(server.bodies)
    assert not any("response_format" in body for body in server.bodies)


def test_every_question_of_the_package_has_a_score_and_asks_about_the_prompt():
    for name, score in SCORES.items():
        template = read_template(name, "prompt")
        assert template.score == score
        assert ("{prompt}" in template.text) is (name != "aesthetics")


def test_images_are_sent_smaller_and_as_jpeg(server):
    pictures = np.random.default_rng(0).random((1, 64, 32, 3), np.float32)
    ask(server, "yes", pictures=pictures, image_size=16, image_format="jpeg")
    ask(server, "yes", pictures=pictures, image_size=128)
    small, whole = (body["messages"][0]["content"][0]["image_url"]["url"] for body in server.bodies)
    assert small.startswith("data:image/jpeg;base64,")
    assert len(small) < len(whole) / 4


def test_an_image_that_is_not_finite_is_not_sent(server):
    pictures = PICTURES.copy()
    pictures[2, 0, 0, 0] = np.nan
    scores = ask(server, "yes", pictures=pictures)["reward"]
    assert np.isnan(scores).tolist() == [False, False, True, False, False]
    assert len(server.bodies) == 4


def test_fields_of_your_own_reach_the_endpoint(server):
    ask(server, "yes", extra={"chat_template_kwargs": {"enable_thinking": False}}, seed=3)
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.bodies[0]["seed"] == 3


def test_an_endpoint_that_knows_only_max_completion_tokens_gets_no_max_tokens(server):
    ask(server, "yes", extra={"max_completion_tokens": 16, "stop_token_ids": [7]})
    assert {body["max_completion_tokens"] for body in server.bodies} == {16}
    assert server.bodies[0]["stop_token_ids"] == [7]
    assert not any("max_tokens" in body for body in server.bodies)


def test_no_more_requests_at_once_than_configured(server):
    server.answers["slow"] = slowly(yes)
    pictures = np.random.default_rng(0).random((9, 8, 8, 3), np.float32)
    ask(server, "slow", pictures=pictures, prompts=["a"] * 9, concurrency=3)
    assert server.most_at_once == 3


# The cache.


def test_a_score_is_paid_for_once(server):
    first = ask(server, "yes")["reward"]
    _open_service.cache_clear()  # as another process
    second = ask(server, "yes", concurrency=2)["reward"]
    np.testing.assert_array_equal(first, second)
    assert len(server.bodies) == 5
    assert usage.pop_counts()["cached"] == 5
    same = ask(server, "yes", pictures=PICTURES[[0, 0]], prompts=["new", "new"])["reward"]
    assert same[0] == same[1]
    assert len(server.bodies) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": ["other"] * 5},
        {"pictures": PICTURES[::-1]},
        {"prompt": "text"},
        {"seed": 1},
        {"extra": {"top_k": 1}},
        {"max_tokens": 2},
        {"image_format": "jpeg"},
        {"model": "digits", "prompt": "aesthetics"},
    ],
)
def test_whatever_changes_a_score_is_asked_anew(server, change):
    ask(server, "yes")
    ask(server, **{"model": "yes"} | change)
    assert len(server.bodies) == 5 + (4 if "pictures" in change else 5)


@pytest.mark.parametrize(
    "change", [{"concurrency": 1}, {"request_timeout": 5}, {"retries": 0}, {"api_key_env": "SOME"}]
)
def test_what_changes_no_score_is_not(server, change):
    ask(server, "yes")
    opened = open_judge("judge", {"base_url": server.url + "/", "model": "yes", **change})
    judge(PICTURES, PROMPTS, [{}] * 5, options=opened.to_json(), concurrency=1)
    assert len(server.bodies) == 5


def test_no_cache_and_a_damaged_one(server, tmp_path):
    for _ in range(2):
        ask(server, "yes", cache=None)
    assert len(server.bodies) == 10
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(
        ScoringFailure, match=r"its cache .*scores.sqlite cannot be used .*; remove it"
    ):
        ask(server, "yes", cache=str(tmp_path / "bad"))


@pytest.mark.parametrize("stored", ["1" + 400 * "0", '"high"', "[]"])
def test_a_stored_score_that_is_no_number_of_a_float_is_a_failure(tmp_path, stored):
    cache = Cache(tmp_path)
    cache.write("key", {"reward": 0.5})
    assert cache.read("key") == {"reward": 0.5}
    with contextlib.closing(sqlite3.connect(tmp_path / "scores.sqlite")) as database:
        database.execute("UPDATE scores SET scores = ?", [f'{{"reward": {stored}}}'])
        database.commit()
    with pytest.raises(ScoringFailure, match=r"scores.sqlite cannot be used \(.*\); remove it"):
        cache.read("key")


# Keys.


def test_the_key_comes_from_netrc_or_the_environment_of_its_host(monkeypatch, tmp_path):
    def key(url, **options):
        return find_key(open_judge("judge", {"base_url": url, "model": "m", **options}).settings)

    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert key("http://127.0.0.1:8000/v1") == "none"
    assert key("https://api.openai.com/v1") == "theirs"
    assert key("https://notopenai.com/v1") == "none"
    monkeypatch.setenv("JUDGE_API_KEY", "ours")
    monkeypatch.setenv("OTHER", "third")
    assert key("http://127.0.0.1:8000/v1") == "ours"
    assert key("http://127.0.0.1:8000/v1", api_key_env="OTHER") == "third"
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login x password fourth\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert key("http://127.0.0.1:8000/v1") == "fourth"
    assert key("http://localhost:8000/v1") == "ours"


def test_the_key_is_sent_and_never_said(server, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-secret")
    server.answers["refuses"] = lambda handler, body: reply(
        handler, {"error": {"message": "no such key: sk-secret"}}, 401
    )
    with pytest.raises(ScoringFailure, match=r"status 401 \(no such key: \*\*\*\)") as failure:
        ask(server, "refuses")
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": None}, "base_url"),
        ({"base_url": "http://me:secret@a/v1"}, "without user name, password or token"),
        ({"base_url": "ftp://a/v1"}, "expected http://HOST:PORT/v1"),
        ({"base_url": "http://a/v1?api_key=secret"}, "without user name"),
        ({"base_url": "me:secret@a/v1"}, "without user name"),
        ({"base_url": "http:/me:secret@a/v1"}, "without user name"),
        ({"base_url": "a/v1?api_key=secret"}, "without user name"),
        ({"base_url": "http://a/v1?"}, "expected http://HOST:PORT/v1"),
        ({"api_key": "secret"}, "keys come from the environment"),
        ({"extra": {"api_key": "secret"}}, "extra.api_key: may be a secret"),
        ({"extra": {"x_token": "secret"}}, "extra.x_token: may be a secret"),
        ({"extra": {"seed": 1}}, "extra.seed: is set by the judge itself"),
        ({"extra": {"top_logprobs": 5}}, "extra.top_logprobs: is set by the judge itself"),
        ({"extra": {"response_format": {}}}, "extra.response_format: is set by the judge itself"),
        (
            {"max_tokens": 2, "extra": {"max_completion_tokens": 5}},
            "max_tokens=2: must be null with extra.max_completion_tokens",
        ),
        ({"api_key_env": "sk-secret"}, "not a key"),
        ({"modle": "m"}, "did you mean 'model'?"),
        ({"score": "stars"}, "score='stars': expected"),
        ({"prompt": "aesthetic"}, "no such file; expected one of alignment"),
        ({"prompt": "aesthetics", "scale": [1, 10]}, "expected two digits"),
        ({"prompt": "aesthetics", "scale": [5, 1]}, "expected [LOWEST, HIGHEST]"),
        ({"scale": [1, 5]}, "must be null with score=yes"),
        ({"prompt": "rubric", "scale": [0, 10]}, "must be null with criteria"),
        ({"criteria": {"a": [1, 5]}}, "must be empty with score=yes"),
        ({"score": "json", "criteria": {"a": [5, 1]}}, "expected NAME: [LOWEST, HIGHEST]"),
        ({"score": "json", "criteria": {"reward": [1, 5]}}, "expected NAME: [LOWEST, HIGHEST]"),
        ({"concurrency": 0}, "must be at least 1"),
        ({"cache": __file__}, "is a file; expected a directory"),
    ],
)  # fmt: skip
def test_an_option_that_is_wrong_is_one_line_before_anything_is_sent(options, message):
    chosen = {"base_url": "http://127.0.0.1:1/v1", "model": "m", **options}
    with pytest.raises(InputError) as error:
        open_reward({"judge": 1.0}, options={"judge": chosen})
    assert message in str(error.value)
    assert "secret" not in str(error.value).replace("a secret", "")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("reward.options.judge")


def test_a_judge_is_read_back_as_it_was_written():
    options = {"base_url": "http://a/v1", "model": "m", "prompt": "rubric", "extra": {"a": [1]}}
    opened = open_judge("judge", options)
    assert Judge.from_json(opened.to_json()) == opened
    assert opened.others == ("alignment", "coherence", "style")


# Hostile servers.


def without_end(handler, body):
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    for _ in range(2**10):
        handler.wfile.write(2**16 * b" ")
    handler.close_connection = True


def trickle(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
    handler.close_connection = True


def truncated(handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def silent(handler, body):
    handler.close_connection = True


def hang(handler, body):
    time.sleep(8)
    handler.close_connection = True


def sends(content, status=200, **headers):
    return lambda handler, body: reply(handler, content, status, **headers)


def no_http(handler, body):
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    handler.close_connection = True


OK = json.dumps(completion("yes", [("yes", 1.0)]))
HOSTILE = {  # what an endpoint answers, and a part of the message
    "slow": (hang, "no answer"),
    "a trickle": (trickle, "no answer before the end"),
    "without end": (without_end, "an answer of more than"),
    "too long": (sends(b" " * (MAX_ANSWER_BYTES + 1)), "an answer of more than"),
    "packed": (sends(gzip.compress(bytes(10**7)), Content_Encoding="gzip"), "packed with 'gzip'"),
    "truncated": (truncated, "no answer"),
    "closed": (silent, "no answer"),
    "no HTTP": (no_http, "no answer"),
    "busy": (sends({"error": {"message": "slow down"}}, 429), "status 429 (slow down)"),
    "busy for a day": (sends("", 429, Retry_After="86400"), "status 429"),
    "broken": (
        sends("<html>\nInternal\tError</html>", 500),
        "status 500 (<html> Internal Error</html>)",
    ),
    "a control character": (sends(b"\x1b[2J\x00", 503), r"status 503 (\x1b[2J\x00)"),
    "an error as text": (sends({"error": "model not found"}, 404), "status 404 (model not found)"),
    "a list as an error": (sends(["x"], 404), 'status 404 (["x"])'),
    "a detail that is a list": (sends({"detail": [1]}, 422), 'status 422 ({"detail": [1]})'),
    "elsewhere": (sends("", 307, Location="http://127.0.0.1:9/"), "not followed"),
    "elsewhere, a file": (sends("", 302, Location="file:///etc/passwd"), "not followed"),
    "no JSON": (sends("yes"), "expected a chat completion, got 'yes'"),
    "nothing": (sends(""), "expected a chat completion"),
    "another object": (sends({"object": "list", "data": []}), "expected a chat completion"),
    "no choices": (sends({"choices": []}), "expected a chat completion"),
    "deep": (sends(b"[" * 10**5), "expected a chat completion"),
    "a giant integer": (sends(OK.replace("100", 5000 * "9")), "expected a chat completion"),
    "beyond floats": (sends(OK.replace("0.0", "1" + 400 * "0")), "expected a chat completion"),
    "text for a number": (sends(OK.replace("0.0", '"0"')), "expected a chat completion"),
    "NaN": (sends(OK.replace("0.0", "NaN")), "expected a chat completion"),
    "no log-probabilities": (sends(completion("yes")), "returned no log-probabilities"),
    "another word": (sends(completion("Sure", [("Sure", 1.0)])), "its answer begins with 'Sure'"),
    "bytes": (sends(bytes(range(256))), "expected a chat completion"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_is_one_line_in_time_and_loses_nothing(server, case, monkeypatch):
    handler, message = HOSTILE[case]
    server.answers["mixed"] = lambda request, body: (
        reply(request, yes(body)) if "image 0" in json.dumps(body) else handler(request, body)
    )
    monkeypatch.setattr("solrl_jax.rewards.judge.reward.seconds_left", lambda: 4.0)
    pictures = PICTURES[:2]
    began = time.monotonic()
    with pytest.raises(ScoringFailure) as failure:
        ask(server, "mixed", pictures=pictures, request_timeout=1.0, retries=1)
    assert time.monotonic() - began < 10
    assert message in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1
    assert len(str(failure.value)) < 400
    # The other image has its score, and it is in the cache.
    assert failure.value.scores["reward"][0] == 0
    assert np.isnan(failure.value.scores["reward"][1])
    num_requests = len(server.bodies)
    assert ask(server, "mixed", pictures=pictures[:1])["reward"] == 0
    assert len(server.bodies) == num_requests
    assert usage.pop_counts()["failures"] == 1


def test_no_server_at_all():
    with serving() as server:
        pass
    with pytest.raises(ScoringFailure, match=r"no answer \(.*\) \(5 of 5 requests failed\)"):
        ask(server, "yes", retries=0)


def test_a_request_is_repeated_until_the_server_is_ready(server):
    count = itertools.count()
    server.answers["starting"] = lambda handler, body: (
        reply(handler, "", 503) if next(count) < 2 else reply(handler, yes(body))
    )
    assert ask(server, "starting", pictures=PICTURES[:1], retries=2)["reward"] == 0
    counts = usage.pop_counts()
    assert (counts["requests"], counts["retries"], counts["failures"]) == (3, 2, 0)


@pytest.mark.parametrize("case", ["packed", "too long", "without end"])
def test_an_answer_that_would_be_the_same_again_is_not_asked_for_again(server, case):
    handler, message = HOSTILE[case]
    server.answers["refused"] = handler
    with pytest.raises(ScoringFailure, match=message):
        ask(server, "refused", pictures=PICTURES[:1], retries=3)
    assert len(server.bodies) == 1


# `probe`, which `solrl doctor` calls.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": 1}, "images yes, log-probabilities 1, seed accepted"),
        ({"logprobs": 0}, "images yes, log-probabilities no, seed accepted"),
        ({"fingerprint": "fp_1\x1b[2J"}, r"fingerprint fp_1\x1b[2J"),
        ({"fingerprint": None, "schema": False}, "schema no, seed accepted, fingerprint no"),
    ],
)
def test_support_is_described_in_words_and_numbers(changes, words):
    fields = {
        "seconds": 0.5,
        "images": True,
        "logprobs": 3,
        "schema": None,
        "seed": True,
        "fingerprint": None,
        "answer": "Yes",
        "problem": None,
    }
    assert words in describe(Support(**fields | changes))


@pytest.mark.parametrize(
    ("system_fingerprint", "fingerprint"), [("fp_1", "fp_1"), ({"a": 1}, None), (3, None)]
)
def test_a_probe_closes_its_connection_and_reads_a_fingerprint_that_is_text(
    server, system_fingerprint, fingerprint
):
    server.answers["marked"] = lambda handler, body: reply(
        handler, {**yes(body), "system_fingerprint": system_fingerprint}
    )
    options = {"base_url": server.url, "model": "marked"}
    gc.collect()  # the services of other tests, which stay open
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)  # of unclosed transports
        support = probe(open_judge("judge", options))
        gc.collect()
    assert support.fingerprint == fingerprint
    assert not [str(w.message) for w in caught if "transport" in str(w.message)]


def test_a_server_that_breaks_is_asked_once_whatever_its_message_says(server):
    requests = []

    def breaks(handler, body):
        requests.append(body)
        reply(handler, {"error": {"message": "upstream answered status 400"}}, 500)

    server.answers["breaks"] = breaks
    with pytest.raises(ScoringFailure, match=r"^status 500"):
        probe(open_judge("judge", {"base_url": server.url, "model": "breaks"}))
    assert len(requests) == 1


# In worker processes.

WORKERS = (1, 30.0)


def run(server, model, skip, pictures=PICTURES):
    options = {"base_url": server.url, "model": model, "retries": 0}
    opened = open_reward({"judge": 1.0}, options={"judge": options}).rewards["judge"]
    with open_scoring(
        HostRewards((opened,), {}, *WORKERS, skip), [Prompt(p) for p in PROMPTS]
    ) as run:
        run.add(pictures)
        return run.finish(), run


@pytest.mark.slow
def test_workers_report_what_a_judge_costs_and_skip_one_image_alone(server, capsys):
    server.answers["wrong once"] = lambda handler, body: (
        reply(handler, "no", 500) if "image 3" in json.dumps(body) else reply(handler, yes(body))
    )
    try:
        scores, _ = run(server, "yes", skip=False)
        np.testing.assert_allclose(scores["judge"], LEVELS, atol=1e-3)
        scores, attempt = run(server, "wrong once", skip=True)
        assert np.isnan(scores["judge"]).tolist() == [False, False, False, True, False]
        assert attempt.failed == {"judge": 1}
        assert attempt.usage["judge/failures"] == 1
        assert attempt.usage["judge/requests"] == 5
        assert attempt.usage["judge/prompt_tokens"] == 400
        assert attempt.usage["judge/seconds_waited"] > 0
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert "skipped 1 of 5 images" in lines[0]
        assert "status 500 (no) (1 of 5 requests failed)" in lines[0]
        server.bodies.clear()
        with pytest.raises(RewardError, match=r"reward 'judge': status 500 \(no\)"):
            run(server, "wrong once", skip=False)
        assert len(server.bodies) == 1  # the others were paid for
    finally:
        host.shared_workers(*WORKERS).close()
