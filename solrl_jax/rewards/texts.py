"""Prompts to tokens, as each released scorer expects them."""

import html
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ftfy
import numpy as np

from solrl_jax.errors import in_one_line
from solrl_jax.models.text_encoders.tokenizers import load_tokenizer

# The special tokens that OpenCLIP reads in a prompt. It spells out CLIP's own names for them,
# <|startoftext|> and <|endoftext|>.
_OPEN_CLIP_SPECIAL = re.compile("<start_of_text>|<end_of_text>")


def open_tokenizer(folder: Path) -> Any:
    """Opens the tokenizer in a folder, as a transformers tokenizer.

    Raises:
        InputError: If it cannot be read.
    """
    with in_one_line(lambda message: f"{folder}: {message}"):
        return load_tokenizer(folder)


def open_image_reward_tokenizer(folder: Path) -> None:
    """Opens BERT's tokenizer in a folder and adds BLIP's two tokens to it, as ImageReward does.

    Afterwards `models.text_encoders.tokenizers.tokenize` of this folder knows them. The first token
    of a text stays [CLS].

    Raises:
        InputError: If the tokenizer cannot be read.
    """
    open_tokenizer(folder).add_tokens(["[DEC]", "[ENC]"], special_tokens=True)


def tokenize_as_open_clip(
    folder: Path, length: int, prompts: Sequence[str]
) -> dict[str, np.ndarray]:
    """Tokenizes prompts as OpenCLIP does, with CLIP's vocabulary.

    A prompt is cleaned, truncated so that its end token stays, and padded with zeros. No token is
    masked, because the text tower is causal and reads the state at the end token.

    Args:
        folder: The folder of a CLIP tokenizer.
        length: The number of tokens per prompt.
        prompts: The prompts.

    Returns:
        "ids" [prompts, length], int32, and "mask" [prompts, length], bool, all true.
    """
    tokenizer = open_tokenizer(folder)
    special_ids = {
        "<start_of_text>": tokenizer.bos_token_id,
        "<end_of_text>": tokenizer.eos_token_id,
    }
    ids = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        tokens: list[int] = []
        for piece in split_at_special(clean(prompt)):
            if piece in special_ids:
                tokens.append(special_ids[piece])
            else:
                encoded = tokenizer([piece], add_special_tokens=False, split_special_tokens=True)
                tokens.extend(encoded["input_ids"][0])
        whole = [tokenizer.bos_token_id, *tokens[: length - 2], tokenizer.eos_token_id]
        row[: len(whole)] = whole
    return {"ids": ids, "mask": np.ones_like(ids, bool)}


def split_at_special(text: str) -> list[str]:
    """Splits a cleaned text at the special tokens of OpenCLIP, which are pieces of their own.

    One that follows a punctuation mark or symbol is no special token, because OpenCLIP reads its
    "<" as a part of the punctuation.
    """
    pieces = []
    start = 0
    for match in _OPEN_CLIP_SPECIAL.finditer(text):
        before = text[start : match.start()]
        if before and not before[-1].isspace() and unicodedata.category(before[-1])[0] not in "LN":
            continue
        pieces += [before, match.group()]
        start = match.end()
    return [piece for piece in (*pieces, text[start:]) if piece]


def clean(prompt: str) -> str:
    """Cleans a text as OpenCLIP does: repairs encodings (with the same library), resolves HTML
    entities, collapses white space, and converts to lower case.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(text.split()).lower()
