"""Fields that have no effect in a run because of what other fields say."""

from solrl_jax.config.schema import Config, is_plugin

# Built-in objectives that read a field of `algorithm`.
_READERS = {
    "beta": ("nft", "dpo"),
    "clip_range": ("awm", "flow_grpo", "mix_grpo", "dance_grpo", "flow_cps", "grpo_guard"),
    "kl_mask_threshold": ("flow_dppo",),
}
_UNQUANTIZED = ("bf16", "fp32")  # values of `rollout.explore.precision`


def inert_fields(config: Config) -> set[str]:
    """Dotted names of sections and fields without effect in a run with this configuration.

    A field that switches something off, such as `rollout.noise_level=0`, is not inert; fields of
    what it switches off may be. Not all of these are known: only those that `Returns` lists. The
    precision "auto" counts as a format that quantizes, whatever it resolves to.

    Args:
        config: The configuration of a run. Only its values count, not which of them were set by the
            user.

    Returns:
        A new set, possibly empty, of: "model.mhla_blocks", "model.mhla_released" and
        "model.mhla_norm" unless `model.attention` is "mhla"; "model.quantization" and
        "rollout.explore.correction_rank" if `rollout.explore.precision` is "bf16" or "fp32";
        "rollout.sde_window_size" with `rollout.noise_level=0`, and "rollout.sde_window_every" then
        or if `rollout.sde_window_size` is None; "rollout.shift" with the schedule "flux";
        "algorithm.beta", "algorithm.clip_range" and "algorithm.kl_mask_threshold" if the objective
        is one of the package that does not read them; and "lora" (for all of its fields) with
        `train.parameters=all`.
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
    if config.train.parameters == "all":
        inert.add("lora")
    return inert
