"""What a hostile case is, and how one is run: in this process, under limits of time and memory.

A case is data: the arguments of `solrl`, the files that it finds, and what it must end with. A
refusal is one line on standard error and nothing else; no case may end in a traceback.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from solrl_jax.cli import main
from solrl_jax.models.locate import EMBEDDED_FOLDER

PEAK = 2e9  # bytes that a refusal may take at most, beside what the process has before
CODES = (0, 1, 2, main.INTERRUPTED)
Maker = Callable[[Path], object]  # puts something at a path


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `solrl`. In `arguments`, `files` and `message`, {dir} is an empty directory,
    {run} a copy of a small run's directory, {model} a copy of the directory of tiny-sana.

    files: by path, its content: text, bytes, or a function that makes it. JSON files of a run or a
    model are changed by a mapping: the fields that it names, None taking a field away.
    """

    name: str
    arguments: str
    message: str  # a part of the line
    code: int = 2
    files: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 20
    kept: tuple[str, ...] = ()  # paths that must be as they were
    repeats: bool = False  # another case is of the same kind: only `make test-all` runs this one

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    code: int
    out: str
    error: str
    seconds: float
    peak: float  # bytes over what the process had before

    def problem(self, seconds: float) -> str | None:
        """Why no call may end like this, whatever it was given; None if it may."""
        if "Traceback" in self.error or main.UNFORESEEN in self.error:
            return f"an unforeseen error: {self.error[-3000:]}"
        if self.code not in CODES:
            return f"exit code {self.code}"
        if self.code and len(refusal(self.error)) != 1:
            return f"expected one line: {self.error[:2000]!r}"
        if self.seconds > seconds:
            return f"took {self.seconds:.1f} s"
        if self.code and self.peak > PEAK:
            return f"took {self.peak / 1e9:.1f} GB"
        return None


def one_quick(cases: Iterable[Case]) -> list[Case]:
    """Cases of one kind: `make test` runs the first, `make test-all` all of them."""
    first, *others = cases
    return [first, *(dataclasses.replace(case, repeats=True) for case in others)]


def refusal(error: str) -> list[str]:
    """The lines of standard error that say why a call failed."""
    return [
        line
        for line in error.splitlines()
        if line.startswith("solrl: ") or not _PROGRESS.match(line)
    ]


# what a run says while it goes on
_PROGRESS = re.compile(
    r"tiny: |devices: |batch: |iteration \d|evaluation after|resuming after|skipped |exploring in"
    r"|failed|interrupted|reward hacking|metrics\.jsonl|stopping after"
)


def memory(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1000


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends what hangs, by an exception."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(arguments: list[str], seconds: float) -> Outcome:
    """Runs the entry point in this process."""
    out = io.StringIO()
    error = io.StringIO()
    argv = sys.argv
    code = 0
    began = time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    try:
        sys.argv = ["solrl", *arguments]
        with (
            at_most(3 * seconds),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(error),
        ):
            main.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = argv
    return Outcome(
        code, out.getvalue(), error.getvalue(), time.monotonic() - began, memory("VmHWM") - before
    )


def prepare(case: Case, folder: Path, run: Path) -> dict[str, str]:
    """Makes the files of a case below `folder`. Returns what the names in braces stand for."""
    names = {"dir": folder / "dir", "run": folder / "run", "model": folder / "model"}
    needed = " ".join((case.arguments, *case.files, *case.kept))
    names["dir"].mkdir(parents=True)
    if "{run}" in needed:
        shutil.copytree(run, names["run"])
    if "{model}" in needed:
        shutil.copytree(EMBEDDED_FOLDER / "tiny-sana", names["model"])
    texts = {name: str(path) for name, path in names.items()}
    for name, content in case.files.items():
        put(Path(fill(name, texts)), content, texts)
    return texts


def fill(text: str, names: Mapping[str, str]) -> str:
    """The text with the names in braces replaced. Other braces, as JSON has them, stay."""
    for name, path in names.items():
        text = text.replace(f"{{{name}}}", path)
    return text


def put(path: Path, content: Any, names: Mapping[str, str]) -> None:
    """Puts one file, or whatever a case has in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        content(path)
    elif isinstance(content, Replaced):
        assert content.old in path.read_text()
        path.write_text(path.read_text().replace(content.old, fill(content.new, names)))
    elif isinstance(content, Mapping):
        fields = json.loads(path.read_text()) | content
        path.write_text(
            json.dumps({name: value for name, value in fields.items() if value is not ABSENT})
        )
    else:
        path.write_bytes(content if isinstance(content, bytes) else fill(content, names).encode())


@dataclasses.dataclass(frozen=True)
class Replaced:
    """The text file that was there, with other words in it."""

    old: str
    new: str


class _Absent:
    """A field that a case takes away."""


ABSENT = _Absent()


def pipe(path: Path) -> None:
    """A named pipe that nobody writes to."""
    os.mkfifo(path)


def folder(path: Path) -> None:
    """A directory in place of a file."""
    path.mkdir()


def link(target: str) -> Maker:
    """A symbolic link."""
    return lambda path: path.symlink_to(target)


def sparse(size: int) -> Maker:
    """A file of zeros that takes no room on the disk."""

    def make(path: Path) -> None:
        with path.open("wb") as stream:
            stream.truncate(size)

    return make


def nothing(path: Path) -> None:
    """Nothing there."""
