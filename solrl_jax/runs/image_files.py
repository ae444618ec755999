"""Writes images of a run as PNG: grids, and comparisons of before and after training. Clips are
written as animated WebP.

An image is a float array [height, width, 3] with values in [0, 1], and a clip is one with the shape
[frames, height, width, 3]. Every file appears whole or not at all. matplotlib and Pillow are
imported in the functions that use them, because they are slow to import. Nothing here opens a
window.
"""

import bisect
import contextlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, UInt8

from solrl_jax.errors import InputError, RunError, first_line
from solrl_jax.storage.files import atomic
from solrl_jax.storage.images import to_uint8
from solrl_jax.storage.readers import parse_json
from solrl_jax.storage.stores import RunPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

Numbers = Array | np.ndarray
_INK = "#1f2328"
_QUIET = "#6e7781"
_PAPER = "#ffffff"
# Okabe and Ito's colors, which stay apart for color-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_RIGHT = "#009E73"
_WRONG = "#D55E00"
_GAP = 4  # pixels between images
# The smallest and the largest width in pixels at which `save_before_after` shows an image: large
# enough to read, and small enough to mail the file.
_SMALLEST = 96
_LARGEST = 384
# The metadata of a PNG file of `save_grid` that holds the facts about its images.
_CELLS = "Cells"
# The largest number of images in a file that is read: two phases of a pool of the largest
# `eval.num_grid_images`.
_MAX_CELLS = 2**11
MAX_WEBP_SIDE = 16_383  # pixels, a limit of the format
# The most pixels of all frames of a moving grid together. Pillow holds every frame until the file
# is written, with 4 bytes per pixel: 1 GiB.
MAX_MOVING_PIXELS = 2**28
_FRAME = 4  # pixels of the frame around an image of `save_before_after`
_MARK = 20  # pixels of the tick or cross in its corner


def save_png(path: str | RunPath, image: Float[Numbers, "h w 3"]) -> None:
    """Writes an image as PNG, one pixel of the file per pixel of the image.

    Args:
        path: The file; a text is a path of this machine, even if it looks like a URL. It is
            replaced if it exists; missing parent directories are created.
        image: The image, with values in [0, 1]. Other values are clipped, and NaN counts as 0.

    Raises:
        RunError: If the disk refuses, or the store if `path` is in one.
    """
    from PIL import Image

    _save_image(path, Image.fromarray(to_uint8(image)))


def save_clip(path: str | RunPath, clip: Float[Numbers, "t h w 3"], frames_per_second: int) -> None:
    """Writes a clip as animated WebP (lossy, quality 90) that repeats forever.

    Args:
        path: The file. It is replaced if it exists; missing parent directories are created.
        clip: The frames, at least one, with values in [0, 1]. Other values are clipped, and NaN
            counts as 0.
        frames_per_second: The playback rate. The time per frame is rounded to whole milliseconds.

    Raises:
        RunError: If the disk refuses, or if a side is above 16,383 pixels (`MAX_WEBP_SIDE`).
    """
    from PIL import Image

    _save_animation(path, map(Image.fromarray, to_uint8(clip)), frames_per_second)


