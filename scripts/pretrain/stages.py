"""The trainings of `tiny-sana` and `tiny-clip`, and what the other pipelines' have in common with them."""

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from pretrain.data import asked_rows, near_miss, to_signed
from pretrain.training import train
from pretrain.words import MAX_TOKENS, clip_tokenizer, gemma_tokenizer
from solrl_jax.models.weights import Params
from solrl_jax.shapes import scenes


def train_vae(args: Namespace, nets: dict, images: np.ndarray) -> Params:
    network, init = nets["vae"]

    def loss(params, batch, key):
        vae = network(params)
        z = vae.encode(batch)
        noisy = z + 0.1 * jax.lax.stop_gradient(z.std()) * jax.random.normal(key, z.shape)
        # a weak pull to unit size keeps the latent's scale from drifting
        return picture_loss(vae.decode(noisy), batch) + 1e-3 * (z**2).mean()

    return train("vae", init(args.seed), loss, picture_batches(images, args.seed, 1), args.vae_steps, 2e-3, args.work)


def picture_loss(decoded: jax.Array, image: jax.Array) -> jax.Array:
    error = decoded - image
    return jnp.abs(error).mean() + 2 * (error**2).mean()


def picture_batches(images: np.ndarray, seed: int, stream: int) -> Callable[[int], np.ndarray]:
    return lambda i: to_signed(images[np.random.default_rng((seed, stream, i)).integers(len(images), size=64)])


def encode_all(encode: Callable[[jax.Array], jax.Array], images: np.ndarray, path: Path, state: Path) -> np.ndarray:
    """Latents of all pictures [n, h, w, c], unscaled; kept at `path` until the autoencoder's `state` is newer."""
    if path.exists() and path.stat().st_mtime > state.stat().st_mtime:
        latents = np.load(path)
        if len(latents) == len(images):
            return latents
    encode = jax.jit(encode)
    chunks = np.split(images, range(500, len(images), 500))
    latents = np.concatenate([np.asarray(encode(to_signed(c))) for c in tqdm(chunks, desc="encoding")])
    np.save(path, latents)
    return latents


def train_flow(args: Namespace, nets: dict, latents: np.ndarray, captions: list[str]) -> Params:
    (flow, init_flow), (text, init_text) = nets["flow"], nets["text"]
    tokens = gemma_tokenizer()(["", *captions], padding="max_length", max_length=MAX_TOKENS, return_tensors="np")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]

    def loss(params, batch, key):
        x0, ids, mask = batch

        def velocity(x, sigma):
            hidden = text(params["text"])(ids, mask)
            return flow(params["flow"])(x, hidden, mask.astype(bool), 1000 * sigma)

        return flow_loss(velocity, x0, key)

    draw = row_drawer(captions, args.seed, 2, args.batch, args.flow_focus, args.flow_balance, args.flow_noise)

    def batches(i):
        rows, prompts = draw(i)
        return latents[rows], ids[prompts], mask[prompts]

    params = {"flow": init_flow(args.seed), "text": init_text(args.seed + 1)}
    legs = args.flow_stop, args.flow_more
    return train("flow", params, loss, batches, args.flow_steps, 1e-3, args.work, *legs)


Field = Callable[[jax.Array, jax.Array], jax.Array]


def flow_loss(velocity: Field, x0: jax.Array, key: jax.Array, teacher: Field | None = None) -> jax.Array:
    """Flow matching (arXiv 2210.02747): velocity(x [b, h, w, c], sigma [b]) is asked for `noise - x0`, or for the teacher's."""
    x, sigma, target = noised(x0, key)
    if teacher is not None:
        target = teacher(x, sigma)
    return ((velocity(x, sigma) - target) ** 2).mean()


def noised(x0: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pictures [b, h, w, c] on their way to noise: `x` there, sigma [b], and the velocity `noise - x0` [b, h, w, c].

    Noise levels are logit-normal (arXiv 2403.03206, eq. 19 with m = 0, s = 1).
    """
    noise_key, sigma_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, x0.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, (len(x0),)))
    return between(x0, noise, sigma), sigma, noise - x0


def between(x0: jax.Array, noise: jax.Array, sigma: jax.Array) -> jax.Array:
    """The points [b, h, w, c] at noise levels sigma [b] on the lines from pictures `x0` to `noise`, [b, h, w, c] both."""
    at = sigma[:, None, None, None]
    return (1 - at) * x0 + at * noise


def row_drawer(
    captions: list[str], seed: int, stream: int, batch: int, focus: int, balance: int, noise: Sequence[int]
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """A function from the step to the pictures of its batch and their prompts.

    A prompt is the picture's row in `["", *captions]`, and one in ten is the empty one. From step `focus` on there are only
    pictures that the prompt sets ask for; from `balance` on, two groups and their relation are in half of them, as there;
    from `noise[0]` on, to `noise[1]` if there is one, three prompts in ten are another picture's, as alt texts of the web are
    wrong: the network knows better than it does, and that is what reinforcement learning is there to bring out.
    """
    asked = asked_rows(captions)
    paired = np.array([len(scenes.parse(captions[row]).groups) == 2 for row in asked])
    singles, pairs = asked[~paired], asked[paired]

    def draw(i):
        rng = np.random.default_rng((seed, stream, i))
        rows = rng.integers(len(captions), size=batch)
        if i >= balance:
            rows = np.where(rng.random(batch) < 0.5, pairs[rows % len(pairs)], singles[rows % len(singles)])
        elif i >= focus:
            rows = asked[rows % len(asked)]
        prompts = np.where(rng.random(batch) < 0.1, 0, rows + 1)
        if erring(i, noise):
            prompts = np.where(rng.random(batch) < 0.3, rng.permutation(prompts), prompts)
        return rows, prompts

    return draw


def erring(i: int, noise: Sequence[int]) -> bool:
    """Whether captions are wrong at step `i`: from `noise[0]` on, to `noise[1]` if there is one."""
    return bool(noise) and noise[0] <= i < (*noise, math.inf)[1]


def train_clip(args: Namespace, nets: dict, images: np.ndarray, captions: list[str]) -> Params:
    network, init = nets["clip"]
    tokenizer = clip_tokenizer(MAX_TOKENS)

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
