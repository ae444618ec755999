"""How good a policy is: held-out prompts, fixed seeds, the training precision."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt32

from solrl_jax.config.sizes import evaluation_size
from solrl_jax.data.prompts import Prompt, draw_prompts
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.monitor import ExplorationSetting
from solrl_jax.rl.generate import Samples, SeedBatch, generate
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable

Show = Callable[[int], None]  # called with rows that are done


def _silent(rows):
    return None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores by name."""

    means: dict[str, float]  # over all pictures with a finite score
    errors: dict[str, float]  # standard errors of the means
    scores: dict[str, Float[np.ndarray, "p m"]]  # [prompts, pictures]
    failed: dict[str, int]  # pictures without a score, by reward outside JAX


def evaluate(experiment: Experiment, adapters: Trainable, progress: Show = _silent) -> Evaluation:
    """Scores `eval.num_images_per_prompt` pictures of each of the first `eval.num_prompts` test prompts."""
    config = experiment.config.eval
    samples = _sample(
        experiment,
        adapters,
        *_held_out(experiment, config.num_prompts, config.num_images_per_prompt),
        progress,
    )
    scores = {name: s.reshape(config.num_prompts, -1) for name, s in samples.scores.items()}
    finite = {name: s[np.isfinite(s)] for name, s in scores.items()}
    means = {
        name: float(s.mean(dtype=float)) if s.size else float("nan") for name, s in finite.items()
    }
    errors = {
        name: float(s.std(dtype=float) / np.sqrt(s.size)) if s.size else float("nan")
        for name, s in finite.items()
    }
    return Evaluation(means, errors, scores, samples.failed)


def setting(experiment: Experiment) -> str:
    """All that a figure of `evaluate` depends on beside the policy, in one line. The hash is of the prompts, a line each."""
    config = experiment.config.eval
    rollout = experiment.config.rollout
    (height, width) = evaluation_size(experiment.config)
    prompts = "".join(f"{prompt}\n" for prompt in experiment.test_prompts[: config.num_prompts])
    digest = hashlib.sha256(prompts.encode()).hexdigest()[:12]
    noise = " without noise" if rollout.noise_level else ""
    true = f", true guidance {rollout.true_cfg_scale:g}" if rollout.true_cfg_scale != 1 else ""
    return (
        f"{config.num_prompts} prompts (sha256 {digest}) x {config.num_images_per_prompt} pictures of {width} x {height}; "
        f"{rollout.solver}{noise}, {config.num_steps} steps, guidance {rollout.guidance_scale:g}{true}, {rollout.precision}, "
        f"seed {config.seed}"
    )


def paired_difference(first: Evaluation, second: Evaluation) -> dict[str, tuple[float, float]]:
    """Of two policies on the same prompts and noise: by how much the first scores higher, ± a 95 % confidence interval.

    Pictures are compared one by one. Prompts differ in what can be gained, so the interval is Student's over prompts. A picture
    counts if both scores are finite; NaN for an interval of fewer than two prompts.
    """
    from scipy import stats  # half a second, which most commands need not wait for

    differences = {}
    for name, scores in first.scores.items():
        difference = scores - second.scores[name]
        counted = np.isfinite(difference)
        of_prompts = (
            np.where(counted, difference, 0.0).sum(1)[counted.any(1)]
            / counted.sum(1)[counted.any(1)]
        )
        n = len(of_prompts)
        spread = of_prompts.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
        differences[name] = (
            float(of_prompts.mean()) if n else np.nan,
            float(stats.t.ppf(0.975, n - 1) * spread),
        )
    return differences


@dataclasses.dataclass(frozen=True)
class PictureGrid:
    """Pictures of fixed prompts and seeds, which show how a policy changes."""

    prompts: Sequence[str]
    images: Float[np.ndarray, "p m h w 3"]
    right: (
        np.ndarray | None
    )  # [p, m] bool, by the first reward that has a score "strict"; None: no reward has one

    @classmethod
    def of(cls, prompts: Sequence[str], samples: Samples) -> "PictureGrid":
        """As many samples of each prompt, in their order, which were kept with their pictures."""
        assert samples.images is not None
        strict = next(
            (scores for name, scores in samples.scores.items() if name.endswith("/strict")), None
        )
        images = samples.images.reshape(len(prompts), -1, *samples.images.shape[1:])
        return cls(
            prompts, images, None if strict is None else strict.reshape(len(prompts), -1) > 0.5
        )

    @property
    def marks(self) -> list[bool | None]:
        """`right`, image by image; None where there is no verdict."""
        return (
            [None] * (self.images.shape[0] * self.images.shape[1])
            if self.right is None
            else self.right.reshape(-1).tolist()
        )


