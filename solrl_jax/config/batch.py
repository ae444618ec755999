"""How the terms of an iteration's loss are divided among optimizer steps, devices and batches."""

from solrl_jax.config.schema import Config


def effective_batch(config: Config, devices: int) -> dict[str, int]:
    """Sizes of one iteration's update. A term of the loss is one sample at one sigma.

    Args:
        config: The configuration of the run. The terms are `train.num_prompts` prompts *
            `rollout.kept` samples each * the trained sigmas; `optimizer.steps_per_iteration`
            divides them among steps, and `optimizer.per_device_batch_size` is the most terms that
            one device differentiates at once.
        devices: The number of devices among which the terms of a step are divided, at least 1.

    Returns:
        A dict with five counts. "terms": terms of the iteration. "optimizer_steps": optimizer steps
        of the iteration. "terms_per_step": terms of each step, on all devices together.
        "terms_per_step_per_device": the largest number of them on one device (rounded up).
        "accumulation": batches over which each device accumulates the gradient of a step, rounded
        up.
    """
    steps = config.optimizer.steps_per_iteration
    batch_size = config.optimizer.per_device_batch_size
    return {
        "terms": config.num_terms,
        "optimizer_steps": steps,
        "terms_per_step": config.num_terms // steps,
        "terms_per_step_per_device": _divide_up(config.num_terms, steps * devices),
        "accumulation": _divide_up(config.num_terms, steps * batch_size * devices),
    }


def describe_batch(config: Config, devices: int) -> str:
    """Returns the line about the batch that is printed when a run starts.

    Args:
        config: The configuration of the run.
        devices: The number of devices among which the terms are divided, at least 1.

    Returns:
        One line without a line break, e.g. "batch: 48 prompts x 24 kept x 6 sigmas = 6912 terms per
        iteration, in 1 optimizer step(s) of 6912; 864 per step on each of 8 device(s), accumulated
        over 54 batch(es) of 16".
    """
    batch = effective_batch(config, devices)
    prompts = config.train.num_prompts
    sigmas = config.num_train_sigmas
    batch_size = config.optimizer.per_device_batch_size
    return (
        f"batch: {prompts} prompts x {config.rollout.kept} kept x {sigmas} sigmas"
        f" = {batch['terms']} terms per iteration, in {batch['optimizer_steps']} optimizer step(s)"
        f" of {batch['terms_per_step']}; {batch['terms_per_step_per_device']} per step on each of"
        f" {devices} device(s), accumulated over {batch['accumulation']} batch(es) of {batch_size}"
    )


def _divide_up(numerator: int, denominator: int) -> int:
    """Returns the quotient of two integers, rounded up to an integer.

    Args:
        numerator: Any integer.
        denominator: A positive integer.
    """
    return -(-numerator // denominator)
