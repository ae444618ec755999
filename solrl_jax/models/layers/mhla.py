"""MHLA: token-level multi-head linear attention (arXiv 2601.07832) in place of SANA's linear attention.

The tokens of an image are divided into M equal blocks. Linear attention has one sum over all keys; here each block has its own,
and each block of queries reads its own mixture of the M sums, by a trained matrix m [M, M]. With all entries of m equal, that
is linear attention. The released DiT code (DAGroup-PKU/MHLA) departs from the paper in three places: `Mhla.released`.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.conv import DepthwiseConv
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.sana.transformer import Attention
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.linear_attention import Blocks, linear_attention

EPS = 1e-6  # of the kernel, relu(x) + EPS, and of the denominator


@dataclasses.dataclass(frozen=True)
class Mhla:
    """How SANA's attention is replaced (`config.Model`)."""

    blocks: int  # M
    released: bool = False  # the variant of the released code
    normed: bool = (
        False  # queries and keys are normalised, all heads as one, as by SANA's own option
    )


class BlockMixing(Attention):
    """Linear attention whose sums over keys are mixed among blocks. A depthwise convolution of the values, `lepe`, is added.

    layout: blocks down and across, for images of any size: m is about places. `lepe` begins as the identity in the released
    variant. Here it begins as zero, so that the network begins near the one that it was.
    """

    def __init__(
        self,
        mhla: Mhla,
        layout: tuple[int, int],
        widths: tuple[int, int, int],
        heads: int,
        *,
        normed: bool,
        bias: bool,
        rngs: nnx.Rngs,
    ):
        super().__init__(widths, heads, normed=normed or mhla.normed, bias=bias, rngs=rngs)
        self.mhla = mhla
        self.layout = layout
        size = (mhla.blocks, mhla.blocks)
        start = (initial_mix, layout, mhla.released)
        self.mix = param(
            jnp.zeros(size), "mix", start=start, bounds=None if mhla.released else (0.0, 1.0)
        )
        self.lepe = DepthwiseConv(widths[2], 3, bias=False, rngs=rngs)
        self.lepe.kernel.set_metadata(start=(initial_filter, mhla.released))
        if self.norm_q is not None and self.norm_k is not None and not normed:
            for norm in (self.norm_q, self.norm_k):
                norm.scale.set_metadata(start=(np.ones, widths[2]))

    def __call__(self, x: LazyActivation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """grid: rows and columns of the n tokens."""
        q, k, v = self.projected(x, x)
        batch, n, width = v.value.shape
        local = self.lepe(v.value.reshape(batch, *grid, width)).reshape(batch, n, width)
        blocks = Blocks(self.layout, grid, EPS, EPS, self.mhla.released)
        out = linear_attention(q, k, v, self.heads, blocks, self.mix.get_value())
        return self.to_out[0](out + local)


def tiling(blocks: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across that divide a grid of tokens into `blocks` equal ones, as square as possible. Else ValueError."""
    rows, columns = grid
    fits = [
        d
        for d in range(1, blocks + 1)
        if blocks % d == 0 and rows % d == 0 and columns % (blocks // d) == 0
    ]
    if not fits:
        raise ValueError(
            f"model.mhla_blocks={blocks}: {rows} x {columns} tokens do not divide into so many equal blocks"
        )
    down = min(fits, key=lambda d: abs(math.log(rows / d / (columns / (blocks // d)))))
    return down, blocks // down


def initial_mix(layout: tuple[int, int], released: bool) -> Float[np.ndarray, "m m"]:
    """m before training: it falls linearly with the distance of blocks that lie as `layout` says, down and across.

    The paper: m_ij proportional to 1 - dist(i, j) / max_k dist(i, k), rows summing to 1. Released: the maximum is over all
    pairs, and columns sum to 1.
    """
    places = np.indices(layout).reshape(2, -1).T
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    largest = distance.max() if released else distance.max(1, keepdims=True)
    near = 1 - distance / np.maximum(largest, 1)  # of a single block, whose distance is 0
    return near / near.sum(0 if released else 1, keepdims=True)


def initial_filter(released: bool) -> Float[np.ndarray, "3 3 1 1"]:
    """`lepe` before training, the same for all channels: the identity in the released variant, else nothing."""
    return np.pad(np.full((1, 1), float(released)), 1)[..., None, None]
