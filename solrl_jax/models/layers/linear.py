"""Linear layers."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.parameter import param
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.matmul import lazy_matmul, matmul


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
