"""Reward services that answer what they should not, the example server under clients that do not
behave, and bad workers.
"""

import base64
import contextlib
import functools
import gzip
import http.server
import io
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import requests
import reward_server
from PIL import Image

from solrl_jax.data.prompts import Prompt
from solrl_jax.rewards import host
from solrl_jax.rewards.host import RewardError, ScoringFailure, open_scoring
from solrl_jax.rewards.http import http as service_scores
from solrl_jax.rewards.protocol import HostReward, HostRewards

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PICTURES = np.random.default_rng(0).random((2, 8, 8, 3), np.float32)
SCORES = json.dumps({"scores": [0.5, None]}).encode()


def reply(body: bytes, status: int = 200, **headers: str):
    """A handler that answers this, and then closes."""

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def without_end(request: http.server.BaseHTTPRequestHandler) -> None:
    """A handler that sends a gigabyte."""
    reply(b"")(request)
    for _ in range(2**14):
        request.wfile.write(2**16 * b" ")


@functools.cache
def compressed_zeros() -> bytes:
    return gzip.compress(bytes(10**8))


def packed(request: http.server.BaseHTTPRequestHandler) -> None:
    """A handler that sends 100 MB of zeros, compressed."""
    reply(compressed_zeros(), Content_Encoding="gzip")(request)


ANSWERS = {  # what a service answers, and a part of what is said
    "1 GB": (without_end, "an answer of more than"),
    "100 MB, packed": (packed, "an answer of more than"),
    "elsewhere": (reply(b"", 307, Location="http://127.0.0.1:9/"), "not followed"),
    "elsewhere, a file": (reply(b"", 301, Location="file:///etc/passwd"), "not followed"),
    "a giant integer": (reply(b'{"scores": [' + 5000 * b"9" + b", 1]}"), "expected"),
    "a large integer": (reply(b'{"scores": [' + 400 * b"9" + b", 1]}"), "expected"),
    "truths": (reply(b'{"scores": [true, false]}'), "expected"),
    "strings": (reply(b'{"scores": ["1", "2"]}'), "expected"),
    "lists": (reply(b'{"scores": [[1], [2]]}'), "expected"),
    "NaN": (reply(b'{"scores": [NaN, 1]}'), "expected"),
    "deep": (reply(10**5 * b"["), "expected"),
    "a number": (reply(b"3"), "expected"),
    "a number of scores": (reply(b'{"scores": 3}'), "expected"),
    "nothing": (reply(b""), "expected"),
    "bytes": (reply(bytes(range(256))), "expected"),
    "an error in bytes": (reply(bytes(range(128, 256)), 500), "status 500"),
}


@pytest.fixture(scope="module")
def service():
    """The address of a service that answers as its path says."""

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = (
                ANSWERS[self.path[1:].replace("%20", " ")][0]
                if self.path != "/right"
                else reply(SCORES)
            )
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                answer(self)

        def log_message(self, *_) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str):
    return service_scores(PICTURES, ["a", "b"], [{}, {}], url=url, timeout=2.0)


def test_a_right_answer(service):
    np.testing.assert_array_equal(ask(f"{service}/right"), [0.5, np.nan])


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_is_none_is_one_line_in_time(case, service):
    if case == "100 MB, packed":
        compressed_zeros()  # not while the request waits
    began = time.monotonic()
    with pytest.raises(ScoringFailure, match=ANSWERS[case][1]) as failure:
        ask(f"{service}/{case}")
    assert len(str(failure.value).splitlines()) == 1
    assert time.monotonic() - began < 60


@pytest.fixture(scope="module")
def server():
    """The example server."""
    command = [
        sys.executable,
        ROOT / "scripts" / "reward_server.py",
        "tests.hostile.outside:scores_by_prompt",
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield process.stdout.readline().split(" at ")[1].strip()
        process.terminate()


def png(width: int, height: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


PIXEL = png(1, 1)


def test_the_server_is_not_held_up_by_idle_connections(server):
    host_name, port = server.removeprefix("http://").strip("/").split(":")
    idle = [socket.create_connection((host_name, int(port))) for _ in range(5)]
    idle[0].sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
    assert host_name == "127.0.0.1"
    assert len(ask(server)) == 2
    for connection in idle:
        connection.close()


def refuses(server: str, images: object) -> bool:
    """Whether the server answers such a request with an error, and the next one as it should."""
    answer = requests.post(
        server, json={"images": images, "prompts": ["a"], "metadata": [{}]}, timeout=20
    )
    return answer.status_code == 500 and len(ask(server)) == 2


@pytest.mark.parametrize(
    ("side", "count"),
    [pytest.param(20_000, 1, marks=pytest.mark.exhaustive), (3_000, 10)],
)
def test_the_server_refuses_large_pictures_before_it_unpacks_them(side, count, server):
    assert refuses(server, count * [png(side, side)])


@pytest.mark.parametrize("images", [["nonsense"], [base64.b64encode(b"GIF89a").decode()], 3])
def test_the_server_refuses_what_are_no_pictures(images, server):
    assert refuses(server, images)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + 2**19 * b"[]," + b"1]", "JSON of about 1048577 values"),
        (
            json.dumps(
                {"images": 5000 * [PIXEL], "prompts": 5000 * ["a"], "metadata": 5000 * [1]}
            ).encode(),
            "5000 pictures",
        ),
        (
            json.dumps(
                {"images": [PIXEL, png(2, 2)], "prompts": 2 * ["a"], "metadata": 2 * [1]}
            ).encode(),
            "of 2 sizes",
        ),
        (
            json.dumps({"images": [PIXEL], "prompts": [], "metadata": [{}]}).encode(),
            "1 images, 0 prompts, 1 metadata",
        ),
        (b"[" * 10**5, "RecursionError"),
    ],
)
def test_the_server_says_what_is_wrong_with_a_request(body, message, server):
    answer = requests.post(server, body, timeout=20)
    assert (answer.status_code, answer.text.count("\n")) == (500, 0)
    assert message in answer.text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("words", "<U1 of shape (1,)"),
        ("truths", "bool of shape (1,)"),
        ("complex", "complex128"),
        ("more", "shape (2,)"),
        ("exit", "SystemExit: 0"),
        ("surrogate", r"ValueError: \ud800"),
        ("mute", "Mute: "),
    ],
)
def test_the_server_answers_whatever_its_function_does(how, message, server):
    answer = requests.post(
        server, json={"images": [PIXEL], "prompts": [how], "metadata": [{}]}, timeout=20
    )
    assert answer.status_code == 500
    assert message in answer.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing:f", "No module named"),
        ("os", "no function"),
        ("tests.comparing:ranks", "groupwise=True: a service scores each image alone"),
        ("sys:exit --port 99999", "--port 99999: cannot listen"),
        ("sys:exit --host 256.0.0.1", "--host 256.0.0.1 --port 8000: cannot listen"),
        ("", "required: function"),
    ],
)
def test_the_server_does_not_start_and_says_so_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reward_server.py", *arguments.split()])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as stop:
        reward_server.main()
    error = capsys.readouterr().err
    assert (stop.value.code, error.count("\n")) == (2, 1)
    assert message in error


