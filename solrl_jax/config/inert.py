"""Fields that have no effect in a run because of what other fields say."""

from solrl_jax.config.schema import Config

# By the name of each built-in objective, the fields of `algorithm` that it reads, without those
# that all objectives read. Reward gradients are taken at one sigma, which `query_sigma` or
# `last_steps` chooses. For an objective that is not here, such as `module:function`, any field may
# have an effect.
_READS = {
    "nft": {"timestep_fraction", "beta"},
    "awm": {"timestep_fraction", "clip_range"},
    "opsd": {"query_sigma", "last_steps", "beta", "target_radius", "target_steps"},
    "refl": {"query_sigma", "last_steps"},
    "draft": {"query_sigma", "last_steps"},
    "dpo": {"timestep_fraction", "beta"},
    "flow_grpo": {"timestep_fraction", "clip_range"},
    "mix_grpo": {"timestep_fraction", "clip_range"},
    "dance_grpo": {"timestep_fraction", "clip_range"},
    "flow_cps": {"timestep_fraction", "clip_range"},
    "grpo_guard": {"timestep_fraction", "clip_range"},
    "flow_dppo": {"timestep_fraction", "kl_mask_threshold"},
}
_READ_BY_SOME = set().union(*_READS.values())
_UNQUANTIZED = ("bf16", "fp32")  # values of `rollout.explore.precision`


def inert_fields(config: Config) -> set[str]:
    """Returns the names of fields that have no effect in a run, because of the values of other
    fields.

    For example, "algorithm.clip_range" if the objective does not clip, and "lora" if all parameters
    are trained in full. It need not find all such fields.

    Args:
        config: The configuration of the run.

    Returns:
        Dotted names of fields. The name of a section, such as "lora", stands for all of its fields.
    """
    inert: set[str] = set()
    rollout = config.rollout
    if config.model.attention != "mhla":
        inert |= {"model.mhla_blocks", "model.mhla_released", "model.mhla_norm"}
    if rollout.explore.precision in _UNQUANTIZED:
        inert |= {"model.quantization", "rollout.explore.correction_rank"}
    if rollout.noise_level == 0:
        inert |= {"rollout.sde_window_size", "rollout.sde_window_every"}
    if rollout.sde_window_size is None:
        inert.add("rollout.sde_window_every")
    if rollout.schedule == "flux":
        inert.add("rollout.shift")
    objective = config.algorithm.objective
    unread = _READ_BY_SOME - _READS.get(objective, _READ_BY_SOME)
    inert |= {f"algorithm.{field}" for field in unread}
    if config.algorithm.last_steps is not None:
        inert.add("algorithm.query_sigma")
    if config.train.parameters == "all":
        inert.add("lora")
    return inert
