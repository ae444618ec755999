"""The layers that the networks are made of.

Three conventions hold for all networks:

* A layer computes in the dtype of its input. The caller chooses the precision: by the dtype of the input, and by the leaves
  that stand for the weights (`solrl_jax.quant.matmul`). No layer has a dtype of its own. Normalisations use float32 inside.
* Images are `[batch, height, width, channels]`, tokens `[batch, length, features]`.
* Attributes have the names of the PyTorch module that a network ports, so that released files load by name. The metadata of
  each parameter holds the last part of its name in PyTorch (`torch_name`) and the order of its axes there (`layout`).
  `models.loading.weights` reads nothing else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from solrl_jax.quant import compile_target, tensor_parallel
from solrl_jax.quant.gated_conv import convolved, gated_conv
from solrl_jax.quant.lazy import LazyActivation, layer_norm
from solrl_jax.quant.leaf import PRODUCT, Leaf
from solrl_jax.quant.matmul import lazy_matmul, matmul, outputs_divided


# What the forward pass through a stack of blocks keeps for the gradient; the rest is computed again (arXiv 1604.06174).
#   "none": keeps every intermediate, also the gathered weights under FSDP;  "products": the outputs of linears and of attention
#   kernels, as far as the gradient reads them;  "blocks": only the input of each block.
def _kernels(primitive, *_, **__):
    return primitive.name.startswith(("dot_product_attention_fwd", "pallas_call"))


_products = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(PRODUCT), _kernels
)
REMAT = {"none": None, "products": _products, "blocks": None}

M = TypeVar("M", bound=nnx.Module)
P = TypeVar("P")
X = TypeVar("X")


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
        return outputs_divided(leaf, tensor_parallel.ways()) if linear else PartitionSpec()

    def is_leaf(x):
        return isinstance(x, Leaf)

    return jax.lax.with_sharding_constraint(
        params, jax.tree_util.tree_map_with_path(place, params, is_leaf=is_leaf)
    )


class Linear(nnx.Module):
    """`y = x W + b`. `kernel` [in, out] may be any leaf that `quant.matmul` takes.

    layout: "linear", or "pointwise" for a 1x1 convolution of the released network.
    """

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool = True, layout: str = "linear", rngs: nnx.Rngs
    ):
        scale = nnx.initializers.variance_scaling(
            1 / 3, "fan_in", "uniform"
        )  # PyTorch's default for nn.Linear
        self.kernel = param(scale(rngs.params(), (n_in, n_out), jnp.float32), "weight", layout)
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None

    def __call__(self, x: Float[Array, "... n_in"] | LazyActivation) -> Float[Array, "... n_out"]:
        if isinstance(x, LazyActivation):
            return self.pending(x).value
        y = matmul(x, self.kernel.get_value())
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)

    def pending(self, x: LazyActivation) -> LazyActivation:
        """The same of an activation that need not be in memory, to one that need not be."""
        y = lazy_matmul(x, self.kernel.get_value())
        return (
            y
            if self.bias is None
            else y.map(jnp.add, self.bias.get_value().astype(x.dtype)[None, None])
        )


class Conv(nnx.Module):
    """A 2-D convolution with zero padding of `kernel // 2`: stride 1 keeps the size, stride 2 halves an even one."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        *,
        stride: int = 1,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(
            scale(rngs.params(), (kernel, kernel, n_in, n_out), jnp.float32), "weight", "conv"
        )
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.stride = stride
        self.padding = kernel // 2

    def __call__(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b h2 w2 n_out"]:
        y = jax.lax.conv_general_dilated(
            x, self.kernel.get_value().astype(x.dtype), (self.stride, self.stride), [(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)

    def of_squares(self, x: Float[Array, "b h w n_in"]) -> Float[Array, "b 2*h 2*w n_out"]:
        """The convolution (stride 1) of `x` with each pixel as a square of 2 x 2."""
        if compile_target.platform() == "cpu":
            return self(x.repeat(2, axis=1).repeat(2, axis=2))
        y = conv_of_squares(x, self.kernel.get_value())
        # written in the dtype of `x`: XLA would write the float32 that a norm after it reads
        return jax.lax.optimization_barrier(
            y if self.bias is None else y + self.bias.get_value().astype(x.dtype)
        )


def conv_of_squares(
    x: Float[Array, "b h w n_in"], kernel: Float[Array, "3 3 n_in n_out"]
) -> Float[Array, "b 2*h 2*w n_out"]:
    """A 3x3 convolution of `x` with each pixel as a square of 2 x 2, as one transposed convolution.

    A tap of it is the sum of those that meet the same pixel: four products for nine, and no squares in memory. A CPU is slower
    so.
    """
    wide = jnp.pad(kernel.astype(jnp.float32), ((1, 1), (1, 1), (0, 0), (0, 0)))
    rows = wide[:-1] + wide[1:]
    taps = (rows[:, :-1] + rows[:, 1:]).astype(x.dtype)
    # turned twice: XLA knows a transposed convolution for cuDNN by a kernel that is turned
    turned = jax.lax.rev(jax.lax.optimization_barrier(jax.lax.rev(taps, (0, 1))), (0, 1))
    return jax.lax.conv_general_dilated(
        x, turned, (1, 1), [(2, 2)] * 2, lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip


class DepthwiseConv(nnx.Module):
    """A convolution with one `kernel` x `kernel` filter for each channel; stride 1, zero padding."""

    def __init__(self, channels: int, kernel: int, *, bias: bool = True, rngs: nnx.Rngs):
        scale = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(
            scale(rngs.params(), (kernel, kernel, 1, channels), jnp.float32), "weight", "conv"
        )
        self.bias = param(jnp.zeros(channels), "bias") if bias else None

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        bias = None if self.bias is None else self.bias.get_value()
        return convolved(x, self.kernel.get_value(), bias)


class GLUMBConv(nnx.Module):
    """SANA's gated MLP with a depthwise 3x3 convolution inside: `GLUMBConv` of diffusers (arXiv 2410.10629, section 2.2)."""

    def __init__(self, d: int, hidden: int, *, rngs: nnx.Rngs):
        self.conv_inverted = Linear(d, 2 * hidden, layout="pointwise", rngs=rngs)
        self.conv_depth = DepthwiseConv(2 * hidden, 3, rngs=rngs)
        self.conv_point = Linear(hidden, d, bias=False, layout="pointwise", rngs=rngs)

    def __call__(self, x: Float[Array, "b h w d"]) -> Float[Array, "b h w d"]:
        b, h, w, _ = x.shape
        return self.of(LazyActivation.of(x.reshape(b, h * w, -1)), (h, w)).reshape(b, h, w, -1)

    def of(self, x: LazyActivation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """The same of n pixels that need not be in memory. grid: their rows and columns."""
        bias = self.conv_depth.bias
        assert bias is not None
        taps = self.conv_depth.kernel.get_value()
        return self.conv_point(
            gated_conv(self.conv_inverted.pending(x), grid, taps, bias.get_value())
        )


def gated(gate: Float[Array, "..."], value: Float[Array, "..."]) -> Float[Array, "..."]:
    """A SiLU-gated linear unit's middle (arXiv 2002.05202): `silu(gate) value`."""
    return jax.nn.silu(gate) * value


def modulate(
    x: Float[Array, "... d"], shift: Float[Array, "... d"], scale: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """`x (1 + scale) + shift`, rounded at each step, as in the released code of SANA and FLUX."""
    return x * (1 + scale) + shift


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis (arXiv 1607.06450), float32 inside. affine: with a weight and a bias."""

    def __init__(self, features: int, *, eps: float, affine: bool = True):
        self.scale = param(jnp.ones(features), "weight") if affine else None
        self.bias = param(jnp.zeros(features), "bias") if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = layer_norm(x.astype(jnp.float32), self.eps)
        if self.scale is not None and self.bias is not None:
            y = y * self.scale.get_value().astype(jnp.float32) + self.bias.get_value().astype(
                jnp.float32
            )
        return y.astype(x.dtype)

    def pending(self, x: Float[Array, "b s d"]) -> LazyActivation:
        """The same, not in memory yet."""
        norm = partial(layer_norm, eps=self.eps, width=x.shape[-1])
        return LazyActivation.of(x).map(norm) if self.scale is None else LazyActivation.of(self(x))


def rms_norm(
    x: Float[Array, "... d"],
    scale: Float[Array, "..."],
    eps: float,
    width: int | None = None,
    keep: bool = False,
) -> Float[Array, "... d"]:
    """`scale x / rms(x)` in float32.

    width: that of `x` before zeros filled it up. keep: sums of squares are written to memory, and kept for the gradient.
    """
    x32 = x.astype(jnp.float32)
    n = x.shape[-1] if width is None else width
    squares = (x32**2).sum(-1, keepdims=True)
    if keep:
        squares = checkpoint_name(jax.lax.optimization_barrier(squares), PRODUCT)
    return x32 * jax.lax.rsqrt(squares / n + eps) * scale


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467): `x / rms(x) * (offset + scale) + bias`, in float32.

    offset: 1 where the file stores the weight minus one (Gemma), else 0.
    """

    def __init__(self, features: int, *, eps: float, bias: bool = False, offset: float = 0.0):
        self.scale = param(jnp.full(features, 1.0 - offset), "weight")
        self.bias = param(jnp.zeros(features), "bias") if bias else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = rms_norm(x, self.offset + self.scale.get_value().astype(jnp.float32), self.eps)
        if self.bias is not None:
            y = y + self.bias.get_value().astype(jnp.float32)
        return y.astype(x.dtype)

    def pending(self, x: Float[Array, "b s d"]) -> LazyActivation:
        """The same without a bias, not in memory yet."""

        def f(y, scale):
            return rms_norm(y, self.offset + scale, self.eps, x.shape[-1]).astype(y.dtype)

        return LazyActivation.of(x).map(f, self.scale.get_value()[None, None])

    def by_head(self, x: LazyActivation) -> LazyActivation:
        """The same of each head, where heads lie side by side."""

        def heads(x, scale):
            return x.reshape(*x.shape[:-1], -1, scale.shape[-1])

        keep = (
            x.exact and compile_target.platform() == "gpu"
        )  # there it saves a pass over `x` (docs/compiled.md)

        def f(x, scale):
            return (
                rms_norm(heads(x, scale), scale, self.eps, keep=keep)
                .astype(x.dtype)
                .reshape(x.shape)
            )

        return x.map(f, self.scale.get_value()[None, None])


class Embedding(nnx.Module):
    """A table of `count` vectors, looked up by integer. The result has the table's dtype."""

    def __init__(self, count: int, features: int, *, rngs: nnx.Rngs):
        self.embedding = param(0.02 * jax.random.normal(rngs.params(), (count, features)), "weight")

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        return self.embedding.get_value()[ids]


def space_to_depth(x: Float[Array, "b h w c"]) -> Float[Array, "b h/2 w/2 4*c"]:
    """Each 2 x 2 square of pixels as one, with four times the channels, ordered (channel, row, column)."""
    b, h, w, c = x.shape
    return (
        x.reshape(b, h // 2, 2, w // 2, 2, c)
        .transpose(0, 1, 3, 5, 2, 4)
        .reshape(b, h // 2, w // 2, 4 * c)
    )


def depth_to_space(x: Float[Array, "b h w c4"]) -> Float[Array, "b 2*h 2*w c4/4"]:
    """The inverse of `space_to_depth`."""
    b, h, w, c = x.shape
    return (
        x.reshape(b, h, w, c // 4, 2, 2)
        .transpose(0, 1, 4, 2, 5, 3)
        .reshape(b, 2 * h, 2 * w, c // 4)
    )
