"""Describes the embedded pipelines: all files of their directories except the weights.

Every pipeline generates 32 x 32 pixels from an 8 x 8 latent; `tiny-wan` generates 5 such frames
from 3 latents. The networks are miniatures of the released ones. SD3 has two CLIPs of different
widths, whose outputs are concatenated and padded to the width of its T5.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pretrain.encoders import AutoencoderDC, AutoencoderKL, AutoencoderKLWan
from pretrain.networks import Part
from pretrain.recipe import MAX_TOKENS, MOTION_SHIFT, SHORT
from pretrain.words import (
    CLIP_END,
    VOCAB_SIZE,
    clip_tokenizer,
    gemma_tokenizer,
    motion_tokenizer,
    t5_tokenizer,
)
from solrl_jax.models.autoencoders.dc import AutoencoderDCConfig
from solrl_jax.models.autoencoders.kl import AutoencoderKLConfig
from solrl_jax.models.autoencoders.wan import AutoencoderKLWanConfig
from solrl_jax.models.flux.transformer import FluxConfig, FluxTransformer2DModel
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.models.text_encoders.gemma2 import Gemma2Config, Gemma2Model
from solrl_jax.models.text_encoders.t5 import T5Config, T5EncoderModel, UMT5Config
from solrl_jax.models.vision.clip import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
)
from solrl_jax.models.wan.transformer import WanConfig, WanTransformer3DModel

LATENT_CHANNELS = 8


class UMT5EncoderModel(T5EncoderModel):
    """The same class under the name that transformers gives it with the configuration of UMT5."""


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A pipeline without weights.

    Attributes:
        kind: The class name in model_index.json.
        parts: The networks by folder.
        tokenizers: Functions that build the tokenizers, by folder.
        scheduler: The content of scheduler_config.json.
        absent: Optional components that model_index.json lists as missing.
    """

    kind: str
    parts: dict[str, Part]
    tokenizers: dict[str, Callable[[], Any]]
    scheduler: dict[str, Any]
    absent: tuple[str, ...] = ()

    @property
    def text_encoders(self) -> dict[str, Part]:
        """The text encoders by folder."""
        return {name: part for name, part in self.parts.items() if name.startswith("text_encoder")}

    def with_vae(self, config: Mapping[str, Any]) -> "Blueprint":
        """Returns the same pipeline with further entries in the autoencoder's config.json."""
        vae = dataclasses.replace(self.parts["vae"], config=self.parts["vae"].config | dict(config))
        return dataclasses.replace(self, parts=self.parts | {"vae": vae})

    def write(self, folder: Path) -> None:
        """Writes the directory without weights, in the layout of diffusers."""
        for name, part in self.parts.items():
            _write_json(folder / name / "config.json", part.stored_config)
        for name, make in self.tokenizers.items():
            make().save_pretrained(folder / name)
        _write_json(folder / "scheduler" / "scheduler_config.json", self.scheduler)
        index = {name: [part.library, part.network.__name__] for name, part in self.parts.items()}
        index |= {name: ["transformers", "PreTrainedTokenizerFast"] for name in self.tokenizers}
        index["scheduler"] = ["diffusers", self.scheduler["_class_name"]]
        absent = {name: [None, None] for name in self.absent}
        _write_json(
            folder / "model_index.json",
            {"_class_name": self.kind} | dict(sorted((index | absent).items())),
        )

    def save(self, folder: Path, params: Mapping[str, Params]) -> None:
        """Writes the directory with weights.

        Args:
            folder: The directory.
            params: The parameters by folder. They are stored in BF16, as in the released pipelines.
        """
        self.write(folder)
        for name, part in self.parts.items():
            part.save(folder / name, params[name], jnp.bfloat16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def _clip(network: type, width: int) -> Part:
    """A CLIP text encoder with heads of 32 channels."""
    return Part(
        "transformers",
        network,
        CLIPTextConfig,
        {
            "model_type": "clip_text_model",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": width // 32,
            "hidden_act": "quick_gelu",
            "projection_dim": width,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": SHORT,
            "pad_token_id": 0,
            "bos_token_id": CLIP_END - 1,
            "eos_token_id": CLIP_END,
        },
    )


def _t5(width: int, network: type = T5EncoderModel, config: type[T5Config] = T5Config) -> Part:
    """A T5 or UMT5 encoder with heads of 32 channels."""
    return Part(
        "transformers",
        network,
        config,
        {
            "model_type": config.model_type,
            "d_model": width,
            "d_kv": 32,
            "d_ff": 2 * width,
            "num_layers": 2,
            "num_heads": width // 32,
            "feed_forward_proj": "gated-gelu",
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "layer_norm_epsilon": 1e-6,
            "vocab_size": VOCAB_SIZE,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "is_encoder_decoder": False,
            "tie_word_embeddings": False,
        },
    )


DC = Part(
    "diffusers",
    AutoencoderDC,
    AutoencoderDCConfig,
    {
        "in_channels": 3,
        "latent_channels": LATENT_CHANNELS,
        "attention_head_dim": 32,
        "encoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
        "decoder_block_types": ["ResBlock", "ResBlock", "EfficientViTBlock"],
        "encoder_block_out_channels": [16, 32, 64],
        "decoder_block_out_channels": [16, 32, 64],
        "encoder_layers_per_block": [1, 1, 1],
        "decoder_layers_per_block": [1, 2, 2],
        "encoder_qkv_multiscales": [[], [], [5]],
        "decoder_qkv_multiscales": [[], [], [5]],
        "downsample_block_type": "Conv",
        "upsample_block_type": "pixel_shuffle",
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
        "encoder_out_shortcut": True,
        "decoder_in_shortcut": True,
        "decoder_conv_act_fn": "relu",
        "scaling_factor": 1.0,
    },
)
KL = Part(
    "diffusers",
    AutoencoderKL,
    AutoencoderKLConfig,
    {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": LATENT_CHANNELS,
        "block_out_channels": [16, 32, 64],
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 32,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "force_upcast": True,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "mid_block_add_attention": True,
        "act_fn": "silu",
    },
)
WAN = Part(
    "diffusers",
    AutoencoderKLWan,
    AutoencoderKLWanConfig,
    {
        "base_dim": 16,
        "decoder_base_dim": 12,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 2, 4],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False, True],
        "dropout": 0.0,
        "latents_mean": [0.0] * LATENT_CHANNELS,
        "latents_std": [1.0] * LATENT_CHANNELS,
        "scale_factor_temporal": 2,
        "scale_factor_spatial": 4,
    },
)
TOWER = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "hidden_act": "quick_gelu",
}
CLIP = Part(
    "transformers",
    CLIPModel,
    CLIPConfig,
    {
        "model_type": "clip",
        "projection_dim": 64,
        "text_config": TOWER
        | {
            "num_hidden_layers": 2,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_TOKENS,
            "pad_token_id": 0,
            "bos_token_id": CLIP_END - 1,
            "eos_token_id": CLIP_END,
        },
        "vision_config": TOWER
        | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 4, "num_channels": 3},
    },
)
# Schedules of images are not shifted: shifts are for resolutions far above 32 pixels.
EULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
}
ABSENT = ("feature_extractor", "image_encoder")

