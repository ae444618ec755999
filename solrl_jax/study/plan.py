"""What a study trains: arms, which are settings of one preset, each with several seeds. Plans are files in `configs/study/`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import pydantic
import yaml
from pydantic import Field

from solrl_jax.config.overrides import text_override
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.validation import describe_error, field_names
from solrl_jax.config.values import ConfigError, Section, Seed, Text, brief_repr
from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.readers import MOST_YAML, parse_yaml, read_text

_CARRIED = Path(__file__).parents[1] / "configs" / "study"
MOST_RUNS = 1000  # of a study
ArmName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=60)
]  # a part of a directory's name
Overrides = tuple[Text, ...]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quick(Section):
    """What a quick study changes. overrides: after those of the arms."""

    seeds: Seeds
    overrides: Overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Section):
    """Arms by name, each a list of `key=value`, and what is compared."""

    what: Text  # for the page, in a sentence
    preset: Text
    overrides: Overrides  # of every arm
    arms: Annotated[dict[ArmName, Overrides], Field(min_length=1)]
    seeds: Seeds
    compared: tuple[tuple[ArmName, ArmName], ...]  # an arm and the one that it is measured against
    sweeps: dict[
        Text, tuple[ArmName, ...]
    ]  # a setting, and arms that differ in it: a panel of the figure
    quick: Quick

    def __post_init__(self) -> None:
        named = {name for pair in self.compared for name in pair} | {
            name for arms in self.sweeps.values() for name in arms
        }
        if missing := sorted(named - self.arms.keys()):
            raise ConfigError(
                f"compared and sweeps: no arm {missing[0]!r}; there are {', '.join(self.arms)}"
            )
        if itself := [name for name, other in self.compared if name == other]:
            raise ConfigError(f"compared: {itself[0]!r} with itself")
        for seeds in (self.seeds, self.quick.seeds):
            if len(set(seeds)) < len(seeds):
                raise ConfigError(f"seeds={brief_repr(list(seeds))}: must differ")
            if (runs := len(self.arms) * len(seeds)) > MOST_RUNS:
                raise ConfigError(
                    f"seeds: {runs} runs of {len(self.arms)} arms; must be at most {MOST_RUNS}"
                )


@dataclasses.dataclass(frozen=True)
class Run:
    """An arm with a seed. arguments: of `solrl train`."""

    arm: str
    config: Config
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.config.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


def plan_names() -> list[str]:
    """The plans that the package carries."""
    return sorted(path.stem for path in _CARRIED.glob("*.yaml"))


def read_plan(name: str) -> Plan:
    """A plan that the package carries, or a YAML file. Raises InputError or ConfigError, in one line."""
    path = _CARRIED / f"{name}.yaml" if name in plan_names() else Path(name)
    try:
        tree = parse_yaml(read_text(path, MOST_YAML))
    except FileNotFoundError:
        raise InputError(
            f"{name!r}: no file, and no plan of the package ({', '.join(plan_names())})"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML ({first_line(error)})") from error
    try:
        return pydantic.TypeAdapter(Plan).validate_python(tree)
    except pydantic.ValidationError as errors:

        def unknown(key):
            return f"unknown key '{key}': expected one of {', '.join(f.name for f in dataclasses.fields(Plan))}"

        found = (describe_error(error, "a plan", unknown) for error in errors.errors())
        raise ConfigError("; ".join(f"{path}: {text}" for text in found if text)) from None


def runs_of(plan: Plan, out: Path, quick: bool, overrides: tuple[str, ...]) -> list[Run]:
    """All runs, in directories `out/ARM-SEED`: the first seed of every arm, then the second. Raises ConfigError."""
    last = (*(plan.quick.overrides if quick else ()), *overrides)
    problems = [
        f"sweeps: {setting} is no setting"
        for setting in plan.sweeps
        if setting not in field_names()
    ]
    given = (*plan.overrides, *(setting for own in plan.arms.values() for setting in own), *last)
    problems += [
        f"{setting}: a study sets it itself"
        for setting in given
        if setting.split("=")[0].strip() in ("seed", "run.dir")
    ]
    runs: list[Run] = []
    for seed in plan.quick.seeds if quick else plan.seeds:
        for arm, own in plan.arms.items():
            arguments = (
                *plan.overrides,
                *own,
                *last,
                f"seed={seed}",
                text_override("run.dir", str(out / f"{arm}-{seed}")),
            )
            try:
                runs.append(Run(arm, resolve(plan.preset, arguments), (plan.preset, *arguments)))
            except ConfigError as error:
                problems.append(f"arm {arm}: {error}")
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return runs
