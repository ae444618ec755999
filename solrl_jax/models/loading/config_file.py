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
        value: its value, which the message shows in Python's notation, cut to 80 characters.
        accepted: description of the supported values, for the message.

    Returns:
        A ValueError with the message "NETWORK: FIELD=VALUE; accepted: ACCEPTED".
    """
    text = repr(value)
    if len(text) > MAX_SHOWN:
        text = text[: MAX_SHOWN - 3] + "..."
    return ValueError(f"{network}: {field}={text}; accepted: {accepted}")


def with_rope_theta(network: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a transformers configuration with `rope_theta` (the base of the rotary
    frequencies) at the top level.

    Transformers 4 stores it there, transformers 5 inside the mapping `rope_parameters`. If that
    mapping is missing or empty, `rope_scaling` is read in its place. A value inside the mapping
    takes precedence over one at the top level.

    Args:
        network: name of the network, for the error message.
        fields: contents of a `config.json`, which are not changed.

    Returns:
        A new dictionary with all entries of `fields`. It has no `rope_theta` if `fields` has none
        in any of these places.

    Raises:
        ValueError: the mapping asks for another rotary embedding than "default" (by `rope_type`,
            or `type` in older files); or the field that is read holds something other than a
            mapping.
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
    """Base class: the fields of a released `config.json` that a network reads, with the names and
    defaults that they have in diffusers or transformers.

    `from_dict` checks each value against the annotation of its field, where `int` means a positive
    integer. A subclass declares the fields and checks everything else in `check`, which the
    constructor calls.

    Attributes:
        network: name of the network's class in diffusers or transformers.
        model_type: for a network of transformers, its `model_type`; unknown fields of a file are
            then ignored. "" for a network of diffusers; unknown fields are then errors, except
            notes, whose names begin with "_", and `ignored_fields`.
        ignored_fields: names of fields of released files that diffusers ignores as well.
    """

    network: ClassVar[str]
    model_type: ClassVar[str] = ""
    ignored_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls: type[C], folder: Path) -> C:
        """Reads and checks the `config.json` in a folder.

        Args:
            folder: the folder of the network (of a model's transformer, for example).

        Returns:
            The configuration.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file cannot be read, is not a JSON object, belongs to another network,
                has a field that is unknown or not supported, or has a `quantization_config` that is
                not empty. The message names the file, and the field if there is one.
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
        """Makes a configuration from the contents of a `config.json`, and checks it.

        Missing fields get their defaults. Lists become tuples at all levels. An integer below 1 is
        an error, except inside a list or in a field that takes floats.

        Args:
            fields: the contents. If `_class_name` (diffusers) or `model_type` (transformers) is
                among them, it must be that of the network. For transformers, unknown fields are
                ignored; for diffusers, only those whose names begin with "_" or are in
                `ignored_fields`.

        Returns:
            The configuration.

        Raises:
            ValueError: a field is unknown or has an unsupported value, the contents are those of
                another network, or `quantization_config` is neither None nor empty. The message
                names the field.
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
            known = (*types, *cls.ignored_fields)
            unknown = sorted(
                name for name in fields if not name.startswith("_") and name not in known
            )
            if unknown:
                raise ValueError(
                    f"{cls.network}: unknown config field(s) {unknown}; known are {sorted(types)}"
                )
        values = {}
        for name, value in fields.items():
            if name in types:
                value = _as_tuple(value)
                takes_floats = _matches(0.0, types[name])
                not_positive = type(value) is int and value < 1 and not takes_floats
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
        """Checks the values of the fields beyond their types. A subclass overrides it; here it does
        nothing.

        The constructor calls it. `from_dict` has checked the types before; the constructor itself
        does not.

        Raises:
            ValueError: a value is not supported; the message names the field.
        """

    def require(self, condition: bool, field: str, accepted: str) -> None:
        """Raises the error for an unsupported value of a field unless `condition` is true.

        Args:
            condition: whether the value of the field is supported.
            field: name of the field, for the message, which also shows its value.
            accepted: description of the supported values, for the message.

        Raises:
            ValueError: the condition is false.
        """
        if not condition:
            raise unsupported(self.network, field, getattr(self, field), accepted)

    def require_one_of(self, field: str, accepted: tuple[Any, ...]) -> None:
        """Checks that a field has one of the supported values. If it holds a tuple, every entry
        must be one of them.

        Args:
            field: name of the field, an attribute of this configuration.
            accepted: the supported values.

        Raises:
            ValueError: a value is not supported. The message names the field and lists the
                supported values.
        """
        value = getattr(self, field)
        values = value if isinstance(value, tuple) else (value,)
        self.require(all(v in accepted for v in values), field, ", ".join(map(repr, accepted)))


@dataclasses.dataclass(frozen=True)
class TransformerConfig(ReleasedConfig):
    """Base class: the fields that the diffusion transformers of diffusers have in common
    (`transformer/config.json`).

    Attributes:
        in_channels: number of channels of the input: of a latent, or of a patch of latent pixels,
            depending on the model.
        out_channels: number of channels of the output; None: as many as `in_channels`.
        attention_head_dim: number of features of one attention head.
        num_attention_heads: number of attention heads.
    """

    in_channels: int
    out_channels: int | None
    attention_head_dim: int
    num_attention_heads: int

    @property
    def width(self) -> int:
        """Number of features of a token: `num_attention_heads * attention_head_dim`."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def num_out_channels(self) -> int:
        """Number of output channels: `out_channels`, or `in_channels` if that is None."""
        return self.in_channels if self.out_channels is None else self.out_channels


def _as_tuple(value: Any) -> Any:
    """Converts a list to a tuple, and the lists in it too, at all levels.

    Args:
        value: any value of a JSON file.

    Returns:
        The tuple. A value that is not a list is returned unchanged.
    """
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _matches(value: Any, annotation: Any) -> bool:
    """Whether a value has an annotated type. An integer counts as a float; a bool counts as
    neither.

    A tuple matches if all its entries do. Only types are checked: an `int` may be negative.

    Args:
        value: the value of a field, with tuples in place of lists.
        annotation: the type: int, float, str, bool, None, tuple[TYPE, ...] or a union of these.

    Returns:
        True if the value has the type.
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
    """Describes the values of an annotated type, for error messages: for example "a positive
    integer" for int, or "a list of strings" for tuple[str, ...].

    None is "None". The options of a union are joined by " or ". An integer is called positive
    because `ReleasedConfig.from_dict` refuses integers below 1 outside of lists.

    Args:
        annotation: int, float, str, bool, None, tuple[TYPE, ...], or a union of these.

    Returns:
        The description, for the end of the message "NETWORK: FIELD=VALUE; accepted: ".
    """
    if isinstance(annotation, UnionType):
        return " or ".join(map(_describe, get_args(annotation)))
    if get_args(annotation):
        items = {int: "integers", float: "numbers", str: "strings", bool: "True or False"}
        return "a list of " + items.get(get_args(annotation)[0], "lists")
    names = {int: "a positive integer", bool: "True, False", float: "a number", str: "a string"}
    return names.get(annotation, "None")
