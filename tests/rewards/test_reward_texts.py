"""Prompts as OpenCLIP's tokenizer and ImageReward's read them, token for token."""

import numpy as np
import pytest

from solrl_jax.errors import InputError
from solrl_jax.models.text_encoders.tokenizers import tokenize
from solrl_jax.rewards.texts import (
    clean,
    open_image_reward_tokenizer,
    open_tokenizer,
    tokenize_as_open_clip,
)
from tests import released

PROMPTS = (
    *released.PROMPTS,
    "it's the cat's, we'll see; they're 1234 cats!!! at 5:30pm…",
    "&lt;b&gt; &amp;amp; &quot;x&quot; <b> &amp; </b>",
    "ﬁne ﬂow, ｆｕｌｌ ｗｉｄｔｈ　ﾃｽﾄ, ŉ ǆ",
    "tabs\tand\r\nlines\u2028and\x85more\x0bof\u00a0these",
    "hidden\ufeff \x1b[31mred\x1b[0m \x07bell, e\u0301 to é, İstanbul ΣΊΣΥΦΟΣ",
    "👩‍🚀 on a 🐎, 日本語のプロンプト, العربية, हिन्दी",
    "a cafÃ© with â€œredâ€\x9d doors",  # decoded by a wrong encoding, and repaired
    "word " * 75,
    "word " * 76,
    "\u2018single\u2019 \u201cdouble\u201d \u201alow\u201e \u02bcokina",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("openai")
    released.save_openai_tokenizer(path)
    return path


def test_open_clip(folder):
    theirs = (
        released.open_clip().tokenizer.SimpleTokenizer(context_length=77)(list(PROMPTS)).numpy()
    )
    ours = tokenize_as_open_clip(folder, 77, PROMPTS)
    for prompt, a, b in zip(PROMPTS, ours["ids"], theirs, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=repr(prompt))
    assert ours["mask"].all()
    assert (ours["ids"][2, -1], ours["ids"][1, 2]) == (
        49407,
        0,
    )  # cut with the end kept; padded with zeros


@pytest.mark.parametrize(
    "prompt",
    [
        "a <|endoftext|> dog",
        "a<|startoftext|>b <|ENDOFTEXT|>",
        "<start_of_text> a <end_of_text> b",
        "!!<end_of_text>x _<end_of_text>",
        "é<end_of_text>1<end_of_text>it's<end_of_text>'s",
        "<end_of_text><end_of_text>!<end_of_text>",
    ],
)
def test_special_tokens_in_a_prompt_are_read_as_open_clip_reads_them(folder, prompt):
    theirs = released.open_clip().tokenizer.SimpleTokenizer(context_length=77)([prompt]).numpy()
    np.testing.assert_array_equal(tokenize_as_open_clip(folder, 77, [prompt])["ids"], theirs)


def test_clean_up_matters(folder):
    """Most prompts would be other tokens without it."""
    as_they_are = open_tokenizer(folder)([p.strip() for p in PROMPTS])["input_ids"]
    cleaned = open_tokenizer(folder)([clean(p) for p in PROMPTS])["input_ids"]
    assert sum(a != b for a, b in zip(as_they_are, cleaned, strict=True)) >= 6


def test_clip_pads_with_the_end(folder):
    ours = tokenize(folder, PROMPTS, 77)
    assert ours["ids"].shape == ours["mask"].shape == (len(PROMPTS), 77)
    assert (ours["ids"][1, 1:] == 49407).all()
    assert ours["mask"][1].sum() == 2
    assert ours["ids"][2, -1] == 49407


def test_image_reward_adds_two_tokens_after_berts_own(tmp_path):
    tokenizer = released.save_bert_tokenizer(tmp_path)
    size = len(tokenizer)
    open_image_reward_tokenizer(tmp_path)
    ours = tokenize(tmp_path, ["red [ENC]", "", "red, " * 40, "a [DEC]"], 35)
    assert ours["ids"].shape == (4, 35)
    start = tokenizer.cls_token_id
    end = tokenizer.sep_token_id
    assert ours["ids"][0, :4].tolist() == [start, tokenizer.vocab["red"], size + 1, end]
    assert ours["ids"][3, 2] == size
    assert ours["ids"][2, [0, -1]].tolist() == [start, end]
    assert ours["mask"].sum(1).tolist() == [4, 2, 35, 4]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer_config.json: no such file"):
        open_tokenizer(tmp_path)


def test_a_missing_folder_is_named_once(tmp_path):
    folder = tmp_path / "none"
    with pytest.raises(InputError) as error:
        open_tokenizer(folder)
    assert str(error.value) == f"{folder}: no such tokenizer directory"
