"""Released rewards in miniature, with the same structure and files, small widths and random
weights; and PyTorch's scores.
"""

import importlib.util
import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from solrl_jax.models.vision.blip import MEAN, STD, ImageRewardConfig
from solrl_jax.models.vision.clip import CLIPConfig

POSITIONS = 77
PIXELS = (
    112  # side of the pictures that the networks are given: half of the released size, for speed
)
# longer than the scorers read, not ASCII, empty; changed by clean-up and by lower case
PROMPTS = (
    "a red circle above two small blue squares",
    "",
    " ".join(f"{i} very small purple triangles," for i in range(40)),
    "Ein Mädchen mit Äpfeln, 猫 and naïve café — “curly” ‘quotes’",
    "  An ASTRONAUT's   horse &amp; a cat\n",
)
PERCEIVED = (
    np.array([0.48145466, 0.4578275, 0.40821073]),
    np.array([0.26862954, 0.26130258, 0.27577711]),
)

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "eos_token_id": 2,
    "max_position_embeddings": POSITIONS,
}
VISION = {
    "hidden_size": 40,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
GELU = {"hidden_act": "gelu"}
SEEING = VISION | {"image_size": PIXELS}
HPS = CLIPConfig.from_dict(
    {"projection_dim": 24, "text_config": TEXT | GELU, "vision_config": SEEING | GELU}
)


def pictures(height: int, width: int, count: int = len(PROMPTS), seed: int = 0) -> np.ndarray:
    """Smooth pictures with edges, [count, height, width, 3] in [0, 1]; floats, not all of them
    whole levels.
    """
    rng = np.random.default_rng((seed, height, width))
    y = np.linspace(0, 1, height)[:, None, None]
    x = np.linspace(0, 1, width)[None, :, None]
    waves = [
        np.sin(rng.uniform(2, 12, 3) * y + rng.uniform(2, 12, 3) * x + rng.uniform(0, 6, 3))
        for _ in range(count)
    ]
    images = 0.5 + 0.5 * np.stack(waves)
    images[:, height // 3 : height // 2, width // 4 :] = rng.random((count, 1, 1, 3))
    return images.astype(np.float32)


def strengthen(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights so large that every token, position and pixel changes the output; float16 holds them
    exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.eval().requires_grad_(False).named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 2 and "embedding" in name:
            value = noise
        elif p.ndim > 1:
            value = 1.5 * noise / p[0].numel() ** 0.5
        else:
            value = (
                1.0
                if ("norm" in name.lower() or "ln_" in name) and name.endswith("weight")
                else 0.0
            ) + 0.3 * noise
        p.copy_(value.half().float())
    return model


# --- tokenizers ---


def save_clip_tokenizer(folder: Path) -> transformers.CLIPTokenizer:
    """A tokenizer like CLIP's: an alphabet of bytes and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        (word[:i], word[i] + "</w>" * (i == len(word) - 1))
        for word in ("red", "small", "very")
        for i in range(1, len(word))
    ]
    pieces = [
        *letters,
        *(f"{c}</w>" for c in letters),
        *map("".join, merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    tokenizer = transformers.CLIPTokenizer(
        {piece: i for i, piece in enumerate(pieces)}, merges, model_max_length=POSITIONS
    )
    tokenizer.save_pretrained(folder)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
    return tokenizer


def save_openai_tokenizer(folder: Path) -> None:
    """CLIP's vocabulary in transformers' form, from the merges in open_clip."""
    theirs = open_clip().tokenizer.SimpleTokenizer()
    vocabulary = {piece: i for piece, i in theirs.encoder.items() if i < 49406} | {
        "<|startoftext|>": 49406,
        "<|endoftext|>": 49407,
    }
    transformers.CLIPTokenizer(
        vocabulary, list(theirs.bpe_ranks), model_max_length=POSITIONS
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))


def save_bert_tokenizer(folder: Path) -> transformers.BertTokenizer:
    """A tokenizer like BERT's, uncased, with an alphabet of letters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789", "猫"]
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{c}" for c in letters),
        *",.'&;—“”‘’",
        "red",
        "small",
    ]
    transformers.BertTokenizer(
        {word: i for i, word in enumerate(words)}, do_lower_case=True
    ).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return transformers.BertTokenizer.from_pretrained(folder)


# --- CLIP as transformers has it: CLIPScore, PickScore, the aesthetic predictor ---


def save_clip(
    folder: Path, act: str, seed: int
) -> tuple[transformers.CLIPModel, transformers.CLIPTokenizer]:
    tokenizer = save_clip_tokenizer(folder)
    (folder / "config.json").unlink()
    config = transformers.CLIPConfig(
        text_config=TEXT | {"hidden_act": act, "vocab_size": len(tokenizer)},
        vision_config=SEEING | {"hidden_act": act},
        projection_dim=24,
    )
    model = strengthen(transformers.CLIPModel(config), seed)
    model.logit_scale.fill_(4.6)
    model.save_pretrained(folder)
    return model, tokenizer


@torch.no_grad()
def clip_logits(model, tokenizer, pixels: torch.Tensor) -> np.ndarray:
    """`logits_per_image` of each picture and its prompt."""
    tokens = tokenizer(
        list(PROMPTS), padding=True, max_length=POSITIONS, truncation=True, return_tensors="pt"
    )
    return model(**tokens, pixel_values=pixels).logits_per_image.diagonal().double().numpy()


def as_tensor(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images.transpose(0, 3, 1, 2))


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(x, dtype=torch.float32).view(3, 1, 1) for x in PERCEIVED)
    return (pixels - mean) / std


def as_pil(images: np.ndarray) -> list[Image.Image]:
    return [
        Image.fromarray(np.round(255 * image).clip(0, 255).astype(np.uint8)) for image in images
    ]


def shorter_edge(height: int, width: int) -> tuple[int, int]:
    short = min(height, width)
    return int(PIXELS * height / short), int(PIXELS * width / short)


def clipscore_pixels(images: np.ndarray) -> torch.Tensor:
    height, width = shorter_edge(*images.shape[1:3])
    resized = torch.nn.functional.interpolate(
        as_tensor(images), (height, width), mode="bilinear", align_corners=False, antialias=True
    )
    top = round((height - PIXELS) / 2)
    left = round((width - PIXELS) / 2)
    return normalized(resized[:, :, top : top + PIXELS, left : left + PIXELS])


def processed(images: np.ndarray) -> torch.Tensor:
    square = {"height": PIXELS, "width": PIXELS}
    processor = CLIPImageProcessorPil(size={"shortest_edge": PIXELS}, crop_size=square)
    return processor(as_pil(images), return_tensors="pt")["pixel_values"]


# --- HPS v2.1: OpenCLIP ---


def open_clip() -> types.ModuleType:
    """open_clip. `make test` installs it without torchvision, which it needs only for pictures:
    empty classes stand in.
    """
    if "open_clip" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("open_clip")
    names = ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc")
    stand_ins = {f"torchvision{name}": _Empty(f"torchvision{name}") for name in names}
    sys.modules |= stand_ins
    try:
        return importlib.import_module("open_clip")
    finally:
        for name in stand_ins:  # other modules must not take them for the library
            del sys.modules[name]


class _Empty(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return sys.modules[full] if full in sys.modules else _AnyAttribute(name, (), {})


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> str:
        return name


def save_hps(file: Path, seed: int) -> torch.nn.Module:
    """ViT-H-14 in miniature: another head width in each tower, exact GELU; float16, as in the
    released file.
    """
    vision = {
        "image_size": PIXELS,
        "layers": VISION["num_hidden_layers"],
        "width": VISION["hidden_size"],
        "head_width": 20,
        "patch_size": VISION["patch_size"],
    }
    text = {
        "context_length": POSITIONS,
        "vocab_size": 49408,
        "width": TEXT["hidden_size"],
        "heads": TEXT["num_attention_heads"],
        "layers": TEXT["num_hidden_layers"],
    }
    model = strengthen(open_clip().model.CLIP(24, vision, text, quick_gelu=False), seed)
    save_file({name: t.half().contiguous() for name, t in model.state_dict().items()}, file)
    return model


@torch.no_grad()
def hps_scores(model: torch.nn.Module, images: np.ndarray) -> np.ndarray:
    scale = PIXELS / max(images.shape[1:3])
    height, width = (round(n * scale) for n in images.shape[1:3])
    resized = torch.nn.functional.interpolate(
        as_tensor(images), (height, width), mode="bicubic", align_corners=False, antialias=True
    )
    top = (PIXELS - height) // 2
    left = (PIXELS - width) // 2
    padded = torch.nn.functional.pad(
        resized, (left, PIXELS - width - left, top, PIXELS - height - top)
    )
    image = model.encode_image(normalized(padded), normalize=True)
    text = model.encode_text(
        open_clip().tokenizer.SimpleTokenizer(context_length=POSITIONS)(list(PROMPTS)),
        normalize=True,
    )
    return (image * text).sum(-1).double().numpy()


# --- ImageReward: BLIP ---

# of the text and of the vision transformer
WIDTH = 24
EYES = 32


def make_head(features: int, seed: int) -> torch.nn.Sequential:
    sizes = [features, 1024, 128, 64, 16, 1]
    linears = [torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    dropouts = [torch.nn.Dropout() for _ in range(3)]
    a, b, c, d, e = linears
    return strengthen(
        torch.nn.Sequential(a, dropouts[0], b, dropouts[1], c, dropouts[2], d, e), seed
    )


def save_image_reward(
    file: Path, vocabulary: int, seed: int
) -> tuple[ImageRewardConfig, tuple[torch.nn.Module, ...]]:
    """transformers' encoders under the names of the released file, with the other tensors of that
    file.
    """
    config = ImageRewardConfig(
        vision_width=EYES,
        vision_layers=3,
        vision_heads=4,
        text_width=WIDTH,
        text_layers=2,
        text_heads=3,
        text_mlp=4 * WIDTH,
        vocabulary=vocabulary,
        positions=50,
        image_size=PIXELS,
    )
    vision = transformers.BlipVisionModel(
        transformers.BlipVisionConfig(
            hidden_size=EYES,
            intermediate_size=4 * EYES,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=PIXELS,
            patch_size=16,
            hidden_act="gelu",
            layer_norm_eps=1e-6,
        )
    )
    text = transformers.models.blip.modeling_blip_text.BlipTextModel(
        transformers.BlipTextConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            encoder_hidden_size=EYES,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=50,
            hidden_act="gelu",
            layer_norm_eps=1e-12,
            is_decoder=True,
        ),
        add_pooling_layer=False,
    )
    strengthen(vision, seed), strengthen(text, seed + 1)
    head = make_head(WIDTH, seed + 2)
    tensors = {
        f"blip.visual_encoder.{_blip_name(name)}": t for name, t in vision.state_dict().items()
    }
    tensors |= {f"blip.text_encoder.{name}": t for name, t in text.state_dict().items()}
    tensors |= {f"mlp.layers.{name}": t for name, t in head.state_dict().items()}
    tensors |= {"blip.text_encoder.embeddings.position_ids": torch.arange(50)[None]}
    tensors |= {
        f"blip.{x}_proj.{name}": torch.ones(3)
        for x in ("vision", "text")
        for name in ("weight", "bias")
    }
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, file)
    return config, (vision, text, head)


def _blip_name(name: str) -> str:
    """The released file's name of a tensor of transformers' vision model."""
    outside = {
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding": "pos_embed",
        "embeddings.patch_embedding.weight": "patch_embed.proj.weight",
        "embeddings.patch_embedding.bias": "patch_embed.proj.bias",
        "post_layernorm.weight": "norm.weight",
        "post_layernorm.bias": "norm.bias",
    }
    if name in outside:
        return outside[name]
    for theirs, released in (
        ("encoder.layers.", "blocks."),
        ("layer_norm", "norm"),
        ("self_attn.projection", "attn.proj"),
        ("self_attn", "attn"),
    ):
        name = name.replace(theirs, released)
    return name


@torch.no_grad()
def image_reward_scores(
    networks: tuple[torch.nn.Module, ...], tokenizer, images: np.ndarray
) -> np.ndarray:
    vision, text, head = networks
    height, width = shorter_edge(*images.shape[1:3])
    bicubic = Image.Resampling.BICUBIC
    resized = np.stack(
        [
            p.resize((width, images.shape[1]), bicubic).resize((width, height), bicubic)
            for p in as_pil(images)
        ]
    )
    top = round((height - PIXELS) / 2)
    left = round((width - PIXELS) / 2)
    cropped = resized[:, top : top + PIXELS, left : left + PIXELS].astype(np.float32) / 255
    features = vision(pixel_values=normalized(as_tensor(cropped))).last_hidden_state
    tokenizer.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)
    tokens = tokenizer(
        list(PROMPTS), padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    out = text(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        encoder_hidden_states=features,
        encoder_attention_mask=torch.ones(features.shape[:2], dtype=torch.long),
        is_decoder=False,
    )
    return ((head(out.last_hidden_state[:, 0])[:, 0] - MEAN) / STD).double().numpy()