def sample_grid(experiment: Experiment, adapters: Trainable) -> PictureGrid:
    """`eval.num_grid_images` pictures in all, four a prompt."""
    each = min(4, experiment.config.eval.num_grid_images)
    count = min(experiment.config.eval.num_grid_images // each, len(experiment.test_prompts))
    return _pictures(experiment, adapters, *_held_out(experiment, count, each))


@dataclasses.dataclass(frozen=True)
class Differing:
    """Pictures of an evaluation on which two policies differ most: m of each of p prompts."""

    prompts: Int[
        np.ndarray, " p"
    ]  # their places among the test prompts; the largest difference first
    pictures: Int[np.ndarray, "p m"]  # their places within the prompt
    gains: Float[np.ndarray, "p m"]  # by how much the first policy's reward is higher

    @classmethod
    def of(cls, first: Evaluation, second: Evaluation, prompts: int, pictures: int) -> "Differing":
        """Of two evaluations on the same pictures. A picture without two finite rewards is not chosen before others."""
        gains = first.scores["reward"] - second.scores["reward"]
        size = np.where(np.isfinite(gains), np.abs(gains), -1.0)
        order = np.argsort(-size, axis=1, kind="stable")[:, :pictures]
        most = np.argsort(-size.max(1), kind="stable")[:prompts]
        return cls(most, order[most], np.take_along_axis(gains, order, axis=1)[most])

    def draw(self, experiment: Experiment, adapters: Trainable) -> PictureGrid:
        """The pictures as a policy makes them. A picture is its seed: they look as they did when they were scored."""
        config = experiment.config.eval
        prompts, seeds = _held_out(experiment, config.num_prompts, config.num_images_per_prompt)
        seeds = np.take_along_axis(seeds[self.prompts], self.pictures[..., None], axis=1)
        return _pictures(experiment, adapters, [prompts[i] for i in self.prompts], seeds)


@dataclasses.dataclass(frozen=True)
class PoolPictures:
    """The best and the worst kept candidates of some prompts of an iteration, as they were explored and regenerated."""

    prompts: Sequence[str]
    candidates: Int[np.ndarray, "p m"]  # their indices within the prompt, best proxy first
    stages: dict[
        str, PictureGrid
    ]  # "explored", and "regenerated" unless explored samples were trained on


def pool_pictures(
    experiment: Experiment,
    old: Trainable,
    level: ExplorationSetting,
    ledger: Mapping[str, Any],
    iteration: int,
) -> PoolPictures:
    """Draws candidates of an iteration again, `eval.num_grid_images` in all, four a prompt. A candidate is its seed: it looks the same.

    Args:
      old: the adapters that the iteration explored and regenerated with.
      level: how it explored.
      ledger: its candidates, `IterationResult.ledger`.
    """
    experiment = experiment.for_iteration(iteration)
    config = experiment.config
    rollout = experiment.config.rollout
    explorer = experiment.explorer
    prompts = draw_prompts(
        experiment.train_prompts, config.seed, iteration - 1, config.train.num_prompts
    )
    each = min(4, config.eval.num_grid_images, rollout.kept)
    count = min(config.eval.num_grid_images // each, len(prompts))
    rank, kept = (
        np.asarray(ledger[name]).reshape(len(prompts), -1)[:count] for name in ("rank", "kept")
    )
    of_kept = np.argsort(np.where(kept, rank, rank + rollout.candidates), axis=1)[:, : rollout.kept]
    candidates = np.concatenate(
        [of_kept[:, : each - each // 2], of_kept[:, rollout.kept - each // 2 :]], axis=1
    )
    seeds = experiment.seeds("candidate", prompts, rollout.candidates, iteration=iteration)
    # the conditioning of all prompts, and rows of some: the shapes of the iteration, for which the programs are compiled
    prompted = experiment.encode_prompts(prompts, experiment.reward)
    rows = SeedBatch.from_seeds(np.take_along_axis(seeds[:count], candidates[..., None], axis=1))

    def draw(stage: Sampler) -> PictureGrid:
        samples = generate(
            experiment.backbone, stage, prompted, rows, experiment.reward, keep_images=True
        )
        return PictureGrid.of(prompts[:count], samples)

    start = rollout.window_start(iteration)
    stages = {"explored": draw(explorer.sampler(old, level, start))}
    if rollout.regenerate:
        stages["regenerated"] = draw(
            experiment.sampler("regenerate", old, rollout.num_steps, start)
        )
    return PoolPictures(prompts[:count], candidates, stages)


def _held_out(
    experiment: Experiment, prompts: int, pictures: int
) -> tuple[Sequence[Prompt], UInt32[np.ndarray, "p m 2"]]:
    """The first test prompts, and the seeds of their pictures, which are the same for every policy."""
    chosen = experiment.test_prompts[:prompts]
    return chosen, experiment.seeds(
        "evaluation", chosen, pictures, seed=experiment.config.eval.seed
    )


def _pictures(
    experiment: Experiment,
    adapters: Trainable,
    prompts: Sequence[Prompt],
    seeds: UInt32[np.ndarray, "p m 2"],
) -> PictureGrid:
    return PictureGrid.of(prompts, _sample(experiment, adapters, prompts, seeds, keep_images=True))


def _sample(
    experiment: Experiment,
    adapters: Trainable,
    prompts: Sequence[Prompt],
    seeds: UInt32[np.ndarray, "p m 2"],
    progress: Show = _silent,
    keep_images: bool = False,
) -> Samples:
    config = experiment.config
    reward = experiment.evaluation_reward
    stage = experiment.with_size(evaluation_size(config)).sampler(
        "evaluate", adapters, config.eval.num_steps, noise_start=None
    )
    prompted = experiment.encode_prompts(prompts, reward)
    return generate(
        experiment.backbone,
        stage,
        prompted,
        SeedBatch.from_seeds(seeds),
        reward,
        keep_images=keep_images,
        progress=progress,
    )
