"""Regeneration that continues from the latents that exploration reached in the training precision.

Where the first steps of exploration are those of the regeneration, with the same policy, their
latents are the regeneration's own. Those of the kept candidates are then not computed again.
"""

from solrl_jax.config.schema import Config, Rollout
from solrl_jax.config.values import Size
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.sampler import make_schedule


def find_query_steps(config: Config, pipeline: Pipeline, size: Size) -> range | None:
    """Returns the steps at which an objective that trains on reward gradients is trained, on the
    latents that the step starts from. `rl.generate.generate` draws one of the steps for each
    sample, from its seed. A user's objective, `module:function`, is imported for this, which must
    succeed.

    Args:
        config: The configuration. `algorithm.last_steps` is the number of last steps, or if it is
            None, `algorithm.query_sigma` the noise level that is asked for. `rollout` gives the
            sigmas.
        pipeline: The model, whose shift some schedules take.
        size: Height and width of the images in pixels, or of clips also the number of frames, from
            which some schedules derive their shift.

    Returns:
        Indices, from 0, of consecutive steps of the full schedule: the last ones, or the one that
        starts nearest to the noise level. None if the objective trains on anything else.
    """
    if config.algorithm.trains_on != "reward_gradients":
        return None
    rollout = config.rollout
    schedule = make_schedule(rollout, pipeline, size, rollout.num_steps, noise_start=None)
    algorithm = config.algorithm
    first, count = schedule.locate_query_steps(algorithm.last_steps, algorithm.query_sigma)
    return range(int(first), int(first) + count)


def continued_steps(
    rollout: Rollout, precision: str, steps: int, query_steps: range | None = None
) -> int:
    """Returns the number of steps that regeneration takes over from exploration.

    The first `explore.exact_steps` steps of exploration run in the training precision. If they have
    the sigmas of the regeneration, it can start from the latents after them, and the result is
    `explore.exact_steps`. They have these sigmas if exploration has as many steps as the
    regeneration; or if `explore.sigmas` is "first", which takes the first half of the exploring
    steps from the schedule of the regeneration, and at most half of them are exact. The result is
    0, and a regeneration starts from noise, in each of the following cases:

    * `regenerate` is False, so that there is none, or `explore.exact_steps` is 0.
    * The exploration format quantizes nothing. Its steps are all alike, and no latents between them
      are kept.
    * The sigmas of the exact steps differ from those of the regeneration.
    * `noise_level` is above 0. Objectives that train on transitions need the states before these
      steps too.
    * `solver` is "dpm2" and there are several exact steps. Its steps also use the prediction of the
      step before, which is not kept. Only the first two do not, since the first sigma is 1.
    * `query_steps` begins before the end of these steps, so that a state in them may be recorded.

    Args:
        rollout: The configuration of the rollout.
        precision: The format that is explored in, a key of `quant.formats.FORMATS`.
        steps: The number of exploring steps, above `explore.exact_steps`.
        query_steps: The indices of the regenerating steps of which the beginning of one is recorded
            for each sample. None: there are none.

    Raises:
        KeyError: If there is no such format.
    """
    explore = rollout.explore
    if steps == rollout.num_steps:
        shared = steps
    elif explore.sigmas == "first":
        shared = steps // 2
    else:
        shared = 0
    applies = (
        rollout.regenerate
        and FORMATS[precision].quantize is not None
        and explore.exact_steps <= shared
        and rollout.noise_level == 0
        and (rollout.solver != "dpm2" or explore.exact_steps == 1)
        and (query_steps is None or query_steps.start >= explore.exact_steps)
    )
    return explore.exact_steps if applies else 0
