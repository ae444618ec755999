"""Pictures of a run: image grids, before and after training.

An image is float [height, width, 3] in 0..1. Every file appears whole or not at all. matplotlib and Pillow are imported in the
functions that use them, because they are slow to import. Nothing here opens a window.
"""

import bisect
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, UInt8

from solrl_jax.errors import InputError, first_line
from solrl_jax.storage.files import atomic
from solrl_jax.storage.images import to_uint8
from solrl_jax.storage.readers import parse_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

Numbers = Array | np.ndarray
_INK = "#1f2328"
_QUIET = "#6e7781"
_PAPER = "#ffffff"
# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_RIGHT = "#009E73"
_WRONG = "#D55E00"
_GAP = 4  # pixels between images
# Widths in pixels between which `save_before_after` shows an image: legible, and a file that can be mailed.
_SMALLEST = 96
_LARGEST = 384
_CELLS = "Cells"  # the metadata of a PNG file of `save_grid` that has the facts of its images
_MOST_CELLS = (
    2**11
)  # images in a file that is read: two stages of a pool of the largest `eval.num_grid_images`
# pixels: the frame of an image of `save_before_after`, the tick or cross in its corner
_FRAME = 4
_MARK = 20


def save_png(path: str | Path, image: Float[Numbers, "h w 3"]) -> None:
    """Writes an image as PNG, one pixel of the file for each of its own."""
    from PIL import Image

    _save_image(path, Image.fromarray(to_uint8(image)))


