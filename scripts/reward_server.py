"""Serves a reward over HTTP, for scorers that need an environment of their own.

    python reward_server.py module.path:function --port 8000     # in the scorer's environment
    solrl train tiny reward=http://127.0.0.1:8000/               # in the training environment

This file needs NumPy and Pillow, but not solrl_jax. The function is called as `function(images,
prompts, metadata)` with images [n, H, W, 3] (float32 in [0, 1]). It returns scores [n], or a
mapping with scores [n] under "reward". It handles one request at a time. The server does not
authenticate clients; by default it listens on this machine only.
"""

import argparse
import base64
import contextlib
import http.server
import io
import json
import os
import pkgutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from PIL import Image

MOST_REQUESTS = 8  # requests that are read or wait at once; further ones are not accepted yet
# Limits for one request. An empty list takes 3 bytes of JSON and 60 bytes of memory.
MOST_BYTES = 2**27
MOST_VALUES = 2**18
MOST_PICTURES = 2**12
MOST_PIXELS = 2**26
SECONDS = 60  # time limit for a request to arrive
# Seconds that a request waits for others. It is then answered "503 busy", and the run retries.
PATIENCE = 600


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"reward_server: {' '.join(message.split())}\n")


class Server(http.server.ThreadingHTTPServer):
    """An HTTP server with one thread per request, of which `MOST_REQUESTS` run at once."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], function: Callable[..., Any]) -> None:
        super().__init__(address, Service)
        self.function = function
        self.turn = threading.Lock()
        self.room = threading.Semaphore(MOST_REQUESTS)

    def process_request(self, *request: Any) -> None:
        self.room.acquire()
        super().process_request(*request)

    def process_request_thread(self, *request: Any) -> None:
        try:
            super().process_request_thread(*request)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The client has closed the connection.
        print(f"{client_address[0]}: {one_line(sys.exc_info()[1] or OSError())}", file=sys.stderr)


class Service(http.server.BaseHTTPRequestHandler):
    """Scores the images of a POST request. solrl_jax/rewards/http.py describes the format."""

    server: Server
    timeout = SECONDS

    def setup(self) -> None:
        super().setup()
        # `timeout` limits each read; this timer limits the whole request.
        self.late = threading.Timer(SECONDS, self.stop_reading)
        self.late.daemon = True
        self.late.start()

    def stop_reading(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def finish(self) -> None:
        self.late.cancel()
        super().finish()

    def do_POST(self) -> None:
        status = 503
        kind = "text/plain"
        body = "busy"
        try:
            if not 0 <= (length := int(self.headers["Content-Length"])) <= MOST_BYTES:
                raise ValueError(f"a body of {length} bytes; at most {MOST_BYTES} are accepted")
            if len(content := self.rfile.read(length)) < length:
                raise ValueError(
                    f"a body of {len(content)} bytes within {SECONDS} seconds; "
                    f"{length} were announced"
                )
            if self.server.turn.acquire(timeout=PATIENCE):
                try:
                    answer = score_request(self.server.function, content)
                finally:
                    self.server.turn.release()
                status = 200
                kind = "application/json"
                body = json.dumps(answer)
        except BaseException as error:  # the function may raise anything
            status = 500
            kind = "text/plain"
            body = one_line(error)
        answered = body.encode(errors="backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answered)))
        self.end_headers()
        self.wfile.write(answered)


def one_line(error: BaseException) -> str:
    """Formats an exception in one line, even if its message cannot be formatted."""
    return " ".join(traceback.format_exception_only(error)[-1].split())


def score_request(function: Callable[..., Any], body: bytes) -> dict[str, list[float | None]]:
    """Scores the body of a request.

    Args:
        function: The reward.
        body: The JSON text.

    Returns:
        The response: a score per image, or None for a non-finite one.

    Raises:
        ValueError: If the request is invalid or too large, before it is decoded; or if the function
            returns something else than scores.
    """
    if (values := sum(map(body.count, (b",", b"[", b"{")))) > MOST_VALUES:
        raise ValueError(f"JSON of about {values} values; at most {MOST_VALUES} are accepted")
    request = json.loads(body)
    images, prompts, metadata = (request[name] for name in ("images", "prompts", "metadata"))
    if not 0 < len(images) == len(prompts) == len(metadata):
        raise ValueError(
            f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} metadata; "
            "expected as many of each"
        )
    scores = function(decode_images(images), prompts, metadata)
    numbers = np.asarray(scores["reward"] if isinstance(scores, Mapping) else scores)
    if numbers.shape != (len(images),) or numbers.dtype.kind not in "iuf":
        raise ValueError(
            f"the function returned {numbers.dtype} of shape {numbers.shape}; "
            f"expected {len(images)} numbers"
        )
    return {"scores": [float(n) if np.isfinite(n) else None for n in numbers]}


def decode_images(pngs: list[str]) -> np.ndarray:
    """Decodes the images of a request.

    Args:
        pngs: The PNG files in base64.

    Returns:
        The images, float32 [n, H, W, 3] in [0, 1]. Transparent images are composited on white.

    Raises:
        ValueError: If the images are too large, before they are decompressed, or of different
            sizes.
    """
    if len(pngs) > MOST_PICTURES:
        raise ValueError(f"{len(pngs)} pictures; at most {MOST_PICTURES} are accepted")
    files = [Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"]) for png in pngs]
    if len(sizes := {file.size for file in files}) > 1:
        raise ValueError(f"images of {len(sizes)} sizes; expected one")
    width, height = sizes.pop()
    if (pixels := len(files) * width * height) > MOST_PIXELS:
        raise ValueError(f"images of {pixels} pixels; at most {MOST_PIXELS} are accepted")
    images = np.empty((len(files), height, width, 3), np.float32)
    for image, file in zip(images, files, strict=True):
        image[:] = np.asarray(_on_white(file))
        file.close()
    images /= 255
    return images


def _on_white(picture: Image.Image) -> Image.Image:
    """Returns an image in RGB. A transparent one is composited on white."""
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "function", help="module.path:function; the working directory is searched first"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    try:
        function = pkgutil.resolve_name(options.function)
        if not callable(function):
            raise TypeError("no function")
        for name in ("groupwise", "pairwise", "clips"):
            if getattr(function, name, False):
                raise TypeError(f"{name}=True: a service scores each image alone")
    except (Exception, SystemExit) as error:  # the imported module may raise anything
        parser.error(f"{options.function}: expected module.path:function ({one_line(error)})")
    try:
        server = Server((options.host, options.port), function)
    except (OSError, OverflowError, ValueError) as error:
        parser.error(
            f"--host {options.host} --port {options.port}: cannot listen there ({one_line(error)})"
        )
    print(
        f"scoring with {options.function} at http://{options.host}:{server.server_port}/",
        flush=True,
    )
    server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
