"""Rewards that are the cosine between a picture and its prompt in a CLIP (arXiv 2103.00020), each on its published scale."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.models.loading.component import Component
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.models.vision.clip import CLIPConfig, CLIPModel
from solrl_jax.models.vision.image_resize import MEAN, STD, Preprocessing
from solrl_jax.models.vision.open_clip import locate_open_clip_tensors
from solrl_jax.rewards.network import loader, open_network
from solrl_jax.rewards.protocol import Loader, Scores
from solrl_jax.rewards.sources import find
from solrl_jax.rewards.texts import Tokenize, clip_texts, open_clip_texts, open_tokenizer

# HPS v2.1 is OpenCLIP's ViT-H-14. Its file does not say the sizes. `eos_token_id` 2 means: a text ends at its highest token id
# (`models.vision.clip.TextModel.at_end`).
HPS = CLIPConfig.from_dict({
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "hidden_act": "gelu", "eos_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "hidden_act": "gelu", "patch_size": 14,
    },
})  # fmt: skip


def clipscore(paths: Mapping[str, str]) -> Loader:
    """CLIPScore (arXiv 2104.08718) with OpenAI's ViT-L/14: `exp(logit_scale) / 100` times the cosine, about the cosine."""
    return _scaled(paths, ("clipscore", "clipscore"), 100, kernel="bilinear", eight_bit=False)


def pickscore(paths: Mapping[str, str]) -> Loader:
    """PickScore v1 (arXiv 2305.01569) with a fine-tuned ViT-H/14: `exp(logit_scale) / 26` times the cosine, about 0.8."""
    return _scaled(
        paths,
        ("pickscore", "pickscore/tokenizer"),
        26,
        kernel="bicubic",
        eight_bit=True,
        odd="down",
    )


def hpsv2(paths: Mapping[str, str], config: CLIPConfig = HPS) -> Loader:
    """HPS v2.1 (arXiv 2306.09341) with a fine-tuned ViT-H/14 in OpenCLIP's layout: the cosine, about 0.3."""
    network = open_network(
        lambda rngs: CLIPModel(config, rngs=rngs), find("hpsv2", paths), locate_open_clip_tensors
    )
    preprocessing = Preprocessing(
        config.vision_config.image_size, "bicubic", eight_bit=False, fit="pad"
    )
    texts = open_clip_texts(
        find("hpsv2/tokenizer", paths), config.text_config.max_position_embeddings
    )
    return _cosine(network, preprocessing, texts, lambda model: jnp.ones(()))


def tiny_clip(paths: Mapping[str, str]) -> Loader:
    """The cosine in the embedded CLIP, about -0.2 to 0.6. Pictures must have that CLIP's own size."""
    folder = EMBEDDED_FOLDER / "tiny-clip"
    config = CLIPConfig.read(folder)
    network = open_network(lambda rngs: CLIPModel(config, rngs=rngs), folder)
    texts = clip_texts(folder, open_tokenizer(folder).model_max_length)
    return _cosine(network, lambda images: (images - MEAN) / STD, texts, lambda model: jnp.ones(()))


def _scaled(
    paths: Mapping[str, str], names: tuple[str, str], divisor: float, **resize: Any
) -> Loader:
    """The cosine in a CLIP in the layout of transformers, times `exp(logit_scale) / divisor`.

    names: of the network and of its tokenizer, in `reward.paths`.
    """
    folder, tokenizer = (find(name, paths) for name in names)
    config = CLIPConfig.read(folder)
    network = open_network(lambda rngs: CLIPModel(config, rngs=rngs), folder)
    preprocessing = Preprocessing(config.vision_config.image_size, fit="crop", **resize)
    texts = clip_texts(tokenizer, config.text_config.max_position_embeddings)
    return _cosine(
        network,
        preprocessing,
        texts,
        lambda model: jnp.exp(model.logit_scale.get_value()) / divisor,
    )


def _cosine(
    network: Component,
    preprocess: Callable[[Float[Array, "b H W 3"]], Float[Array, "b h w 3"]],
    tokenize: Tokenize,
    scale: Callable[[CLIPModel], Array],
) -> Loader:
    """The reward `scale(model)` (a scalar) times the cosine between picture and prompt."""

    def score(params: Any, images: Array, tokens: dict[str, Array]) -> Scores:
        model = network(network.gather(params))
        image = unit(model.encode_image(preprocess(images)))
        text = unit(model.encode_text(tokens["ids"], tokens["mask"]))
        return {"reward": scale(model) * (image * text).sum(-1)}

    return loader(network, tokenize, score)


def unit(x: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Vectors divided by their lengths."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)
