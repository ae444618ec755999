"""The reward `ocr`: whether RapidOCR can read the words that a prompt asks for in its image.

The score is that of Flow-GRPO (arXiv 2505.05470).
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from solrl_jax.config.values import brief_repr
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments, finite_images
from solrl_jax.storage.images import to_uint8

# Checked when this file is imported, hence before a run loads anything. The libraries are imported
# for the first image.
MISSING = [name for name in ("rapidocr", "onnxruntime", "rapidfuzz") if find_spec(name) is None]
if MISSING:
    raise ImportError(f"reward 'ocr' needs {', '.join(MISSING)}: pip install 'solrl_jax[rewards]'")

# Files of the rapidocr package.
DETECTOR = "PP-OCRv6_det_small.onnx"
RECOGNIZER = "PP-OCRv6_rec_small.onnx"

Reader = Callable[[UInt8[np.ndarray, "H W 3"]], str]


def ocr(
    images: Images, prompts: Sequence[str], metadata: Sequence[Metadata], *, threads: int = 1
) -> Float[np.ndarray, " n"]:
    """Scores whether the words that a prompt asks for can be read in each image.

    The score is 1 if the text that RapidOCR reads contains the words. Otherwise it is
    1 - distance / length, and at least 0, where `distance` is the Levenshtein distance between the
    text and the words, and `length` is the number of characters of the words. Spaces and case are
    ignored.

    Args:
        images: Images [n, H, W, 3] in [0, 1]. One with a non-finite value scores NaN and is not
            read.
        prompts: The prompt of each image. The words are the text between its first two double
            quotes, unless the metadata has them.
        metadata: The metadata of each prompt. A string under "text" is used as the words and takes
            precedence over the prompt. None under "text" counts as missing.
        threads: The number of threads of the engine in this process, at least 1.

    Returns:
        The scores [n], float32: numbers in [0, 1], or NaN.

    Raises:
        ValueError: If a prompt has no words or something else than a text under "text", if
            `threads` is no integer of at least 1, if the images are not RGB, or if the arguments
            differ in length.
        ImportError: If the rapidocr package does not contain its models.
        Exception: Whatever the engine raises for an image, where Flow-GRPO scores 0.
    """
    check_arguments("ocr", images, prompts, metadata)
    if type(threads) is not int or threads < 1:
        raise ValueError(f"reward 'ocr': threads={threads!r}: expected an integer of at least 1")
    targets = [
        requested_words(prompt, mapping) for prompt, mapping in zip(prompts, metadata, strict=True)
    ]
    scores = np.full(len(images), np.nan, np.float32)
    for i in np.flatnonzero(finite_images(images)):
        scores[i] = similarity(open_reader(threads)(to_uint8(images[i])), targets[i])
    return scores


def check(prompt: str, metadata: Metadata, **options: Any) -> None:
    """Checks that there are words for an image to show.

    Args:
        prompt: The prompt. The words are the text between its first two double quotes, unless the
            metadata has them.
        metadata: The metadata of the prompt. A string under "text" is used as the words and takes
            precedence over the prompt. None under "text" counts as missing.
        **options: The options of `ocr`, which have no effect here.

    Raises:
        ValueError: If there are no words, or something else than a text under "text". The message
            names the prompt.
    """
    requested_words(prompt, metadata)


ocr.check = check  # type: ignore[attr-defined]


def requested_words(prompt: str, metadata: Metadata) -> str:
    """Returns the words that an image should show, with their spaces and case.

    Args:
        prompt: The prompt. Unless `metadata` has the words, they are the text between its first two
            double quotes (").
        metadata: The metadata of the prompt. A string under "text" is used as the words and takes
            precedence over the prompt. None under "text" counts as missing.

    Raises:
        ValueError: If the value under "text" is neither a text nor None; if there is no text and
            the prompt has fewer than two double quotes; or if the words are empty or consist of
            spaces. The message names the prompt.
    """
    text = metadata.get("text")
    quoted = prompt.split('"')
    if text is None and len(quoted) > 2:
        text = quoted[1]
    if not isinstance(text, str) or not _without_spaces_and_case(text):
        given_text = (
            "" if metadata.get("text") is None else f", metadata['text']={brief_repr(text)}"
        )
        raise ValueError(
            f"reward 'ocr': prompt {brief_repr(prompt)}{given_text}: expected the words to draw, "
            "in double quotes or as metadata['text']"
        )
    return text


def similarity(text: str, target: str) -> float:
    """Scores a text that was read against the words that should be there, without spaces and case.

    Args:
        text: The text that was read. It may be empty.
        target: The words that should be there: at least one character that is no space.

    Returns:
        1 if `text` contains `target`. Otherwise 1 - distance / length, and at least 0, where
        `distance` is their Levenshtein distance and `length` the number of characters of `target`,
        both without the spaces (" ").

    Raises:
        ZeroDivisionError: If `target` is empty or has only spaces.
    """
    from rapidfuzz.distance import Levenshtein

    text = _without_spaces_and_case(text)
    target = _without_spaces_and_case(target)
    distance = 0 if target in text else min(Levenshtein.distance(text, target), len(target))
    return 1 - distance / len(target)


@functools.cache
def open_reader(threads: int) -> Reader:
    """Opens the engine that reads all text in an image from top to bottom.

    The engine is opened once per process and number of threads, and nothing is downloaded. It drops
    text with a confidence below 50 %, and does not look for text that is upside down. Images with a
    side of more than 960 pixels are reduced to find the text.

    Args:
        threads: The number of threads of the engine, at least 1.

    Returns:
        A function from an RGB image, uint8 [H, W, 3], to the text in it: all lines, joined without
        a separator; "" if there is none.

    Raises:
        ImportError: If the rapidocr package does not contain its models.
    """
    import rapidocr

    folder = Path(rapidocr.__file__).parent / "models"
    missing = [name for name in (DETECTOR, RECOGNIZER) if not (folder / name).is_file()]
    if missing:
        raise ImportError(
            f"reward 'ocr': no {', '.join(missing)} in this rapidocr: "
            "pip install 'solrl_jax[rewards]'"
        )
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",  # it would warn about each image without text
            "Global.use_cls": False,  # do not look for text that is upside down, as in Flow-GRPO
            "Global.text_score": 0.5,  # drop less certain text, as PaddleOCR does for Flow-GRPO
            # Without a path, the engine downloads its default model.
            "Det.model_path": str(folder / DETECTOR),
            "Rec.model_path": str(folder / RECOGNIZER),
            # As in PaddleOCR, images up to this size are not resized.
            "Det.limit_type": "max",
            "Det.limit_side_len": 960,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

    def read(image: UInt8[np.ndarray, "H W 3"]) -> str:
        result = engine(np.ascontiguousarray(image[..., ::-1]))  # it takes arrays for BGR
        # `txts` is None if nothing was detected or read.
        return "".join(getattr(result, "txts", None) or ())

    return read


def _without_spaces_and_case(text: str) -> str:
    """Returns a text in lower case without spaces. Other white space stays.

    Args:
        text: Any text, also an empty one.
    """
    return text.replace(" ", "").lower()
