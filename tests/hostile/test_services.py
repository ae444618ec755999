"""Reward services that answer what they should not, the example server under clients that do not behave, and bad workers."""

import base64
import contextlib
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
from PIL import Image

from solrl_jax.conditioning.prompts import Prompt
from solrl_jax.rewards import host
from solrl_jax.rewards.host import Failure, RewardError, scoring
from solrl_jax.rewards.http import http as service_scores
from solrl_jax.rewards.protocol import Host, HostReward

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


ANSWERS = {  # what a service answers, and a part of what is said
    "1 GB": (without_end, "an answer of more than"),
    "1 GB, packed": (reply(gzip.compress(bytes(10**8)), Content_Encoding="gzip"), "an answer of more than"),
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
            answer = ANSWERS[self.path[1:].replace("%20", " ")][0] if self.path != "/right" else reply(SCORES)
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
    began = time.monotonic()
    with pytest.raises(Failure, match=ANSWERS[case][1]) as failure:
        ask(f"{service}/{case}")
    assert len(str(failure.value).splitlines()) == 1
    assert time.monotonic() - began < 60


@pytest.fixture(scope="module")
def server():
    """The example server."""
    command = [sys.executable, ROOT / "scripts" / "reward_server.py", "tests.outside:mean", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process.stdout.readline().split(" at ")[1].strip()
        process.terminate()


def png(width: int, height: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_the_server_is_not_held_up_by_idle_connections(server):
    host_name, port = server.removeprefix("http://").strip("/").split(":")
    idle = [socket.create_connection((host_name, int(port))) for _ in range(5)]
    idle[0].sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
    assert host_name == "127.0.0.1"
    assert len(ask(server)) == 2
    for connection in idle:
        connection.close()


@pytest.mark.parametrize(
    "pngs", [[png(20_000, 20_000)], [png(3_000, 3_000)] * 10, ["nonsense"], [base64.b64encode(b"GIF89a").decode()], 3]
)
def test_the_server_refuses_pictures_before_it_unpacks_them(pngs, server):
    answer = requests.post(server, json={"images": pngs, "prompts": ["a"], "metadata": [{}]}, timeout=20)
    assert answer.status_code == 500
    assert len(ask(server)) == 2


def test_the_server_refuses_a_long_body(server):
    host_name, port = server.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host_name, int(port))) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100000000000\r\n\r\n")
        assert b"500" in connection.recv(1000)


WORKERS, PATIENT = (1, 3.0), (1, 100.0)


def score(how: str, skip: bool = False, pictures: int = 1, workers=WORKERS):
    reward = HostReward("some", f"tests.hostile.outside:{how}", {}, (), 1)
    with scoring(Host((reward,), {}, *workers, skip), pictures * [Prompt("a red circle")]) as outside:
        outside.add(np.zeros((pictures, 8, 8, 3), np.float32))
        return outside.finish()["some"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hungry", r"reward 'some': out of memory: a worker may take"),
        ("quiet", r"reward 'some': its process ended with exit code 0"),
        ("deaf", r"reward 'some': no answer within reward.timeout=3 seconds"),
        ("patient", r"reward 'some': no answer within reward.timeout=3 seconds"),
    ],
)
def test_a_worker_that_does_not_behave_costs_a_line_in_time(how, said, monkeypatch):
    if how == "hungry":
        monkeypatch.setattr("solrl_jax.rewards.host.hosts.memory", lambda: 24 * 10**8)
    began = time.monotonic()
    with pytest.raises(RewardError, match=said):
        score(how, workers=PATIENT if how in ("hungry", "quiet") else WORKERS)
    assert time.monotonic() - began < 90
    for workers in (WORKERS, PATIENT):
        host.workers(*workers).close()


def test_the_wall_clock_ends_no_wait(monkeypatch):
    """Set back by an hour while a worker hangs, as pebble sees it."""
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 3600 * (time.monotonic() - began > 1))
    began = time.monotonic()
    with pytest.raises(RewardError, match="no answer within"):
        score("patient")
    assert time.monotonic() - began < 90
    host.workers(*WORKERS).close()


def test_failures_in_a_row_stop_a_run_that_skips_them():
    own = (1, 99.0)  # workers count the failures of all calls
    assert np.isnan(score("wrong", skip=True, pictures=host.MOST_FAILURES - 1, workers=own)).all()
    with pytest.raises(RewardError, match=rf"ValueError: never.*; {host.MOST_FAILURES} calls in a row failed"):
        score("wrong", skip=True, pictures=2, workers=own)
    host.workers(*own).close()
