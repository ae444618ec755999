"""The iteration of Sol-RL (arXiv 2604.06916, algorithm 1; docs/method.md, section 1).

    prompts -> explore (NVFP4) -> select -> regenerate (BF16) -> advantages -> update -> old policy, EMA -> sync

Nothing computed in low precision enters the loss. The four families are four settings of `iterate`: how many candidates, in
which precision they are explored, and whether the kept ones are regenerated or trained on as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from solrl_jax.data.prompts import Prompt, draw_prompts
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import prompt_uid, seed_numbers
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rl.advantages import TIE, advantages, optimality
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.monitor import ExplorationSetting
from solrl_jax.rl.fidelity import rank_correlations
from solrl_jax.rl.generate import PromptBatch, Samples, SeedBatch, generate
from solrl_jax.rl.objective import Objective
from solrl_jax.rl.phase_timer import PhaseTimer
from solrl_jax.rl.select import best_and_worst, rank, select
from solrl_jax.rl.state import TrainState
from solrl_jax.rl.update import PolicyBatch, update

# Called with the running stage, its number of rows, and how many rows more are done. May raise to stop the iteration.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, rows: int, done: int) -> None:
    """Progress that nobody is shown."""


@dataclasses.dataclass(frozen=True)
class IterationResult:
    """What an iteration leaves beside the new state."""

    metrics: dict[str, float]
    ledger: dict[str, Any]  # columns with a row a candidate


@dataclasses.dataclass(frozen=True)
class Selection:
    """The candidates of P prompts, N each, and the K of each that are kept."""

    prompts: Sequence[Prompt]
    seeds: UInt32[np.ndarray, "p n 2"]
    proxy: Float[np.ndarray, "p n"]  # rewards of the explored candidates
    chosen: Int[np.ndarray, "p k"]  # indices of the kept candidates, ascending
    usable: np.ndarray  # [p] bool: whether a prompt had enough finite rewards

    @property
    def kept_seeds(self) -> UInt32[np.ndarray, "p k 2"]:
        return np.take_along_axis(self.seeds, self.chosen[..., None], axis=1)


def iterate(
    experiment: Experiment,
    state: TrainState,
    iteration: int,
    level: int = 0,
    progress: Progress = no_progress,
    objective: Objective | None = None,
) -> tuple[TrainState, IterationResult]:
    """One iteration. `state` is donated: use the returned state from here on.

    The new state depends on the arguments alone, not on devices or chunks (up to rounding).

    Args:
      iteration: counted from 1; decides the prompts, the seeds and the size of the pictures.
      level: of `experiment.explorer.settings`, how to explore; 0 is as configured.
      objective: in place of the function that `rl.objective` names; it is given what that one is given. One function object
        for all iterations, or the update is compiled anew.
    """
    experiment = experiment.for_iteration(iteration)
    config = experiment.config
    rollout = experiment.config.rollout
    explorer = experiment.explorer
    clock = PhaseTimer()
    start = rollout.window_start(iteration)
    recorded = config.num_recorded_steps
    clock.start("encode")
    prompts = draw_prompts(
        experiment.train_prompts, config.seed, iteration - 1, config.train.num_prompts
    )
    prompted = experiment.encode_prompts(prompts, experiment.reward)
    seeds = experiment.seeds("candidate", prompts, rollout.candidates, iteration=iteration)

    clock.start("sync")
    exploring = explorer.sampler(state.old, explorer.settings[level], start)
    if not rollout.regenerate:
        exploring = dataclasses.replace(exploring, recorded=recorded)
    jax.block_until_ready(exploring.segments)

    clock.start("explore")
    rows = SeedBatch.from_seeds(seeds)
    progress(exploring.name, len(rows), 0)
    pool = generate(
        experiment.backbone,
        exploring,
        prompted,
        rows,
        experiment.reward,
        progress=partial(progress, exploring.name, len(rows)),
    )
    del exploring  # frees the quantised copy
    proxy = pool.reward.reshape(len(prompts), rollout.candidates)
    chosen, usable = select(proxy, rollout.kept, rollout.selection, seed=(config.seed, iteration))
    selection = Selection(prompts, seeds, proxy, chosen, usable)

    clock.start("regenerate")
    regenerating = dataclasses.replace(
        experiment.sampler("regenerate", state.old, rollout.num_steps, start), recorded=recorded
    )
    if rollout.regenerate:
        rows = SeedBatch.from_seeds(selection.kept_seeds)
        progress(regenerating.name, len(rows), 0)
        kept = generate(
            experiment.backbone,
            regenerating,
            prompted,
            rows,
            experiment.reward,
            progress=partial(progress, regenerating.name, len(rows)),
        )
    else:
        kept = pool.take(chosen + rollout.candidates * np.arange(len(prompts))[:, None])

    clock.start("update")
    rewards = np.where(usable[:, None], kept.reward.reshape(chosen.shape), np.nan)
    algorithm = config.algorithm
    advantage = np.asarray(
        advantages(
            jnp.asarray(rewards),
            clip=algorithm.adv_clip_max,
            global_std=algorithm.global_std,
            mode=algorithm.adv_mode,
        )
    )
    batch = policy_batch(experiment, prompted, selection, kept, rewards, advantage)
    progress("update", len(batch.weight), 0)
    state, trained = optimise(
        experiment, state, batch, experiment.schedule(rollout.num_steps, start), objective
    )
    clock.stop()

    metrics = (
        trained
        | summarise(experiment, selection, rewards, kept, pool)
        | {"fidelity/level": float(level)}
    )
    metrics |= clock.report(pool, kept if rollout.regenerate else None)
    return state, IterationResult(
        metrics,
        ledger_columns(
            experiment, selection, explorer.settings[level], rewards, advantage, iteration
        ),
    )


def policy_batch(
    experiment: Experiment,
    prompted: PromptBatch,
    selection: Selection,
    samples: Samples,
    rewards: Float[np.ndarray, "p k"],
    advantage: Float[np.ndarray, "p k"],
) -> PolicyBatch:
    """The kept samples as the update takes them, on every device. A reward that is not finite has weight 0.

    Of pairs, each best row is followed by its worst one, which has the best one's seed, so it is noised in the same way. A pair
    of equal rewards, but for rounding (`TIE`), has weight 0.
    """

    def place(x):
        return hosts.put(x, sharding.replicated(experiment.backbone.mesh))

    algorithm = experiment.config.algorithm
    flat = rewards.reshape(-1)
    rows = np.arange(flat.size)
    seeds = selection.kept_seeds.reshape(-1, 2)
    counts = np.isfinite(flat)
    if algorithm.trains_on == "pairs":
        best, worst = best_and_worst(rewards)
        rows = np.stack([best, worst], 1).reshape(-1)
        seeds = seeds[best].repeat(2, 0)
        counts = (
            flat[best] - flat[worst] > TIE * np.maximum(abs(flat[best]), abs(flat[worst]))
        ).repeat(2)
    return PolicyBatch(
        latents=place(samples.latents[rows]),
        optimality=place(
            optimality(jnp.asarray(advantage), algorithm.adv_clip_max).reshape(-1)[rows]
        ),
        weight=place(counts.astype(np.float32)),
        prompt=place((rows // rewards.shape[1]).astype(np.int32)),
        seeds=place(seeds),
        conditioning=prompted.conditions.positive,
        states=None if samples.states is None else place(samples.states[rows]),
    )


def optimise(
    experiment: Experiment,
    state: TrainState,
    batch: PolicyBatch,
    grid: Schedule,
    objective: Objective | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """`rl.update` on the run's mesh, its metrics on the host."""
    backbone = experiment.backbone
    with jax.set_mesh(backbone.mesh):
        state, metrics = update(
            backbone,
            experiment.config,
            state,
            backbone.transformer,
            batch,
            grid,
            objective=objective,
        )
    return state, {name: float(value) for name, value in jax.device_get(metrics).items()}


