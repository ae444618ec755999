"""Adaptive layer normalization: a norm whose shift, scale and gate come from a condition vector."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.modulation import Modulate, modulate
from solrl_jax.models.layers.norm import LayerNorm

EPS = 1e-6  # the epsilon of every norm in FLUX and Stable Diffusion 3


class AdaLayerNorm(nnx.Module):
    """A layer norm whose modulation (shifts, scales, gates) is computed from a condition vector by
    a linear layer: adaLN-Zero (arXiv 2212.09748, section 3.2).

    `vectors(condition)` returns all modulation vectors, a list of arrays [b, 1, d] in the order of
    the linear layer's output. The call `norm(x, shift, scale)` takes two of them. The caller
    applies SiLU to the condition before, and the gates after. The norm has no weights of its own,
    and its epsilon is 1e-6. The initial weights of the linear layer are not zero, unlike in the
    paper.

    Args:
        d: The number of features of the tokens and of the condition.
        num_vectors: The number of modulation vectors: for example 6 for shift, scale and gate of
            attention and MLP.
        bias: Whether the linear layer has a bias.
        modulate: Computes `x (1 + scale) + shift` from (x, shift, scale). The two functions that
            networks use differ in rounding only: `modulate` (the default) rounds after each
            operation, `modulate_rounding_once` at the end.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self,
        d: int,
        num_vectors: int,
        *,
        bias: bool = True,
        modulate: Modulate = modulate,
        rngs: nnx.Rngs,
    ):
        self.linear = Linear(d, num_vectors * d, bias=bias, rngs=rngs)
        self.norm = LayerNorm(d, eps=EPS, affine=False)
        self.num_vectors = num_vectors
        self.modulate = modulate

    def vectors(self, condition: Float[Array, "b d"]) -> list[Float[Array, "b 1 d"]]:
        """Computes the modulation vectors from the condition.

        Args:
            condition: One vector per sample, such as the sum of embedded timestep and text, after
                its SiLU.

        Returns:
            A list of `num_vectors` arrays [b, 1, d], in the dtype of `condition` and the order of
            the linear layer's output. The caller knows which are shifts, scales and gates.
        """
        return jnp.split(self.linear(condition)[:, None], self.num_vectors, axis=-1)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        shift: Float[Array, "b 1 d"],
        scale: Float[Array, "b 1 d"],
    ) -> Activation:
        """Returns `norm(x) (1 + scale) + shift` as a lazy activation, which is not computed until a
        layer reads it.

        Args:
            x: The tokens before the norm, of any floating-point dtype.
            shift: The shift of each sample and feature, one of the arrays that the method `vectors`
                returns.
            scale: The scale of each sample and feature, another of these arrays.

        Returns:
            The lazy activation [b, s, d], in the dtype of `x`.
        """
        return self.norm.modulated(x, shift, scale, self.modulate)
