"""What the endpoint of a judge supports, found out by requests, for `solrl doctor`."""

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np

from solrl_jax.errors import one_line
from solrl_jax.rewards.host import Failure
from solrl_jax.rewards.judge import scoring
from solrl_jax.rewards.judge.client import Answer, Client
from solrl_jax.rewards.judge.reward import Service
from solrl_jax.rewards.judge.settings import Judge

# The prompt of the image that is sent, which is gray.
PROMPT = "a gray square"
SIDE = 64  # pixels
# Seconds that all requests may take.
SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Support:
    """What an endpoint supports, from the first request that it answered.

    Fields of the request are left out one at a time until there is an answer. If only the request
    without any of them is answered, all of them count as not supported, although some may be.

    Attributes:
        seconds: The time from sending this request to its answer.
        images: Whether this request had the images. The model need not have looked at them.
        logprobs: The number of log-probabilities that were returned for the first token, at most 20
            (`scoring.TOP`). 0 if there are none, also because the judge reads JSON and asks for
            none.
        schema: Whether this request had a JSON schema; None if the judge sends none.
        seed: Whether this request had a seed.
        fingerprint: The field "system_fingerprint" of the answer: the endpoint's name for its
            software and weights, which changes with them. None if it returns no such text.
        answer: The first 40 characters of the answer.
        problem: Why the judge could not score an image, in one line: the refusal of the complete
            request or, if that was accepted, the fault of its answer. None if it can.
    """

    seconds: float
    images: bool
    logprobs: int
    schema: bool | None
    seed: bool
    fingerprint: str | None
    answer: str
    problem: str | None


def probe(judge: Judge) -> Support:
    """Sends one request as the judge does. If it is refused, leaves out one field after another.

    The image is a gray square of 64 x 64 pixels; a judge that compares gets it twice. A refused
    request is sent without the seed, then without log-probabilities, without the JSON schema,
    without images, and at last without all of these, skipping what the judge does not send.

    No attempt is repeated, the option `retries` notwithstanding. Nothing is read from the cache or
    written to it. It starts an event loop, so it cannot be called while one runs in this thread.

    Args:
        judge: The judge. The API key comes from ~/.netrc or the environment, as in a run.

    Returns:
        What the first answered request had, and its answer. `problem` is set if the judge cannot
        score with this endpoint.

    Raises:
        Failure: If no request was answered with a chat completion. Only a status of 4xx leads to
            the next attempt. The message, one line, is that of the first request. All requests
            together may take 120 seconds (`SECONDS`), and each the option `request_timeout`.
        RuntimeError: If an event loop runs in this thread.
    """
    settings = dataclasses.replace(judge.settings, cache=None, retries=0)
    judge = dataclasses.replace(judge, settings=settings)
    service = Service(judge, 1)
    gray = np.full((SIDE, SIDE, 3), 0.5, np.float32)
    count = 2 if judge.compares else 1
    parts = [service.encode(gray).part for _ in range(count)]
    fields = service.request_fields()
    client = Client(settings, 1)
    # What is left out, one after the other.
    attempts: list[set[str]] = [
        set(),
        {"seed"},
        {"logprobs", "top_logprobs"},
        {"response_format"},
        {"images"},
        {"images", "seed", "logprobs", "top_logprobs", "response_format"},
    ]
    refusal: Failure | None = None

    async def ask() -> tuple[Answer, set[str], float]:
        try:
            return await first_answer()
        finally:
            await client.close()

    async def first_answer() -> tuple[Answer, set[str], float]:
        nonlocal refusal
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SECONDS
        for absent in attempts:
            if absent and not absent & {*fields, "seed", "images"}:
                continue
            content = service.message([] if "images" in absent else parts, PROMPT)
            chosen = {name: value for name, value in fields.items() if name not in absent}
            began = time.monotonic()
            try:
                answer = await client.ask(
                    content, deadline, send_seed="seed" not in absent, **chosen
                )
                return answer, absent, time.monotonic() - began
            except Failure as failure:
                refusal = refusal or failure
                if "status 4" not in str(failure):
                    break
        assert refusal is not None
        raise refusal

    answer, absent, seconds = asyncio.run(ask())
    problem = str(refusal) if refusal is not None else None
    if problem is None:
        try:
            service.scores(answer)
        except Failure as failure:
            problem = str(failure)
    return Support(
        seconds=seconds,
        images="images" not in absent,
        logprobs=min(len(answer.tokens or ()), scoring.TOP),
        schema="response_format" not in absent if "response_format" in fields else None,
        seed="seed" not in absent,
        fingerprint=answer.system_fingerprint,
        answer=answer.text[:40],
        problem=problem,
    )


def describe(support: Support) -> str:
    """Describes what an endpoint supports, in one line.

    Args:
        support: The findings. Its `problem` is left out.

    Returns:
        E.g. "answers 'Yes' in 0.52 s; images yes, log-probabilities 20, schema yes, seed accepted,
        fingerprint no". The number of log-probabilities is "no" for 0. "schema" is missing if the
        judge sends none. Of the fingerprint the first 40 characters are shown, in which escape
        sequences stand for control characters.
    """
    facts: dict[str, Any] = {
        "images": support.images,
        "log-probabilities": support.logprobs or False,
        "schema": support.schema,
        "seed": "accepted" if support.seed else False,
        "fingerprint": one_line((support.fingerprint or "")[:40]) or False,
    }

    def word(value: Any) -> str:
        # By identity, because the number 1 equals True.
        if value is True:
            return "yes"
        return "no" if value is False else str(value)

    shown = [f"{name} {word(value)}" for name, value in facts.items() if value is not None]
    return f"answers {support.answer!r} in {support.seconds:.2g} s; {', '.join(shown)}"
