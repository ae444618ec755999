"""`ReleasedConfig`: the `config.json` of a released network as a frozen dataclass that refuses what a port does not support."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args

from solrl_jax.models.loading.tensor_files import read_json

C = TypeVar("C", bound="ReleasedConfig")
# No released network comes near these bounds.
# of any number; of floats that must be above 0
MOST = 2**24
SMALLEST = 1e-30
MOST_LAYERS = 256  # layers, and entries of a list
# stages of an autoencoder, and layers in one half of it
MOST_STAGES = 10
MOST_BUILT = 64
POSITIVE = ("eps", "ratio", "scaling_factor", "theta")


def unsupported(network: str, field: str, value: Any, accepted: str) -> ValueError:
    """The error for a field whose value a port does not support."""
    text = repr(value)
    return ValueError(
        f"{network}: {field}={text if len(text) <= 80 else text[:77] + '...'}; accepted: {accepted}"
    )


def with_rope_theta(network: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config of transformers 4 or 5, with `rope_theta` among them as transformers 4 has it.

    Raises ValueError for rotary positions that are not of the default kind.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    if not isinstance(rope := fields.get(name) or {}, Mapping):
        raise unsupported(network, name, rope, "a mapping")
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise unsupported(network, "rope_type", kind, "'default'")
    return {**fields, "rope_theta": rope["rope_theta"]} if "rope_theta" in rope else dict(fields)


@dataclasses.dataclass(frozen=True)
class ReleasedConfig:
    """The fields of a released `config.json` that a port reads, with their names and defaults there. Lists become tuples.

    `from_dict` checks each value against the field's annotation: `int` is a positive integer. A subclass checks the rest in
    `check`.
    """

    network: ClassVar[str]  # how messages call the network
    # A config of transformers says which kind of network it is for, and has fields that do not matter here: they are ignored.
    # A config of diffusers has no such name (""). Every unknown field is an error there, except notes, which begin with "_".
    model_type: ClassVar[str] = ""

    @classmethod
    def read(cls: type[C], folder: Path) -> C:
        """From the `config.json` in `folder`. Raises FileNotFoundError or ValueError."""
        try:
            return cls.from_dict(read_json(file := folder / "config.json"))
        except ValueError as error:
            raise ValueError(f"{file}: {error}".replace(f"{file}: {file}", str(file))) from error

    @classmethod
    def from_dict(cls: type[C], fields: Mapping[str, Any]) -> C:
        """From the contents of a `config.json`. Raises ValueError naming a field that is unknown or not supported."""
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        if (kind := fields.get("model_type", cls.model_type)) != cls.model_type:
            raise unsupported(cls.network, "model_type", kind, repr(cls.model_type))
        if not cls.model_type and (kind := fields.get("_class_name", cls.network)) != cls.network:
            raise unsupported(cls.network, "_class_name", kind, repr(cls.network))
        if not cls.model_type and (
            unknown := sorted(name for name in fields if name[0] != "_" and name not in kinds)
        ):
            raise ValueError(
                f"{cls.network}: unknown config field(s) {unknown}; known are {sorted(kinds)}"
            )
        given = {name: _frozen(value) for name, value in fields.items() if name in kinds}
        for name, value in given.items():
            if not _fits(value, kinds[name]):
                raise unsupported(cls.network, name, value, _described(kinds[name]))
            if isinstance(value, tuple) and len(value) > MOST_LAYERS:
                raise unsupported(
                    cls.network,
                    name,
                    value,
                    f"{_described(kinds[name])}, up to {MOST_LAYERS} of them",
                )
            most = MOST_LAYERS if "layer" in name else MOST
            least = 1 if type(value) is int else SMALLEST if name.endswith(POSITIVE) else -most
            if not all(least <= number <= most for number in _numbers(value)):
                raise unsupported(
                    cls.network, name, value, f"{_described(kinds[name])} above 0, up to {most}"
                )
        return cls(**given)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError naming a field whose value is not supported."""

    def require(self, ok: bool, field: str, accepted: str) -> None:
        """Raises ValueError for the value of `field` unless `ok`."""
        if not ok:
            raise unsupported(self.network, field, getattr(self, field), accepted)

    def require_one_of(self, field: str, accepted: tuple[Any, ...]) -> None:
        """Raises ValueError unless the value of `field` is accepted; of a tuple, every value in it."""
        value = getattr(self, field)
        values = value if isinstance(value, tuple) else (value,)
        self.require(all(v in accepted for v in values), field, ", ".join(map(repr, accepted)))


@dataclasses.dataclass(frozen=True)
class TransformerConfig(ReleasedConfig):
    """The fields of a released `transformer/config.json`: those that all have. Each network adds its own, and the defaults."""

    in_channels: int
    out_channels: int | None
    attention_head_dim: int
    num_attention_heads: int

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def features_out(self) -> int:
        return self.in_channels if self.out_channels is None else self.out_channels


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [number for one in value for number in _numbers(one)]
    return [value] if type(value) in (int, float) else []


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of the annotated kind. A truth value is no integer, but an integer is a float."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_args(kind):  # tuple[kind, ...]
        return isinstance(value, tuple) and all(_fits(v, get_args(kind)[0]) for v in value)
    if kind is float:
        return type(value) in (float, int)
    return type(value) is (type(None) if kind is None else kind)


def _described(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(map(_described, get_args(kind)))
    if get_args(kind):
        return "a list of " + {int: "integers", str: "strings"}.get(get_args(kind)[0], "lists")
    names = {int: "a positive integer", bool: "True, False", float: "a number", str: "a string"}
    return names.get(kind, "None")
