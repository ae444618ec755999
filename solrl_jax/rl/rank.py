"""Measures how well exploration ranks candidates: explores and regenerates all candidates of some
prompts (docs/method.md, section 2).
"""

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
from solrl_jax.rl.combine import ranking_values
from solrl_jax.rl.experiment import Experiment, local_device, select_parameters
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.fidelity import mean_true_rank, overlap, rank_correlations, regret
from solrl_jax.rl.generate import PromptBatch, SeedBatch, generate
from solrl_jax.rl.iteration import Progress
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.storage.readers import is_number

# The number of truly best candidates that the paper's "top-4 match" looks for.
TOP = 4
# The columns of the table, and the digits after the decimal point of each.
COLUMNS = {
    "spearman": 3,
    "kendall": 3,
    "top_k_match": 3,
    "top_k_regret": 4,
    "bottom_k_match": 3,
    "true_rank_best": 1,
    "true_rank_worst": 1,
}


@dataclasses.dataclass(frozen=True)
class Pools:
    """The rewards of the same candidates, regenerated and explored in several ways.

    Attributes:
        prompts: The prompts.
        true: The rewards after regeneration, in the training precision with all steps: one row per
            prompt, one column per candidate. NaN where a candidate has none.
        proxies: The rewards after exploration, in the same shape, by setting.
    """

    prompts: Sequence[str]
    true: Float[np.ndarray, "p n"]
    proxies: Mapping[ExplorationSetting, Float[np.ndarray, "p n"]]


def sweep(
    config: Config,
    *,
    explore: str | None = None,
    formats: str | None = None,
    steps: str | None = None,
) -> list[ExplorationSetting]:
    """Lists every combination of recipes, formats and numbers of steps.

    Each list is given as text, separated by commas; None stands for the value of the run or of the
    recipe. Repeated entries count once.

    Args:
        config: The configuration of the run.
        explore: Names of files in `configs/explore/`. None: the exploration options of `config`.
        formats: Names of exploration formats, keys of `quant.formats.FORMATS`. "auto" stands for
            the best one of this device. None: that of each recipe.
        steps: Numbers of exploration steps, integers from 1 to 1000. None: that of each recipe.

    Returns:
        The settings: all of the first recipe first, in it all of the first format first, each in
        the order in which it is listed. Without `explore`, the recipe of a setting is "".

    Raises:
        InputError: If an entry is empty or not accepted.
        ConfigError: If a recipe does not exist or does not fit the run, or a run could not be
            configured with a number of steps, for example more than `rollout.num_steps`.
    """

    def format_name(text: str) -> str:
        return resolve_format(text, local_device()).name

    numbers = _parse_list("steps", steps, None, _step_count, "integers of at least 1")
    settings = []
    for recipe in _parse_list("explore", explore, "", str, "recipes"):
        chosen = override(config, (f"explore={recipe}",)) if recipe else config
        default = chosen.rollout.explore
        names = _parse_list(
            "formats",
            formats,
            format_name(default.precision),
            format_name,
            ", ".join((*FORMATS, AUTO)),
        )
        for number in filter(None, numbers):
            # Raises the error that a run with this number of steps would raise.
            override(chosen, (f"rollout.explore.num_steps={number}",))
        settings += [
            ExplorationSetting(name, number or default.num_steps, recipe)
            for name, number in itertools.product(names, numbers)
        ]
    return settings


def _parse_list(
    name: str, text: str | None, default: Any, parse: Callable[[str], Any], expected: str
) -> list[Any]:
    """Parses a list that is separated by commas, without its repetitions.

    Args:
        name: The name of the argument, for the message.
        text: The list. Blanks around entries are ignored. None stands for `default` alone.
        default: The only entry if there is no list. It is not parsed.
        parse: Parses an entry; raises ValueError or KeyError if it is not accepted.
        expected: What entries are accepted, for the message.

    Returns:
        The parsed entries in their order; of equal ones, the first.

    Raises:
        InputError: If an entry is empty or not accepted. One that `parse` raises passes unchanged.
    """
    if text is None:
        return [default]
    parts = [part.strip() for part in text.split(",")]
    try:
        if not all(parts):
            raise ValueError
        return list(dict.fromkeys(map(parse, parts)))
    except InputError:  # it says more
        raise
    except (ValueError, KeyError):
        raise InputError(f"{name}={text}: expected a comma-separated list of {expected}") from None


def _step_count(text: str) -> int:
    """Parses a number of steps.

    Args:
        text: ASCII digits, without a sign.

    Returns:
        The number.

    Raises:
        ValueError: If it is not an integer from 1 to 1000 (`MAX_STEPS`).
    """
    if not (is_number(text) and 1 <= int(text) <= MAX_STEPS):
        raise ValueError
    return int(text)


