"""Renders a chat template: a program that a model's folder brings, so it runs in a process of its own, within bounds.

transformers renders it in Jinja's sandbox, which keeps it from files and from Python, not from long loops and long strings.
"""

import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 5  # of a processor, and a hundredth for each prompt
MEMORY = 10**9  # bytes
MOST_ADDED = 10**5  # characters that a template adds to a prompt
_LIGHT = {"OPENBLAS_NUM_THREADS": "1", "USE_TORCH": "0"}  # a pool of threads takes memory; PyTorch takes seconds to import


def render(template: str, prompts: Sequence[str], variables: Mapping[str, Any]) -> list[str]:
    """Each prompt as a user's turn, up to where the answer begins.

    variables: what the template reads besides, JSON. Raises ValueError in one line for a template that fails, and for one that
    takes more than the bounds above.
    """
    asked = json.dumps({"template": template, "prompts": list(prompts), "variables": dict(variables)})
    process = [sys.executable, "-P", __file__]
    done = subprocess.run(process, input=asked.encode(), capture_output=True, env={**os.environ, **_LIGHT}, check=False)
    if done.returncode < 0:  # a signal of the system's
        raise ValueError(f"takes more than {_seconds(prompts)} s or {MEMORY / 1e9:g} GB")
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    if isinstance(answer := json.loads(done.stdout), str):
        raise ValueError(answer)
    return answer


def _seconds(prompts: Sequence[str]) -> int:
    return SECONDS + len(prompts) // 100


def _render(template: str, prompts: list[str], variables: dict[str, Any]) -> list[str] | str:
    """What `render` returns, or what went wrong."""
    from transformers.utils.chat_template_utils import render_jinja_template

    seconds = math.ceil(time.process_time()) + _seconds(prompts)
    for limit, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, MEMORY)):
        with contextlib.suppress(ValueError):  # a lower limit holds already
            resource.setrlimit(limit, (most, most))
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    try:
        texts, _ = render_jinja_template(turns, chat_template=template, add_generation_prompt=True, **variables)
    except Exception as error:  # a template can raise any type
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if any(len(text) > len(prompt) + MOST_ADDED for text, prompt in zip(texts, prompts, strict=True)):
        return f"adds more than {MOST_ADDED} characters"
    return texts


if __name__ == "__main__":
    json.dump(_render(**json.load(sys.stdin)), sys.stdout)
