"""Parameters that know their name and their axis order in a PyTorch checkpoint."""

from typing import Any

from flax import nnx
from jaxtyping import Array


def param(
    value: Array,
    torch_name: str,
    layout: str = "same",
    initializer: tuple[Any, ...] | None = None,
    bounds: tuple[float, float] | None = None,
) -> nnx.Param:
    """Creates a parameter with metadata about its form in PyTorch checkpoints, for
    `models.loading.weights`.

    Every argument but `value` becomes metadata of the same name. Two more are for parameters in a
    stack of blocks, and are set by `stack`: `below_stack`, the number of parts of the parameter's
    path within a block (0 outside of stacks), and `first_layer`, the index of the stack's first
    layer in a PyTorch list that it shares with other stacks (None if there are no others).

    Args:
        value: The initial value, with the shape and the order of axes that the parameter has in
            this package.
        torch_name: The last part of the parameter's name in PyTorch, for example "weight".
        layout: How the order of the axes in PyTorch differs from that here. It is not checked. One
            of:

            * "same": not at all.
            * "linear": [out, in] there, [in, out] here.
            * "pointwise": [out, in, 1, 1] there, [in, out] here.
            * "conv": [out, in, kh, kw] there, [kh, kw, in, out] here.
            * "conv3d": [out, in, kt, kh, kw] there, [kt, kh, kw, in, out] here.
        initializer: For a parameter that a checkpoint may lack: a tuple `(function, *arguments)`.
            The call `function(*arguments)` then gives its value, broadcast to the parameter's
            shape. None: checkpoints must hold the parameter.
        bounds: (smallest, largest) value to which training clips the parameter. None: unbounded.

    Returns:
        A parameter that holds `value` and the metadata.
    """
    return nnx.Param(
        value,
        torch_name=torch_name,
        layout=layout,
        initializer=initializer,
        bounds=bounds,
        below_stack=0,
        first_layer=None,
    )
