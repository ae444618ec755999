"""What surrounds the blocks of a transformer: patches, positions, timesteps and texts as vectors of the network's width."""

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
    """A convolution whose stride is its kernel size. Computed as a matrix product over flattened patches."""

    def __init__(self, patch: int, n_in: int, n_out: int, *, bias: bool = True, rngs: nnx.Rngs):
        init = nnx.initializers.xavier_uniform()
        kernel = init(rngs.params(), (patch * patch * n_in, n_out)).reshape(
            patch, patch, n_in, n_out
        )
        self.kernel = param(kernel, "weight", "conv")
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.patch = patch

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b rows columns d"]:
        kernel = self.kernel.get_value()
        y = matmul(patches(x, self.patch), kernel.reshape(-1, kernel.shape[-1]))
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


def patches(x: Float[Array, "b h w c"], patch: int) -> Float[Array, "b rows columns f"]:
    """Square patches with sides of `patch` pixels. Features are ordered (row, column, channel) within a patch."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // patch, patch, w // patch, patch, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // patch, w // patch, patch**2 * c)


def unpatch(
    tokens: Float[Array, "b n f"], rows: int, columns: int, patch: int
) -> Float[Array, "b h w c"]:
    """The inverse of `patches`: one patch for each token, row by row."""
    x = tokens.reshape(len(tokens), rows, columns, patch, patch, -1).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(len(tokens), rows * patch, columns * patch, -1)


class TextProjection(nnx.Module):
    """Two linears with an activation between them: `PixArtAlphaTextProjection` of diffusers."""

    def __init__(
        self, n_in: int, d: int, *, act: Callable[[Array], Array] = jax.nn.gelu, rngs: nnx.Rngs
    ):
        self.linear_1 = Linear(n_in, d, rngs=rngs)
        self.linear_2 = Linear(d, d, rngs=rngs)
        self.act = act

    def __call__(self, text: Float[Array, "... n_in"]) -> Float[Array, "... d"]:
        return self.linear_2(self.act(self.linear_1(text)))


class TimestepMLP(nnx.Module):
    """A vector for a number (a time, a guidance scale): sinusoids, then two linears with SiLU between them."""

    def __init__(self, d: int, *, bias: bool = True, rngs: nnx.Rngs):
        self.linear_1, self.linear_2 = (Linear(n, d, bias=bias, rngs=rngs) for n in (256, d))

    def __call__(self, value: Float[Array, " b"], dtype: DTypeLike) -> Float[Array, "b d"]:
        return self.linear_2(jax.nn.silu(self.linear_1(sinusoid(value).astype(dtype))))


def sinusoid(value: Float[Array, " b"], dim: int = 256) -> Float[Array, "b {dim}"]:
    """Cosines, then sines, of `value` at `dim / 2` frequencies from 1 down to 1/10000; float32."""
    # On the host, with the exponent in float32 as in the released code, and its exponential rounded once. NumPy's own float32
    # `exp` is often wrong in the last bit; at t = 1000 one bit of a frequency changes the angle by 1e-4.
    exponent = (
        np.float32(-math.log(10000)) * np.arange(dim // 2, dtype=np.float32) / np.float32(dim // 2)
    )
    frequency = np.exp(exponent.astype(np.float64)).astype(np.float32)
    angle = value.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def sincos_positions(
    d: int, rows: Float[np.ndarray, " rows"], columns: Float[np.ndarray, " columns"]
) -> Float[Array, "rows columns {d}"]:
    """Fixed positions of a grid, float32. Half of the features encode the column, the other half the row.

    rows, columns: the coordinates along each axis. Of each axis, a quarter of all features are sines and a quarter cosines.
    """
    # The waves of an axis are made on the host in float64. The grid has up to a gigabyte: JAX makes it, so that it is not
    # allocated where a network is traced for its shapes.
    omega = 1.0 / 10000 ** (np.arange(d // 4) / (d // 4))

    def waves(at):
        return jnp.asarray(
            np.concatenate([f(np.outer(at, omega)) for f in (np.sin, np.cos)], axis=-1), jnp.float32
        )

    shape = (len(rows), len(columns), d // 2)
    by_column = waves(columns)[None]
    by_row = waves(rows)[:, None]
    return jnp.concatenate(
        [jnp.broadcast_to(by_column, shape), jnp.broadcast_to(by_row, shape)], axis=-1
    )


class Embedding(nnx.Module):
    """A table of `count` vectors, looked up by integer. The result has the table's dtype."""

    def __init__(self, count: int, features: int, *, rngs: nnx.Rngs):
        self.embedding = param(0.02 * jax.random.normal(rngs.params(), (count, features)), "weight")

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        return self.embedding.get_value()[ids]
