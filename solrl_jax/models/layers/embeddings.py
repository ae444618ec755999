"""Embeddings of patches, positions, timesteps and text as vectors of a network's width."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.parameter import param
from solrl_jax.quant.matmul import matmul


class PatchProjection(nnx.Module):
    """Maps each square patch of an image to one token by a linear layer: [b, h, w, n_in] to
    [b, h / patch, w / patch, n_out]. In checkpoints it is a convolution whose stride is its kernel
    size.

    The initial weight has the Xavier uniform distribution, and the bias is zero.

    Args:
        patch: The side of a patch in pixels. Heights and widths of images are multiples of it.
        n_in: The number of channels of an image.
        n_out: The number of features of a token.
        bias: Whether to add a bias.
        rngs: Random number generators for the initial weight.
    """

    def __init__(self, patch: int, n_in: int, n_out: int, *, bias: bool = True, rngs: nnx.Rngs):
        init = nnx.initializers.xavier_uniform()
        kernel = init(rngs.params(), (patch * patch * n_in, n_out))
        self.kernel = param(kernel.reshape(patch, patch, n_in, n_out), "weight", "conv")
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.patch = patch

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b rows columns d"]:
        """Embeds images: one token per patch.

        Args:
            x: Images with `n_in` channels. Height and width are multiples of the side of a patch.

        Returns:
            The tokens on the grid of patches, [b, rows, columns, `n_out`], in the dtype of `x`.
        """
        kernel = self.kernel.get_value()
        y = matmul(patchify(x, self.patch), kernel.reshape(-1, kernel.shape[-1]))
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


def patchify(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b rows columns f"]:
    """Cuts images into square patches.

    Args:
        x: The images. Height and width are multiples of `patch`.
        patch: The side of a patch in pixels.

    Returns:
        One vector per patch. Its features are ordered (row, column, channel).
    """
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // patch, w // patch, patch**2 * c)


def unpatchify(
    tokens: Float[Array, "b n f"], rows: int, columns: int, patch: int
) -> Float[Array, "b h w c"]:
    """Assembles images from their square patches: the inverse of `patchify`.

    Args:
        tokens: One vector per patch, row by row: n is `rows * columns`. Its features are ordered
            (row, column, channel).
        rows: The number of patches from top to bottom.
        columns: The number of patches from left to right.
        patch: The side of a patch in pixels.

    Returns:
        The images, of `rows * patch` by `columns * patch` pixels. They have `f / patch ** 2`
        channels, where f is the number of features of a vector.
    """
    x = tokens.reshape(len(tokens), rows, columns, patch, patch, -1).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(len(tokens), rows * patch, columns * patch, -1)


class TextProjection(nnx.Module):
    """An MLP that maps text embeddings to the width of a network: linear layer, activation, linear
    layer, both with biases (`PixArtAlphaTextProjection` of diffusers).

    Args:
        n_in: The number of features of the text embedding.
        d: The number of hidden and output features.
        act: The activation function. The default is GELU in its tanh form.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self, n_in: int, d: int, *, act: Callable[[Array], Array] = jax.nn.gelu, rngs: nnx.Rngs
    ):
        self.linear_1 = Linear(n_in, d, rngs=rngs)
        self.linear_2 = Linear(d, d, rngs=rngs)
        self.act = act

    def __call__(self, text: Float[Array, "... n_in"]) -> Float[Array, "... d"]:
        """Applies a linear layer, the activation and a linear layer to the last axis.

        Args:
            text: Text embeddings of any rank.

        Returns:
            The projected text, with d features in the last axis, in the dtype of `text`.
        """
        return self.linear_2(self.act(self.linear_1(text)))


