"""Writes `report.html`: run directories as one page that needs no network and no server.

The page consists of `report.html`, `report.css` and `report.js` beside this file, with the runs as
JSON and the curves as SVG. Several runs share each figure. A run may be reported while it trains;
`HtmlReport` does so from the training process.
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
from solrl_jax.config.values import MAX_NUMBER, ConfigError, brief_repr
from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.runs import ledger, metrics
from solrl_jax.runs.directory import read_run
from solrl_jax.runs.image_files import read_grid, read_moving_grid
from solrl_jax.runs.report_figures import Line, curves
from solrl_jax.storage.files import atomic_write, disk_reason
from solrl_jax.storage.readers import (
    MOST_TEXT,
    parse_json,
    read_bytes,
    read_start,
    to_strict_json,
)
from solrl_jax.storage.stores import RunPath

if TYPE_CHECKING:
    from PIL.Image import Image

NAME = "report.html"
MAX_VALUES = 2**23  # values of a record that are accepted: 800 metrics in 10 000 iterations
MAX_ROWS = 20_000  # candidates of all ledgers that are shown, those of the newest iterations
MAX_ITERATIONS_WITH_IMAGES = 12  # iterations of a run whose images are shown, evenly spaced
MAX_PIXELS = 160  # the longer side of an image
MAX_FRAMES = 24  # frames of a clip that are shown, evenly spaced
MAX_TIME_FRACTION = 0.01  # the fraction of the time of a run that `HtmlReport` may take
_LEDGER = (
    "iteration",
    "prompt",
    "candidate",
    "seed",
    "precision",
    "steps",
    "proxy_reward",
    "rank",
    "kept",
    "regenerated_reward",
    "advantage",
)
# The entries of `run.json` that are shown.
_FACTS = (
    "solrl_jax",
    "python",
    "packages",
    "devices",
    "mesh",
    "exploration",
    "evaluation",
)
# The figures after those of the rewards: section, then metric and title. Metrics that a run does
# not have are left out.
_FIGURES = {
    "exploration": {
        "pool/reward": "Reward of the explored pool",
        "kept/reward": "Reward of the trained samples",
        "kept/spread": "Best minus worst kept reward",
    },
    "fidelity": {
        "fidelity/spearman": "Spearman, proxy and regenerated",
        "fidelity/kendall": "Kendall, proxy and regenerated",
    },
    "update": {"loss/kl": "Distance from the base model (KL term)", "grad_norm": "Gradient norm"},
    "time": {
        "seconds": "Seconds per iteration",
        "images_per_second/explore": "Images per second, exploring",
        "images_per_second/regenerate": "Images per second, regenerating",
    },
}


# Prefix of the metrics that hold the costs of rewards outside JAX (`rewards.usage`).
_COST = "reward_cost"


def write(
    folders: Sequence[RunPath], out: RunPath, *, live: bool = False, plan: Path | None = None
) -> None:
    """Writes the report of one or more runs as one HTML page, whole or not at all.

    Args:
        folders: The run directories, at least one. A run has the name of its directory on the page.
            If two directories have the same name, all runs are named by their paths.
        out: The file to write. It is replaced if it exists, whatever it holds; missing parent
            directories are created.
        live: Whether the report is written again soon, so that the page offers to reload itself.
        plan: A file with the JSON of `solrl plan PRESET --json`, which is shown too. None: no plan.

    Raises:
        InputError: If a folder is not a run directory, a run is damaged, has no metrics or more
            than 2**23 values of them (`MAX_VALUES`), or if `plan` cannot be read or is not a plan.
        ConfigError: If the configuration of a run is invalid.
        RunError: If the disk refuses.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = [
        _describe_run(folder, name, MAX_ROWS // len(folders))
        for folder, name in zip(folders, names, strict=True)
    ]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    planned = None if plan is None else _read_plan(plan)
    content = {
        "written": now,
        "live": live,
        "runs": runs,
        "figures": list(_figures(runs)),
        "plan": planned,
    }
    # With "<" escaped, no text of a run can end the script element that holds it.
    data = json.dumps(to_strict_json(content), allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")

    def part(name: str) -> str:
        return Path(__file__).with_name(name).read_text(encoding="utf-8")

    page = (
        part(NAME)
        .replace("/*CSS*/", part("report.css"))
        .replace("/*JS*/", part("report.js"))
        .replace("/*DATA*/", data)
    )
    atomic_write(out, page)


def is_page(path: RunPath) -> bool:
    """Whether a file is a report of this module, which may be replaced.

    Args:
        path: The file. Its first 1000 bytes are searched for the title of the page. False if it is
            absent or no regular file.

    Raises:
        OSError: If the file cannot be read.
    """
    if not path.is_file():
        return False
    return b"<title>solrl report</title>" in read_start(path, 1000)


class HtmlReport:
    """The page `report.html` of a run while it trains.

    `refresh` may be called after every iteration. It limits how often the page is written, so that
    all refreshes together take at most about 1 % (`MAX_TIME_FRACTION`) of the time since this
    object was created.

    Attributes:
        path: The file, `report.html` in the run directory.
    """

    def __init__(self, folder: RunPath) -> None:
        """Creates the object, and starts the clock by which `refresh` limits its share of the time.
        Writes nothing.

        Args:
            folder: The run directory, in which `report.html` is written.
        """
        self.path = folder / NAME
        self._began = time.monotonic()
        self._spent = 0.0  # seconds of all refreshes
        self._last = 1.5  # seconds of the last one; the first one imports matplotlib

    def refresh(self, *, last: bool = False) -> str | None:
        """Writes the report, unless it is too soon.

        It is too soon if all refreshes, with one more like the last (at first 1.5 seconds), would
        take more than 1 % (`MAX_TIME_FRACTION`) of the time since this object was created.

        Args:
            last: Whether the run ends here. The report is then written in any case, and no longer
                offers to reload itself.

        Returns:
            None if the report was written, or if it is too soon to write it. Otherwise one line
            with the reason why the report could not be written. InputError, ConfigError and
            RunError are reported in this way and not raised.
        """
        began = time.monotonic()
        if not last and self._spent + self._last > MAX_TIME_FRACTION * (began - self._began):
            return None
        try:
            write([self.path.parent], self.path, live=not last)
        except (InputError, RunError, ConfigError) as error:
            return f"no report: {error}"
        finally:
            self._last = time.monotonic() - began
            self._spent += self._last
        return None


def _describe_run(folder: RunPath, name: str, max_rows: int) -> dict[str, Any]:
    """Collects all that the page shows of a run.

    Args:
        folder: The run directory, whose configuration, metrics, ledger and images are read.
        name: The name of the run on the page.
        max_rows: The largest number of candidates that are shown. The newest iteration is shown
            whole, even if it has more.

    Returns:
        JSON values by name:
          * "name";
          * "config": settings by dotted name; "preset": those of its preset without any override,
            not even of the family (`family=...`), or None if there is no such preset;
          * "facts": entries of `run.json` (`read_facts`);
          * "trained" and "watched": names of the scores that are trained on (`reward.weights`), and
            of those that are only evaluated (`reward.eval_only`);
          * "metrics": by name ("iteration" among them) one list with a value per recorded
            iteration, None where unknown;
          * "ledger": the dict of `_read_ledger`;
          * "grids" and "pools": images of test prompts and of candidates, the lists of
            `_read_images`.

    Raises:
        InputError: If `folder` is not a run directory, a file of the run is damaged or too large,
            or its metrics have no readable line or more than `MAX_VALUES` (2**23) values.
        ConfigError: If the configuration is invalid.
    """
    config = read_run(folder)
    rows = metrics.read(folder)
    if not rows:
        raise InputError(
            f"{folder}: nothing to report yet, its metrics.jsonl has no line that can be read"
        )
    rows = list(metrics.by_iteration(rows).values())
    columns = dict.fromkeys(key for row in rows for key in row)
    if len(columns) * len(rows) > MAX_VALUES:
        raise InputError(
            f"{folder}: its metrics.jsonl has {len(columns)} metrics in {len(rows)} iterations; a "
            f"report has at most {MAX_VALUES} values"
        )
    preset = None
    if config.preset in preset_names():
        preset = _by_dotted_name(resolve(config.preset, ()))
    return {
        "name": name,
        "config": _by_dotted_name(config),
        "preset": preset,
        "facts": read_facts(folder),
        "trained": list(config.reward.weights),
        "watched": list(config.reward.eval_only),
        "metrics": {key: [row.get(key) for row in rows] for key in columns},
        "ledger": _read_ledger(folder / "ledger", max_rows),
        "grids": _read_images(folder / "pictures", "iteration"),
        "pools": _read_images(folder / "pictures", "pool"),
    }


def _by_dotted_name(config: Config) -> dict[str, Any]:
    """Flattens a configuration.

    Args:
        config: The configuration. Settings that are dicts are flattened too; an empty one stays {}.

    Returns:
        The values of all settings by dotted name, e.g. "rollout.kept".
    """

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from walk(inner, f"{path}.{key}" if path else str(key))
        else:
            yield path, value

    return dict(walk(dataclasses.asdict(config), ""))


def read_facts(folder: RunPath) -> dict[str, Any]:
    """Reads the entries of a run's `run.json` that are shown to readers.

    Args:
        folder: The run directory, in which `run.json` is read.

    Returns:
        Those of these entries that the file has, in this order: "solrl_jax", "python" and
        "packages" (versions), "devices", "mesh", "exploration" and "evaluation". {} if there is no
        such file.

    Raises:
        InputError: If the file cannot be read, or if it or its entry "packages" is no JSON object.
    """
    path = folder / "run.json"
    if not path.exists():
        return {}
    try:
        facts = dict(parse_json(read_bytes(path)))
        if "packages" in facts:
            facts["packages"] = dict(facts["packages"])
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: cannot be read ({disk_reason(error) or first_line(error)})"
        ) from error
    return {key: facts[key] for key in _FACTS if key in facts}


def _read_plan(path: Path) -> dict[str, Any]:
    """Reads what the page shows of a plan.

    Args:
        path: A file with the JSON of `solrl plan PRESET --json`.

    Returns:
        A dict. These entries of the plan are unchanged, and None if absent: "preset", "device" (its
        kind), "devices" (per host), "hosts", "exploration" (the format, as a sentence), "rollout"
        (the seconds of the phases sync, explore and regenerate together), "naive_scaling" (a dict
        of "seconds" and "rollout" for a run that explores in the training precision) and "fits"
        (bool). These must be present: "usable" (bytes of memory per device) and "seconds" (of an
        iteration) as floats, and "phases": for each phase a flat list of its name, its roofline
        seconds, the seconds if only matmuls, only attention, only memory and only links between
        devices limited it, and its peak memory in bytes.

    Raises:
        InputError: If the file cannot be read or is no plan.
    """
    try:
        plan = parse_json(read_bytes(path))
        phases = []
        for phase in plan["phases"]:
            seconds = [
                sum(
                    _to_float(program["calls"]) * _to_float(program["roofline"]["split"][kind])
                    for program in phase["programs"]
                )
                for kind in ("matmuls", "attention", "memory", "links")
            ]
            numbers = (phase["seconds"], *seconds, phase["peak"])
            phases.append([str(phase["name"]), *map(_to_float, numbers)])
        names = (
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
        entries = {name: plan.get(name) for name in names}
        checked = {name: _to_float(plan[name]) for name in ("usable", "seconds")}
        return entries | checked | {"phases": phases}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(
            f"{path}: not the JSON that `solrl plan` prints ({disk_reason(error) or error!r})"
        ) from error


def _to_float(value: Any) -> float:
    """Returns a number as a float.

    Args:
        value: An int or a float.

    Raises:
        ValueError: For values of another type, booleans too, for NaN and infinity, and for numbers
            beyond float32.
    """
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise ValueError(f"{brief_repr(value)} is no number")
    return float(value)


def _read_ledger(root: RunPath, max_rows: int) -> dict[str, Any]:
    """Reads the newest iterations of a ledger, by column.

    Args:
        root: The directory of the ledger.
        max_rows: The largest number of rows. The newest iteration is read in any case, and no
            iteration is read in part. Reading also stops at 64 MiB (`MOST_TEXT`) in memory.

    Returns:
        A dict. Without a ledger all lists are empty, also that of each column:
          * "iterations": the numbers of all iterations, ascending;
          * "shown": the number of iterations, the newest ones, that were read; 0 without a ledger;
          * "texts": the distinct prompts and precisions;
          * "columns": by the name of each column of the ledger (but "prompt_uid" and
            "policy_revision") a list of values for JSON, oldest iteration first. A prompt or
            precision is its index in "texts".

    Raises:
        InputError: If a file of the ledger cannot be read, is no Parquet file, has other columns
            than a ledger, or is too large.
    """
    iterations = ledger.iterations_in(root)
    num_rows = 0
    size = 0
    tables: list[Any] = []
    for iteration in reversed(iterations):
        table = ledger.read(root, iteration)
        num_rows += len(table)
        size += table.nbytes
        if tables and (num_rows > max_rows or size > MOST_TEXT):
            break
        tables.insert(0, table)
    columns = {
        name: [value for table in tables for value in _column_values(table[name])]
        for name in _LEDGER
    }
    texts = list(dict.fromkeys(columns["prompt"] + columns["precision"]))
    index = {text: i for i, text in enumerate(texts)}
    for name in ("prompt", "precision"):
        columns[name] = [index[text] for text in columns[name]]
    return {"iterations": iterations, "shown": len(tables), "texts": texts, "columns": columns}


def _column_values(column: Any) -> list[Any]:
    """Returns the values of a ledger's column for JSON; nulls are None.

    Float32 values have their shortest digits, or are text such as "nan" if they are not finite.
    Seeds of 64 bits become text, because JavaScript would round them.

    Args:
        column: The column, a `pyarrow.ChunkedArray`.
    """
    values = column.to_pylist()
    if str(column.type) == "uint64":
        return [str(x) for x in values]
    if str(column.type) == "float":
        return [_float_for_json(x) for x in values]
    return values


def _float_for_json(x: float | None) -> float | str | None:
    """Returns a float32 value with its shortest digits, e.g. 0.1 in place of 0.10000000149.

    Args:
        x: The value, or None, which is returned as it is.

    Returns:
        The number; its text, "nan", "inf" or "-inf", if it is not finite.
    """
    if x is None:
        return None
    return float(str(np.float32(x))) if math.isfinite(x) else str(x)


def _read_images(folder: RunPath, kind: str) -> list[dict[str, Any]]:
    """Reads the image grids of a run, at most 12 (`MAX_ITERATIONS_WITH_IMAGES`) of them.

    If there are more, evenly spaced ones are read, the first and the last among them.

    Args:
        folder: The directory `pictures` of the run, which need not exist.
        kind: The prefix of the file names: "iteration" or "pool".

    Returns:
        One dict per iteration, ascending: "iteration" (its number) and, from `_read_cells`, "size"
        (height and width of an image as text) and "cells" (for each image, a dict of its facts and
        a `data:` URL). Of the grids that were read, those without facts about their images are left
        out.

    Raises:
        InputError: If a file is damaged.
    """
    matches: list[RunPath] = list(folder.glob(f"{kind}-*.png"))
    by_iteration = {path.stem.removeprefix(f"{kind}-"): path for path in matches}
    paths = [by_iteration[text] for text in sorted(filter(str.isdecimal, by_iteration), key=int)]
    if len(paths) > MAX_ITERATIONS_WITH_IMAGES:
        positions = np.linspace(0, len(paths) - 1, MAX_ITERATIONS_WITH_IMAGES)
        paths = [paths[i] for i in np.unique(positions.round().astype(int))]
    grids = [
        {"iteration": int(path.stem.rpartition("-")[2]), **_read_cells(path)} for path in paths
    ]
    return [grid for grid in grids if grid["cells"]]


def _read_cells(path: RunPath) -> dict[str, Any]:
    """Reads one image grid. Its pixels, up to a gigabyte, are freed at the end.

    Args:
        path: A file of `image_files.save_grid`.

    Returns:
        A dict of two entries:
          * "size": height and width of an image in pixels as text, e.g. "512 x 768"; "" if the file
            has no facts;
          * "cells": for each image a dict of the facts that `save_grid` stored about it (e.g.
            "prompt"; "stage" is renamed "phase") and, under "src", the shrunken image as a `data:`
            URL. A clip is animated and has at most 24 of its frames (`MAX_FRAMES`). [] if the file
            has no facts.

    Raises:
        InputError: If the file, or that of the moving grid beside it, is damaged.
    """
    grid = read_grid(path)
    size = ""
    if grid:
        first, _ = grid[0]
        size = f"{first.height} x {first.width}"  # before `_data_url` shrinks the image
    clips, seconds = read_moving_grid(path, MAX_FRAMES, MAX_PIXELS)
    frames_by_cell = clips or [[image] for image, _ in grid]
    return {
        "size": size,
        "cells": [
            # Files of earlier runs have the fact "phase" under the name "stage".
            {"phase" if name == "stage" else name: fact for name, fact in facts.items()}
            | {"src": _data_url(frames, seconds)}
            for frames, (_, facts) in zip(frames_by_cell, grid, strict=True)
        ],
    }


def _data_url(frames: Sequence["Image"], seconds: float) -> str:
    """Shrinks an image or the frames of a clip, and returns it as a `data:` URL in WebP.

    Args:
        frames: The image of Pillow, in RGB, or the frames of a clip, which repeats forever. Each is
            shrunk in place until its longer side has at most 160 pixels (`MAX_PIXELS`). Those whose
            longer side has at most 64 pixels are stored without loss.
        seconds: The time for which each frame of a clip is shown. Not read for one image.
    """
    for frame in frames:
        frame.thumbnail((MAX_PIXELS, MAX_PIXELS))
    first, *others = frames
    moving: dict[str, Any] = {}
    if others:
        moving = {"save_all": True, "append_images": others, "loop": 0}
        moving["duration"] = round(1000 * seconds)
    data = io.BytesIO()
    lossless = max(first.size) <= 64
    first.save(data, format="WEBP", lossless=lossless, quality=80, **moving)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def _figures(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Draws the curves of all runs. Figures for which no run has a value are left out.

    Args:
        runs: One dict per run, in order, from `_describe_run`: its "name", "trained", "watched" and
            "metrics" (lists of values by name) are used.

    Yields:
        One dict per figure:
          * "section", "metric" and "title", from `_titles`;
          * "svg": the `<svg>` element as text;
          * "axis": a list of four numbers: the first and the last iteration of the horizontal axis,
            and their distances from the left edge in CSS pixels;
          * "lines": for each run that has the metric a dict of "run" (its index), "x" (iterations),
            "y" (values) and "error" (standard errors, empty if not recorded).
    """
    for number, (section, metric, title) in enumerate(_titles(runs)):
        lines = [
            line
            for index, run in enumerate(runs)
            if (line := _line(index, run, metric, named=len(runs) > 1)) is not None
        ]
        if not lines:
            continue
        svg, axis = curves(lines, f"figure{number}")
        yield {
            "section": section,
            "metric": metric,
            "title": title,
            "svg": svg,
            "axis": axis,
            "lines": [
                {"run": line.run, "x": line.x, "y": line.y, "error": line.error} for line in lines
            ],
        }


def _line(index: int, run: Mapping[str, Any], metric: str, *, named: bool) -> Line | None:
    """Returns the line of one metric of a run. Iterations without a value are left out.

    Args:
        index: The index of the run on the page, from 0, which decides the color.
        run: The dict of the run from `_describe_run`, of which "metrics" (lists of values by name,
            "iteration" among them, None for unknown values) and "name" are used.
        metric: The name of the metric. Its standard error "METRIC/standard_error", if recorded,
            becomes a band, unless one of them is unknown, such as that of a single image.
        named: Whether the label is the name of the run. Otherwise it is the last value with three
            significant digits.

    Returns:
        The line; None if the run has no value of the metric.
    """
    columns = run["metrics"]
    errors = columns.get(f"{metric}/standard_error")
    indices = [i for i, value in enumerate(columns.get(metric, [])) if value is not None]
    if not indices:
        return None
    y = [columns[metric][i] for i in indices]
    band = [errors[i] for i in indices] if errors else []
    return Line(
        run=index,
        label=run["name"] if named else f"{y[-1]:.3g}",
        x=[columns["iteration"][i] for i in indices],
        y=y,
        error=[] if None in band else band,
    )


def _titles(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Lists the figures of the page: evaluated scores, fixed ones, then what rewards cost.

    The evaluated scores are the metrics of any run that have a standard error. A score is left out
    if every run that has it trains on this score alone: "eval/reward" then has the same curve up to
    the weight. The fixed figures (`_FIGURES`: rewards of explored and kept samples, rank
    correlations, the update, times) are listed even if no run has the metric. The costs are the
    metrics "reward_cost/REWARD/COUNTER" of training; costs of evaluations have no figure.

    Args:
        runs: One dict per run from `_describe_run`: the names in "metrics", "trained" and "watched"
            are used.

    Yields:
        (section, metric, title) of every figure, e.g. ("rewards", "eval/reward", "Held-out reward,
        trained on"). The sections are "rewards", those of `_FIGURES` and "cost". Other scores have
        the title "NAME, held-out", or "NAME, watched only" if for each run that has the score,
        "trained" lacks it and "watched" has it or its reward ("geneval" for "geneval/strict").
        Costs have the title "REWARD: COUNTER per iteration".
    """
    scores = dict.fromkeys(
        key for run in runs for key in run["metrics"] if f"{key}/standard_error" in run["metrics"]
    )
    for key in scores:
        name = key.removeprefix("eval/")
        having = [run for run in runs if key in run["metrics"]]
        if all(run["trained"] == [name] for run in having):
            continue
        if all(
            name not in run["trained"]
            and any(name == other or name.startswith(f"{other}/") for other in run["watched"])
            for run in having
        ):
            title = f"{name}, watched only"
        elif name == "reward":
            title = "Held-out reward, trained on"
        else:
            title = f"{name}, held-out"
        yield "rewards", key, title
    for section, figures in _FIGURES.items():
        for metric, title in figures.items():
            yield section, metric, title
    costs = dict.fromkeys(
        key for run in runs for key in run["metrics"] if key.startswith(f"{_COST}/")
    )
    for key in costs:
        reward, _, counter = key.removeprefix(f"{_COST}/").rpartition("/")
        title = f"{reward}: {counter.replace('_', ' ')} per iteration"
        yield "cost", key, title
