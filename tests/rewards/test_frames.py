"""Rewards of images on the frames of clips, and rewards of whole clips."""

import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.schema import Reward as Settings
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError
from solrl_jax.rewards.frames import sample_frames
from solrl_jax.rewards.host import open_scoring, score_gray_images, shared_workers
from solrl_jax.rewards.mixture import mixture
from solrl_jax.rewards.protocol import HostReward, HostRewards, Reward, score_images
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


def last_frame(inputs="images"):
    """The mean of the last frame of a clip, and of its latents if they are read."""

    def score(params, clips, prepared):
        latents = np.zeros(2)
        if inputs == "both":
            clips, latents = clips
            latents = latents.mean((1, 2, 3, 4))
        return {"reward": clips[:, -1].mean((1, 2, 3)) + latents + prepared}

    return Reward(None, brightness().prepare, score, inputs=inputs, clips=True)


@pytest.mark.parametrize("inputs", ["images", "both"])
def test_a_reward_of_clips_gets_whole_ones(inputs):
    reward = last_frame(inputs)
    selection = reward.select_inputs(jnp.asarray(CLIPS), jnp.asarray(LATENTS))
    index = jnp.array([1, 0])
    got = score_images(reward, None, selection, np.array([10.0, 20.0]), index)["reward"]
    latents = LATENTS.mean((1, 2, 3, 4)) if inputs == "both" else 0
    want = CLIPS[:, -1].mean((1, 2, 3)) + np.array([20, 10]) + latents
    np.testing.assert_allclose(got, want, rtol=1e-6)
    images = reward.select_inputs(jnp.asarray(CLIPS[:, 0]), jnp.asarray(LATENTS))
    with pytest.raises(ValueError, match=r"\(2, 4, 6, 3\); expected clips \[n, frames, height"):
        score_images(reward, None, images, np.zeros(1), jnp.zeros(2, int))


def test_a_sum_gives_each_reward_what_it_reads():
    """Whole clips, frames and latents in one sum. A broken frame breaks the scores that read it."""

    def of_latents(params, latents, prepared):
        return {"reward": latents.mean((1, 2, 3, 4))}

    parts = {
        "last": last_frame(),
        "frames": brightness(),
        "latents": Reward(None, brightness().prepare, of_latents, inputs="latents"),
    }
    summed = mixture({"last": 1.0, "frames": 2.0, "latents": 4.0}, parts, None, frames=3)
    assert (summed.inputs, summed.frames) == ("both", 3)
    clips = CLIPS.copy()
    clips[1, 1] = np.nan
    inputs = summed.select_inputs(jnp.asarray(clips), jnp.asarray(LATENTS))
    prepared = summed.prepare(["a", "b"])
    got = score_images(summed, summed.params, inputs, prepared, jnp.array([1, 0]))
    want = {
        "last": [CLIPS[0, -1].mean() + 1, np.nan],
        "frames": CLIPS[:, [0, 4, 8]].mean((1, 2, 3, 4)) + np.array([1, 0]),
        "latents": LATENTS.mean((1, 2, 3, 4)),
    }
    for name, scores in want.items():
        np.testing.assert_allclose(got[name], scores, rtol=1e-6)
    total = want["last"][0] + 2 * want["frames"][0] + 4 * want["latents"][0]
    np.testing.assert_allclose(got["reward"], [total, np.nan], rtol=1e-6)


def test_a_reward_without_weight_does_not_break_the_sum():
    """Its scores are only recorded, so NaN in a frame that no other reward reads leaves the sum
    finite.
    """
    parts = {"last": last_frame(), "frames": brightness()}
    summed = mixture({"frames": 2.0}, parts, None)
    clips = CLIPS.copy()
    clips[1, 1] = np.nan
    prepared = summed.prepare(["a"])
    got = score_images(summed, summed.params, jnp.asarray(clips), prepared, jnp.zeros(2, int))
    np.testing.assert_allclose(got["reward"], 2 * CLIPS[:, 0].mean((1, 2, 3)), rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(got["last"]), [False, True])


def test_workers_get_clips_for_the_rewards_of_clips():
    opened = open_rewards(
        Settings(weights={"tests.outside:brighter_end": 1.0, "tests.outside:motion": 1.0})
    ).rewards
    host = HostRewards(tuple(opened.values()), {}, 1, 100.0, skip=False)
    assert host.select(clips=False) is None
    assert host.select(clips=True).rewards == host.rewards
    prompts = [Prompt("a")] * 2
    try:
        with open_scoring(host, prompts) as outside_jax:
            outside_jax.add(CLIPS)
            got = outside_jax.finish()
        several = HostReward("some", "tests.outside:several", {}, ("green",))
        both = HostRewards((several, *host.rewards), {}, 1, 100.0, skip=False)
        score_gray_images(both, prompts[:1], (4, 6, T))
    finally:
        shared_workers(1, 100.0).close()
    motion = (CLIPS[:, -1] - CLIPS[:, 0])[..., 0].mean((1, 2))
    np.testing.assert_allclose(got["tests.outside:motion"], motion, rtol=1e-5)
    ends = CLIPS[:, -1].mean((1, 2, 3))
    np.testing.assert_array_equal(got["tests.outside:brighter_end"], ends > ends[::-1])


def test_frames_are_for_rewards_of_images():
    name = "tests.outside:motion"
    with pytest.raises(
        InputError, match=r"^reward\.frames=2: must be 1 with 'tests\.outside:motio"
    ):
        open_rewards(Settings(weights={name: 1.0}, frames=2))
    open_rewards(Settings(weights={name: 1.0, "shapes": 1.0}, frames=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clips": 1}, "clips=1: expected True or False"),
        ({"clips": True, "inputs": "latents"}, "clips=True: must be False with inputs='latents'"),
    ],
)
def test_impossible_rewards_of_clips_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Reward(None, list, lambda *arguments: {}, **fields)


def groupwise(images, prompts, metadata):
    return np.arange(len(images))


groupwise.groupwise = True


def test_rewards_that_compare_candidates_score_one_frame():
    name = "tests.rewards.test_frames:groupwise"
    open_rewards(Settings(weights={name: 1.0}))
    with pytest.raises(InputError, match=r"^reward\.frames=2: must be 1 with the reward 'tests"):
        open_rewards(Settings(weights={name: 1.0}, frames=2))
