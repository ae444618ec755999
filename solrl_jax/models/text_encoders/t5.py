"""T5's encoder (arXiv 1910.10683, section 2.1; version 1.1) and UMT5's (arXiv 2304.09151):
`T5EncoderModel` and `UMT5EncoderModel` of transformers in Flax NNX.

A bidirectional transformer with normalization before each sublayer. Positions enter only as a bias
on the attention logits, which depends on the head and on the distance between query and key. The
layers of T5 share one table of biases; each layer of UMT5 has its own. Logits are not scaled, the
norms subtract no mean, and linear layers have no bias.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.parameter import param
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported

T = TypeVar("T", bound="T5Config")


@dataclasses.dataclass(frozen=True)
class T5Config(ReleasedConfig):
    """The configuration of T5's encoder: the fields of a released `config.json` that it depends on.

    Other fields of the file are ignored, except those that would change the network (another
    `model_type`, `quantization_config`, `is_decoder`, `dense_act_fn`, `is_gated_act`), for which
    `from_dict` raises ValueError. The constructor raises ValueError for a value that is not
    supported. The defaults are those of transformers; that of `feed_forward_proj` is not supported,
    so a file has to set it.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        d_model: number of features of a token.
        d_kv: number of features of one attention head. `num_heads * d_kv` may differ from
            `d_model`.
        d_ff: hidden width of the MLPs.
        num_layers: number of layers of the encoder.
        num_heads: number of attention heads.
        relative_attention_num_buckets: number of buckets into which the distances between tokens
            are divided, 4 or more; half of them are for keys after the query. Each bucket has its
            own position bias.
        relative_attention_max_distance: distances of at least this many tokens share one bucket for
            keys before, and one for keys after the query. Must exceed a quarter (rounded down) of
            the number of buckets.
        layer_norm_epsilon: epsilon of all norms, added to the mean of the squares.
        feed_forward_proj: "gated-gelu" (version 1.1), the only supported value.
        per_layer_bias: class attribute, not a field of the file: whether each layer has its own
            table of position biases (UMT5). False: all layers share one table, which the files
            store with the first layer (T5).
    """

    network = "T5EncoderModel"
    model_type = "t5"
    per_layer_bias: ClassVar[bool] = False

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
    def from_dict(cls: type[T], fields: Mapping[str, Any]) -> T:
        """Makes a configuration from the contents of a `config.json`, and checks it.

        Missing fields get their defaults. Unknown ones are ignored, except those that would change
        the network.

        Args:
            fields: the contents, which are not changed.

        Returns:
            The configuration.

        Raises:
            ValueError: a field has a type or value that is not supported; `quantization_config` is
                set; or one of these fields is present with another value than the one in
                parentheses: `model_type` ("t5"; UMT5: "umt5"), `is_decoder` (False), `dense_act_fn`
                ("gelu_new"), `is_gated_act` (True). The message names the field.
        """
        config = super().from_dict(fields)
        # Transformers would use the last two fields, although they repeat `feed_forward_proj`.
        for name, accepted in (
            ("is_decoder", False),
            ("dense_act_fn", "gelu_new"),
            ("is_gated_act", True),
        ):
            value = fields.get(name, accepted)
            if value != accepted:
                raise unsupported(cls.network, name, value, repr(accepted))
        return config

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `feed_forward_proj` is not "gated-gelu", there are fewer than 4 buckets, or
                `relative_attention_max_distance` is not above a quarter (rounded down) of their
                number. The message names the field.
        """
        self.require_one_of("feed_forward_proj", ("gated-gelu",))
        self.require(
            self.relative_attention_num_buckets >= 4, "relative_attention_num_buckets", "4 or more"
        )
        exact = self.relative_attention_num_buckets // 4  # distances below have a bucket each
        self.require(
            self.relative_attention_max_distance > exact,
            "relative_attention_max_distance",
            f"more than {exact}",
        )


@dataclasses.dataclass(frozen=True)
class UMT5Config(T5Config):
    """The configuration of UMT5's encoder: the fields and checks of `T5Config`, with other
    defaults, the `model_type` "umt5" and, in each layer, a table of position biases
    (`per_layer_bias`).
    """

    network = "UMT5EncoderModel"
    model_type = "umt5"
    per_layer_bias: ClassVar[bool] = True

    vocab_size: int = 250112
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    feed_forward_proj: str = "gated-gelu"


