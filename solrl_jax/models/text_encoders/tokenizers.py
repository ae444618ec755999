"""The tokenizers of released pipelines and rewards, as transformers loads them."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from solrl_jax.errors import InputError, first_line
from solrl_jax.models.loading.bounded import open_tokenizer, render, try_tokenizer
from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.storage import hub
from solrl_jax.storage.readers import MOST_TEXT

MOST_GROWTH = 1000  # times longer that a normalizer may make a text
MOST_LENGTH = 2**12  # tokens of a text: attention takes memory by their square
UNBOUNDED = ('"Regex"', '"Precompiled"', '"FixedLength"')  # parts that hang or panic on some texts
_TRIED: set[tuple[Path, str]] = set()  # by a tokenizer's folder, the texts that it gets through


@functools.cache
def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`: one of transformers (which needs no PyTorch for it), or `NoVocabulary`.

    No file of a model is code: a class that the folder brings is refused. Raises FileNotFoundError or ValueError that names
    what is missing or damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such tokenizer directory")
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if not (path.is_dir() or (path.is_file() and path.stat().st_size <= MOST_TEXT)):
            raise ValueError(f"{path}: not a regular file of at most {MOST_TEXT} bytes")
    config = read_json(folder / "tokenizer_config.json")
    if "auto_map" in config:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: auto_map names code, which is not run; remove it"
        )
    named = config.get("tokenizer_class") or ""
    if not isinstance(named, str) or not re.fullmatch(
        r"(\w+Tokenizer(Fast)?|TokenizersBackend|NoVocabulary)?", named
    ):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class={named!r}; accepted: the name of a tokenizer"
        )
    if named == "NoVocabulary":
        return NoVocabulary(config["model_max_length"])
    if (file := folder / "tokenizer.json").exists():
        _try(folder, _unbounded(read_json(file)), [""])
        _bounded(folder, open_tokenizer, str(file))
    import transformers  # late: takes seconds

    # AutoTokenizer refuses a folder that says neither the model nor a class of its own. The generic class needs no model.
    generic = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    kind = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its parsers raise a dozen unrelated types, some in several lines
        raise ValueError(
            f"{folder}: no readable tokenizer ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    growth = math.prod(_growth(_fields(backend, part)) for part in ("normalizer", "pre_tokenizer"))
    if growth > MOST_GROWTH:
        raise ValueError(
            f"{folder}: its normalizer may make a text {growth:.0e} times longer; accepted: {MOST_GROWTH}"
        )
    if undefined := _undefined(_fields(backend, "post_processor")):
        raise ValueError(
            f"{folder}: its post_processor uses special tokens that it does not define: {undefined}"
        )
    if type(length := tokenizer.model_max_length) not in (int, float) or length < 1:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: model_max_length={length!r}; accepted: a positive integer"
        )
    return tokenizer


def _unbounded(fields: Mapping[str, Any]) -> str:
    """A tokenizer.json with the normalizer and the pre-tokenizer of `fields` alone; empty if neither can hang or panic."""
    empty = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}}
    definition = json.dumps(
        {name: fields.get(name) or None for name in ("normalizer", "pre_tokenizer")} | empty
    )
    return definition if any(part in definition for part in UNBOUNDED) else ""


def _try(folder: Path, definition: str, texts: Sequence[str]) -> None:
    """Raises InputError if the tokenizer in `folder` hangs or fails on the texts. definition: of `_unbounded`."""
    new = {(folder, text) for text in texts} - _TRIED
    if new and definition:
        _bounded(folder, try_tokenizer, definition, [text for _, text in new])
        _TRIED.update(new)


def _bounded(folder: Path, job: Callable[..., None], *arguments: Any) -> None:
    try:
        job(*arguments)
    except ValueError as error:
        raise InputError(f"{folder}: the tokenizer fails ({first_line(error)})") from error


@functools.cache
def _definition(folder: Path) -> str:
    """Of the tokenizer in `folder`, what `_unbounded` returns."""
    backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
    return _unbounded({name: _fields(backend, name) for name in ("normalizer", "pre_tokenizer")})


def _fields(backend: Any, part: str) -> Any:
    """A part of a tokenizer as tokenizer.json has it; empty if there is none."""
    return (
        {} if (there := getattr(backend, part, None)) is None else json.loads(there.__getstate__())
    )


def _growth(step: Any) -> int:
    """How many times longer a normalizer or a pre-tokenizer, as in tokenizer.json, may make a text."""
    longest = max(len(step.get(name) or "") for name in ("content", "prepend"))
    longest += step.get("pattern") == {"String": ""}  # which puts the content before every letter
    inner = (*step.get("normalizers", ()), *step.get("pretokenizers", ()))
    return math.prod(
        map(_growth, inner), start=max(longest, 2 if step.get("type") == "ByteLevel" else 1)
    )


def _undefined(processor: Any) -> list[str]:
    """The special tokens that a post-processor, as in tokenizer.json, uses and does not define: the library would panic."""
    pieces = [
        piece["SpecialToken"]["id"]
        for piece in processor.get("single", ())
        if "SpecialToken" in piece
    ]
    inner = [name for x in processor.get("processors", ()) for name in _undefined(x)]
    return [name for name in pieces if name not in processor["special_tokens"]] + inner


@dataclasses.dataclass(frozen=True)
class NoVocabulary:
    """Stands in for a tokenizer where only its length limit is known, in plans. Every text becomes zeros of the right shape."""

    model_max_length: int
    bos_token_id: int = 0
    eos_token_id: int = 0
    special_tokens_map: ClassVar[dict[str, str]] = {}

    def __call__(
        self, texts: Sequence[str], max_length: int = 1, **_: Any
    ) -> dict[str, np.ndarray]:
        ids = np.zeros((len(texts), max_length), np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def num_special_tokens_to_add(self) -> int:
        return 0

    def get_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text) // 3)  # English has three letters or more a token

    def get_chat_template(self) -> str:
        return "{{ messages[0].content }}"

    def add_tokens(self, tokens: Sequence[str], **_: Any) -> None:
        """There is no vocabulary to add to."""


def tokenize(
    folder: Path, texts: Sequence[str], length: int, **options: Any
) -> dict[str, np.ndarray]:
    """Padded and truncated to `length` as the tokenizer in `folder` does it: "ids" int32, "mask" bool (true on tokens).

    Both are [texts, length]. options: more keywords of the tokenizer. Raises InputError for a tokenizer that fails.
    """
    if length > MOST_LENGTH:
        what = "the instruction and the longest prompt (max_tokens) together"
        raise InputError(f"{what} have {length} tokens; accepted: up to {MOST_LENGTH}")
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, NoVocabulary) and not hub.is_carried(folder):
        raise InputError(
            f"{folder}: a tokenizer without a vocabulary (NoVocabulary) is for plans alone"
        )
    if (own := tokenizer.num_special_tokens_to_add()) > length:
        raise InputError(
            f"{folder}: its post_processor adds {own} tokens to a text of up to {length}"
        )
    _try(folder, _definition(folder), texts)
    try:
        encoded = tokenizer(
            list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="np",
            return_attention_mask=True, **options,
        )  # fmt: skip
    except Exception as error:  # its parts raise `Exception` itself
        raise InputError(
            f"{folder}: the tokenizer fails ({type(error).__name__}: {first_line(error)})"
        ) from error
    return {
        "ids": encoded["input_ids"].astype("int32"),
        "mask": encoded["attention_mask"].astype(bool),
    }


def count_tokens(folder: Path, text: str) -> int:
    """How many tokens the tokenizer in `folder` makes of a text. Raises InputError for a tokenizer that fails."""
    _try(folder, _definition(folder), [text])
    return len(load_tokenizer(folder).encode(text))


def chat_template(folder: Path) -> str:
    """The chat template of the tokenizer in `folder`. Raises InputError if it has none."""
    try:
        return load_tokenizer(folder).get_chat_template()
    except ValueError as error:
        raise InputError(f"{folder}: no usable chat template ({first_line(error)})") from error


def chat(folder: Path, prompts: Sequence[str], **variables: Any) -> list[str]:
    """Each prompt as a user's turn, up to where the answer begins, by the chat template of the tokenizer in `folder`.

    variables: what the template reads besides. Raises InputError, in one line, for a folder without a template and for a
    template that fails or does not end.
    """
    template = chat_template(folder)
    variables = load_tokenizer(folder).special_tokens_map | variables
    try:
        return render(template, prompts, variables)
    except ValueError as error:
        raise InputError(f"{folder}: no usable chat template ({first_line(error)})") from error


def check_vocabulary(folder: Path, size: int) -> None:
    """Raises ValueError if the tokenizer in `folder` has tokens beyond the `size` that its encoder's table has."""
    if (largest := max(load_tokenizer(folder).get_vocab().values(), default=0)) >= size:
        raise ValueError(
            f"{folder}: has a token {largest}; accepted: below {size}, its encoder's vocab_size"
        )


def clip_length(folder: Path, *positions: int) -> int:
    """The number of tokens that CLIP's tokenizer in `folder` pads a text to.

    positions: that each text tower has. Raises ValueError if a tower has fewer than that number.
    """
    length = load_tokenizer(folder).model_max_length
    if length > min(positions):
        accepted = f"up to {min(positions)}, its encoder's max_position_embeddings"
        raise ValueError(f"{folder}: model_max_length={length}; accepted: {accepted}")
    return length
