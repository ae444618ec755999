"""Held-out prompts, fixed seeds, the training precision: how good a policy is."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from solrl_jax.backbone.backbone import Params
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rollout.generate import Samples, generate, prepare
from solrl_jax.training.experiment import Experiment

# the "iteration" of evaluation seeds: no training iteration gets there, so no training candidate shares its noise
EVALUATION = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """means and standard errors over all images, by score name; the scores [prompts, images] themselves.

    failed: of each reward outside JAX, how many images it could not score.
    """

    means: dict[str, float]
    errors: dict[str, float]
    scores: dict[str, Float[np.ndarray, "p m"]]
    failed: dict[str, int]


def evaluate(experiment: Experiment, params: Params, progress: Callable[[int], None] = lambda rows: None) -> Evaluation:
    """Scores `eval.images_per_prompt` images of each of the first `eval.prompts` test prompts. params: the whole policy."""
    config = experiment.config.eval
    samples = _sample(experiment, params, config.prompts, config.images_per_prompt, experiment.evaluated, False, progress)
    scores = {name: s.reshape(config.prompts, -1) for name, s in samples.scores.items()}
    finite = {name: s[np.isfinite(s)] for name, s in scores.items()}
    means = {name: float(s.mean()) if s.size else float("nan") for name, s in finite.items()}
    errors = {name: float(s.std() / np.sqrt(max(s.size, 1))) for name, s in finite.items()}
    return Evaluation(means, errors, scores, samples.failed)


def sample_grid(experiment: Experiment, params: Params) -> tuple[Float[np.ndarray, "p m h w 3"], Sequence[str]]:
    """The pictures of fixed prompts and seeds that show how a policy changes: `eval.grid` in all, four a prompt."""
    a_prompt = min(4, experiment.config.eval.grid)
    count = min(experiment.config.eval.grid // a_prompt, len(experiment.test_prompts))
    samples = _sample(experiment, params, count, a_prompt, None, True, lambda rows: None)
    assert samples.images is not None
    return samples.images.reshape(count, a_prompt, *samples.images.shape[1:]), experiment.test_prompts[:count]


def _sample(
    experiment: Experiment, params: Params, prompts: int, images: int, reward: Reward | None, keep: bool,
    progress: Callable[[int], None],
) -> Samples:  # fmt: skip
    config = experiment.config
    chosen = experiment.test_prompts[:prompts]
    seeds = experiment.seeds(config.eval.seed, EVALUATION, chosen, images)
    prompted = prepare(experiment.backbone, reward, chosen, config.model.max_tokens)
    return generate(
        experiment.backbone, params, experiment.grid(config.eval.steps), prompted, np.repeat(np.arange(prompts), images),
        seeds.reshape(-1, 2), experiment.size, config.rollout.chunk, reward, keep_images=keep, progress=progress,
    )  # fmt: skip
