"""`tiny-flux` and `tiny-sd3` described: what every file of their directories but the weights says.

Both generate 16 tokens of an 8 x 8 latent that one small KL autoencoder makes of 32 x 32 pixels. The shapes are the released
ones' in miniature: SD3's two CLIPs of different width, side by side and padded to T5's.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from pretrain.networks import Network, initialise
from pretrain.words import CLIP_END, SHORT, VOCAB_SIZE, clip_tokenizer, t5_tokenizer
from solrl_jax.models.autoencoder_kl import AutoencoderKL, AutoencoderKLConfig
from solrl_jax.models.clip_text import CLIPTextEncoderConfig, CLIPTextModel, CLIPTextModelWithProjection
from solrl_jax.models.flux import FluxConfig, FluxTransformer2DModel
from solrl_jax.models.sd3 import SD3Config, SD3Transformer2DModel
from solrl_jax.models.t5 import T5Config, T5EncoderModel
from solrl_jax.models.weights import Params, save_component, to_torch

LATENT_CHANNELS = 8
DIFFUSERS = "diffusion_pytorch_model.safetensors"
TRANSFORMERS = "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Part:
    """A network of a pipeline: who released its class, the class here, that of its configuration, the configuration."""

    library: str
    network: type
    config_type: Any
    config: dict[str, Any]

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        return self.network(self.config_type.from_dict(self.config), rngs=rngs)

    def initialise(self, seed: int) -> Params:
        return initialise(self.make, seed)

    @property
    def stored_config(self) -> dict[str, Any]:
        name = self.network.__name__
        if self.library == "diffusers":
            return {"_class_name": name} | self.config
        return {"architectures": [name]} | self.config

    def save(self, folder: Path, params: Params, dtype: Any) -> None:
        file = DIFFUSERS if self.library == "diffusers" else TRANSFORMERS
        save_component(folder, file, self.stored_config, to_torch(Network.of(self.make).state, params), dtype)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A pipeline: its networks, tokenizers and scheduler, each by its folder or `_class_name`."""

    kind: str
    parts: dict[str, Part]
    tokenizers: dict[str, Callable[[], Any]]
    scheduler: dict[str, Any]

    @property
    def text_encoders(self) -> dict[str, Part]:
        return {name: part for name, part in self.parts.items() if name.startswith("text_encoder")}

    def scaled(self, scale: float, shift: float) -> "Blueprint":
        """With an autoencoder that says so: the transformer sees `(latent - shift) * scale`."""
        vae = self.parts["vae"]
        config = vae.config | {"scaling_factor": scale, "shift_factor": shift}
        return dataclasses.replace(self, parts=self.parts | {"vae": dataclasses.replace(vae, config=config)})

    def write(self, folder: Path) -> None:
        """The directory without weights, as diffusers lays it out."""
        for name, part in self.parts.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            _write_json(folder / name / "config.json", part.stored_config)
        for name, make in self.tokenizers.items():
            make().save_pretrained(folder / name)
        (folder / "scheduler").mkdir(exist_ok=True)
        _write_json(folder / "scheduler" / "scheduler_config.json", self.scheduler)
        index = {name: [part.library, part.network.__name__] for name, part in self.parts.items()}
        index |= {name: ["transformers", "PreTrainedTokenizerFast"] for name in self.tokenizers}
        index["scheduler"] = ["diffusers", self.scheduler["_class_name"]]
        index |= {name: [None, None] for name in ("feature_extractor", "image_encoder")}
        _write_json(folder / "model_index.json", {"_class_name": self.kind} | dict(sorted(index.items())))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _clip(network: type, width: int) -> Part:
    """A text tower; `width // 32` heads, so that all are of one size."""
    return Part("transformers", network, CLIPTextEncoderConfig, {
        "model_type": "clip_text_model", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": width // 32, "hidden_act": "quick_gelu", "projection_dim": width, "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": SHORT, "pad_token_id": 0, "bos_token_id": CLIP_END - 1, "eos_token_id": CLIP_END,
    })  # fmt: skip


def _t5(width: int) -> Part:
    return Part("transformers", T5EncoderModel, T5Config, {
        "model_type": "t5", "d_model": width, "d_kv": 32, "d_ff": 2 * width, "num_layers": 2, "num_heads": width // 32,
        "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6, "vocab_size": VOCAB_SIZE, "pad_token_id": 0, "eos_token_id": 1,
        "is_encoder_decoder": False, "tie_word_embeddings": False,
    })  # fmt: skip


KL = Part("diffusers", AutoencoderKL, AutoencoderKLConfig, {
    "in_channels": 3, "out_channels": 3, "latent_channels": LATENT_CHANNELS, "block_out_channels": [16, 32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3, "layers_per_block": 1,
    "norm_num_groups": 8, "sample_size": 32, "scaling_factor": 1.0, "shift_factor": 0.0, "force_upcast": True,
    "use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": True, "act_fn": "silu",
})  # fmt: skip
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}  # unshifted: 64 tokens

BLUEPRINTS = {
    "tiny-flux": Blueprint(
        "FluxPipeline",
        {
            "transformer": Part("diffusers", FluxTransformer2DModel, FluxConfig, {
                "patch_size": 1, "in_channels": 4 * LATENT_CHANNELS, "out_channels": None, "num_layers": 2,
                "num_single_layers": 3, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 64,
                "pooled_projection_dim": 64, "guidance_embeds": True, "axes_dims_rope": [4, 14, 14],
            }),
            "text_encoder": _clip(CLIPTextModel, 64),
            "text_encoder_2": _t5(64),
            "vae": KL,
        },
        {"tokenizer": clip_tokenizer, "tokenizer_2": t5_tokenizer},
        EULER,
    ),
    "tiny-sd3": Blueprint(
        "StableDiffusion3Pipeline",
        {
            "transformer": Part("diffusers", SD3Transformer2DModel, SD3Config, {
                "sample_size": 8, "patch_size": 2, "in_channels": LATENT_CHANNELS, "out_channels": LATENT_CHANNELS,
                "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 128,
                "caption_projection_dim": 128, "pooled_projection_dim": 96, "pos_embed_max_size": 8,
                "dual_attention_layers": [], "qk_norm": "rms_norm",
            }),
            "text_encoder": _clip(CLIPTextModelWithProjection, 32),
            "text_encoder_2": _clip(CLIPTextModelWithProjection, 64),
            "text_encoder_3": _t5(128),
            "vae": KL,
        },
        {"tokenizer": clip_tokenizer, "tokenizer_2": clip_tokenizer, "tokenizer_3": t5_tokenizer},
        EULER,
    ),
}  # fmt: skip
