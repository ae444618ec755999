"""MHLA: token-level multi-head linear attention (arXiv 2601.07832), a replacement for SANA's
attention.

The tokens of an image are divided into M equal blocks. Linear attention has one sum over all keys.
In MHLA each block has its own sum, and the queries of each block read their own mixture of the M
sums, given by a trained matrix m [M, M]. If all entries of m are equal, MHLA is linear attention.
The released DiT code (DAGroup-PKU/MHLA) departs from the paper in four places, see
`Mhla.released_variant`.
"""

import dataclasses
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation, as_lazy
from solrl_jax.models.layers.conv import DepthwiseConv
from solrl_jax.models.layers.linear_attention import AttentionProjections
from solrl_jax.models.layers.parameter import param
from solrl_jax.quant.linear_attention import Blocks, linear_attention
from solrl_jax.quant.sequence_parallel import tokens_are_sharded

EPS = 1e-6  # added to the ReLU of queries and keys, and to the denominator


@dataclasses.dataclass(frozen=True)
class Mhla:
    """The settings of MHLA, which replaces SANA's linear attention (`model.mhla_blocks`,
    `model.mhla_released` and `model.mhla_norm` of the configuration).

    MHLA divides the tokens of an image into M equal blocks. Linear attention has one sum over all
    keys; here each block has its own, and the queries of block i read the mixture of these sums
    with the weights of row i of a trained matrix m [M, M].

    Attributes:
        blocks: The number M of blocks, 1 or more: a divisor of the number of rows of tokens times a
            divisor of the number of columns, for example 16 = 4 x 4 for 32 x 32 tokens.
        released_variant: Whether to follow the released code instead of the paper. Then the columns
            of m (not the rows) sum to 1 at first; training does not clip m to [0, 1]; the
            convolution that is added to the attention starts as the identity (not zero) and has a
            bias; and the denominator of a query q of block i is `sum_j m_ij q_j . z_j` instead of
            `q . sum_j m_ij z_j`, where z_j is the sum of the keys of block j, and q_j the query at
            the same place in block j.
        add_norms: Whether to add norms of queries and keys (RMSNorm with epsilon 1e-5, over all
            heads together) to a checkpoint without them. Norms that a checkpoint has are always
            kept.
    """

    blocks: int
    released_variant: bool = False
    add_norms: bool = False


