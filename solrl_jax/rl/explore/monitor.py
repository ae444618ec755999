"""The monitor: makes exploration more faithful while it ranks candidates badly.

Ranking gets harder during training: the rewards within a prompt come closer together, while the
error of a format stays the same. Every iteration reports the Spearman correlation of proxy and
regenerated rewards over its kept samples, and the monitor reads it. The kept samples are the
extremes of all candidates, so this correlation is higher than the one over all candidates, which
`solrl rank RUN` measures.

The monitor has no state. The setting of an iteration is a function of what the iterations before it
reported, so a resumed run continues in the same way.
"""

import math
import statistics
from collections.abc import Sequence

from solrl_jax.quant.formats import FORMATS, Format
from solrl_jax.rl.explore.setting import ExplorationSetting

# The median over this many iterations is compared with the floor, so that a single bad iteration
# changes nothing.
WINDOW = 3
# After this many good iterations a less faithful setting is tried again. The number doubles each
# time that the trial fails.
FIRST_RETURN = 10
# The formats between those of four bits and the training precision.
FINER = ("fp8",)


def setting_ladder(
    form: Format, steps: int, full_steps: int, training_precision: str
) -> tuple[ExplorationSetting, ...]:
    """Lists the settings that the monitor chooses from, each more faithful than the one before.

    They are the configured format with the configured steps; the same format with all steps; FP8
    with all steps; and the training precision with all steps. FP8 and the training precision are
    each left out unless they have more bits per weight (`Format.bits_per_weight`) than the
    configured format. If that format quantizes nothing, exploration runs in the training precision,
    which then takes its place.

    Args:
        form: The configured exploration format.
        steps: The configured number of exploration steps.
        full_steps: The number of steps of the regeneration.
        training_precision: The name of the training precision, "bf16" or "fp32".

    Returns:
        The settings in that order, without repetitions; at least one. Their `option_set` is ""
        (the options of the run).
    """
    configured = training_precision if form.quantize is None else form.name
    finer = [
        name
        for name in (*FINER, training_precision)
        if FORMATS[name].bits_per_weight > FORMATS[configured].bits_per_weight
    ]
    ladder = [
        ExplorationSetting(configured, steps),
        ExplorationSetting(configured, full_steps),
        *(ExplorationSetting(name, full_steps) for name in finer),
    ]
    return tuple(dict.fromkeys(ladder))


def next_level(history: Sequence[tuple[int, float]], floor: float, last: int) -> int:
    """Chooses the exploration setting of the next iteration, as an index in the `setting_ladder`.

    The index starts at 0. These rules are applied after each iteration of the history in which the
    present setting has at least 3 correlations. Correlations before a change of the setting, by a
    rule or in the history, do not count.

    * If the median of the last 3 correlations with the present setting is below `floor`, the index
        rises by one, up to `last`.
    * If that median is at least `floor` and the present setting has at least 10 correlations, the
        index (above 0) falls by one, as a trial. Whenever the index rises from the setting that the
        last trial fell to, however late, the number 10 doubles (20, 40, and so on). If the index
        rises from any other setting, the number is 10 again.

    Args:
        history: For each iteration so far, from the first: the index of the setting that it
            explored with, which replaces that of the rules where they differ, and the Spearman
            correlation of proxy and regenerated rewards that it reported. If the correlation
            of an iteration is not finite, only its index counts.
        floor: The smallest acceptable correlation, `rollout.explore.min_rank_correlation`.
        last: The index of the most faithful setting, the largest result.

    Returns:
        The index of the setting, from 0 to `last`. 0 for an empty history.
    """
    index = 0
    patience = FIRST_RETURN
    tried = -1  # the setting that was last returned to as a trial
    correlations: list[float] = []
    for explored_with, correlation in history:
        # The run may have explored with another setting, e.g. because the floor was set later.
        if explored_with != index:
            index = explored_with
            correlations = []
        if not math.isfinite(correlation):
            continue
        correlations.append(correlation)
        enough = len(correlations) >= WINDOW
        good = enough and statistics.median(correlations[-WINDOW:]) >= floor
        if enough and not good and index < last:
            patience = 2 * patience if index == tried else FIRST_RETURN
            index += 1
            correlations = []
        elif good and index and len(correlations) >= patience:
            index -= 1
            tried = index
            correlations = []
    return min(index, last)