class T5EncoderModel(nnx.Module):
    """The token embedding and the encoder, of T5 or UMT5.

    Args:
        config: configuration of the network: the vocabulary, widths, heads and layers.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        # `encoder.embed_tokens` of PyTorch is the same table, and files hold it once
        self.shared = Embedding(config.vocab_size, config.d_model, rngs=rngs)
        self.encoder = T5Stack(config, rngs=rngs)

    def __call__(
        self, input_ids: Int[Array, "b l"], mask: Bool[Array, "b l"] | None = None
    ) -> Float[Array, "b l d"]:
        """Encodes tokenized prompts.

        Args:
            input_ids: token ids from 0 to `vocab_size - 1`, b prompts of l tokens each.
            mask: true on tokens and false on padding, to which no token attends. None: every token
                attends to all, padding included, as in the released pipelines of T5.

        Returns:
            The normalized hidden states after the last layer, one per token, padding included, [b,
            l, `d_model`], in the dtype of the token embedding.
        """
        return self.encoder(self.shared(input_ids), mask)


class T5Stack(nnx.Module):
    """The layers of the encoder and the last normalization, without the token embedding. For T5, it
    also holds the table of position biases that all layers share; for UMT5, each layer holds its
    own.

    Args:
        config: configuration of the network: the number of layers, their widths and heads, and the
            buckets of distances.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.block = stack(config.num_layers, lambda rngs: T5Block(config, rngs=rngs), rngs)
        # The files of T5 store the shared table in block 0. Stacked blocks must have the same
        # parameters, so here the table is beside them, with its full name.
        self.relative_attention_bias = (
            None if config.per_layer_bias else make_shared_bias(config, rngs)
        )
        self.final_layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon)

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b l"] | None = None
    ) -> Float[Array, "b l d"]:
        """Applies all layers and the last normalization to embedded tokens.

        Args:
            x: embedded tokens.
            mask: true on tokens and false on padding, to which no token attends. None: every token
                attends to all.

        Returns:
            The normalized hidden states, of the shape and dtype of `x`.
        """
        config = self.config
        buckets = relative_buckets(
            x.shape[1],
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
        )
        shared = None
        if self.relative_attention_bias is not None:
            shared = bias_of_pairs(self.relative_attention_bias.get_value(), buckets)
        keys = None if mask is None else mask[:, None, None, :]

        def apply(block, x):
            bias = block.position_bias(buckets) if shared is None else shared
            return block(x, bias, keys)

        return self.final_layer_norm(scan_blocks(self.block, apply, x))


class T5Block(nnx.Module):
    """A layer: attention, then the gated feed-forward network, each with an RMSNorm before it and a
    residual connection.

    Args:
        config: configuration of the network: the widths and heads of a layer, and the epsilon of
            its norms.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(config.d_model, eps=config.layer_norm_epsilon)

        # the module names of the released files
        self.layer = nnx.List(
            [
                nnx.Dict(SelfAttention=T5Attention(config, rngs=rngs), layer_norm=norm()),
                nnx.Dict(DenseReluDense=T5FeedForward(config, rngs=rngs), layer_norm=norm()),
            ]
        )

    def position_bias(self, buckets: Int[np.ndarray, "l l"]) -> Float[Array, "1 n l l"]:
        """Looks up the position bias of each pair of tokens in the layer's own table. Only for
        UMT5: the layers of T5 have none.

        Args:
            buckets: the bucket of each pair [query, key], as `relative_buckets` returns them.

        Returns:
            The biases [1, heads, queries, keys], in the dtype of the table.
        """
        table = self.layer[0].SelfAttention.relative_attention_bias
        return bias_of_pairs(table.embedding.get_value(), buckets)

    def __call__(
        self,
        x: Float[Array, "b l d"],
        bias: Float[Array, "1 n l l"],
        mask: Bool[Array, "b 1 1 l"] | None,
    ) -> Float[Array, "b l d"]:
        """Applies attention over all tokens, then the gated feed-forward network. Each reads a norm
        of its input, and its result is added to that input.

        Args:
            x: hidden states of the tokens.
            bias: position biases, which are added to the attention logits: [1, heads, queries,
                keys].
            mask: true on the keys that queries attend to. None: all.

        Returns:
            An array of the shape and dtype of `x`.
        """
        first, second = self.layer
        x = x + first.SelfAttention(first.layer_norm(x), bias, mask)
        return x + second.DenseReluDense(second.layer_norm(x))


class T5Attention(nnx.Module):
    """Softmax attention with unscaled logits `q k^T + bias`, including the output projection.

    With `per_layer_bias` (UMT5), it also holds the layer's table of position biases, which
    `T5Block.position_bias` reads.

    Args:
        config: configuration of the network: `d_model` input and output features, and `num_heads`
            heads of `d_kv` features. `num_heads * d_kv` may differ from `d_model`.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        inner = config.num_heads * config.d_kv
        self.q = Linear(config.d_model, inner, bias=False, rngs=rngs)
        self.k = Linear(config.d_model, inner, bias=False, rngs=rngs)
        self.v = Linear(config.d_model, inner, bias=False, rngs=rngs)
        self.o = Linear(inner, config.d_model, bias=False, rngs=rngs)
        buckets = config.relative_attention_num_buckets
        self.relative_attention_bias = (
            Embedding(buckets, config.num_heads, rngs=rngs) if config.per_layer_bias else None
        )
        self.num_heads = config.num_heads

    def __call__(
        self,
        x: Float[Array, "b l d"],
        bias: Float[Array, "1 n l l"],
        mask: Bool[Array, "b 1 1 l"] | None,
    ) -> Float[Array, "b l d"]:
        """Applies the attention and the output projection; the input is not added.

        Args:
            x: normalized hidden states of the tokens.
            bias: position biases, which are added to the logits: [1, heads, queries, keys].
            mask: true on the keys that queries attend to. None: all.

        Returns:
            The attended and projected tokens, of the shape and dtype of `x`.
        """

        def heads(y):
            return y.reshape(*y.shape[:2], self.num_heads, -1)

        out = attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), mask, scale=1.0, bias=bias
        )
        return self.o(out.reshape(*x.shape[:2], -1))


