"""`ReleasedConfig`: the `config.json` of a released network as a frozen dataclass.

A port supports some of the values that a field may have in diffusers or transformers. Every other
value is an error, so that a network is never built differently from what its configuration says.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args

from solrl_jax.models.loading.tensor_files import read_json

C = TypeVar("C", bound="ReleasedConfig")

MAX_SHOWN = 80  # characters of a value in an error message


def unsupported(network: str, field: str, value: Any, accepted: str) -> ValueError:
    """Returns, and does not raise, the error for a field whose value a port does not support.

    Args:
        network: name of the network or file that the field belongs to.
        field: name of the field.
        value: its value. The message shows its `repr`, cut to 80 characters (`MAX_SHOWN`).
        accepted: description of the supported values.

    Returns:
        A ValueError with the message "NETWORK: FIELD=VALUE; accepted: ACCEPTED".
    """
    text = repr(value)
    if len(text) > MAX_SHOWN:
        text = text[: MAX_SHOWN - 3] + "..."
    return ValueError(f"{network}: {field}={text}; accepted: {accepted}")


def with_rope_theta(network: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a transformers configuration with `rope_theta` at the top level.

    Transformers 4 has `rope_theta` there; transformers 5 has it inside `rope_parameters`. The
    mapping `rope_parameters` is read if it is not empty, otherwise `rope_scaling`. Its `rope_theta`
    replaces one at the top level. If it has none, the fields stay as they are.

    Args:
        network: name of the network, for the error message.
        fields: contents of a `config.json`. They are not changed.

    Returns:
        A new dictionary. `rope_theta` may be missing in it if it is nowhere in `fields`.

    Raises:
        ValueError: `rope_parameters`, or `rope_scaling` where that is read, is not a mapping; or
            the kind of rotary embedding in it (`rope_type`, or `type` if there is no `rope_type`)
            is not "default".
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rope = fields.get(name) or {}
    if not isinstance(rope, Mapping):
        raise unsupported(network, name, rope, "a mapping")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise unsupported(network, "rope_type", kind, "'default'")
    if "rope_theta" in rope:
        return {**fields, "rope_theta": rope["rope_theta"]}
    return dict(fields)


@dataclasses.dataclass(frozen=True)
class ReleasedConfig:
    """The fields of a released `config.json` that a port reads, with the names and defaults that
    they have there.

    `from_dict` checks each value against the annotation of its field; `int` means a positive
    integer, and lists become tuples. A subclass checks everything else in `check`.

    Attributes:
        network: name of the network's class in diffusers or transformers.
        model_type: `model_type` of a transformers configuration, or "" for diffusers. A
            transformers configuration has many fields that do not matter here, and unknown ones are
            ignored. In a diffusers configuration, every unknown field is an error, except for
            notes, whose names begin with "_".
    """

    network: ClassVar[str]
    model_type: ClassVar[str] = ""

    @classmethod
    def read(cls: type[C], folder: Path) -> C:
        """Reads the `config.json` of a component's folder.

        Args:
            folder: the folder.

        Returns:
            The configuration, whose fields have been checked (`from_dict`).

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a JSON object, or a field is unknown or not supported; the
                message names file and field.
            TypeError: a field that has no default is missing.
        """
        file = folder / "config.json"
        fields = read_json(file)
        try:
            return cls.from_dict(fields)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls: type[C], fields: Mapping[str, Any]) -> C:
        """Makes a configuration from the contents of a `config.json`.

        Missing fields keep their defaults. Lists become tuples at all levels. The value of a field
        may be no integer below 1, not even where its type is float.

        Args:
            fields: the contents. `_class_name` (diffusers) or `model_type` (transformers) must be
                that of the network where it is present. Unknown fields are ignored for
                transformers, and for diffusers if their names begin with "_".

        Returns:
            The configuration, whose fields have been checked.

        Raises:
            ValueError: a field is unknown or not supported, the network is another one, or
                `quantization_config` is set; the message names the field.
            TypeError: a field that has no default is missing.
        """
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        if fields.get("quantization_config"):
            raise ValueError(
                f"{cls.network}: has a quantization_config; quantized checkpoints are not read, "
                "accepted: weights in BF16, FP16 or float32"
            )
        if cls.model_type:
            model_type = fields.get("model_type", cls.model_type)
            if model_type != cls.model_type:
                raise unsupported(cls.network, "model_type", model_type, repr(cls.model_type))
        else:
            class_name = fields.get("_class_name", cls.network)
            if class_name != cls.network:
                raise unsupported(cls.network, "_class_name", class_name, repr(cls.network))
            unknown = sorted(
                name for name in fields if not name.startswith("_") and name not in types
            )
            if unknown:
                raise ValueError(
                    f"{cls.network}: unknown config field(s) {unknown}; known are {sorted(types)}"
                )
        values = {}
        for name, value in fields.items():
            if name in types:
                value = _as_tuple(value)
                not_positive = type(value) is int and value < 1
                if not_positive or not _matches(value, types[name]):
                    raise unsupported(cls.network, name, value, _describe(types[name]))
                values[name] = value
        return cls(**values)

    def __post_init__(self) -> None:
        """Checks the values of the fields as `check` does.

        Raises:
            ValueError: a value is not supported; the message names the field.
        """
        self.check()

    def check(self) -> None:
        """Checks the values of the fields. Subclasses override it; here it does nothing.

        The constructor calls it.

        Raises:
            ValueError: a value is not supported; the message names the field.
        """

    def require(self, condition: bool, field: str, accepted: str) -> None:
        """Checks a field by a condition that the caller has computed.

        Args:
            condition: whether the value of the field is supported.
            field: name of the field, whose value is shown in the message.
            accepted: description of the supported values, which ends the message.

        Raises:
            ValueError: the condition is false; the message names the field and its value.
        """
        if not condition:
            raise unsupported(self.network, field, getattr(self, field), accepted)

    def require_one_of(self, field: str, accepted: tuple[Any, ...]) -> None:
        """Checks that a field has one of some values.

        If the field holds a tuple, every entry must be one of them; an empty tuple passes.

        Args:
            field: name of the field, an attribute of this configuration.
            accepted: the supported values, which the message lists by their `repr`.

        Raises:
            ValueError: the value, or an entry of the tuple, is none of them. The message names the
                field, shows its value and lists the supported ones.
        """
        value = getattr(self, field)
        values = value if isinstance(value, tuple) else (value,)
        self.require(all(v in accepted for v in values), field, ", ".join(map(repr, accepted)))


@dataclasses.dataclass(frozen=True)
class TransformerConfig(ReleasedConfig):
    """The fields that the diffusion transformers of diffusers have in common
    (`transformer/config.json`).

    Attributes:
        in_channels: channels of the input.
        out_channels: channels of the output; None: as many as `in_channels`.
        attention_head_dim: features of one attention head.
        num_attention_heads: number of attention heads.
    """

    in_channels: int
    out_channels: int | None
    attention_head_dim: int
    num_attention_heads: int

    @property
    def width(self) -> int:
        """Width of the tokens: number of heads times features per head."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def features_out(self) -> int:
        """Number of output channels; `out_channels` None means as many as input channels."""
        return self.in_channels if self.out_channels is None else self.out_channels