def save_grid(
    path: str | RunPath,
    images: Float[Numbers, "n ... h w 3"],
    columns: int,
    captions: Sequence[str],
    facts: Sequence[Mapping[str, Any]] = (),
    frames_per_second: int | None = None,
) -> None:
    """Writes images in rows with captions as PNG, one pixel of the file per pixel of an image.

    For clips, the PNG shows the first frames, and the moving grid is written beside it as animated
    WebP. A moving grid is shrunk as a whole if one of its sides is above 16,383 pixels
    (`MAX_WEBP_SIDE`) or if its frames together have more than 2**28 pixels (`MAX_MOVING_PIXELS`).

    Args:
        path: The PNG file. The moving grid of clips has the same path with the ending ".webp".
            Existing files are replaced; missing parent directories are created.
        images: The n images [n, height, width, 3], at least one, with values in [0, 1], or as many
            clips [n, frames, height, width, 3]. Other values are clipped, and NaN counts as 0.
        columns: The largest number of images in a row, at least 1.
        captions: One caption per image, shown below it in at most two lines. A longer one is cut.
        facts: For each image a dict of JSON values without NaN, which is stored in the file and
            which `read_grid` returns with the image. It must not have the key "box", under which
            the position of the image is stored. If there are fewer than n dicts, `read_grid` and
            `read_moving_grid` return only the first images or clips (none by default); dicts beyond
            n are ignored.
        frames_per_second: The playback rate, which clips must have. Images ignore it.

    Raises:
        ValueError: If there is not one caption per image, or clips have no playback rate.
        RunError: If the disk refuses, or a moving grid cannot be encoded.
    """
    from PIL import Image, ImageDraw

    if images.ndim == 5 and frames_per_second is None:
        raise ValueError("clips need frames_per_second")
    pixels = to_uint8(images)
    if pixels.ndim == 4:
        pixels = pixels[:, None]
    count, frames, height, width = pixels.shape[:4]
    columns = min(columns, count)
    font = _font(int(np.clip(width / 11, 9, 16)))
    texts = ["\n".join(_wrap(caption, font, width, lines=2)) for caption in captions]
    band = _text_height(font, max(text.count("\n") + 1 for text in texts))
    rows = -(-count // columns)
    cell_width = width + _GAP
    cell_height = height + band + _GAP
    corners = [
        (_GAP + i % columns * cell_width, _GAP + i // columns * cell_height) for i in range(count)
    ]

    size = (columns * cell_width + _GAP, rows * cell_height + _GAP)

    def draw_sheet(frame: int, shown_size: tuple[int, int]) -> "Image":
        sheet = Image.new("RGB", size, _PAPER)
        draw = ImageDraw.Draw(sheet)
        for image, text, (left, top) in zip(pixels[:, frame], texts, corners, strict=True):
            sheet.paste(Image.fromarray(image), (left, top))
            draw.multiline_text((left, top + height + 2), text, _INK, font, spacing=2)
        return sheet if shown_size == size else sheet.resize(shown_size, reducing_gap=2.0)

    cells = [
        {"box": (x, y, x + width, y + height), **fact}
        for (x, y), fact in zip(corners, facts, strict=False)
    ]
    texts_in_file = {_CELLS: json.dumps(cells)} if cells else {}
    _save_image(path, draw_sheet(0, size), **texts_in_file)
    if images.ndim == 5 and frames_per_second is not None:
        moving = Path(path) if isinstance(path, str) else path
        moving_size = _moving_size(size, frames)
        sheets = (draw_sheet(frame, moving_size) for frame in range(frames))
        _save_animation(moving.with_suffix(".webp"), sheets, frames_per_second)


def _moving_size(size: tuple[int, int], frames: int) -> tuple[int, int]:
    """Returns the size of a moving grid, which is at most the size of the still one.

    Args:
        size: Width and height of the still grid in pixels.
        frames: The number of frames, at least 1.

    Returns:
        The largest width and height in pixels, in the proportions of `size`, within the limits of
        animated WebP and of the memory (`MAX_WEBP_SIDE` and `MAX_MOVING_PIXELS`). `size` itself is
        returned if it is within them.
    """
    pixels = size[0] * size[1] * frames
    scale = min(1.0, MAX_WEBP_SIDE / max(size), math.sqrt(MAX_MOVING_PIXELS / pixels))
    return max(1, int(size[0] * scale)), max(1, int(size[1] * scale))


def read_grid(path: RunPath) -> list[tuple["Image", dict[str, Any]]]:
    """Reads the images of a file that `save_grid` wrote, each with its facts.

    Args:
        path: The PNG file.

    Returns:
        Pairs of an RGB image of Pillow and the dict of facts that `save_grid` was given about it,
        in the order of the grid. Images without facts are left out; [] if the file has no facts.

    Raises:
        InputError: If the file is missing, not a PNG or damaged, or if the stored positions of the
            images are not within the grid.
    """
    with _open_image(path, "PNG") as sheet:
        boxes, cells = _boxes_and_facts(sheet)
        return [(sheet.crop(box), cell) for box, cell in zip(boxes, cells, strict=True)]


def read_moving_grid(
    path: RunPath, most_frames: int, longest_side: int
) -> tuple[list[list["Image"]], float]:
    """Reads the clips of a moving grid that `save_grid` wrote, shrunk and with fewer frames.

    Args:
        path: The PNG file, which has the positions of the clips. The moving grid is beside it, with
            the ending ".webp".
        most_frames: The largest number of frames to keep of a clip, at least 1. Longer clips keep
            this many equally spaced frames, including the first and the last; 1 keeps the first.
        longest_side: The longest side of a frame in pixels. Larger frames are shrunk.

    Returns:
        A pair. First the clips for which `save_grid` was given facts, in the order of the grid,
        each a list of RGB images of Pillow. Then the seconds per kept frame, such that a clip lasts
        as long as in the file. [] and 0 if there is no moving grid.

    Raises:
        InputError: If either file is damaged, or the moving grid is wider than the PNG or has other
            proportions.
    """
    moving_path = path.with_suffix(".webp")
    if not moving_path.exists():
        return [], 0.0
    with _open_image(path, "PNG") as still:
        still_boxes, _ = _boxes_and_facts(still)
        still_size = still.size
    frame_images: list[list[Image]] = []
    milliseconds = []
    with _open_image(moving_path, "WEBP") as sheet:
        # The moving grid is smaller than the still one if it had to be shrunk.
        width, height = still_size
        difference = abs(sheet.width * height - sheet.height * width)
        if sheet.width > width or difference > max(still_size):
            raise ValueError("it has other proportions than the grid of first frames")
        boxes = [
            (
                left * sheet.width // width,
                top * sheet.height // height,
                right * sheet.width // width,
                bottom * sheet.height // height,
            )
            for left, top, right, bottom in still_boxes
        ]
        for number in range(getattr(sheet, "n_frames", 1)):
            sheet.seek(number)
            frame = sheet.convert("RGB")
            _check_boxes(frame, boxes)
            images = [frame.crop(box) for box in boxes]
            for image in images:
                image.thumbnail((longest_side, longest_side))
            frame_images.append(images)
            # A file with a single frame has no duration.
            milliseconds.append(max(1, sheet.info.get("duration", 1)))
    # Equal frames in a row are stored as one that is shown for longer.
    frame_time = np.gcd.reduce(milliseconds)
    ends = np.cumsum(milliseconds)
    count = ends[-1] // frame_time
    times = np.linspace(0, count - 1, min(count, most_frames)).round() * frame_time
    places = np.minimum(np.searchsorted(ends, times, side="right"), len(frame_images) - 1)
    clips = [[frame_images[place][clip] for place in places] for clip in range(len(boxes))]
    return clips, float(ends[-1]) / 1000 / len(places)


@contextlib.contextmanager
def _open_image(path: RunPath, kind: str) -> Iterator["Image"]:
    """A context manager that opens an image file.

    Args:
        path: The file.
        kind: The only format that is accepted, "PNG" or "WEBP".

    Yields:
        The image of Pillow, whose pixels are read when they are needed.

    Raises:
        InputError: If the file is missing, has another format or is damaged. Every OSError,
            SyntaxError, ValueError, TypeError, AttributeError, KeyError and DecompressionBombError
            of the body counts as damage.
    """
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
        with path.open("rb") as file:
            with warnings.catch_warnings():
                # The grid of a run may be larger than where Pillow warns.
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(file, formats=[kind])
            yield image
    except damaged as error:
        raise InputError(f"{path}: not a whole image ({first_line(error)})") from error


def _boxes_and_facts(
    sheet: "Image",
) -> tuple[list[tuple[int, int, int, int]], list[dict[str, Any]]]:
    """Returns the boxes of the images of a grid and the facts about them, from its metadata.

    Args:
        sheet: The whole grid, an open PNG file of Pillow.

    Returns:
        Two lists of equal length: left, top, right and bottom of every image in pixels, and its
        facts, without the box. Both are empty if the file has none.

    Raises:
        ValueError: If the grid and its boxes do not pass `_check_boxes`, which requires RGB even
            without boxes.
        ValueError, TypeError, KeyError, AttributeError: If the metadata is damaged.
    """
    cells = parse_json(getattr(sheet, "text", {}).get(_CELLS, "[]"))
    boxes = []
    for cell in cells:
        left, top, right, bottom = map(int, cell.pop("box"))
        boxes.append((left, top, right, bottom))
    _check_boxes(sheet, boxes)
    return boxes, cells


def _check_boxes(sheet: "Image", boxes: Sequence[tuple[int, int, int, int]]) -> None:
    """Checks that the images of a grid lie within it.

    Args:
        sheet: The whole grid as an image of Pillow.
        boxes: Left, top, right and bottom of every image in pixels.

    Raises:
        ValueError: If a box is empty or not within the grid, if the areas of the boxes add up to
            more than the grid, if there are more than `_MAX_CELLS` (2048), or if the grid is not
            RGB.
    """
    inside = all(
        0 <= left < right <= sheet.width and 0 <= top < bottom <= sheet.height
        for left, top, right, bottom in boxes
    )
    area = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes)
    fits = area <= sheet.width * sheet.height and len(boxes) <= _MAX_CELLS
    if sheet.mode != "RGB" or not inside or not fits:
        raise ValueError("its images do not fit into it")


def save_before_after(
    path: str | RunPath,
    before: Float[Numbers, "p m ... h w 3"],
    after: Float[Numbers, "p m ... h w 3"],
    prompts: Sequence[str],
    right_before: Bool[np.ndarray, "p m"] | None = None,
    right_after: Bool[np.ndarray, "p m"] | None = None,
    sides: tuple[str, str] = ("before training", "after training"),
) -> None:
    """Writes images of two policies side by side as PNG, one row per prompt.

    Both sides show images of the same prompts and seeds. Images narrower than 96 pixels are
    enlarged by the smallest whole number that suffices, and those wider than 384 are shrunk to 384.
    If a side has verdicts, its images are framed and marked with a tick or a cross, and its title
    says how many are right. Clips are shown by their first frames.

    Args:
        path: The file. It is replaced if it exists; missing parent directories are created.
        before: The images on the left, [p, m, height, width, 3], m for each of p prompts, with
            values in [0, 1]; or clips, which have an axis of frames before the height. Other values
            are clipped, and NaN counts as 0.
        after: The images on the right, of the same shape, for the same prompts and seeds.
        prompts: One prompt per row, shown above it in one line, which is cut if it is too long.
        right_before: Whether a verifier accepts each image on the left, bool [p, m]. None: no
            verdicts.
        right_after: Whether a verifier accepts each image on the right, bool [p, m]. None: no
            verdicts.
        sides: The titles of the two sides. With the numbers of right images, they also become
            "Title" in the file's metadata.

    Raises:
        ValueError: If there is not one prompt per row.
        RunError: If the disk refuses.
    """
    from PIL import Image, ImageDraw

    if before.ndim == 6:
        before = before[:, :, 0]
        after = after[:, :, 0]
    titles = []
    for side, right in zip(sides, (right_before, right_after), strict=True):
        verdicts = "" if right is None else f": {right.sum()} of {right.size} right"
        titles.append(side + verdicts)
    title_font = _font(18, bold=True)
    font = _font(14)
    images_in_row, height, width = before.shape[1:4]
    shown_width = min(width, _LARGEST)
    if width < _SMALLEST:
        shown_width = width * -(-_SMALLEST // width)  # enlarged by a whole number
    size = (shown_width, round(height * shown_width / width))
    step = shown_width + 2 * _FRAME + _GAP
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
            verdict = None if right is None else bool(right[row, column])
            framed = _framed(images[row, column], size, verdict)
            sheet.paste(framed, (left + column * step, margin + head + row * row_height + caption))
    _save_image(path, sheet, Title="    ".join(titles))


def _framed(
    image: UInt8[np.ndarray, "h w 3"], size: tuple[int, int], right: bool | None
) -> "Image":
    """Returns an image with a frame of `_FRAME` (4) pixels, and a mark in its lower right corner.

    Args:
        image: The image, bytes [height, width, 3] in RGB.
        size: Width and height in pixels to which the image is resized, without the frame.
        right: Whether a verifier accepts the image. True: a green frame and a tick. False: an
            orange frame and a cross. None: the frame has the color of the paper and there is no
            mark.

    Returns:
        An RGB image of Pillow, 8 pixels wider and higher than `size`.
    """
    from PIL import Image, ImageDraw

    color = {None: _PAPER, True: _RIGHT, False: _WRONG}[right]
    framed = Image.new("RGB", (size[0] + 2 * _FRAME, size[1] + 2 * _FRAME), color)
    smooth = Image.Resampling.LANCZOS if size[0] < image.shape[1] else Image.Resampling.NEAREST
    framed.paste(Image.fromarray(image).resize(size, smooth), (_FRAME, _FRAME))
    if right is None:
        return framed
    # Drawn eight times as large and then shrunk, which smooths the strokes.
    mark = Image.new("RGB", (_MARK * 8, _MARK * 8), color)
    strokes = [[(2.4, 2.4), (5.6, 5.6)], [(2.4, 5.6), (5.6, 2.4)]]
    if right:
        strokes = [[(2, 4.2), (3.4, 5.6), (6, 2.6)]]
    for stroke in strokes:
        points = [(x * _MARK, y * _MARK) for x, y in stroke]
        ImageDraw.Draw(mark).line(points, _PAPER, width=_MARK, joint="curve")
    corner = (framed.width - _MARK, framed.height - _MARK)
    framed.paste(mark.resize((_MARK, _MARK), Image.Resampling.LANCZOS), corner)
    return framed


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty matplotlib figure that is drawn in memory, at 144 dots per inch.

    Args:
        width: The width of the whole figure in inches.
        height: The height of the whole figure in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained", facecolor=_PAPER)
    FigureCanvasAgg(figure)
    return figure


def save_figure(path: str | RunPath, figure: "Figure") -> None:
    """Writes a figure as PNG. Also styles its axes, in place: colors, spines, ticks and a grid.

    Args:
        path: The file. It is replaced if it exists; missing parent directories are created.
        figure: A figure of `new_figure`.

    Raises:
        RunError: If the disk refuses.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_QUIET)
        axes.tick_params(colors=_INK, color=_QUIET, labelsize=9)
        axes.grid(True, color=_QUIET, alpha=0.2, linewidth=0.8)
        axes.set_axisbelow(True)
    with atomic(path) as partial:
        figure.savefig(partial, format="png")


def _save_image(path: str | RunPath, image: "Image", **texts: str) -> None:
    """Writes a PNG file, whole or not at all.

    Args:
        path: The file. It is replaced if it exists; missing parent directories are created.
        image: The image of Pillow, in a mode that PNG has.
        **texts: Texts that are stored in the file, by name, e.g. "Title" for readers who cannot see
            the image.

    Raises:
        RunError: If the disk refuses.
    """
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    with atomic(path) as partial:
        image.save(partial, format="PNG", pnginfo=info)


def _save_animation(path: str | RunPath, frames: Iterable["Image"], frames_per_second: int) -> None:
    """Writes an animated WebP file (lossy, quality 90), whole or not at all. It repeats forever.

    Args:
        path: The file. It is replaced if it exists; missing parent directories are created.
        frames: The images of Pillow, at least one and all of one size, in their order.
        frames_per_second: The playback rate. The time per frame is rounded to whole milliseconds.

    Raises:
        RunError: If the disk refuses, or if the images cannot be encoded, such as those with a side
            above 16,383 pixels.
    """
    first, *others = frames
    with atomic(path) as partial:
        try:
            first.save(
                partial,
                format="WEBP",
                save_all=True,
                append_images=others,
                duration=round(1000 / frames_per_second),
                loop=0,
                quality=90,
            )
        except (RuntimeError, ValueError) as error:  # of Pillow's encoder
            size = " x ".join(map(str, first.size))
            raise RunError(
                f"{path}: {1 + len(others)} frames of {size} pixels cannot be written as WebP "
                f"({first_line(error)})"
            ) from error


def _font(size: int, *, bold: bool = False) -> "FreeTypeFont":
    """Returns DejaVu Sans, the font that comes with matplotlib, which has letters of many scripts.

    Args:
        size: The size of the letters in pixels.
        bold: Whether it is bold.
    """
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def _text_height(font: "FreeTypeFont", lines: int) -> int:
    """Returns the height of a text in pixels.

    Args:
        font: The font that the text is drawn in.
        lines: The number of lines. Each has 2 pixels of space below it, and the last one 2 more. 0
            gives the height 0.
    """
    ascent, descent = font.getmetrics()
    return lines * (ascent + descent + 2) + 2 if lines else 0


def _wrap(text: str, font: "FreeTypeFont", width: int, *, lines: int) -> list[str]:
    """Breaks a text at white space into lines of a largest width.

    Args:
        text: The text. Each run of white space, line feeds too, counts as one space.
        font: The font that the text is drawn in.
        width: The largest width of a line in pixels. A line that is still too long is cut and ends
            in "…".
        lines: The largest number of lines. The last one takes all words that are left and may
            therefore be cut.

    Returns:
        The lines, at least one. An empty text gives one empty line.
    """
    out = [""]
    for word in text.split():
        longer = f"{out[-1]} {word}".strip()
        if out[-1] and len(out) < lines and font.getlength(longer) > width:
            out.append(word)
        else:
            out[-1] = longer
    for index, line in enumerate(out):
        if font.getlength(line) > width:
            length = bisect.bisect(
                range(1, len(line)),
                width,
                key=lambda n, line=line: math.ceil(font.getlength(line[:n] + "…")),
            )
            out[index] = line[:length].rstrip() + "…"
    return out
