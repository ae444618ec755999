"""What an iteration's update consists of, by a configuration and a number of devices."""

from solrl_jax.config.schema import Config


def effective_batch(config: Config, devices: int) -> dict[str, int]:
    """What one iteration's update consists of, in all and on each of `devices` devices. A term is a sample at one sigma."""
    terms = config.train.num_prompts * config.rollout.kept * config.num_train_sigmas
    steps = config.optimizer.steps_per_iteration
    return {
        "terms": terms,
        "optimizer_steps": steps,
        "terms_per_step": terms // steps,
        "terms_per_step_per_device": -(-terms // (steps * devices)),
        "accumulation": -(-terms // (steps * config.optimizer.per_device_batch_size * devices)),
    }


def describe_batch(config: Config, devices: int) -> str:
    """`effective_batch` as the line that is printed when a run starts."""
    return (
        f"batch: {config.train.num_prompts} prompts x {config.rollout.kept} kept x {config.num_train_sigmas} sigmas = {{terms}} terms"
        " an iteration, in {optimizer_steps} optimiser step(s) of {terms_per_step}; {terms_per_step_per_device} a step on each"
        f" of {devices} device(s), accumulated over {{accumulation}} micro-batch(es) of {config.optimizer.per_device_batch_size}"
    ).format(**effective_batch(config, devices))
