"""Parameters that know their name and their axis order in a PyTorch checkpoint."""

from typing import Any

from flax import nnx
from jaxtyping import Array


def param(
    value: Array,
    torch_name: str,
    layout: str = "same",
    start: tuple[Any, ...] | None = None,
    bounds: tuple[float, float] | None = None,
) -> nnx.Param:
    """Creates a parameter with the metadata that `models.loading.weights` reads.

    `models.layers.stack.stack` adds the position of the parameter in a stack of layers.

    Args:
        value: The initial value.
        torch_name: The last part of the parameter's name in PyTorch, for example "weight".
        layout: The order of the axes in PyTorch: "same" as ours, or a key of
            `models.loading.weights.OUR_AXES`.
        start: `(function, *arguments)`, for a parameter that checkpoints may lack. The call
            `function(*arguments)` returns its initial value, which is broadcast to the parameter's
            shape.
        bounds: The smallest and the largest value that training keeps the parameter between.

    Returns:
        The parameter.
    """
    return nnx.Param(
        value,
        torch_name=torch_name,
        layout=layout,
        start=start,
        bounds=bounds,
        below_stack=0,
        first_layer=None,
    )
