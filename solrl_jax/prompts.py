"""Prompt sets: a text file of one prompt a line, the order in which a run goes through it, and what goes before each prompt."""

from pathlib import Path

import numpy as np

from solrl_jax.files import InputError

EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parent / "prompt_sets"


def load_prompts(path: str, field: str, *, distinct: bool = True) -> list[str]:
    """The prompts of a file, in order, each once if `distinct`; blank lines are skipped. Errors name `field`.

    Raises InputError when the file is absent, not text, or holds no prompt.
    """
    if path.startswith(EMBEDDED):
        file = EMBEDDED_FOLDER / f"{path.removeprefix(EMBEDDED)}.txt"
        if not file.exists():
            shipped = ", ".join(sorted(EMBEDDED + p.stem for p in EMBEDDED_FOLDER.glob("*.txt")))
            raise InputError(f"{field}={path!r}: no such embedded prompt set; there are {shipped}")
    else:
        file = Path(path)
    try:
        # a byte-order mark is no part of the first prompt; a line ends where an editor ends it, not at the likes of U+2028
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise InputError(f"{field}={path!r}: no such file; expected a text file of one prompt a line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{field}={path!r}: cannot be read as UTF-8 text ({error})") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"{field}={path!r}: holds no prompt; expected one a line")
    return list(dict.fromkeys(prompts)) if distinct else prompts


def load_instruction(path: str, field: str) -> str:
    """The text of a file, to be put before every prompt; the end of its last line is no part of it. Errors name `field`.

    Raises InputError when the file is absent, not text, or blank.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n")
    except FileNotFoundError:
        raise InputError(f"{field}={path!r}: no such file; expected a text file that holds the instruction") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{field}={path!r}: cannot be read as UTF-8 text ({error})") from error
    if not text.strip():
        raise InputError(f"{field}={path!r}: holds no instruction")
    return text


def draw_prompts(prompts: list[str], seed: int, iteration: int, count: int) -> list[str]:
    """The `count` prompts of iteration `iteration` (from 0): every epoch goes through all, in an order of its own.

    A function of its arguments alone, so that the cursor is the iteration. Iterations are disjoint within an epoch; what
    is left of an epoch when fewer than `count` remain is dropped, so that no iteration has a prompt twice.
    """
    an_epoch = len(prompts) // count
    epoch, position = divmod(iteration, an_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
    return [prompts[i] for i in order[position * count : (position + 1) * count]]
