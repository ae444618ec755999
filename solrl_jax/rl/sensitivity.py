"""Which linears stand a format: what quantising each group of them does to the ranking of candidates.

A group is a module of the blocks, in all of them (`attn`, `ff`), or a linear outside of them. The errors of matrices say
little: the linears that read the time have small ones, and steer every token.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np

from solrl_jax.errors import RunError
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.linears import Linear, report
from solrl_jax.rl.explore.monitor import ExplorationSetting
from solrl_jax.rl.fidelity import rank_correlations
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.iteration import Progress
from solrl_jax.rl.trainable.trainable import Trainable


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """A group of linears. share: of the multiplications that a token takes; spearman: with this group alone quantised."""

    group: str
    linears: int
    share: float
    spearman: float


def group_of(path: str) -> str:
    """The group of a linear's path, as a part of it that no other group's paths have: `/attn/`, `proj_out/`."""
    first, *others = path.split("/")
    if not first.endswith("blocks"):
        return f"{first}/"
    return f"/{others[1] if others[0].replace('-', '').isdigit() else others[0]}/"


def measure(
    experiment: Experiment, adapters: Trainable, prompts: int, progress: Progress
) -> tuple[float, list[Sensitivity]]:
    """Mean Spearman correlations over prompts, and first that of exploration with nothing quantised.

    The candidates of the first test prompts, explored in the run's format and steps, against their regeneration. Raises
    RunError if all rewards tie.
    """
    config = experiment.config
    chosen = experiment.test_prompts[:prompts]
    seeds = experiment.seeds("ranking", chosen, config.rollout.candidates, seed=config.eval.seed)
    prompted = experiment.encode_prompts(chosen, experiment.reward)
    seed_batch = SeedBatch.from_seeds(seeds)
    steps = config.rollout.explore.num_steps
    form = experiment.explorer.format

    def rewards(stage):
        total = len(seed_batch)
        progress(stage.name, total, 0)
        samples = generate(
            experiment.backbone,
            stage,
            prompted,
            seed_batch,
            experiment.reward,
            progress=partial(progress, stage.name, total),
        )
        return samples.reward.reshape(seeds.shape[:2])

    true = rewards(experiment.sampler("regenerate", adapters, config.rollout.num_steps))

    def agreement(paths: Sequence[str], precision: str) -> float:
        explorer = dataclasses.replace(experiment, quantized=tuple(paths)).explorer
        correlations = rank_correlations(
            rewards(explorer.sampler(adapters, ExplorationSetting(precision, steps))), true
        )
        known = [spearman for spearman, _ in correlations.per_prompt if not np.isnan(spearman)]
        return float(np.mean(known)) if known else np.nan

    exact = agreement((), config.rollout.precision)
    if np.isnan(exact):
        raise RunError(
            f"the rewards of all candidates of {prompts} prompt(s) tie, so nothing ranks them; take more prompts"
        )
    rule = dataclasses.replace(
        config.model.quantization, modules_to_not_convert=(), min_width_ratio=0.0
    )
    groups: dict[str, list[Linear]] = {}
    for row in report(experiment.backbone.transformer, rule, form):
        groups.setdefault(group_of(row.path), []).append(row)
    sizes = {
        name: sum(row.layers * row.n_in * row.n_out for row in rows)
        for name, rows in groups.items()
    }
    found = [
        Sensitivity(
            group=name,
            linears=sum(row.layers for row in rows),
            share=sizes[name] / sum(sizes.values()),
            spearman=agreement([row.path for row in rows], form.name),
        )
        for name, rows in groups.items()
    ]
    return exact, found


def proposed(exact: float, groups: Sequence[Sensitivity], floor: float) -> list[str]:
    """`model.quantization.modules_to_not_convert`: groups are quantised in the order of what they cost for their share, until `floor` is reached.

    exact: Spearman with nothing quantised. What groups cost is taken to add up.
    """
    cost = {g.group: max(exact - g.spearman, 0.0) for g in groups}
    left = exact - floor
    skip = []
    for g in sorted(groups, key=lambda g: cost[g.group] / g.share):
        if cost[g.group] <= left:
            left -= cost[g.group]
        else:
            skip.append(g.group)
    return sorted(skip)


def table(exact: float, groups: Sequence[Sensitivity], skip: Sequence[str]) -> str:
    """For a terminal."""
    lines = [f"{'nothing':<24}{'':>30}spearman {exact:.3f}"]
    lines += [
        f"{g.group:<24}{g.linears:>5} linears, {g.share:>6.1%} of all, spearman {g.spearman:.3f}"
        for g in groups
    ]
    return "\n".join(
        [
            *lines,
            f"proposed: model.quantization.modules_to_not_convert=[{','.join(skip)}] model.quantization.min_width_ratio=0",
        ]
    )
