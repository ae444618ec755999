"""The leaf layers every network here is made of.

Three conventions hold for all of them:

* A layer computes in the dtype of its input. The caller chooses the precision by casting what it feeds in and by what the
  weight leaves are (`solrl_jax.numerics.matmul`); no layer has a dtype of its own. Normalisations reduce in float32.
* Images are `[batch, height, width, channels]`, tokens `[batch, length, features]`.
* Attribute names are those of the PyTorch module that a layer ports, so that a released file loads by name. Each parameter
  says in its metadata under which last name (`torch_name`) and in which axis order (`layout`) PyTorch stores it;
  `models.weights` reads these and nothing else.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from solrl_jax.numerics import split
from solrl_jax.numerics.leaf import Leaf
from solrl_jax.numerics.matmul import matmul, outputs_divided

# How PyTorch orders the axes of a parameter that we hold as
#   "same": unchanged;  "linear": [in, out] from [out, in];  "pointwise": [in, out] from a 1x1 convolution [out, in, 1, 1];
#   "conv": [kh, kw, in / groups, out] from [out, in / groups, kh, kw].
LAYOUTS = ("same", "linear", "pointwise", "conv")

# What the backward pass through a stack of blocks finds in memory and what it computes again (arXiv 1604.06174):
#   "none": every intermediate is kept, gathered weights under FSDP among them;  "products": outputs of matrix products are;
#   "blocks": only what goes into each block.
REMAT = {"none": None, "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "blocks": None}

M = TypeVar("M", bound=nnx.Module)
P = TypeVar("P")
X = TypeVar("X")


def param(value: Array, torch_name: str, layout: str = "same") -> nnx.Param:
    """A parameter that knows how PyTorch stores it (`layout`: one of `LAYOUTS`)."""
    return nnx.Param(value, torch_name=torch_name, layout=layout, below_stack=0, first_layer=None)


def stack(n: int, make: Callable[[nnx.Rngs], M], rngs: nnx.Rngs, *, first: int | None = None) -> M:
    """`n` modules of one kind as one module whose parameters have a leading axis of `n`, to be applied by `scan_blocks`.

    first: set where layers of several kinds share one released list. Each run of equal ones is then a stack, held in a
    container that has the list's name, under any key; its layers are `first`, `first + 1`, ... of that list.
    """
    build = nnx.split_rngs(splits=n)(nnx.vmap(make, in_axes=(0,), out_axes=0))
    blocks = build(rngs)
    for path, variable in nnx.to_flat_state(nnx.state(blocks, nnx.Param)):
        variable.set_metadata(below_stack=len(path), first_layer=first)  # where in a tensor's name which layer index goes
    return blocks


def scan_blocks(blocks: Any, apply: Callable[[Any, X], X], x: X, *, remat: str = "none") -> X:
    """Applies stacked `blocks` in order: `x = apply(block, x)`. One block is compiled, however many there are.

    x: an array, or a tree of arrays where several streams run side by side. remat: what a gradient recomputes (`REMAT`).
    """
    graphdef, params = nnx.split(blocks)
    step = lambda x, p: (apply(nnx.merge(graphdef, gather(p)), x), None)
    if remat != "none":
        step = jax.checkpoint(step, policy=REMAT[remat], prevent_cse=False)  # the scan itself keeps it from being undone
    return jax.lax.scan(step, x, params)[0]


def gather(params: P) -> P:
    """Weights from shards, whole on every device of the ambient mesh: no contraction is ever split over devices.

    Inside `scan_blocks` this gathers one layer at a time, which is what makes FSDP save memory; and because each device
    then runs the same products on its own rows, a row's result does not depend on the mesh. Over the axis `tensor`, if there
    is one, the outputs of linears stay divided (`numerics.split`).
    """
    if jax.sharding.get_abstract_mesh().empty:
        return params
    if split.ways() == 1:
        return jax.lax.with_sharding_constraint(params, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        matrix = not isinstance(leaf, jax.Array) or leaf.ndim == 2  # not a convolution's
        linear = matrix and any(getattr(key, "key", None) == "kernel" for key in path)
        return outputs_divided(leaf, split.ways()) if linear else PartitionSpec()

    is_leaf = lambda x: isinstance(x, Leaf)
    return jax.lax.with_sharding_constraint(params, jax.tree_util.tree_map_with_path(place, params, is_leaf=is_leaf))


class Linear(nnx.Module):
    """`y = x W + b`; `kernel` [in, out] may be any leaf that `numerics.matmul` knows."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool = True, layout: str = "linear", rngs: nnx.Rngs):
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # PyTorch's default for nn.Linear
        self.kernel = param(scale(rngs.params(), (n_in, n_out), jnp.float32), "weight", layout)
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None

    def __call__(self, x: Float[Array, "... n_in"]) -> Float[Array, "... n_out"]:
        y = matmul(x, self.kernel.get_value())
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


