"""Sends requests to an OpenAI-compatible endpoint, with the package openai.

The server is not trusted. The size of an answer is limited, and every wait has an end. Redirects
are not followed, so images and keys go only to the configured address.
"""

import asyncio
import contextlib
import json
import math
import os
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import openai
import requests

from solrl_jax.config.values import brief_repr
from solrl_jax.errors import one_line, text
from solrl_jax.rewards import usage
from solrl_jax.rewards.host import ScoringFailure
from solrl_jax.rewards.judge.settings import JudgeSettings
from solrl_jax.storage.readers import parse_json

# The largest answer in bytes.
MAX_ANSWER_BYTES = 2**20
# The most characters of a server's message that are repeated.
MAX_MESSAGE_CHARACTERS = 200


def find_key(settings: JudgeSettings) -> str:
    """Returns the API key of an endpoint.

    The key is the password for the host of the endpoint in the user's netrc file (~/.netrc, or the
    file in the variable NETRC), or that of its entry "default". Without one, if it is empty, or if
    the file cannot be parsed, it is the value of an environment variable: the one that
    `api_key_env` names, or by default OPENAI_API_KEY for openai.com and its subdomains and
    JUDGE_API_KEY for other hosts.

    Args:
        settings: The options of the judge. Only `base_url` (the address of the endpoint) and
            `api_key_env` (the name of the variable, or None for the default) are read.

    Returns:
        The key; "none", which local servers accept, if there is none or an empty one.
    """
    login = requests.utils.get_netrc_auth(settings.base_url)
    if login is not None and login[1]:
        return login[1]
    host = urllib.parse.urlsplit(settings.base_url).hostname or ""
    is_openai = host == "openai.com" or host.endswith(".openai.com")
    default = "OPENAI_API_KEY" if is_openai else "JUDGE_API_KEY"
    return os.environ.get(settings.api_key_env or default) or "none"


class Answer:
    """The parsed answer to one request (a chat completion).

    `Answer(body)` parses bytes of JSON, and also counts "prompt_tokens" and "completion_tokens"
    (`rewards.usage`). It raises ScoringFailure if the bytes are no chat completion.

    Attributes:
        text: The text of the first choice; "" if it is null.
        tokens: A list of pairs (token, natural logarithm of its probability): the candidates for
            the first token of the text ("top_logprobs"), in the order of the answer, as many as the
            endpoint sent; only the chosen token if it sent no candidates. None if it returned no
            log-probabilities.
        system_fingerprint: The endpoint's name for its software and weights; None if it sent none,
            or another value than text.
    """

    def __init__(self, body: bytes) -> None:
        """Reads the body of an answer.

        Also counts "prompt_tokens" and "completion_tokens" (`rewards.usage`) if the answer has
        them.

        Args:
            body: A chat completion as OpenAI defines it: the bytes of a JSON object whose "choices"
                has at least one entry. Further entries are ignored.

        Raises:
            ScoringFailure: If it is no chat completion, or a log-probability is an integer beyond
                the range of a float. The message has the beginning of the body, up to 80
                characters.
        """
        try:
            content = parse_json(body, number=float)
            choice = content["choices"][0]
            self.text: str = choice["message"]["content"] or ""
            if not isinstance(self.text, str):
                raise TypeError
            self.tokens = _first_tokens(choice.get("logprobs"))
            fingerprint = content.get("system_fingerprint")
            self.system_fingerprint = fingerprint if isinstance(fingerprint, str) else None
            counts = content.get("usage") or {}
            for name in ("prompt_tokens", "completion_tokens"):
                if type(counts.get(name)) is int and 0 <= counts[name] < 2**31:
                    usage.add_count(name, counts[name])
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
            OverflowError,
        ):
            start = body[:MAX_MESSAGE_CHARACTERS].decode(errors="replace")
            raise ScoringFailure(f"expected a chat completion, got {brief_repr(start)}") from None


