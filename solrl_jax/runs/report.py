"""`report.html`: what run directories hold, as one page that needs no network and no server.

The page is `report.html`, `report.css` and `report.js` beside this file, with the runs as JSON in it and the curves as SVG.
Several runs are laid over each other. A run that is still going on can be reported; `HtmlReport` does so from within.
"""

import base64
import dataclasses
import datetime
import io
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from solrl_jax.config.presets import preset_names, resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.values import MAX_NUMBER, brief_repr
from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.runs import ledger, metrics
from solrl_jax.runs.directory import read_run
from solrl_jax.runs.image_files import read_grid
from solrl_jax.runs.report_figures import Line, curves
from solrl_jax.storage.files import atomic_write, disk_reason
from solrl_jax.storage.readers import MOST_TEXT, parse_json, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

NAME = "report.html"
MOST_VALUES = 2**23  # of the record: 800 metrics in 10 000 iterations
MOST_ROWS = 20_000  # of the ledgers; of longer ones the newest iterations are shown
MOST_PICTURED = 12  # iterations of a run with pictures, evenly spaced
MOST_PIXELS = 160  # the longer side of a picture
SHARE = 0.01  # of the time of a run that `HtmlReport` may take
_LEDGER = ("iteration", "prompt", "candidate", "seed", "precision", "steps", "proxy_reward", "rank", "kept",
           "regenerated_reward", "advantage")  # fmt: skip
_SHOWN = (
    "solrl_jax",
    "python",
    "packages",
    "devices",
    "mesh",
    "exploration",
    "evaluation",
)  # of run.json
# after the rewards; metrics that a run does not have are left out
_FIGURES = {
    "exploration": {
        "pool/reward": "Reward of the explored pool",
        "kept/reward": "Reward of what is trained on",
        "kept/spread": "Best minus worst kept reward",
    },
    "fidelity": {
        "fidelity/spearman": "Spearman, proxy and regenerated",
        "fidelity/kendall": "Kendall, proxy and regenerated",
    },
    "update": {"loss/kl": "Distance from the base model (KL term)", "grad_norm": "Gradient norm"},
    "time": {
        "seconds": "Seconds an iteration",
        "images_per_second/explore": "Pictures a second, exploring",
        "images_per_second/regenerate": "Pictures a second, regenerating",
    },
}


