"""`models.vision.image_resize` against Pillow, transformers and PyTorch, on pictures of many
sizes.
"""

import jax
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from solrl_jax.models.vision.image_resize import MEAN, STD, Preprocessing, resize_matrix

SIZE = 224
BICUBIC = Image.Resampling.BICUBIC
LEVEL = 1 / 255
SIZES = [(256, 256), (1024, 1024), (512, 768), (1000, 333), (224, 303), (97, 64)]
WIDE = [(1024, 1024), (512, 768), (224, 303)]  # Pillow 13 resizes rows first
IDS = [f"{h}x{w}" for h, w in SIZES]


def pictures(height, width, seed=0):
    """Noise, which is the hardest, and a smooth ramp with an edge; multiples of 1/255, so that no
    rounding to bytes differs.
    """
    rng = np.random.default_rng((seed, height, width))
    ramp = (
        np.linspace(0, 1, height)[:, None, None]
        * np.linspace(0, 1, width)[None, :, None]
        * np.array([1.0, 0.5, 0.2])
    )
    ramp[height // 3 :, width // 2 :] = 1
    return (
        np.stack([rng.integers(0, 256, (height, width, 3)), np.round(255 * ramp)]) / 255
    ).astype(np.float32)


def pixels(preprocessing, images):
    """Before normalization, in [0, 1]."""
    return np.asarray(jax.jit(preprocessing)(images)) * STD + MEAN


def as_pil(images):
    return [Image.fromarray(np.round(255 * image).astype(np.uint8)) for image in images]


def as_tensor(images):
    return torch.from_numpy(images.transpose(0, 3, 1, 2))


def center(images, odd):
    """What torchvision's CenterCrop ("even") and that of transformers ("down") keep."""
    spare = [n - SIZE for n in images.shape[1:3]]
    top, left = (s // 2 if odd == "down" else round(s / 2) for s in spare)
    return images[:, top : top + SIZE, left : left + SIZE]


def shorter_edge(height, width):
    """The size that torchvision and transformers resize to."""
    short, long = sorted((height, width))
    out = (SIZE, int(SIZE * long / short))
    return out if height <= width else out[::-1]


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_imagereward_sees_what_pillow_gives(size):
    """torchvision resizes and crops a Pillow picture by Pillow; here with rows first, as all its
    versions up to 12 do it.
    """
    images = pictures(*size)
    (height, width) = shorter_edge(*size)
    theirs = [
        p.resize((width, size[0]), BICUBIC).resize((width, height), BICUBIC) for p in as_pil(images)
    ]
    ours = pixels(Preprocessing(SIZE, "bicubic", eight_bit=True, fit="crop"), images)
    np.testing.assert_allclose(255 * ours, center(np.stack(theirs), "even"), atol=1e-3)


@pytest.mark.parametrize("size", WIDE, ids=[f"{h}x{w}" for h, w in WIDE])
def test_pickscore_and_aesthetic_see_what_the_processor_of_transformers_gives(size):
    """Its Pillow backend; the other one wants torchvision, and rounds once."""
    images = pictures(*size)
    theirs = CLIPImageProcessorPil()(as_pil(images), return_tensors="np")["pixel_values"].transpose(
        0, 2, 3, 1
    )
    ours = jax.jit(
        Preprocessing(SIZE, "bicubic", eight_bit=True, fit="crop", crop_rounding="down")
    )(images)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_clipscore_sees_what_torchvision_gives(size):
    """torchvision's resize of a tensor is this call."""
    images = pictures(*size)
    theirs = torch.nn.functional.interpolate(
        as_tensor(images), shorter_edge(*size), mode="bilinear", align_corners=False, antialias=True
    )
    ours = pixels(Preprocessing(SIZE, "bilinear", eight_bit=False, fit="crop"), images)
    assert np.abs(ours - center(theirs.numpy().transpose(0, 2, 3, 1), "even")).max() < 1e-4


@pytest.mark.parametrize("size", SIZES, ids=IDS)
def test_hpsv2_sees_the_whole_picture_with_black_around_it(size):
    images = pictures(*size)
    scale = SIZE / max(size)
    height, width = (round(n * scale) for n in size)
    theirs = torch.nn.functional.interpolate(
        as_tensor(images), (height, width), mode="bicubic", align_corners=False, antialias=True
    )
    top = (SIZE - height) // 2
    left = (SIZE - width) // 2
    theirs = torch.nn.functional.pad(theirs, (left, SIZE - width - left, top, SIZE - height - top))
    ours = pixels(Preprocessing(SIZE, "bicubic", eight_bit=False, fit="pad"), images)
    assert np.abs(ours - theirs.numpy().transpose(0, 2, 3, 1)).max() < 1e-4


def test_a_strip_of_pixels_is_padded_and_keeps_at_least_one():
    """1 x 449 pixels: the shorter edge would be rounded to 0."""
    preprocessing = Preprocessing(SIZE, "bicubic", eight_bit=False, fit="pad")
    ours = pixels(preprocessing, np.ones((1, 1, 449, 3), np.float32))
    row = (SIZE - 1) // 2
    np.testing.assert_allclose(ours[:, row], 1, atol=1e-5)
    np.testing.assert_allclose(np.delete(ours, row, axis=1), 0, atol=1e-5)


@pytest.mark.slow
def test_the_variants_differ_by_many_levels():
    """So that each parity above would show one taken for another."""
    images = pictures(300, 305)
    base = dict(size=SIZE, kernel="bicubic", eight_bit=True, fit="crop", crop_rounding="down")
    reference = pixels(Preprocessing(**base), images)
    for change in ({"kernel": "bilinear"}, {"fit": "pad"}, {"crop_rounding": "even"}):
        assert (
            np.abs(pixels(Preprocessing(**base | change), images) - reference).max() > 10 * LEVEL
        ), change
    # rounding alone moves little, but everywhere
    unrounded = pixels(Preprocessing(**base | {"eight_bit": False}), images)
    assert 0.1 * LEVEL < np.abs(unrounded - reference).mean() < LEVEL


def test_eight_bit_pictures_are_rounded_and_clipped_first():
    images = np.linspace(-0.2, 1.2, SIZE * SIZE * 3, dtype=np.float32).reshape(1, SIZE, SIZE, 3)
    ours = pixels(Preprocessing(SIZE, "bicubic", eight_bit=True, fit="crop"), images)
    np.testing.assert_allclose(ours, np.clip(np.round(255 * images), 0, 255) / 255, atol=1e-5)
    free = pixels(Preprocessing(SIZE, "bilinear", eight_bit=False, fit="crop"), images)
    np.testing.assert_allclose(free, images, atol=1e-5)


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
def test_weights_sum_to_one_and_equal_sizes_change_nothing(kernel):
    for n_in, n_out in ((1024, 224), (300, 224), (64, 224)):
        np.testing.assert_allclose(resize_matrix(n_in, n_out, kernel).sum(1), 1, atol=1e-6)
    np.testing.assert_array_equal(resize_matrix(224, 224, kernel), np.eye(224))
