"""Qwen3's decoder as a text encoder (arXiv 2505.09388, section 2): `Qwen3Model` of transformers in
Flax NNX.

A causal transformer. Groups of query heads share keys and values, and each head of queries and keys
is normalised before it is rotated. Released pipelines read hidden states from inside the network,
which therefore ends at the last layer that is needed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import ReleasedConfig, with_rope_theta
from solrl_jax.models.loading.weights import locate_tensors
from solrl_jax.models.text_encoders.decoder import (
    GroupedQueryAttention,
    PreNormLayer,
    causal_mask,
    require_full_attention,
)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(ReleasedConfig):
    """The fields of a `config.json`, of transformers 4 or 5, that the hidden states depend on.
    Other fields of the file are ignored. The defaults are those of 4B.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: features of a token.
        intermediate_size: hidden features of the MLPs.
        num_hidden_layers: number of layers of the whole network.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads, a divisor of `num_attention_heads`.
        head_dim: features of one head, an even number.
        hidden_act: "silu", the only supported value.
        rms_norm_eps: epsilon of all norms, added to the mean of the squares.
        rope_theta: base of the rotary frequencies.
        attention_bias: whether all four projections of the attention have biases.
    """

    network = "Qwen3Model"
    model_type = "qwen3"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    attention_bias: bool = False

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Qwen3Config":
        """Makes a configuration from the contents of a `config.json`.

        Missing fields keep their defaults, and unknown ones are ignored. The base of the rotary
        frequencies is read from either of the two places that transformers has had for it:
        `rope_theta` inside `rope_parameters` or `rope_scaling` replaces the one at the top level.

        Args:
            fields: the contents. They are not changed.

        Returns:
            The configuration, whose fields have been checked.

        Raises:
            ValueError: a field has a type or value that is not supported, such as another
                `model_type`, a `quantization_config`, a kind of rotary embedding other than
                "default", or sliding attention (a true `use_sliding_window`, or `layer_types` other
                than "full_attention" for every layer). The message names the field.
        """
        config = super().from_dict(with_rope_theta(cls.network, fields))
        require_full_attention(cls.network, fields, config.num_hidden_layers)
        return config

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `hidden_act` is not "silu"; `num_key_value_heads` does not divide
                `num_attention_heads`; or `head_dim` is odd. The message names the field.
        """
        self.require_one_of("hidden_act", ("silu",))
        self.require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")


def open_qwen3(folder: Path, config: Qwen3Config, states: Sequence[int]) -> Component:
    """Opens the network of a released folder, up to the last hidden state that is needed. No weight
    is read.

    The files may also hold a language-model head and the remaining layers, which are ignored.

    Args:
        folder: the text encoder's folder.
        config: configuration of the whole network.
        states: one or more indices of the hidden states to return, the largest at least 1 and less
            than `config.num_hidden_layers`. State 0 is the embedded tokens, and state i the output
            of layer i, counted from 1.

    Returns:
        The network `Qwen3Model` without its parameters, with `folder` as their source.

    Raises:
        ValueError: the largest index is not in this range, or `states` is empty.
    """
    last = max(states)
    if not 1 <= last < config.num_hidden_layers:
        raise ValueError(
            f"{folder / 'config.json'}: num_hidden_layers={config.num_hidden_layers}; "
            f"accepted: more than {max(last, 1)}, for the hidden states {tuple(states)}"
        )
    unused = ["norm.", *(f"layers.{i}." for i in range(last, config.num_hidden_layers))]
    # all names in the files may begin with "model."
    prefixes = ("lm_head.", *unused, *(f"model.{name}" for name in unused))
    return Component.from_builder(
        folder,
        lambda rngs: Qwen3Model(config, states, rngs=rngs),
        partial(locate_tensors, unused=prefixes),
    )


class Qwen3Model(nnx.Module):
    """The token embedding and the layers of the decoder, up to the last one that is needed.

    Args:
        config: configuration of the whole network.
        states: one or more indices of the hidden states to return. As in transformers, state 0 is
            the embedded tokens and state i the output of layer i, counted from 1, without a norm.
            The largest index, at least 1, is the number of layers that are built. The normalised
            output of the last layer is not available.
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Qwen3Config, states: Sequence[int], *, rngs: nnx.Rngs):
        self.states = tuple(states)
        self.depth = max(states)
        self.model = nnx.Dict(
            embed_tokens=Embedding(config.vocab_size, config.hidden_size, rngs=rngs),
            layers=stack(self.depth, lambda rngs: decoder_layer(config, rngs), rngs),
        )

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l kd"]:
        """Returns the k hidden states in `states`, in that order, concatenated along the features.

        Args:
            input_ids: tokens, below `vocab_size`. Their positions count from 0.
            attention_mask: true on tokens, false on the padding after them, to which no token
                attends. Padding attends to the tokens before it, as in transformers, so that its
                states are the same there.

        Returns:
            The states [b, l, k d], where d is `hidden_size`, in the dtype of the token embedding.
            They are not normalised.
        """
        x = self.model.embed_tokens(input_ids)
        mask = causal_mask(attention_mask)
        layer_index = jnp.arange(1, self.depth + 1)
        is_output = layer_index[:, None] == jnp.array(self.states)  # [layer, state]

        def apply(
            layer: PreNormLayer, carry: tuple[Array, Array], is_output: Bool[Array, " k"]
        ) -> tuple[Array, Array]:
            x, outputs = carry
            x = layer(x, mask)
            return x, jnp.where(is_output[:, None, None, None], x, outputs)

        outputs = jnp.stack([x] * len(self.states))
        _, outputs = scan_blocks(self.model.layers, apply, (x, outputs), is_output)
        return jnp.concatenate(list(outputs), axis=-1)


def decoder_layer(config: Qwen3Config, rngs: nnx.Rngs) -> PreNormLayer:
    """Makes one layer, whose attention normalises each head of queries and keys on its own before
    it is rotated.

    Args:
        config: configuration of the network: the widths and heads of a layer, and the epsilon of
            its norms.
        rngs: random number generators for the initial weights.

    Returns:
        The layer: grouped-query attention, whose mask is passed to the call, then a SiLU-gated MLP,
        each after an RMSNorm.
    """
    attention = GroupedQueryAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rope_theta,
        input_bias=config.attention_bias,
        output_bias=config.attention_bias,
        norm_eps=config.rms_norm_eps,
        rngs=rngs,
    )
    return PreNormLayer(
        attention, config.hidden_size, config.intermediate_size, config.rms_norm_eps, rngs=rngs
    )
