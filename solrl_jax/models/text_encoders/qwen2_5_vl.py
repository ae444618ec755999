"""The language part of Qwen2.5-VL as a text encoder (arXiv 2502.13923, section 2.1): the decoder
`Qwen2_5_VLTextModel` of transformers in Flax NNX.

A causal transformer. Groups of query heads share keys and values. The rotary positions of
Qwen2.5-VL have three coordinates, which are equal for text, so that they are ordinary positions
here. The vision part is not ported, and its weights are not read.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from solrl_jax.models.layers.embeddings import Embedding
from solrl_jax.models.layers.norm import RMSNorm
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.loading.component import Component
from solrl_jax.models.loading.config_file import ReleasedConfig, unsupported, with_rope_theta
from solrl_jax.models.loading.tensor_files import StoredTensor, read_header, weight_files
from solrl_jax.models.loading.weights import ParameterEntry, check_tensors, parameter_table
from solrl_jax.models.text_encoders.decoder import (
    GroupedQueryAttention,
    PreNormLayer,
    causal_mask,
    require_full_attention,
)

# The prefixes that released files have for the names of the language part: that of transformers 5
# and that of transformers 4.
PREFIXES = ("model.language_model.", "model.")
# Tensors of the same files that the language part's hidden states do not need.
UNUSED = ("lm_head.", "visual.", "model.visual.")


@dataclasses.dataclass(frozen=True)
class Qwen2_5_VLTextConfig(ReleasedConfig):
    """The configuration of Qwen2.5-VL's language part: the fields of a `config.json` (of
    transformers 4 or 5) that its hidden states depend on.

    Other fields of the file are ignored, but `from_dict` raises ValueError for those that would
    change the network (another `model_type`, `quantization_config`, sliding attention, a scaled
    rotary embedding). The constructor raises ValueError for a value that is not supported. The
    defaults are those of the 7B model.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: number of features of a token, a multiple of twice `num_attention_heads`.
        intermediate_size: hidden width of the MLPs.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads, a divisor of `num_attention_heads`.
        hidden_act: "silu", the only supported value.
        rms_norm_eps: epsilon of all norms.
        rope_theta: base of the rotary frequencies.
    """

    network = "Qwen2_5_VLTextModel"
    model_type = "qwen2_5_vl"

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int = 4
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Qwen2_5_VLTextConfig":
        """Makes a configuration from the `config.json` of the whole Qwen2.5-VL, and checks it.

        Missing fields get their defaults, and unknown ones are ignored. A field that the mapping
        `text_config` (transformers 5) has is read from there, any other from the top level;
        `model_type` always from the top level. `rope_theta` may also be inside `rope_parameters`
        (or, if `rope_parameters` is missing or empty, inside `rope_scaling`), and takes precedence
        there. In both mappings, the `rope_type` (or `type`) "mrope" counts as not scaled.

        Args:
            fields: the contents, which are not changed.

        Returns:
            The configuration.

        Raises:
            ValueError: a field has a type or value that is not supported, `model_type` is present
                but not "qwen2_5_vl", `quantization_config` is set, the attention of a layer is
                sliding, or the rotary embedding is scaled. The message names the field.
        """
        text = fields.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise unsupported(cls.network, "text_config", text, "a mapping")
        merged = {**fields, **text, "model_type": fields.get("model_type", cls.model_type)}
        for name in ("rope_parameters", "rope_scaling"):
            rope = merged.get(name)
            # The older name of the three-dimensional positions, which are ordinary ones for text.
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
                merged[name] = {**rope, "rope_type": "default"}
        config = super().from_dict(with_rope_theta(cls.network, merged))
        require_full_attention(cls.network, merged, config.num_hidden_layers)
        return config

    def check(self) -> None:
        """Checks the values of the fields.

        Raises:
            ValueError: `hidden_act` is not "silu"; `hidden_size` is not a multiple of twice
                `num_attention_heads`; or `num_key_value_heads` does not divide
                `num_attention_heads`. The message names the field.
        """
        self.require_one_of("hidden_act", ("silu",))
        self.require(
            self.hidden_size % (2 * self.num_attention_heads) == 0,
            "hidden_size",
            f"a multiple of twice num_attention_heads={self.num_attention_heads} (rotary pairs)",
        )
        self.require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"a divisor of num_attention_heads={self.num_attention_heads}",
        )

    @property
    def head_dim(self) -> int:
        """Number of features of one attention head, `hidden_size / num_attention_heads`."""
        return self.hidden_size // self.num_attention_heads


def open_qwen2_5_vl(folder: Path, config: Qwen2_5_VLTextConfig) -> Component:
    """Opens the language part of a released Qwen2.5-VL. No file is read.

    The vision part and the language-model head in the files are ignored.

    Args:
        folder: the text encoder's folder, with the weights.
        config: configuration of the language part.

    Returns:
        The network `Qwen2_5_VLTextModel` without its parameters, which can be loaded from `folder`.
    """
    return Component.from_builder(
        folder, lambda rngs: Qwen2_5_VLTextModel(config, rngs=rngs), locate_language_tensors
    )


def locate_language_tensors(
    source: Path, state: nnx.State
) -> tuple[list[ParameterEntry], dict[str, StoredTensor]]:
    """Finds the tensors of Qwen2.5-VL's language part in released files, and checks that they fit.
    Only the headers of the files are read. Tensors of the vision part and of the language-model
    head are ignored.

    Args:
        source: the directory of the text encoder, or one safetensors file.
        state: abstract state of the network.

    Returns:
        (table, tensors), the first two arguments of `weights.load_tensors`. The table has one entry
        per parameter, with the names of its tensors in the files: one name, or one per layer in a
        stack. The names begin with "model.language_model." (transformers 5) or "model."
        (transformers 4). The dictionary `tensors` has the position (file, offset, dtype and shape)
        of every tensor in the files by name, ignored ones included.

    Raises:
        FileNotFoundError: the weights are missing, are PyTorch pickles, or are several files
            without a standard name.
        ValueError: a file or an index of files cannot be read; or tensors are missing, unexpected,
            stored twice, or of another shape or dtype than the network takes. The message lists all
            such tensors.
    """
    files = [source] if source.is_file() else weight_files(source)
    names = {tensor.name for file in files for tensor in read_header(file)}
    newer, older = PREFIXES
    prefix = newer if any(name.startswith(newer) for name in names) else older
    table = [
        dataclasses.replace(entry, names=tuple(f"{prefix}{name}" for name in entry.names))
        for entry in parameter_table(state)
    ]
    expected = {name: entry.torch_shape for entry in table for name in entry.names}
    return table, check_tensors(files, expected, str(source), lambda name: name.startswith(UNUSED))


class Qwen2_5_VLTextModel(nnx.Module):
    """Qwen2.5-VL's language part without its head: the token embedding, the layers and the last
    norm.

    Args:
        config: configuration of the network (`Qwen2_5_VLTextConfig`).
        rngs: random number generators for the initial weights.
    """

    def __init__(self, config: Qwen2_5_VLTextConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = stack(
            config.num_hidden_layers, lambda rngs: decoder_layer(config, rngs), rngs
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, input_ids: Int[Array, "b l"], attention_mask: Bool[Array, "b l"]
    ) -> Float[Array, "b l d"]:
        """Returns the normalized hidden states after the last layer.

        Args:
            input_ids: token numbers of text, below `vocab_size`, at positions 0 to l - 1.
            attention_mask: true on tokens, false on the padding after them, which is not attended
                to.

        Returns:
            One state per token, [b, l, `hidden_size`], in the dtype of the token embedding. The
            states of padding have no meaning.
        """
        x = self.embed_tokens(input_ids)
        mask = causal_mask(attention_mask)
        x = scan_blocks(self.layers, lambda layer, x: layer(x, mask), x)
        return self.norm(x)


def decoder_layer(config: Qwen2_5_VLTextConfig, rngs: nnx.Rngs) -> PreNormLayer:
    """Builds one layer. Its linear layers to queries, keys and values have biases.

    Args:
        config: configuration of the network.
        rngs: random number generators for the initial weights.

    Returns:
        The layer: grouped-query attention, then a SiLU-gated MLP, each after an RMSNorm. It is
        called with tokens and a mask.
    """
    attention = GroupedQueryAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rope_theta,
        input_bias=True,
        output_bias=False,
        rngs=rngs,
    )
    return PreNormLayer(
        attention, config.hidden_size, config.intermediate_size, config.rms_norm_eps, rngs=rngs
    )
