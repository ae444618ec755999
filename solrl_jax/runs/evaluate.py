"""Evaluates a policy on held-out prompts, with fixed seeds and in the training precision."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from solrl_jax.config.sizes import describe_size, evaluation_size
from solrl_jax.data.prompts import Prompt, draw_prompts
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.generate import PromptBatch, Samples, SeedBatch, generate
from solrl_jax.rl.means import finite_mean
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable, flatten

# Called with the number of samples that are done since the last call.
Progress = Callable[[int], None]


def _no_progress(_samples: int) -> None:
    """Reports nothing. The default of arguments that report progress.

    Args:
        _samples: The number of images of a batch. Not read.
    """


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a policy on p prompts with m images each.

    `means`, `errors` and `scores` have the same keys: "reward", the weighted sum that is trained
    on, and the name of every single score, including those that are only recorded.

    Attributes:
        means: The mean of each score over all images with a finite value; NaN if there are none.
        errors: The standard error of each mean: the standard deviation of the finite values (with
            divisor n) divided by the square root of their number n. NaN if there are fewer than
            two.
        scores: The score of each image, float [p, m], not finite where it failed.
        failed: For each reward outside JAX, by its name, the number of images that it could not
            score, which may be 0. For clips, each scored frame counts.
        usage: The costs of the rewards outside JAX: the sum of each of their counters
            (`rewards.usage`) by the name "REWARD/COUNTER", e.g. "judge/requests". Rewards with
            counters also have "REWARD/seconds_waited", the seconds that all hosts together waited
            for them. Empty if nothing was counted.
    """

    means: dict[str, float]
    errors: dict[str, float]
    scores: dict[str, Float[np.ndarray, "p m"]]
    failed: dict[str, int]
    usage: dict[str, float] = dataclasses.field(default_factory=dict)


def evaluate(
    experiment: Experiment, adapters: Trainable, progress: Progress = _no_progress
) -> Evaluation:
    """Generates images of the first test prompts with a policy, and scores them.

    The images have the evaluation's size and number of steps, and the solver and guidance of the
    section `rollout`. They are generated in the training precision (`rollout.precision`), without
    noise in the solver, and are not kept. Prompts that are not in the prompt cache are encoded and
    added to it; this loads the text encoders, which stay loaded. Every process of a run must call
    it.

    Args:
        experiment: The experiment, whose test prompts and section `eval` say what is generated:
            `eval.num_images_per_prompt` images for each of the first `eval.num_prompts` test
            prompts. The noise of an image depends on `eval.seed`, its prompt and its index alone,
            so all policies are compared on the same noise.
        adapters: The trainable parameters of the policy by path, e.g. `state.ema`. {} gives the
            base model.
        progress: Called with the number of images of each batch when it has been queued on the
            devices. The numbers add up to all. The default does nothing.

    Returns:
        Means, standard errors and the score of each image, by the name of the score, with the
        failures and costs of rewards outside JAX. Prompts are in the order of the test prompts.

    Raises:
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If a reward outside JAX fails while `reward.on_failure` is "stop", or 32 times in
            a row (RewardError); if the disk refuses the cache of prompts, or if another process
            gives no answer.
    """
    config = experiment.config.eval
    prompts, seeds = _held_out(experiment, config.num_prompts, config.num_images_per_prompt)
    samples = _generate(experiment, adapters, prompts, seeds, progress)
    scores = {name: s.reshape(config.num_prompts, -1) for name, s in samples.scores.items()}
    means = {}
    errors = {}
    for name, values in scores.items():
        finite = values[np.isfinite(values)]
        means[name] = finite_mean(values)
        errors[name] = float("nan")
        if finite.size > 1:
            errors[name] = float(finite.std(dtype=float) / np.sqrt(finite.size))
    return Evaluation(means, errors, scores, samples.failed, samples.usage)


