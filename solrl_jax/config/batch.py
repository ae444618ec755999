"""How the samples of an iteration, and the terms of its loss, are divided into batches."""

from solrl_jax.config.schema import Config


def samples_per_device(config: Config, groups: int) -> int:
    """Returns how many samples one device generates at once.

    Args:
        config: The configuration of the run.
        groups: The number of parts that a batch of samples is split into over the devices
            (`parallel.sharding.row_groups`).

    Returns:
        `rollout.per_device_batch_size`, or the number of candidates of an iteration (for all of its
        prompts) divided by `groups`, rounded up, if that is smaller.
    """
    candidates = config.train.num_prompts * config.rollout.candidates
    return min(config.rollout.per_device_batch_size, _divide_up(candidates, groups))


def effective_batch(config: Config, groups: int) -> dict[str, int]:
    """Computes how the update of one iteration is divided up.

    The loss of an iteration has one term per kept sample and trained sigma (noise level); each
    optimizer step takes the mean of its terms.

    Args:
        config: The configuration of the run.
        groups: The number of parts that the terms are split into over the devices, at least 1
            (`parallel.sharding.row_groups`). Devices along the axes `sequence` and `tensor`, which
            share their samples, count as one.

    Returns:
        A dict of counts:

        * "terms": the terms of the iteration: its prompts times kept samples per prompt times
            trained sigmas.
        * "optimizer_steps": the optimizer steps of the iteration, `optimizer.steps_per_iteration`.
        * "terms_per_step": the terms of one optimizer step, on all devices together. A `Config`
            ensures that the steps divide the terms evenly.
        * "terms_per_step_per_device": the same in one of the `groups` parts, rounded up.
        * "accumulation": the number of batches, each of at most `optimizer.per_device_batch_size`
            terms, over which each of the `groups` parts accumulates the gradient of one optimizer
            step.
    """
    steps = config.optimizer.steps_per_iteration
    batch_size = config.optimizer.per_device_batch_size
    return {
        "terms": config.num_terms,
        "optimizer_steps": steps,
        "terms_per_step": config.num_terms // steps,
        "terms_per_step_per_device": _divide_up(config.num_terms, steps * groups),
        "accumulation": _divide_up(config.num_terms, steps * batch_size * groups),
    }


def describe_batch(config: Config, groups: int) -> str:
    """Returns the line about the batch that is printed when a run starts.

    Args:
        config: The configuration of the run.
        groups: The number of parts that the terms are split into over the devices, at least 1
            (`parallel.sharding.row_groups`): the data-parallel ranks.

    Returns:
        One line without a line break, e.g. "batch: 48 prompts x 24 kept x 6 sigmas = 6912 terms per
        iteration, in 1 optimizer step(s) of 6912; 864 per step on each of 8 data-parallel rank(s),
        accumulated over 54 batch(es) of 16".
    """
    batch = effective_batch(config, groups)
    prompts = config.train.num_prompts
    sigmas = config.num_train_sigmas
    batch_size = config.optimizer.per_device_batch_size
    return (
        f"batch: {prompts} prompts x {config.rollout.kept} kept x {sigmas} sigmas"
        f" = {batch['terms']} terms per iteration, in {batch['optimizer_steps']} optimizer step(s)"
        f" of {batch['terms_per_step']}; {batch['terms_per_step_per_device']} per step on each of"
        f" {groups} data-parallel rank(s), accumulated over {batch['accumulation']} batch(es) of"
        f" {batch_size}"
    )


def _divide_up(numerator: int, denominator: int) -> int:
    """Returns the quotient of two integers, rounded up to an integer.

    Args:
        numerator: Any integer.
        denominator: A positive integer.
    """
    return -(-numerator // denominator)
