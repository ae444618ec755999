"""Small random pipelines in diffusers' layout. Their weights are so large that every input changes
the output.
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from solrl_jax.api import generate_with_latents

MAX_TOKENS = 10  # the tokenizer's own limit
# SANA: pixels per latent in each direction, channels
COMPRESSION = 4
CHANNELS = 8

WORDS = [
    "a",
    "an",
    "and",
    "above",
    "below",
    "left",
    "right",
    "of",
    "the",
    "one",
    "two",
    "three",
    "red",
    "green",
    "blue",
    "yellow",
    "circle",
    "square",
    "triangle",
    "star",
    "small",
    "large",
    "happy",
    "cat",
    "dog",
    "photo",
]
STAGES = {
    "block_out_channels": (8, 16, 16),
    "layers_per_block": (1, 1, 1),
    "qkv_multiscales": ((), (), (5,)),
    "block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
}
VAE = {
    "latent_channels": CHANNELS,
    "attention_head_dim": 8,
    "scaling_factor": 0.4,
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
    **{f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in STAGES.items()},
}
TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TRANSFORMER = {
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 16,
    "mlp_ratio": 2.5,
    "sample_size": 8,
    "patch_size": 1,
}

KL_COMPRESSION, KL_CHANNELS, CLIP_TOKENS = (
    2,
    4,
    9,
)  # FLUX, SD3: pixels per latent each way, channels, CLIP's tokens
KL = {
    "latent_channels": KL_CHANNELS,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "scaling_factor": 0.4,
    "shift_factor": 0.3,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIP_L = {  # released files have an end of text of 2, which means the highest token
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 12,
    "max_position_embeddings": CLIP_TOKENS,
    "hidden_act": "quick_gelu",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CLIP_G = CLIP_L | {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "projection_dim": 20,
    "hidden_act": "gelu",
}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3, "feed_forward_proj": "gated-gelu"}
FLUX = {
    "in_channels": 4 * KL_CHANNELS,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 6, 6),
    "guidance_embeds": True,
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": KL_CHANNELS,
    "out_channels": KL_CHANNELS,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "pos_embed_max_size": 9,
    "qk_norm": "rms_norm",
    "dual_attention_layers": (),
}

KL_FLUX2 = {
    name: value for name, value in KL.items() if name not in ("scaling_factor", "shift_factor")
} | {
    "use_quant_conv": True,
    "use_post_quant_conv": True,
}
FLUX2 = {
    name: value for name, value in KL.items() if name not in ("scaling_factor", "shift_factor")
} | {
    "use_quant_conv": True,
    "use_post_quant_conv": True,
}
QWEN3 = {  # three of the states are read, the last of them below the last layer
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 28,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
FLUX2 = {
    "in_channels": 4 * KL_CHANNELS,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}

# what Qwen3's template makes of a user's turn; the released one also writes system turns, tools and
# answers
CHAT_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
QWEN3 = {
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
QWEN3_DEEP = QWEN3 | {"num_hidden_layers": 28, "hidden_size": 16}  # FLUX.2 reads up to the 27th
ZIMAGE = {
    "in_channels": KL_CHANNELS,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 20,
    "axes_dims": [4, 6, 6],
    "axes_lens": [450, 32, 32],
}

QWEN_IMAGE = {
    "in_channels": 4 * KL_CHANNELS,
    "out_channels": KL_CHANNELS,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
QWEN_IMAGE_VAE = {
    "base_dim": 8,
    "z_dim": KL_CHANNELS,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [-0.5, 0.3, 1.1, -0.2],
    "latents_std": [1.5, 0.8, 2.2, 1.1],
}
QWEN_VL_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
}
QWEN_VL_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}

WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": KL_CHANNELS,
    "out_channels": KL_CHANNELS,
    "text_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
}
WAN_VAE = {  # four pixels per latent each way, and four frames
    "base_dim": 8,
    "z_dim": KL_CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [-0.5, 0.3, 1.1, -0.2],
    "latents_std": [1.5, 0.8, 2.2, 1.1],
    "scale_factor_spatial": 4,
}
WAN22_VAE = WAN_VAE | {  # shortcuts, and patches of two pixels: eight pixels per latent each way
    "base_dim": 4,
    "decoder_base_dim": 8,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 8,
}


def dpm(**changes) -> DPMSolverMultistepScheduler:
    """The scheduler that SANA is released with."""
    released = {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    return DPMSolverMultistepScheduler(
        **released | {"algorithm_type": "dpmsolver++", "solver_order": 2} | changes
    )


def euler(**changes) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 2.0} | changes)


def dynamic(**changes) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler that FLUX.1-dev is released with."""
    return euler(
        **{"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
        | changes
    )


def save_pipeline(folder: Path, scheduler=None, seed: int = 0, **transformer) -> SanaPipeline:
    """Writes a random SANA pipeline in float32 to `folder` and returns diffusers' form of it.

    scheduler: one of diffusers; None: SANA's. transformer: changes to the transformer's config.
    """
    torch.manual_seed(seed)
    networks = {
        "transformer": SanaTransformer2DModel(**TRANSFORMER | transformer),
        "text_encoder": Gemma2Model(Gemma2Config(**TEXT, attn_implementation="eager")),
        "vae": AutoencoderDC(**VAE),
    }
    for name, network in networks.items():
        network.eval().requires_grad_(False)
        {
            "transformer": _strengthen_transformer,
            "text_encoder": _strengthen_text,
            "vae": _strengthen_vae,
        }[name](network)
    return _saved(
        SanaPipeline(tokenizer=make_tokenizer(), scheduler=scheduler or dpm(), **networks), folder
    )


def save_flux_pipeline(folder: Path, scheduler=None, seed: int = 0, **transformer) -> FluxPipeline:
    """The same for FLUX.1-dev."""
    torch.manual_seed(seed)
    tokenizer = make_clip_tokenizer()
    tokenizer_2 = make_t5_tokenizer()
    network = FluxTransformer2DModel(**FLUX | transformer)
    pipeline = FluxPipeline(
        scheduler=scheduler or dynamic(),
        vae=_strong(AutoencoderKL(**KL), _strengthen_vae),
        text_encoder=_clip(CLIPTextModel, CLIP_L, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=_t5(network.config.joint_attention_dim, tokenizer_2),
        tokenizer_2=tokenizer_2,
        transformer=_strong(network, _strengthen_transformer),
    )
    _saved(pipeline, folder)
    # transformers 5 leaves out the prefix that released files have
    tensors = {f"text_model.{name}": t for name, t in pipeline.text_encoder.state_dict().items()}
    save_file(tensors, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    return pipeline


def save_flux2_pipeline(
    folder: Path, scheduler=None, seed: int = 0, distilled: bool = True, **transformer
) -> Flux2KleinPipeline:
    """The same for FLUX.2-klein. distilled: in four steps, without guidance."""
    torch.manual_seed(seed)
    tokenizer = make_qwen_tokenizer()
    vae = _strong(AutoencoderKLFlux2(**KL_FLUX2), _strengthen_vae)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    network = Flux2Transformer2DModel(**FLUX2 | transformer)
    encoder = Qwen3ForCausalLM(Qwen3Config(**QWEN3_DEEP, vocab_size=len(tokenizer)))
    return _saved(
        Flux2KleinPipeline(
            scheduler=scheduler or dynamic(),
            vae=vae,
            text_encoder=_strong(encoder, _strengthen_text),
            tokenizer=tokenizer,
            transformer=_strong(network, _strengthen_transformer),
            is_distilled=distilled,
        ),
        folder,
    )


def save_sd3_pipeline(
    folder: Path, scheduler=None, seed: int = 0, with_t5: bool = True, **transformer
) -> StableDiffusion3Pipeline:
    """The same for Stable Diffusion 3.5 Large. with_t5: with the third text encoder."""
    torch.manual_seed(seed)
    tokenizers = (
        make_clip_tokenizer(),
        make_clip_tokenizer(second=True),
        make_t5_tokenizer() if with_t5 else None,
    )
    network = _strong(SD3Transformer2DModel(**SD3 | transformer), _strengthen_transformer)
    network.pos_embed.pos_embed.normal_()  # the stored table is used, not the formula
    return _saved(
        StableDiffusion3Pipeline(
            transformer=network,
            scheduler=scheduler or euler(shift=3.0),
            vae=_strong(AutoencoderKL(**KL), _strengthen_vae),
            text_encoder=_clip(CLIPTextModelWithProjection, CLIP_L, tokenizers[0]),
            tokenizer=tokenizers[0],
            text_encoder_2=_clip(CLIPTextModelWithProjection, CLIP_G, tokenizers[1]),
            tokenizer_2=tokenizers[1],
            text_encoder_3=_t5(network.config.joint_attention_dim, tokenizers[2])
            if with_t5
            else None,
            tokenizer_3=tokenizers[2],
        ),
        folder,
    )


def save_zimage_pipeline(
    folder: Path, scheduler=None, seed: int = 0, encoder=Qwen3Model, **transformer
) -> ZImagePipeline:
    """The same for Z-Image. encoder: the class of the text encoder, Qwen3Model or
    Qwen3ForCausalLM.
    """
    torch.manual_seed(seed)
    tokenizer = make_qwen_tokenizer()
    network = ZImageTransformer2DModel(**ZIMAGE | transformer)
    qwen = Qwen3Config(**QWEN3, vocab_size=len(tokenizer), hidden_size=network.config.cap_feat_dim)
    return _saved(
        ZImagePipeline(
            scheduler=scheduler or euler(shift=6.0),
            vae=_strong(AutoencoderKL(**KL), _strengthen_vae),
            text_encoder=_strong(encoder(qwen), _strengthen_text),
            tokenizer=tokenizer,
            transformer=_strong(network, _strengthen_transformer),
        ),
        folder,
    )


def stretched(**changes) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler that Qwen-Image is released with."""
    released = {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02, "shift": 1.0}
    return dynamic(**released | changes)


def save_qwen_image_pipeline(
    folder: Path, scheduler=None, seed: int = 0, **transformer
) -> QwenImagePipeline:
    """The same for Qwen-Image. The text encoder has its vision part, which nothing reads."""
    torch.manual_seed(seed)
    tokenizer = make_qwen_tokenizer()
    network = QwenImageTransformer2DModel(**QWEN_IMAGE | transformer)
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=QWEN_VL_TEXT | {"vocab_size": len(tokenizer)},
            vision_config=QWEN_VL_VISION,
            attn_implementation="eager",
        )
    )
    return _saved(
        QwenImagePipeline(
            scheduler=scheduler or stretched(),
            vae=_strong(AutoencoderKLQwenImage(**QWEN_IMAGE_VAE), _strengthen_vae),
            text_encoder=_strong(encoder, _strengthen_text),
            tokenizer=tokenizer,
            transformer=_strong(network, _strengthen_transformer),
        ),
        folder,
    )


def unipc(**changes) -> UniPCMultistepScheduler:
    """The scheduler that Wan 2.1 is released with."""
    released = {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    return UniPCMultistepScheduler(**released | changes)


def save_wan22_pipeline(folder: Path, scheduler=None, seed: int = 0, **transformer) -> WanPipeline:
    """The same for Wan 2.2 TI2V 5B."""
    scheduler = scheduler or unipc(flow_shift=5.0)
    options = dict(vae=WAN22_VAE, expand_timesteps=True)
    return save_wan_pipeline(folder, scheduler, seed, **options, **transformer)


def save_wan_pipeline(
    folder: Path,
    scheduler=None,
    seed: int = 0,
    *,
    vae: dict = WAN_VAE,
    expand_timesteps: bool = False,
    **transformer,
) -> WanPipeline:
    """The same for Wan 2.1 T2V."""
    torch.manual_seed(seed)
    tokenizer = make_t5_tokenizer()
    network = WanTransformer3DModel(**WAN | transformer)
    text = UMT5Config(**T5, d_model=network.config.text_dim, vocab_size=len(tokenizer))
    return _saved(
        WanPipeline(
            scheduler=scheduler or unipc(),
            vae=_strong(AutoencoderKLWan(**vae), _strengthen_vae),
            text_encoder=_strong(UMT5EncoderModel(text), _strengthen_t5),
            tokenizer=tokenizer,
            transformer=_strong(network, _strengthen_transformer),
            expand_timesteps=expand_timesteps,
        ),
        folder,
    )


def generated(folder: Path, prompts: list[str], **options) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, H, W, 3] and their initial noise, by default in float32."""
    result = generate_with_latents(folder, prompts, **{"precision": "fp32"} | options)
    return result.images, result.latents


def _saved(pipeline, folder: Path):
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _strong(network: torch.nn.Module, strengthen) -> torch.nn.Module:
    strengthen(network.eval().requires_grad_(False))
    return network


def _clip(kind, fields: dict, tokenizer: CLIPTokenizer) -> torch.nn.Module:
    return _strong(kind(CLIPTextConfig(**fields, vocab_size=len(tokenizer))), _strengthen_clip)


def _t5(width: int, tokenizer: T5Tokenizer) -> T5EncoderModel:
    return _strong(
        T5EncoderModel(T5Config(**T5, d_model=width, vocab_size=len(tokenizer))), _strengthen_t5
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word after <bos>; other words are <unk>. Capitals and trailing spaces count, as
    in Gemma's tokenizer.
    """
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"▁{w}" for w in WORDS)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=MAX_TOKENS,
    )


def make_clip_tokenizer(second: bool = False) -> CLIPTokenizer:
    """About one token per word, in lower case. SD3's two tokenizers differ in the order of tokens
    and in the padding.
    """
    letters = [c for c in map(chr, range(33, 127)) if not c.isupper()]
    merges = [
        (word[:i], word[i] + "</w>" * (i == len(word) - 1))
        for word in WORDS
        for i in range(1, len(word))
    ]
    pieces = [*letters, *(f"{c}</w>" for c in letters), *map("".join, merges)]
    pieces = sorted(set(pieces), reverse=second)
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    pad = "!" if second else "<|endoftext|>"
    return CLIPTokenizer(
        vocabulary, list(dict.fromkeys(merges)), pad_token=pad, model_max_length=CLIP_TOKENS
    )


def make_t5_tokenizer() -> T5Tokenizer:
    """One token per known word, one per letter of other words; capitals are unknown."""
    words = [(f"▁{word}", -1.0) for word in WORDS]
    letters = [(c, -5.0) for c in "▁" + "".join(map(chr, range(97, 123)))]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *words, *letters]
    return T5Tokenizer(vocabulary, extra_ids=0, model_max_length=20)


def make_qwen_tokenizer() -> Qwen2Tokenizer:
    """About one token per word, bytes of other words, and the turns of Qwen3's chat template."""
    letters = sorted(ByteLevel.alphabet())
    merges = [(f"Ġ{word}"[:i], word[i - 1]) for word in WORDS for i in range(1, len(word) + 1)]
    pieces = dict.fromkeys([*letters, *map("".join, merges)])
    tokenizer = Qwen2Tokenizer(
        {piece: i for i, piece in enumerate(pieces)},
        list(dict.fromkeys(merges)),
        model_max_length=1000,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", "<think>", "</think>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _strengthen_transformer(network: torch.nn.Module) -> None:
    for p in network.parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else p[0].numel() ** -0.5))


def _strengthen_text(network: torch.nn.Module) -> None:
    for name, p in network.named_parameters():
        p.copy_(
            torch.randn_like(p)
            * (0.5 if p.ndim == 1 else 1.0 if "embed" in name else 1.5 * p.shape[1] ** -0.5)
        )


def _strengthen_clip(network: torch.nn.Module) -> None:
    for name, p in network.named_parameters():
        if p.ndim < 2:
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
        else:
            p.normal_(0, 1.0 if "embedding" in name else 1.2 * p.shape[1] ** -0.5)


def _strengthen_t5(network: T5EncoderModel) -> None:
    for name, p in network.named_parameters():
        if p.ndim == 1:
            p.normal_(1.0, 0.3)
        elif "shared" in name or "relative_attention_bias" in name:
            p.normal_()
        else:  # T5's logits are not scaled: the queries' weights are
            p.normal_(0, (p.shape[1] * (network.config.d_kv if ".q." in name else 1)) ** -0.5)


def _strengthen_vae(network: torch.nn.Module) -> None:
    for name, p in network.named_parameters():
        if p.ndim > 1:
            p.normal_(0, p[0].numel() ** -0.5)
        else:
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
