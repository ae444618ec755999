"""Parameters of a network from the tensors of the PyTorch module that it ports, and how far results
are apart.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from solrl_jax.models.loading.weights import Params, parameter_table

OUR_ORDER = {
    "same": lambda t: t,
    "linear": lambda t: t.T,
    "pointwise": lambda t: t[:, :, 0, 0].T,
    "conv": lambda t: t.transpose(2, 3, 1, 0),
    "conv3d": lambda t: t.transpose(2, 3, 4, 1, 0),
}


def from_torch(state: nnx.State, tensors: Mapping[str, np.ndarray]) -> Params:
    """A nested dict for `nnx.merge(graphdef, params)`. The tensors must be exactly those of the
    network.
    """
    table = parameter_table(state)
    assert {name: e.torch_shape for e in table for name in e.names} == {
        name: t.shape for name, t in tensors.items()
    }
    params: Params = {}
    for e in table:
        *path, last = e.path
        node = params
        for key in path:
            node = node.setdefault(key, {})
        layers = [OUR_ORDER[e.layout](tensors[name]) for name in e.names]
        node[last] = jnp.asarray(np.stack(layers) if e.stacked else layers[0])
    return params


def parameter_count(state: nnx.State) -> int:
    """How many numbers a network holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def relative(ours: Any, theirs: Any) -> float:
    """The largest difference of two arrays, against the largest number of the second."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
