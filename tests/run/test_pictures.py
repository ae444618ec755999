"""Pictures: exact pixels where they are promised, sensible sizes, and files that appear whole."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from solrl_jax.run import pictures
from solrl_jax.storage.errors import RunError

RNG = np.random.default_rng(0)


def test_a_pixel_is_255_times_its_value_rounded_and_clipped(tmp_path):
    image = np.array([[[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]], [[1 / 255, 1.49 / 255, 1.51 / 255], [0.2, 0.4, np.inf]]])
    pictures.save_png(tmp_path / "one.png", jnp.asarray(image, jnp.float32))
    pixels = np.asarray(Image.open(tmp_path / "one.png"))
    assert pixels.tolist() == [[[0, 128, 255], [0, 255, 0]], [[1, 1, 2], [51, 102, 255]]]
    assert os.listdir(tmp_path) == ["one.png"]


def test_a_grid_enlarges_without_smoothing():
    images = RNG.random((5, 4, 6, 3), np.float32)
    sheet = np.asarray(pictures.grid(images, 3, scale=2))
    gap = 4
    assert sheet.shape == (2 * (8 + gap) + gap, 3 * (12 + gap) + gap, 3)
    last = sheet[gap + 8 + gap :, gap + 12 + gap :][:8, :12]
    assert (last[::2, ::2] == pictures.to_uint8(images[4])).all()
    assert (last[1::2, 1::2] == pictures.to_uint8(images[4])).all()


def test_captions_take_room_below_and_never_leave_their_cell():
    images = np.zeros((2, 64, 64, 3))
    bare = pictures.grid(images, 2)
    for captions in (["short", "a caption that is far too long for sixty-four pixels in two lines"], ["", "x" * 300]):
        sheet = pictures.grid(images, 2, captions)
        assert sheet.width == bare.width
        assert sheet.height > bare.height
        pixels = np.asarray(sheet)[68:]
        assert (pixels[:, 68:72] == 255).all()
        assert (pixels[:, -4:] == 255).all()
        assert (pixels < 128).any()
    with pytest.raises(ValueError, match="1 captions for 2 images"):
        pictures.grid(images, 2, ["one"])


def test_a_grid_has_no_more_columns_than_images(tmp_path):
    pictures.save_grid(tmp_path / "grid.png", np.zeros((2, 8, 8, 3)), 8)
    assert Image.open(tmp_path / "grid.png").size == (2 * 12 + 4, 16)


@pytest.mark.parametrize(("size", "shown"), [(16, 96), (40, 120), (200, 200), (512, 384)])
def test_before_and_after_stand_side_by_side(tmp_path, size, shown):
    before, after = np.zeros((2, 3, size, size, 3)), np.full((2, 3, size, size, 3), 0.5)
    pictures.save_before_after(tmp_path / "sheet.png", before, after, ["a red circle", "a prompt " * 100])
    pixels = np.asarray(Image.open(tmp_path / "sheet.png"))
    middle = pixels.shape[1] // 2
    for half, value in ((pixels[:, :middle], 0), (pixels[:, middle:], 128)):
        assert (half == value).all(-1).sum() >= 6 * shown**2
    assert pixels.shape[1] == 2 * (16 + 3 * shown + 2 * 4) + 24


def test_one_image_a_prompt_will_do_and_a_mismatch_will_not(tmp_path):
    path = tmp_path / "sheet.png"
    pictures.save_before_after(path, np.zeros((2, 8, 8, 3)), np.ones((2, 8, 8, 3)), ["a", "b"])
    assert Image.open(path).size == (2 * (16 + 96) + 24, Image.open(path).height)
    with pytest.raises(ValueError, match="do not match"):
        pictures.save_before_after(path, np.zeros((2, 8, 8, 3)), np.ones((3, 8, 8, 3)), ["a", "b"])
    with pytest.raises(ValueError, match="do not match"):
        pictures.save_before_after(path, np.zeros((2, 8, 8, 3)), np.ones((2, 8, 8, 3)), ["a"])


def test_a_curve_skips_what_is_not_there(tmp_path):
    rows = [{"iteration": i, "reward": i / 10, "loss": 1 / (i + 1)} for i in range(40)]
    rows[3]["reward"] = None
    rows.append({"iteration": 39, "eval": 0.5})
    series = {"training": "reward", "held out": "eval", "never logged": "absent"}
    pictures.save_curve(tmp_path / "one.png", rows, series)
    pictures.save_curve(tmp_path / "two.png", rows, series, {"loss": "loss"}, labels=("reward", "loss"), title="tiny")
    pictures.save_curve(tmp_path / "none.png", [], series)
    one, two = (Image.open(tmp_path / name) for name in ("one.png", "two.png"))
    assert one.width == two.width
    assert one.height < two.height
    blue = (np.asarray(one.convert("RGB")).astype(int) - [0, 0x72, 0xB2]).__abs__().sum(-1) < 10
    assert blue.sum() > 500
    assert sorted(os.listdir(tmp_path)) == ["none.png", "one.png", "two.png"]


def test_a_correlation_is_the_mean_within_prompts(tmp_path, monkeypatch):
    titles = []
    save = pictures._save_figure
    monkeypatch.setattr(
        pictures, "_save_figure", lambda path, figure: (titles.append(figure.axes[0].get_title("left")), save(path, figure))
    )
    true = np.arange(12.0).reshape(3, 4)
    proxy = np.array([[0, 1, 2, 3], [3, 2, 1, np.nan], [5, 5, 5, 5]], np.float32)
    pictures.save_correlation(tmp_path / "rank.png", proxy, true)
    pictures.save_correlation(tmp_path / "flat.png", np.zeros((1, 4)), np.zeros((1, 4)))
    assert titles == ["Spearman 0.000, mean of 2 prompts", "Spearman undefined, mean of 0 prompts"]
    assert sorted(os.listdir(tmp_path)) == ["flat.png", "rank.png"]
    with pytest.raises(ValueError, match="one shape"):
        pictures.save_correlation(tmp_path / "bad.png", proxy, true[:2])


def test_the_same_picture_has_the_same_bytes(tmp_path):
    images = RNG.random((4, 8, 8, 3))
    for name in ("a.png", "b.png"):
        pictures.save_grid(tmp_path / name, images, 2, list("abcd"), scale=4)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"while writing .*x.png$"):
        pictures.save_png(tmp_path / "file" / "x.png", np.zeros((2, 2, 3)))
