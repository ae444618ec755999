"""Image sizes of a run: (height, width) in pixels."""

import math

from solrl_jax.config.schema import Config
from solrl_jax.config.values import Size


def model_size(config: Config) -> Size:
    """The model's size (height, width) in pixels.

    Training and evaluation use it unless they have sizes of their own.

    Args:
        config: The configuration, whose `model.height` and `model.width` are returned.
    """
    return config.model.height, config.model.width


def training_sizes(config: Config) -> tuple[Size, ...]:
    """The sizes (height, width) in pixels that are trained on.

    Each iteration uses one of them; a size that is listed twice is used twice as often.

    Args:
        config: The configuration, whose `rollout.size` comes before the model's size.

    Returns:
        `rollout.size` in its order, or the model's size alone if it is None.
    """
    return config.rollout.size or (model_size(config),)


def largest_training_size(config: Config) -> Size:
    """The size (height, width) in pixels with most pixels among those that are trained on.

    Of equally large ones it is the first in `rollout.size`.

    Args:
        config: The configuration, whose `rollout.size` comes before the model's size.
    """
    return max(training_sizes(config), key=math.prod)


def evaluation_size(config: Config) -> Size:
    """The size (height, width) in pixels of images in evaluations.

    Images that are drawn from a run's policy have it by default, too.

    Args:
        config: The configuration, whose `eval.size` comes before the model's size.

    Returns:
        `eval.size`, or the model's size if it is None.
    """
    return config.eval.size or model_size(config)
