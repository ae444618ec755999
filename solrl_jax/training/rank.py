"""How well exploration ranks candidates: whole pools, explored and regenerated in full (docs/method.md, section 2)."""

import csv
import dataclasses
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.config.presets import override
from solrl_jax.config.schema import Config
from solrl_jax.explore.monitor import Level
from solrl_jax.numerics.formats import AUTO, FORMATS, resolve
from solrl_jax.policy.lora import Adapters
from solrl_jax.rollout.fidelity import mean_true_rank, overlap, rank_correlations, regret
from solrl_jax.rollout.stage import Stage
from solrl_jax.storage.errors import InputError
from solrl_jax.training.experiment import Experiment, device_facts
from solrl_jax.training.iteration import Progress, roll_out

TOP = 4  # of the paper's "top-4 match"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to explore."""

    explore: str  # a recipe of `configs/explore/`, or "" for the run's own
    precision: str
    steps: int
    candidates: int

    @property
    def proxy(self) -> tuple[str, str, int]:
        """What a pool is explored with. A smaller pool is the beginning of a larger one."""
        return self.explore, self.precision, self.steps

    @property
    def name(self) -> str:
        """The setting in a few words."""
        recipe = f"{self.explore}: " if self.explore else ""
        return f"{recipe}{self.precision}, {self.steps} steps"


@dataclasses.dataclass(frozen=True)
class Pools:
    """Rewards of the same candidates: regenerated in the training precision at full steps, and explored in several ways."""

    prompts: Sequence[str]
    true: Float[np.ndarray, "p n"]
    proxies: Mapping[tuple[str, str, int], Float[np.ndarray, "p n"]]  # by `Setting.proxy`


def sweep(
    config: Config,
    *,
    explore: str | None = None,
    formats: str | None = None,
    steps: str | None = None,
    candidates: str | None = None,
) -> list[Setting]:
    """Every combination of the lists "a,b,..." that a command line gives; None: the run's own value.

    Raises InputError or ConfigError in one line for an entry that cannot be.
    """
    whole = "integers of at least 1"
    format_name = lambda text: resolve(text, device_facts()).name
    recipes = _listed("--explore", explore, "", str, "recipes")
    numbers = _listed("--steps", steps, None, _count, whole)
    pools = _listed("--candidates", candidates, config.rollout.candidates, _count, whole)
    found = []
    for recipe in recipes:
        configured = override(config, (f"explore={recipe}",)) if recipe else config
        own = configured.rollout.explore
        accepted = _listed("--formats", formats, format_name(own.precision), format_name, ", ".join((*FORMATS, AUTO)))
        for form, number, pool in itertools.product(accepted, numbers, pools):
            found.append(Setting(recipe, form, number or own.steps, pool))
    return list(dict.fromkeys(found))


def _listed(option: str, text: str | None, own: Any, parse: Callable[[str], Any], expected: str) -> list[Any]:
    if text is None:
        return [own]
    try:
        return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
    except InputError:  # it says more
        raise
    except (ValueError, KeyError):
        raise InputError(f"{option} {text}: expected a comma-separated list of {expected}") from None


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def explore_and_regenerate(
    experiment: Experiment, adapters: Adapters, prompts: int, settings: Sequence[Setting], progress: Progress
) -> Pools:
    """Both rewards of the first `prompts` test prompts' candidates, as many as the largest of `settings` has."""
    config, chosen = experiment.config, experiment.test_prompts[:prompts]
    seeds = experiment.seeds("ranking", chosen, max(s.candidates for s in settings), seed=config.eval.seed)
    prompted = experiment.prompted(chosen, experiment.reward)

    def rewards(stage: Stage) -> Float[np.ndarray, "p n"]:
        return roll_out(experiment, stage, prompted, seeds, progress).reward.reshape(seeds.shape[:2])

    true = rewards(experiment.stage("regenerate", adapters, config.rollout.steps))
    proxies: dict[tuple[str, str, int], Any] = {}
    for name in dict.fromkeys(s.explore for s in settings):
        recipe = with_recipe(experiment, name).recipe
        for setting in settings:
            if setting.explore == name and setting.proxy not in proxies:
                proxies[setting.proxy] = rewards(recipe.stage(adapters, Level(setting.precision, setting.steps)))
    return Pools(chosen, true, proxies)


def with_recipe(experiment: Experiment, name: str) -> Experiment:
    """The same experiment exploring by another recipe of `configs/explore/`; "" is its own."""
    if not name:
        return experiment
    return dataclasses.replace(experiment, config=override(experiment.config, (f"explore={name}",)))


def rounds(settings: Sequence[Setting]) -> int:
    """How often `explore_and_regenerate` goes through all candidates."""
    return 1 + len({s.proxy for s in settings})


