"""`solrl rank`: whole pools explored and regenerated, and how well the proxy ranks (spec, section 2)."""

import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from jaxtyping import Float

from solrl_jax.backbone.backbone import Params
from solrl_jax.config.presets import override
from solrl_jax.config.schema import PreviewSigmas, Rollout
from solrl_jax.numerics.formats import AUTO, FORMATS, resolve
from solrl_jax.policy.lora import Adapters
from solrl_jax.rollout.fidelity import overlap, rank_correlations, regret
from solrl_jax.rollout.generate import Grid, Relay, prepare
from solrl_jax.run import pictures
from solrl_jax.storage import files
from solrl_jax.storage.errors import InputError
from solrl_jax.training.evaluate import EVALUATION
from solrl_jax.training.experiment import Experiment, device_facts
from solrl_jax.training.iteration import roll_out

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """How candidates are explored."""

    precision: str
    steps: int
    exact_steps: int  # as `rollout.explore.exact_steps`; 0 in a format that quantises nothing
    sigmas: str  # as `rollout.explore.sigmas`
    candidates: int

    @property
    def proxy(self) -> tuple[str, int, int, str]:
        """What its pool was explored as: a smaller pool is the beginning of a larger one."""
        return self.precision, self.steps, self.exact_steps, self.sigmas


@dataclasses.dataclass(frozen=True)
class Pools:
    """Rewards of the same candidates: regenerated in the training precision at full steps, and explored in several ways."""

    prompts: Sequence[str]
    true: Float[np.ndarray, "p n"]
    proxies: Mapping[tuple[str, int, int, str], Float[np.ndarray, "p n"]]  # by `Setting.proxy`


def settings(
    rollout: Rollout, formats: str | None, steps: str | None, exact_steps: str | None, sigmas: str | None,
    candidates: str | None,
) -> list[Setting]:  # fmt: skip
    """Every combination of the lists "a,b,..." that the command line gives, the run's own where it gives none.

    Raises InputError in one line for an entry that cannot be.
    """

    def parsed(option: str, text: str | None, own: Any, parse: Callable[[str], Any], expected: str) -> list[Any]:
        if text is None:
            return [own]
        try:
            return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        except (ValueError, KeyError):
            raise InputError(f"{option} {text}: expected a comma-separated list of {expected}") from None

    def at_least(least: int, text: str) -> int:
        if (number := int(text)) < least:
            raise ValueError
        return number

    device = device_facts()
    name = lambda text: resolve(text, device).name
    chosen = parsed("--formats", formats, name(rollout.explore.precision), name, ", ".join((*FORMATS, AUTO)))
    count, natural = partial(at_least, 1), partial(at_least, 0)
    numbers = parsed("--steps", steps, rollout.explore.steps, count, "integers of at least 1")
    exact = parsed("--exact-steps", exact_steps, rollout.explore.exact_steps, natural, "integers of at least 0")
    if max(exact) >= (least := min(*numbers, rollout.explore.steps)):
        raise InputError(f"--exact-steps {max(exact)}: must be less than the steps explored with, {least}")
    ways = get_args(PreviewSigmas)
    grids = parsed("--sigmas", sigmas, rollout.explore.sigmas, lambda text: ways[ways.index(text)], ", ".join(ways))
    pools = parsed("--candidates", candidates, rollout.candidates, count, "integers of at least 1")
    every = [Setting(*values) for values in itertools.product(chosen, numbers, exact, grids, pools)]
    plain = lambda s: dataclasses.replace(s, exact_steps=0) if FORMATS[s.precision].quantize is None else s
    return list(dict.fromkeys(map(plain, every)))


def explore_and_regenerate(
    experiment: Experiment, adapters: Adapters, prompts: int, settings: Sequence[Setting], progress: Progress
) -> Pools:
    """Both rewards of the first `prompts` test prompts' candidates, as many as the largest of `settings` has."""
    config, rollout = experiment.config, experiment.config.rollout
    chosen = experiment.test_prompts[:prompts]
    seeds = experiment.seeds(config.eval.seed, EVALUATION - 1, chosen, max(s.candidates for s in settings))
    prompted = prepare(experiment.backbone, experiment.reward, chosen, config.model.max_tokens)

    def rewards(params: Params | Relay, grid: Grid, stage: str) -> Float[np.ndarray, "p n"]:
        return roll_out(experiment, params, grid, prompted, seeds, stage, progress).reward.reshape(seeds.shape[:2])

    true = rewards(experiment.policy(adapters), experiment.grid(rollout.steps), "regenerate")
    proxies = {}
    for exact, precision in dict.fromkeys((s.exact_steps, s.precision) for s in settings):
        there = with_exact_steps(experiment, exact)
        exploring = there.explorer(adapters, precision)
        for s in settings:
            if (s.exact_steps, s.precision) == (exact, precision) and s.proxy not in proxies:
                proxies[s.proxy] = rewards(exploring, experiment.exploring_grid(s.steps, s.sigmas), "explore")
    return Pools(chosen, true, proxies)