def _as_tuple(value: Any) -> Any:
    """Converts a list to a tuple, and lists in it likewise, at all levels.

    Args:
        value: a value of a JSON object.

    Returns:
        The tuple. Any other value is returned unchanged, even an object that contains lists.
    """
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _matches(value: Any, annotation: Any) -> bool:
    """Whether a value is of an annotated type. An integer is also a float; a bool is neither.

    A tuple matches if all its entries do, so an empty tuple matches every tuple type. Values are
    not checked here: an `int` may be zero or negative.

    Args:
        value: the value of a field, with tuples in place of lists.
        annotation: its type: int, float, str, bool, None, tuple[TYPE, ...], a union of these, or
            another class, of which the value must be an instance (not of a subclass).

    Returns:
        True if the value is of the type.
    """
    if isinstance(annotation, UnionType):
        return any(_matches(value, option) for option in get_args(annotation))
    if get_args(annotation):  # tuple[type, ...]
        item = get_args(annotation)[0]
        return isinstance(value, tuple) and all(_matches(v, item) for v in value)
    if annotation is float:
        return type(value) in (float, int)
    return type(value) is (type(None) if annotation is None else annotation)


def _describe(annotation: Any) -> str:
    """Describes the values of an annotated type, for error messages.

    For example "a positive integer" for int, "a list of strings" for tuple[str, ...], "a list of
    lists" for a tuple of anything else than int and str, and the descriptions of the options joined
    by " or " for a union. A class that is none of the basic types is described as "None".

    Args:
        annotation: int, float, str, bool, None, tuple[TYPE, ...], a union of these, or a class.

    Returns:
        The description, which ends the message "NETWORK: FIELD=VALUE; accepted: ".
    """
    if isinstance(annotation, UnionType):
        return " or ".join(map(_describe, get_args(annotation)))
    if get_args(annotation):
        items = {int: "integers", float: "numbers", str: "strings", bool: "True or False"}
        return "a list of " + items.get(get_args(annotation)[0], "lists")
    names = {int: "a positive integer", bool: "True, False", float: "a number", str: "a string"}
    return names.get(annotation, "None")
