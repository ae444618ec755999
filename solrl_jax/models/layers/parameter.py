"""Parameters that know their name and axis order in a PyTorch checkpoint."""

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
    """A parameter that knows how PyTorch stores it. layout: "same", or a key of `models.loading.weights.OUR_AXES`.

    start: (function, *arguments) that gives an array to begin with, where files may not have the parameter; it is broadcast.
    bounds: that training keeps the values in. The metadata also says where the parameter lies in a stack of layers: see
    `stack`.
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
