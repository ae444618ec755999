"""Types of configuration fields, the error for values outside them, and helpers that both use.

A field's annotation states which values it accepts. pydantic checks annotations when a
configuration is read from YAML or from overrides (`config.presets`). Rules between fields are
checked by the sections themselves (`config.schema`).
"""

import os
import re
import urllib.parse
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
)


class ConfigError(ValueError):
    """A configuration that cannot be used. A ValueError.

    The message is one line. For each problem it names the field, its value and what is accepted;
    several problems are joined by "; ".
    """

    @classmethod
    def of_field(cls, field: str, value: Any, accepted: str) -> "ConfigError":
        """The error for one field, which is returned and not raised: "FIELD=VALUE: ACCEPTED".

        Args:
            field: The dotted name of the field, e.g. "rollout.kept".
            value: The value that was given. Its `repr` is cut after 80 characters.
            accepted: What is accepted instead, as a phrase, e.g. "must be at least 2".
        """
        return cls(f"{field}={brief_repr(value)}: {accepted}")


def brief_repr(value: Any) -> str:
    """Returns `repr(value)` for use in a message, at most 80 characters long.

    Args:
        value: Any value. Of a longer `repr`, 77 characters and "..." stay.
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def expand_home(path: str) -> str:
    """Replaces a leading `~` or `~USER` in a path by the home directory, as a shell does.

    Shells do not do so after `=`, as in `run.dir=~/runs/x`.

    Args:
        path: A path. One that does not begin with `~` is returned as it is.

    Raises:
        ValueError: If there is no such user, or no home directory.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path:
        raise ValueError(f"no home directory of {path.partition('/')[0]} is known")
    return expanded


def contains_secret(name: str) -> bool:
    """Whether the name of a reward is a URL with credentials, which a run would record.

    Args:
        name: The name of a reward. Only names that contain "://" are URLs.

    Returns:
        True for a URL with an "@" (a user name or password) before its path, and for one whose
        query or fragment contains "key", "token", "secret", "pass", "auth" or "sig" in any case,
        also within a word.

    Raises:
        ValueError: If the name contains "://" and is no valid URL, e.g. for an open bracket.
    """
    if "://" not in name:
        return False
    url = urllib.parse.urlsplit(name)
    words = r"key|token|secret|pass|auth|sig"
    parameters = url.query + url.fragment
    return "@" in url.netloc or re.search(words, parameters, re.IGNORECASE) is not None


def _parse_number(value: Any) -> Any:
    """Converts integers and numeric text to float; other values stay as they are.

    YAML 1.1 reads numbers such as 1e-4 as text. Booleans stay, and so does whatever `float`
    refuses, among them integers beyond the range of a float: the field's type then refuses these.
    Text may also give infinity or NaN.

    Args:
        value: Any value.
    """
    if isinstance(value, bool | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _check_regex(pattern: str) -> str:
    """Returns the pattern unchanged.

    Args:
        pattern: A regular expression. "" is accepted.

    Raises:
        ValueError: If it is not a regular expression of Python's `re`.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    return pattern


def _check_pair(value: Any) -> Any:
    """Returns a value unchanged. The types of its two entries are not checked.

    Args:
        value: Any value; an image size is a list or tuple of height and width.

    Raises:
        ValueError: If it is not a list or tuple of two entries.
    """
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("expected [HEIGHT, WIDTH] in pixels")
    return value


def _wrap_single_size(value: Any) -> Any:
    """Accepts one size, [height, width], in place of a list with one size.

    Args:
        value: Any value.

    Returns:
        `[value]` for a list that is not empty and whose first entry is no list; any other value,
        also a tuple, as it is.
    """
    is_single = isinstance(value, list) and value and not isinstance(value[0], list)
    return [value] if is_single else value


MAX_SIDE = 2**14  # pixels of an image's height or width
MAX_TOKENS = 2**11  # tokens of one prompt
MAX_STEPS = 1000  # solver steps: the networks were trained on as many noise levels
MAX_NUMBER = 3.4e38  # the largest float32, about

Integer = Annotated[int, Strict(), Field(gt=-(2**31), lt=2**31)]  # an int32, as in JAX
NonNegativeInt = Annotated[Integer, Field(ge=0)]
PositiveInt = Annotated[Integer, Field(ge=1)]
Seed = Annotated[Integer, Field(ge=0, lt=2**31)]
NumSteps = Annotated[Integer, Field(ge=1, le=MAX_STEPS)]
Pixels = Annotated[Integer, Field(ge=1, le=MAX_SIDE)]
Size = Annotated[tuple[Pixels, Pixels], BeforeValidator(_check_pair)]  # height, width
Sizes = Annotated[tuple[Size, ...], Field(min_length=1), BeforeValidator(_wrap_single_size)]
Number = Annotated[float, Strict(), AllowInfNan(False), BeforeValidator(_parse_number)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(expand_home)]  # a path; `~` is expanded
Regex = Annotated[str, AfterValidator(_check_regex)]
Json = JsonValue


class Section:
    """Base class of all sections: frozen dataclasses whose annotations say what they accept.

    pydantic checks the annotations when a section is read from YAML or overrides, and refuses
    unknown keys. Calling the class directly checks neither type nor range of a value.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