def with_exact_steps(experiment: Experiment, exact_steps: int) -> Experiment:
    """The same experiment, exploring with so many exact steps; what it explores with is measured anew where that differs."""
    config = override(experiment.config, (f"rollout.explore.exact_steps={exact_steps}",))
    return experiment if config == experiment.config else dataclasses.replace(experiment, config=config)


def rounds(settings: Sequence[Setting]) -> int:
    """How often `explore_and_regenerate` goes through all candidates."""
    return 1 + len({s.proxy for s in settings})


def summarise(pools: Pools, setting: Setting, kept: int, top: int = 4) -> dict[str, Any]:
    """Means over prompts, and a row a prompt.

    top_k_match: share of the `top` truly best that are among the proxy's kept / 2 best; bottom_k_match likewise at the other
    end; top_k_regret: what those that are missed cost (`fidelity.regret`). largest_difference: Delta, the largest of true and
    proxy reward. range_kept: true range of the proxy's extremes over the true range of the pool; range_bound: what it is at
    least, 1 - 4 Delta / range (spec, section 2).
    """
    true, proxies = pools.true[:, : setting.candidates], pools.proxies[setting.proxy]
    proxies, kept = proxies[:, : setting.candidates], min(kept, setting.candidates)
    ends = max(kept // 2, 1)
    correlations = rank_correlations(proxies, true)
    best = overlap(proxies, true, top, ends)
    worst = overlap(proxies, true, top, ends, best=False)
    lost = regret(proxies, true, top, ends)
    rows = []
    for i, prompt in enumerate(pools.prompts):
        finite = np.isfinite(proxies[i]) & np.isfinite(true[i])
        x, y = proxies[i][finite], true[i][finite]
        order = np.argsort(-x, kind="stable")
        spread, delta = (float(np.ptp(y)), float(np.abs(x - y).max())) if len(y) else (np.nan, np.nan)
        share = lambda part, spread=spread: float(part) / spread if spread > 0 else 1.0
        rows.append(
            {
                "prompt": prompt,
                "spearman": correlations.per_prompt[i][0],
                "kendall": correlations.per_prompt[i][1],
                "top_k_match": float(best[i]),
                "bottom_k_match": float(worst[i]),
                "top_k_regret": float(lost[i]),
                "largest_difference": delta,
                "true_range": spread,
                "range_kept": share(np.ptp(y[np.concatenate([order[:ends], order[-ends:]])])) if len(y) else np.nan,
                "range_bound": max(0.0, share(spread - 4 * delta)),
            }
        )
    with np.errstate(all="ignore"):
        means = {name: float(np.nanmean([row[name] for row in rows])) for name in rows[0] if name != "prompt"}
    means["largest_difference"] = float(np.nanmax([row["largest_difference"] for row in rows]))
    return dataclasses.asdict(setting) | {"kept": kept, "top_k": top, "prompts": len(rows), **means, "per_prompt": rows}


def write(folder: Path, results: Sequence[dict[str, Any]], pools: Pools) -> None:
    """`rank.json`, `rank.csv` with a row a setting, a scatter plot of the first setting, and curves if there are several."""
    files.atomic_write(folder / "rank.json", json.dumps(results, indent=2) + "\n")
    buffer = io.StringIO()
    rows = without_prompts(results)
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    files.atomic_write(folder / "rank.csv", buffer.getvalue())
    first = Setting(*(results[0][field.name] for field in dataclasses.fields(Setting)))
    proxy, true = pools.proxies[first.proxy], pools.true
    pictures.save_correlation(folder / "rank.png", proxy[:, : first.candidates], true[:, : first.candidates])
    if len(results) > 1:
        pictures.save_sweep(folder / "rank-sweep.png", rows, ("spearman", "kendall", "top_k_match"))


def without_prompts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "per_prompt"} for row in results]


def how(row: Mapping[str, Any]) -> str:
    """How a row of results explored, in a few words."""
    exact = f"{row['exact_steps']} exact, " if row["exact_steps"] else ""
    return f"{row['precision']}, {row['steps']} steps ({exact}{row['sigmas']} sigmas)"


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results for a terminal: a row a setting; of a single setting, a row a prompt before."""
    ends = ("top_k_match", "top_k_regret", "bottom_k_match")
    columns = ("spearman", "kendall", *ends, "largest_difference", "range_kept", "range_bound")
    line = lambda name, row: f"{name[:54]:<56}" + "".join(f"{row[c]:>20.{4 if c.endswith('regret') else 3}f}" for c in columns)
    lines = [f"{'':<56}" + "".join(f"{name:>20}" for name in columns)]
    if len(results) == 1:
        lines += [line(row["prompt"], row) for row in results[0]["per_prompt"]]
    lines += [line(f"{how(r)}, {r['kept']} of {r['candidates']} kept", r) for r in results]
    return "\n".join(lines)
