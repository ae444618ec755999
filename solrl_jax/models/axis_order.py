"""The axes of a tensor in PyTorch's files and of our parameter, for each of `models.layers.LAYOUTS`."""

import numpy as np

Index = tuple[range, ...]  # a part of a tensor: a range for each axis

# For each axis of PyTorch's tensor, the axis of our parameter. A "pointwise" tensor has two more axes, of size one.
OUR_AXES = {"linear": (1, 0), "pointwise": (1, 0), "conv": (3, 2, 0, 1)}


def to_torch_order(t: np.ndarray, layout: str) -> np.ndarray:
    """A view of our parameter in PyTorch's order."""
    if layout == "same":
        return t
    turned = t.transpose(OUR_AXES[layout])
    return turned[:, :, None, None] if layout == "pointwise" else turned


def index_in_torch(index: Index, layout: str) -> Index:
    """The part of PyTorch's tensor that holds the part `index` of our parameter."""
    if layout == "same":
        return index
    turned = tuple(index[axis] for axis in OUR_AXES[layout])
    return (*turned, range(1), range(1)) if layout == "pointwise" else turned


def shape_in_torch(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape of PyTorch's tensor for our parameter of `shape`."""
    return to_torch_order(np.broadcast_to(np.zeros((), np.bool_), shape), layout).shape  # a view: nothing is allocated