def summarise(pools: Pools, setting: Setting, kept: int) -> dict[str, Any]:
    """Means over prompts, and a row a prompt.

    spearman, kendall: rank correlations of proxy and true rewards. top_k_match: share of the truly best `TOP` that are among
    the proxy's kept / 2 best; bottom_k_match: the same at the other end. top_k_regret: what the missed ones cost
    (`fidelity.regret`). true_rank_best, true_rank_worst: mean true rank of the proxy's kept / 2 best and worst; rank 1 is the
    best. perfect_rank_best, perfect_rank_worst: the same for a proxy without error. largest_difference: Delta, the largest
    difference of true and proxy reward. range_kept: true range of the proxy's extremes over the true range of the pool;
    range_bound: its lower bound 1 - 4 Delta / range.
    """
    true, proxy = pools.true[:, : setting.candidates], pools.proxies[setting.proxy][:, : setting.candidates]
    kept = min(kept, setting.candidates)
    ends = max(kept // 2, 1)
    correlations = rank_correlations(proxy, true)
    columns: dict[str, Any] = {
        "spearman": [spearman for spearman, _ in correlations.per_prompt],
        "kendall": [kendall for _, kendall in correlations.per_prompt],
        "top_k_match": overlap(proxy, true, TOP, ends),
        "bottom_k_match": overlap(proxy, true, TOP, ends, best=False),
        "top_k_regret": regret(proxy, true, TOP, ends),
        "true_rank_best": mean_true_rank(proxy, true, ends),
        "true_rank_worst": mean_true_rank(proxy, true, ends, best=False),
    }
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(pools.prompts):
        row = {name: float(values[i]) for name, values in columns.items()}
        rows.append({"prompt": prompt, **row, **_ranges(proxy[i], true[i], ends)})
    known = {name: [row[name] for row in rows if not np.isnan(row[name])] for name in rows[0] if name != "prompt"}
    means = {name: float(np.mean(values)) if values else np.nan for name, values in known.items()}
    means["largest_difference"] = max(known["largest_difference"], default=np.nan)
    perfect = {"perfect_rank_best": (ends + 1) / 2, "perfect_rank_worst": setting.candidates - (ends - 1) / 2}
    facts = {"kept": kept, "top_k": TOP, "prompts": len(rows)}
    return dataclasses.asdict(setting) | facts | means | perfect | {"per_prompt": rows}


def _ranges(proxy: Float[np.ndarray, " n"], true: Float[np.ndarray, " n"], ends: int) -> dict[str, float]:
    """Of one prompt: Delta, the true range, and which part of it the proxy's extremes span."""
    finite = np.isfinite(proxy) & np.isfinite(true)
    x, y = proxy[finite], true[finite]
    if not len(y):
        return dict.fromkeys(("largest_difference", "true_range", "range_kept", "range_bound"), np.nan)
    order = np.argsort(-x, kind="stable")
    spread, delta = float(np.ptp(y)), float(np.abs(x - y).max())
    share = lambda part: float(part) / spread if spread > 0 else 1.0
    return {
        "largest_difference": delta,
        "true_range": spread,
        "range_kept": share(np.ptp(y[np.concatenate([order[:ends], order[-ends:]])])),
        "range_bound": max(0.0, share(spread - 4 * delta)),
    }


def to_csv(results: Sequence[dict[str, Any]]) -> str:
    """A row a setting."""
    buffer, rows = io.StringIO(), without_prompts(results)
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def without_prompts(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results without their rows a prompt."""
    return [{name: value for name, value in row.items() if name != "per_prompt"} for row in results]


def table(results: Sequence[dict[str, Any]], settings: Sequence[Setting]) -> str:
    """The results for a terminal: a row a setting; for a single setting, a row a prompt before it."""
    columns = (
        "spearman", "kendall", "top_k_match", "top_k_regret", "bottom_k_match", "true_rank_best", "true_rank_worst",
        "largest_difference", "range_kept", "range_bound",
    )  # fmt: skip
    digits = lambda name: 1 if name.startswith("true_rank") else 4 if name.endswith("regret") else 3
    line = lambda name, row: f"{name[:46]:<48}" + "".join(f"{row[c]:>19.{digits(c)}f}" for c in columns)
    lines = [f"{'':<48}" + "".join(f"{name:>19}" for name in columns)]
    if len(results) == 1:
        lines += [line(row["prompt"], row) for row in results[0]["per_prompt"]]
    for result, setting in zip(results, settings, strict=True):
        lines.append(line(f"{setting.name}, {result['kept']} of {result['candidates']} kept", result))
        perfect = ", ".join(f"{result[name]:g}" for name in ("perfect_rank_best", "perfect_rank_worst"))
    return "\n".join([*lines, f"true ranks of a perfect proxy: {perfect}"])
