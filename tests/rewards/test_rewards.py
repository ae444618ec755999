"""Rewards: the embedded CLIP equals transformers' on the same files; sums; batch independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import CLIPModel

from solrl_jax.backbone.backbone import EMBEDDED_FOLDER
from solrl_jax.rewards.protocol import score_images
from solrl_jax.rewards.registry import make_reward
from solrl_jax.shapes import scenes
from solrl_jax.storage.errors import InputError

PROMPTS = ("a red circle", "two small blue squares", "a large yellow triangle above a cyan circle", "three purple squares")


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    return np.stack([scenes.render(scenes.parse(p), rng) for p in PROMPTS]).astype(np.float32) / 255


def scores(weights, images, index, prompts=PROMPTS):
    reward = make_reward(weights)
    out = score_images(reward, reward.params, jnp.asarray(images), reward.prepare(prompts), jnp.asarray(index))
    return {name: np.asarray(value) for name, value in jax.device_get(out).items()}


def test_tiny_clip_equals_transformers(pictures):
    theirs = CLIPModel.from_pretrained(EMBEDDED_FOLDER / "tiny-clip").eval()
    tokens = make_reward({"tiny-clip": 1.0}).prepare(PROMPTS)["tiny-clip"]
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.from_numpy(((pictures - mean) / std).astype(np.float32).transpose(0, 3, 1, 2))
    with torch.no_grad():
        out = theirs(
            input_ids=torch.from_numpy(tokens["ids"]).long(), attention_mask=torch.from_numpy(tokens["mask"]).long(),
            pixel_values=pixels,
        )  # fmt: skip
        cosines = (out.logits_per_image / theirs.logit_scale.exp()).numpy()
    for shift in range(len(PROMPTS)):  # each picture against each prompt
        index = np.roll(np.arange(len(PROMPTS)), shift)
        got = scores({"tiny-clip": 1.0}, pictures, index)["reward"]
        np.testing.assert_allclose(got, cosines[np.arange(len(PROMPTS)), index], atol=1e-5)
    assert np.ptp(cosines) > 0.1


def test_tiny_clip_prefers_the_caption_to_another(pictures):
    own = scores({"tiny-clip": 1.0}, pictures, np.arange(4))["reward"]
    other = scores({"tiny-clip": 1.0}, pictures, (np.arange(4) + 1) % 4)["reward"]
    assert (own > other + 0.05).all()


def test_the_reward_is_the_weighted_sum_of_its_parts(pictures):
    both = scores({"shapes": 2.0, "tiny-clip": -0.5}, pictures, np.arange(4))
    np.testing.assert_allclose(both["reward"], 2 * both["shapes"] - 0.5 * both["tiny-clip"], rtol=1e-6)
    assert set(both) == {"reward", "shapes", "shapes/strict", "tiny-clip"}
    assert both["shapes/strict"].all()


def test_any_score_of_a_reward_may_be_trained_on(pictures):
    wrong = (np.arange(4) + 1) % 4
    mixed = scores({"shapes": 0.5, "shapes/strict": 0.5}, pictures[wrong], np.arange(4))
    np.testing.assert_allclose(mixed["reward"], 0.5 * mixed["shapes"] + 0.5 * mixed["shapes/strict"], rtol=1e-6)
    assert set(mixed) == {"reward", "shapes", "shapes/strict"}
    assert (mixed["reward"] < mixed["shapes"]).all()  # partial credit, no success
    only = scores({"shapes/strict": 1.0}, pictures, np.arange(4))["reward"]
    np.testing.assert_array_equal(only, 1.0)


def test_a_picture_scores_the_same_whatever_its_batch_mates(pictures):
    whole = scores({"shapes": 1.0, "tiny-clip": 1.0}, pictures, np.arange(4))["reward"]
    mixed = scores({"shapes": 1.0, "tiny-clip": 1.0}, pictures[[2, 0, 0, 3]], np.array([2, 0, 0, 3]))["reward"]
    np.testing.assert_allclose(mixed, whole[[2, 0, 0, 3]], atol=1e-6)


def test_unknown_rewards_and_unreadable_prompts_are_named():
    with pytest.raises(InputError, match=r"unknown reward 'beauty', 'truth'; there are shapes, tiny-clip, pickscore, "):
        make_reward({"truth": 1.0, "beauty": 1.0})
    with pytest.raises(InputError, match=r"unknown score 'shapes/lenient'; there are shapes, shapes/strict"):
        make_reward({"shapes": 1.0, "shapes/lenient": 1.0})
    with pytest.raises(InputError, match=r"reward 'shapes': .*a red dog"):
        make_reward({"shapes": 1.0}).prepare(["a red dog"])
