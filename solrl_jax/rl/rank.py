"""Measures how well exploration ranks candidates: explores and regenerates all candidates of some
prompts (docs/method.md, section 2).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
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
from solrl_jax.rl.experiment import Experiment, first_device_info, select_parameters
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.fidelity import mean_true_rank, overlap, rank_correlations, regret
from solrl_jax.rl.generate import PromptBatch, SeedBatch, generate
from solrl_jax.rl.iteration import Progress
from solrl_jax.rl.means import finite_mean
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.trainable.trainable import Trainable

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

    With `reward.combine=advantages`, rewards are replaced by the weighted sums of the scores of a
    candidate, each standardized within its prompt.

    Attributes:
        prompts: The text of each prompt, one for each row of the arrays.
        true: The rewards after regeneration, in the training precision with all steps: one row per
            prompt, one column per candidate. NaN if a candidate could not be scored.
        proxies: The rewards of the same candidates after exploration, by exploration setting
            (format, number of steps, set of options), each in the shape of `true`. NaN if the
            explored candidate could not be scored. They come from `rollout.explore.reward` if the
            run has it.
    """

    prompts: Sequence[str]
    true: Float[np.ndarray, "p n"]
    proxies: Mapping[ExplorationSetting, Float[np.ndarray, "p n"]]


def sweep(
    config: Config,
    *,
    explore: Iterable[str] = (),
    formats: Iterable[str] = (),
    steps: Iterable[int] = (),
) -> list[ExplorationSetting]:
    """Lists every combination of exploration options, formats and numbers of steps.

    Equal settings, such as those of "auto" and of the format that it stands for, are listed once.
    Nothing is explored, but JAX's backend is started, since the device decides which format "auto"
    stands for.

    Args:
        config: The configuration of the run. Its `rollout.explore` has the default exploration
            options, format and number of steps. It is not changed.
        explore: Names of sets of exploration options, files in `configs/explore/`, e.g. "paper" and
            "best". Empty: the exploration options of `config` alone.
        formats: Names of exploration formats, keys of `quant.formats.FORMATS`, e.g. "nvfp4", or
            "auto" for the fastest one on this device. Empty: the format of each set of options, or
            that of `config` without sets. A format that quantizes nothing is replaced by
            `rollout.precision`, such as "bf16", the precision in which it runs.
        steps: Numbers of exploration steps, from 1 to 1000. Empty: the number of each set of
            options, or that of `config` without sets.

    Returns:
        The settings, in nested order: by set of options, then by format, then by number of steps,
        each in the order of its argument. Without `explore`, the `option_set` of a setting is "".

    Raises:
        InputError: If the name of a set is empty, a format is unknown, or a number of steps is not
            an integer from 1 to 1000.
        ConfigError: If a set of options does not exist, or the configuration is not valid with one
            or with a number of steps, for example more than `rollout.num_steps`.
    """
    explore = list(explore)
    formats = list(formats)
    steps = list(steps)
    device = first_device_info()
    if "" in explore:
        raise InputError("explore='': expected the name of a set of exploration options")
    for name in formats:
        if name not in (*FORMATS, AUTO):
            raise InputError(f"formats={name}: expected one of {', '.join((*FORMATS, AUTO))}")
    for number in steps:
        if number not in range(1, MAX_STEPS + 1):
            raise InputError(f"steps={number}: expected an integer from 1 to {MAX_STEPS}")
    settings = []
    for option_set in dict.fromkeys(explore) or [""]:
        chosen = override(config, (f"explore={option_set}",)) if option_set else config
        default = chosen.rollout.explore
        for number in steps:
            # Raises the error that a run with this number of steps would raise.
            override(chosen, (f"rollout.explore.num_steps={number}",))
        chosen_formats = [resolve_format(name, device) for name in formats or [default.precision]]
        # A format that does not quantize runs in the training precision, whatever its name.
        names = [
            config.rollout.precision if form.quantize is None else form.name
            for form in chosen_formats
        ]
        settings += [
            ExplorationSetting(name, int(number), option_set)
            for name, number in itertools.product(
                dict.fromkeys(names), dict.fromkeys(steps) or [default.num_steps]
            )
        ]
    return settings


