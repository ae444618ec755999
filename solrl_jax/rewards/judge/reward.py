"""The functions that worker processes call: `judge` scores images, `compare` compares two."""

import asyncio
import base64
import dataclasses
import functools
import hashlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from solrl_jax.rewards import usage
from solrl_jax.rewards.host import ScoringFailure, seconds_left
from solrl_jax.rewards.judge import scoring
from solrl_jax.rewards.judge.cache import Cache, cache_key
from solrl_jax.rewards.judge.client import Answer, Client
from solrl_jax.rewards.judge.settings import Judge
from solrl_jax.rewards.judge.templates import PLACEHOLDER
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments, finite_images
from solrl_jax.storage.files import cache_directory
from solrl_jax.storage.images import to_uint8

# Requests without an answer fail after this fraction of a call's remaining time. The rest of the
# time is for returning the other scores.
REQUEST_TIME_FRACTION = 0.9
JPEG_QUALITY = 95

Scores = dict[str, Float[np.ndarray, " n"]]


def judge(
    images: Images,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    *,
    options: str,
    concurrency: int,
) -> Scores:
    """Asks a judge about each image, in a worker process.

    Sends one request per image whose scores are not in the cache, and stores them there. Equal
    images with equal prompts share one request. Requests without an answer fail after 9/10 of the
    time that this call has left (`seconds_left`, up to `reward.timeout`). The cache and the
    connection stay open. Also adds to these counters of the run (`rewards.usage`):

      - "cached": requests that the cache replaced.
      - "failures": images without a score because of an error.
      - "requests": requests sent, including repetitions.
      - "request_seconds": the time of all requests, with their repetitions and pauses, summed.
      - "retries": repetitions of the requests that got an answer.
      - "prompt_tokens" and "completion_tokens": as the endpoint reports them.

    Args:
        images: Images [n, H, W, 3] in [0, 1]; finite values outside are clipped. One with a
            non-finite value is not sent and scores NaN.
        prompts: The prompts of the n images.
        metadata: The metadata of the n prompts, which has no effect.
        options: The `Judge` (its options, question and criteria) as JSON text from
            `Judge.to_json`. It must not be one that compares images. The API key is not in it, but
            in ~/.netrc or the environment (`client.find_key`).
        concurrency: The most requests of this process at once, at least 1.

    Returns:
        Float32 arrays [n] in [0, 1] by name: "reward" and, for a judge with several criteria, each
        criterion.

    Raises:
        ScoringFailure: If images could not be scored. Its `scores` are the arrays of the result,
            with NaN for these images. If the cache cannot be opened, its `scores` are None.
        ValueError: If the images are not RGB, the arguments differ in length, or `options` is not
            the JSON of a `Judge` (KeyError if it lacks a key).
        InputError: If the cache's directory is a file, or there is no home directory for it.
        PermissionError: If a parent of this directory may not be searched.
    """
    check_arguments("judge", images, prompts, metadata)
    service = _open_service(options, concurrency)
    finite = finite_images(images)
    sent: list[tuple[_EncodedImage, ...] | None] = [
        (service.encode(image),) if ok else None for image, ok in zip(images, finite, strict=True)
    ]
    return service.score_all(sent, prompts)


def compare(
    first: Images,
    second: Images,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    *,
    options: str,
    concurrency: int,
) -> Float[np.ndarray, " n"]:
    """Asks a judge which of two images it prefers, for n pairs, in a worker process.

    Sends one request per pair whose preference is not in the cache, and stores the preference
    there. Equal pairs with equal prompts share one request. Requests without an answer fail after
    9/10 of the time that this call has left (`seconds_left`, up to `reward.timeout`). Also adds to
    the same counters as `judge` (`rewards.usage`), with pairs in place of images. The cache and the
    connection stay open.

    Args:
        first: Images [n, H, W, 3] in [0, 1], shown to the judge first in each pair; finite values
            outside are clipped.
        second: The n images to compare them with: pair i is `first[i]` and `second[i]`. They may
            have another size.
        prompts: The prompts of the n pairs.
        metadata: The metadata of the n prompts, which has no effect.
        options: The `Judge` (its options and question) as JSON text from `Judge.to_json`. It must
            be one that compares images (`Judge.compares`). The API key is not in it, but in
            ~/.netrc or the environment (`client.find_key`).
        concurrency: The most requests of this process at once, at least 1.

    Returns:
        The preferences for the first images, float32 [n] in [0, 1]. NaN, without a request, if
        either image has a non-finite value.

    Raises:
        ScoringFailure: If pairs could not be compared. Its `scores` are {"reward": the
            preferences}, with NaN for these pairs. If the cache cannot be opened, its `scores` are
            None.
        ValueError: If the images are not RGB, the arguments differ in length, or `options` is not
            the JSON of a `Judge` (KeyError if it lacks a key).
        InputError: If the cache's directory is a file, or there is no home directory for it.
        PermissionError: If a parent of this directory may not be searched.
    """
    check_arguments("judge", first, prompts, metadata)
    check_arguments("judge", second, prompts, metadata)
    service = _open_service(options, concurrency)
    finite = finite_images(first) & finite_images(second)
    sent: list[tuple[_EncodedImage, ...] | None] = [
        (service.encode(a), service.encode(b)) if ok else None
        for a, b, ok in zip(first, second, finite, strict=True)
    ]
    return service.score_all(sent, prompts)["reward"]


