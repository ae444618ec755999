"""The OCR reward on words that Pillow draws, and its rule on texts."""

import importlib
import socket

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter

from solrl_jax.config.presets import resolve
from solrl_jax.data.prompts import EMBEDDED_FOLDER
from solrl_jax.rewards import ocr as module
from solrl_jax.rewards.ocr import ocr, requested_words, similarity

WORDS = ("Bakery", "North Harbour", "MUSEUM", "Open until 9", "quiet river", "Lantern")


def drawn(text, size=40, side=256, paper=(250, 248, 240), ink=(20, 30, 60)):
    """The words on a plain ground, float32 [side, side, 3]."""
    picture = Image.new("RGB", (side, side), paper)
    ImageDraw.Draw(picture).text(
        (side / 2, side / 2), text, ink, ImageFont.load_default(size), anchor="mm", align="center"
    )
    return np.asarray(picture, np.float32) / 255


def prompts(words):
    return [f'a sign that says "{word}" in the rain' for word in words]


def score(images, words):
    return ocr(np.stack(images), prompts(words), [{}] * len(images))


@pytest.mark.slow
def test_clean_words_score_one_and_other_words_less_than_half():
    images = [drawn(word, size) for word, size in zip(WORDS, (72, 34, 56, 40, 44, 60), strict=True)]
    images[2] = 1 - images[2]  # light on dark
    scores = score(images, WORDS)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, 1)
    assert score(images, WORDS[1:] + WORDS[:1]).max() < 0.5


def test_lines_are_read_from_top_to_bottom_and_joined():
    assert score([drawn("Wild\nOrchard\nCinema", 48)], ["wild orchard cinema"]) == [1]
    assert score([drawn("Wild\nOrchard\nCinema", 48)], ["cinema orchard wild"])[0] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "step"), [("blur", 1.0), ("noise", 0.15)])
def test_the_worse_the_picture_the_less_it_scores(harm, step):
    """Means over twelve words in twelve sizes, in equal steps from clean to unreadable."""
    words = (
        "Anchor",
        "Canyon",
        "Engine",
        "Forest",
        "Harbour",
        "Journey",
        "Library",
        "Mirror",
        "Parade",
        "River",
        "Shadow",
        "Ticket",
    )
    clean = np.stack(
        [drawn(word, size, 160) for word, size in zip(words, np.linspace(12, 34, 12), strict=True)]
    )
    noise = np.random.default_rng(0).normal(0, 1, clean.shape)
    means = []
    for i in range(5):
        harmed = (
            gaussian_filter(clean, (0, i * step, i * step, 0))
            if harm == "blur"
            else clean + i * step * noise
        )
        means.append(score(np.clip(harmed, 0, 1).astype(np.float32), words).mean())
    assert means == sorted(means, reverse=True)
    assert means[0] == 1
    assert any(0.1 < mean < 0.9 for mean in means), means
    assert means[-1] < 0.1, means


def test_an_empty_picture_scores_nothing_and_one_that_holds_other_than_numbers_has_no_score():
    images = np.stack(
        [np.full((256, 256, 3), 0.5, np.float32), drawn("Bakery", 60), drawn("Bakery", 60)]
    )
    images[1, 0, 0, 0] = np.nan
    np.testing.assert_array_equal(score(images, ["Bakery"] * 3), [0, np.nan, 1])


def test_nothing_is_fetched(monkeypatch):
    def refuse(*_):
        raise AssertionError("opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    module.open_reader.cache_clear()
    assert score([drawn("Lantern", 60)], ["Lantern"]) == [1]


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("Hello World", "hello world", 1.0),
        ("xx h E l l o yy", "Hell O", 1.0),  # anywhere in the text, spaces and case aside
        ("kitten", "sitting", 1 - 3 / 7),
        ("", "abcd", 0.0),
        (
            "abcd is missing one letr",
            "letter",
            0.0,
        ),  # without the whole word, other text costs edits too
        ("abXd", "abcd", 0.75),
        ("abcde", "abcdf", 0.8),
        ("bcd", "abcd", 0.75),
        ("zzzzzzzzzzzz", "ab", 0.0),  # never below 0
        ("STRASSE", "straße", 1 - 2 / 6),
    ],
)
def test_the_score_is_the_share_of_letters_that_need_no_edit(text, target, expected):
    assert similarity(text, target) == pytest.approx(expected, abs=1e-12)


def test_the_words_are_quoted_or_given():
    assert requested_words('a "First" and a "Second" sign', {}) == "First"
    assert requested_words('a "First" sign', {"text": "Other"}) == "Other"
    assert requested_words('a "First" sign', {"text": None, "tag": "x"}) == "First"


@pytest.mark.parametrize(
    "prompt", ["a red circle", 'a half "quote', 'a sign that says ""', 'a sign that says "  "']
)
def test_a_prompt_without_words_is_refused_by_name(prompt):
    with pytest.raises(
        ValueError, match="expected the words to draw, in double quotes or as metadata"
    ) as error:
        ocr(np.zeros((2, 32, 32, 3), np.float32), ['a "good" one', prompt], [{}, {}])
    assert str(error.value).startswith(f"reward 'ocr': prompt {prompt!r}: ")
    with pytest.raises(
        ValueError, match=r"prompt 'a \"good\" one', metadata\['text'\]=7: expected the words"
    ):
        requested_words('a "good" one', {"text": 7})


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rapidocr" else find_spec(name)
    )
    with pytest.raises(
        ImportError, match=r"^reward 'ocr' needs rapidocr: pip install 'solrl_jax\[rewards\]'$"
    ):
        importlib.reload(module)


@pytest.mark.parametrize("family", ["sol_rl", "naive_quant", "naive_scaling", "diffusionnft"])
def test_the_recipes_settings_for_text_come_with_the_reward(family):
    c = resolve(f"sd3_{family}_pickscore", ["reward=ocr"])
    assert (c.reward.weights, c.algorithm.beta, c.algorithm.decay_type) == ({"ocr": 1.0}, 0.1, 2)
    assert (c.optimizer.steps_per_iteration, c.prompts.train, c.prompts.test) == (
        2,
        "embedded:ocr-train",
        "embedded:ocr-test",
    )


def test_the_embedded_prompts_quote_words_and_none_is_both_trained_and_tested_on():
    train, test = (
        (EMBEDDED_FOLDER / f"ocr-{name}.txt").read_text().splitlines() for name in ("train", "test")
    )
    words = [{requested_words(prompt, {}).lower() for prompt in drawn} for drawn in (train, test)]
    assert [len(texts) for texts in words] == [len(train), len(test)] == [360, 48]
    assert not words[0] & words[1]
