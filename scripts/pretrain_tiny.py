"""Makes the embedded pipelines from nothing: `solrl_jax/pipelines/tiny-sana` and `solrl_jax/pipelines/tiny-clip`.

    python scripts/pretrain_tiny.py                 # all stages, about two hours on 2 cores
    python scripts/pretrain_tiny.py --stage flow    # one stage: vae, flow, clip

Three networks are trained on rendered pictures of coloured shapes and their captions, never on a held-out caption:

* vae: a small DC-AE, 32 x 32 pixels to 8 x 8 latents of 8 channels (L1 + L2, and noise on the latents so that the decoder
  forgives a flow that is not quite there);
* flow: a SANA transformer and its Gemma-2 text encoder, together, on the flow-matching loss, with one prompt in ten left empty
  so that guidance has something to lean on; on all scenes first, then on those that the prompt sets ask for. It is
  stopped while it still fails often: reinforcement learning wants room;
* clip: a CLIP on the same pairs, every caption beside one that differs in a word.

Everything is drawn from --seed. Each stage keeps its state in --work and goes on from there after an interruption.
"""

import argparse
import dataclasses
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from models.autoencoder_dc import AutoencoderDC, AutoencoderDCConfig
from models.clip import CLIPConfig, CLIPModel
from models.gemma2 import Gemma2Config, Gemma2Model
from models.sana import SanaConfig, SanaTransformer2DModel
from models.weights import save_component, to_torch
from solrl_jax.shapes import scenes

PIPELINES = Path(__file__).parents[1] / "solrl_jax" / "pipelines"
MAX_TOKENS = 24

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
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
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
    "text_config": CLIP_TOWER | {"num_hidden_layers": 2, "vocab_size": 32, "max_position_embeddings": MAX_TOKENS,
                                 "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": CLIP_TOWER | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 4, "num_channels": 3},
}  # fmt: skip
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- networks


@dataclasses.dataclass(frozen=True)
class Network:
    """A graph without numbers, and the abstract state that names them."""

    graphdef: nnx.GraphDef
    state: nnx.State

    @classmethod
    def of(cls, make) -> "Network":
        return cls(*nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))

    def __call__(self, params) -> nnx.Module:
        return nnx.merge(self.graphdef, params)


def networks() -> dict[str, tuple[Network, object]]:
    """Each network with a function that initialises its parameters from a seed."""
    makers = {
        "vae": lambda r: AutoencoderDC(AutoencoderDCConfig.from_dict(VAE), rngs=r),
        "text": lambda r: Gemma2Model(Gemma2Config.from_dict(TEXT), rngs=r),
        "flow": lambda r: SanaTransformer2DModel(SanaConfig.from_dict(FLOW), rngs=r),
        "clip": lambda r: CLIPModel(CLIPConfig.from_dict(CLIP), rngs=r),
    }
    init = lambda make, seed: nnx.to_pure_dict(nnx.split(make(nnx.Rngs(seed)))[1])
    return {name: (Network.of(make), partial(init, make)) for name, make in makers.items()}


