"""Finds out by requests what the endpoint of a judge supports, for `solrl doctor`."""

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np

from solrl_jax.errors import one_line
from solrl_jax.rewards.host import ScoringFailure
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
    """What an endpoint supports, according to the first request that it answered.

    `probe` sends the judge's complete request first, and reduced ones until one is answered.
    "Answered request" below is the one that got an answer.

    Attributes:
        seconds: The time from sending the answered request to its answer.
        images: Whether the answered request had the images. The model need not have looked at them.
        logprobs: The number of log-probabilities that the endpoint returned for the first token, at
            most 20 (`scoring.TOP`). Also 0 for a judge that reads JSON, which asks for none.
        schema: Whether the answered request had a JSON schema; None if the judge sends none.
        seed: Whether the answered request had a seed.
        fingerprint: The field "system_fingerprint" of the answer: the endpoint's name for its
            software and weights. None if it returns no such text.
        answer: The first 40 characters of the answer.
        problem: Why the judge cannot score with this endpoint, in one line: the refusal of the
            complete request or, if that was accepted, the fault of its answer. None if it can.
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
    """Finds out by requests what the endpoint of a judge supports.

    First sends the request that the judge would send for a gray square of 64 x 64 pixels (or two of
    them, if the judge compares). While requests are refused with a status of 4xx, sends reduced
    ones: without the seed, without the log-probabilities, without the JSON schema, without the
    images, and without all of these. A part that the request does not have is skipped. No request
    is repeated (whatever the option `retries`), and the cache is neither read nor written.

    Args:
        judge: The judge. The API key comes from ~/.netrc or the environment, as in a run.

    Returns:
        The parts of the first answered request, and its answer. `problem` is set if the judge
        cannot score with this endpoint.

    Raises:
        ScoringFailure: If no request got a chat completion, or a request failed otherwise than with
            a status of 4xx. The message, one line, is that of the first failure. A request fails
            after `request_timeout`, or when all requests together take 120 seconds (`SECONDS`).
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
    refusal: ScoringFailure | None = None

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
            except ScoringFailure as failure:
                refusal = refusal or failure
                if not str(failure).startswith("status 4"):
                    break
        assert refusal is not None
        raise refusal

    answer, absent, seconds = asyncio.run(ask())
    problem = str(refusal) if refusal is not None else None
    if problem is None:
        try:
            service.scores(answer)
        except ScoringFailure as failure:
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
        support: The findings of `probe`. Its `problem` is left out.

    Returns:
        E.g. "answers 'Yes' in 0.52 s; images yes, log-probabilities 20, schema yes, seed accepted,
        fingerprint no". "schema" (the JSON schema of the answer) is missing if the judge sends
        none. An unsupported feature, including the seed, is "no". A fingerprint is cut to 40
        characters.
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

    answers = [f"{name} {word(value)}" for name, value in facts.items() if value is not None]
    return f"answers {support.answer!r} in {support.seconds:.2g} s; {', '.join(answers)}"
