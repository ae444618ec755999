"""The embedded world of clips: captions, rendered clips, and a verifier that is hard to fool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrain import clips

from solrl_jax.data.motion import scenes, verifier
from solrl_jax.data.shapes.scenes import BACKGROUND

SCENES = [scenes.Scene("red", "circle", motion) for motion in scenes.MOTIONS]


def drawn(captions: list[str], seed: int = 0) -> np.ndarray:
    """One clip of each caption, float32 in [0, 1]."""
    described = [scenes.parse_caption(caption) for caption in captions]
    return clips.render(described, np.random.default_rng(seed)) / np.float32(255)


def judged(images: np.ndarray, captions: list[str]) -> verifier.ClipVerdict:
    verdict = verifier.verify(jnp.asarray(images), verifier.parse_targets(captions))
    return jax.tree.map(np.asarray, verdict)


def test_a_caption_is_parsed():
    scene = scenes.parse_caption("  One RED circle  moves left to right ")
    assert scene == scenes.Scene("red", "circle", "moves left to right")
    assert scenes.parse_caption(scene.caption) == scene


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red circle",
        "two red circle moves up",
        "a pink circle moves up",
        "a red star moves up",
        "a red circle jumps",
        "a red circle moves up moves up",
    ],
)
def test_other_captions_are_refused(text):
    with pytest.raises(ValueError, match="cannot parse the caption"):
        scenes.parse_caption(text)


@pytest.mark.slow
def test_every_scene_is_drawn_as_its_caption_says():
    captions = [scene.caption for scene in clips.SCENES]
    verdict = judged(drawn(captions), captions)
    assert verdict.strict.all()
    assert verdict.moves.all()
    assert verdict.score.min() > 0.98


@pytest.mark.slow
def test_another_motion_is_never_right():
    captions = [scene.caption for scene in SCENES]
    images = drawn(captions)
    for shift in range(1, len(SCENES)):
        verdict = judged(images, captions[shift:] + captions[:shift])
        assert not verdict.moves.any()
        assert not verdict.strict.any()
        assert verdict.score.max() < 0.65


@pytest.mark.slow
def test_another_color_or_shape_is_not_strict():
    images = drawn(["a red circle moves up"] * 2)
    verdict = judged(images, ["a blue circle moves up", "a red square moves up"])
    assert verdict.moves.all()
    assert not verdict.strict.any()
    assert verdict.score.max() < 0.85


@pytest.mark.slow
def test_an_empty_clip_scores_nothing():
    empty = np.broadcast_to(np.float32(BACKGROUND) / 255, (5, 5, 32, 32, 3))
    verdict = judged(empty, [scene.caption for scene in SCENES])
    assert not verdict.moves.any()
    assert not verdict.strict.any()
    assert verdict.score.max() < 0.02


@pytest.mark.slow
def test_a_flickering_color_is_not_strict():
    captions = ["a red circle moves up"]
    images = drawn(captions)
    images[:, 2] = drawn(["a blue circle moves up"])[:, 2]  # the same place and size
    verdict = judged(images, captions)
    assert verdict.moves.all()
    assert not verdict.strict.any()
    assert verdict.score[0] < judged(drawn(captions), captions).score[0] - 0.05


@pytest.mark.slow
def test_one_right_frame_is_not_enough():
    captions = ["a red circle stays still", "a red circle moves up"]
    images = drawn(captions)
    images[:, 1:] = np.float32(BACKGROUND) / 255
    verdict = judged(images, captions)
    assert not verdict.moves.any()
    assert not verdict.strict.any()
    assert verdict.score.max() < 0.2


@pytest.mark.slow
def test_a_jump_is_no_motion():
    captions = ["a red circle moves up"]
    images = drawn(captions)
    images[:, :4] = images[:, :1]  # it stays still, and is at the other end in the last frame
    verdict = judged(images, captions)
    assert not verdict.moves.any()
    assert not verdict.strict.any()


@pytest.mark.slow
def test_a_second_object_is_not_strict():
    captions = ["a red circle moves up"]
    images = drawn(captions)
    background = np.float32(BACKGROUND) / 255
    other = drawn(["a blue square stays still"], seed=7)
    is_other = np.abs(other - background).max(-1, keepdims=True) > 0.01
    verdict = judged(np.where(is_other, other, images), captions)
    assert not verdict.strict.any()


def test_clips_of_one_frame_are_refused():
    captions = ["a red circle moves up"]
    with pytest.raises(ValueError, match="2 or more"):
        judged(drawn(captions)[:, :1], captions)


@pytest.mark.slow
def test_a_clip_of_twice_the_size_is_judged_alike():
    captions = [scene.caption for scene in clips.SCENES[:10]]
    images = drawn(captions).repeat(2, axis=2).repeat(2, axis=3)
    assert judged(images, captions).strict.all()


def test_a_held_out_caption_has_known_pairs_of_words():
    held_out = [scene for scene in clips.SCENES if clips.held_out(scene)]
    train = [scene for scene in clips.SCENES if not clips.held_out(scene)]
    assert len(held_out) == 18

    def pairs(some: list[scenes.Scene]) -> set[tuple[str, str]]:
        return {
            pair
            for scene in some
            for pair in (
                (scene.color, scene.shape),
                (scene.color, scene.motion),
                (scene.shape, scene.motion),
            )
        }

    assert pairs(held_out) <= pairs(train)
    assert {scene.motion for scene in held_out} == set(scenes.MOTIONS)


def test_training_clips_are_of_no_held_out_caption():
    images, captions = clips.make_clips(144, seed=0)
    assert images.shape == (144, scenes.FRAMES, 32, 32, 3)
    assert not any(clips.held_out(scenes.parse_caption(caption)) for caption in captions)
    assert len(set(captions)) == 72
    again, _ = clips.make_clips(144, seed=0)
    np.testing.assert_array_equal(images, again)