class Conv(nnx.Module):
    """A 2-D convolution, NHWC, zero padding of `kernel // 2` (stride 1 keeps the size; stride 2 halves an even one)."""

    def __init__(self, n_in: int, n_out: int, kernel: int, *, stride: int = 1, bias: bool = True, rngs: nnx.Rngs):
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(scale(rngs.params(), (kernel, kernel, n_in, n_out), jnp.float32), "weight", "conv")
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.stride, self.padding = stride, kernel // 2

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        y = jax.lax.conv_general_dilated(
            x, self.kernel.get_value().astype(x.dtype), (self.stride, self.stride), [(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


class DepthwiseConv(nnx.Module):
    """One `kernel` x `kernel` filter a channel, stride 1, zero padding.

    Written as a sum of shifted products: XLA fuses it into one pass over memory, which is what bounds it, on every backend
    (its grouped convolution is far slower on CPU, gradients above all).
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = True, rngs: nnx.Rngs):
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(scale(rngs.params(), (kernel, kernel, 1, channels), jnp.float32), "weight", "conv")
        self.bias = param(jnp.zeros(channels), "bias") if bias else None
        self.size = kernel

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        height, width = x.shape[1:3]
        # float32 inside, rounded once, as a convolution is: rounding every product makes BF16 2.5 times slower on CPU
        k = self.kernel.get_value()[:, :, 0].astype(jnp.float32)
        padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (self.size // 2,) * 2, (self.size // 2,) * 2, (0, 0)))
        y = sum(padded[:, i : i + height, j : j + width] * k[i, j] for i in range(self.size) for j in range(self.size))
        if self.bias is not None:
            y = y + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, float32 inside; without weights unless `affine`."""

    def __init__(self, features: int, *, eps: float, affine: bool = True):
        self.scale = param(jnp.ones(features), "weight") if affine else None
        self.bias = param(jnp.zeros(features), "bias") if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x32 = x.astype(jnp.float32)
        mean = x32.mean(-1, keepdims=True)
        y = (x32 - mean) * jax.lax.rsqrt(((x32 - mean) ** 2).mean(-1, keepdims=True) + self.eps)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale.get_value().astype(jnp.float32) + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, float32 inside: `x / rms(x) * (offset + scale) + bias`.

    `offset` is 1 where the file holds the weight as a difference from one (Gemma), else 0.
    """

    def __init__(self, features: int, *, eps: float, bias: bool = False, offset: float = 0.0):
        self.scale = param(jnp.full(features, 1.0 - offset), "weight")
        self.bias = param(jnp.zeros(features), "bias") if bias else None
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + self.eps)
        y = y * (self.offset + self.scale.get_value().astype(jnp.float32))
        if self.bias is not None:
            y = y + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """A table of vectors, looked up by integer; returned in the table's own dtype."""

    def __init__(self, count: int, features: int, *, rngs: nnx.Rngs):
        self.embedding = param(0.02 * jax.random.normal(rngs.params(), (count, features)), "weight")

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        return self.embedding.get_value()[ids]
