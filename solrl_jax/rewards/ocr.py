"""Does the picture hold the words that its prompt quotes? By RapidOCR, scored as Flow-GRPO scores it (arXiv 2505.05470)."""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from solrl_jax.config.schema import shown
from solrl_jax.rewards.outside import Metadata, check, finite
from solrl_jax.run.pictures import to_uint8

# Said when the file is imported, hence before a run loads anything; the libraries themselves wait for the first picture.
if MISSING := [name for name in ("rapidocr", "onnxruntime", "rapidfuzz") if find_spec(name) is None]:
    raise ImportError(f"reward 'ocr' needs {', '.join(MISSING)}: pip install 'solrl_jax[rewards]'")

DETECTOR, RECOGNISER = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"  # in the wheel of rapidocr

Reader = Callable[[UInt8[np.ndarray, "H W 3"]], str]


def ocr(
    images: Float[np.ndarray, "n H W 3"], prompts: Sequence[str], metadata: Sequence[Metadata], *, threads: int = 1
) -> Float[np.ndarray, " n"]:
    """1 where the wanted words can be read, less by each edit that the picture is away from them, at least 0.

    The wanted words: metadata["text"], or what the prompt's first pair of double quotes holds. threads: of one process, for
    callers run several. NaN for a picture that holds other than numbers. An engine that fails raises (Flow-GRPO scores 0).
    Raises ValueError in one line that names the prompt when it asks for no words.
    """
    check("ocr", images, prompts, metadata)
    if type(threads) is not int or threads < 1:
        raise ValueError(f"reward 'ocr': threads={threads!r}: expected an integer of at least 1")
    targets = [target(prompt, extra) for prompt, extra in zip(prompts, metadata, strict=True)]
    scores = np.full(len(images), np.nan, np.float32)
    for i in np.flatnonzero(finite(images)):
        scores[i] = similarity(reader(threads)(to_uint8(images[i])), targets[i])
    return scores


def target(prompt: str, metadata: Metadata) -> str:
    """The words that a picture of `prompt` should hold."""
    text, quoted = metadata.get("text"), prompt.split('"')
    if text is None and len(quoted) > 2:
        text = quoted[1]
    if not isinstance(text, str) or not _normal(text):
        given = "" if metadata.get("text") is None else f", metadata['text']={shown(text)}"
        raise ValueError(
            f"reward 'ocr': prompt {shown(prompt)}{given}: expected the words to draw, in double quotes or as metadata['text']"
        )
    return text


def similarity(text: str, target: str) -> float:
    """1 - d / len(target): d is 0 if `text` holds `target`, else their Levenshtein distance, at most len(target).

    Neither spaces nor case count.
    """
    from rapidfuzz.distance import Levenshtein

    text, target = _normal(text), _normal(target)
    distance = 0 if target in text else min(Levenshtein.distance(text, target), len(target))
    return 1 - distance / len(target)


@functools.cache
def reader(threads: int) -> Reader:
    """From a picture to all the text in it, from top to bottom: an engine, made once a process. Nothing is downloaded."""
    import rapidocr

    folder = Path(rapidocr.__file__).parent / "models"
    if absent := [name for name in (DETECTOR, RECOGNISER) if not (folder / name).is_file()]:
        raise ImportError(f"reward 'ocr': no {', '.join(absent)} in this rapidocr: pip install 'solrl_jax[rewards]'")
    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",  # an empty picture is no event
            "Global.use_cls": False,  # text upside down is not looked for, as in Flow-GRPO
            "Global.text_score": 0.5,  # boxes less certain are dropped, as PaddleOCR does before Flow-GRPO sees them
            # named, for an engine without a path fetches its default model
            "Det.model_path": str(folder / DETECTOR),
            "Rec.model_path": str(folder / RECOGNISER),
            # PaddleOCR's: pictures are looked at as they are, up to this size
            "Det.limit_type": "max",
            "Det.limit_side_len": 960,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

    def read(picture: UInt8[np.ndarray, "H W 3"]) -> str:
        found = engine(np.ascontiguousarray(picture[..., ::-1]))  # it takes arrays for BGR
        return "".join(getattr(found, "txts", None) or ())  # there are none where nothing was detected, or nothing read

    return read


def _normal(text: str) -> str:
    return text.replace(" ", "").lower()