def make_tokenizer(end: bool) -> PreTrainedTokenizerFast:
    """One token a word; `end` adds the end-of-text token that CLIP pools at (Gemma's own adds only a beginning)."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *scenes.VOCABULARY]
    assert len(words) <= TEXT["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if end else "<bos> $A", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        padding_side="right", model_max_length=MAX_TOKENS)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------------- data


def make_dataset(count: int, seed: int, cache: Path) -> tuple[np.ndarray, list[str]]:
    """`count` pictures [n, 32, 32, 3] uint8 and their captions, none held out."""
    path = cache / f"pictures-{count}-{seed}.npz"
    if path.exists():
        with np.load(path) as file:
            return file["images"], list(file["captions"])
    rng = np.random.default_rng(seed)
    images, captions = np.empty((count, 32, 32, 3), np.uint8), []
    with tqdm(total=count, desc="rendering") as bar:
        while len(captions) < count:
            scene = scenes.draw_scene(rng)
            caption = scenes.caption(scene)
            if not scenes.held_out(caption):
                images[len(captions)] = scenes.render(scene, rng)
                captions.append(caption)
                bar.update()
    np.savez(path, images=images, captions=np.array(captions))
    return images, captions


def to_signed(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float32) / 127.5 - 1


def is_asked(caption: str) -> bool:
    """Whether the prompt sets may hold it: one group of any count, or two single objects and how they lie to each other."""
    scene = scenes.parse(caption)
    return len(scene.groups) == 1 or sum(group.count for group in scene.groups) == 2


def near_miss(caption: str, rng: np.random.Generator) -> str:
    """The caption with one attribute changed: what a reward has to tell apart."""
    scene = scenes.parse(caption)
    while True:
        i = int(rng.integers(len(scene.groups)))
        group = scene.groups[i]
        match rng.integers(4):
            case 0:
                change = dataclasses.replace(group, colour=str(rng.choice(scenes.COLOURS)))
            case 1:
                change = dataclasses.replace(group, shape=str(rng.choice(scenes.SHAPES)))
            case 2:
                change = dataclasses.replace(group, count=int(rng.integers(1, 4)))
            case _:
                change = group
        groups = tuple(change if j == i else g for j, g in enumerate(scene.groups))
        relation = scene.relation
        if change == group and relation is not None:
            relation = str(rng.choice(scenes.RELATIONS))
        try:
            other = scenes.caption(scenes.Scene(groups, relation))
        except ValueError:
            continue
        if other != caption:
            return other


# ---------------------------------------------------------------------------------------------------------------- training


def train(name: str, params, loss, batches, steps: int, rate: float, work: Path, stop: int | None = None):
    """AdamW with warm-up and a cosine end over `steps`; returns the averaged parameters. Resumes from `work`.

    stop: leave the schedule there, before its end.

    loss(params, batch, key) -> scalar; batches(step) -> batch. Both are functions of the step alone, so that an interrupted
    training ends where an uninterrupted one does.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, 100, steps, rate / 20), b2=0.99, weight_decay=1e-3),
    )
    # a copy: donated buffers may appear once
    state = {"params": params, "average": jax.tree.map(jnp.copy, params), "opt": optimizer.init(params), "step": jnp.int32(0)}
    leaves, structure = jax.tree.flatten(state)
    path = work / f"{name}.safetensors"
    if path.exists():
        stored = load_file(path)
        state = jax.tree.unflatten(structure, [jnp.asarray(stored[str(i)]) for i in range(len(leaves))])

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(0), state["step"])
        value, gradient = jax.value_and_grad(loss)(state["params"], batch, key)
        update, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], update)
        decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
        mean = jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, state["average"], params)
        return {"params": params, "average": mean, "opt": opt, "step": state["step"] + 1}, value

    def save(state):
        partial_path = path.with_suffix(".partial")
        save_file({str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}, partial_path)
        partial_path.replace(path)

    smooth, started, last = None, time.time(), steps if stop is None else stop
    for i in tqdm(range(int(state["step"]), last), desc=name, mininterval=30):
        state, value = step(state, batches(i))
        smooth = float(value) if smooth is None else 0.98 * smooth + 0.02 * float(value)
        if (i + 1) % 100 == 0 or i + 1 == last:
            save(state)
            print(f"{name} step {i + 1}/{last} loss {smooth:.4f} {time.time() - started:.0f} s", flush=True)
    return state["average"]


def train_vae(args, nets, images) -> dict:
    network, init = nets["vae"]

    def loss(params, batch, key):
        vae = network(params)
        z = vae.encode(batch)
        noisy = z + 0.1 * jax.lax.stop_gradient(z.std()) * jax.random.normal(key, z.shape)
        error = vae.decode(noisy) - batch
        # a weak pull to unit size keeps the latent's scale from drifting
        return jnp.abs(error).mean() + 2 * (error**2).mean() + 1e-3 * (z**2).mean()

    batches = lambda i: to_signed(images[np.random.default_rng((args.seed, 1, i)).integers(len(images), size=64)])
    return train("vae", init(args.seed), loss, batches, args.vae_steps, 2e-3, args.work)


def encode_all(nets, vae, images, work: Path) -> np.ndarray:
    """Latents of all pictures [n, 8, 8, 8], unscaled; kept beside the state of the autoencoder."""
    path = work / "latents.npy"
    if path.exists() and path.stat().st_mtime > (work / "vae.safetensors").stat().st_mtime:
        return np.load(path)
    network, _ = nets["vae"]
    encode = jax.jit(lambda x: network(vae).encode(x))
    chunks = np.split(images, range(500, len(images), 500))
    latents = np.concatenate([np.asarray(encode(to_signed(c))) for c in tqdm(chunks, desc="encoding")])
    np.save(path, latents)
    return latents


def train_flow(args, nets, latents, captions) -> dict:
    (flow, init_flow), (text, init_text) = nets["flow"], nets["text"]
    tokens = make_tokenizer(end=False)(["", *captions], padding="max_length", max_length=MAX_TOKENS, return_tensors="np")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]

    def loss(params, batch, key):
        x0, ids, mask = batch
        noise_key, sigma_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, x0.shape)
        sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, (len(x0),)))  # logit-normal, as SANA trains
        x = (1 - sigma)[:, None, None, None] * x0 + sigma[:, None, None, None] * noise
        hidden = text(params["text"])(ids, mask)
        v = flow(params["flow"])(x, hidden, mask.astype(bool), 1000 * sigma)
        return ((v - (noise - x0)) ** 2).mean()

    asked = np.array([i for i, caption in enumerate(captions) if is_asked(caption)])

    def batches(i):
        rng = np.random.default_rng((args.seed, 2, i))
        rows = rng.integers(len(latents), size=args.batch)
        if i >= args.flow_focus:
            rows = asked[rows % len(asked)]
        prompt = np.where(rng.random(args.batch) < 0.1, 0, rows + 1)
        return latents[rows], ids[prompt], mask[prompt]

    params = {"flow": init_flow(args.seed), "text": init_text(args.seed + 1)}
    return train("flow", params, loss, batches, args.flow_steps, 1e-3, args.work, args.flow_stop)


