"""How well exploration ranks candidates: whole pools, explored and regenerated in full (docs/method.md, section 2)."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from solrl_jax.config.presets import override
from solrl_jax.config.schema import Config
from solrl_jax.config.values import MAX_STEPS
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import AUTO, FORMATS, resolve_format
from solrl_jax.rl.experiment import Experiment, local_device, select_parameters
from solrl_jax.rl.explore.monitor import ExplorationSetting
from solrl_jax.rl.fidelity import mean_true_rank, overlap, rank_correlations, regret
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.iteration import Progress
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.storage.readers import is_number

TOP = 4  # of the paper's "top-4 match"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to explore."""

    explore: str  # a recipe of `configs/explore/`, or "" for the run's own
    precision: str
    steps: int

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
    proxies: Mapping[Setting, Float[np.ndarray, "p n"]]


def sweep(
    config: Config,
    *,
    explore: str | None = None,
    formats: str | None = None,
    steps: str | None = None,
) -> list[Setting]:
    """Every combination of the lists "a,b,..." that a command line gives; None: the run's own value.

    Raises InputError or ConfigError in one line for an entry that cannot be.
    """

    def format_name(text):
        return resolve_format(text, local_device()).name

    numbers = _listed("--steps", steps, None, _count, "integers of at least 1")
    found = []
    for recipe in _listed("--explore", explore, "", str, "recipes"):
        chosen = override(config, (f"explore={recipe}",)) if recipe else config
        own = chosen.rollout.explore
        accepted = _listed(
            "--formats",
            formats,
            format_name(own.precision),
            format_name,
            ", ".join((*FORMATS, AUTO)),
        )
        for number in filter(None, numbers):
            override(
                chosen, (f"rollout.explore.num_steps={number}",)
            )  # raises what a run would be told
        found += [
            Setting(recipe, form, number or own.num_steps)
            for form, number in itertools.product(accepted, numbers)
        ]
    return found


def _listed(
    option: str, text: str | None, own: Any, parse: Callable[[str], Any], expected: str
) -> list[Any]:
    if text is None:
        return [own]
    parts = [part.strip() for part in text.split(",")]
    try:
        if not all(parts):
            raise ValueError
        return list(dict.fromkeys(map(parse, parts)))
    except InputError:  # it says more
        raise
    except (ValueError, KeyError):
        raise InputError(
            f"{option} {text}: expected a comma-separated list of {expected}"
        ) from None


def _count(text: str) -> int:
    if not (is_number(text) and 1 <= (number := int(text)) <= MAX_STEPS):
        raise ValueError
    return number


def explore_and_regenerate(
    experiment: Experiment,
    adapters: Trainable,
    prompts: int,
    settings: Sequence[Setting],
    progress: Progress,
) -> Pools:
    """Both rewards of the candidates of the first `prompts` test prompts: 1 + `len(settings)` passes over all of them."""
    config = experiment.config
    chosen = experiment.test_prompts[:prompts]
    seeds = experiment.seeds("ranking", chosen, config.rollout.candidates, seed=config.eval.seed)
    prompted = experiment.encode_prompts(chosen, experiment.reward)
    seed_batch = SeedBatch.from_seeds(seeds)

    def rewards(stage: Sampler) -> Float[np.ndarray, "p n"]:
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
    explorers = {
        name: with_recipe(experiment, name).explorer
        for name in dict.fromkeys(s.explore for s in settings)
    }

    def stage(s):
        return explorers[s.explore].sampler(adapters, ExplorationSetting(s.precision, s.steps))

    return Pools(chosen, true, {setting: rewards(stage(setting)) for setting in settings})


def with_recipe(experiment: Experiment, name: str) -> Experiment:
    """The same experiment exploring by another recipe of `configs/explore/`; "" is its own."""
    if not name:
        return experiment
    config = override(experiment.config, (f"explore={name}",))
    quantized = experiment.quantized
    if config.model.quantization != experiment.config.model.quantization:
        _, quantized = select_parameters(config, experiment.backbone.pipeline, experiment.device)
    return dataclasses.replace(experiment, config=config, quantized=quantized)


def summarise(pools: Pools, setting: Setting, kept: int) -> dict[str, Any]:
    """Means over prompts, and a row a prompt.

    spearman, kendall: rank correlations of proxy and true rewards. top_k_match: share of the truly best `TOP` that are among
    the proxy's kept / 2 best; bottom_k_match: the same at the other end. top_k_regret: what the missed ones cost
    (`fidelity.regret`). true_rank_best, true_rank_worst: mean true rank of the proxy's kept / 2 best and worst; rank 1 is the
    best. perfect_rank_best, perfect_rank_worst: the same for a proxy without error.
    """
    true = pools.true
    proxy = pools.proxies[setting]
    candidates = true.shape[1]
    ends = max(kept // 2, 1)
    spearman, kendall = zip(*rank_correlations(proxy, true).per_prompt, strict=True)
    columns: dict[str, Any] = {
        "spearman": spearman,
        "kendall": kendall,
        "top_k_match": overlap(proxy, true, TOP, ends),
        "bottom_k_match": overlap(proxy, true, TOP, ends, best=False),
        "top_k_regret": regret(proxy, true, TOP, ends),
        "true_rank_best": mean_true_rank(proxy, true, ends),
        "true_rank_worst": mean_true_rank(proxy, true, ends, best=False),
    }
    known = {
        name: [value for value in values if not np.isnan(value)] for name, values in columns.items()
    }
    means = {name: float(np.mean(values)) if values else np.nan for name, values in known.items()}
    perfect = {
        "perfect_rank_best": (ends + 1) / 2,
        "perfect_rank_worst": candidates - (ends - 1) / 2,
    }
    facts = {"candidates": candidates, "kept": kept, "top_k": TOP, "prompts": len(pools.prompts)}
    rows = [
        {"prompt": p, **{name: float(columns[name][i]) for name in columns}}
        for i, p in enumerate(pools.prompts)
    ]
    return dataclasses.asdict(setting) | facts | means | perfect | {"per_prompt": rows}


def table(results: Sequence[dict[str, Any]], settings: Sequence[Setting]) -> str:
    """The results for a terminal: a row a setting; for a single setting, a row a prompt before it."""
    columns = (
        "spearman", "kendall", "top_k_match", "top_k_regret", "bottom_k_match", "true_rank_best", "true_rank_worst",
    )  # fmt: skip

    def digits(name):
        return 1 if name.startswith("true_rank") else 4 if name.endswith("regret") else 3

    def line(name, row):
        return f"{name[:46]:<48}" + "".join(f"{row[c]:>19.{digits(c)}f}" for c in columns)

    lines = [f"{'':<48}" + "".join(f"{name:>19}" for name in columns)]
    if len(results) == 1:
        lines += [line(row["prompt"], row) for row in results[0]["per_prompt"]]
    lines += [line(setting.name, result) for setting, result in zip(settings, results, strict=True)]
    perfect = ", ".join(
        f"{results[0][name]:g}" for name in ("perfect_rank_best", "perfect_rank_worst")
    )
    kept = "{kept} of {candidates} kept".format(**results[0])
    return "\n".join([*lines, f"{kept}; true ranks of a perfect proxy: {perfect}"])