@dataclasses.dataclass(frozen=True)
class _EncodedImage:
    """An image in the form in which it is sent to the endpoint.

    Attributes:
        url: A data URL with the PNG or JPEG file in base64.
        digest: A SHA-256 hash of the size and the 8-bit pixels of the image after it was reduced to
            `image_size`, in hexadecimal. It is the same for PNG and JPEG.
    """

    url: str
    digest: str

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a message: {"type": "image_url", "image_url": {"url": ...}}."""
        return {"type": "image_url", "image_url": {"url": self.url}}


class Service:
    """A judge with its cache and its connection, kept open between the calls of a worker process.

    `score_all` scores the images of a call: it takes scores from the cache, asks the endpoint for
    the others, at most `concurrency` at once, and stores those. The requests run in an event loop
    that the object owns, and that runs only during `score_all`. All calls must come from the thread
    that created the object. There is no method to close it.
    """

    def __init__(self, judge: Judge, concurrency: int) -> None:
        """Opens the cache, which creates its file if missing, and no connection yet.

        Also looks up the API key: in ~/.netrc, else in the environment. If there is none, requests
        have the key "none".

        Args:
            judge: The judge. With the option cache=None nothing is stored.
            concurrency: The most requests at once, at least 1. Further ones wait.

        Raises:
            ScoringFailure: If the cache cannot be opened.
            InputError: If its directory is a file, or there is no home directory for it.
            PermissionError: If a parent of its directory may not be searched.
        """
        self._judge = judge
        self._identity = judge.identity()
        folder = cache_directory(judge.settings.cache, "judge", "cache")
        self._cache = None if folder is None else Cache(folder)
        self._runner = asyncio.Runner()
        self._client = Client(judge.settings, concurrency)

    def encode(self, image: Float[np.ndarray, "H W 3"]) -> _EncodedImage:
        """Encodes an image as the endpoint gets it.

        If its longest side exceeds the option `image_size`, it is first reduced to this many pixels
        with Pillow's Lanczos kernel. The file is a PNG, or a JPEG of quality 95, as the option
        `image_format` says. Nothing is written to disk.

        Args:
            image: RGB in [0, 1], any size. Other values are clipped, and NaN becomes 0.

        Returns:
            The file as a data URL, and the hash of the reduced pixels, by which the cache knows the
            image.
        """
        settings = self._judge.settings
        picture = Image.fromarray(to_uint8(image))
        if settings.image_size is not None:
            # `thumbnail` keeps the aspect ratio and enlarges nothing.
            size = (settings.image_size, settings.image_size)
            picture.thumbnail(size, Image.Resampling.LANCZOS)
        digest = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).hexdigest()
        buffer = io.BytesIO()
        if settings.image_format == "png":
            picture.save(buffer, format="PNG", compress_level=1)
        else:
            picture.save(buffer, format="JPEG", quality=JPEG_QUALITY)
        code = base64.b64encode(buffer.getvalue()).decode()
        return _EncodedImage(f"data:image/{settings.image_format};base64,{code}", digest)

    def score_all(
        self, sent: Sequence[tuple[_EncodedImage, ...] | None], prompts: Sequence[str]
    ) -> Scores:
        """Scores images or pairs of images, from the cache or else by requests.

        Equal rows share one request, and new scores are stored in the cache. The call returns when
        every request has a score or has failed. Requests without an answer fail after 9/10
        (`REQUEST_TIME_FRACTION`) of the remaining time of the worker's call (`seconds_left`). Also
        counts (`rewards.usage`) the failed rows as "failures", the requests that the cache replaced
        as "cached", and the requests with their repetitions, time and tokens (`Client.ask`).

        Args:
            sent: For each row a tuple of one image, or of two if the judge compares; None for a row
                that is not to be scored.
            prompts: The prompt of each row.

        Returns:
            Float32 arrays [rows] in [0, 1] by name: "reward" and, for a judge with several
            criteria, each criterion (`Judge.others`). For pairs, "reward" is the preference for the
            first image. NaN in rows that are None in `sent`.

        Raises:
            ScoringFailure: If a request failed, or the cache could not be read or written for it.
                Its `scores` are the arrays, with NaN in the rows that failed, and its message is
                that of the first one.
            ValueError: If `sent` and `prompts` differ in length.
            Exception: The first other error of a request, after all requests have ended.
        """
        results = self._runner.run(self._gather(sent, prompts))
        names = ("reward", *self._judge.others)
        scores = {name: np.full(len(sent), np.nan, np.float32) for name in names}
        failures = []
        for row, result in enumerate(results):
            if isinstance(result, ScoringFailure):
                failures.append(result)
            elif result is not None:
                for name in names:
                    scores[name][row] = result[name]
        usage.add_count("failures", len(failures))
        if failures:
            more = f" ({len(failures)} of {len(sent)} requests failed)" if len(sent) > 1 else ""
            raise ScoringFailure(f"{failures[0]}{more}", scores)
        return scores

    async def _gather(
        self, sent: Sequence[tuple[_EncodedImage, ...] | None], prompts: Sequence[str]
    ) -> list[dict[str, float] | ScoringFailure | None]:
        """Gets the scores of all rows: from the cache, or by requests that run at the same time.

        Equal rows share one request. Requests without an answer fail after 9/10
        (`REQUEST_TIME_FRACTION`) of the remaining time of the worker's call (`seconds_left`).

        Args:
            sent: For each row a tuple of one image, or of two if the judge compares; None for a row
                that is not to be scored.
            prompts: The prompt of each row.

        Returns:
            For each row, in order: its scores by name, the ScoringFailure of its request, or None
            if it is None in `sent`. Equal rows share one object.

        Raises:
            ValueError: If `sent` and `prompts` differ in length.
            Exception: The first error of a request that is no ScoringFailure, after all have ended.
        """
        deadline = asyncio.get_running_loop().time() + REQUEST_TIME_FRACTION * seconds_left()
        tasks: dict[str, asyncio.Task[dict[str, float]]] = {}
        keys: list[str | None] = []
        for images, prompt in zip(sent, prompts, strict=True):
            if images is None:
                keys.append(None)
                continue
            key = cache_key(self._identity, str(prompt), [image.digest for image in images])
            keys.append(key)
            if key not in tasks:
                tasks[key] = asyncio.create_task(self._score(key, images, str(prompt), deadline))
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        results: list[dict[str, float] | ScoringFailure | None] = []
        for task_key in keys:
            if task_key is None:
                results.append(None)
                continue
            error = tasks[task_key].exception()
            if error is not None and not isinstance(error, ScoringFailure):
                raise error
            results.append(error if isinstance(error, ScoringFailure) else tasks[task_key].result())
        return results

    async def _score(
        self, key: str, images: tuple[_EncodedImage, ...], prompt: str, deadline: float
    ) -> dict[str, float]:
        """Returns the scores of one row: from the cache if it has all of them, else by a request.

        Counts "cached" (`rewards.usage`) in the first case, and stores the scores in the second.

        Args:
            key: The key under which the cache has the scores of this row, from `cache_key`.
            images: The images: one, or two that are compared.
            prompt: The prompt of the row.
            deadline: The time of the event loop, in seconds, at which the request fails in any
                case.

        Returns:
            The scores in [0, 1] by name: "reward" and, for a judge with several criteria, each
            criterion (`Judge.others`).

        Raises:
            ScoringFailure: If the endpoint gives no answer or one without a score, or the cache
                cannot be read or written.
        """
        cached = None if self._cache is None else self._cache.read(key)
        if cached is not None and {"reward", *self._judge.others} <= cached.keys():
            usage.add_count("cached")
            return cached
        content = self.message([image.part for image in images], prompt)
        answer = await self._client.ask(content, deadline, **self.request_fields())
        scores = self.scores(answer)
        if self._cache is not None:
            self._cache.write(key, scores)
        return scores

    def message(self, images: Sequence[dict[str, Any]], prompt: str) -> list[dict[str, Any]]:
        """Returns the content of the user's message: the images, then the question as text.

        Args:
            images: The images as parts of a message (`_EncodedImage.part`): one; two, before which
                the texts "Image A:" and "Image B:" are put here; or none.
            prompt: The prompt of the image, which replaces each {prompt} in the question.

        Returns:
            Parts as OpenAI defines them, dicts of the types "text" and "image_url".
        """
        question = self._judge.question.replace(PLACEHOLDER, prompt)
        parts: list[dict[str, Any]] = []
        for letter, image in zip("AB", images, strict=False):
            if len(images) > 1:
                parts.append({"type": "text", "text": f"Image {letter}:"})
            parts.append(image)
        return [*parts, {"type": "text", "text": question}]

    def request_fields(self) -> dict[str, Any]:
        """Returns the fields of a request that depend on how its answer is scored.

        Returns:
            A new dict with some of these keys. "max_tokens": unless the option `extra` has
            "max_completion_tokens". "logprobs" (true) and "top_logprobs" (20): for the scores
            "digits", "yes" and "preference". "response_format", a strict JSON schema of the
            criteria: for the score "json" with the option `structured`.
        """
        settings = self._judge.settings
        fields: dict[str, Any] = {}
        if settings.max_tokens is not None:
            fields["max_tokens"] = settings.max_tokens
        if settings.score != "json":
            return fields | {"logprobs": True, "top_logprobs": scoring.TOP}
        if settings.structured:
            schema = {
                "name": "scores",
                "strict": True,
                "schema": scoring.json_schema(self._judge.criteria),
            }
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def scores(self, answer: Answer) -> dict[str, float]:
        """Returns the scores of an answer by name, in [0, 1].

        Args:
            answer: The answer. For the score "json" its text has the numbers; for "digits", "yes"
                and "preference" the log-probabilities of its first token decide.

        Returns:
            "reward" and, for a judge with several criteria, the number of each criterion, scaled
            from its range to [0, 1]. "reward" is the mean of the scaled numbers for "json", the
            scaled expected digit for "digits", and for "yes" and "preference" the probability of
            "yes" or of the first image among the accepted tokens.

        Raises:
            ScoringFailure: If the score needs log-probabilities and the answer has none, or its
                accepted tokens (such as "yes" and "no") together have a probability below 0.05. For
                "json", if its text is not a JSON object with a number in its range for each
                criterion. Further keys are ignored, and with a single criterion, the number alone
                is accepted, too.
        """
        settings = self._judge.settings
        if settings.score == "json":
            return scoring.score_json(answer.text, self._judge.criteria)
        if answer.tokens is None:
            raise ScoringFailure(
                f"the endpoint returned no log-probabilities, which score={settings.score} needs; "
                "score=json needs none"
            )
        if settings.score == "yes":
            score = scoring.score_yes(answer.tokens)
        elif settings.score == "preference":
            score = scoring.score_preference(answer.tokens)
        else:
            assert settings.scale is not None
            low, high = map(int, settings.scale)
            score = scoring.score_digits(answer.tokens, low, high)
        assert math.isfinite(score)
        return {"reward": score}


@functools.cache
def _open_service(options: str, concurrency: int) -> Service:
    """Returns the `Service` of this process for a judge.

    It is opened by the first call with these arguments, which also creates the directory and the
    file of the cache if missing, and stays open for the life of the process.

    Args:
        options: The `Judge` (its options, question and criteria) as JSON text from
            `Judge.to_json`.
        concurrency: The most requests at once, at least 1.

    Raises:
        ScoringFailure: If the cache cannot be opened.
        InputError: If its directory is a file, or there is no home directory for it.
        PermissionError: If a parent of its directory may not be searched.
        ValueError: If `options` is no such text.
        KeyError: If a field is missing in it.
    """
    return Service(Judge.from_json(options), concurrency)
