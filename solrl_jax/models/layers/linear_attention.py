"""Attention layers of SANA and Wan whose norms span all heads: linear attention among image tokens,
and cross-attention to the text.
"""

from flax import nnx
from jaxtyping import Array, Bool, Float

from solrl_jax.models.layers.activation import Activation, as_lazy
from solrl_jax.models.layers.attention import attention, attention_forward
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.quant.lazy import LazyActivation
from solrl_jax.quant.linear_attention import linear_attention


class AttentionProjections(nnx.Module):
    """The linear layers of an attention from one sequence to another: to queries, keys and values,
    and from the attended values to the output.

    A base class: subclasses compute the attention itself. The output layer is `to_out[0]`, as in
    diffusers. It leads back to the first of the three widths, and always has a bias.

    Args:
        widths: Three numbers of features: of a token of the attending sequence, of a token of the
            attended sequence, and of all heads together.
        heads: The number of heads, a divisor of the third width.
        normed: Whether queries and keys are normalized (RMSNorm), over the features of all heads
            together.
        bias: Whether the linear layers to queries, keys and values have biases.
        eps: The epsilon of the norms, 1e-5 by default.
        rngs: Random number generators for the initial weights.
    """

    def __init__(
        self,
        widths: tuple[int, int, int],
        heads: int,
        *,
        normed: bool,
        bias: bool = True,
        eps: float = 1e-5,
        rngs: nnx.Rngs,
    ):
        d, source, inner = widths
        self.to_q, self.to_k, self.to_v = (
            Linear(n, inner, bias=bias, rngs=rngs) for n in (d, source, source)
        )
        self.norm_q, self.norm_k = (RMSNorm(inner, eps=eps) if normed else None for _ in range(2))
        self.to_out = nnx.List([Linear(inner, d, rngs=rngs)])
        self.heads = heads
        self.head_dim = inner // heads

    def project(self, x: Activation, source: Activation) -> list[LazyActivation]:
        """Computes the queries of one sequence, and the keys and values of another.

        Args:
            x: The sequence that attends [b, n, d].
            source: The sequence that is attended to [b, l, d_source], which may be `x` itself.

        Returns:
            A list [queries [b, n, inner], keys [b, l, inner], values [b, l, inner]] of lazy
            activations. The matmuls, and the norms if there are any, are computed now. Biases, and
            the scales of matmuls in FP8 and NVFP4, are left to the layer that reads the result,
            except before a norm. inner is the number of features of all heads together, which lie
            side by side.
        """
        q = self.to_q.lazy(x)
        k = self.to_k.lazy(source)
        v = self.to_v.lazy(source)
        if self.norm_q is not None and self.norm_k is not None:
            q = as_lazy(self.norm_q(q.value))
            k = as_lazy(self.norm_k(k.value))
        return [q, k, v]


class LinearAttention(AttentionProjections):
    """Linear attention of one sequence to itself, with weights `relu(q) . relu(k)` instead of a
    softmax (arXiv 2410.10629, equation 1).

    The weights of each query are divided by their sum (plus 1e-15, so that a query with zero
    weights gets zeros). The work is linear in the number of tokens, because the sums over the keys
    (of `k v^T` and of `k`) are the same for all queries. They are computed in float32.

    Args:
        widths: `(d, d, inner)`: d features of a token, given twice, and inner features of all heads
            together.
        heads: The number of heads, a divisor of the third width.
        normed: Whether queries and keys are normalized (RMSNorm), over the features of all heads
            together.
        bias: Whether the linear layers to queries, keys and values have biases, True by default.
            The output layer always has one.
        eps: The epsilon of the norms, 1e-5 by default.
        rngs: Random number generators for the initial weights.
    """

    def __call__(self, x: Activation, grid: tuple[int, int]) -> Float[Array, "b n d"]:
        """Applies linear attention of the image tokens to each other, and the output layer.

        Args:
            x: The image tokens [b, n, d], an array or a lazy activation (one that is computed when
                it is read). Under sequence parallelism, these are the tokens of this device. They
                attend to the tokens of all devices, whose keys and values are gathered in float32.
            grid: Unused. The (rows, columns) of the tokens, for layers that replace this one and
                depend on positions (`BlockMixing`).

        Returns:
            The output [b, n, d] in the dtype of `x`. The input is not added.
        """
        x = as_lazy(x)
        q, k, v = self.project(x, x)
        return self.to_out[0](linear_attention(q, k, v, self.heads))


class CrossAttention(AttentionProjections):
    """Softmax attention from image tokens to text tokens.

    Args:
        widths: Three numbers of features: of an image token, of a text token, and of all heads
            together.
        heads: The number of heads, a divisor of the third width.
        normed: Whether queries and keys are normalized (RMSNorm), over the features of all heads
            together.
        bias: Whether the linear layers to queries, keys and values have biases, True by default.
            The output layer always has one.
        eps: The epsilon of the norms, 1e-5 by default.
        rngs: Random number generators for the initial weights.
    """

    def __call__(
        self,
        x: Float[Array, "b n d"],
        text: Float[Array, "b l d"],
        mask: Bool[Array, "b l"] | None = None,
    ) -> Float[Array, "b n d"]:
        """Applies softmax attention from image tokens to text tokens, and the output layer.

        If the linear layers are quantized, no gradient may be taken of the result, because
        quantized matmuls have none.

        Args:
            x: The image tokens, which attend. Under sequence parallelism, those of this device.
            text: The text tokens, which are attended to, in the dtype of `x`. Every device has all
                of them. They may have another number of features (the second of `widths`) than the
                image tokens.
            mask: True for text tokens, False for padding, which is not attended to. None: all text
                tokens are attended to.

        Returns:
            One output per image token, in the dtype of `x`. The input is not added. A sample whose
            mask is all False gets a mean of the values (on TPUs with the zeros that pad them).
        """
        q, k, v = (
            y.value.reshape(*y.value.shape[:2], self.heads, -1)
            for y in self.project(x, as_lazy(text))
        )
        # no gradient is taken of quantized layers
        attend = attention_forward if self.to_q.is_quantized else attention
        out = attend(q, k, v, mask=None if mask is None else mask[:, None, None, :])
        return self.to_out[0](out.reshape(*x.shape[:2], -1))
