"""Writes the records of a folder as a page of tables.

JAX is not imported.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.record import Record, Task
from solrl_jax.storage.files import atomic_write

UNKNOWN = "-"
LONGEST = 160  # largest number of characters of a reason


def page(todo: Sequence[Task]) -> str:
    """Returns the page in Markdown. A step without a record has not begun."""
    records = {task.name: Record.read(task.path) or Record(task.name, "not begun") for task in todo}

    def records_by_model(step):
        return {task.model: records[task.name] for task in todo if task.step == step}

    def whole(step):
        return records.get(step) or Record(step)

    parts = [
        ("Steps", table(("step", "state", "seconds", "why"), map(state, records.values()))),
        ("Figures that failed", table(("step", "figure", "error"), errors(records.values()))),
        ("Device", table(("", ""), facts(whole("facts")))),
        ("Checks of the device", table(CHECKS, checks(whole("checks")))),
        ("Kernels and their twins", table(KERNELS, kernels(whole("kernels")))),
        ("Rewards here and on the CPU", table(PARITY, parity(whole("parity")))),
        ("Products", table(PRODUCTS, products(whole("products")))),
        ("A chunk sampled", table(STEPS, rows_by_model(sampled, records_by_model("steps")))),
        ("The rollout phase", table(ROLLOUT, rows_by_model(rollout, records_by_model("rollout")))),
        ("The update", table(UPDATE, rows_by_model(update, records_by_model("update")))),
    ]
    note = (
        "measured / plan: the measured time over the roofline time of the same compiled program, "
        "at the device's public peaks. -: unknown."
    )
    return (
        "\n\n".join(
            ["# Measurements", note, *(f"## {title}\n\n{text}" for title, text in parts if text)]
        )
        + "\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown, or "" without rows."""
    lines = [f"| {' | '.join(map(shown, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]) if lines else ""


def shown(value: Any) -> str:
    """Formats a cell."""
    if value is None:
        return UNKNOWN
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def named(native: dict[str, int]) -> str:
    """Lists the kernels of libraries with the number of their calls."""
    return ", ".join(f"{count} x {name}" for name, count in native.items()) or "none"


def gigabytes(size: float | None) -> float | None:
    """Converts bytes to GB."""
    return None if size is None else size / 1e9


def state(record: Record) -> Sequence[Any]:
    """Returns a row of the table of steps."""
    return record.name, record.state, record.seconds, record.reason[:LONGEST]


def errors(records: Iterable[Record]) -> Iterator[Sequence[Any]]:
    """Yields one row per figure that failed."""
    for record in records:
        for name, value in record.result.items():
            if "error" in value:
                yield record.name, name, value["error"][:LONGEST]


def facts(record: Record) -> Iterator[Sequence[Any]]:
    """Yields the name and the value of each fact."""
    for part, values in record.figures().items():
        yield from (
            (f"{part}: {name}", str(value).replace("\n", " "))
            for name, value in values.items()
            if value is not None
        )


CHECKS = ("check", "differs from plain JAX by at most")


def checks(record: Record) -> Iterator[Sequence[Any]]:
    """Yields one row per check that the device passed."""
    yield from ((name, row["tolerance"]) for name, row in record.figures().items())


KERNELS = (
    "kernel",
    "largest difference",
    "equal",
    "finite",
    "ms",
    "twin's ms",
    "times as fast as the twin",
)


def kernels(record: Record) -> Iterator[Sequence[Any]]:
    """Yields one row per kernel."""

    def milliseconds(seconds):
        return None if seconds is None else 1e3 * seconds

    for name, row in record.figures().items():
        seconds = milliseconds(row["seconds"]), milliseconds(row.get("twin_seconds"))
        against = row.get("difference"), row.get("alike"), row["finite"]
        yield name, *against, *seconds, row.get("times", row.get("twin_error"))


PARITY = (
    "what",
    "largest difference",
    "range within a prompt",
    "Spearman",
    "kept alike",
    "kernels of libraries here",
)


def parity(record: Record) -> Iterator[Sequence[Any]]:
    """Yields one row per way to compute rewards."""
    for name, row in record.figures().items():
        kernels = named(row["here"]["native"]) if "native" in row["here"] else None
        yield (
            name,
            row["largest_difference"],
            row["range"],
            row["spearman"],
            row.get("kept_alike"),
            kernels,
        )


PRODUCTS = (
    "model",
    "rows",
    "in",
    "out",
    "format",
    "TFLOP/s",
    "of the peak",
    "times BF16",
    "measured / plan",
    "kernels of libraries",
)


def products(record: Record) -> Iterator[Sequence[Any]]:
    """Yields one row per shape and format."""
    rows = record.figures()
    for row in rows.values():
        bf16 = rows.get(f"{row['model']} {row['in']} x {row['out']} bf16")
        times = bf16 and bf16["seconds"] / row["seconds"]
        about = (row["model"], row["rows"], row["in"], row["out"], row["format"])
        yield *about, row["tflops"], row["share_of_peak"], times, row["ratio"], named(row["native"])


def rows_by_model(rows: Any, records: dict[str, Record]) -> Iterator[Sequence[Any]]:
    """Yields the rows of all models, each with the name of its model."""
    for model, record in records.items():
        yield from ((model, *row) for row in rows(record))


MEMORY = ("peak GB", "planned GB", "peak / planned")
STEPS = (
    "model",
    "what",
    "rows",
    "steps",
    "finite",
    "seconds",
    "seconds a step",
    "plan's",
    "measured / plan",
    "sync s",
    *MEMORY,
    "kernels of libraries",
)


def sampled(record: Record) -> Iterator[Sequence[Any]]:
    """Yields the row of the regeneration, then one row per format."""
    for name, row in record.figures().items():
        times = (
            row["seconds"],
            row["step_seconds"],
            row["step_plan"],
            row["ratio"],
            row.get("sync", {}).get("seconds"),
        )
        yield (
            name,
            row["rows"],
            row["steps"],
            row["finite"],
            *times,
            *memory(row["memory"]),
            named(row["native"]),
        )


def memory(found: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the cells of the columns `MEMORY`."""
    return gigabytes(found["peak"]), gigabytes(found["planned"]), found["ratio"]


ROLLOUT = (
    "model",
    "what",
    "calls",
    "finite",
    "seconds",
    "plan's",
    "measured / plan",
    "times as fast as naive_scaling",
    *MEMORY,
)


def rollout(record: Record) -> Iterator[Sequence[Any]]:
    """Yields one row per program (one call) and one per family (the whole phase)."""
    for name, row in record.figures().items():
        if "memory" in row:
            plan = row["plan"] and row["plan"]["seconds"]
            yield (
                name,
                row["calls"],
                row["finite"],
                row["seconds"],
                plan,
                row["ratio"],
                None,
                *memory(row["memory"]),
            )
        else:
            yield (
                name,
                None,
                None,
                row["seconds"],
                row["plan_seconds"],
                row["ratio"],
                row.get("times"),
                *[None] * len(MEMORY),
            )


UPDATE = (
    "model",
    "micro-batches measured",
    "finite",
    "seconds a micro-batch",
    "micro-batches of an iteration",
    "seconds of an iteration",
    "plan's",
    "measured / plan",
    *MEMORY,
    "kernels of libraries",
)


def update(record: Record) -> Iterator[Sequence[Any]]:
    """Yields the row of the update."""
    for row in record.figures().values():
        each = row["micro_batches"], row["finite"], row["micro_batch_seconds"]
        whole = row["micro_batches_of_iteration"], row["iteration_seconds"]
        yield (
            *each,
            *whole,
            row["iteration_plan"],
            row["ratio"],
            *memory(row["memory"]),
            named(row["native"]),
        )


def write(todo: Sequence[Task], folder: Path) -> None:
    """Replaces `summary.md`."""
    atomic_write(folder / "summary.md", page(todo))
