"""Writes the result of a benchmark with its date, device and versions.

JAX is not imported.
"""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from solrl_jax.storage.files import atomic_write


def cores() -> str:
    """Describes the CPU of this machine, for `device` of a report."""
    return f"{os.cpu_count()} CPU cores"


def finish(
    result: Mapping[str, Any], out: Path | None, device: str, packages: Sequence[str]
) -> None:
    """Prints a result as JSON, with its date, device and versions.

    Args:
        result: The result.
        out: The file that it is also written to, or None.
        device: The device that was measured.
        packages: The packages whose versions are recorded.
    """
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    facts = {"date": datetime.date.today().isoformat(), "device": device, "versions": versions}
    text = json.dumps(facts | dict(result), indent=2)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, text + "\n")
