"""T5's encoder (arXiv 1910.10683, section 2.1; version 1.1): `T5EncoderModel` of transformers in Flax NNX.

A pre-norm transformer that looks both ways. Positions enter only as a bias on the attention logits: one number for each head
and each bucket of distances, the same in every layer. Logits are not scaled, norms subtract no mean, linears have no bias.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported


@dataclasses.dataclass(frozen=True)
class T5Config(ReleasedConfig):
    """The fields of a released `config.json` that the encoder reads."""

    network = "T5EncoderModel"
    model_type = "t5"

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
    def from_dict(cls, fields: Mapping[str, Any]) -> "T5Config":
        config = super().from_dict(fields)
        # transformers would obey the last two fields, which repeat `feed_forward_proj`
        for name, accepted in (
            ("is_decoder", False),
            ("dense_act_fn", "gelu_new"),
            ("is_gated_act", True),
        ):
            if (value := fields.get(name, accepted)) != accepted:
                raise unsupported(cls.network, name, value, repr(accepted))
        return config

    def check(self) -> None:
        self.require_one_of("feed_forward_proj", ("gated-gelu",))
        self.require(
            self.relative_attention_num_buckets >= 4, "relative_attention_num_buckets", "4 or more"
        )
        exact = self.relative_attention_num_buckets // 4  # distances up to here have a bucket each
        self.require(
            self.relative_attention_max_distance > exact,
            "relative_attention_max_distance",
            f"more than {exact}",
        )


class T5EncoderModel(nnx.Module):
    """The token table and the encoder."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        # in PyTorch `encoder.embed_tokens` is the same table; files hold it once
        self.shared = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        self.encoder = T5Stack(config, rngs=rngs)

    def __call__(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        """The normalised last hidden states, in the dtype of the token table. Padding is seen, as in the released pipelines."""
        return self.encoder(self.shared(input_ids))


class T5Stack(nnx.Module):
    """The blocks of the encoder."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.config = c
        self.block = stack(c.num_layers, lambda r: T5Block(c, rngs=r), rngs)
        # Files hold the bias in block 0. Stacked blocks must be alike, so it lies beside them, under its whole name.
        table = jax.random.normal(
            rngs.params(), (c.relative_attention_num_buckets, c.num_heads)
        ) / math.sqrt(c.d_model)
        self.relative_attention_bias = param(
            table, "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        )
        self.final_layer_norm = RMSNorm(c.d_model, eps=c.layer_norm_epsilon)

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        """Embedded tokens to normalised last hidden states."""
        c = self.config
        buckets = relative_buckets(
            x.shape[1], c.relative_attention_num_buckets, c.relative_attention_max_distance
        )
        bias = self.relative_attention_bias.get_value()[buckets].transpose(2, 0, 1)[None]
        return self.final_layer_norm(scan_blocks(self.block, lambda block, x: block(x, bias), x))


class T5Block(nnx.Module):
    """Attention, then the feed-forward network: both pre-norm, and added to their input."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(c.d_model, eps=c.layer_norm_epsilon)

        attend = nnx.Dict(SelfAttention=T5Attention(c, rngs=rngs), layer_norm=norm())
        self.layer = nnx.List(
            [attend, nnx.Dict(DenseReluDense=T5FeedForward(c, rngs=rngs), layer_norm=norm())]
        )

    def __call__(
        self, x: Float[Array, "b l d"], bias: Float[Array, "1 n l l"]
    ) -> Float[Array, "b l d"]:
        attend, feed_forward = self.layer
        x = x + attend.SelfAttention(attend.layer_norm(x), bias)
        return x + feed_forward.DenseReluDense(feed_forward.layer_norm(x))


class T5Attention(nnx.Module):
    """Softmax attention with logits `q k^T + bias`, not scaled. `num_heads * d_kv` need not be `d_model`."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        inner = c.num_heads * c.d_kv
        self.q, self.k, self.v = (Linear(c.d_model, inner, bias=False, rngs=rngs) for _ in range(3))
        self.o = Linear(inner, c.d_model, bias=False, rngs=rngs)
        self.heads = c.num_heads

    def __call__(
        self, x: Float[Array, "b l d"], bias: Float[Array, "1 n l l"]
    ) -> Float[Array, "b l d"]:
        def heads(y):
            return y.reshape(*y.shape[:2], self.heads, -1)

        out = attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), scale=1.0, bias=bias)
        return self.o(out.reshape(*x.shape[:2], -1))


class T5FeedForward(nnx.Module):
    """A GELU-gated linear unit (arXiv 2002.05202)."""

    def __init__(self, c: T5Config, *, rngs: nnx.Rngs):
        self.wi_0, self.wi_1 = (Linear(c.d_model, c.d_ff, bias=False, rngs=rngs) for _ in range(2))
        self.wo = Linear(c.d_ff, c.d_model, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        return self.wo(jax.nn.gelu(self.wi_0(x)) * self.wi_1(x))  # in its tanh form


def relative_buckets(
    length: int, count: int, max_distance: int
) -> Int[np.ndarray, "{length} {length}"]:
    """The bucket of each pair [query, key] of positions.

    The upper half of the `count` buckets is for keys after the query. In each half, distances below `count // 4` have a bucket
    each. Larger distances share the others by their logarithm, and all from `max_distance` on share the last.
    """
    offset = np.arange(length) - np.arange(length)[:, None]  # key minus query
    distance = np.abs(offset)
    half = count // 2
    exact = half // 2
    # In float32, in the order of the released code: some distances lie exactly on the border of two buckets.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    far = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + far.astype(np.int32), half - 1)
    return np.where(offset > 0, half, 0) + np.where(distance < exact, distance, far)
