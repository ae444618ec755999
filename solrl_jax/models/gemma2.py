"""Gemma 2's decoder as a text encoder (arXiv 2408.00118, section 2): `Gemma2Model` of transformers in Flax NNX.

Layers alternate between attention to a sliding window and to everything before; keys and values are shared by groups of
query heads; attention logits are soft-capped; each sublayer is normalised before and after. There is no language-model head:
what comes out is the last, normalised hidden state of every token.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.attention import attention
from solrl_jax.models.layers import Embedding, Linear, RMSNorm, gather, stack

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Gemma2Config:
    """The fields of a released `config.json` on which the hidden states depend, under their own names (defaults: 2B)."""

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
    layer_types: tuple[str, ...] = (SLIDING, FULL) * 13
    attn_logit_softcapping: float | None = 50.0

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """From a `config.json` of transformers 4 or 5; fields without influence on the hidden states are passed over.

        Raises ValueError naming a field whose value this port does not support.
        """
        _accept("model_type", fields.get("model_type", "gemma2"), ("gemma2",))
        _accept("use_bidirectional_attention", fields.get("use_bidirectional_attention"), (None, False))
        given = {f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name in fields}
        # transformers 5 puts `rope_theta` in here; before that it stood by itself
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        _accept("rope_type", rope.get("rope_type", rope.get("type", "default")), ("default",))
        given |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        depth = given.get("num_hidden_layers", cls.num_hidden_layers)
        types = given.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(depth)]  # transformers 4 has none
        config = cls(**given | {"layer_types": tuple(types)})

        for field in dataclasses.fields(cls):
            value = getattr(config, field.name)
            if field.type is int and (type(value) is not int or value <= 0):
                raise ValueError(f"Gemma2Model: {field.name}={value!r}; accepted: a positive integer")
        _accept("hidden_activation", config.hidden_activation, ("gelu_pytorch_tanh",))
        for kind in config.layer_types:
            _accept("layer_types", kind, (SLIDING, FULL))
        _accept("len(layer_types)", len(config.layer_types), (config.num_hidden_layers,))
        if config.num_attention_heads % config.num_key_value_heads:
            accepted = f"a divisor of num_attention_heads={config.num_attention_heads}"
            raise ValueError(f"Gemma2Model: num_key_value_heads={config.num_key_value_heads}; accepted: {accepted}")
        if config.head_dim % 2:
            raise ValueError(f"Gemma2Model: head_dim={config.head_dim}; accepted: an even number (rotary pairs)")
        return config


class Gemma2Model(nnx.Module):
    def __init__(self, config: Gemma2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = stack(config.num_hidden_layers, lambda r: DecoderLayer(config, rngs=r), rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=1.0)

    def __call__(self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]) -> Float[Array, "b l d"]:
        """The normalised last hidden states, in the dtype of the embedding table.

        attention_mask: true (or 1) on tokens, false on the padding after them; what comes out there is meaningless.
        """
        return self.decode(self.embed(input_ids), attention_mask)

    def embed(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        """Tokens to vectors. The factor is rounded to the table's dtype first, as in training."""
        x = self.embed_tokens(input_ids)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def decode(self, x: Float[Array, "b l d"], attention_mask: Bool[Array, "b l"]) -> Float[Array, "b l d"]:
        """Embedded tokens to normalised last hidden states."""
        position = jnp.arange(x.shape[1])
        distance = position[:, None] - position  # [query, key]
        full = (distance >= 0) & attention_mask.astype(bool)[:, None, None, :]
        sliding = full & (distance < self.config.sliding_window)
        is_sliding = jnp.array([kind == SLIDING for kind in self.config.layer_types])
        graphdef, params = nnx.split(self.layers)

        def step(x, layer):
            params, is_sliding = layer
            return nnx.merge(graphdef, gather(params))(x, jnp.where(is_sliding, sliding, full)), None

        x, _ = jax.lax.scan(step, x, (params, is_sliding))
        return self.norm(x)


class DecoderLayer(nnx.Module):
    def __init__(self, c: Gemma2Config, *, rngs: nnx.Rngs):
        norm = lambda: RMSNorm(c.hidden_size, eps=c.rms_norm_eps, offset=1.0)
        self.self_attn = Attention(c, rngs=rngs)
        self.mlp = MLP(c, rngs=rngs)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def __call__(self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]) -> Float[Array, "b l d"]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and soft-capped logits."""

    def __init__(self, c: Gemma2Config, *, rngs: nnx.Rngs):
        linear = lambda n_in, n_out: Linear(n_in, n_out, bias=c.attention_bias, rngs=rngs)
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.config = c

    def __call__(self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]) -> Float[Array, "b l d"]:
        c = self.config
        heads = lambda y: y.reshape(*y.shape[:2], -1, c.head_dim)
        q, k = rotate(heads(self.q_proj(x)), c.rope_theta), rotate(heads(self.k_proj(x)), c.rope_theta)
        v = heads(self.v_proj(x))
        out = attention(q, k, v, mask, scale=c.query_pre_attn_scalar**-0.5, softcap=c.attn_logit_softcapping)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """GELU-gated linear unit (arXiv 2002.05202)."""

    def __init__(self, c: Gemma2Config, *, rngs: nnx.Rngs):
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=False, rngs=rngs)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=False, rngs=rngs)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.down_proj(jax.nn.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x))


def rotate(x: Float[Array, "b l n h"], theta: float) -> Float[Array, "b l n h"]:
    """Rotary positions (arXiv 2104.09864): the pair of features (i, i + h/2) turns by `position * theta^(-2i / h)`.

    Angles and products in float32: at position 300 an angle in bfloat16 may be off by a radian.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency  # [length, 1, half]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _accept(field: str, value: Any, accepted: tuple) -> None:
    if value not in accepted:
        raise ValueError(f"Gemma2Model: {field}={value!r}; accepted: {', '.join(map(repr, accepted))}")