def explore_and_regenerate(
    experiment: Experiment,
    adapters: Trainable,
    prompts: int,
    settings: Sequence[ExplorationSetting],
    progress: Progress,
) -> Pools:
    """Computes the rewards of the candidates of some test prompts, regenerated and explored.

    All candidates are generated `1 + len(settings)` times. The exploration options of each recipe
    are measured once, when they are first needed. Regenerated candidates are scored by the run's
    reward, explored ones by `rollout.explore.reward` if the run has it.

    Args:
        experiment: The run. Each prompt has `rollout.candidates` candidates.
        adapters: The trainable parameters of the policy by path.
        prompts: The number of test prompts, counted from the first, at least 1. If there are fewer,
            all.
        settings: How candidates are explored. A setting that is listed twice is explored twice.
        progress: Called with the phase ("regenerate" or "explore"), the number of samples of one
            pass over all candidates, and the number of further samples that are done, as they are
            generated.

    Returns:
        The rewards, with one entry of `proxies` per distinct setting.

    Raises:
        ConfigError: If a recipe does not exist or does not fit the run.
        InputError: If the quantization rules of a recipe do not fit the network, or the prompts
            cannot be encoded.
        KeyError: If a setting names no format.
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop". It is a
            RunError.
        RunError: If the disk refuses the cache of prompts, or another process gives no answer.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
    """
    prompt_batch, seed_batch = draw_candidates(experiment, prompts)
    regeneration = experiment.sampler("regenerate", adapters, experiment.config.rollout.num_steps)
    true = pool_rewards(experiment, regeneration, prompt_batch, seed_batch, progress)
    # One explorer per recipe, so that it measures once what its options need.
    explorers = {
        recipe: with_recipe(experiment, recipe).explorer
        for recipe in dict.fromkeys(setting.recipe for setting in settings)
    }
    proxies = {}
    for setting in settings:
        sampler = explorers[setting.recipe].sampler(adapters, setting)
        proxies[setting] = pool_rewards(
            experiment,
            sampler,
            experiment.for_exploration(prompt_batch),
            seed_batch,
            progress,
            explored=True,
        )
    return Pools(experiment.test_prompts[:prompts], true, proxies)


def draw_candidates(experiment: Experiment, prompts: int) -> tuple[PromptBatch, SeedBatch]:
    """Encodes the first test prompts, and draws the seeds of their candidates.

    The seeds depend on `eval.seed`, not on the seed of the run, so two runs draw the same noise.

    Args:
        experiment: The run. Each prompt has `rollout.candidates` candidates.
        prompts: The number of test prompts, counted from the first, at least 1. If there are fewer,
            all.

    Returns:
        The encoded prompts, prepared for the run's reward, and the candidates, prompt by prompt.

    Raises:
        InputError: If the prompts cannot be encoded, see `Experiment.encode_prompts`.
        RunError: If the disk refuses the cache of prompts.
    """
    config = experiment.config
    chosen = experiment.test_prompts[:prompts]
    seeds = experiment.seeds("ranking", chosen, config.rollout.candidates, seed=config.eval.seed)
    prompt_batch = experiment.encode_prompts(chosen, experiment.reward)
    return prompt_batch, SeedBatch.from_seeds(seeds)


def pool_rewards(
    experiment: Experiment,
    sampler: Sampler,
    prompt_batch: PromptBatch,
    seed_batch: SeedBatch,
    progress: Progress,
    *,
    explored: bool = False,
) -> Float[np.ndarray, "p n"]:
    """Generates candidates and returns the values that order them.

    These are their rewards, or with `reward.combine=advantages` the weighted sums of the advantages
    of their scores over all candidates of a prompt.

    Args:
        experiment: The run.
        sampler: How the candidates are sampled.
        prompt_batch: The prompts, from `draw_candidates`, prepared for the reward.
        seed_batch: The candidates, from `draw_candidates`.
        progress: Called with the name of the sampler, the number of candidates, and the number of
            further candidates that are done: with 0 at the start, then once per chunk.
        explored: Whether the reward is the one that ranks explored candidates
            (`rollout.explore.reward`) instead of the one that is trained on.

    Returns:
        One row per prompt, one column per candidate. NaN where a candidate could not be scored.

    Raises:
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop".
    """
    config = experiment.config
    reward = experiment.ranking_reward if explored else experiment.reward
    weights = experiment.ranking_weights if explored else config.reward.weights
    total = len(seed_batch)
    progress(sampler.name, total, 0)
    samples = generate(
        experiment.backbone,
        sampler,
        prompt_batch,
        seed_batch,
        reward,
        progress=partial(progress, sampler.name, total),
    )
    prompts = total // config.rollout.candidates
    return ranking_values(config.reward.combine, samples.scores, weights, prompts)