class Client:
    """The connection of a process to an OpenAI-compatible endpoint.

    The coroutine `ask` sends one request, repeats it after temporary failures, and returns its
    `Answer`. Every request has the model, the seed (unless `ask` omits it) and the fields `extra`
    of the judge's options, and the temperature 0. At most `concurrency` requests run at once. All
    requests must run in one event loop. Idle connections stay open for further requests until the
    coroutine `close` runs.
    """

    def __init__(self, settings: JudgeSettings, concurrency: int) -> None:
        """Opens no connection yet. Looks up the API key: in ~/.netrc, else in the environment.

        If there is none, requests have the key "none".

        Args:
            settings: The options of the judge. `base_url`, `api_key_env`, `request_timeout` and
                `retries` decide the connection; `model`, `seed` and `extra` go into every request.
            concurrency: The most requests at once, at least 1. Further ones wait.
        """
        self._settings = settings
        self._key = find_key(settings)
        self._free = asyncio.Semaphore(concurrency)
        http_client = openai.DefaultAsyncHttpxClient(
            follow_redirects=False,
            event_hooks={"request": [_count_request], "response": [_bound_response]},
            # A packed answer of a megabyte may unpack to gigabytes.
            headers={"Accept-Encoding": "identity"},
        )
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=self._key,
            timeout=settings.request_timeout,
            max_retries=settings.retries,
            http_client=http_client,
        )

    async def ask(
        self,
        content: Sequence[dict[str, Any]],
        deadline: float,
        *,
        send_seed: bool = True,
        **fields: Any,
    ) -> Answer:
        """Sends one request, and repeats it up to `retries` times if a failure may be temporary.

        Temporary failures are: no connection, no answer within `request_timeout`, and the statuses
        408, 409, 429 and 5xx. The pauses are those of the package openai: up to 0.5, 1, 2, 4, 8, 8,
        ... seconds, or as the header Retry-After says (above 120 seconds, the request is not
        repeated). Also counts (`rewards.usage`) "requests" (attempts), "request_seconds" (of all
        attempts and pauses) and, if there is an answer, "retries", "prompt_tokens" and
        "completion_tokens".

        Args:
            content: The parts of the user's message, as OpenAI defines them: dicts of the types
                "text" and "image_url".
            deadline: The time of the running event loop, in seconds, at which the request fails. A
                request that then still waits for a free slot (`concurrency`) fails as soon as it
                gets one.
            send_seed: Whether the request has the seed of the options.
            fields: Further fields of the request that the package openai knows, e.g. max_tokens.

        Returns:
            The parsed answer: its text, the log-probabilities of its first token if `fields` ask
            for them, and the fingerprint of the system.

        Raises:
            ScoringFailure: If there is no answer before the deadline, a redirect, an error status
                after the last attempt, an answer that is compressed or has more than 2**20 bytes
                (`MAX_ANSWER_BYTES`), or no chat completion. The message is one line, with "***" in
                place of the key.
        """
        async with self._free:
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                with self._in_one_line():
                    async with asyncio.timeout_at(deadline):
                        raw = await self._client.chat.completions.with_raw_response.create(
                            model=self._settings.model,
                            messages=[{"role": "user", "content": list(content)}],  # type: ignore[list-item]
                            temperature=0,
                            seed=self._settings.seed if send_seed else openai.omit,
                            extra_body=dict(self._settings.extra),
                            **fields,
                        )
                        body = raw.http_response.content
                    usage.add_count("retries", raw.retries_taken)
                    return Answer(body)
            finally:
                usage.add_count("request_seconds", loop.time() - began)

    async def close(self) -> None:
        """Closes the connections. Further requests fail.

        It must run in the event loop of the requests.
        """
        await self._client.close()

    @contextlib.contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """A context manager that turns errors of a request in the body into a ScoringFailure.

        Yields:
            None.

        Raises:
            ScoringFailure: In place of errors of the packages openai and httpx2 (its HTTP client),
                TimeoutError, ValueError and a ScoringFailure of the body. The message is one line,
                with "***" in place of the API key. Other errors pass unchanged.
        """
        try:
            yield
        except ScoringFailure as failure:
            raise ScoringFailure(self._without_key(str(failure))) from None
        except openai.APITimeoutError:
            seconds = self._settings.request_timeout
            raise ScoringFailure(f"no answer within request_timeout={seconds:g} seconds") from None
        except TimeoutError:
            raise ScoringFailure("no answer before the end of reward.timeout") from None
        except openai.APIStatusError as error:
            raise ScoringFailure(self._without_key(_describe_status(error))) from None
        except openai.APIConnectionError as error:
            raise ScoringFailure(f"no answer ({self._without_key(_root_cause(error))})") from None
        except (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            raise ScoringFailure(self._without_key(_root_cause(error))) from None

    def _without_key(self, message: str) -> str:
        """Returns a message in which "***" stands for the API key, which a server may repeat.

        Args:
            message: Any text. Without a key (the value "none") it is returned as it is.
        """
        return message.replace(self._key, "***") if self._key != "none" else message


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of an answer, read as it arrives and limited to 2**20 bytes (`MAX_ANSWER_BYTES`).

    It wraps the stream of a response of httpx2, the HTTP client of the package openai. Iterating
    over it yields the parts of the body (bytes) as the server sent them. They are not compressed,
    because `_bound_response` refuses compressed bodies. The iteration raises `ScoringFailure` in
    place of the part that exceeds the limit.
    """

    def __init__(self, stream: Any) -> None:
        """Wraps a stream, and reads nothing yet.

        Args:
            stream: The stream of a response, an asynchronous iterable of bytes with `aclose`.
        """
        self._stream = stream

    async def __aiter__(self) -> Any:
        """Yields the parts of the body, bytes, as they arrive.

        Raises:
            ScoringFailure: If the parts have more than 2**20 bytes (`MAX_ANSWER_BYTES`) together.
                The part that exceeds the limit is not yielded.
        """
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise ScoringFailure(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        """Closes the stream."""
        await self._stream.aclose()


async def _count_request(request: httpx2.Request) -> None:
    """Counts an attempt as "requests" (`rewards.usage`).

    httpx2, the HTTP client of the package openai, calls it before each attempt, repetitions
    included.

    Args:
        request: Not read.
    """
    usage.add_count("requests")


async def _bound_response(response: httpx2.Response) -> None:
    """Limits the size of an answer to 2**20 bytes (`MAX_ANSWER_BYTES`).

    httpx2, the HTTP client of the package openai, calls it with every response, before its body is
    read. The limit applies when the body is read.

    Args:
        response: The response. Its stream is replaced by a `_BoundedStream`.

    Raises:
        ScoringFailure: If the body is compressed (a content-encoding other than "identity"), which
            the request did not accept.
    """
    encoding = response.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ScoringFailure(
            f"an answer packed with {brief_repr(encoding)}, which was not asked for"
        )
    response.stream = _BoundedStream(response.stream)


def _first_tokens(logprobs: Any) -> list[tuple[str, float]] | None:
    """Returns the candidates for the first token of an answer, with their log-probabilities.

    Args:
        logprobs: The field "logprobs" of a choice in a chat completion: a dict whose list "content"
            has one entry per token of the answer. Only the first entry is read. None: there are no
            log-probabilities.

    Returns:
        Pairs (token, natural logarithm of its probability) in the order of the answer: the entries
        of "top_logprobs", or only the chosen token if there are none. None if `logprobs` is None,
        or its "content" is missing, null or empty. Infinite numbers pass.

    Raises:
        TypeError, LookupError, AttributeError: If the field is not as OpenAI defines it, or a
            number is NaN.
        OverflowError: If a number is an integer beyond the range of a float.
    """
    if not logprobs or not logprobs.get("content"):
        return None
    first = logprobs["content"][0]
    tokens = []
    for entry in first.get("top_logprobs") or [first]:
        token = entry["token"]
        logarithm = entry["logprob"]
        if not isinstance(token, str) or type(logarithm) not in (int, float):
            raise TypeError
        if math.isnan(logarithm):
            raise TypeError
        tokens.append((token, float(logarithm)))
    return tokens


def _describe_status(error: openai.APIStatusError) -> str:
    """Describes an answer with an error status in one line, e.g. "status 404 (no such model)".

    Args:
        error: The error of the package openai for a response whose status is not 2xx.

    Returns:
        The status and, in parentheses, the address of a redirect or the server's message. The
        message is the field "message" or "detail" of the JSON body (or of the object "error" in
        it), or a text under "error", or else the whole body. It is cut to 200 characters, and an
        empty one is replaced by "no message". It may contain the API key.
    """
    response = error.response
    location = response.headers.get("location")
    if 300 <= error.status_code < 400 and location is not None:
        return (
            f"status {error.status_code} (redirects to {brief_repr(location)}, which is not "
            "followed)"
        )
    message = response.text
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(message)
        if isinstance(content, dict):
            content = content.get("error") or content
        if isinstance(content, dict):
            content = content.get("message") or content.get("detail")
        message = content if isinstance(content, str) else message
    reason = one_line(" ".join(message.split()))[:MAX_MESSAGE_CHARACTERS] or "no message"
    return f"status {error.status_code} ({reason})"


def _root_cause(error: BaseException) -> str:
    """Returns the message of the innermost cause of an error, in one line of up to 200 characters.

    Args:
        error: The error. Its `__cause__`, or else its `__context__`, is followed to the end.

    Returns:
        The message of the error at this end, or the name of its type if the message is empty. It
        may contain the API key.
    """
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    message = one_line(" ".join(text(error).split()))[:MAX_MESSAGE_CHARACTERS]
    return message or type(error).__name__