class BlockMixing(AttentionProjections):
    """MHLA's attention: linear attention that mixes the sums over keys among blocks of the image,
    plus a depthwise 3x3 convolution of the values over the whole image.

    1e-6 is added to the ReLU of queries and keys, and to the denominator.

    The new parameters are the matrix `mix` [M, M] for M blocks and the convolution `lepe`. When a
    checkpoint without MHLA is loaded, they get values with which the network starts near the one
    without MHLA: `mix` falls linearly with the distance between blocks (`initial_mix`), and `lepe`
    is zero (or, with `mhla.released_variant`, the identity). The constructor sets `mix` to zero and
    the filters of `lepe` to random values.

    Args:
        mhla: The settings of MHLA (`Mhla`).
        layout: (blocks from top to bottom, blocks from left to right), whose product is
            `mhla.blocks`. It is the same for all image sizes, so the rows and columns of tokens
            must be multiples of these two numbers.
        widths: `(d, d, inner)`: d features of a token, given twice, and inner features of all heads
            together.
        heads: The number of heads, a divisor of the third width.
        normed: Whether the checkpoint has norms of queries and keys. If not, the layer adds them
            where `mhla.add_norms` is set, with weights that start as 1.
        bias: Whether the linear layers to queries, keys and values have biases.
        rngs: Random number generators for the initial weights.
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
        super().__init__(widths, heads, normed=normed or mhla.add_norms, bias=bias, rngs=rngs)
        self.mhla = mhla
        self.layout = layout
        self.mix = param(
            jnp.zeros((mhla.blocks, mhla.blocks)),
            "mix",
            initializer=(initial_mix, layout, mhla.released_variant),
            bounds=None if mhla.released_variant else (0.0, 1.0),
        )
        self.lepe = DepthwiseConv(widths[2], 3, bias=mhla.released_variant, rngs=rngs)
        self.lepe.kernel.set_metadata(initializer=(initial_filter, mhla.released_variant))
        if self.lepe.bias is not None:
            self.lepe.bias.set_metadata(initializer=(np.zeros, widths[2]))
        if self.norm_q is not None and self.norm_k is not None and not normed:
            for norm in (self.norm_q, self.norm_k):
                norm.scale.set_metadata(initializer=(np.ones, widths[2]))

    def __call__(self, x: Activation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """Applies the attention with mixed sums, adds the convolution of the values, and applies
        the output layer.

        Args:
            x: The image tokens [b, n, d], row by row, an array or a lazy activation (one that is
                computed when it is read).
            grid: (rows, columns) of the tokens, multiples of the numbers of blocks in `layout`.

        Returns:
            The output [b, n, d] in the dtype of `x`. The input is not added.

        Raises:
            ValueError: While tracing, if the tokens are sharded over devices (configuration field
                `mesh.sequence`).
        """
        if tokens_are_sharded():
            raise ValueError(
                "model.attention=mhla: not available with mesh.sequence, because the blocks of its "
                "tokens have sums of their own"
            )
        x = as_lazy(x)
        q, k, v = self.project(x, x)
        batch, n, width = v.value.shape
        local = self.lepe(v.value.reshape(batch, *grid, width)).reshape(batch, n, width)
        blocks = Blocks(self.layout, grid, EPS, EPS, self.mhla.released_variant)
        out = linear_attention(q, k, v, self.heads, blocks, self.mix.get_value())
        return self.to_out[0](out + local)


def tiling(blocks: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Chooses how to divide a grid of tokens into equal blocks that are as square as possible: the
    ratio of their longer to their shorter side, counted in tokens, is smallest.

    If two divisions are equally square, the one with fewer blocks from top to bottom is chosen.

    Args:
        blocks: The number of blocks, 1 or more.
        grid: (rows, columns) of tokens.

    Returns:
        (blocks from top to bottom, blocks from left to right). Their product is `blocks`.

    Raises:
        ValueError: If the grid cannot be divided into `blocks` equal blocks.
    """
    rows, columns = grid

    def divides(down: int) -> bool:
        return blocks % down == 0 and rows % down == 0 and columns % (blocks // down) == 0

    def elongation(down: int) -> Fraction:  # exact, so that ties are ties
        aspect = Fraction(rows * (blocks // down), columns * down)
        return max(aspect, 1 / aspect)

    candidates = [down for down in range(1, blocks + 1) if divides(down)]
    if not candidates:
        raise ValueError(
            f"model.mhla_blocks={blocks}: {rows} x {columns} tokens do not divide into so many "
            f"equal blocks"
        )
    down = min(candidates, key=elongation)
    return down, blocks // down


def initial_mix(layout: tuple[int, int], released: bool) -> Float[np.ndarray, "m m"]:
    """Returns the mixing matrix m before training. Its weights fall linearly with the distance
    between blocks.

    m_ij is the weight of the keys of block j for the queries of block i. It is proportional to 1 -
    dist(i, j) / D, with the Euclidean distance in blocks, which are numbered row by row. In the
    paper, D is the largest distance from block i, and rows sum to 1. In the released code, D is the
    largest of all distances, and columns sum to 1.

    Args:
        layout: (blocks from top to bottom, blocks from left to right).
        released: Whether to follow the released code instead of the paper.

    Returns:
        The matrix [M, M] for M blocks, float64, non-negative. For a single block it is [[1]].
    """
    places = np.indices(layout).reshape(2, -1).T
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    largest = distance.max() if released else distance.max(1, keepdims=True)
    near = 1 - distance / np.maximum(largest, 1)  # a single block has distance 0
    return near / near.sum(0 if released else 1, keepdims=True)


def initial_filter(released: bool) -> Float[np.ndarray, "3 3 1 1"]:
    """Returns the filter of MHLA's convolution `lepe` before training: zero, or the identity.

    Args:
        released: Whether to follow the released code, whose filter is the identity, instead of the
            paper.

    Returns:
        A float64 filter [3, 3, 1, 1], which is broadcast to all channels.
    """
    return np.pad(np.full((1, 1), float(released)), 1)[..., None, None]
