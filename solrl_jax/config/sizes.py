"""Image sizes of a run: (height, width) in pixels."""

import math

from solrl_jax.config.schema import Config
from solrl_jax.config.values import Size


def model_size(config: Config) -> Size:
    """The model's size, which training and evaluation use unless they have their own."""
    return config.model.height, config.model.width


def training_sizes(config: Config) -> tuple[Size, ...]:
    """The sizes that are trained on.

    Each iteration uses one of them; a size that is listed twice is used twice as often.
    """
    return config.rollout.size or (model_size(config),)


def largest_training_size(config: Config) -> Size:
    """The size with most pixels among `training_sizes`."""
    return max(training_sizes(config), key=math.prod)


def evaluation_size(config: Config) -> Size:
    """The size of images in evaluations, and by default of images drawn from a run's policy."""
    return config.eval.size or model_size(config)
