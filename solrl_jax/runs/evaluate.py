"""Evaluates a policy on held-out prompts, with fixed seeds and in the training precision."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt32

from solrl_jax.config.sizes import evaluation_size
from solrl_jax.data.prompts import Prompt, draw_prompts
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.generate import Samples, SeedBatch, generate
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable

# Called with the number of samples that are done since the last call.
Progress = Callable[[int], None]


def _no_progress(_samples: int) -> None:
    """Reports nothing."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a policy.

    Attributes:
        means: The mean of each score over all images with a finite value, by name.
        errors: The standard errors of the means.
        scores: The score of each image, NaN where it failed.
        failed: The number of images without a score, by the name of the reward. Only rewards
            outside of JAX can fail.
    """

    means: dict[str, float]
    errors: dict[str, float]
    scores: dict[str, Float[np.ndarray, "p m"]]
    failed: dict[str, int]


def evaluate(
    experiment: Experiment, adapters: Trainable, progress: Progress = _no_progress
) -> Evaluation:
    """Scores images of the first test prompts.

    Args:
        experiment: The experiment. `eval.num_prompts` prompts with `eval.num_images_per_prompt`
            images each are generated from seeds that depend on `eval.seed` alone.
        adapters: The trainable parameters of the policy.
        progress: Called with the number of images that are done since the last call.
    """
    config = experiment.config.eval
    prompts, seeds = _held_out(experiment, config.num_prompts, config.num_images_per_prompt)
    samples = _generate(experiment, adapters, prompts, seeds, progress)
    scores = {name: s.reshape(config.num_prompts, -1) for name, s in samples.scores.items()}
    means = {}
    errors = {}
    for name, values in scores.items():
        finite = values[np.isfinite(values)]
        means[name] = float(finite.mean(dtype=float)) if finite.size else float("nan")
        errors[name] = float("nan")
        if finite.size:
            errors[name] = float(finite.std(dtype=float) / np.sqrt(finite.size))
    return Evaluation(means, errors, scores, samples.failed)


def setting(experiment: Experiment) -> str:
    """Describes in one line all settings that a result of `evaluate` depends on besides the policy.

    The line contains a hash of the prompts, joined by line breaks.
    """
    config = experiment.config.eval
    rollout = experiment.config.rollout
    height, width = evaluation_size(experiment.config)
    prompts = "".join(f"{prompt}\n" for prompt in experiment.test_prompts[: config.num_prompts])
    digest = hashlib.sha256(prompts.encode()).hexdigest()[:12]
    noise = " without noise" if rollout.noise_level else ""
    guidance = f"guidance {rollout.guidance_scale:g}"
    if rollout.true_cfg_scale != 1:
        guidance += f", true guidance {rollout.true_cfg_scale:g}"
    return (
        f"{config.num_prompts} prompts (sha256 {digest}) x {config.num_images_per_prompt} images "
        f"of {width} x {height}; {rollout.solver}{noise}, {config.num_steps} steps, {guidance}, "
        f"{rollout.precision}, seed {config.seed}"
    )


def paired_difference(first: Evaluation, second: Evaluation) -> dict[str, tuple[float, float]]:
    """Compares two policies that were evaluated on the same prompts and noise, image by image.

    The confidence interval is Student's over prompts, because prompts differ in how much can be
    gained on them. An image counts if both of its scores are finite.

    Args:
        first: The evaluation of one policy.
        second: The evaluation of the other.

    Returns:
        For each score, by how much the first policy scores higher, and half of the 95 % confidence
        interval. The latter is NaN for fewer than two prompts.
    """
    from scipy import stats  # takes half a second to import

    differences = {}
    for name, scores in first.scores.items():
        difference = scores - second.scores[name]
        counted = np.isfinite(difference)
        usable = counted.any(1)
        sums = np.where(counted, difference, 0.0).sum(1)[usable]
        prompt_means = sums / counted.sum(1)[usable]
        n = len(prompt_means)
        error = prompt_means.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
        mean = float(prompt_means.mean()) if n else np.nan
        differences[name] = (mean, float(stats.t.ppf(0.975, n - 1) * error))
    return differences


@dataclasses.dataclass(frozen=True)
class ImageGrid:
    """Images of fixed prompts and seeds, which show how a policy changes.

    Attributes:
        prompts: One prompt per row.
        images: The images, in [0, 1].
        right: Whether each image is right, by the first reward that has a score "strict". None if
            no reward has one.
    """

    prompts: Sequence[str]
    images: Float[np.ndarray, "p m h w 3"]
    right: np.ndarray | None

    @classmethod
    def from_samples(cls, prompts: Sequence[str], samples: Samples) -> "ImageGrid":
        """Makes a grid of generated samples.

        Args:
            prompts: The prompts.
            samples: As many samples of each prompt, prompt by prompt, kept with their images.
        """
        assert samples.images is not None
        verdicts = [scores for name, scores in samples.scores.items() if name.endswith("/strict")]
        right = verdicts[0].reshape(len(prompts), -1) > 0.5 if verdicts else None
        images = samples.images.reshape(len(prompts), -1, *samples.images.shape[1:])
        return cls(prompts, images, right)

    @property
    def marks(self) -> list[bool | None]:
        """Whether each image is right, row by row; None where there is no verdict."""
        if self.right is None:
            return [None] * (self.images.shape[0] * self.images.shape[1])
        return self.right.reshape(-1).tolist()


def sample_grid(experiment: Experiment, adapters: Trainable) -> ImageGrid:
    """Generates images of the first test prompts, four per prompt.

    Args:
        experiment: The experiment. There are `eval.num_grid_images` images in all.
        adapters: The trainable parameters of the policy.
    """
    num_images = experiment.config.eval.num_grid_images
    per_prompt = min(4, num_images)
    num_prompts = min(num_images // per_prompt, len(experiment.test_prompts))
    prompts, seeds = _held_out(experiment, num_prompts, per_prompt)
    return _generate_grid(experiment, adapters, prompts, seeds)


@dataclasses.dataclass(frozen=True)
class LargestDifferences:
    """The images of an evaluation on which two policies differ most: m images of p prompts.

    Attributes:
        prompts: The positions of the prompts among the test prompts, the largest difference first.
        images: The positions of the images within their prompt.
        gains: By how much the reward of the first policy is higher.
    """

    prompts: Int[np.ndarray, " p"]
    images: Int[np.ndarray, "p m"]
    gains: Float[np.ndarray, "p m"]

    @classmethod
    def find(
        cls, first: Evaluation, second: Evaluation, num_prompts: int, num_images: int
    ) -> "LargestDifferences":
        """Finds the images whose rewards differ most. Images without two finite rewards come last.

        Args:
            first: The evaluation of one policy.
            second: The evaluation of another one on the same prompts and seeds.
            num_prompts: The largest number of prompts.
            num_images: The largest number of images per prompt.
        """
        gains = first.scores["reward"] - second.scores["reward"]
        size = np.where(np.isfinite(gains), np.abs(gains), -1.0)
        images = np.argsort(-size, axis=1, kind="stable")[:, :num_images]
        prompts = np.argsort(-size.max(1), kind="stable")[:num_prompts]
        return cls(prompts, images[prompts], np.take_along_axis(gains, images, axis=1)[prompts])

    def draw(self, experiment: Experiment, adapters: Trainable) -> ImageGrid:
        """Generates these images by a policy. They equal the images that were scored.

        Args:
            experiment: The experiment of the evaluation.
            adapters: The trainable parameters of the policy.
        """
        config = experiment.config.eval
        prompts, seeds = _held_out(experiment, config.num_prompts, config.num_images_per_prompt)
        seeds = np.take_along_axis(seeds[self.prompts], self.images[..., None], axis=1)
        return _generate_grid(experiment, adapters, [prompts[i] for i in self.prompts], seeds)


@dataclasses.dataclass(frozen=True)
class PoolImages:
    """The best and the worst kept candidates of some prompts of an iteration.

    Attributes:
        prompts: The prompts.
        candidates: The indices of the candidates within their prompt, best proxy reward first.
        stages: Their images as "explored" and, unless explored samples were trained on,
            "regenerated".
    """

    prompts: Sequence[str]
    candidates: Int[np.ndarray, "p m"]
    stages: dict[str, ImageGrid]


def pool_images(
    experiment: Experiment,
    old: Trainable,
    exploration: ExplorationSetting,
    ledger: Mapping[str, Any],
    iteration: int,
) -> PoolImages:
    """Generates some candidates of an iteration again, four per prompt.

    A candidate is its seed, so the images equal those of the iteration.

    Args:
        experiment: The experiment. There are `eval.num_grid_images` candidates in all.
        old: The trainable parameters that the iteration explored and regenerated with.
        exploration: How it explored.
        ledger: Its candidates, `IterationResult.ledger`.
        iteration: Its number, from 1.
    """
    experiment = experiment.for_iteration(iteration)
    config = experiment.config
    rollout = config.rollout
    prompts = draw_prompts(
        experiment.train_prompts, config.seed, iteration - 1, config.train.num_prompts
    )
    per_prompt = min(4, config.eval.num_grid_images, rollout.kept)
    num_prompts = min(config.eval.num_grid_images // per_prompt, len(prompts))
    candidates = _best_and_worst_kept(ledger, len(prompts), rollout.kept, per_prompt)[:num_prompts]
    seeds = experiment.seeds("candidate", prompts, rollout.candidates, iteration=iteration)
    # All prompts are encoded, although only some are used: the programs of the iteration are
    # compiled for this shape.
    prompt_batch = experiment.encode_prompts(prompts, experiment.reward)
    chosen_seeds = np.take_along_axis(seeds[:num_prompts], candidates[..., None], axis=1)
    seed_batch = SeedBatch.from_seeds(chosen_seeds)

    def draw(sampler: Sampler) -> ImageGrid:
        samples = generate(
            experiment.backbone,
            sampler,
            prompt_batch,
            seed_batch,
            experiment.reward,
            keep_images=True,
        )
        return ImageGrid.from_samples(prompts[:num_prompts], samples)

    start = rollout.window_start(iteration)
    stages = {"explored": draw(experiment.explorer.sampler(old, exploration, start))}
    if rollout.regenerate:
        stages["regenerated"] = draw(
            experiment.sampler("regenerate", old, rollout.num_steps, start)
        )
    return PoolImages(prompts[:num_prompts], candidates, stages)


def _best_and_worst_kept(
    ledger: Mapping[str, Any], num_prompts: int, kept: int, count: int
) -> Int[np.ndarray, "p m"]:
    """Returns the indices of kept candidates with the best and the worst proxy rewards.

    Args:
        ledger: The columns of an iteration's ledger.
        num_prompts: The number of prompts of the iteration.
        kept: The number of kept candidates per prompt.
        count: The number of candidates to return per prompt, the best first.
    """
    rank = np.asarray(ledger["rank"]).reshape(num_prompts, -1)
    is_kept = np.asarray(ledger["kept"]).reshape(num_prompts, -1)
    # Kept candidates come first, ordered by rank.
    order = np.argsort(np.where(is_kept, rank, rank + rank.shape[1]), axis=1)[:, :kept]
    num_worst = count // 2
    return np.concatenate([order[:, : count - num_worst], order[:, kept - num_worst :]], axis=1)


def _held_out(
    experiment: Experiment, num_prompts: int, num_images: int
) -> tuple[Sequence[Prompt], UInt32[np.ndarray, "p m 2"]]:
    """Returns the first test prompts and the seeds of their images.

    The seeds depend on `eval.seed` alone, so that they are the same for every policy.

    Args:
        experiment: The experiment.
        num_prompts: The number of prompts.
        num_images: The number of images per prompt.
    """
    prompts = experiment.test_prompts[:num_prompts]
    seed = experiment.config.eval.seed
    return prompts, experiment.seeds("evaluation", prompts, num_images, seed=seed)


def _generate_grid(
    experiment: Experiment,
    adapters: Trainable,
    prompts: Sequence[Prompt],
    seeds: UInt32[np.ndarray, "p m 2"],
) -> ImageGrid:
    """Generates a grid of evaluation images; the arguments are those of `_generate`."""
    samples = _generate(experiment, adapters, prompts, seeds, keep_images=True)
    return ImageGrid.from_samples(prompts, samples)


def _generate(
    experiment: Experiment,
    adapters: Trainable,
    prompts: Sequence[Prompt],
    seeds: UInt32[np.ndarray, "p m 2"],
    progress: Progress = _no_progress,
    keep_images: bool = False,
) -> Samples:
    """Generates and scores evaluation images, without noise in the solver.

    Args:
        experiment: The experiment. Its evaluation size, steps and rewards are used.
        adapters: The trainable parameters of the policy.
        prompts: The prompts.
        seeds: The seeds of each prompt's images.
        progress: Called with the number of images that are done since the last call.
        keep_images: Whether the images are returned.
    """
    config = experiment.config
    reward = experiment.evaluation_reward
    sampler = experiment.with_size(evaluation_size(config)).sampler(
        "evaluate", adapters, config.eval.num_steps, noise_start=None
    )
    return generate(
        experiment.backbone,
        sampler,
        experiment.encode_prompts(prompts, reward),
        SeedBatch.from_seeds(seeds),
        reward,
        keep_images=keep_images,
        progress=progress,
    )
