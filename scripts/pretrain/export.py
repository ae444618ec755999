"""Writes `tiny-sana`, `tiny-clip` and the prompt sets."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pretrain.data import is_asked
from pretrain.networks import CLIP, FLOW, TEXT, VAE
from pretrain.words import MAX_TOKENS, clip_tokenizer, gemma_tokenizer
from solrl_jax.models.weights import Params, save_component, to_torch
from solrl_jax.shapes import scenes

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False,
}  # fmt: skip


def export_sana(nets: dict, vae: Params, flow: Params, scale: float, folder: Path) -> None:
    """Writes `tiny-sana` as diffusers' SanaPipeline would, in BF16 as SANA is released."""
    save = lambda part, file, config, name, params: save_component(
        folder / part, file, config, to_torch(nets[name][0].state, params), jnp.bfloat16
    )
    named = lambda name, config: {"_class_name": name} | config
    save("vae", "diffusion_pytorch_model.safetensors", named("AutoencoderDC", VAE | {"scaling_factor": scale}), "vae", vae)
    save("transformer", "diffusion_pytorch_model.safetensors", named("SanaTransformer2DModel", FLOW), "flow", flow["flow"])
    save("text_encoder", "model.safetensors", TEXT, "text", flow["text"])
    gemma_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER, indent=2) + "\n")
    index = {
        "_class_name": "SanaPipeline",
        "scheduler": ["diffusers", SCHEDULER["_class_name"]],
        "text_encoder": ["transformers", "Gemma2Model"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "transformer": ["diffusers", "SanaTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderDC"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def export_clip(nets: dict, params: Params, folder: Path) -> None:
    """Writes `tiny-clip` in the layout of transformers' CLIPModel."""
    save_component(folder, "model.safetensors", CLIP, to_torch(nets["clip"][0].state, params), np.float32)
    clip_tokenizer(MAX_TOKENS).save_pretrained(folder)


def export_prompts(seed: int, folder: Path) -> None:
    """Writes the prompt sets: captions seen in pre-training to train on, held-out ones to evaluate on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("shapes-train", 256, False), ("shapes-test", 26, True)):
        drawn = scenes.draw_prompts(np.random.default_rng((seed, 4, held_out)), 10 * count, held_out)
        drawn = [prompt for prompt in drawn if is_asked(prompt)]
        alone = [prompt for prompt in drawn if len(scenes.parse(prompt).groups) == 1]
        pairs = [prompt for prompt in drawn if prompt not in alone]
        chosen = {*alone[: 4 * count // 7], *pairs[: count - 4 * count // 7]}
        prompts = [prompt for prompt in drawn if prompt in chosen]
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")
