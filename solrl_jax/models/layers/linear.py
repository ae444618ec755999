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
    """A linear layer `y = x W + b`.

    The weight `kernel` [in, out] is an array at first. `Component` may replace it by a `Leaf`: a
    quantized or 16-bit weight, or a weight with a LoRA adapter.

    Args:
        n_in: The number of input features.
        n_out: The number of output features.
        bias: Whether to add a bias, which is zero at first.
        layout: The shape of the weight in PyTorch checkpoints: "linear" for [out, in], or
            "pointwise" for the [out, in, 1, 1] of a 1x1 convolution.
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
        """Computes `x W + b`, or `x W` without a bias, as an array.

        Args:
            x: The input, of a floating-point dtype, with `n_in` features in the last axis: an array
                of any rank, or a lazy activation [b, s, n_in].

        Returns:
            An array with `n_out` features in the last axis, in the dtype of `x` (for a
            `HalfPrecisionWeight`, an FP16 or BF16 weight for float32 inputs, in the dtype of the
            weight).

        Raises:
            ValueError: If the array `x` is not of a floating-point dtype; or if it does not have
                `n_in` features and the weight is in NVFP4.
            TypeError: If `x` does not have `n_in` features and the weight is not in NVFP4.
        """
        if isinstance(x, LazyActivation):
            return self.lazy(x).value
        y = matmul(x, self.kernel.get_value())
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)

    def lazy(self, x: Activation) -> LazyActivation:
        """Applies the layer, and returns `x W + b` as a lazy activation.

        The matmul is computed now; for a weight in INT8, its scales are applied now, too. The bias
        and the scales of a matmul in FP8 or NVFP4 are left to the layer that reads the result,
        whose kernel applies them on the fly.

        Args:
            x: The input [b, s, in], an array or a lazy activation (one that is computed when it is
                read). A lazy one is computed here. For a weight in FP8, INT8 or NVFP4, only codes
                and scales of `x` are written to memory; for any other weight, `x` itself is.

        Returns:
            The lazy activation [b, s, out], in the dtype of `x` (for a `HalfPrecisionWeight`, an
            FP16 or BF16 weight for float32 inputs, in the dtype of the weight).
        """
        x = as_lazy(x)
        y = lazy_matmul(x, self.kernel.get_value())
        if self.bias is None:
            return y
        return y.map(jnp.add, self.bias.get_value().astype(x.dtype)[None, None])

    def activated(self, x: Activation, f: Callable[[Array], Array]) -> Activation:
        """Applies the layer, then `f`, and returns `f(x W + b)` as a lazy activation.

        The matmul is computed now. The addition of the bias and `f` are left to the layer that
        reads the result, whose kernel does them on the fly.

        Args:
            x: The input [b, s, in], an array or a lazy activation (one that is computed when it is
                read).
            f: An elementwise function of arrays of any shape, for example `jax.nn.gelu`.

        Returns:
            The lazy activation [b, s, out], in the dtype of `x` (for a `HalfPrecisionWeight`, an
            FP16 or BF16 weight for float32 inputs, in the dtype of the weight).
        """
        return self.lazy(x).map(f)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is quantized, in any format. If so, no gradient may be taken of the
        layer's result. A weight with a LoRA adapter (whose base is never quantized) and a
        `HalfPrecisionWeight` (FP16 or BF16) are not quantized.
        """
        return isinstance(self.kernel.get_value(), Quantized)
