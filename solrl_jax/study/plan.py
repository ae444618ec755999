"""The plan of a study: arms, which are settings of one preset, each trained with several seeds.

Plans are YAML files in `configs/study/`.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import pydantic
import yaml
from pydantic import Field

from solrl_jax.config.overrides import quote_override
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.validation import describe_error, field_names
from solrl_jax.config.values import ConfigError, Section, Seed, Text, brief_repr
from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.readers import MOST_YAML, parse_yaml, read_text

_CARRIED = Path(__file__).parents[1] / "configs" / "study"
MAX_RUNS = 1000  # the largest number of runs of a study
# The name of an arm, which is part of a directory's name.
ArmName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=60)]
Overrides = tuple[Text, ...]
Seeds = Annotated[tuple[Seed, ...], Field(min_length=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quick(Section):
    """The changes that make a study quick, so that a plan can be tried. Both fields are required.

    Attributes:
        seeds: The seeds of every arm, from 0 to 2**31 - 1, at least one and no two equal, in place
            of the plan's.
        overrides: A list of overrides `key=value` of every arm. They win over the overrides of the
            plan and of the arm.
    """

    # The seeds of every arm.
    seeds: Seeds
    # Overrides `key=value` that follow those of the arms.
    overrides: Overrides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Section):
    """The arms of a study and their comparisons. All fields are required. A ConfigError is raised
    for names of arms that are not in `arms`, an arm compared with itself, repeated seeds, and more
    than `MAX_RUNS` (1000) runs of the study or its quick version.

    Attributes:
        what: One sentence about the study, for its page.
        preset: The name of the preset that all arms start from.
        overrides: A list of overrides `key=value` of every arm.
        arms: By the name of each arm, at least one, a list of its further overrides, which win over
            `overrides`. A name has up to 60 ASCII letters, digits, "_", "." and "-", of which the
            first is a letter or digit.
        seeds: The seeds that every arm is trained with, from 0 to 2**31 - 1, at least one and no
            two equal.
        compared: Pairs (arm, the arm that it is compared with).
        sweeps: By the dotted name of a setting, the names of arms that differ in it (which is not
            checked), in the order in which they are drawn. Each setting gets a panel of the figure.
        quick: The seeds and overrides of the quick version of the study.
    """

    # One sentence about the study, for its page.
    what: Text
    preset: Text
    # Overrides `key=value` of every arm.
    overrides: Overrides
    # The further overrides of each arm, by its name.
    arms: Annotated[dict[ArmName, Overrides], Field(min_length=1)]
    # The seeds of every arm.
    seeds: Seeds
    # Pairs of an arm and the arm that it is compared with.
    compared: tuple[tuple[ArmName, ArmName], ...]
    # By the name of a setting, arms that differ in it. Each is a panel of the figure.
    sweeps: dict[Text, tuple[ArmName, ...]]
    quick: Quick

    def __post_init__(self) -> None:
        """Checks the fields together.

        Raises:
            ConfigError: If `compared` or `sweeps` name an arm that is not in `arms`, an arm is
                compared with itself, seeds repeat, or the study or its quick version (with
                `quick.seeds`) has more than `MAX_RUNS` (1000) runs, one per arm and seed.
        """
        named = {name for pair in self.compared for name in pair}
        named |= {name for arms in self.sweeps.values() for name in arms}
        missing = sorted(named - self.arms.keys())
        if missing:
            raise ConfigError(
                f"compared and sweeps: no arm {missing[0]!r}; there are {', '.join(self.arms)}"
            )
        for name, other in self.compared:
            if name == other:
                raise ConfigError(f"compared: {name!r} with itself")
        for seeds in (self.seeds, self.quick.seeds):
            if len(set(seeds)) < len(seeds):
                raise ConfigError(f"seeds={brief_repr(list(seeds))}: must differ")
            num_runs = len(self.arms) * len(seeds)
            if num_runs > MAX_RUNS:
                raise ConfigError(
                    f"seeds: {num_runs} runs of {len(self.arms)} arms; must be at most {MAX_RUNS}"
                )


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a study: an arm with one seed.

    Attributes:
        arm: The name of the arm.
        config: The resolved configuration, with the seed and the run directory.
        arguments: The preset and the overrides `key=value`, as `solrl train` takes them. The last
            two are `seed=` and `run.dir=`.
    """

    arm: str
    config: Config
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the run, ARM-SEED, e.g. "sol_rl-0"."""
        return f"{self.arm}-{self.config.seed}"

    @property
    def folder(self) -> Path:
        """The run directory, `run.dir` of the configuration. It need not exist."""
        return Path(self.config.run.dir)


def plan_names() -> list[str]:
    """Returns the sorted names of the plans in the package: its files `configs/study/NAME.yaml`."""
    return sorted(path.stem for path in _CARRIED.glob("*.yaml"))


def read_plan(name: str) -> Plan:
    """Reads the plan of a study, and checks that its fields fit together.

    Whether the preset and the settings exist is checked later, by `runs_of`.

    Args:
        name: The name of a plan of the package, or else the path of a YAML file.

    Returns:
        The plan. Its fields `compared` and `sweeps` name only its own arms.

    Raises:
        InputError: If there is no such plan, or the file cannot be read as YAML, e.g. because it
            has more than 64 KiB.
        ConfigError: If the file is not a plan. The message names all invalid fields, or, if there
            are none, the first problem between fields.
    """
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

        def unknown(key: str) -> str:
            names = ", ".join(field.name for field in dataclasses.fields(Plan))
            return f"unknown key '{key}': expected one of {names}"

        messages = (describe_error(error, "a plan", unknown) for error in errors.errors())
        raise ConfigError("; ".join(f"{path}: {text}" for text in messages if text)) from None


def runs_of(plan: Plan, out: Path, quick: bool, overrides: tuple[str, ...]) -> list[Run]:
    """Lists all runs of a study, seed by seed: first those of all arms with the first seed.

    Args:
        plan: The plan of the study.
        out: The directory of the study. The directory of a run is `out/ARM-SEED`.
        quick: Whether it is the quick version of the study, with the seeds and the further
            overrides in `plan.quick`.
        overrides: The user's overrides `key=value` of all runs. They win over those of
            `plan.quick`, which win over those of the arm, which win over `plan.overrides`.

    Returns:
        The runs in this order, with resolved configurations.

    Raises:
        ConfigError: If the preset or an override is invalid, an objective `module:function` cannot
            be imported, an override sets the seed or the run directory, or `plan.sweeps` names a
            setting that does not exist. The message names all problems.
    """
    final_overrides = overrides
    if quick:
        final_overrides = (*plan.quick.overrides, *overrides)
    problems = [
        f"sweeps: {setting} is no setting"
        for setting in plan.sweeps
        if setting not in field_names()
    ]
    arm_overrides = [override for arm in plan.arms.values() for override in arm]
    for override in (*plan.overrides, *arm_overrides, *final_overrides):
        if override.split("=")[0].strip() in ("seed", "run.dir"):
            problems.append(f"{override}: a study sets it itself")
    runs: list[Run] = []
    for seed in plan.quick.seeds if quick else plan.seeds:
        for arm, overrides_of_arm in plan.arms.items():
            arguments = (
                *plan.overrides,
                *overrides_of_arm,
                *final_overrides,
                f"seed={seed}",
                quote_override("run.dir", str(out / f"{arm}-{seed}")),
            )
            try:
                config = resolve(plan.preset, arguments)
                config.check_objective()
                runs.append(Run(arm, config, (plan.preset, *arguments)))
            except (ConfigError, InputError) as error:
                problems.append(f"arm {arm}: {error}")
    if problems:
        raise ConfigError("; ".join(dict.fromkeys(problems)))
    return runs