BLUEPRINTS = {
    "tiny-sana": Blueprint(
        "SanaPipeline",
        {
            "transformer": Part(
                "diffusers",
                SanaTransformer2DModel,
                SanaConfig,
                {
                    "in_channels": LATENT_CHANNELS,
                    "out_channels": LATENT_CHANNELS,
                    "num_attention_heads": 4,
                    "attention_head_dim": 32,
                    "num_layers": 4,
                    "num_cross_attention_heads": 4,
                    "cross_attention_head_dim": 32,
                    "cross_attention_dim": 128,
                    "caption_channels": 64,
                    "mlp_ratio": 1.5,
                    "sample_size": 8,
                    "patch_size": 1,
                    "interpolation_scale": 1.0,
                },
            ),
            "text_encoder": Part(
                "transformers",
                Gemma2Model,
                Gemma2Config,
                {
                    "vocab_size": VOCAB_SIZE,
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 32,
                    "query_pre_attn_scalar": 32,
                    "sliding_window": 16,
                    "max_position_embeddings": 64,
                    "pad_token_id": 0,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                    "model_type": "gemma2",
                    "hidden_activation": "gelu_pytorch_tanh",
                    "rms_norm_eps": 1e-6,
                    "rope_theta": 10000.0,
                    "attn_logit_softcapping": 50.0,
                    "final_logit_softcapping": 30.0,
                    "attention_bias": False,
                    "layer_types": ["sliding_attention", "full_attention"],
                },
            ),
            "vae": DC,
        },
        {"tokenizer": gemma_tokenizer},
        EULER | {"use_dynamic_shifting": False},
    ),
    "tiny-flux": Blueprint(
        "FluxPipeline",
        {
            "transformer": Part(
                "diffusers",
                FluxTransformer2DModel,
                FluxConfig,
                {
                    "patch_size": 1,
                    "in_channels": 4 * LATENT_CHANNELS,
                    "out_channels": None,
                    "num_layers": 2,
                    "num_single_layers": 3,
                    "attention_head_dim": 32,
                    "num_attention_heads": 4,
                    "joint_attention_dim": 64,
                    "pooled_projection_dim": 64,
                    "guidance_embeds": True,
                    "axes_dims_rope": [4, 14, 14],
                },
            ),
            "text_encoder": _clip(CLIPTextModel, 64),
            "text_encoder_2": _t5(64),
            "vae": KL,
        },
        {"tokenizer": clip_tokenizer, "tokenizer_2": t5_tokenizer},
        EULER,
        ABSENT,
    ),
    "tiny-sd3": Blueprint(
        "StableDiffusion3Pipeline",
        {
            "transformer": Part(
                "diffusers",
                SD3Transformer2DModel,
                SD3Config,
                {
                    "sample_size": 8,
                    "patch_size": 2,
                    "in_channels": LATENT_CHANNELS,
                    "out_channels": LATENT_CHANNELS,
                    "num_layers": 4,
                    "attention_head_dim": 32,
                    "num_attention_heads": 4,
                    "joint_attention_dim": 128,
                    "caption_projection_dim": 128,
                    "pooled_projection_dim": 96,
                    "pos_embed_max_size": 8,
                    "dual_attention_layers": [],
                    "qk_norm": "rms_norm",
                },
            ),
            "text_encoder": _clip(CLIPTextModelWithProjection, 32),
            "text_encoder_2": _clip(CLIPTextModelWithProjection, 64),
            "text_encoder_3": _t5(128),
            "vae": KL,
        },
        {"tokenizer": clip_tokenizer, "tokenizer_2": clip_tokenizer, "tokenizer_3": t5_tokenizer},
        EULER,
        ABSENT,
    ),
    "tiny-wan": Blueprint(
        "WanPipeline",
        {
            "transformer": Part(
                "diffusers",
                WanTransformer3DModel,
                WanConfig,
                {
                    "patch_size": [1, 2, 2],
                    "num_attention_heads": 5,
                    "attention_head_dim": 32,
                    "in_channels": LATENT_CHANNELS,
                    "out_channels": LATENT_CHANNELS,
                    "text_dim": 64,
                    "freq_dim": 256,
                    "ffn_dim": 320,
                    "num_layers": 6,
                    "cross_attn_norm": True,
                    "qk_norm": "rms_norm_across_heads",
                    "eps": 1e-6,
                    "image_dim": None,
                    "added_kv_proj_dim": None,
                    "rope_max_seq_len": 64,
                },
            ),
            "text_encoder": _t5(64, UMT5EncoderModel, UMT5Config),
            "vae": WAN,
        },
        {"tokenizer": motion_tokenizer},
        EULER | {"shift": MOTION_SHIFT},
    ),
}
