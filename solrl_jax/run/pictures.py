"""Pictures of a run: image grids, before and after, reward curves, and how well a proxy ranks.

Images are float [H, W, 3] in 0..1.  Every file appears whole or not at all.  The drawing libraries are imported where
they are used, because they are slow to import; nothing here opens a window.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from solrl_jax.storage.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

_INK, _QUIET, _PAPER = "#1f2328", "#6e7781", "#ffffff"
# Okabe and Ito's colours, which stay apart for colour-blind readers.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GAP = 4  # pixels between images
# Images of a before-and-after sheet are shown between these widths in pixels: legible, and a file that can be mailed.
_SMALLEST, _LARGEST = 96, 384


def to_uint8(image: Any) -> np.ndarray:
    """round(255 x) clipped to 0..255, the bytes of `image` float [..., 3]; what is not a number is black."""
    unit = np.clip(np.nan_to_num(np.asarray(image, np.float32)), 0, 1)
    return np.round(255 * unit).astype(np.uint8)


def save_png(path: str | Path, image: Any) -> None:
    """Writes `image` float [H, W, 3] as PNG, a pixel a pixel."""
    from PIL import Image

    _save_image(path, Image.fromarray(to_uint8(image)))


def grid(images: Any, columns: int, captions: Sequence[str] | None = None, scale: int = 1) -> "Image":
    """`images` float [N, H, W, 3] in rows of `columns`, each enlarged `scale` times without smoothing.

    `captions` [N] stand below their images, in two lines at most.
    """
    from PIL import Image, ImageDraw

    pixels = to_uint8(images).repeat(scale, axis=1).repeat(scale, axis=2)
    count, height, width = pixels.shape[:3]
    if captions is not None and len(captions) != count:
        raise ValueError(f"{len(captions)} captions for {count} images")
    columns = max(min(columns, count), 1)
    font = _font(int(np.clip(width / 11, 9, 16)))
    texts = ["\n".join(_wrap(caption, font, width, lines=2)) for caption in captions or []]
    band = _text_height(font, max((text.count("\n") + 1 for text in texts), default=0))
    rows = -(-count // columns)
    cell_width, cell_height = width + _GAP, height + band + _GAP
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, image in enumerate(pixels):
        left, top = _GAP + index % columns * cell_width, _GAP + index // columns * cell_height
        sheet.paste(Image.fromarray(image), (left, top))
        if texts:
            draw.multiline_text((left, top + height + 2), texts[index], _INK, font, spacing=2)
    return sheet


def save_grid(path: str | Path, images: Any, columns: int, captions: Sequence[str] | None = None, scale: int = 1) -> None:
    """Writes what `grid` draws."""
    _save_image(path, grid(images, columns, captions, scale))


def save_before_after(
    path: str | Path,
    before: Any,
    after: Any,
    prompts: Sequence[str],
    titles: tuple[str, str] = ("before training", "after training"),
) -> None:
    """Writes a sheet with a row a prompt: its images before on the left, after on the right, the prompt above them.

    `before` and `after` are float [P, S, H, W, 3], S images of P prompts from the same seeds, or [P, H, W, 3].
    """
    from PIL import Image, ImageDraw

    both = [to_uint8(side) for side in (before, after)]
    both = [side[:, None] if side.ndim == 4 else side for side in both]
    if both[0].shape != both[1].shape or len(prompts) != len(both[0]):
        raise ValueError(f"before {both[0].shape}, after {both[1].shape} and {len(prompts)} prompts do not match")
    count, per_row, height, width = both[0].shape[:4]
    shown = width * -(-_SMALLEST // width) if width < _SMALLEST else min(width, _LARGEST)
    size = (shown, round(height * shown / width))
    smooth = Image.Resampling.LANCZOS if shown < width else Image.Resampling.NEAREST
    half, margin, gutter = per_row * (shown + _GAP) - _GAP, 16, 24
    title_font, font = _font(18, bold=True), _font(14)
    head, caption = _text_height(title_font, 1) + 8, _text_height(font, 1) + 4
    row_height = caption + size[1] + 10
    sheet = Image.new("RGB", (2 * (margin + half) + gutter, 2 * margin + head + count * row_height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for side, (images, title) in enumerate(zip(both, titles, strict=True)):
        left = margin + side * (half + gutter)
        draw.text((left, margin), _wrap(title, title_font, half, lines=1)[0], _INK, title_font)
        for row in range(count):
            top = margin + head + row * row_height + caption
            for column in range(per_row):
                image = Image.fromarray(images[row, column]).resize(size, smooth)
                sheet.paste(image, (left + column * (shown + _GAP), top))
    for row, prompt in enumerate(prompts):
        text = _wrap(prompt, font, 2 * half + gutter, lines=1)[0]
        draw.text((margin, margin + head + row * row_height), text, _QUIET, font)
    _save_image(path, sheet)


def save_curve(
    path: str | Path,
    rows: Iterable[Mapping[str, Any]],
    series: Mapping[str, str],
    lower: Mapping[str, str] | None = None,
    *,
    labels: tuple[str, str] = ("reward", "value"),
    title: str = "",
) -> None:
    """Draws metrics over iterations as PNG.

    `rows` are those of `metrics.read`; `series` maps a legend label to the name of a metric; `lower` is the same for a
    second panel below, for metrics of another kind; `labels` name the two vertical axes.  Rows without a value for a
    metric are skipped, so one that is measured every tenth iteration is drawn through its own points.
    """
    rows = list(rows)
    panels = [panel for panel in (series, lower) if panel]
    figure = _figure(7.2, 1.2 + 3.0 * len(panels))
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel, label in zip(all_axes, panels, labels, strict=False):
        for color, (name, key) in zip(_COLORS * len(panel), panel.items(), strict=False):
            points = [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]
            marker = "o" if len(points) <= 30 else None
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, color=color, label=name, linewidth=1.8, marker=marker, markersize=4)
        axes.set_ylabel(label)
        axes.legend(frameon=False, loc="best", fontsize=9)
    figure.align_ylabels(all_axes)
    all_axes[-1].set_xlabel("iteration")
    all_axes[-1].xaxis.get_major_locator().set_params(integer=True)
    if title:
        all_axes[0].set_title(title, loc="left", fontsize=12, color=_INK)
    _save_figure(path, figure)


def save_correlation(
    path: str | Path, proxy: Any, true: Any, labels: tuple[str, str] = ("proxy reward", "true reward")
) -> None:
    """Draws `true` [P, N] against `proxy` [P, N] as PNG, a colour a prompt, the mean within-prompt Spearman above.

    Pairs that are not finite are left out; a prompt with fewer than two distinct values has no correlation.
    """
    from scipy.stats import spearmanr

    proxy, true = np.asarray(proxy, np.float64), np.asarray(true, np.float64)
    if proxy.shape != true.shape or proxy.ndim != 2:
        raise ValueError(f"proxy {proxy.shape} and true {true.shape} must be one shape [prompts, candidates]")
    figure = _figure(5.6, 5.6)
    axes = figure.subplots()
    correlations = []
    for index, (x, y) in enumerate(zip(proxy, true, strict=True)):
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[finite], y[finite]
        if len(np.unique(x)) > 1 and len(np.unique(y)) > 1:
            correlations.append(spearmanr(x, y).statistic)
        axes.scatter(x, y, s=16, color=_COLORS[index % len(_COLORS)], alpha=0.6, linewidths=0)
    low, high = (max(a, b) for a, b in zip(axes.get_xlim(), axes.get_ylim(), strict=True))
    if low < high:
        axes.plot((low, high), (low, high), color=_QUIET, linewidth=1, linestyle="--", zorder=0, label="equal")
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    mean = f"{np.mean(correlations):.3f}" if correlations else "undefined"
    axes.set_title(f"Spearman {mean}, mean of {len(correlations)} prompts", loc="left", fontsize=12, color=_INK)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _save_figure(path, figure)


def save_sweep(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Draws how columns of `rows` depend on "steps" (of the largest pools) and on "candidates" (of the most steps), as PNG.

    A line a "precision", "exact_steps" and "sigmas"; an axis along which nothing varies has no panels.
    """
    rows, columns = list(rows), list(columns)
    fixed = {axis: max(row[axis] for row in rows) for axis in ("steps", "candidates")}
    along = [axis for axis in fixed if len({row[axis] for row in rows}) > 1] or ["steps"]
    figure = _figure(3.4 * len(columns), 3.2 * len(along))
    all_axes = figure.subplots(len(along), len(columns), squeeze=False)
    for axis, line_of_axes in zip(along, all_axes, strict=True):
        (other,) = fixed.keys() - {axis}
        chosen = sorted((row for row in rows if row[other] == fixed[other]), key=lambda row: row[axis])
        for column, axes in zip(columns, line_of_axes, strict=True):
            line = lambda row: f"{row['precision']}, {row['exact_steps']} exact, {row['sigmas']} sigmas"
            for color, label in zip(_COLORS * len(chosen), dict.fromkeys(map(line, rows)), strict=False):
                points = [(row[axis], row[column]) for row in chosen if line(row) == label]
                axes.plot(*zip(*points, strict=True), color=color, label=label, linewidth=1.8, marker="o", markersize=4)
            axes.set_xlabel(axis)
            axes.set_ylabel(column.replace("_", " "))
            axes.set_title(f"{fixed[other]} {other}", loc="left", fontsize=9, color=_INK)
            axes.xaxis.get_major_locator().set_params(integer=True)
    all_axes[0, 0].legend(frameon=False, loc="best", fontsize=9)
    _save_figure(path, figure)


