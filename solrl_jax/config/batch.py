"""How the terms of an iteration's loss are divided among optimizer steps, devices and batches."""

from solrl_jax.config.schema import Config


def effective_batch(config: Config, devices: int) -> dict[str, int]:
    """Sizes of one iteration's update. A term of the loss is one sample at one sigma.

    Args:
        config: The configuration, of which `train`, `rollout`, `algorithm` and `optimizer` are
            read.
        devices: The number of devices among which the terms are divided, at least 1.

    Returns:
        A dict with five counts. "terms": terms of the iteration. "optimizer_steps": optimizer steps
        of the iteration. "terms_per_step": terms of each step, on all devices together.
        "terms_per_step_per_device": the largest number of them on one device. "accumulation":
        batches over which each step accumulates its gradient, rounded up.
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
        devices: The number of devices of the mesh among which terms are divided.

    Returns:
        One line that begins with "batch: " and holds the counts of `effective_batch`, without a
        line break.
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
