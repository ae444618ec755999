"""Writes the results of a study: `study.json`, and for readers `study.md` and `study.png`."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from solrl_jax.errors import InputError
from solrl_jax.runs.image_files import COLORS, new_figure, save_figure
from solrl_jax.storage.files import atomic_write
from solrl_jax.storage.readers import parse_json, read_text, to_strict_json
from solrl_jax.study.compare import PROGRESS, Course, Estimate

FIGURE = "study.png"
DATA = "study.json"
PAGE = "study.md"
UNKNOWN = "–"
_STYLES = ("-", "--", ":")  # line styles, for arms beyond the number of colors
# By the name of a setting: pairs of its value in an arm and the name of the arm.
Sweeps = Mapping[str, Sequence[tuple[Any, str]]]


def write(
    folder: Path, study: Mapping[str, Any], courses: Mapping[str, Sequence[Course]], sweeps: Sweeps
) -> None:
    """Writes the results of a study to `study.json`, `study.png` and `study.md`, in this order.

    Existing files are replaced, each as a whole. Numbers that are not finite become null in
    `study.json`.

    Args:
        folder: The directory of the study. It is created if necessary.
        study: The summary of the study, as `summary.summarize` returns it: a dict with the keys
            "plan", "setting", "prices", "arms", "compared", "missing" and "runs".
        courses: The finished runs of each arm (one of the variants that the study compares) by its
            name, for the figure.
        sweeps: For each setting that the study sweeps, by its dotted name, pairs (value of the
            setting, name of the arm that has it), for the figure.

    Raises:
        RunError: If a file cannot be written to the disk.
    """
    atomic_write(folder / DATA, json.dumps(to_strict_json(study), allow_nan=False, indent=1) + "\n")
    draw(folder / FIGURE, courses, sweeps, study["setting"]["evaluation"])
    atomic_write(folder / PAGE, markdown(study))


def refuse_foreign(folder: Path, logs: Iterable[Path] = ()) -> None:
    """Checks that a study would not replace files that something else wrote.

    Args:
        folder: The directory of the study, whose `study.json`, `study.md` and `study.png` are
            replaced. If its `study.json` is that of a study (its "plan" has a "name"), everything
            is accepted.
        logs: Further files that are replaced: the logs of runs. They are not checked if the
            directory has a file `.lock`, because a study has then trained there.

    Raises:
        InputError: If one of these files exists and `study.json` is missing, cannot be read or is
            no study's.
    """
    replaced = (
        *(folder / name for name in (DATA, PAGE, FIGURE)),
        *(() if (folder / ".lock").exists() else logs),
    )
    if existing := [path for path in replaced if os.path.lexists(path)]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if parse_json(read_text(folder / DATA))["plan"]["name"]:
                return
        raise InputError(
            f"out={existing[0]}: exists, and no study wrote it; name another directory"
        )


def markdown(study: Mapping[str, Any]) -> str:
    """Returns the page of a study as Markdown text.

    It shows what was compared and how it was measured, tables of the arms and of the compared
    pairs, the runs that are missing, and the figure `study.png`.

    Args:
        study: The summary of the study, as `summary.summarize` returns it. Its entries "plan"
            ("name" and "what" alone), "setting", "arms", "compared" and "missing" are shown.
    """
    lines = [f"# Study `{study['plan']['name']}`", "", study["plan"]["what"], ""]
    lines += [f"* {name}: {text}" for name, text in study["setting"].items()]
    lines += ["", *_arms(study["arms"]), "", *_pairs(study["compared"])]
    if study["missing"]:
        lines += [
            "",
            "Not among these:",
            "",
            *(f"* `{name}`: {why}" for name, why in study["missing"].items()),
        ]
    return "\n".join([*lines, "", f"![curves of the study]({FIGURE})", ""])


def _arms(arms: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table of arms in Markdown, and a legend.

    Args:
        arms: For each arm, by its name, a dict of figures: "seeds", "iterations", "scores", "cost"
            (in seconds), "network_evaluations", "at_equal_cost" and "fidelity", as
            `compare.compare` returns them. Without arms, only the head and the legend are yielded.
    """
    names = [
        name
        for name in dict.fromkeys(name for arm in arms.values() for name in arm["scores"])
        if name != "reward"
    ]
    equal = next((arm["at_equal_cost"]["cost"] for arm in arms.values()), math.nan)
    heads = [
        "seeds",
        "iterations",
        "held-out reward",
        *names,
        "counted s",
        "network evaluations",
        f"reward at {equal:.3g} s",
    ]
    heads += ["Spearman, kept", "true rank of best half", "worst half"]
    yield from _head("arm", heads)
    for name, arm in arms.items():
        scores = [format_estimate(arm["scores"].get(score)) for score in ("reward", *names)]
        counted = [
            format_number(arm["cost"]),
            f"{arm['network_evaluations']:,}",
            format_estimate(arm["at_equal_cost"]["reward"]),
        ]
        along = [arm["fidelity"].get(key) for key in ("spearman", "best", "worst")]
        places = [
            " → ".join(format_number(value[end][0]) for end in ("first", "last"))
            if value
            else UNKNOWN
            for value in along
        ]
        yield _row(
            f"`{name}`",
            [str(len(arm["seeds"])), str(arm["iterations"]), *scores, *counted, *places],
        )
    yield ""
    yield (
        "Means ± standard errors over seeds. Fidelity: first → last quarter of the iterations, "
        "within the kept."
    )


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table of compared pairs in Markdown, and a legend.

    Args:
        pairs: For each pair a dict of figures: "arm", "against", "final", "final_share",
            "cost_share", "at_equal_cost" and "speed_up", as `compare.compare` returns them. Without
            pairs, nothing is yielded.
    """
    if not pairs:
        return
    parts = [f"speed-up at {part} %" for part in PROGRESS]
    yield from _head(
        "arm, against", ["final reward", "of it, %", "cost, times", "at equal cost", *parts]
    )
    for pair in pairs:
        mean, error = (100 * value for value in pair["final_share"])
        cells = [
            format_estimate(pair["final"], "+"),
            format_estimate((mean, error), "+", 1),
            format_number(pair["cost_share"]),
        ]
        cells += [
            f"{format_estimate(pair['at_equal_cost']['reward'], '+')} at "
            f"{format_number(pair['at_equal_cost']['cost'])} s"
        ]
        cells += [format_estimate(pair["speed_up"][str(part)], digits=2) for part in PROGRESS]
        yield _row(f"`{pair['arm']}`, `{pair['against']}`", cells)
    yield ""
    yield (
        "Differences seed by seed. Speed-up: how many times the other's cost to reach that part of "
        "its own gain."
    )


def _head(first: str, names: Sequence[str]) -> Iterator[str]:
    """Yields the two lines of a table's head in Markdown: the names, and dashes.

    Args:
        first: The name of the first column.
        names: The names of all further columns.
    """
    yield _row(first, names)
    yield _row("---", ["---"] * len(names))


def _row(first: str, cells: Sequence[str]) -> str:
    """Returns a line of a table in Markdown, "| first | cell | cell |".

    Args:
        first: The text of the first cell.
        cells: The texts of all further cells. Nothing is escaped.
    """
    return f"| {' | '.join([first, *cells])} |"


def format_estimate(value: Estimate | None, sign: str = "", digits: int = 3) -> str:
    """Formats an estimate as "mean ± standard error".

    Args:
        value: The mean and the standard error, or None if they are unknown.
        sign: "+": a positive mean is printed with its sign. "": only a negative one is.
        digits: The number of decimal places of both.

    Returns:
        The text, e.g. "0.420 ± 0.012"; the mean alone if the standard error is NaN, and "–" if the
        mean is NaN or `value` is None.
    """
    if value is None or math.isnan(value[0]):
        return UNKNOWN
    mean = f"{value[0]:{sign}.{digits}f}"
    return mean if math.isnan(value[1]) else f"{mean} ± {value[1]:.{digits}f}"


def format_number(value: float) -> str:
    """Returns a number as text with up to three significant digits, e.g. "0.5" or "1.23e+04".

    Args:
        value: The number. NaN gives "–", infinity "inf".
    """
    return UNKNOWN if math.isnan(value) else f"{value:.3g}"


def draw(
    path: Path, courses: Mapping[str, Sequence[Course]], sweeps: Sweeps, evaluation: str
) -> None:
    """Draws the curves of a study as one figure.

    It has panels of reward over cost and over iterations, of each watched score over cost (also of
    arms that train on it), of the fidelity "spearman" over iterations (if an arm regenerates), and
    of the last reward over the values of each swept setting (if an arm of it is finished). Curves
    are means over seeds. If there are several seeds, a band shows one standard error on both sides
    (bars in the panels of swept settings). A curve over cost uses the costs of the arm's first run.

    Args:
        path: The PNG file to write. It is replaced if it exists.
        courses: The finished runs of each arm by its name. Arms without any are not drawn.
        sweeps: For each setting that the study sweeps, by its dotted name, pairs (value of the
            setting, name of the arm that has it), in the order in which they are drawn.
        evaluation: How rewards were measured, in one line, for the title.

    Raises:
        RunError: If the file cannot be written to the disk.
    """
    arms = {arm: arm_courses for arm, arm_courses in courses.items() if arm_courses}
    faithful = {arm: arm_courses for arm, arm_courses in arms.items() if arm_courses[0].fidelity}
    swept = {
        setting: points
        for setting, points in sweeps.items()
        if any(arm in arms for _, arm in points)
    }
    watched = dict.fromkeys(
        name for arm_courses in arms.values() for name in arm_courses[0].watched
    )
    panels = 2 + len(watched) + bool(faithful) + len(swept)
    figure = new_figure(9.0, 0.3 + 3.4 * -(-panels // 2))
    figure.suptitle(f"held-out reward: {evaluation}", fontsize=7, x=0.01, ha="left", wrap=True)
    axes = iter(figure.subplots(-(-panels // 2), 2).flat)
    looks = {
        arm: (COLORS[i % len(COLORS)], _STYLES[i // len(COLORS) % len(_STYLES)])
        for i, arm in enumerate(arms)
    }
    for x, label in (("cost", "counted seconds"), ("iterations", "iteration")):
        panel = next(axes)
        for arm, arm_courses in arms.items():
            _band(
                panel,
                getattr(arm_courses[0], x),
                np.array([course.reward for course in arm_courses]),
                looks[arm],
                arm,
            )
        panel.set(xlabel=label, ylabel="held-out reward")
    if arms:
        figure.axes[0].legend(
            frameon=False, fontsize=8 if len(arms) <= 6 else 6, ncols=-(-len(arms) // 6)
        )
    for name in watched:
        panel = next(axes)
        for arm, arm_courses in arms.items():
            scores = [course.score(name) for course in arm_courses]
            if all(score is not None for score in scores):
                _band(panel, arm_courses[0].cost, np.array(scores), looks[arm], arm)
        panel.set(xlabel="counted seconds", ylabel=f"held-out {name} (watched)")
    if faithful:
        panel = next(axes)
        for arm, arm_courses in faithful.items():
            spearman = np.array([course.fidelity["spearman"] for course in arm_courses])
            _band(panel, np.arange(1, spearman.shape[1] + 1), spearman, looks[arm], arm)
        panel.set(xlabel="iteration", ylabel="Spearman, kept samples")
    for setting, points in swept.items():
        panel = next(axes)
        known = [
            (value, [course.reward[-1] for course in arms[arm]])
            for value, arm in points
            if arm in arms
        ]
        error = [np.std(y, ddof=1) / len(y) ** 0.5 if len(y) > 1 else 0.0 for _, y in known]
        values = [str(value) for value, _ in known]
        mean = [np.mean(y) for _, y in known]
        panel.errorbar(values, mean, error, color=COLORS[0], marker="o", capsize=3)
        panel.set(xlabel=setting, ylabel="held-out reward at the end")
    for panel in axes:
        panel.remove()
    save_figure(path, figure)


def _band(panel: Any, x: np.ndarray, y: np.ndarray, look: tuple[str, str], label: str) -> None:
    """Draws the mean of several curves, with a band of one standard error on both sides.

    Points are marked if there are at most 10. A single curve has no band. A point where one of the
    curves is NaN is a gap.

    Args:
        panel: The matplotlib axes to draw on.
        x: The x value of each point, [x], for all curves.
        y: The curves, [seeds, x].
        look: A pair: the color and the line style, as matplotlib names them.
        label: The name in the legend.
    """
    color, style = look
    mean = y.mean(0)
    error = y.std(0, ddof=1) / len(y) ** 0.5 if len(y) > 1 else np.zeros(y.shape[1])
    panel.fill_between(x, mean - error, mean + error, color=color, alpha=0.16, linewidth=0)
    marker = "o" if len(x) <= 10 else None
    panel.plot(
        x,
        mean,
        color=color,
        linestyle=style,
        linewidth=1.6,
        marker=marker,
        markersize=3,
        label=label,
    )
