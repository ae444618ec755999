"""Trains `tiny-clip`, a CLIP on images and captions.

Each caption is contrasted with one that differs in one word.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pretrain import recipe
from pretrain.blueprints import CLIP
from pretrain.data import near_miss
from pretrain.recipe import MAX_TOKENS, Settings
from pretrain.training import train
from pretrain.words import clip_tokenizer
from solrl_jax.models.loading.weights import Params

BATCH = 128
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])  # of the channels, as in OpenAI's CLIP
STD = np.array([0.26862954, 0.26130258, 0.27577711])


def train_clip(settings: Settings, images: np.ndarray, captions: list[str]) -> None:
    """Trains `tiny-clip` and writes it in the layout of transformers' CLIPModel.

    Args:
        settings: Where files are kept.
        images: The training images [n, 32, 32, 3], uint8.
        captions: Their captions.
    """
    tokenizer = clip_tokenizer(MAX_TOKENS)

    def batches(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the indices [b] of images, and ids and mask [2 b, t] of captions."""
        rng = np.random.default_rng((settings.seed, 3, step))
        rows = rng.integers(len(images), size=BATCH)
        texts = [captions[row] for row in rows]
        texts += [near_miss(text, rng) for text in texts]
        tokens = tokenizer(texts, padding="max_length", max_length=MAX_TOKENS, return_tensors="np")
        return rows, tokens["input_ids"], tokens["attention_mask"]

    trained = train(
        "clip", CLIP.initialize(settings.seed + 2), _loss, images, batches, recipe.CLIP, settings
    )
    CLIP.save(settings.out / "tiny-clip", trained, np.float32)
    tokenizer.save_pretrained(settings.out / "tiny-clip")


def _loss(
    params: Params,
    images: jax.Array,
    batch: tuple[jax.Array, jax.Array, jax.Array],
    key: jax.Array,
) -> jax.Array:
    """CLIP's contrastive loss (arXiv 2103.00020), with near misses as additional negative texts.

    Args:
        params: The parameters of the CLIP.
        images: All images [n, 32, 32, 3], uint8.
        batch: The indices [b] of images, token ids and attention mask [2 b, t]; the second half are
            the near misses.
        key: The key of the noise on the pixels.
    """
    rows, ids, mask = batch
    pixels = (images[rows] / 255 - jnp.asarray(MEAN, jnp.float32)) / jnp.asarray(STD, jnp.float32)
    clip = CLIP(params)
    # Generated images are never quite clean.
    pixels = pixels + 0.03 * jax.random.normal(key, pixels.shape)

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    image = unit(clip.encode_image(pixels))
    text = unit(clip.encode_text(ids, mask))
    temperature = jnp.exp(jnp.minimum(clip.logit_scale.get_value(), jnp.log(100.0)))
    logits = temperature * image @ text.T  # [b, 2b]
    labels = jnp.arange(len(pixels))
    to_text = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    to_image = optax.softmax_cross_entropy_with_integer_labels(logits[:, : len(pixels)].T, labels)
    return (to_text + to_image).mean() / 2
