"""The parts that decoders of language models share as text encoders: grouped-query attention with
rotary positions, the gated MLP, and the layer of Qwen.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.loading.config_file import unsupported


def require_full_attention(network: str, fields: Mapping[str, Any], layers: int) -> None:
    """Checks that a configuration does not ask for sliding-window attention in any layer.

    Args:
        network: name of the network, for the error message.
        fields: the contents of a `config.json`, of which `use_sliding_window` and `layer_types` are
            read. Both may be missing or None.
        layers: number of layers.

    Raises:
        ValueError: `use_sliding_window` is true, or `layer_types` is not a list of one
            "full_attention" per layer. The message names the field.
    """
    full_attention = ["full_attention"] * layers
    for name, accepted in (("use_sliding_window", False), ("layer_types", full_attention)):
        value = fields.get(name)
        if value is not None and value != accepted:
            raise unsupported(network, name, value, "full causal attention in every layer")


def causal_mask(attention_mask: Bool[Array, "b l"]) -> Bool[Array, "b 1 l l"]:
    """Returns a causal mask that also leaves out padding.

    Args:
        attention_mask: true on tokens, false on padding.

    Returns:
        A mask [b, 1, query, key], true where the key is a token at the query's position or before
        it. (The axis of size 1 stands for all heads.)
    """
    position = jnp.arange(attention_mask.shape[1])
    return (position[:, None] >= position) & attention_mask[:, None, None, :]


class PreNormLayer(nnx.Module):
    """A decoder layer: attention, then a SiLU-gated MLP, each with an RMSNorm before it and a
    residual connection.

    Args:
        attention: the attention module of the layer, called as `attention(x, mask)` with tokens of
            `features` features; it returns tokens of the same form.
        features: number of features of a token.
        hidden: hidden width of the MLP.
        eps: epsilon of both norms.
        rngs: random number generators for the initial weights of the MLP.
    """

    def __init__(
        self,
        attention: "GroupedQueryAttention",
        features: int,
        hidden: int,
        eps: float,
        *,
        rngs: nnx.Rngs,
    ):
        self.self_attn = attention
        self.mlp = GatedMLP(features, hidden, jax.nn.silu, rngs=rngs)
        self.input_layernorm = RMSNorm(features, eps=eps)
        self.post_attention_layernorm = RMSNorm(features, eps=eps)

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        """Applies attention, then the gated MLP. Each reads a norm of its input, and its result is
        added to the input.

        Args:
            x: hidden states of the tokens.
            mask: true where a query (third axis) attends to a key (last axis), for every head.

        Returns:
            An array of the shape and dtype of `x`.
        """
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class GroupedQueryAttention(nnx.Module):
    """Softmax attention with rotary positions, in which several query heads share one key and value
    head. The output layer is included.

    Whether the attention is causal is up to the mask of the call.

    Args:
        features: number of features of a token.
        heads: number of query heads.
        key_value_heads: number of key and value heads, a divisor of `heads`.
        head_dim: number of features of one head, an even number.
        theta: base of the rotary frequencies.
        input_bias: whether the linear layers to queries, keys and values have biases.
        output_bias: whether the output layer has a bias.
        norm_eps: epsilon of the RMS norms of each head of queries and keys, before they are
            rotated. None: no such norms.
        scale: factor of the logits. None: 1 / sqrt(head_dim).
        softcap: a number c that replaces the scaled logits by `c tanh(logits / c)`, before the
            mask. None: no cap.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        key_value_heads: int,
        head_dim: int,
        theta: float,
        *,
        input_bias: bool,
        output_bias: bool,
        norm_eps: float | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rngs: nnx.Rngs,
    ):
        self.q_proj = Linear(features, heads * head_dim, bias=input_bias, rngs=rngs)
        self.k_proj = Linear(features, key_value_heads * head_dim, bias=input_bias, rngs=rngs)
        self.v_proj = Linear(features, key_value_heads * head_dim, bias=input_bias, rngs=rngs)
        self.o_proj = Linear(heads * head_dim, features, bias=output_bias, rngs=rngs)
        self.q_norm = None if norm_eps is None else RMSNorm(head_dim, eps=norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(head_dim, eps=norm_eps)
        self.head_dim = head_dim
        self.theta = theta
        self.scale = scale
        self.softcap = softcap

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        """Applies the attention, with rotary positions, and the output layer. The input is not
        added.

        Args:
            x: the normalized tokens, at positions 0 to l - 1.
            mask: true where a query (third axis) attends to a key (last axis), for every head. The
                output of a query without a key is finite, but has no meaning.

        Returns:
            One output per token, of the shape and dtype of `x`.
        """

        def heads(y: Float[Array, "b l nh"]) -> Float[Array, "b l n h"]:
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        q = heads(self.q_proj(x))
        k = heads(self.k_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out = attention(
            rotate(q, self.theta),
            rotate(k, self.theta),
            heads(self.v_proj(x)),
            mask,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class GatedMLP(nnx.Module):
    """A gated MLP without biases (arXiv 2002.05202), of three linear layers:
    `down_proj(activation(gate_proj(x)) * up_proj(x))`.

    Args:
        d: number of input and output features.
        hidden: number of hidden features, which `gate_proj` and `up_proj` return.
        activation: elementwise function that is applied to the gate.
        rngs: random number generators for the initial weights.
    """

    def __init__(
        self, d: int, hidden: int, activation: Callable[[Array], Array], *, rngs: nnx.Rngs
    ):
        self.gate_proj = Linear(d, hidden, bias=False, rngs=rngs)
        self.up_proj = Linear(d, hidden, bias=False, rngs=rngs)
        self.down_proj = Linear(hidden, d, bias=False, rngs=rngs)
        self.activation = activation

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        """Computes `down_proj(activation(gate_proj(x)) * up_proj(x))` for each token. The input is
        not added.

        Args:
            x: the tokens, with d features.

        Returns:
            An array of the shape and dtype of `x`.
        """
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Float[Array, "b l n h"], theta: float) -> Float[Array, "b l n h"]:
    """Applies rotary position embedding (arXiv 2104.09864) to queries or keys.

    Features i and i + h/2 of a head form a pair, which is rotated by the angle `position *
    theta^(-2i / h)`. It is computed in float32.

    Args:
        x: queries or keys at positions 0 to l - 1: [batch, positions, heads, features]. The number
            of features h is even.
        theta: base of the frequencies, a positive number.

    Returns:
        An array of the shape and dtype of `x`.
    """
    length = x.shape[1]
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency  # [length, 1, half]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