def write(
    folders: Sequence[Path], out: Path, *, live: bool = False, plan: Path | None = None
) -> None:
    """Writes the report of runs to `out`.

    live: whether it is written again soon, so that the page offers to load itself again. plan: the JSON of `solrl plan`, to be
    shown too. Raises InputError for a run that is damaged or has no record and for a file that is no plan, RunError if the
    disk refuses.
    """
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    runs = [
        _run(folder, name, MOST_ROWS // len(folders))
        for folder, name in zip(folders, names, strict=True)
    ]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    planned = None if plan is None else _plan(plan)
    content = {
        "written": now,
        "live": live,
        "runs": runs,
        "figures": list(_figures(runs)),
        "plan": planned,
    }
    # no text of a run can end the script that holds it
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

    def part(name):
        return Path(__file__).with_name(name).read_text(encoding="utf-8")

    page = (
        part(NAME)
        .replace("/*CSS*/", part("report.css"))
        .replace("/*JS*/", part("report.js"))
        .replace("/*DATA*/", data)
    )
    atomic_write(out, page)


def is_page(path: Path) -> bool:
    """Whether there is a report at `path`, which may be written over."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return b"<title>solrl report</title>" in stream.read(1000)


class HtmlReport:
    """The report of a run while it trains, refreshed whenever that keeps within `SHARE` of the time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        # s; the first one imports matplotlib
        self._began = time.monotonic()
        self._spent = 0.0
        self._last = 1.5

    def refresh(self, *, last: bool = False) -> str | None:
        """Writes the report unless it is too soon; if `last`, in any case. Returns why it could not: no run ends for that."""
        began = time.monotonic()
        if not last and self._spent + self._last > SHARE * (began - self._began):
            return None
        try:
            write([self.path.parent], self.path, live=not last)
        except (InputError, RunError) as error:
            return f"no report: {error}"
        finally:
            self._last = time.monotonic() - began
            self._spent += self._last
        return None


def _run(folder: Path, name: str, most_rows: int) -> dict[str, Any]:
    """All that the page shows of a run, as JSON knows it."""
    config = read_run(folder)
    if not (rows := metrics.read(folder)):
        raise InputError(
            f"{folder}: nothing to report yet, its metrics.jsonl has no line that can be read"
        )
    rows = list({row["iteration"]: row for row in rows}.values())
    columns = dict.fromkeys(key for row in rows for key in row)
    if len(columns) * len(rows) > MOST_VALUES:
        many = f"{len(columns)} metrics in {len(rows)} iterations"
        raise InputError(
            f"{folder}: its metrics.jsonl has {many}; a report has at most {MOST_VALUES} values"
        )
    return {
        "name": name,
        "config": _flat(config),
        "preset": _flat(resolve(config.preset, ())) if config.preset in preset_names() else None,
        "facts": read_facts(folder),
        "trained": list(config.reward.weights),
        "watched": list(config.reward.eval_only),
        "metrics": {key: [row.get(key) for row in rows] for key in columns},
        "ledger": _ledger(folder / "ledger", most_rows),
        "grids": _pictures(folder / "pictures", "iteration"),
        "pools": _pictures(folder / "pictures", "pool"),
    }


def _flat(config: Config) -> dict[str, Any]:
    """The settings by dotted name."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from walk(inner, f"{path}.{key}" if path else str(key))
        else:
            yield path, value

    return dict(walk(dataclasses.asdict(config), ""))


def read_facts(folder: Path) -> dict[str, Any]:
    """What a run's `run.json` says for readers; empty if there is none. Raises InputError for one that is damaged."""
    path = folder / "run.json"
    try:
        facts = dict(parse_json(read_bytes(path))) if path.exists() else {}
        facts |= {"packages": dict(facts["packages"])} if "packages" in facts else {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: cannot be read ({disk_reason(error) or first_line(error)})"
        ) from error
    return {key: facts[key] for key in _SHOWN if key in facts}


def _plan(path: Path) -> dict[str, Any]:
    """What the page shows of a plan: of each stage the seconds, where they go, and the memory; of one device."""
    try:
        plan = parse_json(read_bytes(path))
        kinds = ("products", "attention", "memory", "links")

        def split(stage, kind):
            return sum(
                _number(p["calls"]) * _number(p["roofline"]["split"][kind])
                for p in stage["programs"]
            )

        stages = [
            [
                str(s["name"]),
                *map(_number, (s["seconds"], *(split(s, kind) for kind in kinds), s["peak"])),
            ]
            for s in plan["stages"]
        ]
        shown = (
            "preset",
            "device",
            "devices",
            "hosts",
            "exploration",
            "usable",
            "seconds",
            "rollout",
            "naive_scaling",
            "fits",
        )
        numbers = {name: _number(plan[name]) for name in ("usable", "seconds")}
        return {name: plan.get(name) for name in shown} | numbers | {"stages": stages}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(
            f"{path}: not the JSON of `solrl plan PRESET --json` ({disk_reason(error) or error!r})"
        ) from error


def _number(value: Any) -> float:
    """A number as a float. Raises ValueError for anything else, and for what no float32 holds."""
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"{brief_repr(value)} is no number")
    return float(value)


def _ledger(root: Path, most: int) -> dict[str, Any]:
    """The newest iterations of a ledger, `most` rows and `MOST_TEXT` bytes if an iteration does not have more, by column."""
    iterations = ledger.iterations_in(root)
    rows = 0
    size = 0
    tables: list[Any] = []
    for iteration in reversed(iterations):
        table = ledger.read(root, iteration)
        rows = rows + len(table)
        size = size + table.nbytes
        if tables and (rows > most or size > MOST_TEXT):
            break
        tables.insert(0, table)
    columns = {
        name: [value for table in tables for value in _column(table[name])] for name in _LEDGER
    }
    texts = list(dict.fromkeys(columns["prompt"] + columns["precision"]))
    number = {text: index for index, text in enumerate(texts)}
    columns |= {name: [number[text] for text in columns[name]] for name in ("prompt", "precision")}
    return {"iterations": iterations, "shown": len(tables), "texts": texts, "columns": columns}


