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
from solrl_jax.rewards.host import Failure, seconds_left
from solrl_jax.rewards.judge import scoring
from solrl_jax.rewards.judge.cache import Cache, cache_key
from solrl_jax.rewards.judge.client import Answer, Client
from solrl_jax.rewards.judge.settings import Judge
from solrl_jax.rewards.judge.templates import PLACEHOLDER
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments, finite_images
from solrl_jax.storage.files import cache_directory
from solrl_jax.storage.images import to_uint8

# The share of the remaining time of a call after which its last requests fail. The rest is for
# returning the other scores.
SHARE = 0.9
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
    """Asks a judge about each image.

    Args:
        images: Images in [0, 1]. One with a non-finite value is not sent and scores NaN.
        prompts: The prompt of each image.
        metadata: Not read.
        options: `Judge.to_json()`.
        concurrency: The most requests of this process at once.

    Returns:
        The scores by name; the reward is in [0, 1].

    Raises:
        Failure: If there is an image that could not be scored. It has the scores of the others,
            which are in the cache as well.
    """
    check_arguments("judge", images, prompts, metadata)
    service = _open_service(options, concurrency)
    finite = finite_images(images)
    sent: list[tuple[_Sent, ...] | None] = [
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
    """Asks a judge which of two images it prefers.

    Args:
        first: Images in [0, 1], which are sent first.
        second: Images to compare them with.
        prompts: The prompt of each pair.
        metadata: Not read.
        options: `Judge.to_json()`.
        concurrency: The most requests of this process at once.

    Returns:
        The preference for the first image, in [0, 1]. NaN if an image has a non-finite value.

    Raises:
        Failure: If there is a pair that could not be compared. It has the preferences of the
            others.
    """
    check_arguments("judge", first, prompts, metadata)
    check_arguments("judge", second, prompts, metadata)
    service = _open_service(options, concurrency)
    finite = finite_images(first) & finite_images(second)
    sent: list[tuple[_Sent, ...] | None] = [
        (service.encode(a), service.encode(b)) if ok else None
        for a, b, ok in zip(first, second, finite, strict=True)
    ]
    return service.score_all(sent, prompts)["reward"]


@dataclasses.dataclass(frozen=True)
class _Sent:
    """An image as it is sent.

    Attributes:
        url: A data URL.
        digest: A hash of its pixels, its format and its size.
    """

    url: str
    digest: str

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a message."""
        return {"type": "image_url", "image_url": {"url": self.url}}


class Service:
    """A judge, its cache and its connection, kept open between the calls of a process."""

    def __init__(self, judge: Judge, concurrency: int) -> None:
        """Opens the cache and no connection yet.

        Args:
            judge: The judge.
            concurrency: The most requests at once.

        Raises:
            Failure: If the cache cannot be opened.
        """
        self._judge = judge
        self._identity = judge.identity()
        folder = cache_directory(judge.settings.cache, "judge", "cache")
        self._cache = None if folder is None else Cache(folder)
        self._runner = asyncio.Runner()
        self._client = Client(judge.settings, concurrency)

    def encode(self, image: Float[np.ndarray, "H W 3"]) -> _Sent:
        """Reduces an image to the option `image_size`, and packs it as `image_format` says."""
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
        return _Sent(f"data:image/{settings.image_format};base64,{code}", digest)

    def score_all(self, sent: Sequence[tuple[_Sent, ...] | None], prompts: Sequence[str]) -> Scores:
        """Scores images or pairs of images.

        Args:
            sent: The images of each request; None for a request that is not made.
            prompts: The prompt of each request.

        Returns:
            The scores by name, NaN for requests that are not made.

        Raises:
            Failure: If a request has no score. It has the scores of the others.
        """
        results = self._runner.run(self._gather(sent, prompts))
        names = ("reward", *self._judge.others)
        scores = {name: np.full(len(sent), np.nan, np.float32) for name in names}
        failures = []
        for row, result in enumerate(results):
            if isinstance(result, Failure):
                failures.append(result)
            elif result is not None:
                for name in names:
                    scores[name][row] = result[name]
        usage.count("failures", len(failures))
        if failures:
            more = f" ({len(failures)} of {len(sent)} requests failed)" if len(sent) > 1 else ""
            raise Failure(f"{failures[0]}{more}", scores)
        return scores

    async def _gather(
        self, sent: Sequence[tuple[_Sent, ...] | None], prompts: Sequence[str]
    ) -> list[dict[str, float] | Failure | None]:
        """Makes the requests of `score_all` at once. Equal ones are made once."""
        deadline = asyncio.get_running_loop().time() + SHARE * seconds_left()
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
        results: list[dict[str, float] | Failure | None] = []
        for made in keys:
            if made is None:
                results.append(None)
                continue
            error = tasks[made].exception()
            if error is not None and not isinstance(error, Failure):
                raise error
            results.append(error if isinstance(error, Failure) else tasks[made].result())
        return results

    async def _score(
        self, key: str, images: tuple[_Sent, ...], prompt: str, deadline: float
    ) -> dict[str, float]:
        """Scores one request, from the cache if it was made before.

        Args:
            key: Its key in the cache.
            images: The images.
            prompt: Their prompt.
            deadline: The time of the event loop at which it fails in any case.

        Raises:
            Failure: If it has no score.
        """
        cached = None if self._cache is None else self._cache.read(key)
        if cached is not None and {"reward", *self._judge.others} <= cached.keys():
            usage.count("cached")
            return cached
        content = self.message([image.part for image in images], prompt)
        answer = await self._client.ask(content, deadline, **self.request_fields())
        scores = self.scores(answer)
        if self._cache is not None:
            self._cache.write(key, scores)
        return scores

    def message(self, images: Sequence[dict[str, Any]], prompt: str) -> list[dict[str, Any]]:
        """Returns the parts of the message: the images, then the question."""
        question = self._judge.question.replace(PLACEHOLDER, prompt)
        parts: list[dict[str, Any]] = []
        for letter, image in zip("AB", images, strict=False):
            if len(images) > 1:
                parts.append({"type": "text", "text": f"Image {letter}:"})
            parts.append(image)
        return [*parts, {"type": "text", "text": question}]

    def request_fields(self) -> dict[str, Any]:
        """Returns the fields of a request that depend on how its answer is scored."""
        settings = self._judge.settings
        fields: dict[str, Any] = {"max_tokens": settings.max_tokens}
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
        """Returns the scores of an answer by name. Raises Failure if it has none."""
        settings = self._judge.settings
        if settings.score == "json":
            return scoring.score_json(answer.text, self._judge.criteria)
        if answer.tokens is None:
            raise Failure(
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
    """Returns the service of this process for these options, see `Service`."""
    return Service(Judge.from_json(options), concurrency)
