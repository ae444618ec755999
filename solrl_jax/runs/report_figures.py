"""Draws the curves of a report as SVG text, with one line per run.

matplotlib draws them. Colors and fonts are variables of the page's CSS, so that one drawing serves
both the dark and the light theme.
"""

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

# All lengths are in CSS pixels.
SIZE = (380, 200)
# The margins around the axes.
_LEFT = 40
_TOP = 12
_BOTTOM = 24
_LETTER_WIDTH = 7  # the largest width of a letter of a label
_MAX_LETTERS = 15  # letters of a label that are shown
_LABEL_HEIGHT = 13
# Placeholder colors for matplotlib. `_apply_theme` replaces each by a variable of the page.
_INK = "#010101"
_RULE = "#010102"
_RUNS = [f"#0102{number:02}" for number in range(6)]
_VARIABLES = {_INK: "--muted", _RULE: "--rule"} | {
    color: f"--run-{number}" for number, color in enumerate(_RUNS)
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One metric of one run, as a line of a figure.

    Attributes:
        run: The index of the run on the page, from 0, which decides the color. There are six
            colors, in a cycle.
        label: Text at the right edge, which is shortened to 15 characters when it is drawn.
        x: Iterations, at least one, ascending.
        y: The finite value at each iteration.
        error: Half of the height of the band around each value; empty for no band.
    """

    run: int
    label: str
    x: Sequence[int]
    y: Sequence[float]
    error: Sequence[float]


def curves(lines: Sequence[Line], name: str) -> tuple[str, list[float]]:
    """Draws a figure of 380 x 200 CSS pixels.

    Args:
        lines: The lines of the figure, at least one. Lines of at most 30 points have markers.
        name: A name that no other figure of the page has. Identifiers in the SVG begin with it.

    Returns:
        The `<svg>` element as text, and four numbers that place the horizontal axis: its first and
        its last iteration, and their distances from the left edge in CSS pixels. For a single
        iteration, the axis ends at the next one.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    width, height = SIZE
    right = width - 18 - _LETTER_WIDTH * max(len(_shorten(line.label)) for line in lines)
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
                low = [y - e for y, e in zip(line.y, line.error, strict=True)]
                high = [y + e for y, e in zip(line.y, line.error, strict=True)]
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
    return _apply_theme(text.getvalue(), name), [first, max(last, first + 1), _LEFT, right]


def _label(axes: Any, lines: Sequence[Line]) -> None:
    """Writes each line's label at the right edge, at the height of the line's last value.

    Labels that would overlap are moved upwards.

    Args:
        axes: The matplotlib axes with the lines, whose limits are final. It is changed.
        lines: The lines. The label of each is written in its color.
    """
    heights = sorted(
        (float(axes.transData.transform((0, line.y[-1]))[1]), number)
        for number, line in enumerate(lines)
    )
    y = {}
    lowest = float("-inf")
    for height, number in heights:
        lowest = max(height, lowest + _LABEL_HEIGHT)
        y[number] = lowest
    for number, line in enumerate(lines):
        axes.annotate(
            _shorten(line.label),
            xy=(1, axes.transData.inverted().transform((0, y[number]))[1]),
            xycoords=("axes fraction", "data"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=_RUNS[line.run % len(_RUNS)],
            fontsize=11.5,
            parse_math=False,
            annotation_clip=False,
        )


def _shorten(label: str) -> str:
    """Shortens a label to `_MAX_LETTERS` (15) letters.

    Args:
        label: The label, text of any length.

    Returns:
        The label itself if it is short enough; otherwise its first and last seven letters with "…"
        between them.
    """
    if len(label) <= _MAX_LETTERS:
        return label
    half = _MAX_LETTERS // 2
    return f"{label[:half]}…{label[-half:]}"


def _apply_theme(svg: str, name: str) -> str:
    """Returns the `<svg>` element of a document in the colors and the font of the page.

    Comments, metadata and the fixed size are removed, the placeholder colors become variables of
    CSS, and the element is hidden from screen readers.

    Args:
        svg: The SVG document that matplotlib has drawn.
        name: The prefix that all identifiers get.
    """
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
