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
)
from solrl_jax.errors import InputError
from solrl_jax.rewards.judge.templates import Template, read_template
from solrl_jax.storage.stores import expand_home

Scale = Annotated[tuple[Number, Number], Field(strict=False)]
# Requests that need log-probabilities answer with one token.
MAX_TOKENS = {"digits": 1, "yes": 1, "preference": 1, "json": 256}
# Fields of a request that a judge sets itself.
RESERVED = (
    "model",
    "messages",
    "stream",
    "n",
    "seed",
    "temperature",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "response_format",
)
# A field whose name contains one of these words may hold a secret.
SECRETS = ("key", "token", "secret", "pass", "auth", "header")
# The field that limits the tokens of an answer at endpoints that refuse max_tokens.
MAX_COMPLETION_TOKENS = "max_completion_tokens"
# Fields of OpenAI, vLLM and SGLang that are no secrets, although their names contain "token".
TOKEN_FIELDS = (
    MAX_COMPLETION_TOKENS,
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
    "skip_special_tokens",
    "add_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)
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
# Options that do not affect scores. They may change between the starts of a run.
FREE = (
    "base_url",
    "api_key_env",
    "concurrency",
    "request_timeout",
    "retries",
    "cache",
)


def _check_base_url(url: str) -> str:
    """Checks the address of an endpoint, and returns it without trailing slashes.

    Args:
        url: The option `base_url`. It must begin with http:// or https:// and have a host, and it
            must have no white space, query, fragment, credentials or port 0.

    Raises:
        ConfigError: If it holds an "@", as after a user name or password, or a parameter (after "?"
            or "#") whose name looks like a secret (`contains_secret`). The message does not repeat
            the address.
        ValueError: If the address is not accepted for another reason.
    """
    expected = "expected http://HOST:PORT/v1"
    address = urllib.parse.urlsplit(url)
    # The scheme may have been forgotten.
    if "@" in url or contains_secret(url if "://" in url else f"http://{url}"):
        # A ConfigError is not followed by the value.
        raise ConfigError(
            f"base_url: {expected} without user name, password or token; see api_key_env"
        )
    if address.scheme not in ("http", "https") or not address.hostname or url.split() != [url]:
        raise ValueError(expected)
    if address.port == 0 or "?" in url or "#" in url:
        raise ValueError(expected)
    return url.rstrip("/")


def _check_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """Checks the names of the further fields of a request, and returns them unchanged.

    Args:
        extra: The option `extra`: values of JSON by the name of the field. Nested names are not
            checked.

    Raises:
        ConfigError: If the judge sets a field itself (`RESERVED`, e.g. "model", "seed" or
            "max_tokens"), or if a name looks like a secret: it contains, in any case of letters,
            "key", "token", "secret", "pass", "auth" or "header" and is no known field about tokens
            (`TOKEN_FIELDS`, e.g. "min_tokens"). The message does not repeat the value.
    """
    reserved = [name for name in extra if name in RESERVED]
    if reserved:
        raise ConfigError(f"extra.{reserved[0]}: is set by the judge itself")
    # A run records its configuration.
    others = [name for name in extra if name not in TOKEN_FIELDS]
    secret = [name for name in others if any(word in name.lower() for word in SECRETS)]
    if secret:
        raise ConfigError(
            f"extra.{secret[0]}: may be a secret; keys come from the environment or ~/.netrc"
        )
    return extra


def _check_variable(name: str) -> str:
    """Checks the name of the environment variable with the API key, and returns it unchanged.

    Args:
        name: The option `api_key_env`.

    Raises:
        ConfigError: If it is no identifier, because it may then be the key itself. The message does
            not repeat it.
    """
    if not name.isidentifier():
        raise ConfigError("api_key_env: expected the name of an environment variable, not a key")
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeSettings(Section):
    """The options of a judge, as `reward.options` has them under "judge" or "judge-NAME".

    A judge is a vision-language model behind an OpenAI-compatible endpoint, which is asked a
    question about each image. Types and ranges are checked when `open_judge` reads the options;
    calling the class checks nothing.

    Attributes:
        base_url: The address of the endpoint, e.g. "http://127.0.0.1:8000/v1", without query,
            fragment or credentials. Requests go to its /chat/completions.
        model: The name of the model at this endpoint.
        prompt: The question: "alignment", "alignment-digits", "text", "aesthetics", "rubric" or
            "preference", which the package has, or the path of a text file in which {prompt} stands
            for the prompt of the image. A leading `~` is expanded.
        score: How an answer is scored. "digits": the expected digit. "yes": the probability of yes
            against no. "preference": the probability that the first of two images is preferred.
            These use the log-probabilities of the first token. "json": the mean of the numbers in
            the answer's JSON. None: "yes" for the questions "alignment" and "text", "digits" for
            "alignment-digits" and "aesthetics", "json" for "rubric" and "preference" for
            "preference". The question of a file has no default and needs one of the four.
        scale: (lowest, highest) number of the answer, for "digits" (integers from 0 to 9) and for
            "json" without criteria. None: (1, 5). Must be None for "yes" and "preference", for
            "json" with `criteria`, and for "json" with the question "rubric".
        criteria: For "json": (lowest, highest) number of each criterion by its name, which is not
            empty and not "reward". Empty: the criteria alignment, coherence and style, from 1 to 5
            each, with the question "rubric"; a single criterion "score" with the range `scale` with
            any other question. Must be empty for the other scores.
        structured: Whether "json" asks the endpoint to follow the JSON schema of the criteria
            (`response_format`). No effect for the other scores.
        image_size: Longest side in pixels, 1 to 16384, of the images that are sent. Larger images
            are reduced to it. None: no image is resized.
        image_format: "png" without loss, or "jpeg" of quality 95, which is about a fifth of the
            size.
        max_tokens: Most tokens of an answer, at least 1. None: 256 for "json", else 1. Must be None
            if `extra` has max_completion_tokens; then no max_tokens is sent.
        seed: Seed of every request, from 0 to 2^31 - 1. The temperature is 0.
        extra: Further fields of the body of a request, values of JSON by name, e.g.
            chat_template_kwargs of vLLM. Fields that the judge sets itself (`RESERVED`, e.g.
            "model" or "seed") and names that look like secrets (with "key", "token", "auth", ...)
            are refused.
        concurrency: Most requests at once, 1 to 4096, of all worker processes of a host together.
            At least `reward.workers`: each process gets an equal part, rounded down.
        request_timeout: Seconds, above 0 and at most 1e6, until an unanswered request is sent
            again. `reward.timeout` bounds a whole call (up to 64 images, or all pairs of a group)
            with all its attempts.
        retries: How often, 0 to 100, a request is sent again if there is no connection, no answer
            within `request_timeout`, or the status 408, 409, 429 or 5xx.
        cache: Directory in which scores are stored, so that no request is paid for twice. "":
            `solrl_jax/judge` in the user's cache directory (XDG_CACHE_HOME, by default ~/.cache).
            A leading `~` is expanded. None: no cache.
        api_key_env: Name of the environment variable with the API key. None: OPENAI_API_KEY for
            openai.com and its subdomains, else JUDGE_API_KEY. An entry in ~/.netrc comes first.
    """

    base_url: Annotated[Text, AfterValidator(_check_base_url)]
    model: Text
    prompt: Annotated[Text, AfterValidator(expand_home)] = "alignment"
    score: Literal["digits", "yes", "json", "preference"] | None = None
    scale: Scale | None = None
    criteria: dict[str, Scale] = dataclasses.field(default_factory=dict, hash=False)
    structured: bool = True
    image_size: Pixels | None = None
    image_format: Literal["png", "jpeg"] = "png"
    max_tokens: PositiveInt | None = None
    seed: Seed = 0
    extra: Annotated[dict[str, Json], AfterValidator(_check_extra)] = dataclasses.field(
        default_factory=dict, hash=False
    )
    concurrency: Annotated[Integer, Field(ge=1, le=2**12)] = 16
    request_timeout: Annotated[Positive, Field(le=1e6)] = 60.0
    retries: Annotated[Integer, Field(ge=0, le=100)] = 4
    cache: Annotated[str, AfterValidator(expand_home)] | None = ""
    api_key_env: Annotated[str, AfterValidator(_check_variable)] | None = None


@dataclasses.dataclass(frozen=True)
class Judge:
    """A judge with its question: options that were checked and completed by `open_judge`.

    Attributes:
        settings: The options. `score` is never None. `max_tokens` is None only if `extra` has
            max_completion_tokens. `scale` is (lowest, highest) for "digits" and "json", and None
            for other scores. For "json" with criteria of the options or of the question, it is
            (1, 5) and has no effect on scores.
        question: The text of the question, in which {prompt} stands for the prompt of the image.
        criteria: For "json", (lowest, highest) of each criterion by its name; {"score": `scale`} if
            neither the options nor the question have criteria. Empty for other scores.
    """

    settings: JudgeSettings
    question: str
    criteria: dict[str, tuple[float, float]]

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the scores beside "reward": the criteria if there are several, else none."""
        return tuple(self.criteria) if len(self.criteria) > 1 else ()

    @property
    def compares(self) -> bool:
        """Whether the judge compares two images, instead of scoring each image alone."""
        return self.settings.score == "preference"

    def to_json(self) -> str:
        """Returns the judge as JSON text, which `from_json` reads back. It holds no API key."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Judge":
        """Returns the judge in a text that `to_json` returned.

        Args:
            text: JSON text with the keys "settings" (the options by name), "question", and
                "criteria" (pairs [lowest, highest] by name). The types and ranges of the options
                are checked again. The question and the criteria are not checked.

        Raises:
            ValueError: If the text is not JSON, or an option is not accepted (pydantic's
                ValidationError).
            KeyError: If a key is missing.
        """
        fields = json.loads(text)
        criteria = {name: (low, high) for name, (low, high) in fields["criteria"].items()}
        return cls(_SETTINGS.validate_python(fields["settings"]), fields["question"], criteria)

    def identity(self) -> dict[str, Any]:
        """Returns everything that a score depends on besides the images and the prompt, as JSON
        values.

        Returns:
            A dict with "question", "criteria" and the options in `IDENTITY`: "model", "score",
            "scale", "structured", "image_format", "max_tokens", "seed" and "extra". The endpoint is
            left out, because a name is assumed to mean the same model at every endpoint.
            `image_size` is left out, because the cache hashes the reduced pixels.
        """
        settings = dataclasses.asdict(self.settings)
        identity = {name: settings[name] for name in IDENTITY}
        return identity | {"question": self.question, "criteria": self.criteria}


_SETTINGS = pydantic.TypeAdapter(JudgeSettings)


def open_judge(name: str, options: Mapping[str, Any]) -> Judge:
    """Checks the options of a judge, and reads its question. No request is sent.

    Args:
        name: The name of the reward, for messages: "judge" or "judge-NAME".
        options: The options of the judge, values of JSON by the name of a field of `JudgeSettings`.
            "base_url" and "model" are required; the others have defaults.

    Returns:
        The judge: its options, in which `score`, `scale` and `max_tokens` are set where the
        question or the score decides their default; the text of the question; and its criteria.

    Raises:
        InputError: If an option is missing, unknown or not accepted; if `score` is None for a
            user's question; if `scale`, `criteria` or `max_tokens` is not allowed with the score or
            with `extra`; or if the question cannot be read (see `read_template`).
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
    if score == "json" and settings.scale is not None and (settings.criteria or template.criteria):
        raise InputError(
            f"{field}.scale={list(settings.scale)}: must be null with criteria, which have ranges "
            "of their own"
        )
    max_tokens = settings.max_tokens
    if MAX_COMPLETION_TOKENS not in settings.extra:
        max_tokens = max_tokens or MAX_TOKENS[score]
    elif max_tokens is not None:
        raise InputError(
            f"{field}.max_tokens={max_tokens}: must be null with extra.{MAX_COMPLETION_TOKENS}"
        )
    complete = dataclasses.replace(
        settings,
        score=score,  # type: ignore[arg-type]
        scale=scale,
        max_tokens=max_tokens,
    )
    return Judge(complete, template.text, _criteria(score, complete, template))


def _criteria(
    score: str, settings: JudgeSettings, template: Template
) -> dict[str, tuple[float, float]]:
    """Returns the criteria of the options if there are any, else of the question, else a default.

    Args:
        score: How answers are scored: "digits", "yes", "json" or "preference".
        settings: The options. For "json", their `scale` must be set.
        template: The question, with the criteria that the package gives it (only "rubric").

    Returns:
        For "json", a new dict with (lowest, highest) number of each criterion by its name; the
        default is {"score": `settings.scale`}. {} for the other scores.
    """
    if score != "json":
        return {}
    assert settings.scale is not None
    return dict(settings.criteria or template.criteria or {"score": settings.scale})


def _check_scale(
    field: str, score: str, scale: tuple[float, float] | None
) -> tuple[float, float] | None:
    """Checks the option `scale`, and returns the range of the numbers of an answer.

    Args:
        field: The dotted name of the options, for messages, e.g. "reward.options.judge".
        score: How answers are scored: "digits", "yes", "json" or "preference".
        scale: The option: (lowest, highest), or None.

    Returns:
        The option; (1, 5) if it is None, even for "json" with criteria. None for "yes" and
        "preference", whose answers have no numbers.

    Raises:
        InputError: If there is a range for "yes" or "preference"; if the first number is not below
            the second; or if, for "digits", they are not integers from 0 to 9.
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
    """Checks that the option `criteria` fits the way to score.

    Args:
        field: The dotted name of the options, for messages, e.g. "reward.options.judge".
        score: How answers are scored: "digits", "yes", "json" or "preference".
        settings: The options. Empty `criteria` pass with every score.

    Raises:
        InputError: If there are criteria and `score` is not "json"; or if a criterion has no name
            or the name "reward", or its lowest number is not below its highest.
    """
    if settings.criteria and score != "json":
        raise InputError(f"{field}.criteria: must be empty with score={score}")
    for name, (low, high) in settings.criteria.items():
        if not low < high or not name or name == "reward":
            raise InputError(
                f"{field}.criteria.{name}={[low, high]}: expected NAME: [LOWEST, HIGHEST]"
            )
