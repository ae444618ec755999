"""Gemma 2's decoder as a text encoder (arXiv 2408.00118, section 2): `Gemma2Model` of transformers in Flax NNX.

A causal transformer. Its layers alternate between attention to a sliding window and to all tokens before. Groups of query heads
share keys and values. Attention logits are soft-capped. Each sublayer is normalised before and after. There is no
language-model head: the result is the last, normalised hidden state of every token.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported, with_rope_theta

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclasses.dataclass(frozen=True)
class Gemma2Config(ReleasedConfig):
    """The fields of a `config.json`, of transformers 4 or 5, that the hidden states depend on. The defaults are those of 2B."""

    network = "Gemma2Model"
    model_type = "gemma2"

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int = 4096
    layer_types: tuple[str, ...] = ()  # transformers 4 does not say it
    attn_logit_softcapping: float | None = 50.0

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Gemma2Config":
        given = with_rope_theta(cls.network, fields)
        if given.get("layer_types") is None:
            given.pop("layer_types", None)
        config = super().from_dict(given)
        if given.get("use_bidirectional_attention"):
            raise unsupported(
                cls.network,
                "use_bidirectional_attention",
                given["use_bidirectional_attention"],
                "None, False",
            )
        return config

    def check(self) -> None:
        self.require_one_of("hidden_activation", ("gelu_pytorch_tanh",))
        self.require_one_of("layer_types", (SLIDING, FULL))
        self.require(
            len(self.kinds) == self.num_hidden_layers,
            "layer_types",
            f"num_hidden_layers={self.num_hidden_layers} of them",
        )
        fits = self.num_attention_heads % self.num_key_value_heads == 0
        self.require(
            fits,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.layer_types or tuple(
            FULL if i % 2 else SLIDING for i in range(self.num_hidden_layers)
        )


class Gemma2Model(nnx.Module):
    """The token table and the decoder's layers."""

    def __init__(self, config: Gemma2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = stack(config.num_hidden_layers, lambda r: DecoderLayer(config, rngs=r), rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=1.0)

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l d"]:
        """The normalised last hidden states, in the dtype of the token table.

        attention_mask: true on tokens, false on the padding after them. The states of padding mean nothing.
        """
        return self.decode(self.embed(input_ids), attention_mask)

    def embed(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        """Tokens to vectors, times sqrt(d). The factor is rounded to the table's dtype first, as in training."""
        x = self.embed_tokens(input_ids)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def decode(
        self, x: Float[Array, "b l d"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l d"]:
        """Embedded tokens to normalised last hidden states."""
        position = jnp.arange(x.shape[1])
        distance = position[:, None] - position  # [query, key]
        full = (distance >= 0) & attention_mask[:, None, None, :]
        sliding = full & (distance < self.config.sliding_window)
        is_sliding = jnp.array([kind == SLIDING for kind in self.config.kinds])

        def apply(layer, x, is_sliding):
            return layer(x, jnp.where(is_sliding, sliding, full))

        return self.norm(scan_blocks(self.layers, apply, x, is_sliding))


class DecoderLayer(nnx.Module):
    """Attention, then MLP, each normalised before and after and added to its input. mask: true where a query may look."""

    def __init__(self, c: Gemma2Config, *, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(c.hidden_size, eps=c.rms_norm_eps, offset=1.0)

        self.self_attn = Attention(c, rngs=rngs)
        self.mlp = MLP(
            c.hidden_size, c.intermediate_size, jax.nn.gelu, rngs=rngs
        )  # in its tanh form
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and soft-capped logits."""

    def __init__(self, c: Gemma2Config, *, rngs: nnx.Rngs):
        def linear(n_in, n_out):
            return Linear(n_in, n_out, bias=c.attention_bias, rngs=rngs)

        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj, self.v_proj = (
            linear(c.hidden_size, c.num_key_value_heads * c.head_dim) for _ in range(2)
        )
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.config = c

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        c = self.config

        def heads(y):
            return y.reshape(*y.shape[:2], -1, c.head_dim)

        q = rotate(heads(self.q_proj(x)), c.rope_theta)
        k = rotate(heads(self.k_proj(x)), c.rope_theta)
        v = heads(self.v_proj(x))
        out = attention(
            q, k, v, mask, scale=c.query_pre_attn_scalar**-0.5, softcap=c.attn_logit_softcapping
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """A gated linear unit (arXiv 2002.05202). activation: that of the gate."""

    def __init__(
        self, d: int, hidden: int, activation: Callable[[Array], Array], *, rngs: nnx.Rngs
    ):
        self.gate_proj, self.up_proj = (Linear(d, hidden, bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = Linear(hidden, d, bias=False, rngs=rngs)
        self.activation = activation

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Float[Array, "b l n h"], theta: float) -> Float[Array, "b l n h"]:
    """Rotary positions (arXiv 2104.09864): rotates the features (i, i + h/2) by the angle `position * theta^(-2i / h)`.

    In float32: at position 300, an angle in bfloat16 may be wrong by a radian.
    """
    length = x.shape[1]
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency  # [length, 1, half]
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
