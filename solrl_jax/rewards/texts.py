"""Prompts to tokens, each way that a released scorer was fed."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path

import ftfy
import numpy as np

from solrl_jax.models.tokenizers import load_tokenizer
from solrl_jax.storage.errors import in_one_line

Tokens = dict[str, np.ndarray]  # "ids" int32 and "mask" bool (true on tokens), [prompts, length]
Tokenize = Callable[[Sequence[str]], Tokens]


def open_tokenizer(folder: Path):
    """The tokenizer in `folder`. Raises InputError in one line if there is none that can be read."""
    with in_one_line(lambda said: f"{folder}: {said}"):
        return load_tokenizer(folder)


def clip_texts(folder: Path, length: int) -> Tokenize:
    """As transformers' CLIP processor: cut and padded to `length`, with the tokenizer's own padding."""
    tokenizer = open_tokenizer(folder)

    def tokenize(prompts: Sequence[str]) -> Tokens:
        encoded = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="np")
        return {"ids": encoded["input_ids"].astype("int32"), "mask": encoded["attention_mask"].astype(bool)}

    return tokenize


def open_clip_texts(folder: Path, length: int) -> Tokenize:
    """As OpenCLIP's tokenizer, whose merges are CLIP's: cleaned, cut to `length` with the end kept, padded with zeros.

    No token is masked: the text tower looks back only, and takes what stands at the end of the text.
    """
    tokenizer = open_tokenizer(folder)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id

    def tokenize(prompts: Sequence[str]) -> Tokens:
        ids = np.zeros((len(prompts), length), np.int32)
        for row, text in zip(ids, tokenizer([clean(p) for p in prompts], add_special_tokens=False)["input_ids"], strict=True):
            whole = [start, *text[: length - 2], end]
            row[: len(whole)] = whole
        return {"ids": ids, "mask": np.ones_like(ids, bool)}

    return tokenize


def image_reward_texts(folder: Path, length: int) -> Tokenize:
    """As ImageReward: BERT's tokenizer with BLIP's two tokens added, cut and padded to `length`; the first stays [CLS]."""
    tokenizer = open_tokenizer(folder)
    tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)
    return clip_texts(folder, length)


def clean(prompt: str) -> str:
    """As OpenCLIP's clean-up: text repaired (by the same library), entities resolved, single spaces, lower case."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(text.split()).lower()
