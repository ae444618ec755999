"""Sizes of the images or clips of a run.

A size is (height, width) in pixels or, for a clip, (height, width, number of frames).
"""

import math

from solrl_jax.config.schema import Config
from solrl_jax.config.values import Size


def model_size(config: Config) -> Size:
    """Returns the size of the section `model`: (height, width) in pixels or, if `model.frames` is
    not None, (height, width, frames).

    It is the default for training and for evaluations.

    Args:
        config: The configuration.
    """
    model = config.model
    size = (model.height, model.width)
    return size if model.frames is None else (*size, model.frames)


def complete_size(size: Size, default: Size) -> Size:
    """Returns `size`, with the number of frames of `default` added if only `default` has one.

    Args:
        size: (height, width) in pixels, or (height, width, frames).
        default: A size, of which only the number of frames is read.
    """
    return size + tuple(default[len(size) :])


def training_sizes(config: Config) -> tuple[Size, ...]:
    """Returns the sizes that are trained on. Each iteration uses one of them.

    Args:
        config: The configuration.

    Returns:
        The sizes in `rollout.size`, (height, width) in pixels or (height, width, frames), each with
        `model.frames` unless it has its own number of frames; or the size in the section `model`
        alone if `rollout.size` is None.
    """
    default = model_size(config)
    return tuple(complete_size(size, default) for size in config.rollout.size or (default,))


def largest_training_size(config: Config) -> Size:
    """Returns the one of the `training_sizes` with the most pixels, counted over all frames.

    It is (height, width) in pixels, or (height, width, frames). The first one wins a tie.

    Args:
        config: The configuration.
    """
    return max(training_sizes(config), key=math.prod)


def evaluation_size(config: Config) -> Size:
    """Returns the size of evaluations: (height, width) in pixels, or (height, width, frames).

    It is `eval.size`, with `model.frames` unless it has its own number of frames, or the size in
    the section `model` if `eval.size` is None.

    Args:
        config: The configuration.
    """
    default = model_size(config)
    return complete_size(config.eval.size or default, default)


def pixel_shape(size: Size) -> tuple[int, ...]:
    """Returns the shape of an image of a size, (height, width, 3), or of a clip, (frames, height,
    width, 3).

    Args:
        size: (height, width) or (height, width, frames).
    """
    return (*size[2:], *size[:2], 3)


def describe_size(size: Size) -> str:
    """Returns a size for people: "images of 832 x 480", with the width first, or "clips of 17
    frames of 832 x 480".

    Args:
        size: (height, width) or (height, width, frames).
    """
    height, width, *frames = size
    kind = f"clips of {frames[0]} frames" if frames else "images"
    return f"{kind} of {width} x {height}"
