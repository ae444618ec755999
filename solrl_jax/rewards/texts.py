"""Prompts to tokens, as each released scorer expects them."""

import html
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ftfy
import numpy as np

from solrl_jax.errors import as_input_error
from solrl_jax.models.text_encoders.tokenizers import load_tokenizer

# The special tokens that OpenCLIP reads in a prompt. It spells out CLIP's own names for them,
# <|startoftext|> and <|endoftext|>.
_OPEN_CLIP_SPECIAL = re.compile("<start_of_text>|<end_of_text>")


def open_tokenizer(folder: Path) -> Any:
    """Opens the tokenizer in a folder. It is loaded once per process, and shared by all callers.

    Args:
        folder: The folder, with `tokenizer_config.json` and the files of a transformers tokenizer.

    Returns:
        A transformers tokenizer. For a folder of the package's configurations, which plans use, a
        `NoVocabulary`: a stand-in that turns every text into zeros.

    Raises:
        InputError: If the folder or its `tokenizer_config.json` is missing, or transformers cannot
            load the tokenizer.
    """
    prefix = f"{folder}: "
    with as_input_error(lambda message: prefix + message.removeprefix(prefix)):
        return load_tokenizer(folder)


def open_image_reward_tokenizer(folder: Path) -> None:
    """Opens BERT's tokenizer in a folder and adds BLIP's two tokens to it, as ImageReward does.

    The tokens [DEC] and [ENC] become special tokens with the next two ids. The tokenizer of this
    folder is shared in the process, so `models.text_encoders.tokenizers.tokenize` knows them
    afterwards. A text still begins with [CLS], not with [ENC].

    Args:
        folder: The folder of the tokenizer.

    Raises:
        InputError: If the folder or its `tokenizer_config.json` is missing, or transformers cannot
            load the tokenizer.
    """
    open_tokenizer(folder).add_tokens(["[DEC]", "[ENC]"], special_tokens=True)


def tokenize_as_open_clip(
    folder: Path, length: int, prompts: Sequence[str]
) -> dict[str, np.ndarray]:
    """Tokenizes prompts as OpenCLIP does, with CLIP's vocabulary.

    A prompt is cleaned (repaired encodings, HTML entities resolved, single spaces, lower case; see
    `clean`) and put between the begin and the end token. "<start_of_text>" and "<end_of_text>" in a
    prompt become these two tokens as well (`split_at_special`). Tokens of the prompt beyond
    `length` - 2 are dropped, so that the end token stays. The rest is padded with zeros. No token
    is masked, because the text tower is causal and reads the state at the end token.

    Args:
        folder: The folder of a CLIP tokenizer.
        length: The number of tokens per prompt, at least 2.
        prompts: The texts of the prompts; there may be none.

    Returns:
        A dict: "ids", the token ids, int32 [prompts, length], and "mask", bool [prompts, length],
        all true.

    Raises:
        InputError: If the tokenizer cannot be loaded.
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
    """Splits a text at the special tokens of OpenCLIP, <start_of_text> and <end_of_text>.

    A special token directly after a character that is not a letter, number or white space, such as
    a punctuation mark, stays ordinary text, because OpenCLIP reads its "<" as a part of the
    punctuation. The ">" of a special token that was split off does not count.

    Args:
        text: A cleaned text, in lower case.

    Returns:
        The pieces in order, each special token as a piece of its own. Joined they are `text`. No
        piece is empty, so an empty text has none.
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
    """Cleans a text as OpenCLIP does.

    In this order: encodings are repaired with ftfy (as in OpenCLIP), HTML entities are resolved
    twice, runs of white space become one space and are removed at both ends, and letters become
    lower case.

    Args:
        prompt: The text.

    Returns:
        The cleaned text; "" for a blank one.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return " ".join(text.split()).lower()
