"""Heights and widths of a run's pictures, in pixels: what is trained on and what is evaluated. The default is the model's."""

import math

from solrl_jax.config.schema import Config
from solrl_jax.config.values import Size


def model_size(config: Config) -> Size:
    """What the model was made for."""
    return config.model.height, config.model.width


def training_sizes(config: Config) -> tuple[Size, ...]:
    """What is trained on. An iteration has one of them; one that is listed twice comes twice as often."""
    return config.rollout.size or (model_size(config),)


def largest_training_size(config: Config) -> Size:
    """What is trained on with most pixels."""
    return max(training_sizes(config), key=math.prod)


def evaluation_size(config: Config) -> Size:
    """What is evaluated, and what a run's policy draws unless told otherwise."""
    return config.eval.size or model_size(config)
