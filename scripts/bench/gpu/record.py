"""What a step leaves: a JSON file, whole at any time. JAX is not imported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from solrl_jax.errors import first_line
from solrl_jax.storage.files import atomic_write

RUNNING = "running"
DONE = "done"
FAILED = "failed"
SKIPPED = "skipped"
CUT_OFF = "cut off"


class Skipped(Exception):
    """A step cannot be done; the message says why."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One step of one model, or of all."""

    step: str
    model: str = ""  # empty for a step that is not of one model
    models: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()  # of the models' presets
    formats: tuple[str, ...] = ()  # quantised ones; none: those that the device has natively
    repeat: int = 3
    folder: str = "."  # the records' own

    @property
    def name(self) -> str:
        """Of the record: "steps-sana"."""
        return f"{self.step}-{self.model}" if self.model else self.step

    @property
    def path(self) -> Path:
        """Of the record."""
        return Path(self.folder) / f"{self.name}.json"

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """What `to_json` wrote."""
        found: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()
        }
        return cls(**found)


@dataclasses.dataclass
class Record:
    """How a step went. result: by the name of a figure; one that failed is {"error": its first line}."""

    name: str
    state: str = RUNNING
    reason: str = ""  # why it is not done
    seconds: float = 0.0  # of the whole step, with the start of its process
    result: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        atomic_write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record in a file, if there is one."""
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    def figures(self) -> dict[str, Any]:
        """The results without those that failed."""
        return {name: value for name, value in self.result.items() if "error" not in value}


def in_words(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"
