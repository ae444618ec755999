"""Frames of clips, which rewards of images score."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from solrl_jax.parallel import sharding


def sample_frames(clips: Float[Array, "b T H W 3"], count: int) -> Float[Array, "frames H W 3"]:
    """Samples equally spaced frames of clips, to be scored as images. For use under jit.

    Args:
        clips: The clips.
        count: The number of frames of each clip, 1 to T. 1: the first frame. More: frames equally
            spaced from the first to the last, with indices rounded to integers (halves to even).

    Returns:
        The frames as images, `b * count`, those of the first clip first.
    """
    places = np.round(np.linspace(0, clips.shape[1] - 1, count)).astype(int)
    return clips[:, places].reshape(-1, *clips.shape[2:])


@partial(sharding.jit, static_argnums=1)
def sample_frames_on_mesh(
    clips: Float[Array, "b T H W 3"], count: int
) -> Float[Array, "frames H W 3"]:
    """`sample_frames` as a program of its own, whose result is divided over the axes `data` and
    `fsdp` of the ambient mesh.

    Args:
        clips: The clips. Their number must be a multiple of the devices along these axes.
        count: The number of frames of each clip, 1 to T; static. 1: the first frame. More: frames
            equally spaced from the first to the last.

    Returns:
        The frames as images, `b * count`, those of the first clip first.
    """
    return sharding.split_rows(sample_frames(clips, count))


def repeat_rows(tree: Any, count: int) -> Any:
    """Repeats every row of arrays, so that there is one per frame.

    Args:
        tree: A tree of JAX or NumPy arrays with one row per sample. None in it stays None.
        count: The number of frames of each sample. 1 returns `tree` itself.

    Returns:
        A tree of JAX arrays with `count` adjacent copies of each row, in the order of the samples.
    """
    return tree if count == 1 else jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), tree)


def mean_over_frames(scores: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns the mean score of the frames of each sample. One NaN makes the mean NaN.

    Args:
        scores: By name, a JAX or NumPy array with one score per frame, those of the first sample
            first.
        count: The number of frames of each sample. With 1 the arrays stay as they are.

    Returns:
        A new dict: by name, an array with one score per sample.
    """
    if count == 1:
        return dict(scores)
    return {name: values.reshape(-1, count).mean(1) for name, values in scores.items()}
