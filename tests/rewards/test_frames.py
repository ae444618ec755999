"""Rewards of images on the frames of clips."""

import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.schema import Reward as Settings
from solrl_jax.errors import InputError
from solrl_jax.rewards.frames import sample_frames
from solrl_jax.rewards.protocol import Reward, score_images
from solrl_jax.rewards.registry import open_rewards

T = 9
CLIPS = np.random.default_rng(0).random((2, T, 4, 6, 3)).astype(np.float32)
LATENTS = np.random.default_rng(1).random((2, 3, 2, 2, 4)).astype(np.float32)


def brightness(inputs="images", frames=1):
    """The mean of an image, or of its latents, plus a number of its prompt."""

    def score(params, images, prepared):
        if inputs == "both":
            images, latents = images
            assert latents.shape[:1] == images.shape[:1]
            return {"reward": latents.mean((1, 2, 3, 4)) + prepared}
        return {"reward": images.mean((1, 2, 3)) + prepared}

    def prepare(prompts):
        return np.arange(len(prompts), dtype=np.float32)

    return Reward(None, prepare, score, inputs=inputs, frames=frames)


@pytest.mark.parametrize(
    ("frames", "places"), [(1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (4, [0, 3, 5, 8]), (20, range(9))]
)
def test_a_clip_scores_the_mean_over_its_sampled_frames(frames, places):
    reward = brightness(frames=frames)
    index = jnp.array([1, 0])
    got = score_images(reward, None, jnp.asarray(CLIPS), np.array([10.0, 20.0]), index)["reward"]
    want = CLIPS[:, list(places)].mean((1, 2, 3, 4)) + np.array([20, 10])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    if frames <= T:
        sampled = sample_frames(jnp.asarray(CLIPS), frames)
        np.testing.assert_array_equal(sampled, CLIPS[:, list(places)].reshape(-1, 4, 6, 3))


def test_images_are_scored_as_ever():
    got = score_images(
        brightness(frames=3), None, jnp.asarray(CLIPS[:, 0]), np.zeros(1), jnp.zeros(2, int)
    )["reward"]
    np.testing.assert_allclose(got, CLIPS[:, 0].mean((1, 2, 3)), rtol=1e-6)


def test_latents_of_clips_go_with_every_frame():
    inputs = (jnp.asarray(CLIPS), jnp.asarray(LATENTS))
    scores = score_images(brightness("both", 3), None, inputs, np.zeros(1), jnp.zeros(2, int))
    np.testing.assert_allclose(scores["reward"], LATENTS.mean((1, 2, 3, 4)), rtol=1e-6)


def test_one_broken_frame_breaks_the_score_of_its_clip_alone():
    clips = CLIPS.copy()
    clips[0, 8] = np.nan
    reward = brightness(frames=2)
    got = score_images(reward, None, jnp.asarray(clips), np.zeros(1), jnp.zeros(2, int))["reward"]
    assert np.isnan(got[0])
    assert np.isfinite(got[1])


def groupwise(images, prompts, metadata):
    return np.arange(len(images))


groupwise.groupwise = True


def test_rewards_that_compare_candidates_score_one_frame():
    name = "tests.rewards.test_frames:groupwise"
    open_rewards(Settings(weights={name: 1.0}))
    with pytest.raises(InputError, match=r"^reward\.frames=2: must be 1 with the reward 'tests"):
        open_rewards(Settings(weights={name: 1.0}, frames=2))