def test_a_request_that_trickles_in_or_waits_too_long_is_ended(monkeypatch):
    for name, seconds in (("SECONDS", 0.3), ("PATIENCE", 0.1)):
        monkeypatch.setattr(reward_server, name, seconds)
    body = json.dumps({"images": [PIXEL], "prompts": ["a"], "metadata": [{}]}).encode()
    free = threading.Event()
    with reward_server.Server(("127.0.0.1", 0), lambda images, *_: free.wait() and [1.0]) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with socket.create_connection(("127.0.0.1", server.server_port)) as slow:
            began = time.monotonic()
            slow.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1")
            with contextlib.suppress(OSError):
                while not slow.recv(1000):
                    slow.sendall(b"1")
            assert time.monotonic() - began < 5
        url = f"http://127.0.0.1:{server.server_port}/"
        first = threading.Thread(target=requests.post, args=(url, body), daemon=True)
        first.start()
        while not server.turn.locked():
            time.sleep(0.01)
        assert (answer := requests.post(url, body, timeout=5)).status_code == 503, answer.text
        free.set()
        first.join()
        server.shutdown()


def test_the_server_refuses_a_long_body(server):
    host_name, port = server.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host_name, int(port))) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100000000000\r\n\r\n")
        assert b"500" in connection.recv(1000)


WORKERS = (1, 3.0)
PATIENT = (1, 100.0)


def rewards_of_a_run(how: str, skip: bool = False, workers=WORKERS) -> HostRewards:
    reward = HostReward("some", f"tests.hostile.outside:{how}", {}, (), 1)
    return HostRewards((reward,), {}, *workers, skip)


def score(rewards: HostRewards, pictures: int = 1):
    with open_scoring(rewards, pictures * [Prompt("a red circle")]) as outside:
        outside.add(np.zeros((pictures, 8, 8, 3), np.float32))
        return outside.finish()["some"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("hungry", r"reward 'some': out of memory: a worker may take"),
        ("quiet", r"reward 'some': its process ended with exit code 0"),
        ("deaf", r"reward 'some': no answer within reward.timeout=3 seconds"),
        ("patient", r"reward 'some': no answer within reward.timeout=3 seconds"),
    ],
)
def test_a_worker_that_does_not_behave_costs_a_line_in_time(how, message, monkeypatch):
    if how == "hungry":
        monkeypatch.setattr("solrl_jax.rewards.host.hosts.host_memory", lambda: 24 * 10**8)
    began = time.monotonic()
    with pytest.raises(RewardError, match=message):
        score(rewards_of_a_run(how, workers=PATIENT if how in ("hungry", "quiet") else WORKERS))
    assert time.monotonic() - began < 90
    for workers in (WORKERS, PATIENT):
        host.shared_workers(*workers).close()


def test_the_wall_clock_ends_no_wait(monkeypatch):
    """Set back by an hour while a worker hangs, as pebble sees it."""
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 3600 * (time.monotonic() - began > 1))
    began = time.monotonic()
    with pytest.raises(RewardError, match="no answer within"):
        score(rewards_of_a_run("patient"))
    assert time.monotonic() - began < 90
    host.shared_workers(*WORKERS).close()


def test_failures_in_a_row_stop_a_run_that_skips_them():
    """A later run of the same process, which shares the workers, starts to count anew."""
    worker_settings = (1, 99.0)
    first, second = (
        rewards_of_a_run("wrong", skip=True, workers=worker_settings) for _ in range(2)
    )
    assert np.isnan(score(first, host.MAX_FAILURES_IN_A_ROW - 1)).all()
    assert np.isnan(score(second, 2)).all()
    with pytest.raises(
        RewardError,
        match=rf"ValueError: never.*; {host.MAX_FAILURES_IN_A_ROW} calls in a row failed",
    ):
        score(first, 2)
    host.shared_workers(*worker_settings).close()
