"""Training: the iteration of Sol-RL (arXiv 2604.06916, algorithm 1; spec, section 1) and the loop around it.

    prompts -> explore (NVFP4) -> select -> regenerate (BF16) -> advantages -> update -> old policy, EMA -> sync

Nothing computed in low precision enters the loss. The four families are four settings of `iterate`: how many candidates, in
which precision they are explored, and whether the kept ones are regenerated or trained on as they are.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from solrl_jax.conditioning.prompts import draw_prompts
from solrl_jax.numerics.randomness import prompt_uid, seed_numbers
from solrl_jax.parallel import hosts, sharding
from solrl_jax.policy.advantage import advantages, optimality
from solrl_jax.policy.state import TrainState
from solrl_jax.policy.update import PolicyBatch, update
from solrl_jax.rollout.fidelity import overlap, rank_correlations, regret
from solrl_jax.rollout.generate import Grid, Prompted, Samples, generate, prepare
from solrl_jax.rollout.select import rank, select
from solrl_jax.training.experiment import Experiment

# told which stage is running, how many rows it has and how many more are done; may raise to stop
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an iteration leaves beside the new state: numbers for the log, columns for the ledger."""

    metrics: dict[str, float]
    ledger: dict[str, Any]


def iterate(
    experiment: Experiment, state: TrainState, iteration: int, progress: Progress, level: int = 0
) -> tuple[TrainState, Outcome]:
    """One iteration, from 1. The new state depends on the arguments alone, not on devices or chunks (up to rounding).

    level: of `Experiment.levels`, how to explore; 0 is as configured.
    """
    config, rollout, explore = experiment.config, experiment.config.rollout, experiment.levels[level]
    grid = experiment.grid(rollout.steps)
    clock = Clock()

    clock.start("encode")
    prompts = draw_prompts(experiment.train_prompts, config.seed, iteration - 1, config.train.prompts)
    prompted = prepare(experiment.backbone, experiment.reward, prompts, config.model.max_tokens)
    seeds = experiment.seeds(config.seed, iteration, prompts, rollout.candidates)

    clock.start("sync")
    exploring = jax.block_until_ready(experiment.explorer(state.old, explore.precision))
    clock.start("explore")
    pool = roll_out(experiment, exploring, experiment.exploring_grid(explore.steps), prompted, seeds, "explore", progress)
    del exploring  # the copy's room is free for what follows

    clock.start("regenerate")
    proxy = pool.reward.reshape(len(prompts), -1)
    chosen, usable = select(proxy, rollout.kept, rollout.selection, seed=(config.seed, iteration))
    kept_seeds = np.take_along_axis(seeds, chosen[..., None], axis=1)
    if rollout.regenerate:
        kept = roll_out(experiment, experiment.policy(state.old), grid, prompted, kept_seeds, "regenerate", progress)
    else:
        kept = take(pool, chosen + rollout.candidates * np.arange(len(prompts))[:, None])
    audited = {}
    if rollout.explore.audit_every and iteration % rollout.explore.audit_every == 0:
        clock.start("audit")
        whole = roll_out(experiment, experiment.policy(state.old), grid, prompted, seeds, "audit", progress)
        audited = audit(proxy, whole.reward.reshape(proxy.shape), rollout.kept)

    clock.start("update")
    rewards = np.where(usable[:, None], kept.reward.reshape(chosen.shape), np.nan)
    policy = config.policy
    advantage = advantages(
        jnp.asarray(rewards), clip=policy.advantage_clip, global_std=policy.global_std, mode=policy.advantage_mode
    )
    mesh = experiment.backbone.mesh
    everywhere = lambda x: hosts.put(x, sharding.replicated(mesh))
    batch = PolicyBatch(
        latents=everywhere(kept.latents),
        optimality=everywhere(optimality(advantage, policy.advantage_clip).reshape(-1)),
        weight=everywhere(np.isfinite(rewards).reshape(-1).astype(np.float32)),
        prompt=everywhere(np.repeat(np.arange(len(prompts), dtype=np.int32), rollout.kept)),
        seeds=everywhere(kept_seeds.reshape(-1, 2)),
    )
    progress("update", len(batch.weight), 0)
    with jax.set_mesh(mesh):
        state, trained = update(
            experiment.backbone, config, state, experiment.backbone.transformer, prompted.conditioning, batch,
            grid.sigmas, grid.times,
        )  # fmt: skip
    trained = {name: float(value) for name, value in jax.device_get(trained).items()}
    clock.stop()

    metrics = trained | summarise(proxy, chosen, rewards, kept, pool) | audited | {"fidelity/level": float(level)}
    metrics |= clock.report(pool, kept if rollout.regenerate else None)
    return state, Outcome(
        metrics, ledger_columns(rollout, explore, iteration, prompts, seeds, proxy, chosen, usable, rewards, advantage)
    )


def roll_out(
    experiment: Experiment, params: Any, grid: Grid, prompted: Prompted, seeds: np.ndarray, stage: str, progress: Progress
) -> Samples:
    """Samples and scores a candidate a seed; seeds [prompts, candidates, 2], rows prompt by prompt.

    stage: "explore" decodes as candidates are, every other one with the model's own autoencoder.
    """
    backbone = experiment.drafts if stage == "explore" else experiment.backbone
    index = np.repeat(np.arange(seeds.shape[0]), seeds.shape[1])
    progress(stage, len(index), 0)
    return generate(
        backbone, params, grid, prompted, index, seeds.reshape(-1, 2), experiment.size,
        experiment.config.rollout.chunk, experiment.reward, progress=lambda done: progress(stage, len(index), done),
    )  # fmt: skip


