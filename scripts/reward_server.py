"""Serves a reward, for a scorer that needs an environment of its own. This file needs NumPy and Pillow, but not solrl_jax.

    python reward_server.py module.path:function --port 8000            # in the scorer's environment
    solrl train tiny reward=http://127.0.0.1:8000/                      # where the training runs

The function is called as function(images float32 [n, H, W, 3] in [0, 1], prompts, metadata). It returns scores [n], or a
mapping with scores [n] under "reward". It is called by one request at a time. Whoever reaches the address can ask for scores:
by default that is this machine alone.
"""

import argparse
import base64
import http.server
import importlib
import io
import json
import os
import sys
import threading

import numpy as np
from PIL import Image

MOST_BYTES = 2**28  # of a request
MOST_PIXELS = 2**26  # of all pictures of a request
SILENCE = 60  # seconds after which an idle connection is closed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("function", help="module.path:function; the working directory is searched first")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8000, help="0: any free port")
options = parser.parse_args()
sys.path.insert(0, os.getcwd())
module, _, name = options.function.partition(":")
function = getattr(importlib.import_module(module), name)
one_at_a_time = threading.Lock()


def opened(pngs: list[str]) -> np.ndarray:
    """The pictures of a request, float32 [n, H, W, 3] in [0, 1]. Raises ValueError before anything large is unpacked."""
    pictures = [Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"]) for png in pngs]
    if (pixels := sum(picture.width * picture.height for picture in pictures)) > MOST_PIXELS:
        raise ValueError(f"pictures of {pixels} pixels; at most {MOST_PIXELS} are accepted")
    return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures]).astype(np.float32) / 255


class Service(http.server.BaseHTTPRequestHandler):
    """Scores what a POST request holds: see solrl_jax/rewards/http.py for its form."""

    timeout = SILENCE

    def do_POST(self) -> None:
        try:
            if not 0 <= (length := int(self.headers["Content-Length"])) <= MOST_BYTES:
                raise ValueError(f"a body of {length} bytes; at most {MOST_BYTES} are accepted")
            asked = json.loads(self.rfile.read(length))
            pictures = opened(asked["images"])
            with one_at_a_time:
                scores = function(pictures, asked["prompts"], asked["metadata"])
            numbers = np.asarray(scores["reward"] if isinstance(scores, dict) else scores, float)
            answer = {"scores": [float(n) if np.isfinite(n) else None for n in numbers]}
            status, kind, body = 200, "application/json", json.dumps(answer)
        except Exception as error:
            status, kind, body = 500, "text/plain", f"{type(error).__name__}: {error}"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


with http.server.ThreadingHTTPServer((options.host, options.port), Service) as server:
    print(f"scoring with {options.function} at http://{options.host}:{server.server_port}/", flush=True)
    server.serve_forever()
