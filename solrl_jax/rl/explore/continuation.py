"""Regeneration that continues from the latents that exploration reached in the training precision.

If the first steps of exploration have the sigmas and the policy of the regeneration, both reach the
same latents. Regeneration then starts from these latents of the kept candidates, not from noise.
"""

from solrl_jax.config.schema import Config, Rollout
from solrl_jax.config.values import Size
from solrl_jax.models.pipeline import Pipeline
from solrl_jax.quant.formats import FORMATS
from solrl_jax.rl.sampler import make_schedule


def find_query_steps(config: Config, pipeline: Pipeline, size: Size) -> range | None:
    """Returns the solver steps at which an objective on reward gradients is trained.

    The objective trains on the latents at the start of a step. `rl.generate.generate` draws one of
    the steps for each sample, from its seed. A user's objective (`module:function`) is imported.

    Args:
        config: The configuration. `algorithm.last_steps` is the number of last steps to draw from.
            If it is None, `algorithm.query_sigma` is the noise level of the only step. `rollout`
            gives the sigmas.
        pipeline: The model, whose shift some schedules use.
        size: Height and width of the images in pixels; for clips, followed by the number of frames.
            Some schedules derive their shift from it.

    Returns:
        Indices, from 0, of consecutive steps of the full schedule: the last ones, or the one that
        starts nearest to the noise level. None if the objective trains on anything else.

    Raises:
        InputError, ConfigError: If a user's objective cannot be imported, or has an unknown
            `trains_on` (`config.schema.Algorithm.trains_on`).
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
    `explore.exact_steps`. They have these sigmas in two cases: exploration has as many steps as the
    regeneration; or `explore.sigmas` is "first", which takes the first `steps // 2` exploration
    steps from the schedule of the regeneration, and `explore.exact_steps` is at most `steps // 2`.
    The result is 0, and regeneration starts from noise, in each of the following cases:

    * `regenerate` is False, so nothing is regenerated, or `explore.exact_steps` is 0.
    * The exploration format quantizes nothing. Exploration then has no exact steps of its own and
        keeps no latents between steps.
    * The sigmas of the exact steps differ from those of the regeneration.
    * `noise_level` is above 0. Objectives that train on transitions need the states before these
        steps too.
    * `solver` is "dpm2" and `explore.exact_steps` is 2 or more. From its third step on, this solver
        also uses the prediction of the step before, which is not kept. The second step does not,
        since the first sigma is 1, so one exact step can be taken over.
    * `query_steps` begins before the end of these steps, so that a state in them may be recorded.

    Args:
        rollout: The configuration of the rollout.
        precision: The exploration format, a key of `quant.formats.FORMATS`.
        steps: The number of exploration steps, above `explore.exact_steps`.
        query_steps: The indices, from 0, of the regeneration steps that are drawn from: for each
            sample, the state at the start of one of them is recorded. None: no state is drawn.

    Returns:
        `explore.exact_steps`, or 0.

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