def save_grid(
    path: str | Path,
    images: Float[Numbers, "n h w 3"],
    columns: int,
    captions: Sequence[str],
    facts: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Draws images in rows of `columns` as PNG, one pixel of the file for each of theirs.

    captions: one an image, shown below it in two lines at most. Raises ValueError if there are more or fewer.
    facts: of each image, what `read_grid` returns with it.
    """
    from PIL import Image, ImageDraw

    pixels = to_uint8(images)
    count, height, width = pixels.shape[:3]
    columns = min(columns, count)
    font = _font(int(np.clip(width / 11, 9, 16)))
    texts = ["\n".join(_wrap(caption, font, width, lines=2)) for caption in captions]
    band = _text_height(font, max(text.count("\n") + 1 for text in texts))
    rows = -(-count // columns)
    cell_width = width + _GAP
    cell_height = height + band + _GAP
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    corners = [
        (_GAP + i % columns * cell_width, _GAP + i // columns * cell_height) for i in range(count)
    ]
    for image, text, (left, top) in zip(pixels, texts, corners, strict=True):
        sheet.paste(Image.fromarray(image), (left, top))
        draw.multiline_text((left, top + height + 2), text, _INK, font, spacing=2)
    cells = [
        {"box": (x, y, x + width, y + height), **fact}
        for (x, y), fact in zip(corners, facts, strict=False)
    ]
    _save_image(path, sheet, **{_CELLS: json.dumps(cells)} if cells else {})


def read_grid(path: Path) -> list[tuple["Image", dict[str, Any]]]:
    """The images of a file of `save_grid` with their facts; none if it has no facts. Raises InputError if it is damaged."""
    from PIL import Image

    damaged = (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        Image.DecompressionBombError,
    )
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Image.DecompressionBombWarning
            )  # the sheet of a run may be as large
            sheet = Image.open(path, formats=["PNG"])
        with sheet:
            cells = parse_json(getattr(sheet, "text", {}).get(_CELLS, "[]"))
            boxes = [
                (int(x), int(y), int(right), int(bottom))
                for x, y, right, bottom in (cell.pop("box") for cell in cells)
            ]
            inside = all(
                0 <= x < right <= sheet.width and 0 <= y < bottom <= sheet.height
                for x, y, right, bottom in boxes
            )
            taken = sum((right - x) * (bottom - y) for x, y, right, bottom in boxes)
            if (
                sheet.mode != "RGB"
                or not inside
                or taken > sheet.width * sheet.height
                or len(boxes) > _MOST_CELLS
            ):
                raise ValueError("its images do not fit into it")
            return [(sheet.crop(box), cell) for box, cell in zip(boxes, cells, strict=True)]
    except damaged as error:
        raise InputError(f"{path}: not a whole picture ({first_line(error)})") from error


def save_before_after(
    path: str | Path,
    before: Float[Numbers, "p m h w 3"],
    after: Float[Numbers, "p m h w 3"],
    prompts: Sequence[str],
    right_before: Bool[np.ndarray, "p m"] | None = None,
    right_after: Bool[np.ndarray, "p m"] | None = None,
    sides: tuple[str, str] = ("before training", "after training"),
) -> None:
    """Draws m images of each of p prompts as PNG: before training on the left, after training on the right; or other `sides`.

    The images are of the same prompts and seeds; a prompt is shown above its row. right_before, right_after: whether the
    verifier accepts each image. Each is then framed and marked with a tick or a cross, and the titles say how many are right.

    Raises ValueError if there is not one prompt a row, RunError when the disk refuses.
    """
    from PIL import Image, ImageDraw

    titles = [
        side if right is None else f"{side}: {right.sum()} of {right.size} right"
        for side, right in zip(sides, (right_before, right_after), strict=True)
    ]
    title_font = _font(18, bold=True)
    font = _font(14)
    images_in_row, height, width = before.shape[1:4]
    shown = width * -(-_SMALLEST // width) if width < _SMALLEST else min(width, _LARGEST)
    size = (shown, round(height * shown / width))
    step = shown + 2 * _FRAME + _GAP
    margin = 16
    gutter = 24
    half = max(
        images_in_row * step - _GAP, *(math.ceil(title_font.getlength(title)) for title in titles)
    )
    head = _text_height(title_font, 1) + 8
    caption = _text_height(font, 1) + 4
    row_height = caption + size[1] + 2 * _FRAME + 16
    sheet = Image.new(
        "RGB", (2 * (margin + half) + gutter, 2 * margin + head + len(before) * row_height), _PAPER
    )
    draw = ImageDraw.Draw(sheet)
    for row, prompt in zip(range(len(before)), prompts, strict=True):
        text = _wrap(prompt, font, 2 * half + gutter, lines=1)[0]
        draw.text((margin, margin + head + row * row_height), text, _QUIET, font)
    halves = ((to_uint8(before), right_before), (to_uint8(after), right_after))
    for left, title, (images, right) in zip(
        (margin, margin + half + gutter), titles, halves, strict=True
    ):
        draw.text((left, margin), title, _INK, title_font)
        for row, column in np.ndindex(images.shape[:2]):
            framed = _framed(
                images[row, column], size, None if right is None else bool(right[row, column])
            )
            sheet.paste(framed, (left + column * step, margin + head + row * row_height + caption))
    _save_image(path, sheet, Title="    ".join(titles))


def _framed(
    image: UInt8[np.ndarray, "h w 3"], size: tuple[int, int], right: bool | None
) -> "Image":
    """An image resized to `size` (width, height) in a frame; with a tick if `right`, a cross if not, nothing if None."""
    from PIL import Image, ImageDraw

    color = _PAPER if right is None else _RIGHT if right else _WRONG
    framed = Image.new("RGB", (size[0] + 2 * _FRAME, size[1] + 2 * _FRAME), color)
    smooth = Image.Resampling.LANCZOS if size[0] < image.shape[1] else Image.Resampling.NEAREST
    framed.paste(Image.fromarray(image).resize(size, smooth), (_FRAME, _FRAME))
    if right is None:
        return framed
    mark = Image.new(
        "RGB", (_MARK * 8, _MARK * 8), color
    )  # drawn large, then shrunk: that smooths the strokes
    strokes = (
        [[(2, 4.2), (3.4, 5.6), (6, 2.6)]]
        if right
        else [[(2.4, 2.4), (5.6, 5.6)], [(2.4, 5.6), (5.6, 2.4)]]
    )
    for stroke in strokes:
        ImageDraw.Draw(mark).line(
            [(x * _MARK, y * _MARK) for x, y in stroke], _PAPER, width=_MARK, joint="curve"
        )
    framed.paste(
        mark.resize((_MARK, _MARK), Image.Resampling.LANCZOS),
        (framed.width - _MARK, framed.height - _MARK),
    )
    return framed


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of `width` x `height` inches, drawn in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    return figure


def save_figure(path: str | Path, figure: "Figure") -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_QUIET)
        axes.tick_params(colors=_INK, color=_QUIET, labelsize=9)
        axes.grid(True, color=_QUIET, alpha=0.2, linewidth=0.8)
        axes.set_axisbelow(True)
    with atomic(path) as partial:
        figure.savefig(partial, format="png")


def _save_image(path: str | Path, image: "Image", **texts: str) -> None:
    """Writes a PNG file. texts: its metadata; "Title" is for those who cannot see the image."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    with atomic(path) as partial:
        image.save(partial, format="PNG", pnginfo=info)


def _font(size: int, *, bold: bool = False) -> "FreeTypeFont":
    """The font that comes with matplotlib, which has letters of many scripts; `size` in pixels."""
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def _text_height(font: "FreeTypeFont", lines: int) -> int:
    """The height of `lines` lines in pixels, with the space around them."""
    ascent, descent = font.getmetrics()
    return lines * (ascent + descent + 2) + 2 if lines else 0


def _wrap(text: str, font: "FreeTypeFont", width: int, *, lines: int) -> list[str]:
    """Breaks `text` at spaces into at most `lines` lines of `width` pixels; a line that is still too long ends in "…"."""
    out = [""]
    for word in text.split():
        longer = f"{out[-1]} {word}".strip()
        if out[-1] and len(out) < lines and font.getlength(longer) > width:
            out.append(word)
        else:
            out[-1] = longer
    for index, line in enumerate(out):
        if font.getlength(line) > width:
            most = bisect.bisect(
                range(1, len(line)),
                width,
                key=lambda n, line=line: math.ceil(font.getlength(line[:n] + "…")),
            )
            out[index] = line[:most].rstrip() + "…"
    return out