class T5FeedForward(nnx.Module):
    """A gated MLP without biases (arXiv 2002.05202): `wo(gelu(wi_0(x)) * wi_1(x))` with three
    linear layers and the tanh form of GELU.

    Args:
        config: configuration of the network, for the numbers of input and hidden features.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.wi_0 = Linear(config.d_model, config.d_ff, bias=False, rngs=rngs)
        self.wi_1 = Linear(config.d_model, config.d_ff, bias=False, rngs=rngs)
        self.wo = Linear(config.d_ff, config.d_model, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "b l d"]) -> Float[Array, "b l d"]:
        """Computes `wo(gelu(wi_0(x)) * wi_1(x))` for each token. The input is not added.

        Args:
            x: the normalized tokens, with `d_model` features.

        Returns:
            An array of the shape and dtype of `x`.
        """
        # jax.nn.gelu is the tanh approximation by default
        return self.wo(jax.nn.gelu(self.wi_0(x)) * self.wi_1(x))


def make_shared_bias(config: T5Config, rngs: nnx.Rngs) -> nnx.Param:
    """Returns the table of position biases that all layers of T5 share, as a new parameter. (The
    tables of UMT5 are made by `T5Attention`.)

    Args:
        config: configuration of the network: the number of buckets and of heads, and the width
            `d_model`. The initial values are normal with the standard deviation `d_model ** -0.5`.
        rngs: random number generators for the initial values.

    Returns:
        A float32 parameter [buckets, heads].
    """
    shape = (config.relative_attention_num_buckets, config.num_heads)
    table = jax.random.normal(rngs.params(), shape) / math.sqrt(config.d_model)
    return param(table, "block.0.layer.0.SelfAttention.relative_attention_bias.weight")


def bias_of_pairs(
    table: Float[Array, "buckets n"], buckets: Int[np.ndarray, "l l"]
) -> Float[Array, "1 n l l"]:
    """Looks up the position bias of each pair of tokens.

    Args:
        table: the bias of each bucket of distances and attention head.
        buckets: the bucket of each pair [query, key] (`relative_buckets`).

    Returns:
        The biases [1, heads, queries, keys], in the dtype of the table.
    """
    return table[buckets].transpose(2, 0, 1)[None]


def relative_buckets(
    length: int, count: int, max_distance: int
) -> Int[np.ndarray, "{length} {length}"]:
    """Returns the bucket of each pair of positions, by which T5 chooses the position bias of a
    query and a key.

    The first half of the buckets is for keys at or before the query, the second half for keys after
    it. Within a half, each distance below `count // 4` has its own bucket; the other buckets cover
    ranges of distances that are equally wide on a logarithmic scale, and all distances from
    `max_distance` on share the last bucket.

    Args:
        length: number of positions.
        count: number of buckets, 4 or more. If it is odd, the last one is not used.
        max_distance: distances of at least this many tokens share the last bucket of their half.
            Must exceed `count // 4`. (`T5Config` checks both arguments.)

    Returns:
        An int64 array [queries, keys] with numbers from 0 to `count - 1`.
    """
    offset = np.arange(length) - np.arange(length)[:, None]  # key minus query
    distance = np.abs(offset)
    half = count // 2
    exact = half // 2
    # In float32 and in the order of the released code, because some distances are exactly on a
    # border of two buckets.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    far = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    far = np.minimum(exact + far.astype(np.int32), half - 1)
    return np.where(offset > 0, half, 0) + np.where(distance < exact, distance, far)
