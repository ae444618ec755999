"""Stacks of equal blocks: built together, applied by one scan, gathered one layer at a time."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from solrl_jax.quant.leaf import MATMUL, Leaf
from solrl_jax.quant.matmul import output_partition_specs
from solrl_jax.quant.mesh_axes import TENSOR, axis_size

M = TypeVar("M", bound=nnx.Module)
P = TypeVar("P")
X = TypeVar("X")


def _saves_kernel_outputs(primitive: Any, *_: Any, **__: Any) -> bool:
    """Decides what `jax.checkpoint` saves for the backward pass: the outputs of fused kernels
    (cuDNN attention and Pallas).

    Args:
        primitive: The JAX primitive that made an output. Only its name counts.

    Returns:
        True, which means "save", if the name begins with "dot_product_attention_fwd" or
        "pallas_call".
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
CHECKPOINT_POLICIES = {"none": None, "matmuls": _SAVE_MATMULS, "blocks": None}


def stack(n: int, make: Callable[[nnx.Rngs], M], rngs: nnx.Rngs, *, first: int | None = None) -> M:
    """Builds `n` modules of one kind as a single module with stacked parameters, to be applied by
    `scan_blocks`.

    A PyTorch checkpoint stores such layers as a list, with the index of the layer in the names of
    the parameters.

    Args:
        n: The number of modules, at least 1.
        make: Builds one module from random number generators. It is traced once, for all modules.
        rngs: Random number generators. Each module gets its own part, so that initial weights
            differ.
        first: If the PyTorch list mixes several kinds of layers: the index in it of this stack's
            first layer. (Such a list becomes several stacks in one container that has the name of
            the list.) None: the list holds only this stack.

    Returns:
        The module, whose parameters have a leading axis of size `n`. For loading checkpoints, each
        parameter has two metadata: `below_stack`, the number of parts of its path within a block (3
        for attn/to_q/kernel), and `first_layer`, the value of `first`.
    """
    build = nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=(0,), out_axes=0))
    blocks = build(rngs)
    for path, variable in nnx.to_flat_state(nnx.state(blocks, nnx.Param)):
        # the number of path parts after the layer's index, and the index of the first layer
        variable.set_metadata(below_stack=len(path), first_layer=first)
    return blocks


def scan_blocks(
    blocks: Any, apply: Callable[..., X], x: X, *each: Array, gradient_checkpointing: str = "none"
) -> X:
    """Applies a stack of blocks one after another: `x = apply(block, x, ...)`.

    It is a scan, so only one block is compiled, and sharded weights are gathered for one block at a
    time.

    Args:
        blocks: A module built by `stack`, whose parameters have a leading axis of blocks.
        apply: A function `apply(block, x, *rows)` that returns the next `x`, with the same shape
            and dtype. `block` is the module of one block.
        x: The input of the first block: an array, or a pytree of arrays.
        *each: Further inputs of the blocks: arrays whose leading axis is the block. `apply`
            receives the block's entry of each as `rows`.
        gradient_checkpointing: What the backward pass recomputes instead of storing: "none"
            (nothing; under FSDP, the gathered weights of all blocks are stored, too), "matmuls"
            (everything except matmuls and attention kernels) or "blocks" (everything inside a
            block; only the inputs of blocks are stored).

    Returns:
        The output of the last block.

    Raises:
        KeyError: `gradient_checkpointing` is another string.
    """
    graphdef, params = nnx.split(blocks)

    def step(x, layer):
        layer_params, rows = layer
        return (apply(nnx.merge(graphdef, gather(layer_params)), x, *rows), None)

    if gradient_checkpointing != "none":
        # preventing common subexpression elimination is unnecessary inside a scan
        step = jax.checkpoint(
            step, policy=CHECKPOINT_POLICIES[gradient_checkpointing], prevent_cse=False
        )
    return jax.lax.scan(step, x, (params, each))[0]


def gather(params: P) -> P:
    """Replicates sharded weights over the mesh of `jax.set_mesh` (the all-gather of FSDP).

    Each device then runs the same matmuls on its own samples, so the result of a sample does not
    depend on the mesh. Under tensor parallelism (a mesh axis `tensor` of more than one device), the
    weights of linear layers (matrices named "kernel") stay sharded by their outputs over that axis.

    Args:
        params: A pytree of the weights of one block: arrays, quantized weights or weights with LoRA
            adapters.

    Returns:
        The same weights with sharding constraints. Without a mesh, `params` itself.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return params
    if axis_size(TENSOR) == 1:
        return jax.lax.with_sharding_constraint(params, PartitionSpec())

    def specs(path: tuple[Any, ...], weight: Any) -> Any:
        # the kernels of convolutions have four axes and are replicated
        is_matrix = not isinstance(weight, jax.Array) or weight.ndim == 2
        is_linear = is_matrix and any(getattr(key, "key", None) == "kernel" for key in path)
        if not is_linear:
            return PartitionSpec()
        return output_partition_specs(weight, axis_size(TENSOR))

    tree = jax.tree_util.tree_map_with_path(specs, params, is_leaf=lambda x: isinstance(x, Leaf))
    return jax.lax.with_sharding_constraint(params, tree)
