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
    """Scores a series of images with a groupwise reward inside JAX, one group at a time.

    A group is the candidates of one prompt, or a part of them if there are more than
    `Reward.group_size`. The constructor gets the result of `Reward.prepare`, one row per prompt,
    and the index of the row for every image of the series, which determines the groups. `add`
    passes images on, and scores each group once all of its images are there. `finish` returns the
    scores.

    A group is replicated on all devices, so its size need not be a multiple of their number. With
    several processes, all must make the same calls with the same arguments. The scoring is compiled
    once per group size.
    """

    def __init__(self, reward: Reward, prepared: Any, prompts: Sequence[int], mesh: Mesh) -> None:
        """Divides the images into groups of one prompt each, and scores nothing yet.

        Args:
            reward: The reward, with `groupwise` set and loaded parameters. Its `group_size` is the
                most images in a group; more candidates of a prompt are divided into groups of
                nearly equal size.
            prepared: What `reward.prepare` returned: a pytree of arrays with one row per prompt, on
                every device. Entries of other rewards in it have no effect if `reward` is a
                weighted sum (`rewards.mixture`).
            prompts: For each image of the series, the row of its prompt in `prepared`. The
                candidates of a prompt follow each other.
            mesh: The devices that score.
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
        """Passes on the next images of the series. Also scores the groups that they complete.

        A group is the candidates of one prompt, or a part of them. The call waits until complete
        groups are scored, and keeps the images of an incomplete one until its last image comes. All
        processes must call it with the same arguments.

        Args:
            images: The images as a NumPy array [b, H, W, 3] in [0, 1], or clips [b, T, H, W, 3]. A
                reward of images gets `Reward.frames` frames of each clip, and the score of the clip
                is the mean over them. None if the reward scores latents alone.
            latents: The latents of the images, a NumPy array [b, h, w, c], or of the clips,
                [b, t, h, w, c]. A reward that reads both gets the latents of the whole clip with
                each frame. Rows of both arrays beyond the last image of the series are padding,
                which is not scored.

        Raises:
            InputError: If the code of a reward in the weighted sum raises, or returns no scores of
                the right names and shapes. Errors of a reward that is not a weighted sum pass
                unchanged.
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
        """Returns the scores of the whole series. To be called after the last image was added.

        Returns:
            NumPy arrays [images], the same in every process, with the names and dtypes that the
            reward's `score` returns. For a weighted sum these are the name of each groupwise
            reward, "NAME/OTHER" for its other scores and, if any score has a weight, "reward" for
            the sum. If not all images of the series were added, the arrays end with the last
            complete group. {} if no group was scored.
        """
        return {name: np.concatenate(parts) for name, parts in self._scores.items()}

    def _score(self, rows: list[tuple[Any, ...]], prompts: np.ndarray) -> None:
        """Scores one group, replicated on all devices, and stores the scores.

        All processes must call it.

        Args:
            rows: For each candidate of the group, a pair: its image [H, W, 3] or clip [T, H, W, 3]
                in [0, 1] (or None), and its latent [h, w, c] or [t, h, w, c].
            prompts: For each candidate, the index of its prompt in the arrays that `prepare`
                returned, int32 [candidates]. They are all equal. A prompt with more candidates than
                `group_size` has several groups.

        Raises:
            InputError: If the code of a reward in the weighted sum raises, or returns no scores of
                the right names and shapes. Errors of a reward that is not a weighted sum pass
                unchanged.
        """
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