def describe_evaluation(experiment: Experiment) -> str:
    """Describes in one line how `evaluate` samples.

    Args:
        experiment: The experiment, whose sections `eval` and `rollout` and whose test prompts are
            described. Rewards, the schedule of the solver and the model are not.

    Returns:
        The line, e.g. "64 prompts (sha256 0123456789ab) x 1 images of 512 x 512; euler, 40 steps,
        guidance 3.5, bf16, seed 0". The size is width x height in pixels; clips read "clips of 17
        frames of 832 x 480". The hash is the beginning of the SHA-256 of the evaluated prompts,
        each followed by a line feed. A solver that adds noise in training is followed by "without
        noise", and a `true_cfg_scale` other than 1 is named after the guidance.
    """
    config = experiment.config.eval
    rollout = experiment.config.rollout
    prompts = "".join(f"{prompt}\n" for prompt in experiment.test_prompts[: config.num_prompts])
    digest = hashlib.sha256(prompts.encode()).hexdigest()[:12]
    noise = " without noise" if rollout.noise_level else ""
    guidance = f"guidance {rollout.guidance_scale:g}"
    if rollout.true_cfg_scale != 1:
        guidance += f", true guidance {rollout.true_cfg_scale:g}"
    return (
        f"{config.num_prompts} prompts (sha256 {digest}) x {config.num_images_per_prompt} "
        f"{describe_size(evaluation_size(experiment.config))}; {rollout.solver}{noise}, "
        f"{config.num_steps} steps, {guidance}, {rollout.precision}, seed {config.seed}"
    )


