"""Rewards inside JAX: the embedded CLIP equals that of transformers on the same files, weighted
sums are sums, prompts are checked, and the score of an image does not depend on the others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pretrain import drawing
from transformers import CLIPModel

from solrl_jax.data.prompts import Prompt, load_prompts
from solrl_jax.data.shapes import scenes
from solrl_jax.errors import InputError
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.models.vision.image_resize import MEAN, STD
from solrl_jax.rewards.protocol import check_prompts, score_images
from tests.cases import first_is_quick
from tests.rewards.opening import open_reward

PROMPTS = (
    "a red circle",
    "two small blue squares",
    "a large yellow triangle above a cyan circle",
    "three purple squares",
)


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    return (
        np.stack([drawing.render(scenes.parse_caption(p), rng) for p in PROMPTS]).astype(np.float32)
        / 255
    )


def make_reward(weights):
    return open_reward(weights, {}).load(None).trained


def scores(weights, images, index, prompts=PROMPTS):
    reward = make_reward(weights)
    out = score_images(
        reward, reward.params, jnp.asarray(images), reward.prepare(prompts), jnp.asarray(index)
    )
    return {name: np.asarray(value) for name, value in jax.device_get(out).items()}


@pytest.mark.slow
def test_tiny_clip_equals_transformers(pictures):
    theirs = CLIPModel.from_pretrained(EMBEDDED_FOLDER / "tiny-clip").eval()
    tokens = make_reward({"tiny-clip": 1.0}).prepare(PROMPTS)["tiny-clip"]
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.from_numpy(((pictures - mean) / std).astype(np.float32).transpose(0, 3, 1, 2))
    with torch.no_grad():
        out = theirs(
            input_ids=torch.from_numpy(tokens["ids"]).long(),
            attention_mask=torch.from_numpy(tokens["mask"]).long(),
            pixel_values=pixels,
        )
        cosines = (out.logits_per_image / theirs.logit_scale.exp()).numpy()
    for shift in range(len(PROMPTS)):  # each picture against each prompt
        index = np.roll(np.arange(len(PROMPTS)), shift)
        got = scores({"tiny-clip": 1.0}, pictures, index)["reward"]
        np.testing.assert_allclose(got, cosines[np.arange(len(PROMPTS)), index], atol=1e-5)
    assert np.ptp(cosines) > 0.1


@pytest.mark.slow
def test_the_gradient_of_tiny_clip_equals_that_of_transformers(pictures):
    """By the images, to 1e-4 of the largest entry."""
    theirs = CLIPModel.from_pretrained(EMBEDDED_FOLDER / "tiny-clip").eval()
    reward = make_reward({"tiny-clip": 1.0})
    prepared = reward.prepare(PROMPTS)
    tokens = prepared["tiny-clip"]
    mean, std = (torch.tensor(x).reshape(3, 1, 1) for x in (MEAN, STD))
    images = torch.from_numpy(pictures.transpose(0, 3, 1, 2)).clone().requires_grad_()
    out = theirs(
        input_ids=torch.from_numpy(tokens["ids"]).long(),
        attention_mask=torch.from_numpy(tokens["mask"]).long(),
        pixel_values=(images - mean) / std,
    )
    (out.logits_per_image / theirs.logit_scale.exp()).diagonal().sum().backward()
    want = images.grad.numpy().transpose(0, 2, 3, 1)

    rows = jax.tree.map(jnp.asarray, prepared)

    def total(images):
        return reward.score(reward.params, images, rows)["reward"].sum()

    got = jax.jit(jax.grad(total))(jnp.asarray(pictures))
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.slow
def test_tiny_clip_prefers_the_caption_to_another(pictures):
    right_scores = scores({"tiny-clip": 1.0}, pictures, np.arange(4))["reward"]
    other = scores({"tiny-clip": 1.0}, pictures, (np.arange(4) + 1) % 4)["reward"]
    assert (right_scores > other + 0.05).all()


@pytest.mark.slow
def test_the_reward_is_the_weighted_sum_of_its_parts(pictures):
    both = scores({"shapes": 2.0, "tiny-clip": -0.5}, pictures, np.arange(4))
    np.testing.assert_allclose(
        both["reward"], 2 * both["shapes"] - 0.5 * both["tiny-clip"], rtol=1e-6
    )
    assert set(both) == {"reward", "shapes", "shapes/strict", "tiny-clip"}
    assert both["shapes/strict"].all()


@pytest.mark.slow
def test_any_score_of_a_reward_may_be_trained_on(pictures):
    wrong = (np.arange(4) + 1) % 4
    mixed = scores({"shapes": 0.5, "shapes/strict": 0.5}, pictures[wrong], np.arange(4))
    np.testing.assert_allclose(
        mixed["reward"], 0.5 * mixed["shapes"] + 0.5 * mixed["shapes/strict"], rtol=1e-6
    )
    assert set(mixed) == {"reward", "shapes", "shapes/strict"}
    assert (mixed["reward"] < mixed["shapes"]).all()  # partial credit without success
    only = scores({"shapes/strict": 1.0}, pictures, np.arange(4))["reward"]
    np.testing.assert_array_equal(only, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("value", first_is_quick([np.nan, np.inf, -np.inf]))
@pytest.mark.parametrize(
    "weights",
    [
        {"shapes": 1.0},
        {"shapes/strict": 1.0},
        {"tiny-clip": 1.0},
        {"shapes": 1.0, "tiny-clip": 0.1},
    ],
)
def test_a_picture_that_is_not_finite_has_no_score(weights, value, pictures):
    damaged = pictures.copy()
    damaged[2, 5, 7, 1] = value
    damaged_scores, sound = (
        scores(weights, images, np.arange(4)) for images in (damaged, pictures)
    )
    for name, values in damaged_scores.items():
        assert np.isnan(values[2]), name
        np.testing.assert_array_equal(np.delete(values, 2), np.delete(sound[name], 2))


@pytest.mark.slow
def test_a_picture_scores_the_same_whatever_its_batch_mates(pictures):
    whole = scores({"shapes": 1.0, "tiny-clip": 1.0}, pictures, np.arange(4))["reward"]
    mixed = scores(
        {"shapes": 1.0, "tiny-clip": 1.0}, pictures[[2, 0, 0, 3]], np.array([2, 0, 0, 3])
    )["reward"]
    np.testing.assert_allclose(mixed, whole[[2, 0, 0, 3]], atol=1e-6)


def test_unknown_rewards_and_unreadable_prompts_are_named():
    with pytest.raises(
        InputError,
        match=r"unknown reward 'beauty', 'truth'; available: shapes, motion, tiny-clip, ",
    ):
        make_reward({"truth": 1.0, "beauty": 1.0})
    with pytest.raises(
        InputError, match=r"unknown score 'shapes/lenient'; available: shapes, shapes/strict"
    ):
        make_reward({"shapes": 1.0, "shapes/lenient": 1.0})
    with pytest.raises(InputError, match=r"reward 'shapes': .*a red dog"):
        make_reward({"shapes": 1.0}).prepare(["a red dog"])


# checks of prompts, before a run


GENEVAL = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}


@pytest.mark.parametrize(
    ("weights", "set_name"),
    [
        ({"shapes": 1.0}, "shapes-train"),
        ({"motion": 1.0}, "motion-test"),
        ({"ocr": 1.0, "tiny-clip": 1.0}, "ocr-train"),
        ({"geneval": 1.0}, "geneval-shapes-train"),
    ],
)
def test_a_set_of_prompts_that_can_be_scored_passes(weights, set_name):
    check_prompts(
        make_reward(weights), load_prompts(f"embedded:{set_name}", "prompts.train"), "prompts.train"
    )


@pytest.mark.parametrize(
    ("name", "good", "bad", "reason"),
    [
        (
            "shapes",
            Prompt("a red circle"),
            Prompt("a red dog"),
            "cannot parse the caption 'a red dog'; expected GROUP or GROUP above",
        ),
        (
            "motion",
            Prompt("a red circle moves up"),
            Prompt("a red dog"),
            "cannot parse the caption 'a red dog'; expected a|one red|green",
        ),
        (
            "ocr",
            Prompt('says "go"'),
            Prompt("a red dog"),
            "prompt 'a red dog': expected the words to draw, in double quotes or",
        ),
        (
            "geneval",
            Prompt("x", GENEVAL),
            Prompt("a red dog"),
            "prompt 'a red dog': tag=None: expected metadata that names a",
        ),
        ("tests.outside:checked", Prompt("green"), Prompt("a red dog"), "red is not for me"),
        ("tests.outside:checked_in_jax", Prompt("green"), Prompt("a red dog"), "KeyError: 'red'"),
    ],
)
def test_a_prompt_that_a_reward_cannot_score_is_found_wherever_it_is(name, good, bad, reason):
    """The message names the field, the reward, the first such prompt and how many there are."""
    reward = make_reward({name: 1.0, "tiny-clip": 1.0})
    check_prompts(reward, [good, good], "prompts.test")
    with pytest.raises(InputError) as error:
        check_prompts(reward, [good, good, bad, good, Prompt("another red dog")], "prompts.test")
    message = str(error.value)
    assert message.startswith("prompts.test: ")
    assert f"reward '{name}': {reason}" in message
    assert message.count("'a red dog'") == 1
    assert message.endswith(" (2 of 5 prompts cannot be scored)")
    assert "\n" not in message
    with pytest.raises(InputError) as error:
        check_prompts(reward, [bad], "prompts.test")
    assert "cannot be scored" not in str(error.value)


def test_watched_rewards_check_their_prompts_in_evaluations_alone():
    loaded = open_reward({"tiny-clip": 1.0}, {}, eval_only=("shapes", "ocr")).load(None)
    trained = loaded.trained
    evaluated = loaded.evaluated
    check_prompts(trained, [Prompt("a red dog")], "prompts.train")
    with pytest.raises(InputError, match=r"^prompts.test: reward 'shapes': cannot parse"):
        check_prompts(evaluated, [Prompt("a red dog")], "prompts.test")
    with pytest.raises(
        InputError, match=r"^prompts.test: reward 'ocr': prompt 'a red circle': expected the words"
    ):
        check_prompts(evaluated, [Prompt("a red circle")], "prompts.test")


def test_a_detector_of_the_users_is_not_imported_to_check_prompts():
    options = {"geneval": {"detector": "nowhere.at:all"}}
    reward = open_reward({"geneval": 1.0}, options=options).load(None).trained
    check_prompts(
        reward,
        [Prompt("a dog", {"tag": "colors", "include": [{"class": "dog", "count": 1}]})],
        "prompts.train",
    )
    with pytest.raises(InputError, match=r"count=0: expected a count of at least 1"):
        check_prompts(
            reward,
            [Prompt("a dog", {"tag": "x", "include": [{"class": "dog", "count": 0}]})],
            "prompts.train",
        )


def test_a_message_about_a_long_prompt_is_short():
    with pytest.raises(InputError) as error:
        check_prompts(make_reward({"shapes": 1.0}), [Prompt("dog " * 100_000)], "prompts.train")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("weights", [{"tiny-clip": 1.0}, {"shapes": 1.0}])
def test_images_with_an_alpha_channel_are_refused_with_a_hint(weights, pictures):
    opaque = np.concatenate([pictures, np.ones_like(pictures[..., :1])], axis=-1)
    with pytest.raises(ValueError, match=r"images of shape \(4, 32, 32, 4\); expected .* RGBA"):
        scores(weights, opaque, np.arange(4))
