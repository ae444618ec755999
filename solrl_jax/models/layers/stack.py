"""Stacks of equal blocks: built together, applied by one scan, gathered one layer at a time."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from solrl_jax.quant import tensor_parallel
from solrl_jax.quant.leaf import MATMUL, Leaf
from solrl_jax.quant.matmul import output_partition_specs

M = TypeVar("M", bound=nnx.Module)
P = TypeVar("P")
X = TypeVar("X")


def _saves_kernel_outputs(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a primitive is a fused kernel, whose outputs are saved for the gradient.

    A policy of `jax.checkpoint`. The kernels are cuDNN's attention and all Pallas kernels, by the
    names of their primitives.

    Args:
        primitive: The JAX primitive, of which only the name counts. The shapes of its operands and
            its parameters, which `jax.checkpoint` passes too, are ignored.

    Returns:
        True if the name begins with "dot_product_attention_fwd" or "pallas_call".
    """
    return primitive.name.startswith(("dot_product_attention_fwd", "pallas_call"))


_SAVE_MATMULS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(MATMUL), _saves_kernel_outputs
)

# What the forward pass through a stack of blocks saves for the gradient. Everything else is
# recomputed (gradient checkpointing, arXiv 1604.06174).
#   "none": saves every intermediate, including the gathered weights under FSDP.
#   "matmuls": saves the outputs of matmuls and of attention kernels that the gradient reads.
#   "blocks": saves only the input of each block.
REMAT = {"none": None, "matmuls": _SAVE_MATMULS, "blocks": None}


def stack(n: int, make: Callable[[nnx.Rngs], M], rngs: nnx.Rngs, *, first: int | None = None) -> M:
    """Builds `n` modules of one kind as a single module, to be applied by `scan_blocks`.

    In PyTorch the layers form a list, and the name of a parameter contains the index of its layer.

    Args:
        n: The number of modules, at least 1.
        make: Builds one module from random number generators. It is traced once, so that all
            modules have the same structure.
        rngs: Random number generators, which are split for the modules.
        first: For a list with layers of several kinds, the index in the list of this stack's first
            layer. Each run of equal layers is then a stack of its own, and one container with the
            name of the list holds all stacks, under any keys. None: the list holds only this stack.

    Returns:
        The module, whose parameters have a leading axis of size `n`. Two metadata of each parameter
        tell `models.loading.weights` so: `below_stack`, the number of parts of its path within a
        block (3 for attn/to_q/kernel), and `first_layer`, which is `first`.
    """
    build = nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=(0,), out_axes=0))
    blocks = build(rngs)
    for path, variable in nnx.to_flat_state(nnx.state(blocks, nnx.Param)):
        # the number of path parts after the layer's index, and the index of the first layer
        variable.set_metadata(below_stack=len(path), first_layer=first)
    return blocks


def scan_blocks(blocks: Any, apply: Callable[..., X], x: X, *each: Array, remat: str = "none") -> X:
    """Applies a stack of blocks in order: `x = apply(block, x)`. Only one block is compiled.

    The weights are gathered one block at a time (`gather`).

    Args:
        blocks: A module built by `stack`, whose parameters have a leading axis of blocks.
        apply: Called as `apply(block, x, *rows)`, returns the next `x`, of the shape and dtype of
            its argument `x`. `block` is the module of one block.
        x: The input of the first block: an array, or a tree of arrays for several streams.
        *each: Arrays with one row per block. `apply` receives the block's rows after `x`.
        remat: What the gradient recomputes, a key of `REMAT`: "none", "matmuls" (all but matmuls
            and attention kernels) or "blocks" (everything but the input of each block). Without a
            gradient it has no effect.

    Returns:
        The output of the last block.

    Raises:
        KeyError: `remat` is not a key of `REMAT`.
    """
    graphdef, params = nnx.split(blocks)

    def step(x, layer):
        layer_params, rows = layer
        return (apply(nnx.merge(graphdef, gather(layer_params)), x, *rows), None)

    if remat != "none":
        # preventing common subexpression elimination is unnecessary inside a scan
        step = jax.checkpoint(step, policy=REMAT[remat], prevent_cse=False)
    return jax.lax.scan(step, x, (params, each))[0]


def gather(params: P) -> P:
    """Replicates weights over the mesh of `jax.set_mesh`, so that no contraction is split over
    devices.

    Each device then runs the same matmuls on its own rows, and the result of a row does not depend
    on the mesh. `scan_blocks` gathers one layer at a time, which is how FSDP saves memory. If the
    mesh has an axis `tensor` of more than one device, the weights of linear layers (matrices under
    the name "kernel") stay sharded over it by their outputs (`quant.tensor_parallel`).

    Args:
        params: A tree of the weights of one layer, not of a stack: arrays, or quantized or adapted
            weights (`quant.leaf.Leaf`).

    Returns:
        The same weights with sharding constraints, in a tree of the same structure. Without a mesh,
        `params` itself.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return params
    if tensor_parallel.num_shards() == 1:
        return jax.lax.with_sharding_constraint(params, PartitionSpec())

    def specs(path: tuple[Any, ...], weight: Any) -> Any:
        # the kernels of convolutions have four axes and are replicated
        is_matrix = not isinstance(weight, jax.Array) or weight.ndim == 2
        is_linear = is_matrix and any(getattr(key, "key", None) == "kernel" for key in path)
        if not is_linear:
            return PartitionSpec()
        return output_partition_specs(weight, tensor_parallel.num_shards())

    tree = jax.tree_util.tree_map_with_path(specs, params, is_leaf=lambda x: isinstance(x, Leaf))
    return jax.lax.with_sharding_constraint(params, tree)
