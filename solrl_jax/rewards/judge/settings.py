"""The options of a judge, as `reward.options.judge` has them."""

import dataclasses
import json
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, Field

from solrl_jax.config.validation import describe_error, suggest
from solrl_jax.config.values import (
    ConfigError,
    Integer,
    Json,
    Number,
    Pixels,
    Positive,
    PositiveInt,
    Section,
    Seed,
    Text,
    contains_secret,
    expand_home,
)
from solrl_jax.errors import InputError
from solrl_jax.rewards.judge.templates import Template, read_template

Scale = Annotated[tuple[Number, Number], Field(strict=False)]
# Requests that need log-probabilities answer with one token.
MAX_TOKENS = {"digits": 1, "yes": 1, "preference": 1, "json": 256}
# Fields of a request that a judge sets itself, and words that a secret may hide under.
RESERVED = ("model", "messages", "stream", "n", "seed", "temperature", "max_tokens", "logprobs")
SECRETS = ("key", "token", "secret", "pass", "auth", "header")
# Options that a score depends on, beside the question and the pixels of the images.
IDENTITY = (
    "model",
    "score",
    "scale",
    "structured",
    "image_format",
    "max_tokens",
    "seed",
    "extra",
)
# Options on which no score depends. They may change between the starts of a run.
FREE = (
    "base_url",
    "api_key_env",
    "concurrency",
    "request_timeout",
    "retries",
    "cache",
)


def _check_base_url(url: str) -> str:
    """Returns the address of an endpoint. Raises ValueError if it is none or holds a secret."""
    expected = "expected http://HOST:PORT/v1"
    address = urllib.parse.urlsplit(url)
    if contains_secret(url):
        # A ConfigError is not followed by the value.
        raise ConfigError(
            f"base_url: {expected} without user name, password or token; see api_key_env"
        )
    if address.scheme not in ("http", "https") or not address.hostname or url.split() != [url]:
        raise ValueError(expected)
    if address.port == 0 or address.query or address.fragment:
        raise ValueError(expected)
    return url.rstrip("/")