def _column(values: Any) -> list[Any]:
    """A ledger's column for JSON: float32 in its shortest digits, what is not finite as text, a 64-bit seed as text."""
    if str(values.type) == "float":

        def shortest(x):
            return x if x is None else float(str(np.float32(x))) if math.isfinite(x) else str(x)

        return [shortest(x) for x in values.to_pylist()]
    return (
        [str(x) for x in values.to_pylist()] if str(values.type) == "uint64" else values.to_pylist()
    )


def _pictures(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The pictures that `kind` names, iteration by iteration, with what is known of each."""
    paths = [
        path
        for path in sorted(folder.glob(f"{kind}-*.png"))
        if path.stem.removeprefix(f"{kind}-").isdecimal()
    ]
    chosen = (
        np.unique(np.linspace(0, len(paths) - 1, MOST_PICTURED).round().astype(int))
        if len(paths) > MOST_PICTURED
        else ...
    )
    made = (
        {"iteration": int(path.stem.rpartition("-")[2]), **_cells(path)}
        for path in np.array(paths, object)[chosen]
    )
    return [picture for picture in made if picture["cells"]]


def _cells(path: Path) -> dict[str, Any]:
    """The images of one picture, and the size of each. The picture, of up to a gigabyte, is freed at the end."""
    grid = read_grid(path)
    size = [
        f"{image.height} x {image.width}" for image, _ in grid[:1]
    ]  # before `_source` shrinks the image
    return {
        "size": "".join(size),
        "cells": [{**facts, "src": _source(image)} for image, facts in grid],
    }


def _source(image: "Image") -> str:
    """A picture as the address of itself: exact if it is small, else shrunk and compressed."""
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    data = io.BytesIO()
    image.save(data, format="WEBP", lossless=max(image.size) <= 64, quality=80)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def _figures(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The curves, each with the section of the page that it belongs to."""
    for number, (section, metric, title) in enumerate(_titles(runs)):
        lines = []
        for index, run in enumerate(runs):
            columns = run["metrics"]
            errors = columns.get(f"{metric}/standard_error")
            known = [i for i, value in enumerate(columns.get(metric, [])) if value is not None]
            if known:

                def pick(values, known=known):
                    return [values[i] for i in known]

                x = pick(columns["iteration"])
                y = pick(columns[metric])
                band = [error or 0.0 for error in pick(errors)] if errors else []
                lines.append(
                    Line(index, run["name"] if len(runs) > 1 else f"{y[-1]:.3g}", x, y, band)
                )
        if lines:
            svg, axis = curves(lines, f"figure{number}")
            series = [
                {"run": line.run, "x": line.x, "y": line.y, "error": line.error} for line in lines
            ]
            yield {
                "section": section,
                "metric": metric,
                "title": title,
                "svg": svg,
                "axis": axis,
                "lines": series,
            }


def _titles(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(section, metric, title) of every figure. The only reward that is trained on is shown once, as the reward."""
    scores = dict.fromkeys(
        key for run in runs for key in run["metrics"] if f"{key}/standard_error" in run["metrics"]
    )
    single = {f"eval/{run['trained'][0]}" for run in runs if len(run["trained"]) == 1}
    for key in scores:
        name = key.removeprefix("eval/")
        watched = any(
            name == other or name.startswith(f"{other}/")
            for run in runs
            for other in run["watched"]
        )
        if key not in single:
            how = "watched only" if watched else "trained on" if name == "reward" else "held-out"
            yield "rewards", key, f"{'Held-out reward' if name == 'reward' else name}, {how}"
    for section, figures in _FIGURES.items():
        for metric, title in figures.items():
            yield section, metric, title
