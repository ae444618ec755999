"""The exploration options, one line each, in the order in which they are applied."""

import jax

from solrl_jax.config.schema import Explore
from solrl_jax.rl.explore.option import ExplorationOption
from solrl_jax.rl.explore.options.attention import Attention
from solrl_jax.rl.explore.options.correction import Correction
from solrl_jax.rl.explore.options.exact_steps import ExactSteps
from solrl_jax.rl.explore.options.preview import Preview
from solrl_jax.rl.explore.sync import Quantizer

OPTIONS: tuple[ExplorationOption, ...] = (
    Attention(),
    Correction(),
    ExactSteps(),
    Preview(),
)


def active_options(explore: Explore) -> tuple[ExplorationOption, ...]:
    """Returns the options that a configuration asks for.

    Args:
        explore: The section `rollout.explore` of the configuration.

    Returns:
        The options whose field does not have its default, in the order of `OPTIONS`, in which they
        are applied. Possibly none.
    """
    return tuple(option for option in OPTIONS if option.active(explore))


def shaped_quantizer(
    explore: Explore, quantizer: Quantizer, weights: dict[str, jax.ShapeDtypeStruct]
) -> Quantizer:
    """Returns the quantizer with the options of a configuration, with shapes in place of the arrays
    that options would measure.

    Nothing is measured.

    Args:
        explore: The section `rollout.explore` of the configuration, which has the fields of the
            options.
        quantizer: The quantizer of the format alone.
        weights: The shape and dtype of each weight to be quantized, [in, out] or [layers, in, out],
            by path.

    Returns:
        The quantizer with all active options applied; `quantizer` itself if none changes it.
    """
    for option in active_options(explore):
        quantizer = option.abstract_quantizer(explore, weights, quantizer)
    return quantizer
