"""The order of axes in PyTorch's files and in our parameters, by the layouts of `models.layers.LAYOUTS`."""

import numpy as np

Index = tuple[range, ...]  # a part of a tensor: a range over each axis


def from_torch_order(t: np.ndarray, layout: str) -> np.ndarray:
    match layout:
        case "linear":
            return t.T
        case "pointwise":
            return t[:, :, 0, 0].T
        case "conv":
            return t.transpose(2, 3, 1, 0)
    return t


def to_torch_order(t: np.ndarray, layout: str) -> np.ndarray:
    match layout:
        case "linear":
            return t.T
        case "pointwise":
            return t.T[:, :, None, None]
        case "conv":
            return t.transpose(3, 2, 0, 1)
    return t


def index_in_torch(index: Index, layout: str) -> Index:
    match layout:
        case "linear":
            return index[::-1]
        case "pointwise":
            return (*index[::-1], range(1), range(1))
        case "conv":
            return (index[3], index[2], index[0], index[1])
    return index


def shape_in_torch(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return to_torch_order(np.broadcast_to(np.zeros((), np.bool_), shape), layout).shape  # a view: nothing is allocated
