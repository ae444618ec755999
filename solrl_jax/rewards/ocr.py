"""Whether the picture shows the words that its prompt quotes: read by RapidOCR, scored as in Flow-GRPO (arXiv 2505.05470)."""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from solrl_jax.config.values import brief_repr
from solrl_jax.rewards.protocol import Images, Metadata, check_arguments, finite
from solrl_jax.storage.images import to_uint8

# Checked when the file is imported, so before a run loads anything. The libraries are imported for the first picture.
if MISSING := [
    name for name in ("rapidocr", "onnxruntime", "rapidfuzz") if find_spec(name) is None
]:
    raise ImportError(f"reward 'ocr' needs {', '.join(MISSING)}: pip install 'solrl_jax[rewards]'")

# files of the rapidocr package
DETECTOR = "PP-OCRv6_det_small.onnx"
RECOGNISER = "PP-OCRv6_rec_small.onnx"

Reader = Callable[[UInt8[np.ndarray, "H W 3"]], str]


def target(prompt: str, metadata: Metadata) -> str:
    """The words that a picture of `prompt` should show: metadata["text"], or what the first pair of double quotes encloses.

    Raises ValueError in one line that names the prompt if there are no words.
    """
    text = metadata.get("text")
    quoted = prompt.split('"')
    if text is None and len(quoted) > 2:
        text = quoted[1]
    if not isinstance(text, str) or not _normal(text):
        given = "" if metadata.get("text") is None else f", metadata['text']={brief_repr(text)}"
        expected = "expected the words to draw, in double quotes or as metadata['text']"
        raise ValueError(f"reward 'ocr': prompt {brief_repr(prompt)}{given}: {expected}")
    return text


def ocr(
    images: Images, prompts: Sequence[str], metadata: Sequence[Metadata], *, threads: int = 1
) -> Float[np.ndarray, " n"]:
    """1 if the words of `target` can be read in the picture. Each edit between what is read and the words costs its share.

    The lowest score is 0. A picture with values that are not finite scores NaN. threads: of one process; several processes
    score at once. Raises ValueError in one line for a prompt without words. An engine that fails raises its own exception,
    where Flow-GRPO scores 0.
    """
    check_arguments("ocr", images, prompts, metadata)
    if type(threads) is not int or threads < 1:
        raise ValueError(f"reward 'ocr': threads={threads!r}: expected an integer of at least 1")
    targets = [target(prompt, extra) for prompt, extra in zip(prompts, metadata, strict=True)]
    scores = np.full(len(images), np.nan, np.float32)
    for i in np.flatnonzero(finite(images)):
        scores[i] = similarity(reader(threads)(to_uint8(images[i])), targets[i])
    return scores


ocr.check = lambda prompt, metadata, **options: target(prompt, metadata)  # type: ignore[attr-defined]


def similarity(text: str, target: str) -> float:
    """1 - d / len(target), where d is 0 if `text` contains `target`, else their Levenshtein distance, at most len(target).

    Spaces and case do not matter.
    """
    from rapidfuzz.distance import Levenshtein

    text = _normal(text)
    target = _normal(target)
    distance = 0 if target in text else min(Levenshtein.distance(text, target), len(target))
    return 1 - distance / len(target)


@functools.cache
def reader(threads: int) -> Reader:
    """Makes the engine that reads all text in a picture, from top to bottom. Once in each process; nothing is downloaded."""
    import rapidocr

    folder = Path(rapidocr.__file__).parent / "models"
    if absent := [name for name in (DETECTOR, RECOGNISER) if not (folder / name).is_file()]:
        raise ImportError(
            f"reward 'ocr': no {', '.join(absent)} in this rapidocr: pip install 'solrl_jax[rewards]'"
        )
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",  # it would warn about each picture without text
            "Global.use_cls": False,  # do not look for text that is upside down, as in Flow-GRPO
            "Global.text_score": 0.5,  # drop less certain text, as PaddleOCR does for Flow-GRPO
            # without a path, the engine downloads its default model
            "Det.model_path": str(folder / DETECTOR),
            "Rec.model_path": str(folder / RECOGNISER),
            # as in PaddleOCR: pictures up to this size are not resized
            "Det.limit_type": "max",
            "Det.limit_side_len": 960,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

    def read(picture: UInt8[np.ndarray, "H W 3"]) -> str:
        found = engine(np.ascontiguousarray(picture[..., ::-1]))  # arrays are BGR for it
        return "".join(getattr(found, "txts", None) or ())  # None if nothing was detected or read

    return read


def _normal(text: str) -> str:
    return text.replace(" ", "").lower()
