"""Stacks of equal blocks: built once, applied by a scan, gathered one layer at a time."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.leaf import MATMUL, Leaf
from solrl_jax.quant.matmul import output_partition_specs


# What the forward pass through a stack of blocks keeps for the gradient; the rest is computed again (arXiv 1604.06174).
#   "none": keeps every intermediate, also the gathered weights under FSDP;  "matmuls": the outputs of linears and of attention
#   kernels, as far as the gradient reads them;  "blocks": only the input of each block.
def _kernels(primitive, *_, **__):
    return primitive.name.startswith(("dot_product_attention_fwd", "pallas_call"))


_products = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(MATMUL), _kernels
)


REMAT = {"none": None, "matmuls": _products, "blocks": None}


M = TypeVar("M", bound=nnx.Module)


P = TypeVar("P")


X = TypeVar("X")


def stack(n: int, make: Callable[[nnx.Rngs], M], rngs: nnx.Rngs, *, first: int | None = None) -> M:
    """`n` modules of one kind as one module, whose parameters have a leading axis of `n`. `scan_blocks` applies it.

    In PyTorch the layers are a list, and a parameter's name holds the layer's index.
    first: for a list with layers of several kinds. Each run of equal layers is then a stack of its own. Its layers have the
    indices `first`, `first + 1`, ... in the list. All stacks lie in one container with the list's name, under any keys.
    """
    build = nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=(0,), out_axes=0))
    blocks = build(rngs)
    for path, variable in nnx.to_flat_state(nnx.state(blocks, nnx.Param)):
        # how many parts of the path follow the layer's index, and which index is the first
        variable.set_metadata(below_stack=len(path), first_layer=first)
    return blocks


def scan_blocks(blocks: Any, apply: Callable[..., X], x: X, *each: Array, remat: str = "none") -> X:
    """Applies a stack of blocks in order: `x = apply(block, x)`. One block is compiled, however many there are.

    x: an array, or a tree of arrays where several streams run side by side. each: arrays with a row for each block, which
    `apply` gets after `x`. remat: a key of `REMAT`.
    """
    graphdef, params = nnx.split(blocks)

    def step(x, layer):
        return (apply(nnx.merge(graphdef, gather(layer[0])), x, *layer[1]), None)

    if remat != "none":
        step = jax.checkpoint(
            step, policy=REMAT[remat], prevent_cse=False
        )  # needless inside a scan
    return jax.lax.scan(step, x, (params, each))[0]


def gather(params: P) -> P:
    """Makes weights whole on every device of the ambient mesh, so that no contraction is split over devices.

    Each device then runs the same products on its own rows, and a row's result does not depend on the mesh. `scan_blocks`
    gathers one layer at a time; this is how FSDP saves memory. If the mesh has an axis `tensor`, the outputs of linears stay
    divided along it (`quant.tensor_parallel`).
    """
    if jax.sharding.get_abstract_mesh().empty:
        return params
    if tensor_parallel.ways() == 1:
        return jax.lax.with_sharding_constraint(params, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        matrix = (
            not isinstance(leaf, jax.Array) or leaf.ndim == 2
        )  # the kernel of a convolution has four axes
        linear = matrix and any(getattr(key, "key", None) == "kernel" for key in path)
        return output_partition_specs(leaf, tensor_parallel.ways()) if linear else PartitionSpec()

    def is_leaf(x):
        return isinstance(x, Leaf)

    return jax.lax.with_sharding_constraint(
        params, jax.tree_util.tree_map_with_path(place, params, is_leaf=is_leaf)
    )
