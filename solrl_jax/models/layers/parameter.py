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

    The metadata are `torch_name`, `layout`, `start`, `bounds`, and `below_stack` (0) and
    `first_layer` (None), in which `models.layers.stack.stack` enters the position of the parameter
    in a stack of layers.

    Args:
        value: The initial value, with the shape and the order of axes that the parameter has here.
        torch_name: The last part of the parameter's name in PyTorch, for example "weight".
        layout: The order of the axes in PyTorch: "same" as ours; "linear", [out, in] there and [in,
            out] here; "pointwise", [out, in, 1, 1] there and [in, out] here; "conv", [out, in, kh,
            kw] there and [kh, kw, in, out] here; or "conv3d", [out, in, kt, kh, kw] there and [kt,
            kh, kw, in, out] here (`models.loading.weights.OUR_AXES`).
        start: `(function, *arguments)`, for a parameter that checkpoints may lack. The call
            `function(*arguments)` returns its initial value, which is broadcast to the parameter's
            shape. None: checkpoints must hold it.
        bounds: The smallest and the largest value that training keeps the parameter between. None:
            unbounded.

    Returns:
        A parameter that holds `value`, with these metadata.
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
