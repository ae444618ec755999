"""The client of a reward service, for scorers that need their own environment.

The request is POST {"images": [base64 of a PNG, ...], "prompts": [...], "metadata": [{...}, ...]}.
The answer is {"scores": [...]}, with a number or null for each image. `scripts/reward_server.py` is
such a service.
"""

import base64
import functools
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import requests
import urllib3
from jaxtyping import Float
from PIL import Image

from solrl_jax.config.values import brief_repr
from solrl_jax.errors import first_line
from solrl_jax.rewards.host import ScoringFailure
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments
from solrl_jax.storage.images import to_uint8
from solrl_jax.storage.readers import parse_json

# The largest answer in bytes.
MAX_ANSWER_BYTES = 2**20
# The status codes of a service that is busy or starting. The request is repeated.
RETRIED = (429, 502, 503, 504)


def http(
    images: Images,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    *,
    url: str,
    timeout: float,
) -> Float[np.ndarray, " n"]:
    """Asks a service for scores, in one POST request. Runs in a worker process.

    The body is {"images": [base64 of a PNG, ...], "prompts": [...], "metadata": [{...}, ...]}. If
    the service does not answer, or answers that it is busy (status 429, 502, 503 or 504, or 413
    with a Retry-After header), the request is repeated with growing pauses. Redirects are not
    followed.

    Args:
        images: The images [n, H, W, 3] in [0, 1]. They are sent as PNG files of 8 bits: other
            values are clipped, and NaN becomes 0.
        prompts: The prompt of each image.
        metadata: The metadata of each prompt, as values of JSON.
        url: The address of the service, http://HOST:PORT/PATH or https://HOST:PORT/PATH.
        timeout: Seconds that one attempt may take to connect, and to wait for the next data. It is
            `reward.timeout`, after which the worker process is killed in any case. It also bounds
            the number of attempts, because the growing pauses between them last at most half of it
            in all.

    Returns:
        The scores of the answer, float64, with NaN for null. Their number is not compared with that
        of the images here.

    Raises:
        ValueError: If the images are not RGB, or the arguments differ in length.
        TypeError: If metadata holds something that JSON cannot represent, such as a date.
        ScoringFailure: If there is no answer, a redirect, a status of 400 or more after the last
            attempt, an answer of more than 2**20 bytes (`MAX_ANSWER_BYTES`), or no {"scores":
            [...]} with numbers and nulls in it.
    """
    check_arguments(url, images, prompts, metadata)
    body: Any = {
        "images": [encode_png(image) for image in images],
        "prompts": list(prompts),
        "metadata": [dict(mapping) for mapping in metadata],
    }
    try:
        # Images go to the address in the configuration and to no other.
        request = session(timeout).post(
            url, json=body, timeout=timeout, stream=True, allow_redirects=False
        )
        with request as answer:
            text = _read_body(answer)
    except requests.RequestException as error:
        reason = getattr(error.args[0] if error.args else None, "reason", error)
        raise ScoringFailure(f"no answer ({str(reason).rsplit(': ', 1)[-1]})") from None
    if answer.is_redirect:
        location = brief_repr(answer.headers["location"])
        raise ScoringFailure(
            f"status {answer.status_code} (redirects to {location}, which is not followed)"
        )
    if not answer.ok:
        reason = text.decode(errors="replace").strip() or answer.reason
        raise ScoringFailure(f"status {answer.status_code} ({first_line(ValueError(reason))})")
    try:
        scores = parse_json(text)["scores"]
        if any(type(score) not in (int, float, type(None)) for score in scores):
            raise TypeError
        return np.array([math.nan if score is None else float(score) for score in scores], float)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ScoringFailure(
            'expected {"scores": [...]} for an answer, with a number or null for each image'
        ) from None


def encode_png(image: Float[np.ndarray, "H W 3"]) -> str:
    """Returns an image as a PNG file of 8 bits per channel in base64, without a prefix "data:".

    No file is written.

    Args:
        image: RGB in [0, 1]. Other values are clipped, and NaN becomes 0.
    """
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.cache
def session(timeout: float) -> requests.Session:
    """Returns an HTTP session that keeps connections open and repeats failed requests.

    The session is created once per process and timeout. A request, also a POST, is repeated if it
    gets no answer, an answer with the status 429, 502, 503 or 504 (`RETRIED`), or one with the
    status 413 and a Retry-After header. The pauses are 0, 1, 2, 4, ... seconds, or the time in the
    Retry-After header, which `timeout` does not limit. After the last attempt, an answer with such
    a status is returned; without an answer, the request raises requests.ConnectionError.

    Args:
        timeout: Seconds, `reward.timeout`. It decides the number of attempts: the pauses 0, 1, 2,
            4, ... together take at most half of it. It does not limit a single request.
    """
    attempts = 1 + int(math.log2(1 + timeout / 2))
    retry = urllib3.Retry(
        attempts,
        backoff_factor=0.5,
        status_forcelist=RETRIED,
        allowed_methods=None,
        raise_on_status=False,
    )
    connections = requests.Session()
    for scheme in ("http://", "https://"):
        connections.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    return connections


def _read_body(answer: requests.Response) -> bytes:
    """Returns the body of an answer, decompressed if the service compressed it.

    Args:
        answer: An answer whose body has not been read (`stream=True`).

    Raises:
        ScoringFailure: If the decompressed body is longer than 2**20 bytes (`MAX_ANSWER_BYTES`).
        requests.RequestException: If the connection ends, or the body cannot be decompressed.
    """
    text = b""
    for part in answer.iter_content(2**16):
        text += part
        if len(text) > MAX_ANSWER_BYTES:
            raise ScoringFailure(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return text
