"""Curves of a report as SVG text, for pages: small, with one line a run, and in the page's own colours and letters.

matplotlib draws them. The page's CSS decides what the colours are, so one drawing serves dark and light.
"""

import dataclasses
import io
import re
from collections.abc import Sequence

SIZE = (380, 200)  # CSS pixels; lengths of a figure are in these
# around the axes
_LEFT = 40
_TOP = 12
_BOTTOM = 24
# width of a letter of a label at most; letters that are shown of a label
_LETTER = 7
_MOST = 15
_LINE = 13  # height of a label
# what matplotlib is told for each colour of the page: `_themed` puts the variable in its place
_INK = "#010101"
_RULE = "#010102"
_RUNS = [f"#0102{number:02}" for number in range(6)]
_VARIABLES = {_INK: "--muted", _RULE: "--rule"} | {
    color: f"--run-{number}" for number, color in enumerate(_RUNS)
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A metric of a run."""

    run: int  # its number: decides the colour
    label: str  # at the end of the line
    x: Sequence[int]  # iterations; one at least
    y: Sequence[float]
    error: Sequence[float]  # half the height of the band around y; empty: no band


def curves(lines: Sequence[Line], name: str) -> tuple[str, list[float]]:
    """The figure as SVG text, and where its horizontal axis is: first and last iteration, their distances from the left.

    name: of the figure, for identifiers that no other figure of the page has.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    width, height = SIZE
    right = width - 18 - _LETTER * max(len(_short(line.label)) for line in lines)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        box = (
            _LEFT / width,
            _BOTTOM / height,
            (right - _LEFT) / width,
            1 - (_TOP + _BOTTOM) / height,
        )
        axes = figure.add_axes(box, frameon=False)
        for line in lines:
            color = _RUNS[line.run % len(_RUNS)]
            if line.error:
                low, high = (
                    [y + sign * e for y, e in zip(line.y, line.error, strict=True)]
                    for sign in (-1, 1)
                )
                axes.fill_between(line.x, low, high, color=color, alpha=0.16, linewidth=0)
            marker = "o" if len(line.x) <= 30 else None
            axes.plot(
                line.x,
                line.y,
                color=color,
                linewidth=1.6,
                marker=marker,
                markersize=3,
                clip_on=False,
            )
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.grid(True, color=_RULE, linewidth=1)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, pad=6, colors=_INK, labelsize=11)
        first = min(line.x[0] for line in lines)
        last = max(line.x[-1] for line in lines)
        axes.set_xlim(first, max(last, first + 1))
        _label(axes, lines)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True)
    return _themed(text.getvalue(), name), [first, max(last, first + 1), _LEFT, right]


def _label(axes, lines: Sequence[Line]) -> None:
    """Writes each line's label at its end, moved upwards where two would overlap."""
    placed = sorted(
        (float(axes.transData.transform((0, line.y[-1]))[1]), number)
        for number, line in enumerate(lines)
    )
    y = {}
    lowest = float("-inf")
    for wanted, number in placed:
        y[number] = lowest = max(wanted, lowest + _LINE)
    for number, line in enumerate(lines):
        at = axes.transData.inverted().transform((0, y[number]))[1]
        color = _RUNS[line.run % len(_RUNS)]
        where = dict(
            xy=(1, at),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
        )
        axes.annotate(
            _short(line.label),
            **where,
            color=color,
            fontsize=11.5,
            parse_math=False,
            annotation_clip=False,
        )


def _short(label: str) -> str:
    """A label of at most `_MOST` letters: of a longer one, how it begins and how it ends."""
    return label if len(label) <= _MOST else f"{label[: _MOST // 2]}…{label[-(_MOST // 2) :]}"


def _themed(svg: str, name: str) -> str:
    """The `<svg>` element with the page's colours, its font, and identifiers that begin with `name`."""
    svg = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|\s(?=\s)",
        "",
        svg[svg.index("<svg") :],
        flags=re.DOTALL,
    )
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"(font: [\d.]+px) [^;\"]+", r"\1 var(--sans)", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
