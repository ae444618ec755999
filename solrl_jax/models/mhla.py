"""MHLA: token-level multi-head linear attention (arXiv 2601.07832) in place of SANA's linear attention.

The tokens of an image are divided into M equal blocks. Linear attention has one sum over all keys; here each block has its own,
and each block of queries reads its own mixture of the M sums, by a trained matrix m [M, M]. With all entries of m equal, that
is linear attention. The released DiT code (DAGroup-PKU/MHLA) departs from the paper in three places: `Mhla.released`.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers import DepthwiseConv, param
from solrl_jax.models.sana import Attention
from solrl_jax.numerics.linear_attention import exact_in_float32
from solrl_jax.numerics.pending import Pending

EPS = 1e-6  # of the kernel, relu(x) + EPS, and of the denominator


@dataclasses.dataclass(frozen=True)
class Mhla:
    """How SANA's attention is replaced (`config.Model`)."""

    blocks: int  # M
    released: bool = False  # the variant of the released code
    normed: bool = False  # queries and keys are normalised, all heads as one, as by SANA's own option


class BlockMixing(Attention):
    """Linear attention whose sums over keys are mixed among blocks, in float32; b and i are blocks (arXiv 2601.07832, eq. 4).

        S_b = sum_{j in b} k_j v_j^T      z_b = sum_{j in b} k_j      with relu(x) + 1e-6 for queries and keys
        o   = q sum_b m_ib S_b / (q . sum_b m_ib z_b + 1e-6)          for a query q of block i

    A depthwise convolution of the values, `lepe`, is added to the outputs. Tokens come and go in raster order.

    layout: blocks down and across, for images of any size: m is about places. In the released variant, the denominator of
    position p of block i is `sum_b m_ib q_bp . z_b`: it takes the query at the same position of each block. Also, `lepe` begins
    as the identity there. Here it begins as zero, so that the network begins near the one that it was.
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
        self.mhla, self.layout = mhla, layout
        size = (mhla.blocks, mhla.blocks)
        start = (initial_mix, layout, mhla.released)
        self.mix = param(jnp.zeros(size), "mix", start=start, bounds=None if mhla.released else (0.0, 1.0))
        self.lepe = DepthwiseConv(widths[2], 3, bias=False, rngs=rngs)
        self.lepe.kernel.set_metadata(start=(initial_filter, mhla.released))
        if self.norm_q is not None and self.norm_k is not None and not normed:
            for norm in (self.norm_q, self.norm_k):
                norm.scale.set_metadata(start=(np.ones, widths[2]))

    def __call__(self, x: Pending, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """grid: rows and columns of the n tokens."""
        q, k, v = self.by_head(x, x)
        batch, n, heads, _ = v.shape
        (rows, columns), (down, across) = grid, self.layout
        in_blocks = lambda t: t.reshape(batch, down, rows // down, across, columns // across, heads, -1)
        local = self.lepe(v.reshape(batch, rows, columns, -1)).reshape(batch, n, -1)
        kernel, wide = lambda t: jax.nn.relu(t) + EPS, jnp.float32
        q, k, v = (in_blocks(t) for t in (kernel(q.astype(wide)), *exact_in_float32(kernel(k), v)))
        # One m for each image: a product of batches, for which XLA moves no axis of the sums, which are as large as the values.
        # It would join two such products, and copy both. So the small sums are mixed without one.
        mix, m = self.mix.get_value().astype(wide), self.mhla.blocks
        flat = lambda t: t.reshape(batch, m, -1)
        product = lambda t: jnp.einsum("bij,bjf->bif", jnp.broadcast_to(mix, (batch, m, m)), flat(t)).reshape(t.shape)
        mixed = lambda t: (mix[..., None] * flat(t)[:, None]).sum(2).reshape(t.shape)
        # y and x: the block's place; r and c: the token's in it
        states = jnp.einsum("byrxchk,byrxchv->byxhkv", k, v, preferred_element_type=wide)
        numerator = jnp.einsum("byrxchk,byxhkv->byrxchv", q, product(states))
        sums, dots = k.sum((2, 4), dtype=wide), partial(jnp.einsum, "byrxchk,byxhk->byxrch", q)
        denominator = mixed(dots(sums)) if self.mhla.released else dots(mixed(sums))
        denominator = denominator.transpose(0, 1, 3, 2, 4, 5)[..., None]
        out = (numerator / (denominator + EPS)).reshape(batch, n, -1).astype(x.dtype)
        return self.to_out[0](out + local)


def tiling(blocks: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across that divide a grid of tokens into `blocks` equal ones, as square as possible. Else ValueError."""
    rows, columns = grid
    fits = [d for d in range(1, blocks + 1) if blocks % d == 0 and rows % d == 0 and columns % (blocks // d) == 0]
    if not fits:
        raise ValueError(f"model.mhla_blocks={blocks}: {rows} x {columns} tokens do not divide into so many equal blocks")
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