def train_clip(args, nets, images, captions) -> dict:
    network, init = nets["clip"]
    tokenizer = make_tokenizer(end=True)

    def loss(params, batch, key):
        pixels, ids, mask = batch
        clip = network(params)
        pixels = pixels + 0.03 * jax.random.normal(key, pixels.shape)  # generated pictures are never quite clean
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        image, text = unit(clip.encode_image(pixels)), unit(clip.encode_text(ids, mask))
        logits = (
            jnp.exp(jnp.minimum(clip.logit_scale.get_value(), jnp.log(100.0))) * image @ text.T
        )  # [b, 2b]: near misses last
        to_text = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(pixels)))
        to_image = optax.softmax_cross_entropy_with_integer_labels(logits[:, : len(pixels)].T, jnp.arange(len(pixels)))
        return (to_text + to_image).mean() / 2

    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])

    def batches(i):
        rng = np.random.default_rng((args.seed, 3, i))
        rows = rng.integers(len(images), size=128)
        texts = [captions[r] for r in rows]
        tokens = tokenizer(
            texts + [near_miss(t, rng) for t in texts], padding="max_length", max_length=MAX_TOKENS, return_tensors="np"
        )
        pixels = ((images[rows] / 255 - mean) / std).astype(np.float32)
        return pixels, tokens["input_ids"], tokens["attention_mask"]

    return train("clip", init(args.seed + 2), loss, batches, args.clip_steps, 1e-3, args.work)


# ------------------------------------------------------------------------------------------------------------------ export


def export_sana(nets, vae, flow, scale: float) -> None:
    """Writes `tiny-sana` as diffusers' SanaPipeline would, in BF16 as SANA is released."""
    folder = PIPELINES / "tiny-sana"
    save = lambda part, file, config, name, params: save_component(
        folder / part, file, config, to_torch(nets[name][0].state, params), jnp.bfloat16
    )
    named = lambda name, config: {"_class_name": name} | config
    save("vae", "diffusion_pytorch_model.safetensors", named("AutoencoderDC", VAE | {"scaling_factor": scale}), "vae", vae)
    save("transformer", "diffusion_pytorch_model.safetensors", named("SanaTransformer2DModel", FLOW), "flow", flow["flow"])
    save("text_encoder", "model.safetensors", TEXT, "text", flow["text"])
    make_tokenizer(end=False).save_pretrained(folder / "tokenizer")
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


def export_clip(nets, params) -> None:
    """Writes `tiny-clip` in the layout of transformers' CLIPModel."""
    folder = PIPELINES / "tiny-clip"
    save_component(folder, "model.safetensors", CLIP, to_torch(nets["clip"][0].state, params), np.float32)
    make_tokenizer(end=True).save_pretrained(folder)


def export_prompts(seed: int) -> None:
    """Writes the prompt sets: captions seen in pre-training to train on, held-out ones to evaluate on."""
    folder = PIPELINES.parent / "prompt_sets"
    folder.mkdir(exist_ok=True)
    for name, count, held_out in (("shapes-train", 256, False), ("shapes-test", 26, True)):
        drawn = scenes.draw_prompts(np.random.default_rng((seed, 4, held_out)), 10 * count, held_out)
        drawn = [prompt for prompt in drawn if is_asked(prompt)]
        alone = [prompt for prompt in drawn if len(scenes.parse(prompt).groups) == 1]
        pairs = [prompt for prompt in drawn if prompt not in alone]
        chosen = {*alone[: 4 * count // 7], *pairs[: count - 4 * count // 7]}
        prompts = [prompt for prompt in drawn if prompt in chosen]
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["all", "vae", "flow", "clip"], default="all")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain"), help="where states are kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vae-steps", type=int, default=900)
    parser.add_argument("--flow-steps", type=int, default=4000)
    parser.add_argument("--flow-focus", type=int, default=2600, help="from here on, only scenes that the prompt sets ask for")
    parser.add_argument(
        "--flow-stop", type=int, default=3700, help="where the flow leaves its schedule: early enough to still fail often"
    )
    parser.add_argument("--clip-steps", type=int, default=500)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    export_prompts(args.seed)
    nets = networks()
    images, captions = make_dataset(args.pictures, args.seed, args.work)
    if args.stage in ("all", "vae", "flow"):
        vae = train_vae(args, nets, images)
    if args.stage in ("all", "flow"):
        latents = encode_all(nets, vae, images, args.work)
        scale = round(float(1 / latents.std()), 5)  # the flow sees latents of unit size
        flow = train_flow(args, nets, latents * scale, captions)
        export_sana(nets, vae, flow, scale)
    if args.stage in ("all", "clip"):
        export_clip(nets, train_clip(args, nets, images, captions))


if __name__ == "__main__":
    main()