def _check_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns further fields of a request. Raises ValueError for reserved names and secrets."""
    reserved = [name for name in extra if name in RESERVED]
    if reserved:
        raise ConfigError(f"extra.{reserved[0]}: is set by the judge itself")
    # A run records its configuration.
    secret = [name for name in extra if any(word in name.lower() for word in SECRETS)]
    if secret:
        raise ConfigError(
            f"extra.{secret[0]}: may be a secret; keys come from the environment or ~/.netrc"
        )
    return extra


def _check_variable(name: str) -> str:
    """Returns the name of an environment variable. Raises ValueError if it may be a key itself."""
    if not name.isidentifier():
        raise ConfigError("api_key_env: expected the name of an environment variable, not a key")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeSettings(Section):
    """The options of a judge."""

    # The endpoint, e.g. "http://127.0.0.1:8000/v1". Requests go to its /chat/completions.
    base_url: Annotated[Text, AfterValidator(_check_base_url)]
    # The name of the model at this endpoint.
    model: Text
    # The question: a name in `assets/judge/`, or a text file in which {prompt} stands for the
    # prompt.
    prompt: Annotated[Text, AfterValidator(expand_home)] = "alignment"
    # How an answer is scored (`judge/scoring.py`): "digits", "yes" and "preference" need
    # log-probabilities, "json" does not. None: as the question of the package says.
    score: Literal["digits", "yes", "json", "preference"] | None = None
    # Lowest and highest number of "digits" and of "json" without criteria. None: [1, 5].
    scale: Scale | None = None
    # For "json": the lowest and the highest number of each criterion by its name.
    criteria: dict[str, Scale] = dataclasses.field(default_factory=dict, hash=False)
    # Whether "json" asks the endpoint to follow the schema of the criteria (`response_format`).
    structured: bool = True
    # Longest side in pixels of the images that are sent; larger ones are reduced. None: as they
    # are.
    image_size: Pixels | None = None
    # "png" without loss, or "jpeg" of quality 95, which is about a fifth of the size.
    image_format: Literal["png", "jpeg"] = "png"
    # Most tokens of an answer. None: 1 where log-probabilities are read, else 256.
    max_tokens: PositiveInt | None = None
    # Seed of a request. The temperature is 0.
    seed: Seed = 0
    # Further fields of the body of a request, e.g. chat_template_kwargs of vLLM.
    extra: Annotated[dict[str, Json], AfterValidator(_check_extra)] = dataclasses.field(
        default_factory=dict, hash=False
    )
    # Most requests at once, of all worker processes of a host together.
    concurrency: Annotated[Integer, Field(ge=1, le=2**12)] = 16
    # Seconds until an unanswered request is sent again. `reward.timeout` bounds a whole call.
    request_timeout: Annotated[Positive, Field(le=1e6)] = 60.0
    # How often a request is sent again after a refused connection, no answer, or status 408, 409,
    # 429 or 5xx.
    retries: Annotated[Integer, Field(ge=0, le=100)] = 4
    # Directory of the scores that were paid for. "": the user's own, ~/.cache/solrl_jax/judge.
    # None: no cache.
    cache: Annotated[str, AfterValidator(expand_home)] | None = ""
    # Environment variable with the API key. None: OPENAI_API_KEY for openai.com, else
    # JUDGE_API_KEY. ~/.netrc comes first.
    api_key_env: Annotated[str, AfterValidator(_check_variable)] | None = None


@dataclasses.dataclass(frozen=True)
class Judge:
    """A judge with its question.

    Attributes:
        settings: The options, with `score`, `scale` and `max_tokens` filled in.
        question: The text of the question.
        criteria: For "json", the range of each criterion; otherwise empty.
    """

    settings: JudgeSettings
    question: str
    criteria: dict[str, tuple[float, float]]

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the scores beside "reward": the criteria, if there are several."""
        return tuple(self.criteria) if len(self.criteria) > 1 else ()

    @property
    def compares(self) -> bool:
        """Whether two images are compared, and none is scored alone."""
        return self.settings.score == "preference"

    def to_json(self) -> str:
        """Returns the judge as a text that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Judge":
        """Reads the text that `to_json` returned."""
        fields = json.loads(text)
        criteria = {name: (low, high) for name, (low, high) in fields["criteria"].items()}
        return cls(_SETTINGS.validate_python(fields["settings"]), fields["question"], criteria)

    def identity(self) -> dict[str, Any]:
        """Returns all that a score depends on beside the images and the prompt, as JSON values.

        It does not depend on the endpoint: a model has the same name wherever it is served.
        """
        settings = dataclasses.asdict(self.settings)
        identity = {name: settings[name] for name in IDENTITY}
        return identity | {"question": self.question, "criteria": self.criteria}


_SETTINGS = pydantic.TypeAdapter(JudgeSettings)


def open_judge(name: str, options: Mapping[str, Any]) -> Judge:
    """Checks the options of a judge, and reads its question. No request is sent.

    Args:
        name: The name of the reward.
        options: Its options.

    Raises:
        InputError: If an option is missing, unknown or not accepted, or if options do not fit each
            other.
    """
    field = f"reward.options.{name}"
    fields = [entry.name for entry in dataclasses.fields(JudgeSettings)]

    def unknown(key: str) -> str:
        if any(word in key.lower() for word in ("key", "token")) and key not in fields:
            return f"unknown key '{key}': keys come from the environment or ~/.netrc (api_key_env)"
        return f"unknown key '{key}': {suggest(key, fields)}"

    try:
        settings = _SETTINGS.validate_python(dict(options))
    except pydantic.ValidationError as errors:
        messages = [describe_error(error, "options", unknown) for error in errors.errors()]
        raise InputError(f"{field}: {'; '.join(filter(None, messages))}") from None
    template = read_template(settings.prompt, f"{field}.prompt")
    score = settings.score or template.score
    if score is None:
        raise InputError(
            f"{field}.score=None: expected digits, yes, json or preference for a question of yours"
        )
    scale = _check_scale(field, score, settings.scale)
    _check_criteria(field, score, settings)
    complete = dataclasses.replace(
        settings,
        score=score,  # type: ignore[arg-type]
        scale=scale,
        max_tokens=settings.max_tokens or MAX_TOKENS[score],
    )
    return Judge(complete, template.text, _criteria(score, complete, template))


def _criteria(
    score: str, settings: JudgeSettings, template: Template
) -> dict[str, tuple[float, float]]:
    """Returns the criteria of a judge: those of the options, of the question, or one "score"."""
    if score != "json":
        return {}
    assert settings.scale is not None
    return dict(settings.criteria or template.criteria or {"score": settings.scale})


def _check_scale(
    field: str, score: str, scale: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Returns the range of the numbers of an answer; None if its score has no numbers.

    Raises:
        InputError: If the range does not fit the score.
    """
    if score not in ("digits", "json"):
        if scale is not None:
            raise InputError(f"{field}.scale={list(scale)}: must be null with score={score}")
        return None
    low, high = scale or (1.0, 5.0)
    if not low < high:
        raise InputError(f"{field}.scale={[low, high]}: expected [LOWEST, HIGHEST]")
    if score == "digits" and not (low in range(10) and high in range(10)):
        raise InputError(f"{field}.scale={[low, high]}: expected two digits with score=digits")
    return low, high


def _check_criteria(field: str, score: str, settings: JudgeSettings) -> None:
    """Raises InputError if the criteria of the options do not fit the score."""
    if settings.criteria and score != "json":
        raise InputError(f"{field}.criteria: must be empty with score={score}")
    for name, (low, high) in settings.criteria.items():
        if not low < high or not name or name == "reward":
            raise InputError(
                f"{field}.criteria.{name}={[low, high]}: expected NAME: [LOWEST, HIGHEST]"
            )
