"""`solrl rank`: whole pools explored and regenerated, and how well the proxy ranks (spec, section 2)."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax import files, pictures
from solrl_jax.evaluate import EVALUATION
from solrl_jax.experiment import Experiment
from solrl_jax.fidelity import overlap, rank_correlations
from solrl_jax.policy.lora import Adapters
from solrl_jax.rollout.generate import prepare
from solrl_jax.train import roll_out

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Pools:
    """Rewards of the same candidates: explored, and regenerated in the training precision at full steps."""

    prompts: Sequence[str]
    proxy: Float[np.ndarray, "p n"]
    true: Float[np.ndarray, "p n"]


def explore_and_regenerate(experiment: Experiment, adapters: Adapters, prompts: int, progress: Progress) -> Pools:
    """Both rewards of N candidates of each of the first `prompts` test prompts."""
    config, rollout = experiment.config, experiment.config.rollout
    chosen = experiment.test_prompts[:prompts]
    seeds = experiment.seeds(config.eval.seed, EVALUATION - 1, chosen, rollout.candidates)
    prompted = prepare(experiment.backbone, experiment.reward, chosen, config.model.max_tokens)
    exploring = experiment.exploring_policy(adapters, rollout.explore.precision)
    pool = roll_out(experiment, exploring, rollout.explore.steps, prompted, seeds, "explore", progress)
    full = roll_out(experiment, experiment.policy(adapters), rollout.steps, prompted, seeds, "regenerate", progress)
    shape = (len(chosen), rollout.candidates)
    return Pools(chosen, pool.reward.reshape(shape), full.reward.reshape(shape))


def summarise(pools: Pools, kept: int, top: int = 4) -> dict[str, Any]:
    """Means over prompts, and a row a prompt.

    top_k_match: share of the `top` truly best that are among the proxy's kept / 2 best; bottom_k_match likewise at the other
    end. range_kept: true range of the proxy's extremes over the true range of the pool; at least 1 - 4 Delta / range.
    """
    ends = max(kept // 2, 1)
    correlations = rank_correlations(pools.proxy, pools.true)
    best = overlap(pools.proxy, pools.true, top, ends)
    worst = overlap(pools.proxy, pools.true, top, ends, best=False)
    rows = []
    for i, prompt in enumerate(pools.prompts):
        finite = np.isfinite(pools.proxy[i]) & np.isfinite(pools.true[i])
        proxy, true = pools.proxy[i][finite], pools.true[i][finite]
        order = np.argsort(-proxy, kind="stable")
        extremes = true[np.concatenate([order[:ends], order[-ends:]])] if len(true) else true
        spread = float(np.ptp(true)) if len(true) else float("nan")
        rows.append(
            {
                "prompt": prompt,
                "spearman": correlations.per_prompt[i][0],
                "kendall": correlations.per_prompt[i][1],
                "top_k_match": float(best[i]),
                "bottom_k_match": float(worst[i]),
                "largest_difference": float(np.abs(proxy - true).max()) if len(true) else float("nan"),
                "true_range": spread,
                "range_kept": float(np.ptp(extremes)) / spread if spread > 0 else 1.0,
            }
        )
    names = [name for name in rows[0] if name != "prompt"]
    with np.errstate(all="ignore"):
        means = {name: float(np.nanmean([row[name] for row in rows])) for name in names}
    means["largest_difference"] = float(np.nanmax([row["largest_difference"] for row in rows]))
    return {"prompts": len(rows), "candidates": pools.proxy.shape[1], "top_k": top, "kept": kept, **means, "per_prompt": rows}


def write(folder: Path, result: dict[str, Any], pools: Pools) -> None:
    """`rank.json` and a scatter plot."""
    files.atomic_write(folder / "rank.json", json.dumps(result, indent=2) + "\n")
    pictures.save_correlation(folder / "rank.png", pools.proxy, pools.true)


def table(result: dict[str, Any]) -> str:
    """The result for a terminal."""
    columns = ("spearman", "kendall", "top_k_match", "bottom_k_match", "largest_difference", "range_kept")
    head = f"{'prompt':<58}" + "".join(f"{name:>20}" for name in columns)
    line = lambda name, row: f"{name[:56]:<58}" + "".join(f"{row[c]:>20.3f}" for c in columns)
    return "\n".join([head, *(line(row["prompt"], row) for row in result["per_prompt"]), line("all prompts", result)])
