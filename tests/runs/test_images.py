"""Pictures: exact pixels where they are promised, sensible sizes, and files that appear whole."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from solrl_jax.errors import RunError
from solrl_jax.runs import image_files
from solrl_jax.storage.images import to_uint8

RNG = np.random.default_rng(0)


def test_a_pixel_is_255_times_its_value_rounded_and_clipped(tmp_path):
    image = np.array(
        [
            [[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]],
            [[1 / 255, 1.49 / 255, 1.51 / 255], [0.2, 0.4, np.inf]],
        ]
    )
    image_files.save_png(tmp_path / "one.png", jnp.asarray(image, jnp.float32))
    pixels = np.asarray(Image.open(tmp_path / "one.png"))
    assert pixels.tolist() == [[[0, 128, 255], [0, 255, 0]], [[1, 1, 2], [51, 102, 255]]]
    assert os.listdir(tmp_path) == ["one.png"]


def sheet_of(path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def test_a_grid_shows_every_pixel_and_fills_rows(tmp_path):
    images = RNG.random((5, 24, 30, 3), np.float32)
    gap = 4
    image_files.save_grid(tmp_path / "grid.png", images, 3, list("abcde"))
    sheet = sheet_of(tmp_path / "grid.png")
    step = (sheet.shape[0] - gap) // 2
    assert sheet.shape == (2 * step + gap, 3 * (30 + gap) + gap, 3)
    for index, image in enumerate(images):
        top = gap + index // 3 * step
        left = gap + index % 3 * (30 + gap)
        assert (sheet[top : top + 24, left : left + 30] == to_uint8(image)).all()


def test_a_clip_is_an_animation_of_its_frames(tmp_path):
    clip = np.repeat(np.array([0.0, 0.5, 1.0])[:, None], 8 * 8 * 3, 1).reshape(3, 8, 8, 3)
    image_files.save_clip(tmp_path / "clip.webp", clip, 24)
    with Image.open(tmp_path / "clip.webp") as moving:
        assert (moving.n_frames, moving.size, moving.info["loop"]) == (3, (8, 8), 0)
        for frame, value in enumerate((0, 128, 255)):
            moving.seek(frame)
            assert abs(np.asarray(moving.convert("RGB")).astype(int) - value).max() <= 3
            assert moving.info["duration"] == round(1000 / 24)
    assert os.listdir(tmp_path) == ["clip.webp"]


def test_a_grid_of_clips_shows_first_frames_and_moves_beside_it(tmp_path):
    clips = RNG.random((3, 4, 24, 30, 3), np.float32)
    facts = [{"prompt": name} for name in "abc"]
    path = tmp_path / "grid.png"
    with pytest.raises(ValueError, match="frames_per_second"):
        image_files.save_grid(path, clips, 2, list("abc"), facts)
    assert not path.exists()
    image_files.save_grid(path, clips, 2, list("abc"), facts, frames_per_second=16)
    image_files.save_grid(tmp_path / "first.png", clips[:, 0], 2, list("abc"), facts)
    assert (sheet_of(tmp_path / "grid.png") == sheet_of(tmp_path / "first.png")).all()
    assert len(image_files.read_grid(tmp_path / "grid.png")) == 3
    with Image.open(tmp_path / "grid.webp") as moving:
        assert (moving.n_frames, moving.size) == (4, Image.open(tmp_path / "first.png").size)
    assert sorted(os.listdir(tmp_path)) == ["first.png", "grid.png", "grid.webp"]
    before, after = (clips[None, :, :2] for _ in range(2))
    image_files.save_before_after(tmp_path / "both.png", before, after, ["p"])
    image_files.save_before_after(tmp_path / "still.png", before[:, :, 0], after[:, :, 0], ["p"])
    assert (sheet_of(tmp_path / "both.png") == sheet_of(tmp_path / "still.png")).all()


def test_a_moving_grid_beyond_the_limits_of_webp_is_shrunk(tmp_path, monkeypatch):
    """600 clips in one column are higher than 16,383 pixels. They are found at their places."""
    values = np.linspace(0, 1, 600, dtype=np.float32)
    clips = np.broadcast_to(values[:, None, None, None, None], (600, 2, 16, 16, 3)).copy()
    clips[:, 1] = 0.5
    facts = [{"number": number} for number in range(600)]
    path = tmp_path / "grid.png"
    image_files.save_grid(path, clips, 1, ["x"] * 600, facts, frames_per_second=16)
    assert Image.open(path).height > image_files.MAX_WEBP_SIDE
    assert Image.open(tmp_path / "grid.webp").height == image_files.MAX_WEBP_SIDE
    pairs, _ = image_files.read_moving_grid(path, 2, 16)
    for (first, second), value in zip(pairs, values, strict=True):
        center = (first.width // 2, first.height // 2)
        assert abs(first.getpixel(center)[0] - 255 * value) <= 6  # lossy and resized
        assert abs(second.getpixel(center)[0] - 128) <= 6
    # So is one whose frames together have more pixels than fit into memory.
    image_files.save_grid(path, clips[:4], 2, ["x"] * 4, facts, frames_per_second=16)
    width, height = Image.open(path).size
    monkeypatch.setattr(image_files, "MAX_MOVING_PIXELS", width * height // 2)
    image_files.save_grid(path, clips[:4], 2, ["x"] * 4, facts, frames_per_second=16)
    assert Image.open(tmp_path / "grid.webp").size == (width // 2, height // 2)
    # A clip of its own is not shrunk.
    with pytest.raises(RunError, match=r"1 frames of 8 x 16384 pixels cannot be written as WebP"):
        image_files.save_clip(tmp_path / "clip.webp", np.zeros((1, 16384, 8, 3)), 16)
    assert sorted(os.listdir(tmp_path)) == ["grid.png", "grid.webp"]


def test_captions_take_room_below_and_never_leave_their_cell(tmp_path):
    images = np.zeros((2, 64, 64, 3))
    path = tmp_path / "grid.png"
    for captions in (
        ["short", "a caption that is far too long for sixty-four pixels in two lines"],
        ["", "x" * 300],
    ):
        image_files.save_grid(path, images, 2, captions)
        sheet = sheet_of(path)
        assert sheet.shape[1] == 2 * 68 + 4
        assert sheet.shape[0] > 64 + 2 * 4
        below = sheet[68:]
        assert (below[:, 68:72] == 255).all()
        assert (below[:, -4:] == 255).all()
        assert (below < 128).any()
    with pytest.raises(ValueError, match="zip"):
        image_files.save_grid(path, images, 2, ["one"])


def test_a_grid_has_no_more_columns_than_images(tmp_path):
    image_files.save_grid(tmp_path / "grid.png", np.zeros((2, 8, 8, 3)), 8, ["", ""])
    assert Image.open(tmp_path / "grid.png").width == 2 * 12 + 4


def test_the_images_of_a_grid_are_read_again_with_their_facts(tmp_path):
    images = RNG.random((3, 8, 10, 3))
    facts = [{"prompt": "é </script>", "right": right} for right in (True, False, None)]
    image_files.save_grid(tmp_path / "grid.png", images, 2, list("abc"), facts)
    cells = image_files.read_grid(tmp_path / "grid.png")
    assert [fact for _, fact in cells] == facts
    for (image, _), saved in zip(cells, images, strict=True):
        assert (np.asarray(image) == to_uint8(saved)).all()
    image_files.save_grid(tmp_path / "older.png", images, 2, list("abc"))
    assert image_files.read_grid(tmp_path / "older.png") == []


@pytest.mark.parametrize(("size", "side"), [(16, 96), (40, 120), (200, 200), (512, 384)])
def test_before_and_after_stand_side_by_side(tmp_path, size, side):
    before = np.zeros((2, 3, size, size, 3))
    after = np.full((2, 3, size, size, 3), 0.5)
    image_files.save_before_after(
        tmp_path / "sheet.png", before, after, ["a red circle", "a prompt " * 100]
    )
    pixels = sheet_of(tmp_path / "sheet.png")
    middle = pixels.shape[1] // 2
    for half, value in ((pixels[:, :middle], 0), (pixels[:, middle:], 128)):
        assert (half == value).all(-1).sum() >= 6 * side**2
    assert pixels.shape[1] == 2 * (16 + 3 * (side + 8) + 2 * 4) + 24
    assert Image.open(tmp_path / "sheet.png").text["Title"] == "before training    after training"


def test_the_verifiers_verdicts_are_counted_and_marked(tmp_path):
    images = np.full((2, 2, 96, 96, 3), 0.5)
    prompts = ["a red circle", "two blue squares"]
    right = np.array([[True, False], [False, False]])

    def draw(name, *verdicts):
        return image_files.save_before_after(tmp_path / name, images, images, prompts, *verdicts)

    draw("plain.png")
    draw("marked.png", right, ~right)
    draw("half.png", right)

    def title(name):
        return Image.open(tmp_path / name).text["Title"]

    assert title("marked.png") == "before training: 1 of 4 right    after training: 3 of 4 right"
    assert title("half.png") == "before training: 1 of 4 right    after training"

    pixels = sheet_of(tmp_path / "marked.png")
    corners = np.argwhere(
        (sheet_of(tmp_path / "plain.png") == 128).all(-1)
    )  # of the images, whose places do not change
    top, left = corners.min(0)
    row_step = np.diff(np.unique(corners[:, 0]))
    rows = (top, top + 96 + row_step.max() - 1)
    columns = (left, left + 108)
    half = (pixels.shape[1] - 2 * 16 - 24) // 2 + 24
    green = [0, 0x9E, 0x73]
    orange = [0xD5, 0x5E, 0]
    for side, verdicts in ((0, right), (half, ~right)):
        for i, y in enumerate(rows):
            for j, x in enumerate(columns):
                frame = pixels[y - 1, x + side : x + side + 96]
                assert (frame == (green if verdicts[i, j] else orange)).all()
    # the shape of the mark tells them apart without its color
    marks = [(pixels[y + 80 : y + 96, left + 80 : left + 96].sum(-1) > 600) for y in rows]
    assert marks[0].any()
    assert marks[1].any()
    assert (marks[0] != marks[1]).any()


def test_the_titles_have_room_however_few_images_there_are(tmp_path):
    images = np.zeros((1, 1, 8, 8, 3))
    image_files.save_before_after(
        tmp_path / "one.png", images, images, ["a"], *[np.array([[True]])] * 2
    )
    pixels = sheet_of(tmp_path / "one.png")
    assert pixels.shape[1] > 2 * (16 + 104) + 24
    assert (pixels[:, -16:] == 255).all()
    with pytest.raises(ValueError, match="zip"):
        image_files.save_before_after(tmp_path / "two.png", images, images, ["a", "b"])


def test_the_same_picture_has_the_same_bytes(tmp_path):
    images = RNG.random((4, 8, 8, 3))
    for name in ("a.png", "b.png"):
        image_files.save_grid(tmp_path / name, images, 2, list("abcd"))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"while writing .*x.png$"):
        image_files.save_png(tmp_path / "file" / "x.png", np.zeros((2, 2, 3)))