def take(samples: Samples, rows: np.ndarray) -> Samples:
    """The samples of the given rows (any shape; flattened)."""
    rows = rows.reshape(-1)
    return Samples(samples.latents[rows], {name: scores[rows] for name, scores in samples.scores.items()}, None)


def summarise(proxy: np.ndarray, chosen: np.ndarray, rewards: np.ndarray, kept: Samples, pool: Samples) -> dict[str, float]:
    """Rewards of the pool and of what is trained on, and how well the proxy ranked the latter."""
    mean = lambda x: float(np.mean(x[np.isfinite(x)])) if np.isfinite(x).any() else float("nan")
    correlations = rank_correlations(np.take_along_axis(proxy, chosen, axis=1), rewards)
    return {
        **{f"pool/{name}": mean(scores) for name, scores in pool.scores.items()},
        **{f"kept/{name}": mean(scores) for name, scores in kept.scores.items()},
        "kept/spread": mean(np.nanmax(rewards, 1, initial=-np.inf) - np.nanmin(rewards, 1, initial=np.inf)),
        "nonfinite_rewards": float((~np.isfinite(proxy)).sum() + (~np.isfinite(kept.reward)).sum()),
        **{f"reward_failures/{name}": float(n + kept.failed.get(name, 0)) for name, n in pool.failed.items()},
        "fidelity/spearman": correlations.spearman,
        "fidelity/kendall": correlations.kendall,
    }


def audit(proxy: np.ndarray, true: np.ndarray, kept: int, top: int = 4) -> dict[str, float]:
    """How well the proxy ranks whole pools [prompts, candidates]: correlations, how many of the best four are kept, what the
    others cost."""
    correlations, ends = rank_correlations(proxy, true), max(kept // 2, 1)
    return {
        "fidelity/pool/spearman": correlations.spearman,
        "fidelity/pool/kendall": correlations.kendall,
        f"fidelity/pool/top_{top}_match": float(np.nanmean(overlap(proxy, true, top, ends))),
        f"fidelity/pool/top_{top}_regret": float(np.nanmean(regret(proxy, true, top, ends))),
    }


def ledger_columns(rollout, explore, iteration, prompts, seeds, proxy, chosen, usable, rewards, advantage) -> dict[str, Any]:
    """Every candidate of the iteration, prompt by prompt."""
    count, n = proxy.shape
    kept = np.zeros(proxy.shape, bool)
    np.put_along_axis(kept, chosen, np.broadcast_to(usable[:, None], chosen.shape), axis=1)
    column = lambda values: np.repeat(np.asarray(values), n)

    def of_kept(values: np.ndarray) -> np.ma.MaskedArray:
        full = np.zeros(proxy.shape, np.float32)
        np.put_along_axis(full, chosen, np.asarray(values, np.float32), axis=1)
        return np.ma.masked_array(full.reshape(-1), ~kept.reshape(-1))

    return {
        "prompt": column(prompts).tolist(),
        "prompt_uid": column(np.array([prompt_uid(p) for p in prompts], np.uint32)),
        "candidate": np.tile(np.arange(n, dtype=np.int32), count),
        "seed": seed_numbers(seeds).reshape(-1),
        "precision": explore.precision,
        "steps": explore.steps,
        "proxy_reward": proxy.reshape(-1).astype(np.float32),
        "rank": rank(proxy).reshape(-1).astype(np.int32),
        "kept": kept.reshape(-1),
        "regenerated_reward": of_kept(rewards) if rollout.regenerate else None,
        "advantage": of_kept(advantage),
        "policy_revision": iteration,
    }


class Clock:
    """Wall time by stage and what of it went into compiling, in seconds; a trace that is being written shows the stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._compiled, self._before = _compilations(), len(_compilations())
        self._stage, self._began, self._shown = "", 0.0, contextlib.ExitStack()

    def start(self, stage: str) -> None:
        """Ends the stage before, if there was one."""
        self.stop()
        self._shown.enter_context(jax.profiler.TraceAnnotation(stage))
        self._stage, self._began = stage, time.perf_counter()

    def stop(self) -> None:
        if self._stage:
            self.seconds[self._stage], self._stage = time.perf_counter() - self._began, ""
        self._shown.close()

    def report(self, pool: Samples, kept: Samples | None) -> dict[str, float]:
        rates = {"images_per_second/explore": len(pool.reward) / self.seconds["explore"]}
        if kept is not None:
            rates["images_per_second/regenerate"] = len(kept.reward) / self.seconds["regenerate"]
        total = {"seconds": sum(self.seconds.values()), "seconds/compile": sum(self._compiled[self._before :])}
        return {f"seconds/{stage}": s for stage, s in self.seconds.items()} | rates | total


@functools.cache
def _compilations() -> list[float]:
    """Seconds of every compilation since the first call, in order, or of reading it from jax's cache; jax adds to it."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
