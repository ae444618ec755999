"""T5's encoder (arXiv 1910.10683, section 2.1; version 1.1): `T5EncoderModel` of transformers in Flax NNX.

A pre-norm transformer that looks both ways. Where a token stands is told by a bias on the attention logits alone: one number a
head for each bucket of distances, the same in every layer. Logits are not scaled, norms take no mean, linears have no bias.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.attention import attention
from solrl_jax.models.layers import Embedding, Linear, RMSNorm, param, scan_blocks, stack

ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}  # `dense_act_fn` that goes with each `feed_forward_proj`


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The fields of a released `config.json` on which the encoder depends, under their own names, with T5's own defaults."""

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """From a `config.json`; fields without influence on the encoder are passed over.

        Raises ValueError naming a field whose value this port does not support.
        """
        _accept("model_type", fields.get("model_type", "t5"), ("t5",))
        _accept("is_decoder", fields.get("is_decoder", False), (False,))
        config = cls(**{f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name in fields})
        for field in dataclasses.fields(cls):
            value = getattr(config, field.name)
            if field.type is int and (type(value) is not int or value <= 0):
                raise ValueError(f"T5EncoderModel: {field.name}={value!r}; accepted: a positive integer")
        _accept("feed_forward_proj", config.feed_forward_proj, tuple(ACTIVATIONS))
        # two more fields say the same again, and would be obeyed
        activation, gated = ACTIVATIONS[config.feed_forward_proj], config.feed_forward_proj.startswith("gated")
        _accept("dense_act_fn", fields.get("dense_act_fn", activation), (activation,))
        _accept("is_gated_act", fields.get("is_gated_act", gated), (gated,))
        if (buckets := config.relative_attention_num_buckets) < 4:
            raise ValueError(f"T5EncoderModel: relative_attention_num_buckets={buckets}; accepted: 4 or more")
        if (distance := config.relative_attention_max_distance) <= buckets // 4:
            accepted = f"more than {buckets // 4}, up to which each distance has its bucket"
            raise ValueError(f"T5EncoderModel: relative_attention_max_distance={distance}; accepted: {accepted}")
        return config


class T5EncoderModel(nnx.Module):
    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        # the one table of tokens: files do not repeat it as `encoder.embed_tokens`, which is tied to it
        self.shared = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        self.encoder = T5Stack(config, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"] | None = None) -> Float[Array, "b l d"]:
        """The normalised last hidden states, in the dtype of the token table.

        attention_mask: true (or 1) on tokens that may be looked at; None: all, padding too, as FLUX and Stable Diffusion 3 do.
        """
        return self.encoder(self.shared(input_ids), attention_mask)


class T5Stack(nnx.Module):
    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.config = c
        self.block = stack(c.num_layers, lambda r: T5Block(c, rngs=r), rngs)
        # Files have it in block 0. The blocks are stacked and must be alike, so it lies beside them, under its whole name.
        table = jax.random.normal(rngs.params(), (c.relative_attention_num_buckets, c.num_heads)) / math.sqrt(c.d_model)
        self.relative_attention_bias = param(table, "block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        self.final_layer_norm = RMSNorm(c.d_model, eps=c.layer_norm_epsilon)

    def __call__(self, x: Float[Array, "b l d"], attention_mask: Bool[Array, "b l"] | None) -> Float[Array, "b l d"]:
        """Embedded tokens to normalised last hidden states."""
        mask = None if attention_mask is None else attention_mask.astype(bool)[:, None, None, :]
        bias = self.position_bias(x.shape[1])
        return self.final_layer_norm(scan_blocks(self.block, lambda block, x: block(x, bias, mask), x))

    def position_bias(self, length: int) -> Float[Array, "1 n l l"]:
        """What is added to the logits of each head, query by key; in the dtype of its table."""
        c = self.config
        buckets = relative_buckets(length, c.relative_attention_num_buckets, c.relative_attention_max_distance)
        return self.relative_attention_bias.get_value()[buckets].transpose(2, 0, 1)[None]


class T5Block(nnx.Module):
    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.layer = nnx.List([T5LayerSelfAttention(c, rngs=rngs), T5LayerFF(c, rngs=rngs)])

    def __call__(
        self, x: Float[Array, "b l d"], bias: Float[Array, "1 n l l"], mask: Bool[Array, "b 1 1 l"] | None
    ) -> Float[Array, "b l d"]:
        attend, feed_forward = self.layer
        return feed_forward(attend(x, bias, mask))


class T5LayerSelfAttention(nnx.Module):
    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.SelfAttention = T5Attention(c, rngs=rngs)
        self.layer_norm = RMSNorm(c.d_model, eps=c.layer_norm_epsilon)

    def __call__(self, x, bias, mask):
        return x + self.SelfAttention(self.layer_norm(x), bias, mask)


class T5LayerFF(nnx.Module):
    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.DenseReluDense = (T5DenseGatedActDense if c.feed_forward_proj == "gated-gelu" else T5DenseActDense)(c, rngs=rngs)
        self.layer_norm = RMSNorm(c.d_model, eps=c.layer_norm_epsilon)

    def __call__(self, x):
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Attention(nnx.Module):
    """Logits are `q k^T + bias`, not scaled: the factor is in the weights. `num_heads * d_kv` need not be `d_model`."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        inner = c.num_heads * c.d_kv
        self.q, self.k, self.v = (Linear(c.d_model, inner, bias=False, rngs=rngs) for _ in range(3))
        self.o = Linear(inner, c.d_model, bias=False, rngs=rngs)
        self.heads = c.num_heads

    def __call__(self, x, bias, mask):
        heads = lambda y: y.reshape(*y.shape[:2], self.heads, -1)
        out = attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), mask, scale=1.0, bias=bias)
        return self.o(out.reshape(*x.shape[:2], -1))


class T5DenseActDense(nnx.Module):
    """The feed-forward network of the first version."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.wi = Linear(c.d_model, c.d_ff, bias=False, rngs=rngs)
        self.wo = Linear(c.d_ff, c.d_model, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.wo(jax.nn.relu(self.wi(x)))


class T5DenseGatedActDense(nnx.Module):
    """GELU-gated linear unit (arXiv 2002.05202), of version 1.1."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.wi_0, self.wi_1 = (Linear(c.d_model, c.d_ff, bias=False, rngs=rngs) for _ in range(2))
        self.wo = Linear(c.d_ff, c.d_model, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.wo(jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x))


def relative_buckets(length: int, count: int, max_distance: int) -> np.ndarray:
    """The bucket [query, key] of each pair of positions: the upper half of the `count` buckets for keys after the query.

    In each half, distances below `count // 4` have a bucket each; those above share the rest by their logarithm, up to
    `max_distance`, from where on they share the last.
    """
    offset = np.arange(length) - np.arange(length)[:, None]  # key minus query
    distance, half = np.abs(offset), count // 2
    exact = half // 2
    # float32, in the order of operations of the released code: whole logarithms lie on the border of two buckets
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    far = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + far.astype(np.int32), half - 1)
    return np.where(offset > 0, half, 0) + np.where(distance < exact, distance, far)


def _accept(field: str, value: Any, accepted: tuple) -> None:
    if value not in accepted:
        raise ValueError(f"T5EncoderModel: {field}={value!r}; accepted: {', '.join(map(repr, accepted))}")