def paired_difference(first: Evaluation, second: Evaluation) -> dict[str, tuple[float, float]]:
    """Compares two policies that were evaluated on the same prompts and noise.

    Scores are compared image by image, and the differences of a prompt's images are averaged. The
    confidence interval is Student's over these means of prompts. An image counts only if both of
    its scores are finite, and a prompt only if at least one of its images counts.

    Args:
        first: The evaluation of one policy.
        second: The evaluation of the other policy, with all scores of `first` in arrays of the same
            shapes.

    Returns:
        For each score of `first`, by name, a pair: the mean over prompts by which the first policy
        scores higher (NaN without any prompt), and half of the width of the 95 % confidence
        interval (NaN for fewer than two prompts).
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
    """Images that show how a policy changes: m images for each of p prompts.

    Attributes:
        prompts: The p prompts, one per row of the grid.
        images: The images, float32 [p, m, height, width, 3], with values in [0, 1]; clips have an
            axis of frames before the height.
        accepted: Whether a verifier accepts each image, bool [p, m]: whether the first score named
            ".../strict", such as "shapes/strict", is above 0.5. NaN counts as not accepted. None if
            there is no score of such a name.
    """

    prompts: Sequence[str]
    images: Float[np.ndarray, "p m ... 3"]
    accepted: np.ndarray | None

    @classmethod
    def from_samples(cls, prompts: Sequence[str], samples: Samples) -> "ImageGrid":
        """Builds a grid from generated samples.

        Args:
            prompts: The p prompts, one per row of the grid.
            samples: p * m samples with their images, the m samples of the first prompt first. Of
                their scores, the first whose name ends in "/strict" decides `accepted`; without
                such a score, `accepted` is None.

        Returns:
            The grid. Its images [p, m, ..., height, width, 3] are a view of those of the samples.

        Raises:
            AssertionError: If the samples have no images.
        """
        assert samples.images is not None
        verdicts = [scores for name, scores in samples.scores.items() if name.endswith("/strict")]
        right = verdicts[0].reshape(len(prompts), -1) > 0.5 if verdicts else None
        images = samples.images.reshape(len(prompts), -1, *samples.images.shape[1:])
        return cls(prompts, images, right)

    @property
    def marks(self) -> list[bool | None]:
        """Whether a verifier accepts each image, a list of p * m values, row by row (`accepted`).

        All are None if `accepted` is None, because there is no verdict.
        """
        if self.accepted is None:
            return [None] * (self.images.shape[0] * self.images.shape[1])
        return self.accepted.reshape(-1).tolist()


def sample_grid(experiment: Experiment, adapters: Trainable) -> ImageGrid:
    """Generates images of the first test prompts with a policy, up to four per prompt.

    They have the size, the number of steps and the seeds of the evaluation, so they equal the
    images that `evaluate` scores for the same prompt and index. They are scored, too, except by
    rewards outside JAX without a score ".../strict", such as judges, and by rewards inside JAX that
    compare candidates. Their prompts are encoded as by `evaluate`. Every process of a run must call
    it.

    Args:
        experiment: The experiment. `eval.num_grid_images` is the largest number of images, at least
            1. All prompts have equally many: 10 gives two prompts with four images each, 3 gives
            one prompt with three.
        adapters: The trainable parameters of the policy by path, e.g. `state.ema`.

    Returns:
        The grid, with one row per prompt.

    Raises:
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If a reward outside JAX fails while `reward.on_failure` is "stop", or 32 times in
            a row (RewardError); if the disk refuses the cache of prompts, or if another process
            gives no answer.
    """
    num_images = experiment.config.eval.num_grid_images
    per_prompt = min(4, num_images)
    num_prompts = min(num_images // per_prompt, len(experiment.test_prompts))
    prompts, seeds = _held_out(experiment, num_prompts, per_prompt)
    return _generate_grid(experiment, adapters, prompts, seeds)


def base_parameters_like(experiment: Experiment, trained: Trainable) -> Trainable:
    """Returns the trainable parameters of the base model, in the structure of a trained policy.

    The base model can then be sampled by the programs that are compiled for the trained policy.

    Args:
        experiment: The experiment, which has the base model.
        trained: The trainable parameters of a policy by path: a dict of factors for an adapter, an
            array for a parameter that is trained in full. Their values do not matter.

    Returns:
        Parameters by the same paths that make a policy equal to the base: zeros in the dtypes of
        `trained` for the factors of adapters, and the base model's own array, in its dtype, for a
        parameter that is trained in full.
    """
    base = flatten(experiment.backbone.transformer)
    return {
        path: jax.tree.map(jnp.zeros_like, value) if isinstance(value, dict) else base[path]
        for path, value in trained.items()
    }


@dataclasses.dataclass(frozen=True)
class LargestDifferences:
    """The images of an evaluation on which two policies differ most: m for each of p prompts.

    Attributes:
        prompts: The positions of the prompts among the test prompts, from 0, int [p], the prompt
            with the image of the largest absolute difference first.
        images: The positions of the images within their prompt, from 0, int [p, m], the largest
            absolute difference first, and images without two finite rewards last.
        gains: The "reward" of each image by the first policy minus that by the second, float
            [p, m]. Not finite where a reward is not.
    """

    prompts: Int[np.ndarray, " p"]
    images: Int[np.ndarray, "p m"]
    gains: Float[np.ndarray, "p m"]

    @classmethod
    def find(
        cls, first: Evaluation, second: Evaluation, num_prompts: int, num_images: int
    ) -> "LargestDifferences":
        """Finds the images whose rewards differ most, in either direction.

        Args:
            first: The evaluation of one policy.
            second: The evaluation of the other one, with "reward" in the same shape. A difference
                is `first` minus `second`.
            num_prompts: The largest number of prompts. If there are fewer, all are returned.
            num_images: The largest number of images per prompt. If there are fewer, all are
                returned.

        Returns:
            The positions of the prompts and images with the largest absolute differences of
            "reward", and the signed differences. A prompt ranks by its image with the largest one.
            Images without two finite rewards come last. Among equal differences the earlier one
            comes first.
        """
        gains = first.scores["reward"] - second.scores["reward"]
        size = np.where(np.isfinite(gains), np.abs(gains), -1.0)
        images = np.argsort(-size, axis=1, kind="stable")[:, :num_images]
        prompts = np.argsort(-size.max(1), kind="stable")[:num_prompts]
        return cls(prompts, images[prompts], np.take_along_axis(gains, images, axis=1)[prompts])

    def generate_images(self, experiment: Experiment, adapters: Trainable) -> ImageGrid:
        """Generates the images at the positions in `prompts` and `images` with one of the policies.

        They start from the seeds of the evaluation, so they equal the images that were scored if
        the policy is the same. They are scored again, except by rewards outside JAX without a score
        ".../strict", such as judges, and by rewards inside JAX that compare candidates. Their
        prompts are encoded as by `evaluate`. Every process of a run must call it.

        Args:
            experiment: The experiment of the evaluation.
            adapters: The trainable parameters of the policy by path, e.g. `state.ema`.

        Returns:
            The grid, with rows and columns in the order of `prompts` and `images`.

        Raises:
            InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
            FileNotFoundError: If the directory of a tokenizer is missing.
            PermissionError: If a folder of the cache of prompts may not be searched.
            RunError: If a reward outside JAX fails while `reward.on_failure` is "stop", or 32 times
                in a row (RewardError); if the disk refuses the cache of prompts, or if another
                process gives no answer.
        """
        config = experiment.config.eval
        prompts, seeds = _held_out(experiment, config.num_prompts, config.num_images_per_prompt)
        seeds = np.take_along_axis(seeds[self.prompts], self.images[..., None], axis=1)
        return _generate_grid(experiment, adapters, [prompts[i] for i in self.prompts], seeds)


@dataclasses.dataclass(frozen=True)
class PoolImages:
    """Images of some kept candidates of an iteration: m for each of p prompts.

    The candidates are the m - m // 2 kept ones of a prompt with the best ranks, and the m // 2 kept
    ones with the worst ranks.

    Attributes:
        prompts: The p prompts, one per row of each grid.
        candidates: The indices of the candidates within their prompt, from 0, int [p, m], in the
            order of their rank by the exploration reward, the best first.
        phases: The images by the phase that made them: "explored", and "regenerated" if the run
            regenerates the kept candidates. Each grid has p rows of m images.
    """

    prompts: Sequence[str]
    candidates: Int[np.ndarray, "p m"]
    phases: dict[str, ImageGrid]


def pool_images(
    experiment: Experiment,
    old: Trainable,
    exploration: ExplorationSetting,
    ledger: Mapping[str, Any],
    iteration: int,
) -> PoolImages:
    """Generates some kept candidates of a training iteration again: the best and the worst ones.

    They are generated as the iteration explored them and, if the run regenerates kept candidates
    (`rollout.regenerate`), also as it regenerated them. A candidate is determined by its seed, so
    the images equal those of the iteration. They are scored again, too, except by rewards outside
    JAX without a score ".../strict", such as judges, and by rewards inside JAX that compare
    candidates. The prompts of the iteration are drawn again from the run's seed, and encoded as by
    `evaluate`. Every process of a run must call it.

    Args:
        experiment: The experiment. `eval.num_grid_images` is the largest number of candidates in
            all, at least 1. Up to four per prompt (at most `rollout.kept`) are generated, for as
            many of the first prompts as this number allows. Half of the candidates of a prompt,
            rounded down, are its worst kept ones, and the others its best.
        old: The trainable parameters by path that the iteration generated with (`TrainState.old`
            before its update).
        exploration: The precision and number of steps that the iteration explored with.
        ledger: The columns of the iteration's candidates by name, prompt by prompt, of which "rank"
            (the place among the candidates of the prompt, 0 is the best) and "kept" (bool) are
            read.
        iteration: The number of the iteration, from 1.

    Returns:
        The candidates and their images. For a prompt of which nothing was kept, the `rollout.kept`
        best candidates by rank stand for the kept ones.

    Raises:
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If a reward outside JAX fails while `reward.on_failure` is "stop", or 32 times in
            a row (RewardError); if the disk refuses the cache of prompts, or if another process
            gives no answer.
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

    def draw(sampler: Sampler, prepared: PromptBatch, reward: Reward) -> ImageGrid:
        samples = generate(
            experiment.backbone,
            sampler,
            prepared,
            seed_batch,
            reward,
            keep_images=True,
            for_display=True,
        )
        return ImageGrid.from_samples(prompts[:num_prompts], samples)

    start = rollout.window_start(iteration)
    phases = {
        "explored": draw(
            experiment.explorer.sampler(old, exploration, start),
            experiment.prepare_for_ranking(prompt_batch),
            experiment.ranking_reward,
        )
    }
    if rollout.regenerate:
        phases["regenerated"] = draw(
            experiment.sampler("regenerate", old, rollout.num_steps, start),
            prompt_batch,
            experiment.reward,
        )
    return PoolImages(prompts[:num_prompts], candidates, phases)


