"""The tokenizers of released pipelines and rewards, loaded by transformers.

They need no PyTorch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from solrl_jax.errors import InputError, first_line, type_and_message
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.storage import hub

MAX_LENGTH = 2**12  # tokens per text: the memory of attention may grow with the square of it


@functools.cache
def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer in a folder with transformers. Code in the folder is not run, and the
    Hugging Face Hub is not contacted.

    It is loaded once per process: later calls with the same path return the same object, with the
    tokens that callers have added, even if the files have changed.

    Args:
        folder: a tokenizer's folder of a released pipeline or reward.

    Returns:
        The tokenizer of transformers. If `tokenizer_class` in `tokenizer_config.json` is
        "NoVocabulary", a `NoVocabulary`: a stand-in for `solrl plan` that returns zeros of the
        right shape for every text.

    Raises:
        FileNotFoundError: the folder or its `tokenizer_config.json` is missing.
        ValueError: `tokenizer_config.json` is not a JSON object, or transformers cannot load the
            tokenizer.
        KeyError: the class is `NoVocabulary`, but the file has no `model_max_length`.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such tokenizer directory")
    config = read_json(folder / "tokenizer_config.json")
    name = config.get("tokenizer_class")
    if name == "NoVocabulary":
        return NoVocabulary(config["model_max_length"])
    import transformers  # takes seconds to import

    # AutoTokenizer refuses a folder that names neither a model nor a specific class. For T5's class
    # it reads only the vocabulary, and takes <unk> to be token 2, which is token 3 for UMT5.
    is_stored = name in ("T5Tokenizer", "T5TokenizerFast") and (folder / "tokenizer.json").is_file()
    if is_stored or name in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        loader = transformers.PreTrainedTokenizerFast
    else:
        loader = transformers.AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its parsers raise a dozen unrelated types
        raise ValueError(
            f"{folder}: cannot load the tokenizer ({type_and_message(error)})"
        ) from error


@dataclasses.dataclass(frozen=True)
class NoVocabulary:
    """A stand-in for a tokenizer without its vocabulary, for `solrl plan`, which needs only shapes.

    It has the part of a transformers tokenizer's interface that this package uses. Every text
    becomes zeros of the right shape. `tokenize` accepts it only in folders that this package
    carries.

    Attributes:
        model_max_length: greatest number of tokens of a text.
        bos_token_id: number of the token that begins a text.
        eos_token_id: number of the token that ends a text.
    """

    model_max_length: int
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __call__(
        self, texts: Sequence[str], max_length: int = 1, **_: Any
    ) -> dict[str, np.ndarray]:
        """Returns zeros in place of token numbers. Further keyword arguments are ignored.

        Args:
            texts: the texts, for their number.
            max_length: number of tokens per text.

        Returns:
            A dictionary with two int64 arrays [texts, max_length]: "input_ids", zeros, and
            "attention_mask", ones.
        """
        ids = np.zeros((len(texts), max_length), np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def num_special_tokens_to_add(self) -> int:
        """Returns 0: no special tokens are added to texts."""
        return 0

    def get_vocab(self) -> dict[str, int]:
        """Returns an empty dictionary: there is no vocabulary."""
        return {}

    def encode(self, text: str) -> list[int]:
        """Returns as many zeros as a text is estimated to have tokens: a third of its characters,
        rounded down.

        Args:
            text: the text.
        """
        return [0] * (len(text) // 3)  # English has three letters or more per token

    def get_chat_template(self) -> str:
        """Returns a Jinja template that renders the content of the first message alone."""
        return "{{ messages[0].content }}"

    def apply_chat_template(self, turns: Sequence[Sequence[dict[str, str]]], **_: Any) -> list[str]:
        """Returns the text of the first message of each chat, in place of a rendered chat. Further
        keyword arguments are ignored.

        Args:
            turns: the chats. Each is a list of one or more messages {"role": ..., "content": ...}.
        """
        return [messages[0]["content"] for messages in turns]

    def add_tokens(self, tokens: Sequence[str], **_: Any) -> None:
        """Does nothing: there is no vocabulary to add to.

        Args:
            tokens: texts of new tokens, which are ignored, as are further keyword arguments.
        """


def tokenize(
    folder: Path, texts: Sequence[str], length: int, **options: Any
) -> dict[str, np.ndarray]:
    """Tokenizes texts, and pads or cuts them to one length.

    The tokenizer's own settings tell on which side of a text padding is added and tokens are cut,
    unless `options` do.

    Args:
        folder: the tokenizer's folder. `load_tokenizer` loads it once per process.
        texts: one or more texts. A text may be "".
        length: number of tokens per text, special tokens included, up to 4096.
        **options: further keyword arguments for the call of the transformers tokenizer, such as
            `padding_side="right"`. `padding`, `max_length`, `truncation`, `return_tensors` and
            `return_attention_mask` are set here and cause an InputError.

    Returns:
        A dictionary with two arrays [texts, length]: "ids", token numbers, int32, and "mask", bool,
        true on tokens and false on padding.

    Raises:
        InputError: `length` is above 4096 or less than the number of special tokens; the tokenizer
            fails; or it is a `NoVocabulary` (a stand-in for plans) and `folder` is not one that
            this package carries.
        FileNotFoundError: the folder or its `tokenizer_config.json` is missing.
        ValueError: the tokenizer cannot be loaded.
    """
    if length > MAX_LENGTH:
        raise InputError(
            "the instruction and the longest prompt (max_tokens) together have "
            f"{length} tokens; accepted: up to {MAX_LENGTH}"
        )
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, NoVocabulary) and not hub.is_carried(folder):
        raise InputError(f"{folder}: a tokenizer without a vocabulary can only be used in plans")
    special_tokens = tokenizer.num_special_tokens_to_add()
    if special_tokens > length:
        raise InputError(
            f"{folder}: the tokenizer adds {special_tokens} tokens to a text of up to {length}"
        )
    try:
        encoded = tokenizer(
            list(texts),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="np",
            return_attention_mask=True,
            **options,
        )
    except Exception as error:  # tokenizers raises `Exception` itself
        raise InputError(f"{folder}: the tokenizer fails ({type_and_message(error)})") from error
    return {
        "ids": encoded["input_ids"].astype("int32"),
        "mask": encoded["attention_mask"].astype(bool),
    }


def count_tokens(folder: Path, text: str) -> int:
    """Returns the number of tokens of a text, special tokens included. The text is not cut.

    Args:
        folder: directory of the tokenizer.
        text: the text.

    Returns:
        The number of tokens; for a `NoVocabulary` (a stand-in without a vocabulary, for plans), a
        third of the number of characters, rounded down.

    Raises:
        FileNotFoundError: the folder or its `tokenizer_config.json` is missing.
        ValueError: the tokenizer cannot be loaded.
    """
    return len(load_tokenizer(folder).encode(text))


def check_chat_template(folder: Path) -> None:
    """Checks that a tokenizer has a chat template. The template is not tried. A `NoVocabulary`
    passes.

    Args:
        folder: directory of the tokenizer.

    Raises:
        InputError: the tokenizer has no chat template or cannot be loaded.
        FileNotFoundError: the folder or its `tokenizer_config.json` is missing.
    """
    try:
        load_tokenizer(folder).get_chat_template()
    except ValueError as error:
        raise InputError(f"{folder}: no usable chat template ({first_line(error)})") from error


def chat(folder: Path, prompts: Sequence[str], **variables: Any) -> list[str]:
    """Renders each prompt, by the tokenizer's chat template, as a chat with one message of the
    user, up to where the answer begins.

    Args:
        folder: folder of a tokenizer with a chat template.
        prompts: one or more prompts.
        **variables: further variables of the chat template, such as `enable_thinking` (whether
            Qwen3 may reason before its answer).

    Returns:
        The rendered texts, in the order of `prompts`; for a `NoVocabulary`, the prompts themselves.

    Raises:
        InputError: the folder is missing, the tokenizer cannot be loaded, or the template is
            missing or fails.
    """
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    try:
        # transformers renders the template in a sandbox of Jinja
        return load_tokenizer(folder).apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **variables
        )
    except Exception as error:  # a template can raise any type
        raise InputError(
            f"{folder}: no usable chat template ({type_and_message(error)})"
        ) from error


def check_vocabulary(folder: Path, size: int) -> None:
    """Checks that a text encoder has an embedding for every token of a tokenizer. A `NoVocabulary`
    passes.

    Args:
        folder: the tokenizer's folder.
        size: number of tokens that the text encoder has embeddings for.

    Raises:
        ValueError: a token number is `size` or more, or the tokenizer cannot be loaded.
        FileNotFoundError: the folder or its `tokenizer_config.json` is missing.
    """
    largest = max(load_tokenizer(folder).get_vocab().values(), default=0)
    if largest >= size:
        raise ValueError(
            f"{folder}: has a token {largest}; accepted: below {size}, "
            "the vocab_size of its text encoder"
        )


def clip_length(folder: Path, positions: int) -> int:
    """Returns the number of tokens to which texts are padded for a CLIP: the tokenizer's
    `model_max_length`.

    Args:
        folder: the tokenizer's folder.
        positions: the greatest number of tokens that the CLIP takes (`max_position_embeddings`).

    Returns:
        The number, including the tokens that begin and end a text.

    Raises:
        ValueError: `model_max_length` exceeds `positions`, or the tokenizer cannot be loaded.
        FileNotFoundError: the folder or its `tokenizer_config.json` is missing.
    """
    length = load_tokenizer(folder).model_max_length
    if length > positions:
        raise ValueError(
            f"{folder}: model_max_length={length}; accepted: up to {positions}, "
            "the max_position_embeddings of its text encoder"
        )
    return length