def summarise(
    experiment: Experiment,
    selection: Selection,
    rewards: Float[np.ndarray, "p k"],
    kept: Samples,
    pool: Samples,
) -> dict[str, float]:
    """Rewards of the pool and of what is trained on, how well the proxy ranked the latter, and how large the pictures are."""

    def mean(x):
        return (
            float(np.mean(x[np.isfinite(x)], dtype=float)) if np.isfinite(x).any() else float("nan")
        )

    proxy = selection.proxy
    correlations = rank_correlations(np.take_along_axis(proxy, selection.chosen, axis=1), rewards)
    return {
        **{f"pool/{name}": mean(scores) for name, scores in pool.scores.items()},
        **{f"kept/{name}": mean(scores) for name, scores in kept.scores.items()},
        "kept/spread": mean(
            np.nanmax(rewards, 1, initial=-np.inf) - np.nanmin(rewards, 1, initial=np.inf)
        ),
        "size/height": float(experiment.size[0]),
        "size/width": float(experiment.size[1]),
        "nonfinite_rewards": float((~np.isfinite(proxy)).sum() + (~np.isfinite(kept.reward)).sum()),
        **{
            f"reward_failures/{name}": float(n + kept.failed.get(name, 0))
            for name, n in pool.failed.items()
        },
        "fidelity/spearman": correlations.spearman,
        "fidelity/kendall": correlations.kendall,
    }


def ledger_columns(
    experiment: Experiment,
    selection: Selection,
    level: ExplorationSetting,
    rewards: Float[np.ndarray, "p k"],
    advantage: Float[np.ndarray, "p k"],
    iteration: int,
) -> dict[str, Any]:
    """Every candidate of the iteration, prompt by prompt."""
    proxy = selection.proxy
    chosen = selection.chosen
    count, n = proxy.shape
    kept = np.zeros(proxy.shape, bool)
    np.put_along_axis(
        kept, chosen, np.broadcast_to(selection.usable[:, None], chosen.shape), axis=1
    )

    def column(values):
        return np.repeat(np.asarray(values), n)

    def of_kept(values: np.ndarray) -> np.ma.MaskedArray:
        full = np.zeros(proxy.shape, np.float32)
        np.put_along_axis(full, chosen, np.asarray(values, np.float32), axis=1)
        return np.ma.masked_array(full.reshape(-1), ~kept.reshape(-1))

    return {
        "prompt": column(selection.prompts).tolist(),
        "prompt_uid": column(np.array([prompt_uid(p) for p in selection.prompts], np.uint32)),
        "candidate": np.tile(np.arange(n, dtype=np.int32), count),
        "seed": seed_numbers(selection.seeds).reshape(-1),
        "precision": level.precision,
        "steps": level.steps,
        "proxy_reward": proxy.reshape(-1).astype(np.float32),
        "rank": rank(proxy).reshape(-1).astype(np.int32),
        "kept": kept.reshape(-1),
        "regenerated_reward": of_kept(rewards) if experiment.config.rollout.regenerate else None,
        "advantage": of_kept(advantage),
        "policy_revision": iteration,
    }
