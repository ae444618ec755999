"""Types of configuration fields, the error for values outside them, and helpers that both use.

A field's annotation states which values it accepts. pydantic checks annotations when a
configuration is read from YAML or from overrides (`config.presets`). Rules between fields are
checked by the sections themselves (`config.schema`).
"""

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

from solrl_jax.storage.stores import expand_home

# Parts of the names of URL parameters that hold secrets, as a regular expression.
SECRET_WORDS = "key|token|secret|pass|auth|signature"


class ConfigError(ValueError):
    """The error for a configuration that cannot be used.

    The message is one line. For each invalid field it gives the name, the value and the accepted
    values, with "; " between fields. URLs in the value lose what seems to be a secret
    (`brief_repr`). If several rules between the fields of a section are broken, the message reports
    only the first.
    """

    @classmethod
    def of_field(cls, field: str, value: Any, accepted: str) -> "ConfigError":
        """Returns (and does not raise) the error for one field: "FIELD=VALUE: ACCEPTED".

        Args:
            field: The dotted name of the field, e.g. "rollout.kept".
            value: The value that was given. The message shows it, without secrets in URLs.
            accepted: What is accepted, as a phrase, e.g. "must be at least 2".
        """
        return cls(f"{field}={brief_repr(value)}: {accepted}")


def brief_repr(value: Any) -> str:
    """Returns `repr(value)` for error messages; a text above 80 characters is cut to its first 77
    and "...".

    In URLs, "..." also takes the place of a user name and password before the host, and of the
    values of parameters whose names look like secrets (`contains_secret`).

    Args:
        value: Any value.
    """
    text = repr(value)[:2000]  # more would take long, and is cut below
    text = re.sub(r"://[^/?#@\s]*@", "://...@", text)
    parameter = rf"([?&;#](?:sig|[\w.-]*(?:{SECRET_WORDS})[\w.-]*)=)[^&;#\s'\"]+"
    text = re.sub(parameter, r"\1...", text, flags=re.IGNORECASE)
    return text if len(text) <= 80 else text[:77] + "..."


def contains_secret(name: str) -> bool:
    """Returns whether the name of a reward is a URL that seems to contain a password or a token.

    That is a user name or password before the host, or a parameter (after "?" or "#") whose name
    contains "key", "token", "secret", "pass", "auth" or "signature", also within a word, or is
    "sig", in any case of letters. A parameter without "=" counts as a name. A run records its
    configuration, so such URLs are refused.

    Args:
        name: The name of a reward. If it contains no "://", the result is False.

    Raises:
        ValueError: If it is an invalid URL.
    """
    if "://" not in name:
        return False
    url = urllib.parse.urlsplit(name)
    parameters = re.split("[&;?]", f"{url.query}&{url.fragment}")
    names = [parameter.partition("=")[0] for parameter in parameters]
    return "@" in url.netloc or any(
        re.search(f"{SECRET_WORDS}|^sig$", name, re.IGNORECASE) for name in names
    )


def _parse_number(value: Any) -> Any:
    """Returns integers and text such as "1e-4", which YAML 1.1 reads as text, as float. A pydantic
    validator.

    Args:
        value: Any value. A float is returned as it is. A bool, or a value that `float` cannot
            convert, is returned as it is too, and pydantic then refuses it. "nan" and "inf" become
            floats, which `Number` refuses.
    """
    if isinstance(value, bool | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _check_regex(pattern: str) -> str:
    """Returns a regular expression unchanged, as a pydantic validator.

    Args:
        pattern: The regular expression.

    Raises:
        ValueError: If it is not a valid one.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    return pattern


def _check_size(value: Any) -> Any:
    """Checks that a size has two or three entries, as a pydantic validator.

    Args:
        value: The size as the user gave it, [height, width], or [height, width, frames] of a clip.

    Returns:
        `value`, unchanged.

    Raises:
        ValueError: If it is not a list or tuple of two or three entries.
    """
    if not isinstance(value, list | tuple) or len(value) not in (2, 3):
        raise ValueError("expected [HEIGHT, WIDTH] in pixels, or [HEIGHT, WIDTH, FRAMES]")
    return value


def _wrap_single_size(value: Any) -> Any:
    """Puts a single image size into a list, where a list of sizes is expected. A pydantic
    validator.

    Args:
        value: The sizes as the user gave them: one size, [height, width] or [height, width,
            frames], or a list of such lists.

    Returns:
        A list with the size if `value` is a single size, i.e. a nonempty list whose first entry is
        not a list. Any other value as it is. A tuple counts as a tuple of sizes.
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
# height, width and, for clips, the number of frames
Size = Annotated[tuple[Pixels, ...], BeforeValidator(_check_size)]
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
    """Base class of the sections of a configuration, which are frozen dataclasses. With it,
    pydantic refuses fields that a section does not have.

    The annotation of each field says which values it accepts. pydantic checks them when a
    configuration is read from YAML or from overrides. Calling the class checks only the rules
    between fields that some sections have (`__post_init__`, which raises ConfigError).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
