"""The client of a reward service, for scorers that need an environment of their own.

The request is POST {"images": [base64 of a PNG, ...], "prompts": [...], "metadata": [{...}, ...]}. The answer is
{"scores": [...]}, with a number or null for each picture. `scripts/reward_server.py` is such a service.
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
from solrl_jax.rewards.host import Failure
from solrl_jax.rewards.protocol import Metadata
from solrl_jax.storage.images import to_uint8
from solrl_jax.storage.readers import parse_json

MOST = 2**20  # bytes of an answer
RETRIED = (429, 502, 503, 504)  # status of a service that is busy or about to start


def http(
    images: Float[np.ndarray, "n H W 3"],
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    *,
    url: str,
    timeout: float,
) -> Float[np.ndarray, " n"]:
    """The scores that the service at `url` answers, NaN for null.

    timeout: seconds for all attempts together. Raises Failure in one line if there is no answer, or no scores in it.
    """
    body: Any = {
        "images": [png(image) for image in images],
        "prompts": list(prompts),
        "metadata": [dict(m) for m in metadata],
    }
    try:
        # Pictures go to the address that was named and to no other.
        with session(timeout).post(
            url, json=body, timeout=timeout, stream=True, allow_redirects=False
        ) as answer:
            text = _read(answer)
    except requests.RequestException as error:
        reason = getattr(error.args[0] if error.args else None, "reason", error)
        raise Failure(f"no answer ({str(reason).rsplit(': ', 1)[-1]})") from None
    if answer.is_redirect:
        raise Failure(
            f"status {answer.status_code} (sends on to {brief_repr(answer.headers['location'])}, which is not followed)"
        )
    if not answer.ok:
        why = text.decode(errors="replace").strip() or answer.reason
        raise Failure(f"status {answer.status_code} ({first_line(ValueError(why))})")
    try:
        scores = parse_json(text)["scores"]
        if any(type(score) not in (int, float, type(None)) for score in scores):
            raise TypeError
        return np.array([math.nan if score is None else float(score) for score in scores], float)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise Failure(
            'expected {"scores": [...]} for an answer, with a number or null for each picture'
        ) from None


def _read(answer: requests.Response) -> bytes:
    """The body of an answer, unpacked. Raises Failure if it is longer than `MOST`."""
    text = b""
    for part in answer.iter_content(2**16):
        text += part
        if len(text) > MOST:
            raise Failure(f"an answer of more than {MOST} bytes")
    return text


def png(image: Float[np.ndarray, "H W 3"]) -> str:
    """The image as a PNG file in base64."""
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.cache
def session(timeout: float) -> requests.Session:
    """Connections to services, which stay open. A request is repeated after 0, 1, 2, 4, ... seconds, for half of `timeout`."""
    attempts = 1 + int(math.log2(1 + timeout / 2))
    retry = urllib3.Retry(
        attempts,
        backoff_factor=0.5,
        status_forcelist=RETRIED,
        allowed_methods=None,
        raise_on_status=False,
    )
    out = requests.Session()
    for scheme in ("http://", "https://"):
        out.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    return out
