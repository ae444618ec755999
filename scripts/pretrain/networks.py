"""The networks of `tiny-sana` and `tiny-clip`: their released configurations, and how they are made from nothing."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from flax import nnx

from pretrain.words import CLIP_END, MAX_TOKENS, VOCAB_SIZE
from solrl_jax.models.autoencoder_dc import AutoencoderDC, AutoencoderDCConfig
from solrl_jax.models.clip import CLIPConfig, CLIPModel
from solrl_jax.models.gemma2 import Gemma2Config, Gemma2Model
from solrl_jax.models.sana import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.weights import Params

VAE = {
    "in_channels": 3, "latent_channels": 8, "attention_head_dim": 32,
    "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "decoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
    "encoder_block_out_channels": [16, 32, 64], "decoder_block_out_channels": [16, 32, 64],
    "encoder_layers_per_block": [1, 1, 1], "decoder_layers_per_block": [1, 2, 2],
    "encoder_qkv_multiscales": [[], [], [5]], "decoder_qkv_multiscales": [[], [], [5]],
    "downsample_block_type": "Conv", "upsample_block_type": "pixel_shuffle",
    "decoder_norm_types": "rms_norm", "decoder_act_fns": "silu",
    "encoder_out_shortcut": True, "decoder_in_shortcut": True, "decoder_conv_act_fn": "relu", "scaling_factor": 1.0,
}  # fmt: skip
TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "attention_bias": False, "architectures": ["Gemma2Model"],
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
FLOW = {
    "in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4,
    "num_cross_attention_heads": 4, "cross_attention_head_dim": 32, "cross_attention_dim": 128, "caption_channels": 64,
    "mlp_ratio": 1.5, "sample_size": 8, "patch_size": 1, "interpolation_scale": 1.0,
}  # fmt: skip
CLIP_TOWER = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4, "hidden_act": "quick_gelu"}
CLIP = {
    "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 64,
    "text_config": CLIP_TOWER | {"num_hidden_layers": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_TOKENS,
                                 "pad_token_id": 0, "bos_token_id": CLIP_END - 1, "eos_token_id": CLIP_END},
    "vision_config": CLIP_TOWER | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 4, "num_channels": 3},
}  # fmt: skip
MAKERS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "vae": lambda r: AutoencoderDC(AutoencoderDCConfig.from_dict(VAE), rngs=r),
    "text": lambda r: Gemma2Model(Gemma2Config.from_dict(TEXT), rngs=r),
    "flow": lambda r: SanaTransformer2DModel(SanaConfig.from_dict(FLOW), rngs=r),
    "clip": lambda r: CLIPModel(CLIPConfig.from_dict(CLIP), rngs=r),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A graph without numbers, and the abstract state that names them."""

    graphdef: nnx.GraphDef
    state: nnx.State

    @classmethod
    def of(cls, make: Callable[[nnx.Rngs], nnx.Module]) -> "Network":
        return cls(*nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))

    def __call__(self, params: Params) -> Any:
        return nnx.merge(self.graphdef, params)


def initialise(make: Callable[[nnx.Rngs], nnx.Module], seed: int) -> Params:
    """The parameters that a network begins with."""
    return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(seed)))[1])


def networks() -> dict[str, tuple[Network, Callable[[int], Params]]]:
    """Each network with a function that initialises its parameters from a seed."""
    return {name: (Network.of(make), partial(initialise, make)) for name, make in MAKERS.items()}
