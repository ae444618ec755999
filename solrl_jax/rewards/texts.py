"""Prompts to tokens, as each released scorer expects them."""

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ftfy
import numpy as np

from solrl_jax.errors import in_one_line
from solrl_jax.models.text_encoders.tokenizers import load_tokenizer, tokenize

Tokens = dict[str, np.ndarray]  # "ids" int32 and "mask" bool (true on tokens), [prompts, length]
Tokenize = Callable[[Sequence[str]], Tokens]


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`. Raises InputError in one line if it cannot be read."""
    with in_one_line(lambda said: f"{folder}: {said}"):
        return load_tokenizer(folder)


def clip_texts(folder: Path, length: int) -> Tokenize:
    """Tokens as in transformers' CLIP processor: cut and padded to `length`, with the tokenizer's own padding."""
    open_tokenizer(folder)
    return lambda prompts: tokenize(folder, prompts, length)


def open_clip_texts(folder: Path, length: int) -> Tokenize:
    """Tokens as in OpenCLIP, which has CLIP's vocabulary: text cleaned, cut to `length` with its end kept, padded with zeros.

    No token is masked, because the text tower is causal and reads the state at the end of the text.
    """
    tokenizer = open_tokenizer(folder)
    start = tokenizer.bos_token_id
    end = tokenizer.eos_token_id

    def cleaned(prompts: Sequence[str]) -> Tokens:
        ids = np.zeros((len(prompts), length), np.int32)
        for row, text in zip(
            ids,
            tokenizer([clean(p) for p in prompts], add_special_tokens=False)["input_ids"],
            strict=True,
        ):
            whole = [start, *text[: length - 2], end]
            row[: len(whole)] = whole
        return {"ids": ids, "mask": np.ones_like(ids, bool)}

    return cleaned


def image_reward_texts(folder: Path, length: int) -> Tokenize:
    """Tokens as in ImageReward: BERT's, with BLIP's two tokens added, cut and padded to `length`. The first one stays [CLS]."""
    tokenizer = open_tokenizer(folder)
    tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)
    return clip_texts(folder, length)


def clean(prompt: str) -> str:
    """Text as OpenCLIP cleans it: repaired (by the same library), entities resolved, single spaces, lower case."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(text.split()).lower()
