"""What the embedded pipelines are trained on: rendered pictures of coloured shapes, their captions, and captions that nearly
are theirs. None is held out."""

import dataclasses
from pathlib import Path

import numpy as np
from tqdm import tqdm

from solrl_jax.shapes import scenes

SIDE = 32  # pixels


def make_dataset(count: int, seed: int, cache: Path) -> tuple[np.ndarray, list[str]]:
    """`count` pictures [n, 32, 32, 3] uint8 and their captions, none held out."""
    path = cache / f"pictures-{count}-{seed}.npz"
    if path.exists():
        with np.load(path) as file:
            return file["images"], list(file["captions"])
    rng = np.random.default_rng(seed)
    images, captions = np.empty((count, SIDE, SIDE, 3), np.uint8), []
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


def asked_rows(captions: list[str]) -> np.ndarray:
    """The indices of the captions that the prompt sets may hold."""
    return np.array([i for i, caption in enumerate(captions) if is_asked(caption)])


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
