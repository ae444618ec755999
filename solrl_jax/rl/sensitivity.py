"""Measures how much quantizing each group of linear layers affects the ranking of candidates.

A group is one module of the blocks (such as `attn` or `ff`), in all blocks together. Outside of the
blocks, a group consists of the linear layers whose paths have the same first part. The error of a
quantized matrix is a poor guide: the layers that embed the timestep have small errors, but they
affect every token.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from solrl_jax.errors import RunError
from solrl_jax.rl.experiment import Experiment
from solrl_jax.rl.explore.quantized_layers import LinearLayer, report
from solrl_jax.rl.explore.setting import ExplorationSetting
from solrl_jax.rl.fidelity import rank_correlations
from solrl_jax.rl.iteration import Progress
from solrl_jax.rl.rank import draw_candidates, pool_rewards
from solrl_jax.rl.trainable.trainable import Trainable


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """How well exploration still ranks candidates if only one group of linear layers is quantized.

    Attributes:
        group: The name of the group: a module of the blocks between slashes, such as "/attn/", or
            the first part of the path of any other layer, such as "proj_out/" (`group_of`).
        linears: The number of linear layers in the group. Each layer of a stack counts as one.
        weight_share: The number of weights in the group as a fraction of those of all linear
            layers, in [0, 1]. It is also the fraction of the multiplications if all layers are
            applied to every token.
        spearman: The rank correlation of explored and regenerated rewards with only this group
            quantized, mean over prompts. NaN if it is defined for no prompt.
    """

    group: str
    linears: int
    weight_share: float
    spearman: float


def group_of(path: str) -> str:
    """Returns the name of the group of a linear layer.

    If the first part of the path ends in "blocks", the name is the next part, not counting the
    number or range of blocks. Otherwise the name is the first part.

    The name is a substring of all paths of the group, so that it can be used in
    `model.quantization.modules_to_not_convert`. The name of a group outside of the blocks may also
    occur in other paths: "proj_out/" of FLUX.1 is in `single_transformer_blocks/proj_out/kernel`.

    Args:
        path: The path of the layer's kernel, parts joined by "/".

    Returns:
        The name, with its slashes: "/attn/" for `transformer_blocks/attn/to_q/kernel` and for
        `transformer_blocks/0-3/attn/to_q/kernel`, "proj_out/" for `proj_out/kernel`, and "layers/"
        for all blocks of Z-Image in `layers`.
    """
    first, *others = path.split("/")
    if not first.endswith("blocks"):
        return f"{first}/"
    is_part_of_stack = others[0].replace("-", "").isdigit()
    return f"/{others[1] if is_part_of_stack else others[0]}/"


def measure(
    experiment: Experiment, adapters: Trainable, prompts: int, progress: Progress
) -> tuple[float, list[Sensitivity]]:
    """Measures the rank correlation of exploration with each group of linear layers quantized
    alone.

    Each of some test prompts has `rollout.candidates` candidates. They are regenerated, explored
    with nothing quantized, and explored once per group with the configured format, all without FP8
    attention. All candidates are scored by the training reward, and their seeds depend on
    `eval.seed`. Every linear layer is in a group, also those that the rules of `model.quantization`
    exclude from quantization.

    Exploration options that take measurements on the base do so anew for each group. Encoding the
    prompts may load text encoders and write to the cache of prompts. Every process of a run must
    call it with the same arguments.

    Args:
        experiment: The run, with the format, the number of steps and the options of
            `rollout.explore`. The format must quantize, which is not checked: otherwise all groups
            get the correlation without quantization. The run is not changed.
        adapters: The trainable parameters of the policy by path.
        prompts: The number of test prompts, taken from the start of the set, at least 1. If the set
            has fewer, all are taken.
        progress: Called with the phase ("regenerate" or "explore"), the number of candidates, and
            the number of candidates done since the last call. The last number is 0 when a phase
            starts. The phase "explore" starts once with nothing quantized and once per group.

    Returns:
        The mean Spearman correlation over prompts with nothing quantized, and the results of all
        groups, ordered by the path of the first layer in each group. Each mean leaves out the
        prompts for which its correlation is undefined.

    Raises:
        RunError: If the correlation without quantization is defined for no prompt, for example
            because the rewards of all candidates of each prompt are equal. Also if the disk refuses
            the cache of prompts, or another process gives no answer.
        RewardError: If a reward outside JAX fails and `reward.on_failure` is "stop", or with "skip"
            if 32 calls of it in a row fail. It is a RunError.
        InputError: If the prompts cannot be encoded, or the code of a reward inside JAX raises or
            returns no scores.
        FileNotFoundError: If the directory of a tokenizer is missing.
        PermissionError: If a folder of the cache of prompts may not be searched.
        numpy.linalg.LinAlgError: If exploration options measure values that are not finite.
    """
    config = experiment.config
    prompt_batch, seed_batch = draw_candidates(experiment, prompts)
    steps = config.rollout.explore.num_steps
    form = experiment.explorer.format
    regeneration = experiment.sampler("regenerate", adapters, config.rollout.num_steps)
    true = pool_rewards(experiment, regeneration, prompt_batch, seed_batch, progress)

    # FP8 attention would affect the correlation of every group, but not that without quantization.
    explore = dataclasses.replace(config.rollout.explore, attention="default")
    rollout = dataclasses.replace(config.rollout, explore=explore)
    linear_layers_alone = dataclasses.replace(
        experiment, config=dataclasses.replace(config, rollout=rollout)
    )

    def correlation(paths: Sequence[str], precision: str) -> float:
        """Explores and returns the mean Spearman correlation over prompts.

        Args:
            paths: The paths of the kernels to quantize.
            precision: The exploration format, a key of `quant.formats.FORMATS`.

        Returns:
            The mean, NaN if the correlation is defined for no prompt.
        """
        explorer = dataclasses.replace(linear_layers_alone, quantized=tuple(paths)).explorer
        sampler = explorer.sampler(adapters, ExplorationSetting(precision, steps))
        proxy = pool_rewards(experiment, sampler, prompt_batch, seed_batch, progress)
        return rank_correlations(proxy, true).spearman

    exact = correlation((), config.rollout.precision)
    if np.isnan(exact):
        raise RunError(
            f"the rewards of all candidates of {prompts} prompt(s) tie, so nothing ranks them; "
            "take more prompts"
        )
    all_layers = dataclasses.replace(
        config.model.quantization, modules_to_not_convert=(), min_width_ratio=0.0
    )
    groups: dict[str, list[LinearLayer]] = {}
    for layer in report(experiment.backbone.transformer, all_layers, form):
        groups.setdefault(group_of(layer.path), []).append(layer)
    sizes = {
        name: sum(layer.layers * layer.n_in * layer.n_out for layer in layers)
        for name, layers in groups.items()
    }
    results = [
        Sensitivity(
            group=name,
            linears=sum(layer.layers for layer in layers),
            weight_share=sizes[name] / sum(sizes.values()),
            spearman=correlation([layer.path for layer in layers], form.name),
        )
        for name, layers in groups.items()
    ]
    return exact, results


def propose_unquantized(exact: float, groups: Sequence[Sensitivity], floor: float) -> list[str]:
    """Proposes the groups that should stay in the training precision, so that the correlation stays
    at least `floor`.

    The loss of a group is `exact` minus its own correlation, at least 0, and losses are assumed to
    add up. Groups with the smallest loss divided by `weight_share` are quantized first, as long as
    the sum of their losses is at most `exact - floor`. A group that would exceed this limit is left
    unquantized, and the next groups are still tried.

    Args:
        exact: The Spearman correlation with nothing quantized.
        groups: The results of all groups, with shares above 0. A group with a NaN correlation is
            never quantized.
        floor: The smallest acceptable correlation. Above `exact`, all groups are proposed.

    Returns:
        The names of the groups that are not quantized, such as "/attn/" or "proj_out/", sorted: a
        value for `model.quantization.modules_to_not_convert`, with `min_width_ratio` 0.
    """
    # An infinite loss sorts last and never fits, whereas NaN cannot be sorted.
    loss = {
        g.group: np.inf if np.isnan(g.spearman) else max(exact - g.spearman, 0.0) for g in groups
    }
    budget = exact - floor
    skip = []
    for g in sorted(groups, key=lambda g: loss[g.group] / g.weight_share):
        if loss[g.group] <= budget:
            budget -= loss[g.group]
        else:
            skip.append(g.group)
    return sorted(skip)


def format_table(exact: float, groups: Sequence[Sensitivity], skip: Sequence[str]) -> str:
    """Formats the results for a terminal, without a header: a line for "nothing" quantized, one
    line per group, then the proposed settings.

    Args:
        exact: The Spearman correlation with nothing quantized.
        groups: The results of all groups, in the order of the lines.
        skip: The names of the groups that should stay in the training precision.

    Returns:
        The lines, joined by line feeds. The line of a group has its number of linear layers, its
        share of the weights in percent and its Spearman correlation. The last line has `skip` and
        `min_width_ratio=0` as overrides of the configuration.
    """
    lines = [f"{'nothing':<24}{'':>36}spearman {exact:.3f}"]
    for g in groups:
        lines.append(
            f"{g.group:<24}{g.linears:>5} linear layers, {g.weight_share:>6.1%} of all, "
            f"spearman {g.spearman:.3f}"
        )
    lines.append(
        f"proposed: model.quantization.modules_to_not_convert=[{','.join(skip)}] "
        "model.quantization.min_width_ratio=0"
    )
    return "\n".join(lines)
