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

from solrl_jax.rewards.host import Failure
from solrl_jax.rewards.protocol import Metadata
from solrl_jax.storage.errors import first_line
from solrl_jax.storage.images import to_uint8

RETRIED = (429, 502, 503, 504)  # status of a service that is busy or about to start


def http(
    images: Float[np.ndarray, "n H W 3"], prompts: Sequence[str], metadata: Sequence[Metadata], *, url: str, timeout: float
) -> Float[np.ndarray, " n"]:
    """The scores that the service at `url` answers, NaN for null.

    timeout: seconds for all attempts together. Raises Failure in one line if there is no answer, or no scores in it.
    """
    body: Any = {"images": [png(image) for image in images], "prompts": list(prompts), "metadata": [dict(m) for m in metadata]}
    try:
        answer = session(timeout).post(url, json=body, timeout=timeout)
    except requests.RequestException as error:
        reason = getattr(error.args[0] if error.args else None, "reason", error)
        raise Failure(f"no answer ({str(reason).rsplit(': ', 1)[-1]})") from None
    if not answer.ok:
        raise Failure(f"status {answer.status_code} ({first_line(ValueError(answer.text.strip() or answer.reason))})")
    try:
        return np.array([math.nan if score is None else score for score in answer.json()["scores"]], float)
    except (ValueError, TypeError, KeyError):
        raise Failure('expected {"scores": [...]} for an answer') from None


def png(image: Float[np.ndarray, "H W 3"]) -> str:
    """The image as a PNG file in base64."""
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.cache
def session(timeout: float) -> requests.Session:
    """Connections to services, which stay open. A request is repeated after 0, 1, 2, 4, ... seconds, for half of `timeout`."""
    attempts = 1 + int(math.log2(1 + timeout / 2))
    retry = urllib3.Retry(attempts, backoff_factor=0.5, status_forcelist=RETRIED, allowed_methods=None, raise_on_status=False)
    out = requests.Session()
    for scheme in ("http://", "https://"):
        out.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    return out