def _best_and_worst_kept(
    ledger: Mapping[str, Any], num_prompts: int, kept: int, count: int
) -> Int[np.ndarray, "p m"]:
    """Finds the kept candidates of each prompt with the best and the worst ranks.

    Args:
        ledger: The columns of an iteration's ledger by name, of which "rank" (the place among the
            candidates of the prompt, 0 is the best) and "kept" (bool) are read. Both have one entry
            per candidate, prompt by prompt.
        num_prompts: The number p of prompts of the iteration.
        kept: The number of kept candidates of each prompt that has any.
        count: The number m of candidates to return per prompt, at most `kept`.

    Returns:
        Indices of candidates within their prompt, int [p, m], by ascending rank: first the
        m - m // 2 best, then the m // 2 worst. If nothing of a prompt was kept, its `kept` best
        candidates count as kept.
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

    A seed depends on `eval.seed`, the text of the prompt and the index of the image alone, so that
    it is the same for every policy.

    Args:
        experiment: The experiment, which has the test prompts and `eval.seed`.
        num_prompts: The number p of prompts. If there are fewer test prompts, all are returned.
        num_images: The number m of images per prompt.

    Returns:
        The prompts, and their seeds, uint32 [p, m, 2].
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
    """Generates a grid of evaluation images. Every process of a run must call it.

    The images are scored, except by rewards outside JAX without a score ".../strict", such as
    judges, and by rewards inside JAX that compare candidates.

    Args:
        experiment: The experiment. Its evaluation size, `eval.num_steps` and `evaluation_reward`
            are used.
        adapters: The trainable parameters of the policy by path.
        prompts: The p prompts, one per row.
        seeds: The seeds of the m images of each prompt, uint32 [p, m, 2].

    Returns:
        The grid, with one row of m images per prompt. It keeps no scores, but whether each image is
        accepted, if there is a score ".../strict" (`ImageGrid.accepted`).

    Raises:
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If a reward outside JAX fails while `reward.on_failure` is "stop", or 32 times in
            a row (RewardError); if the disk refuses the cache of prompts, or if another process
            gives no answer.
    """
    samples = _generate(experiment, adapters, prompts, seeds, for_display=True)
    return ImageGrid.from_samples(prompts, samples)


def _generate(
    experiment: Experiment,
    adapters: Trainable,
    prompts: Sequence[Prompt],
    seeds: UInt32[np.ndarray, "p m 2"],
    progress: Progress = _no_progress,
    for_display: bool = False,
) -> Samples:
    """Generates and scores evaluation images, without noise in the solver.

    Every process of a run must call it.

    Args:
        experiment: The experiment. Its evaluation size, `eval.num_steps` and `evaluation_reward`
            are used.
        adapters: The trainable parameters of the policy by path.
        prompts: The p prompts, which are encoded as by `evaluate`, and prepared for the reward.
        seeds: The seeds of the m images of each prompt, uint32 [p, m, 2].
        progress: Called with the number of images of each batch when it has been queued on the
            devices.
        for_display: True: the images are returned. Rewards outside JAX are then called only if they
            have a score ".../strict", so that no judge is asked and paid. The scores of all other
            rewards outside JAX, and of rewards inside JAX that compare candidates, are missing.
            "reward" is the weighted sum over the remaining rewards inside JAX alone, and is missing
            if none of these has a weight. False: all rewards are called, and `Samples.images` is
            None.

    Returns:
        The p * m samples with their scores by name, prompt by prompt.

    Raises:
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX fails.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If a reward outside JAX fails while `reward.on_failure` is "stop", or 32 times in
            a row (RewardError); if the disk refuses the cache of prompts, or if another process
            gives no answer.
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
        keep_images=for_display,
        for_display=for_display,
        progress=progress,
    )
