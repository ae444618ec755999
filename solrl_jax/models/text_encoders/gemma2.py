"""Gemma 2's decoder as a text encoder (arXiv 2408.00118, section 2): `Gemma2Model` of transformers
in Flax NNX.

A causal transformer whose layers alternate between sliding-window attention and full attention.
Groups of query heads share keys and values, attention logits are soft-capped, and each sublayer is
normalized before and after. There is no language-model head: the output is the normalized hidden
state of every token after the last layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported, with_rope_theta
from solrl_jax.models.text_encoders.decoder import GatedMLP, GroupedQueryAttention, causal_mask

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclasses.dataclass(frozen=True)
class Gemma2Config(ReleasedConfig):
    """The configuration of Gemma 2: the fields of a `config.json` (of transformers 4 or 5) that its
    hidden states depend on.

    Other fields of the file are ignored, except those that would change the network (a `model_type`
    other than "gemma2", a `quantization_config`, a true `use_bidirectional_attention`, a scaled
    rotary embedding), for which `from_dict` raises ValueError. The constructor raises ValueError
    for a value that is not supported. The defaults are those of Gemma 2 2B.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: number of features of a token.
        intermediate_size: hidden width of the MLPs.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads, a divisor of `num_attention_heads`.
        head_dim: number of features of one head, an even number.
        hidden_activation: "gelu_pytorch_tanh", the only supported value.
        rms_norm_eps: epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        attention_bias: whether the linear layers to queries, keys, values and output have biases.
        query_pre_attn_scalar: attention logits are divided by its square root.
        sliding_window: in layers with "sliding_attention", how many tokens a query attends to:
            itself and those just before it.
        layer_types: the attention of each layer, "sliding_attention" or "full_attention", one entry
            per layer. (), as in files of transformers 4: the two alternate, beginning with
            "sliding_attention".
        attn_logit_softcapping: a number c that replaces the attention logits by `c tanh(logits /
            c)`; None: no cap.
    """

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
    layer_types: tuple[str, ...] = ()
    attn_logit_softcapping: float | None = 50.0

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Gemma2Config":
        """Makes a configuration from the contents of a `config.json`, and checks it.

        Missing fields, and a `layer_types` of None, get their defaults. Unknown fields are ignored,
        except those that would change the network. `rope_theta` may also be inside
        `rope_parameters` (or, if `rope_parameters` is missing or empty, inside `rope_scaling`), and
        takes precedence there.

        Args:
            fields: the contents. They are not changed.

        Returns:
            The configuration.

        Raises:
            ValueError: a field has a type or value that is not supported; `model_type` is present
                but not "gemma2"; or `quantization_config`, `use_bidirectional_attention` or a
                scaled rope is set. The message names the field.
        """
        fields = with_rope_theta(cls.network, fields)
        if fields.get("layer_types") is None:
            fields.pop("layer_types", None)
        config = super().from_dict(fields)
        bidirectional = fields.get("use_bidirectional_attention")
        if bidirectional:
            raise unsupported(
                cls.network, "use_bidirectional_attention", bidirectional, "None, False"
            )
        return config

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `hidden_activation` or an entry of `layer_types` is not a supported value;
                `layer_types` is neither empty nor has one entry per layer; `num_key_value_heads`
                does not divide `num_attention_heads`; or `head_dim` is odd. The message names the
                field.
        """
        self.require_one_of("hidden_activation", ("gelu_pytorch_tanh",))
        self.require_one_of("layer_types", (SLIDING, FULL))
        self.require(
            len(self.attention_types) == self.num_hidden_layers,
            "layer_types",
            f"num_hidden_layers={self.num_hidden_layers} of them",
        )
        self.require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")

    @property
    def attention_types(self) -> tuple[str, ...]:
        """The attention of each layer, "sliding_attention" or "full_attention": `layer_types`, or
        both in turn, sliding first, if that is empty.
        """
        if self.layer_types:
            return self.layer_types
        return tuple(FULL if i % 2 else SLIDING for i in range(self.num_hidden_layers))


class Gemma2Model(nnx.Module):
    """Gemma 2 without its language-model head: the token embedding, the layers and the last norm.

    Args:
        config: configuration of the network (`Gemma2Config`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Gemma2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = stack(
            config.num_hidden_layers, lambda rngs: DecoderLayer(config, rngs=rngs), rngs
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=1.0)

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l d"]:
        """Returns the normalized hidden states after the last layer.

        Args:
            input_ids: token numbers, below `vocab_size`, at positions 0 to l - 1.
            attention_mask: true on tokens, false on the padding after them, which is not attended
                to.

        Returns:
            One state per token, [b, l, `hidden_size`], in the dtype of the token embedding. The
            states of padding have no meaning.
        """
        return self.decode(self.embed(input_ids), attention_mask)

    def embed(self, input_ids: Int[Array, "b l"]) -> Float[Array, "b l d"]:
        """Returns the token embeddings times sqrt(d), the input of `decode`.

        The factor is rounded to the dtype of the embedding table, as in training.

        Args:
            input_ids: token numbers, below `vocab_size`.

        Returns:
            The embedded tokens [b, l, d], in the dtype of the embedding table.
        """
        x = self.embed_tokens(input_ids)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def decode(
        self, x: Float[Array, "b l d"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l d"]:
        """Applies all layers and the last norm to embedded tokens.

        A token attends to itself and the tokens before it; in sliding layers, to the last
        `sliding_window` of these, itself included.

        Args:
            x: token embeddings times sqrt(d), as `embed` returns them.
            attention_mask: true on tokens, false on the padding after them, which is not attended
                to.

        Returns:
            The normalized hidden states, of the shape and dtype of `x`.
        """
        position = jnp.arange(x.shape[1])
        distance = position[:, None] - position  # [query, key]
        full = causal_mask(attention_mask)
        sliding = full & (distance < self.config.sliding_window)
        is_sliding = jnp.array([kind == SLIDING for kind in self.config.attention_types])

        def apply(layer, x, is_sliding):
            return layer(x, jnp.where(is_sliding, sliding, full))

        return self.norm(scan_blocks(self.layers, apply, x, is_sliding))


class DecoderLayer(nnx.Module):
    """A layer: attention, then a gated MLP (tanh GELU). Each has an RMSNorm before and one after
    it, whose factor is 1 plus the weight, and its result is added to its input.

    Args:
        config: configuration of the network (`Gemma2Config`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Gemma2Config, *, rngs: nnx.Rngs):
        def norm():
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=1.0)

        self.self_attn = GroupedQueryAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.rope_theta,
            input_bias=config.attention_bias,
            output_bias=config.attention_bias,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
            rngs=rngs,
        )
        # jax.nn.gelu is the tanh approximation by default
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, jax.nn.gelu, rngs=rngs)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def __call__(
        self, x: Float[Array, "b l d"], mask: Bool[Array, "b 1 l l"]
    ) -> Float[Array, "b l d"]:
        """Applies attention, then the gated MLP. Each reads a norm of its input; its normalized
        result is added to the input.

        Args:
            x: hidden states of the tokens.
            mask: true where a query (third axis) attends to a key (last axis), for every head.

        Returns:
            An array of the shape and dtype of `x`.
        """
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
