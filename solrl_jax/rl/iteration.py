"""One iteration of Sol-RL (arXiv 2604.06916, algorithm 1; docs/method.md, section 1).

    prompts -> sync -> explore (NVFP4) -> select -> regenerate (BF16) -> advantages -> update

Objectives that train on reward gradients make their targets after the regeneration. With
regeneration, no sample drawn in low precision enters the loss. The four families of the paper are
four settings of `iterate`: how many candidates there are, in which precision they are explored, and
whether the kept ones are regenerated or trained on as they are.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from solrl_jax.data.prompts import Prompt, draw_prompts
from solrl_jax.diffusion.seeds import prompt_uid, seed_numbers
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rl.advantages import TIE, optimality
from solrl_jax.rl.combine import combined_advantages, ranking_values
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.continuation import continued_steps
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.fidelity import rank_correlations
from solrl_jax.rl.generate import PromptBatch, Samples, SeedBatch, generate
from solrl_jax.rl.means import finite_mean
from solrl_jax.rl.phase_timer import PhaseTimer
from solrl_jax.rl.reward_gradient import add_targets
from solrl_jax.rl.sampler import Sampler
from solrl_jax.rl.select import best_and_worst, rank_candidates, select
from solrl_jax.rl.state import TrainState
from solrl_jax.rl.trainable.trainable import Trainable
from solrl_jax.rl.update import PolicyBatch, update

# (name of the running phase, its number of samples, number of samples done since the last call). It
# is called with 0 as the last number when a phase starts, and may raise to stop the iteration.
Progress = Callable[[str, int, int], None]


def no_progress(phase: str, total: int, done: int) -> None:
    """Reports nothing. It is the default `Progress` of `iterate`.

    Args:
        phase: The name of the running phase. Not read.
        total: The number of samples of the phase. Not read.
        done: The number of samples done since the last call. Not read.
    """


@dataclasses.dataclass(frozen=True)
class IterationResult:
    """The metrics and the ledger of an iteration, which `iterate` returns with the new state.

    Attributes:
        metrics: Metrics by name, NaN where undefined. They are those of the update (`update`, e.g.
            "loss", "loss/policy" and "grad_norm"); those of the rewards and the image size
            (`reward_metrics`, e.g. "kept/reward"); wall times in seconds and images per second
            (`PhaseTimer.report`, e.g. "seconds/explore"); "fidelity/level", the index of the
            exploration setting in `experiment.explorer.settings`; and "continued_steps", the number
            of steps that the regeneration took over from exploration.
        ledger: The record of all candidates, by column (`ledger_columns`): "prompt", "prompt_uid",
            "candidate", "seed", "proxy_reward", "rank", "kept", "regenerated_reward" and
            "advantage" have one entry per candidate, prompt by prompt; the last two are masked for
            candidates that are not kept. "precision", "steps" and "policy_revision" are single
            values for all candidates. If nothing is regenerated, "regenerated_reward" is None.
    """

    metrics: dict[str, float]
    ledger: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Selection:
    """The N candidates of each of P prompts, and the K of each prompt that are kept.

    Attributes:
        prompts: The P prompts, one for each row of the arrays.
        seeds: The seed of each candidate, the two words of a threefry key.
        proxy_rewards: The reward of each explored candidate; NaN if it could not be scored.
        ranking_values: The values by which the candidates were selected: `proxy_rewards`, or with
            `reward.combine=advantages` the weighted sums of their scores, each standardized within
            its prompt. Not finite if a candidate could not be scored.
        chosen: The indices of the kept candidates of each prompt, ascending, counted from 0 within
            the prompt.
        usable: For each prompt, bool [p], whether at least K of its candidates have a finite value
            in `ranking_values`. Only usable prompts are trained on. For the others, the row of
            `chosen` is the padding 0 to K - 1.
    """

    prompts: Sequence[Prompt]
    seeds: UInt32[np.ndarray, "p n 2"]
    proxy_rewards: Float[np.ndarray, "p n"]
    ranking_values: Float[np.ndarray, "p n"]
    chosen: Int[np.ndarray, "p k"]
    usable: np.ndarray

    @property
    def kept_seeds(self) -> UInt32[np.ndarray, "p k 2"]:
        """The seeds of the K kept candidates of each prompt, in the order of `chosen`. A prompt
        with fewer than K finite values in `ranking_values` has the seeds of its first K candidates.
        """
        return np.take_along_axis(self.seeds, self.chosen[..., None], axis=1)


def iterate(
    experiment: Experiment,
    state: TrainState,
    iteration: int,
    exploration_level: int = 0,
    progress: Progress = no_progress,
) -> tuple[TrainState, IterationResult]:
    """Runs one iteration: algorithm 1 of Sol-RL, in its order.

    Every process of a run must call it with the same arguments. The update donates `state`: its
    arrays are deleted, so use the returned state from here on. If an error comes before the update,
    `state` stays usable. The result does not depend on the devices or on
    `rollout.per_device_batch_size`, up to rounding.

    The first iteration with an image size and a level may also sample from the base, for
    exploration options that measure it, for example the inputs of its layers. Encoding the prompts
    may load text encoders and write to the cache of prompts.

    Args:
        experiment: The parts of the run that do not change.
        state: The state before the iteration. Its old policy generates the samples.
        iteration: The number of the iteration, from 1. It decides the prompts (each epoch takes
            them in a new random order), the seeds and the size of the images.
        exploration_level: The index of the exploration setting in `experiment.explorer.settings`.
            0 is the configured setting; larger ones are more faithful.
        progress: Called with the name of a phase, its number of samples, and the number of samples
            done since the last call. The phases are "explore" (with all candidates) and, with the
            kept ones, "regenerate" (unless nothing is regenerated), "targets" (for objectives that
            train on reward gradients) and "update". When a phase starts, the last number is 0;
            "targets" and "update" are reported only then. An exception that it raises ends the
            iteration. The default reports nothing.

    Returns:
        The new state, on the devices, and the metrics and the ledger (the record of all candidates)
        of the iteration.

    Raises:
        InputError: If the number of the iteration is not from 1 to 2**31 - 1, if the prompts cannot
            be encoded, or if the code of a reward inside JAX raises or returns no scores.
        IndexError: If the explorer has no such level.
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop", or with "skip"
            if 32 calls of it in a row fail. It is a RunError.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        RunError: If the disk refuses the cache of prompts, or another process gives no answer.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
    """
    experiment = experiment.for_iteration(iteration)
    config = experiment.config
    rollout = config.rollout
    backbone = experiment.backbone
    noise_start = rollout.window_start(iteration)
    timer = PhaseTimer()

    # Draw G prompts, and the seeds of N candidates for each.
    timer.start("encode")
    prompts = draw_prompts(
        experiment.train_prompts, config.seed, iteration - 1, config.train.num_prompts
    )
    prompt_batch = experiment.encode_prompts(prompts, experiment.reward)
    seeds = experiment.seeds("candidate", prompts, rollout.candidates, iteration=iteration)

    # Sync: merge the old policy into the base and quantize it.
    timer.start("sync")
    exploration = experiment.explorer.settings[exploration_level]
    explore_sampler, full_sampler = make_samplers(experiment, state.old, exploration, noise_start)
    timer.wait(explore_sampler.segments)

    # Explore: generate all candidates in low precision, and select K of each prompt by their proxy
    # rewards.
    timer.start("explore")
    total = seeds.shape[0] * seeds.shape[1]
    progress("explore", total, 0)
    explored_samples = generate(
        backbone,
        explore_sampler,
        experiment.prepare_for_ranking(prompt_batch),
        SeedBatch.from_seeds(seeds),
        experiment.ranking_reward,
        progress=partial(progress, "explore", total),
    )
    del explore_sampler  # frees the quantized copy of the policy
    combine = config.reward.combine
    proxy = explored_samples.reward.reshape(len(prompts), rollout.candidates)
    ranking = ranking_values(
        combine, explored_samples.scores, experiment.ranking_weights, len(prompts)
    )
    chosen, usable = select(ranking, rollout.kept, rollout.selection, seed=(config.seed, iteration))
    selection = Selection(prompts, seeds, proxy, ranking, chosen, usable)

    # Regenerate: generate the kept seeds again in the training precision with all steps, or with
    # the remaining ones if exploration has already taken the first ones in that precision.
    timer.start("regenerate")
    places = chosen + rollout.candidates * np.arange(len(prompts))[:, None]
    if rollout.regenerate:
        start = None
        if explored_samples.intermediate is not None:
            start = explored_samples.intermediate[places.reshape(-1)]
            # The latents of the other candidates are freed.
            explored_samples = dataclasses.replace(explored_samples, intermediate=None)
        kept_seeds = SeedBatch.from_seeds(selection.kept_seeds)
        progress("regenerate", chosen.size, 0)
        kept_samples = generate(
            backbone,
            full_sampler,
            prompt_batch,
            dataclasses.replace(kept_seeds, noise=start),
            experiment.reward,
            progress=partial(progress, "regenerate", chosen.size),
        )
    else:
        kept_samples = explored_samples.take(places)

    # Make the targets of objectives that train on the gradient of the reward.
    if config.algorithm.trains_on == "reward_gradients":
        timer.start("targets")
        progress("targets", chosen.size, 0)
        kept_samples = add_targets(
            experiment, prompt_batch, kept_samples, np.repeat(np.arange(len(prompts)), rollout.kept)
        )

    # Compute the advantages, from the rewards of the kept samples.
    timer.start("update")
    rewards = np.where(usable[:, None], kept_samples.reward.reshape(chosen.shape), np.nan)
    values = ranking_values(combine, kept_samples.scores, config.reward.weights, len(prompts))
    values = np.where(usable[:, None], values, np.nan)
    advantage = np.asarray(
        combined_advantages(
            combine,
            values,
            clip=config.algorithm.adv_clip_max,
            global_std=config.algorithm.global_std,
            mode=config.algorithm.adv_mode,
        )
    )

    # Update the trained parameters. The old policy and the EMA follow in the same program.
    batch = policy_batch(experiment, prompt_batch, selection, kept_samples, values, advantage)
    schedule = experiment.schedule(rollout.num_steps, noise_start)
    progress("update", len(batch.weight), 0)
    with jax.set_mesh(backbone.mesh):
        state, update_metrics = update(
            backbone, config, state, backbone.transformer, batch, schedule
        )
    metrics = {name: float(value) for name, value in jax.device_get(update_metrics).items()}
    timer.stop()

    metrics |= reward_metrics(
        experiment, selection, rewards, values, kept_samples, explored_samples
    )
    metrics["fidelity/level"] = float(exploration_level)
    regenerated_steps = sum(segment.schedule.steps for segment in full_sampler.segments)
    metrics["continued_steps"] = float(rollout.num_steps - regenerated_steps)
    metrics |= timer.report(total, chosen.size if rollout.regenerate else None)
    ledger = ledger_columns(experiment, selection, exploration, rewards, advantage, iteration)
    return state, IterationResult(metrics, ledger)


def make_samplers(
    experiment: Experiment, old: Trainable, setting: ExplorationSetting, noise_start: int
) -> tuple[Sampler, Sampler]:
    """Makes the samplers of exploration and of regeneration.

    If the format of exploration quantizes, this allocates a quantized copy of the policy on the
    devices, which is freed with its sampler. The first call with a setting may also sample from the
    base, for exploration options that take measurements. Every process of a run must call it.

    Args:
        experiment: The experiment of the iteration.
        old: The trainable parameters by path of the old policy, which both phases sample from.
        setting: The format and the number of steps of exploration. Its `option_set` is not read;
            the exploration options are those in the configuration of `experiment`.
        noise_start: The first step of the full schedule at which both phases add noise, counted
            from 0, if `rollout.noise_level` is above 0. `rollout.sde_window_size` steps from there
            on add noise, or all if that is None, but never the last step. With fewer steps, each
            step of exploration adds the noise of the full steps that it covers.

    Returns:
        The sampler of exploration and that of regeneration, also if nothing is regenerated. The
        sampler of the training samples (that of exploration if nothing is regenerated) records the
        states that the objective trains at. If the function `continued_steps` returns a number
        above 0, regeneration takes over that many first steps from exploration: exploration keeps
        the latents after these steps, and the sampler of regeneration has only the later steps. The
        caller must then pass the latents of the kept candidates to the regeneration as its noise.

    Raises:
        KeyError: If there is no such format, or the base has no parameter of a path in `old`.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
        InputError, OSError, RunError: If the calibration prompts cannot be encoded
            (`Experiment.encode_prompts`).
    """
    config = experiment.config
    rollout = config.rollout
    explore_sampler = experiment.explorer.sampler(old, setting, noise_start)
    full_sampler = experiment.sampler("regenerate", old, rollout.num_steps, noise_start)

    def with_recording(sampler: Sampler) -> Sampler:
        return dataclasses.replace(
            sampler, recorded=config.num_recorded_steps, query_steps=experiment.query_steps
        )

    if not rollout.regenerate:
        return with_recording(explore_sampler), full_sampler
    full_sampler = with_recording(full_sampler)
    continued = continued_steps(rollout, setting.precision, setting.steps, full_sampler.query_steps)
    if continued:
        explore_sampler = dataclasses.replace(explore_sampler, keep_intermediate=True)
        full_sampler = full_sampler.skip_steps(continued)
    return explore_sampler, full_sampler


def policy_batch(
    experiment: Experiment,
    prompt_batch: PromptBatch,
    selection: Selection,
    samples: Samples,
    values: Float[np.ndarray, "p k"],
    advantage: Float[np.ndarray, "p k"],
) -> PolicyBatch:
    """Puts the kept samples on every device, in their order for training. Every process of a run
    must call it.

    For an objective that trains on pairs, the best sample of a prompt is followed by the worst, the
    second best by the second worst, and so on (`best_and_worst`). Both samples of a pair get the
    seed of the better one, so that they are noised in the same way.

    Samples have weight 1, or weight 0 if they do not count. Without pairs, a sample does not count
    if its value or its target is not finite. With pairs, two kinds do not count: the padding pairs,
    which name one sample twice and replace the samples that `best_and_worst` leaves out (those
    whose value is not finite, and the middle one of an odd number), and pairs whose two values are
    equal up to rounding (4e-6 of the larger magnitude).

    Args:
        experiment: `algorithm.trains_on` of its configuration decides whether samples are paired,
            and `algorithm.adv_clip_max` is the scale that turns advantages into probabilities
            (`advantages.optimality`). The batch is placed on its mesh.
        prompt_batch: The encoded prompts, whose embeddings are part of the batch.
        selection: The candidates and which of them are kept. It gives the seeds.
        samples: The kept samples, prompt by prompt, each prompt in the order of `selection.chosen`.
        values: The values that order the kept samples of a prompt, in the order of
            `selection.chosen`: their rewards, or with `reward.combine=advantages` the weighted sums
            of their standardized scores. NaN for prompts that are not usable.
        advantage: The advantages of these samples, in the shape of `values`.

    Returns:
        The batch for `update`, on every device. Without pairs it has the samples in the order of
        `samples`. With pairs, rows 2 i and 2 i + 1 are the better and the worse sample of pair i.
    """
    algorithm = experiment.config.algorithm
    flat_values = values.reshape(-1)
    seeds = selection.kept_seeds.reshape(-1, 2)
    if algorithm.trains_on == "pairs":
        best, worst = best_and_worst(values)
        order = np.stack([best, worst], 1).reshape(-1)
        seeds = seeds[best].repeat(2, 0)
        largest = np.maximum(abs(flat_values[best]), abs(flat_values[worst]))
        counts = (flat_values[best] - flat_values[worst] > TIE * largest).repeat(2)
    else:
        order = np.arange(flat_values.size)
        counts = np.isfinite(flat_values)
    targets = None
    if samples.targets is not None:
        targets = {name: x[order] for name, x in samples.targets.items()}
        counts &= _finite_targets(targets)
    q = optimality(jnp.asarray(advantage), algorithm.adv_clip_max).reshape(-1)

    def place(x: Any) -> jax.Array:
        return hosts.put(x, sharding.replicated(experiment.backbone.mesh))

    return PolicyBatch(
        latents=place(samples.latents[order]),
        optimality=place(q[order]),
        weight=place(counts.astype(np.float32)),
        prompt=place((order // values.shape[1]).astype(np.int32)),
        seeds=place(seeds),
        conditioning=prompt_batch.conditions.cond,
        states=None if samples.states is None else place(samples.states[order]),
        targets=None if targets is None else {name: place(x) for name, x in targets.items()},
    )


def reward_metrics(
    experiment: Experiment,
    selection: Selection,
    rewards: Float[np.ndarray, "p k"],
    values: Float[np.ndarray, "p k"],
    kept: Samples,
    explored: Samples,
) -> dict[str, float]:
    """Computes the metrics of an iteration that come from its rewards, and the size of its images.

    Args:
        experiment: The experiment of the iteration, whose image size is reported. Its
            configuration says how samples are ranked (`reward.combine`) and whether the kept
            samples were regenerated (`rollout.regenerate`).
        selection: The candidates, which of them are kept, and which prompts are usable. A prompt is
            usable if at least as many of its candidates have a finite ranking value as are kept.
        rewards: The rewards of the kept samples in the order of `selection.chosen`, NaN for prompts
            that are not usable.
        values: The values that order the kept samples, in the shape of `rewards`: the rewards
            themselves, or with `reward.combine=advantages` the weighted sums of their standardized
            scores. NaN for prompts that are not usable.
        kept: The kept samples, regenerated if the run regenerates, with their scores.
        explored: All explored candidates with their scores, prompt by prompt.

    Returns:
        Floats by name:

        * "pool/SCORE", "kept/SCORE": The mean of each score ("reward" is the weighted sum) over all
            candidates, and over the samples in `kept` of usable prompts.
        * "kept/spread": The largest minus the smallest reward in `rewards` of a prompt, mean over
            usable prompts.
        * "size/height", "size/width": The size of the images in pixels; "size/frames": the number
            of frames, for clips.
        * "unusable_prompts": The number of prompts that are not usable. Their samples in `kept` are
            padding (their first candidates), which is not trained on.
        * "nonfinite_targets": The number of samples in `kept` of usable prompts that are not
            trained on because the gradient of their reward is not finite. Only for objectives that
            train on reward gradients.
        * "nonfinite_rewards": The number of non-finite rewards of the candidates and, if the kept
            samples were regenerated, of the samples in `kept` of usable prompts.
        * "reward_failures/NAME": For each reward outside JAX, the number of images (for rewards
            that score frames of clips: of frames) that it could not score in exploration and
            regeneration together, also of unusable prompts.
        * "reward_cost/NAME/COUNTER": For each reward outside JAX that counts its costs, such as
            requests or tokens, the sum over exploration and regeneration (`Samples.usage`).
        * "fidelity/spearman", "fidelity/kendall": The rank correlations, within the kept samples of
            a prompt, between the `ranking_values` of their scores in `explored` and `values`, mean
            over the usable prompts for which they are defined. Without regeneration the two are
            equal, so the correlations are 1 where they are defined.

        Means leave out values that are not finite, and are NaN if no value is left.
    """
    proxy = selection.proxy_rewards
    explored_scores = {
        name: np.take_along_axis(scores.reshape(proxy.shape), selection.chosen, axis=1)
        for name, scores in explored.scores.items()
    }
    before = ranking_values(
        experiment.config.reward.combine, explored_scores, experiment.ranking_weights, len(proxy)
    )
    correlations = rank_correlations(before, values)
    highest = np.nanmax(rewards, 1, initial=-np.inf)
    lowest = np.nanmin(rewards, 1, initial=np.inf)
    metrics = {f"pool/{name}": finite_mean(scores) for name, scores in explored.scores.items()}
    usable = selection.usable
    for name, scores in kept.scores.items():
        metrics[f"kept/{name}"] = finite_mean(scores.reshape(rewards.shape)[usable])
    metrics["kept/spread"] = finite_mean(highest - lowest)
    metrics["size/height"] = float(experiment.size[0])
    metrics["size/width"] = float(experiment.size[1])
    if len(experiment.size) == 3:
        metrics["size/frames"] = float(experiment.size[2])
    metrics["unusable_prompts"] = float((~usable).sum())
    nonfinite = (~np.isfinite(proxy)).sum()
    if experiment.config.rollout.regenerate:
        nonfinite += (~np.isfinite(rewards[usable])).sum()
    metrics["nonfinite_rewards"] = float(nonfinite)
    if kept.targets is not None:
        finite = _finite_targets(kept.targets).reshape(rewards.shape)
        metrics["nonfinite_targets"] = float((~finite[usable]).sum())
    for name in {**explored.failed, **kept.failed}:
        count = explored.failed.get(name, 0) + kept.failed.get(name, 0)
        metrics[f"reward_failures/{name}"] = float(count)
    for name in {**explored.usage, **kept.usage}:
        cost = explored.usage.get(name, 0.0) + kept.usage.get(name, 0.0)
        metrics[f"reward_cost/{name}"] = cost
    metrics["fidelity/spearman"] = correlations.spearman
    metrics["fidelity/kendall"] = correlations.kendall
    return metrics


def _finite_targets(targets: Mapping[str, Float[np.ndarray, "b ..."]]) -> Bool[np.ndarray, " b"]:
    """Finds the samples whose targets are all finite.

    Args:
        targets: The latents that an objective made from the gradient of the reward, by name, with
            one row per sample. At least one name.

    Returns:
        For each sample, whether all values of all its targets are finite.
    """
    return np.all([np.isfinite(x).all(tuple(range(1, x.ndim))) for x in targets.values()], axis=0)


def ledger_columns(
    experiment: Experiment,
    selection: Selection,
    setting: ExplorationSetting,
    rewards: Float[np.ndarray, "p k"],
    advantage: Float[np.ndarray, "p k"],
    iteration: int,
) -> dict[str, Any]:
    """Makes the record of every candidate of an iteration.

    Args:
        experiment: `rollout.regenerate` of its configuration decides whether there are regenerated
            rewards.
        selection: The candidates and which of them are kept.
        setting: The format and the number of steps that the candidates were explored with.
        rewards: The rewards of the kept samples, in the order of `selection.chosen`. Not read if
            nothing is regenerated.
        advantage: The advantages of the kept samples, in the same order.
        iteration: The number of the iteration, from 1.

    Returns:
        Columns by name. These have one entry per candidate, prompt by prompt: "prompt" (list of
        text), "prompt_uid" (uint32, a hash of the text), "candidate" (the index within the prompt),
        "seed" (uint64, both words of the seed, the first in the high bits), "proxy_reward"
        (`selection.proxy_rewards`, float32), "rank" (within the prompt, by
        `selection.ranking_values`, which the candidates were selected by; 0 is the best, and values
        that are not finite come last), "kept" (bool; False for all candidates of a prompt that
        `selection.usable` marks as not usable), and "regenerated_reward" and "advantage", masked
        float32 arrays whose entries are masked where "kept" is False. These are single values that
        hold for all candidates: "precision" and "steps" of the exploration, "policy_revision" (the
        number of the iteration in which the exploring policy was made), and None for
        "regenerated_reward" if nothing is regenerated.
    """
    proxy = selection.proxy_rewards
    chosen = selection.chosen
    num_prompts, num_candidates = proxy.shape
    is_kept = np.zeros(proxy.shape, bool)
    usable = np.broadcast_to(selection.usable[:, None], chosen.shape)
    np.put_along_axis(is_kept, chosen, usable, axis=1)

    def per_prompt(values: Any) -> np.ndarray:
        return np.repeat(np.asarray(values), num_candidates)

    def per_kept(values: np.ndarray) -> np.ma.MaskedArray:
        column = np.zeros(proxy.shape, np.float32)
        np.put_along_axis(column, chosen, np.asarray(values, np.float32), axis=1)
        return np.ma.masked_array(column.reshape(-1), ~is_kept.reshape(-1))

    uids = np.array([prompt_uid(prompt) for prompt in selection.prompts], np.uint32)
    regenerates = experiment.config.rollout.regenerate
    return {
        "prompt": per_prompt(selection.prompts).tolist(),
        "prompt_uid": per_prompt(uids),
        "candidate": np.tile(np.arange(num_candidates, dtype=np.int32), num_prompts),
        "seed": seed_numbers(selection.seeds).reshape(-1),
        "precision": setting.precision,
        "steps": setting.steps,
        "proxy_reward": proxy.reshape(-1).astype(np.float32),
        "rank": rank_candidates(selection.ranking_values).reshape(-1).astype(np.int32),
        "kept": is_kept.reshape(-1),
        "regenerated_reward": per_kept(rewards) if regenerates else None,
        "advantage": per_kept(advantage),
        "policy_revision": iteration,
    }
