"""What sections of a configuration are made of: types of fields that say their range, rules between fields, messages."""

import re
import urllib.parse
from typing import Annotated, Any

import regex
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
)

from solrl_jax.storage.readers import strict


class ConfigError(ValueError):
    """What is wrong with a configuration, in one line; several problems are joined by '; '."""


def _number(value: Any) -> Any:
    """Lets an int, and text such as '1e-4' which YAML 1.1 does not read as a number, pass for a float; not a bool."""
    try:
        return value if isinstance(value, bool | float) else float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _normal(number: float) -> float:
    if 0 < abs(number) < LEAST_NUMBER:
        raise ValueError(f"is nearer to 0 than {LEAST_NUMBER:.2g}, the least that float32 holds")
    return number


def _regex(pattern: str) -> str:
    try:
        regex.compile(pattern)  # as `matches` reads it
    except (regex.error, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    return pattern


def _finite(value: Any) -> Any:
    if strict(value) != value:
        raise ValueError("must be finite, and hold no number that is not")
    return value


def _plain(text: str) -> str:
    if "\0" in text or text.encode(errors="replace").decode() != text:
        raise ValueError("must be text that a file's name can hold")
    return text


def _pair(value: Any) -> Any:
    if not (isinstance(value, list | tuple) and len(value) == 2):
        raise ValueError("expected [HEIGHT, WIDTH] in pixels")
    return value


def _listed(value: Any) -> Any:
    """Lets one size pass for a list of one."""
    return (
        [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value
    )


# of an image in pixels; of a prompt; of one prompt
MAX_SIDE = 2**14
MAX_TOKENS = 2**11
MOST_PICTURES = 2**16
MAX_STEPS = 1000  # of a solver: networks are trained on as many levels of noise
# what float32 holds in full, but for 0
MAX_NUMBER = 3.4e38
LEAST_NUMBER = 2.0**-126

Integer = Annotated[int, Strict(), Field(gt=-(2**31), lt=2**31)]
Natural = Annotated[Integer, Field(ge=0)]
Count = Annotated[Integer, Field(ge=1)]
Seed = Annotated[Integer, Field(ge=0, lt=2**31)]
Steps = Annotated[Integer, Field(ge=1, le=MAX_STEPS)]
Side = Annotated[Integer, Field(ge=1, le=MAX_SIDE)]
Size = Annotated[
    tuple[Side, Side], BeforeValidator(_pair)
]  # height and width of a picture in pixels
Sizes = Annotated[tuple[Size, ...], Field(min_length=1), BeforeValidator(_listed)]
Many = Annotated[Integer, Field(ge=1, le=MOST_PICTURES)]
Number = Annotated[
    float,
    Strict(),
    AllowInfNan(False),
    Field(ge=-MAX_NUMBER, le=MAX_NUMBER),
    BeforeValidator(_number),
    AfterValidator(_normal),
]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Flag = Annotated[bool, Strict()]
Json = Annotated[JsonValue, AfterValidator(_finite)]
Free = Annotated[str, AfterValidator(_plain)]
Text = Annotated[Free, Field(min_length=1)]
Regex = Annotated[str, AfterValidator(_regex)]


def contains_secret(name: str) -> bool:
    """Whether the address of a service holds a user's name, a password, or a query that looks like a token."""
    address = urllib.parse.urlsplit(name) if "://" in name else urllib.parse.urlsplit("")
    words = r"key|token|secret|pass|auth|sig"
    return (
        "@" in address.netloc
        or re.search(words, address.query + address.fragment, re.IGNORECASE) is not None
    )


def matches(pattern: str, path: str, field: str) -> bool:
    """Whether a regular expression matches a whole path. Raises ConfigError for one that backtracks without end."""
    try:
        return (
            regex.fullmatch(pattern, path, timeout=0.25) is not None
        )  # seconds; `re` has no limit
    except TimeoutError:
        why = f"tries too many ways to match {path}; write it with fewer repetitions"
        raise ConfigError(f"{field}: {pattern!r} {why}") from None


def brief_repr(value: Any) -> str:
    """A value as messages quote it."""
    try:
        text = repr(value)
    except (
        ValueError,
        RecursionError,
    ):  # an integer of thousands of digits, or lists of thousands of levels
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


class Section:
    """Base of all sections: refuses unknown keys."""

    __pydantic_config__ = ConfigDict(extra="forbid")


def check(*rules: tuple[bool, str, Any, str]) -> None:
    """Each rule is (holds, field, value, what is accepted). Raises ConfigError listing all that do not hold."""
    if broken := [
        f"{field}={brief_repr(value)}: {accepted}"
        for holds, field, value, accepted in rules
        if not holds
    ]:
        raise ConfigError("; ".join(broken))