def _figure(width: float, height: float) -> "Figure":
    """An empty figure of `width` x `height` inches that belongs to no window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    return figure


def _save_figure(path: str | Path, figure: "Figure") -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_QUIET)
        axes.tick_params(colors=_INK, color=_QUIET, labelsize=9)
        axes.grid(True, color=_QUIET, alpha=0.2, linewidth=0.8)
        axes.set_axisbelow(True)
    with atomic(path) as partial:
        figure.savefig(partial, format="png")


def _save_image(path: str | Path, image: "Image") -> None:
    with atomic(path) as partial:
        image.save(partial, format="PNG")


def _font(size: int, *, bold: bool = False) -> "FreeTypeFont":
    """The font that comes with matplotlib, for its letters of many scripts; `size` in pixels."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def _text_height(font: "FreeTypeFont", lines: int) -> int:
    """Pixels that `lines` lines need, the space around them included."""
    ascent, descent = font.getmetrics()
    return lines * (ascent + descent + 2) + 2 if lines else 0


def _wrap(text: str, font: "FreeTypeFont", width: int, *, lines: int) -> list[str]:
    """`text` broken at spaces into at most `lines` lines of `width` pixels; what does not fit ends in an ellipsis."""
    out = [""]
    for word in text.split():
        longer = f"{out[-1]} {word}".strip()
        if out[-1] and font.getlength(longer) > width and len(out) < lines:
            out.append(word)
        else:
            out[-1] = longer
    for index, line in enumerate(out):
        if font.getlength(line) > width:
            while line and font.getlength(line + "…") > width:
                line = line[:-1]
            out[index] = line.rstrip() + "…"
    return out
