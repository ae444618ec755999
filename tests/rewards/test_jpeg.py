"""The JPEG rewards: the size of the file, compared with another encoder."""

import cv2
import numpy as np
import pytest

from solrl_jax.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility


def pictures():
    """A flat image, a gradient, a coarse and a fine pattern, and noise: float32 [5, 96, 128, 3]."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:96, :128].astype(np.float32)
    planes = [
        np.full_like(x, 0.4),
        x / 128,
        0.5 + np.sin(x / 5) * np.sin(y / 7) / 2,
        (x // 2 + y // 2) % 2,
        rng.random(x.shape),
    ]
    return np.stack([np.repeat(plane[..., None], 3, -1) for plane in planes]).astype(np.float32)


def test_the_reward_is_the_size_that_another_encoder_makes_of_the_picture():
    images = pictures() * np.float32([1.0, 0.8, 0.6])  # in color, so that chroma matters
    bgr = np.round(255 * images).astype(np.uint8)[..., ::-1]
    sizes = [
        len(cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 95])[1]) / 1000
        for picture in bgr
    ]
    scores = jpeg_incompressibility(images, ["p"] * 5, [{}] * 5)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, sizes, rtol=0.01)
    np.testing.assert_array_equal(jpeg_compressibility(images, ["p"] * 5, [{}] * 5), -scores)
    assert scores.max() > 5 * scores.min()


def test_the_plainer_the_picture_the_less_it_weighs():
    scores = jpeg_incompressibility(pictures(), ["p"] * 5, [{}] * 5)
    assert (np.diff(scores) > 0).all()


def test_a_picture_with_values_that_are_not_finite_has_no_score_and_changes_no_other():
    images = pictures()
    images[1, 0, 0, 0] = np.nan
    images[3, 5, 5, 1] = np.inf
    scores = jpeg_compressibility(images, ["p"] * 5, [{}] * 5)
    assert np.isnan(scores).tolist() == [False, True, False, True, False]
    np.testing.assert_array_equal(
        scores[[0, 2, 4]], jpeg_compressibility(pictures(), ["p"] * 5, [{}] * 5)[[0, 2, 4]]
    )


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^reward 'jpeg_compressibility': 5 images, 4 prompts, 5 mappings of metadata; exp",
    ):
        jpeg_compressibility(pictures(), ["p"] * 4, [{}] * 5)
    with pytest.raises(
        ValueError,
        match=r"^reward 'jpeg_incompressibility': images of shape \(96, 128, 3\); expected \[n, ",
    ):
        jpeg_incompressibility(pictures()[0], ["p"], [{}])
    opaque = np.concatenate([pictures(), np.ones((5, 96, 128, 1), np.float32)], axis=-1)
    with pytest.raises(
        ValueError,
        match=r"^reward 'jpeg_incompressibility': images of shape .*, so composite RGBA images",
    ):
        jpeg_incompressibility(opaque, ["p"] * 5, [{}] * 5)