def explore_and_regenerate(
    experiment: Experiment,
    adapters: Trainable,
    prompts: int,
    settings: Sequence[ExplorationSetting],
    progress: Progress,
) -> Pools:
    """Computes the rewards of the candidates of some test prompts, regenerated and explored.

    All candidates are generated once by regeneration, and once per setting by exploration. A
    candidate always has the same seed, which depends on `eval.seed` and not on the seed of the run.
    If `rollout.noise_level` is above 0, the solver steps that add noise (`rollout.sde_window_size`)
    begin at step 0, as in the first iteration. Regenerated candidates are scored by the run's
    reward, explored ones by `rollout.explore.reward` if the run has it.

    Encoding the prompts may load text encoders and write to the cache of prompts. Exploration
    options that take measurements on the base do so once per set of options. Every process of a run
    must call it with the same arguments.

    Args:
        experiment: The run, for images of its size. Each prompt has `rollout.candidates`
            candidates.
        adapters: The trainable parameters of the sampling policy by path; an empty mapping means
            the base.
        prompts: The number of test prompts, taken from the start of the set, at least 1. If the set
            has fewer, all are taken.
        settings: How candidates are explored: format, number of steps and `option_set`, the name of
            a set of exploration options (a file in `configs/explore/`; "": those of the run).
        progress: Called with the phase ("regenerate" or "explore"), the number of candidates of
            all prompts, and the number of candidates done since the last call. The last number is 0
            when a phase starts. The phase "explore" starts once per setting.

    Returns:
        The texts of the prompts, the rewards after regeneration, and the rewards after exploration
        by setting.

    Raises:
        ConfigError: If the `option_set` of a setting does not exist, or the configuration is not
            valid with it.
        InputError: If a quantization rule of an `option_set` matches no layer of the network, or
            its rules leave none to a format that quantizes; if the prompts cannot be encoded; or if
            the code of a reward inside JAX raises or returns no scores.
        KeyError: If the format of a setting is not in `quant.formats.FORMATS`.
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop", or with "skip"
            if 32 calls of it in a row fail. It is a RunError.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If the disk refuses the cache of prompts, or another process gives no answer.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
    """
    prompt_batch, seed_batch = draw_candidates(experiment, prompts)
    regeneration = experiment.sampler("regenerate", adapters, experiment.config.rollout.num_steps)
    true = pool_rewards(experiment, regeneration, prompt_batch, seed_batch, progress)
    # One explorer per set of options, so that their measurements are taken once.
    explorers = {
        option_set: with_option_set(experiment, option_set).explorer
        for option_set in dict.fromkeys(setting.option_set for setting in settings)
    }
    proxies = {}
    for setting in settings:
        sampler = explorers[setting.option_set].sampler(adapters, setting)
        proxies[setting] = pool_rewards(
            experiment,
            sampler,
            experiment.prepare_for_ranking(prompt_batch),
            seed_batch,
            progress,
            explored=True,
        )
    return Pools(experiment.test_prompts[:prompts], true, proxies)


def draw_candidates(experiment: Experiment, prompts: int) -> tuple[PromptBatch, SeedBatch]:
    """Encodes the first test prompts, and draws the seeds of their candidates.

    The seeds depend on `eval.seed`, not on the seed of the run, so two runs draw the same noise.
    Encoding may load text encoders and write to the cache of prompts. Every process of a run must
    call it with the same arguments.

    Args:
        experiment: The run. Each prompt has `rollout.candidates` candidates.
        prompts: The number of test prompts, taken from the start of the set, at least 1. If the set
            has fewer, all are taken.

    Returns:
        The encoded prompts, prepared for the run's reward, and the candidates, prompt by prompt.
        Every process gets all of them.

    Raises:
        InputError: If the tokenizer or a text encoder of the model fails on its files, or the
            folder of the cache of prompts cannot be written.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If the disk refuses an entry of the cache of prompts, or another process gives no
            answer.
    """
    config = experiment.config
    test_prompts = experiment.test_prompts[:prompts]
    seeds = experiment.seeds(
        "ranking", test_prompts, config.rollout.candidates, seed=config.eval.seed
    )
    prompt_batch = experiment.encode_prompts(test_prompts, experiment.reward)
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

    These are their rewards, or with `reward.combine=advantages` the weighted sums of their scores,
    each standardized over all candidates of its prompt. Every process of a run must call it with
    the same arguments.

    Args:
        experiment: The run, which has the networks, the rewards and the number of candidates per
            prompt.
        sampler: The policy and the schedule with which the candidates are sampled. Its name is that
            of the phase.
        prompt_batch: The prompts, from `draw_candidates`. With `explored`, they must have been
            prepared for the reward of exploration by `Experiment.prepare_for_ranking`.
        seed_batch: The candidates, from `draw_candidates`.
        progress: Called with the name of the sampler, the number of candidates, and the number of
            candidates done since the last call: 0 at the start, then once per chunk.
        explored: Which reward scores the candidates. False: the training reward. True:
            `rollout.explore.reward`, or the training reward if that is not set.

    Returns:
        One row per prompt, one column per candidate. NaN if a candidate could not be scored.

    Raises:
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop", or with "skip"
            if 32 calls of it in a row fail. It is a RunError.
        RunError: If there are rewards outside JAX and another process gives no answer.
        InputError: If the code of a reward inside JAX raises or returns no scores.
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