def with_recipe(experiment: Experiment, recipe: str) -> Experiment:
    """Returns the same experiment with other exploration options.

    The recipe may also change which linear layers are quantized, if the model has other rules for
    it.

    Args:
        experiment: The run. It is not changed.
        recipe: The name of a file in `configs/explore/`. "" returns `experiment` itself.

    Returns:
        An experiment with the same networks and an explorer of its own.

    Raises:
        ConfigError: If there is no such recipe, or it does not fit the configuration.
        InputError: If its rules of quantization do not fit the network.
    """
    if not recipe:
        return experiment
    config = override(experiment.config, (f"explore={recipe}",))
    quantized = experiment.quantized
    if config.model.quantization != experiment.config.model.quantization:
        _, quantized = select_parameters(config, experiment.backbone.pipeline, experiment.device)
    return dataclasses.replace(experiment, config=config, quantized=quantized)


def summarise(pools: Pools, setting: ExplorationSetting, kept: int) -> dict[str, Any]:
    """Computes how well a setting ranks the candidates.

    Args:
        pools: The rewards of the candidates.
        setting: One of the settings of `pools`.
        kept: How many candidates of each prompt a run keeps, one half from each end. The half is
            rounded down, but is at least 1.

    Returns:
        The setting ("explore", which is the recipe, "precision", "steps"), the counts "candidates"
        (per prompt), "kept", "top_k" (4) and "prompts", and these means over prompts. "per_prompt"
        is a list with a dict for each prompt, of its text ("prompt") and the same figures:

        * "spearman", "kendall": The rank correlations of proxy and true rewards.
        * "top_k_match": The share of the truly best 4 candidates among the kept / 2 best by proxy.
          "bottom_k_match" is the same at the other end.
        * "top_k_regret": The reward that the missed ones cost, as a share of the range of the true
          rewards, see `fidelity.regret`.
        * "true_rank_best", "true_rank_worst": The mean true rank of the kept / 2 best and worst by
          proxy; rank 1 is the best. "perfect_rank_best" and "perfect_rank_worst", which are not in
          "per_prompt", are those of a perfect proxy.

        A figure that is not defined for a prompt is NaN there and left out of the mean, which is
        NaN if it is defined for none.

    Raises:
        KeyError: If `pools` does not have the setting.
    """
    true = pools.true
    proxy = pools.proxies[setting]
    candidates = true.shape[1]
    half = max(kept // 2, 1)
    spearman, kendall = zip(*rank_correlations(proxy, true).per_prompt, strict=True)
    columns: dict[str, Any] = {
        "spearman": spearman,
        "kendall": kendall,
        "top_k_match": overlap(proxy, true, TOP, half),
        "bottom_k_match": overlap(proxy, true, TOP, half, best=False),
        "top_k_regret": regret(proxy, true, TOP, half),
        "true_rank_best": mean_true_rank(proxy, true, half),
        "true_rank_worst": mean_true_rank(proxy, true, half, best=False),
    }
    means = {}
    for name, values in columns.items():
        defined = [value for value in values if not np.isnan(value)]
        means[name] = float(np.mean(defined)) if defined else np.nan
    per_prompt = [
        {"prompt": prompt, **{name: float(columns[name][i]) for name in columns}}
        for i, prompt in enumerate(pools.prompts)
    ]
    return {
        "explore": setting.recipe,
        "precision": setting.precision,
        "steps": setting.steps,
        "candidates": candidates,
        "kept": kept,
        "top_k": TOP,
        "prompts": len(pools.prompts),
        **means,
        "perfect_rank_best": (half + 1) / 2,
        "perfect_rank_worst": candidates - (half - 1) / 2,
        "per_prompt": per_prompt,
    }


def table(results: Sequence[dict[str, Any]], settings: Sequence[ExplorationSetting]) -> str:
    """Formats results for a terminal: a header, one line per setting, and a line with the true
    ranks of a perfect proxy.

    If there is a single setting, one line per prompt comes before it. Names and prompts are cut
    after 46 characters.

    Args:
        results: The results of `summarise`, at least one.
        settings: The settings of these results, in the same order.

    Returns:
        The lines, joined by line feeds.

    Raises:
        ValueError: If the two differ in length.
    """

    def line(name: str, result: dict[str, Any]) -> str:
        values = "".join(f"{result[column]:>19.{digits}f}" for column, digits in COLUMNS.items())
        return f"{name[:46]:<48}{values}"

    lines = [f"{'':<48}" + "".join(f"{name:>19}" for name in COLUMNS)]
    if len(results) == 1:
        lines += [line(row["prompt"], row) for row in results[0]["per_prompt"]]
    lines += [line(setting.name, result) for setting, result in zip(settings, results, strict=True)]
    first = results[0]
    lines.append(
        f"{first['kept']} of {first['candidates']} kept; true ranks of a perfect proxy: "
        f"{first['perfect_rank_best']:g}, {first['perfect_rank_worst']:g}"
    )
    return "\n".join(lines)
