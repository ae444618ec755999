"""Clips through the functions that serve images: noise, sampling, decoding, rewards inside and
outside JAX on sampled frames and on whole clips, an evaluation's grid, and the files of a run.
"""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from solrl_jax.errors import InputError
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards import registry as rewards
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.generate import SeedBatch, decode_chunk, generate
from solrl_jax.rl.reward_gradient import gradient_decoder, reward_gradient
from solrl_jax.runs import evaluate, image_files
from tests.pipelines import save_wan_pipeline
from tests.small import small_config

FRAMES = 9
HOST = "tests.outside:several"  # the mean of the red channel, of images with four axes
MOTION = "tests.outside:motion"  # how much it changes, of clips


def redness(images):
    return (images[..., 0] - images[..., 2]).mean((1, 2))


def in_jax() -> Reward:
    def score(params, images, prepared):
        return {"reward": redness(images)}

    return Reward(None, lambda prompts: np.zeros(len(prompts), np.float32), score)


def spread() -> Reward:
    """Of clips: the largest change of a pixel, which no frame shows."""

    def score(params, clips, prepared):
        return {"reward": (clips.max(1) - clips.min(1)).max((1, 2, 3))}

    return Reward(None, lambda prompts: np.zeros(len(prompts), np.float32), score, clips=True)


def build(folder, *overrides):
    settings = (
        *("model=wan-2.1-1.3b", f"model.path={folder}", "model.height=16", "model.width=8"),
        *(f"model.frames={FRAMES}", "eval.size=null", "model.max_sequence_length=12"),
        *("rollout.candidates=4", "rollout.kept=2", "rollout.per_device_batch_size=2"),
        *("rollout.num_steps=2", "rollout.explore.num_steps=1", "eval.num_steps=2"),
        f"reward.weights={{redness: 2, '{HOST}': 1, spread: -1, '{MOTION}': 3}}",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rewards.REWARDS, "redness", rewards.JaxEntry(lambda paths: in_jax()))
        patch.setitem(rewards.REWARDS, "spread", rewards.JaxEntry(lambda paths: spread()))
        return experiments.build(small_config("unused", *settings, *overrides))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wan")
    save_wan_pipeline(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "places"),
    [(3, [0, 4, 8]), pytest.param(1, [0], marks=pytest.mark.exhaustive)],
)
def test_rewards_inside_and_outside_jax_score_frames_and_clips(folder, frames, places, tmp_path):
    experiment = build(folder, f"reward.frames={frames}")
    assert experiment.size == (16, 8, FRAMES)
    prompts = experiment.test_prompts[:2]
    seeds = experiment.seeds("evaluation", prompts, 2)
    sampler = experiment.sampler("evaluate", {}, 2, noise_start=None)
    assert sampler.frames == FRAMES
    samples = generate(
        experiment.backbone,
        sampler,
        experiment.encode_prompts(prompts, experiment.reward),
        SeedBatch.from_seeds(seeds),
        experiment.reward,
        keep_images=True,
    )
    assert samples.latents.shape == (4, 3, 4, 2, 4)
    assert samples.images.shape == (4, FRAMES, 16, 8, 3)
    assert np.ptp(samples.images, axis=1).max() > 0.1  # it moves
    sampled = samples.images[:, places].reshape(-1, 16, 8, 3)
    expected = {"redness": redness(sampled), HOST: sampled[..., 0].mean((1, 2))}
    expected = {name: scores.reshape(4, frames).mean(1) for name, scores in expected.items()}
    expected["spread"] = np.ptp(samples.images, axis=1).max((1, 2, 3))
    expected[MOTION] = (samples.images[:, -1] - samples.images[:, 0])[..., 0].mean((1, 2))
    for name, scores in expected.items():
        np.testing.assert_allclose(samples.scores[name], scores, atol=1e-5)
        assert np.ptp(scores) > 1e-3
    assert samples.failed == {HOST: 0, MOTION: 0}
    total = 2 * expected["redness"] + expected[HOST] - expected["spread"] + 3 * expected[MOTION]
    np.testing.assert_allclose(samples.reward, total, atol=1e-5)

    grid = evaluate.ImageGrid.from_samples(prompts, samples)
    assert grid.images.shape == (2, 2, FRAMES, 16, 8, 3)
    flat = grid.images.reshape(-1, *grid.images.shape[2:])
    image_files.save_grid(tmp_path / "grid.png", flat, 2, ["a"] * 4, frames_per_second=16)
    with Image.open(tmp_path / "grid.webp") as moving:
        assert moving.n_frames == FRAMES
    assert "x 2 clips of 9 frames of 8 x 16; dpm2" in evaluate.describe_evaluation(experiment)