def with_option_set(experiment: Experiment, option_set: str) -> Experiment:
    """Returns the same experiment with other exploration options.

    A set of options has fields of `rollout.explore` and may also change the rules of
    `model.quantization`. If it does, the layers to quantize are found anew.

    Args:
        experiment: The run, whose configuration is the start. It is not changed.
        option_set: The name of a set of exploration options, a file in `configs/explore/`. ""
            returns `experiment` itself.

    Returns:
        An experiment with the networks, rewards, prompts and size of `experiment`, the changed
        configuration, and an explorer of its own.

    Raises:
        ConfigError: If there is no such file, or the configuration is not valid with it.
        InputError: If a quantization rule of the set matches no layer of the network, or its rules
            leave none to a format that quantizes.
    """
    if not option_set:
        return experiment
    config = override(experiment.config, (f"explore={option_set}",))
    quantized = experiment.quantized
    if config.model.quantization != experiment.config.model.quantization:
        _, quantized = select_parameters(config, experiment.backbone.pipeline, experiment.device)
    return dataclasses.replace(experiment, config=config, quantized=quantized)


def summarize(pools: Pools, setting: ExplorationSetting, kept: int) -> dict[str, Any]:
    """Computes how well an exploration setting ranks the candidates, as a dict for a JSON record.

    Args:
        pools: The rewards of the candidates, regenerated (true) and explored (proxy).
        setting: The exploration setting to judge, a key of `pools.proxies`.
        kept: How many candidates of each prompt a run keeps. The figures consider the kept / 2
            (rounded down, at least 1) best and worst candidates.

    Returns:
        A dict with the setting ("explore", which is its `option_set`, "precision", "steps"), the
        counts "candidates" (per prompt), "kept", "top_k" (4) and "prompts", and the following
        figures as means over prompts. "per_prompt" is a list with one dict per prompt, which has
        the text of the prompt ("prompt") and its own figures.

        * "spearman", "kendall": The rank correlations of proxy and true rewards.
        * "top_k_match": The fraction of the truly best 4 candidates (all, if fewer have a true
          reward) that are among the kept / 2 best by proxy.
        * "bottom_k_match": The fraction of the truly worst 4 that are among the kept / 2 worst by
          proxy.
        * "top_k_regret": The mean true reward of the truly best 4 minus that of the truly best 4
          among the kept / 2 best by proxy, as a fraction of the range (largest minus smallest) of
          the prompt's true rewards. If fewer than 4 of these kept / 2 have a true reward, the
          smallest true reward of the prompt counts for each missing one.
        * "true_rank_best", "true_rank_worst": The mean true rank of the kept / 2 best and worst by
          proxy; rank 1 is the best.
        * "perfect_rank_best", "perfect_rank_worst": The two ranks above for a perfect proxy, if all
          rewards are finite. They are not in "per_prompt".

        A candidate without a finite reward is left out of the order by that reward. A figure that
        is not defined for a prompt is NaN in its entry and left out of the mean. The mean is NaN if
        the figure is defined for no prompt.

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
    means = {name: finite_mean(values) for name, values in columns.items()}
    per_prompt = [
        {"prompt": prompt, **{name: float(columns[name][i]) for name in columns}}
        for i, prompt in enumerate(pools.prompts)
    ]
    return {
        "explore": setting.option_set,
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


def format_table(results: Sequence[dict[str, Any]], settings: Sequence[ExplorationSetting]) -> str:
    """Formats results for a terminal.

    The table has a header, one line per setting (means over the prompts), and a last line with the
    numbers of kept and of all candidates per prompt and the true ranks that a perfect proxy would
    reach (`perfect_rank_best`, `perfect_rank_worst`). If there is a single setting, one line per
    prompt precedes the line of the setting. The columns are the figures that `summarize` computes
    for each prompt (`COLUMNS`).

    Args:
        results: The results of `summarize`, at least one.
        settings: The setting of each result, in the order of `results`. The names of the settings
            label the lines. Names and prompts are cut after 46 characters.

    Returns:
        The lines, joined by line feeds.

    Raises:
        ValueError: If `results` and `settings` differ in length.
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
