"""The training data of the embedded pipelines: rendered images of colored shapes with captions.

No caption is held out for evaluation.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pretrain import drawing
from pretrain.recipe import Curriculum
from solrl_jax.data.shapes import scenes

SIDE = 32  # pixels
BATCH = 64  # images or clips in a batch of an autoencoder

# Maps a step to the indices [b] of images or clips and those [b] of their prompts.
Draw = Callable[[int], tuple[np.ndarray, np.ndarray]]


def make_dataset(count: int, seed: int, cache: Path) -> tuple[np.ndarray, list[str]]:
    """Renders the training images, or reads them from a cache.

    Args:
        count: The number of images.
        seed: The seed of the scenes.
        cache: The folder that keeps the result.

    Returns:
        The images [n, 32, 32, 3] (uint8) and their captions.
    """
    path = cache / f"pictures-{count}-{seed}.npz"
    if path.exists():
        with np.load(path) as file:
            return file["images"], list(file["captions"])
    rng = np.random.default_rng(seed)
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    captions: list[str] = []
    with tqdm(total=count, desc="rendering") as bar:
        while len(captions) < count:
            scene = drawing.draw_scene(rng)
            caption = drawing.caption(scene)
            if not drawing.held_out(caption):
                images[len(captions)] = drawing.render(scene, rng)
                captions.append(caption)
                bar.update()
    np.savez(path, images=images, captions=np.array(captions))
    return images, captions


def write_prompt_sets(seed: int, folder: Path) -> None:
    """Writes `shapes-train`, captions used in pretraining, and `shapes-test`, held-out ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("shapes-train", 256, False), ("shapes-test", 26, True)):
        drawn = drawing.draw_prompts(
            np.random.default_rng((seed, 4, held_out)), 10 * count, held_out
        )
        drawn = [prompt for prompt in drawn if _is_asked(prompt)]
        alone = [prompt for prompt in drawn if len(scenes.parse_caption(prompt).groups) == 1]
        pairs = [prompt for prompt in drawn if prompt not in alone]
        chosen = {*alone[: 4 * count // 7], *pairs[: count - 4 * count // 7]}
        prompts = [prompt for prompt in drawn if prompt in chosen]
        (folder / f"{name}.txt").write_text("\n".join(prompts) + "\n")


def to_signed(images: jax.Array) -> jax.Array:
    """Maps uint8 pixels to float32 in [-1, 1]."""
    return images.astype(jnp.float32) / 127.5 - 1


def row_batches(
    count: int, seed: int, stream: int, batch: int = BATCH
) -> Callable[[int], np.ndarray]:
    """Returns a function from a step to the indices [batch] of `count` images or clips."""
    return lambda step: np.random.default_rng((seed, stream, step)).integers(count, size=batch)


def clip_batches(count: int, curriculum: Curriculum, batch: int, seed: int) -> Draw:
    """Returns a function from a step to a batch of clips.

    Args:
        count: The number of clips.
        curriculum: Which captions are used in a step.
        batch: The number of clips in a batch.
        seed: The seed of the batches.

    Returns:
        A function from the step to the indices [b] of the clips, and the indices [b] of the prompts
        in `["", *captions]`.
    """

    def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((seed, curriculum.stream, step))
        rows = rng.integers(count, size=batch)
        return rows, _choose_prompts(rows, rng, wrong=step in curriculum.wrong)

    return draw


def caption_batches(captions: list[str], curriculum: Curriculum, batch: int, seed: int) -> Draw:
    """Returns a function from a step to a batch of images.

    Args:
        captions: The captions of all images.
        curriculum: Which images and captions are used in a step.
        batch: The number of images in a batch.
        seed: The seed of the batches.

    Returns:
        A function from the step to the indices [b] of the images, and the indices [b] of the
        prompts in `["", *captions]`.
    """
    eligible_rows = np.array([row for row, caption in enumerate(captions) if _is_asked(caption)])
    paired = np.array(
        [len(scenes.parse_caption(captions[row]).groups) == 2 for row in eligible_rows]
    )
    singles = eligible_rows[~paired]
    pairs = eligible_rows[paired]

    def draw(step: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((seed, curriculum.stream, step))
        rows = rng.integers(len(captions), size=batch)
        if step >= curriculum.balance:
            rows = np.where(
                rng.random(batch) < 0.5, pairs[rows % len(pairs)], singles[rows % len(singles)]
            )
        elif step >= curriculum.focus:
            rows = eligible_rows[rows % len(eligible_rows)]
        return rows, _choose_prompts(rows, rng, wrong=step in curriculum.wrong)

    return draw


def _choose_prompts(rows: np.ndarray, rng: np.random.Generator, *, wrong: bool) -> np.ndarray:
    """Returns the prompts of a batch.

    One prompt in ten is empty, as classifier-free guidance requires.

    Args:
        rows: The indices [b] of the images or clips.
        rng: The source of random numbers.
        wrong: Whether 30 % of the prompts are replaced by those of other rows.

    Returns:
        The indices [b] of the prompts in `["", *captions]`.
    """
    prompts = np.where(rng.random(len(rows)) < 0.1, 0, rows + 1)
    if wrong:
        prompts = np.where(rng.random(len(rows)) < 0.3, rng.permutation(prompts), prompts)
    return prompts


def near_miss(caption: str, rng: np.random.Generator) -> str:
    """Returns the caption with one attribute changed."""
    scene = scenes.parse_caption(caption)
    while True:
        i = int(rng.integers(len(scene.groups)))
        group = scene.groups[i]
        match rng.integers(4):
            case 0:
                change = dataclasses.replace(group, color=str(rng.choice(scenes.COLORS)))
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
            other = drawing.caption(scenes.Scene(groups, relation))
        except ValueError:
            continue
        if other != caption:
            return other


def _is_asked(caption: str) -> bool:
    """Whether a prompt set may hold the caption.

    These captions have one group of any count, or two single objects and their relation.
    """
    scene = scenes.parse_caption(caption)
    return len(scene.groups) == 1 or sum(group.count for group in scene.groups) == 2
