"""Image sizes of a run: (height, width) in pixels."""

import math

from solrl_jax.config.schema import Config
from solrl_jax.config.values import Size


def model_size(config: Config) -> Size:
    """Returns the image size (height, width) in pixels that the section `model` names.

    It is the default for training and for evaluations.

    Args:
        config: The configuration.
    """
    return config.model.height, config.model.width


def training_sizes(config: Config) -> tuple[Size, ...]:
    """Returns the image sizes that are trained on. Each iteration uses one of them.

    Args:
        config: The configuration.

    Returns:
        Pairs of height and width in pixels: `rollout.size`, or the size in the section `model` if
        that is None.
    """
    return config.rollout.size or (model_size(config),)


def largest_training_size(config: Config) -> Size:
    """Returns the image size (height, width) with the most pixels among those that are trained on.

    Args:
        config: The configuration.
    """
    return max(training_sizes(config), key=math.prod)


def evaluation_size(config: Config) -> Size:
    """Returns the image size of evaluations, (height, width) in pixels.

    It is `eval.size`, or the size in the section `model` if that is None.

    Args:
        config: The configuration.
    """
    return config.eval.size or model_size(config)
