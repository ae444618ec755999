"""The record of a step: a JSON file that is complete at any time.

JAX is not imported.
"""

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
    """A step cannot run; the message says why."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One step, for one model or for all.

    Attributes:
        step: The name of the step.
        model: The name of the model. "": the step is not for one model.
        models: The models of a step for all of them.
        overrides: Overrides of the models' presets.
        formats: Quantizing formats. (): the native ones.
        repeat: The number of calls whose median is taken.
        folder: The folder of the records.
    """

    step: str
    model: str = ""
    models: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    repeat: int = 3
    folder: str = "."

    @property
    def name(self) -> str:
        """The name of the record, e.g. "steps-sana"."""
        return f"{self.step}-{self.model}" if self.model else self.step

    @property
    def path(self) -> Path:
        """The file of the record."""
        return Path(self.folder) / f"{self.name}.json"

    def to_json(self) -> str:
        """Encodes the task for `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Decodes the result of `to_json`."""
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()
        }
        return cls(**fields)


@dataclasses.dataclass
class Record:
    """The state and the figures of a step.

    Attributes:
        name: The name of the step.
        state: RUNNING, DONE, FAILED, SKIPPED or CUT_OFF.
        reason: Why it is not done.
        seconds: The time of the whole step, including the start of its process.
        result: The figures by name. A failed one is {"error": first line of the error}.
    """

    name: str
    state: str = RUNNING
    reason: str = ""
    seconds: float = 0.0
    result: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        atomic_write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """Reads a record. None if there is no file."""
        return cls(**json.loads(path.read_text())) if path.is_file() else None

    def figures(self) -> dict[str, Any]:
        """Returns the figures that did not fail."""
        return {name: value for name, value in self.result.items() if "error" not in value}


def in_words(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"