class TimestepMLP(nnx.Module):
    """Embeds one number per sample, a timestep (0 to 1000) or a guidance scale (times 1000), as a
    vector: 256 sinusoids, then an MLP with SiLU.

    Args:
        d: The number of hidden and output features.
        bias: Whether the linear layers have biases.
        rngs: Random number generators for the initial weights.
    """

    def __init__(self, d: int, *, bias: bool = True, rngs: nnx.Rngs):
        self.linear_1, self.linear_2 = (Linear(n, d, bias=bias, rngs=rngs) for n in (256, d))

    def __call__(self, value: Float[Array, " b"], dtype: DTypeLike) -> Float[Array, "b d"]:
        """Embeds one number per sample: 256 sinusoids, then an MLP with SiLU.

        Args:
            value: The numbers, e.g. timesteps from 0 to 1000, or guidance scales times 1000. They
                need not be whole.
            dtype: The dtype in which the MLP computes and of the result. The sinusoids are computed
                in float32.

        Returns:
            The embeddings [b, d].
        """
        return self.linear_2(jax.nn.silu(self.linear_1(sinusoid(value).astype(dtype))))


def sinusoid(value: Float[Array, " b"], dim: int = 256) -> Float[Array, "b {dim}"]:
    """Returns the sinusoidal features of one number per sample.

    Args:
        value: The numbers, for example timesteps from 0 to 1000.
        dim: The number of features, an even number.

    Returns:
        Float32 features: `dim / 2` cosines, then as many sines, of `value` times the frequencies
        `10000 ** (-2 i / dim)`, i = 0, 1, ..., dim / 2 - 1.
    """
    # Computed on the host, with the exponent in float32 as in the released code and its exponential
    # rounded once. NumPy's float32 `exp` is often wrong in the last bit, and at t = 1000 one bit of
    # a frequency changes the angle by 1e-4.
    index = np.arange(dim // 2, dtype=np.float32)
    exponent = np.float32(-math.log(10000)) * index / np.float32(dim // 2)
    frequency = np.exp(exponent.astype(np.float64)).astype(np.float32)
    angle = value.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def sincos_positions(
    d: int, rows: Float[np.ndarray, " rows"], columns: Float[np.ndarray, " columns"]
) -> Float[Array, "rows columns {d}"]:
    """Returns fixed sinusoidal position embeddings for a grid of tokens.

    Args:
        d: The number of features, a multiple of 4.
        rows: The vertical coordinate of each row of tokens, for example 0, 1, 2, ...
        columns: The horizontal coordinate of each column of tokens.

    Returns:
        Float32 features [rows, columns, d]. The first half encodes the column and the second half
        the row; each half consists of d / 4 sines, then d / 4 cosines, of the coordinate times the
        frequencies `10000 ** (-4 i / d)`, i = 0, 1, ..., d / 4 - 1.
    """
    # The waves of each axis are computed on the host in float64. The whole grid takes up to a
    # gigabyte, so JAX computes it: then it is not allocated when a network is only traced for its
    # shapes.
    omega = 1.0 / 10000 ** (np.arange(d // 4) / (d // 4))

    def waves(coordinates: np.ndarray) -> Array:
        angle = np.outer(coordinates, omega)
        return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=-1), jnp.float32)

    shape = (len(rows), len(columns), d // 2)
    column_waves = jnp.broadcast_to(waves(columns)[None], shape)
    row_waves = jnp.broadcast_to(waves(rows)[:, None], shape)
    return jnp.concatenate([column_waves, row_waves], axis=-1)


class Embedding(nnx.Module):
    """A table of vectors, looked up by index. The result has the dtype of the table.

    The initial values are normal with the standard deviation 0.02.

    Args:
        count: The number of vectors.
        features: The size of each vector.
        rngs: Random number generators for the initial table.
    """

    def __init__(self, count: int, features: int, *, rngs: nnx.Rngs):
        self.embedding = param(0.02 * jax.random.normal(rngs.params(), (count, features)), "weight")

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Looks up one vector per index.

        Args:
            ids: Indices, from 0 to `count - 1`. Other indices raise no error: larger ones give the
                last vector, and negative ones count from the end.

        Returns:
            The vectors, in the dtype of the table.
        """
        return self.embedding.get_value()[ids]
