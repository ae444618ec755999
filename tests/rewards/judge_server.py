"""A small OpenAI-compatible server for tests, in this process, and the options of a judge for it.

The name of the model says how the server answers, see `ANSWERS`.
"""

import base64
import contextlib
import http.server
import io
import json
import math
import threading
import time

import numpy as np
from PIL import Image


def brightness(part) -> float:
    """The mean of the image in a part of a message, in [0, 1]."""
    data = part["image_url"]["url"].partition(",")[2]
    return float(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean() / 255)


def completion(text, tokens=None, **more):
    """The body of a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    if tokens is not None:
        top = [{"token": token, "logprob": math.log(p) if p else -9999.0} for token, p in tokens]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    usage = {"prompt_tokens": 100, "completion_tokens": 1}
    return {"object": "chat.completion", "choices": [choice], "usage": usage, **more}


def images(body):
    content = body["messages"][0]["content"]
    return [part for part in content if part["type"] == "image_url"]


def yes(body):
    p = brightness(images(body)[0])
    return completion("Yes", [("Yes", 0.9 * p), (" no", 0.9 * (1 - p)), ("Maybe", 0.1)])


def digits(body):
    p = brightness(images(body)[0])
    return completion("5", [("5", p), ("1", 1 - p)])


def rubric(body):
    p = brightness(images(body)[0])
    scores = {"alignment": 1 + 4 * p, "coherence": 3, "style": 5}
    return completion(f"```json\n{json.dumps(scores)}\n```")


def number(body):
    return completion(f"{1 + 4 * brightness(images(body)[0]):.4f}")


def brighter(body):
    """Prefers the brighter image, and the first one by the same amount each time."""
    a, b = map(brightness, images(body))
    p = min(max(0.5 + 0.4 * np.sign(a - b) + 0.1, 0), 1)
    return completion("A", [("A", p), ("B", 1 - p)])


ANSWERS = {
    "yes": yes,
    "digits": digits,
    "rubric": rubric,
    "number": number,
    "brighter": brighter,
}


class Server:
    """The server. It notes the requests.

    bodies: Their bodies.
    headers: Their headers.
    answers: Functions from a request handler and a body to nothing, by the name of the model; they
        come before `ANSWERS`.
    """

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.answers = {}
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.bodies.append(body)
                    outer.headers.append(self.headers)
                    outer._at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer._at_once)
                try:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        if body["model"] in outer.answers:
                            outer.answers[body["model"]](self, body)
                        else:
                            reply(self, ANSWERS[body["model"]](body))
                finally:
                    with outer._lock:
                        outer._at_once -= 1

            def log_message(self, *_):
                """Says nothing."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


def reply(handler, content, status=200, **headers):
    """Sends an answer: bytes, text or a value of JSON."""
    if isinstance(content, str):
        content = content.encode()
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def slowly(answer, seconds=0.1):
    """The same answer after some time."""

    def wait(handler, body):
        time.sleep(seconds)
        reply(handler, answer(body))

    return wait


@contextlib.contextmanager
def serving():
    server = Server()
    try:
        yield server
    finally:
        server.close()
