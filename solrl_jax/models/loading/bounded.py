"""Runs the chat template and tries the tokenizer of a model's folder, in a process with bounds of time and memory.

A chat template is a program. transformers renders it in Jinja's sandbox, which keeps it from files and from Python, not from
long loops and long strings. A tokenizer's regular expressions can backtrack without end. A wrong table in it makes the library
panic, which fills standard error.
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

SECONDS = 5  # of a processor, and a hundredth for each text
MEMORY = 10**9  # bytes
MOST_ADDED = 10**5  # characters that a template adds to a prompt
_LIGHT = {
    "OPENBLAS_NUM_THREADS": "1",
    "USE_TORCH": "0",
}  # a pool of threads takes memory; PyTorch takes seconds to import


def render(template: str, prompts: Sequence[str], variables: Mapping[str, Any]) -> list[str]:
    """Each prompt as a user's turn, up to where the answer begins.

    variables: what the template reads besides, JSON. Raises ValueError in one line for a template that fails, and for one that
    takes more than the bounds above.
    """
    return _ask("render", template, prompts, variables)


def try_tokenizer(definition: str, texts: Sequence[str]) -> None:
    """Raises ValueError in one line if a tokenizer, as tokenizer.json has it, fails on a text or takes more than the bounds."""
    _ask("tokenize", definition, texts, {})


def open_tokenizer(file: str) -> None:
    """Raises ValueError in one line if the library cannot read a tokenizer.json, or panics."""
    _ask("open", file, [], {})


def _ask(job: str, program: str, texts: Sequence[str], variables: Mapping[str, Any]) -> Any:
    asked = json.dumps(
        {"job": job, "program": program, "texts": list(texts), "variables": dict(variables)}
    )
    process = [sys.executable, "-P", __file__]
    done = subprocess.run(
        process,
        input=asked.encode(),
        capture_output=True,
        env={**os.environ, **_LIGHT},
        check=False,
    )
    if done.returncode < 0:  # a signal of the system's
        raise ValueError(f"takes more than {_seconds(texts)} s or {MEMORY / 1e9:g} GB")
    if done.returncode:
        raise ValueError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    if isinstance(answer := json.loads(done.stdout), str):
        raise ValueError(answer)
    return answer


def _seconds(texts: Sequence[str]) -> int:
    return SECONDS + len(texts) // 100


def _limit(texts: Sequence[str]) -> None:
    """Sets the bounds of this process. What is imported does not count."""
    seconds = math.ceil(time.process_time()) + _seconds(texts)
    for limit, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, MEMORY)):
        with contextlib.suppress(ValueError):  # a lower limit holds already
            resource.setrlimit(limit, (most, most))


def _render(template: str, prompts: list[str], variables: dict[str, Any]) -> list[str] | str:
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(prompts)
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts, _ = render_jinja_template(
        turns, chat_template=template, add_generation_prompt=True, **variables
    )
    if any(
        len(text) > len(prompt) + MOST_ADDED for text, prompt in zip(texts, prompts, strict=True)
    ):
        return f"adds more than {MOST_ADDED} characters"
    return texts


def _tokenize(definition: str, texts: list[str], _variables: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    _limit(texts)
    tokenizer = Tokenizer.from_str(definition)
    for text in texts:
        tokenizer.encode(text)


def _open(file: str, _texts: list[str], _variables: dict[str, Any]) -> None:
    from tokenizers import Tokenizer

    Tokenizer.from_file(file)


def _answer(job: str, program: str, texts: list[str], variables: dict[str, Any]) -> Any:
    """What a job returns; text: what went wrong."""
    try:
        return {"render": _render, "tokenize": _tokenize, "open": _open}[job](
            program, texts, variables
        )
    except (
        BaseException
    ) as error:  # a template can raise any type, and a panic in Rust is no Exception
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    json.dump(_answer(**json.load(sys.stdin)), sys.stdout)
