"""Fields that have no effect in a run because of what other fields say."""

from solrl_jax.config.schema import OBJECTIVES, Config, is_plugin

_ON_GRADIENTS = tuple(name for name, kind in OBJECTIVES.items() if kind == "reward_gradients")
# Built-in objectives that read a field of `algorithm`.
_READERS = {
    "beta": ("nft", "opsd", "dpo"),
    "clip_range": ("awm", "flow_grpo", "mix_grpo", "dance_grpo", "flow_cps", "grpo_guard"),
    "kl_mask_threshold": ("flow_dppo",),
    "query_sigma": _ON_GRADIENTS,
    "last_steps": _ON_GRADIENTS,
    "target_radius": ("opsd",),
    "target_steps": ("opsd",),
    # Reward gradients are taken at one sigma.
    "timestep_fraction": tuple(name for name in OBJECTIVES if name not in _ON_GRADIENTS),
}
_UNQUANTIZED = ("bf16", "fp32")  # values of `rollout.explore.precision`


def inert_fields(config: Config) -> set[str]:
    """Returns the names of fields that have no effect in a run, because of the values of other
    fields.

    For example, "algorithm.clip_range" if the objective does not clip, and "lora" if all parameters
    are trained in full. It need not find all such fields.

    Args:
        config: The configuration of the run.

    Returns:
        Dotted names of fields, and of sections if all of their fields have no effect.
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
    if not is_plugin(config.algorithm.objective):
        for field, objectives in _READERS.items():
            if config.algorithm.objective not in objectives:
                inert.add(f"algorithm.{field}")
    if config.algorithm.last_steps is not None:
        inert.add("algorithm.query_sigma")
    if config.train.parameters == "all":
        inert.add("lora")
    return inert
