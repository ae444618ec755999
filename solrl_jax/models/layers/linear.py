"""Linear layers."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers.activation import Activation, as_lazy
from solrl_jax.models.layers.parameter import param
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.leaf import Quantized
from solrl_jax.quant.matmul import lazy_matmul, matmul


class Linear(nnx.Module):
    """`y = x W + b`. The weight `kernel` [in, out] may be an array, or any leaf that
    `quant.matmul` accepts, such as a quantized or an adapted one.

    Args:
        n_in: The number of input features.
        n_out: The number of output features.
        bias: Whether to add a bias, which is zero at first.
        layout: The layout of the weight in PyTorch: "linear", or "pointwise" for a 1x1 convolution.
            It matters for checkpoints only.
        rngs: Random number generators for the initial weight, which has PyTorch's default
            distribution.
    """

    def __init__(
        self, n_in: int, n_out: int, *, bias: bool = True, layout: str = "linear", rngs: nnx.Rngs
    ):
        init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.kernel = param(init(rngs.params(), (n_in, n_out), jnp.float32), "weight", layout)
        self.bias = param(jnp.zeros(n_out), "bias") if bias else None

    def __call__(self, x: Float[Array, "... n_in"] | LazyActivation) -> Float[Array, "... n_out"]:
        """Computes `x W + b` for an array of any rank or for a lazy activation.

        Args:
            x: The input, with the `n_in` features in the last axis, of a floating-point dtype.

        Returns:
            An array with `n_out` features in the last axis, also for a lazy input. It has the dtype
            of `x`, unless the weight is a `HalfPrecisionWeight`, which gives its own dtype.

        Raises:
            ValueError: If `x` is an array that is not of a floating-point dtype, or that does not
                have the `n_in` features of an NVFP4 weight.
            TypeError: If `x` does not have the `n_in` features of another weight.
        """
        if isinstance(x, LazyActivation):
            return self.lazy(x).value
        y = matmul(x, self.kernel.get_value())
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)

    def lazy(self, x: Activation) -> LazyActivation:
        """Applies the layer. Scales and bias are left to the layer that reads the result.

        Args:
            x: The input [b, s, in], an array or a lazy activation. Unless the weight quantizes its
                input, a lazy one is computed and written to memory.

        Returns:
            The lazy activation [b, s, out], in the dtype of `x` (of the weight if that is a
            `HalfPrecisionWeight`). The matmul itself is computed at once.
        """
        x = as_lazy(x)
        y = lazy_matmul(x, self.kernel.get_value())
        if self.bias is None:
            return y
        return y.map(jnp.add, self.bias.get_value().astype(x.dtype)[None, None])

    def activated(self, x: Activation, f: Callable[[Array], Array]) -> Activation:
        """`f(x W + b)`, of which the layer that reads the result adds the bias and applies `f`.

        Args:
            x: The input [b, s, in], an array or a lazy activation.
            f: An elementwise function of arrays of any shape, for example `jax.nn.gelu`.

        Returns:
            The lazy activation [b, s, out], in the dtype of `x` (of the weight if that is a
            `HalfPrecisionWeight`). The matmul itself is computed at once.
        """
        return self.lazy(x).map(f)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is a quantized leaf, of any format.

        Quantized weights are used only where no gradient is taken.
        """
        return isinstance(self.kernel.get_value(), Quantized)
