"""Small random SANA pipelines in diffusers' own layout, their weights strong enough that all they are told shows."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

MAX_TOKENS = 10  # the tokenizer's own limit
COMPRESSION, CHANNELS = 4, 8  # pixels a latent vector stands for, in both directions; its length

WORDS = [
    "a", "an", "and", "above", "below", "left", "right", "of", "the", "one", "two", "three", "red", "green", "blue", "yellow",
    "circle", "square", "triangle", "star", "small", "large", "happy", "cat", "dog", "photo",
]  # fmt: skip
STAGES = {
    "block_out_channels": (8, 16, 16), "layers_per_block": (1, 1, 1), "qkv_multiscales": ((), (), (5,)),
    "block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
}  # fmt: skip
VAE = {
    "latent_channels": CHANNELS, "attention_head_dim": 8, "scaling_factor": 0.4, "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv", **{f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in STAGES.items()},
}  # fmt: skip
TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TRANSFORMER = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32, "caption_channels": 16,
    "mlp_ratio": 2.5, "sample_size": 8, "patch_size": 1,
}  # fmt: skip


def dpm(**changes) -> DPMSolverMultistepScheduler:
    """The scheduler that SANA is released with."""
    released = {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    return DPMSolverMultistepScheduler(**released | {"algorithm_type": "dpmsolver++", "solver_order": 2} | changes)


def euler(**changes) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**{"shift": 2.0} | changes)


def save_pipeline(folder: Path, scheduler=None, seed: int = 0, **transformer) -> SanaPipeline:
    """Writes a random pipeline in float32 to `folder` and returns diffusers' own form of it.

    scheduler: one of diffusers', SANA's if None; transformer: changes to the config of the transformer.
    """
    torch.manual_seed(seed)
    networks = {
        "transformer": SanaTransformer2DModel(**TRANSFORMER | transformer),
        "text_encoder": Gemma2Model(Gemma2Config(**TEXT, attn_implementation="eager")),
        "vae": AutoencoderDC(**VAE),
    }
    for name, network in networks.items():
        network.eval().requires_grad_(False)
        {"transformer": _strengthen_transformer, "text_encoder": _strengthen_text, "vae": _strengthen_vae}[name](network)
    pipeline = SanaPipeline(tokenizer=make_tokenizer(), scheduler=scheduler or dpm(), **networks)
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, <bos> first, <unk> for what is not known; as in Gemma's, capitals and spaces at the end count."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"▁{w}" for w in WORDS)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        padding_side="right", model_max_length=MAX_TOKENS)  # fmt: skip


def _strengthen_transformer(network: torch.nn.Module) -> None:
    for p in network.parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else p[0].numel() ** -0.5))


def _strengthen_text(network: torch.nn.Module) -> None:
    for name, p in network.named_parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.ndim == 1 else 1.0 if "embed" in name else 1.5 * p.shape[1] ** -0.5))


def _strengthen_vae(network: torch.nn.Module) -> None:
    for name, p in network.named_parameters():
        if p.ndim > 1:
            p.normal_(0, p[0].numel() ** -0.5)
        else:
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
