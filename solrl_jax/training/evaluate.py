"""How good a policy is: held-out prompts, fixed seeds, the training precision."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from solrl_jax.policy.lora import Adapters
from solrl_jax.rollout.generate import Rows, Samples, generate
from solrl_jax.training.experiment import Experiment

Show = Callable[[int], None]  # called with rows that are done
_silent: Show = lambda rows: None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores by name."""

    means: dict[str, float]  # over all pictures with a finite score
    errors: dict[str, float]  # standard errors of the means
    scores: dict[str, Float[np.ndarray, "p m"]]  # [prompts, pictures]
    failed: dict[str, int]  # pictures without a score, by reward outside JAX


def evaluate(experiment: Experiment, adapters: Adapters, progress: Show = _silent) -> Evaluation:
    """Scores `eval.images_per_prompt` pictures of each of the first `eval.prompts` test prompts."""
    config = experiment.config.eval
    samples = _sample(experiment, adapters, config.prompts, config.images_per_prompt, progress)
    scores = {name: s.reshape(config.prompts, -1) for name, s in samples.scores.items()}
    finite = {name: s[np.isfinite(s)] for name, s in scores.items()}
    means = {name: float(s.mean()) if s.size else float("nan") for name, s in finite.items()}
    errors = {name: float(s.std() / np.sqrt(s.size)) if s.size else float("nan") for name, s in finite.items()}
    return Evaluation(means, errors, scores, samples.failed)


@dataclasses.dataclass(frozen=True)
class PictureGrid:
    """Pictures of fixed prompts and seeds, which show how a policy changes."""

    prompts: Sequence[str]
    images: Float[np.ndarray, "p m h w 3"]
    right: np.ndarray | None  # [p, m] bool, by the first reward that has a score "strict"; None: no reward has one


def sample_grid(experiment: Experiment, adapters: Adapters) -> PictureGrid:
    """`eval.grid` pictures in all, four a prompt."""
    each = min(4, experiment.config.eval.grid)
    count = min(experiment.config.eval.grid // each, len(experiment.test_prompts))
    samples = _sample(experiment, adapters, count, each, keep_images=True)
    assert samples.images is not None
    strict = next((scores for name, scores in samples.scores.items() if name.endswith("/strict")), None)
    right = None if strict is None else strict.reshape(count, each) > 0.5
    images = samples.images.reshape(count, each, *samples.images.shape[1:])
    return PictureGrid(experiment.test_prompts[:count], images, right)


def _sample(
    experiment: Experiment, adapters: Adapters, prompts: int, images: int, progress: Show = _silent, keep_images: bool = False
) -> Samples:
    config, reward, chosen = experiment.config.eval, experiment.evaluated, experiment.test_prompts[:prompts]
    rows = Rows.of(experiment.seeds("evaluation", chosen, images, seed=config.seed))
    stage = experiment.stage("evaluate", adapters, config.steps, start=None)
    prompted = experiment.prompted(chosen, reward)
    return generate(experiment.backbone, stage, prompted, rows, reward, keep_images=keep_images, progress=progress)
