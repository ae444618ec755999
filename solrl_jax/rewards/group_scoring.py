"""Scores a series of images with a reward inside JAX that compares the candidates of a prompt."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from solrl_jax.parallel import hosts, sharding
from solrl_jax.rewards.groups import group_slices
from solrl_jax.rewards.protocol import Reward, score_images


class GroupScoring:
    """Collects images until a group is complete, and scores it.

    At most one group and one chunk are held in the memory of the host. A group is scored on every
    device alike, so its images need not divide by the number of devices.
    """

    def __init__(self, reward: Reward, prepared: Any, prompts: Sequence[int], mesh: Mesh) -> None:
        """Scores nothing yet.

        Args:
            reward: The reward, with `groupwise` set.
            prepared: What its `prepare` returned, one row per prompt, on every device.
            prompts: For each image, the row of its prompt.
            mesh: The devices.
        """
        self._reward = reward
        self._prepared = prepared
        self._prompts = np.asarray(prompts, np.int32)
        self._mesh = mesh
        self._groups = group_slices(list(prompts), reward.group_size)
        self._pending: list[tuple[Any, ...]] = []
        self._first = 0  # the index of the first image in `_pending`
        self._scores: dict[str, list[np.ndarray]] = {}

    def add(self, images: np.ndarray | None, latents: np.ndarray) -> None:
        """Passes on the next images or latents, on the host. Also scores complete groups.

        Args:
            images: The images; None if the reward scores latents alone.
            latents: Their latents. Rows beyond the last image are padding.
        """
        known = len(self._prompts) - self._first - len(self._pending)
        for row in range(min(len(latents), known)):
            self._pending.append((None if images is None else images[row], latents[row]))
        while self._groups and self._groups[0].stop <= self._first + len(self._pending):
            group = self._groups.pop(0)
            count = group.stop - group.start
            self._score(self._pending[:count], self._prompts[group])
            self._pending = self._pending[count:]
            self._first += count

    def finish(self) -> dict[str, np.ndarray]:
        """Returns the scores of all images by name."""
        return {name: np.concatenate(parts) for name, parts in self._scores.items()}

    def _score(self, rows: list[tuple[Any, ...]], prompts: np.ndarray) -> None:
        """Scores one group, and keeps the scores."""
        everywhere = sharding.replicated(self._mesh)
        images, latents = (
            None if column[0] is None else np.stack(column) for column in zip(*rows, strict=True)
        )
        inputs = hosts.put(self._reward.select_inputs(images, latents), everywhere)
        index = hosts.put(prompts, everywhere)
        with jax.set_mesh(self._mesh):
            scores = score_images(self._reward, self._reward.params, inputs, self._prepared, index)
        for name, values in hosts.fetch(dict(scores)).items():
            self._scores.setdefault(name, []).append(np.asarray(values))
