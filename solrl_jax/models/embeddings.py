"""What comes before the blocks of every transformer here: patches, timesteps and texts to vectors of the network's width."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from solrl_jax.models.layers import Linear, param
from solrl_jax.numerics.matmul import matmul


class PatchProjection(nnx.Module):
    """A convolution whose stride is its kernel size, as a product over flattened patches."""

    def __init__(self, patch: int, n_in: int, n_out: int, *, bias: bool = True, rngs: nnx.Rngs):
        init = nnx.initializers.xavier_uniform()
        kernel = init(rngs.params(), (patch * patch * n_in, n_out)).reshape(patch, patch, n_in, n_out)
        self.kernel = param(kernel, "weight", "conv")
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None
        self.patch = patch

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b rows columns d"]:
        (b, h, w, c), p = x.shape, self.patch
        patches = x.reshape(b, h // p, p, w // p, p, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h // p, w // p, p * p * c)
        kernel = self.kernel.get_value().reshape(p * p * c, -1)
        y = matmul(patches, kernel)
        return y if self.bias is None else y + self.bias.get_value().astype(x.dtype)


class TextProjection(nnx.Module):
    """Two linears with an activation between (PixArt's, diffusers' `PixArtAlphaTextProjection`)."""

    def __init__(self, n_in: int, d: int, *, act: Callable[[Array], Array] = jax.nn.gelu, rngs: nnx.Rngs):
        self.linear_1, self.linear_2 = Linear(n_in, d, rngs=rngs), Linear(d, d, rngs=rngs)
        self.act = act

    def __call__(self, text: Float[Array, "... n_in"]) -> Float[Array, "... d"]:
        return self.linear_2(self.act(self.linear_1(text)))


class TimestepMLP(nnx.Module):
    """A number (a time, a guidance scale) to a vector: sinusoids, then two linears with SiLU between."""

    def __init__(self, d: int, *, rngs: nnx.Rngs):
        self.linear_1, self.linear_2 = Linear(256, d, rngs=rngs), Linear(d, d, rngs=rngs)

    def __call__(self, value: Float[Array, " b"], dtype: DTypeLike) -> Float[Array, "b d"]:
        return self.linear_2(jax.nn.silu(self.linear_1(sinusoid(value).astype(dtype))))


def sinusoid(value: Float[Array, " b"], dim: int = 256) -> Float[Array, "b {dim}"]:
    """Cosines, then sines, of `value` at `dim / 2` frequencies from 1 down to 1/10000; float32."""
    # on the host: the exponent in float32 as in the released code, its exponential rounded once (NumPy's own float32 `exp` is
    # off by an ulp in every second one, and at t = 1000 an ulp of a frequency is 1e-4 of an angle)
    exponent = np.float32(-math.log(10000)) * np.arange(dim // 2, dtype=np.float32) / np.float32(dim // 2)
    frequency = np.exp(exponent.astype(np.float64)).astype(np.float32)
    angle = value.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