@pytest.mark.exhaustive
def test_of_clips_of_which_the_first_frame_is_scored_no_other_is_decoded(folder):
    """In float32, scores and images equal those of whole clips to 1e-6."""
    experiment = build(folder, "reward.frames=1", f"reward.weights={{redness: 2, '{HOST}': 1}}")
    reward = experiment.reward
    assert reward.reads_first_frame_alone
    prompts = experiment.test_prompts[:2]
    backbone = experiment.backbone
    exact = dataclasses.replace(
        backbone.decoder,
        params=hosts.put(
            backbone.pipeline.vae.load(np.float32), sharding.replicated(backbone.mesh)
        ),
        dtype=np.dtype("float32"),
    )
    arguments = (
        dataclasses.replace(backbone, decoder=exact),
        dataclasses.replace(experiment.sampler("evaluate", {}, 2, noise_start=None), decoder=exact),
        experiment.encode_prompts(prompts, reward),
        SeedBatch.from_seeds(experiment.seeds("evaluation", prompts, 2)),
        reward,
    )
    whole = generate(*arguments, keep_images=True)
    first = generate(*arguments)
    assert (whole.images.shape[1], first.images) == (FRAMES, None)
    np.testing.assert_array_equal(first.latents, whole.latents)
    for name, scores in whole.scores.items():
        np.testing.assert_allclose(first.scores[name], scores, atol=1e-6)

    latents = np.array(whole.latents)
    latents[0, -1, 0, 0, 0] = np.nan  # in no frame that is decoded
    images = np.asarray(decode_chunk(exact, latents, True))
    assert images.shape == (4, 1, 16, 8, 3)
    assert np.isnan(images[0]).all()
    np.testing.assert_allclose(images[1:], whole.images[1:, :1], atol=1e-6)

    alone = build(folder, "reward.frames=1", "reward.weights={redness: 2}").reward
    decoder = gradient_decoder(exact)
    with jax.set_mesh(experiment.backbone.mesh):
        _, ours = reward_gradient(
            alone, decoder, alone.params, whole.latents[:2], alone.prepare(prompts), np.arange(2)
        )
        theirs = jax.grad(lambda x: 2 * redness(decoder(x)[:, 0]).sum())(whole.latents[:2])
    assert (np.asarray(ours)[:, 1:] == 0).all()
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        (("reward.frames=1", "reward.weights={redness: 1}"), True),
        (("reward.frames=2", "reward.weights={redness: 1}"), False),
        pytest.param(
            ("reward.frames=1", "reward.weights={redness: 1, spread: 0}"),
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("reward.frames=1", f"reward.weights={{redness: 1, '{MOTION}': 1}}"),
            False,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_reward_says_whether_the_first_frame_is_all_that_it_reads(folder, settings, first):
    assert build(folder, *settings).reward.reads_first_frame_alone == first


@pytest.mark.exhaustive
def test_the_gradient_of_the_reward_decodes_chunks_of_frames(folder):
    """It equals that through the whole clip, to 1e-5 of the largest component.

    The clip counts as 12 frames, 1536 pixels.
    """
    experiment = build(folder, "reward.frames=3", "reward.weights={redness: 2, spread: 1}")
    backbone = experiment.backbone
    reward = experiment.reward
    prompts = experiment.test_prompts[:2]
    latents = np.random.default_rng(0).standard_normal((2, 3, 4, 2, 4)).astype(np.float32)

    def gradient(max_pixels):
        decoder = dataclasses.replace(
            gradient_decoder(backbone.decoder),
            params=backbone.pipeline.vae.load(np.float32),
            dtype=np.dtype("float32"),
            max_pixels=max_pixels,
        )
        prepared = reward.prepare(prompts)
        with jax.set_mesh(backbone.mesh):
            text = str(jax.make_jaxpr(decoder)(latents))
            results = reward_gradient(
                reward, decoder, reward.params, latents, prepared, np.array([0, 1])
            )
        return text.count("conv_general_dilated["), *map(np.asarray, results)

    convolutions, rewards, whole = gradient(1536)
    more, chunked_rewards, chunked = gradient(1535)
    assert more > convolutions  # those of the first frame, and those of the others in a loop
    np.testing.assert_allclose(chunked_rewards, rewards, atol=1e-5)
    assert np.abs(whole).max((2, 3, 4)).min() > 0  # every latent frame counts
    np.testing.assert_allclose(chunked, whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.frames=null", "model: size 16x8: this model makes clips; accepted: a height, a"),
        (
            "rollout.size=[16,16,10]",
            "rollout.size: size 16x16x10: this model supports 1 frame plus",
        ),
        ("model.path=embedded:tiny-sana", "size .*: this model makes images; accepted: a height"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused_before_weights_load(folder, override, message):
    extra = ["model.height=32", "model.width=32"] if "tiny" in override else []
    with pytest.raises(InputError, match=message):
        build(folder, override, *extra, f"reward.weights={{'{HOST}': 1}}")


@pytest.mark.parametrize("name", ["spread", MOTION])
def test_rewards_of_clips_need_clips(folder, name):
    message = f"^reward '{name}': scores whole clips, not images of 8 x 16; expected a video model"
    with pytest.raises(InputError, match=message) as refused:
        build(folder, "model.frames=null", f"reward.weights={{'{name}': 1}}")
    assert "\n" not in str(refused.value)
