"""MixGRPO (arXiv 2507.21802): the loss of Flow-GRPO on a window of stochastic steps.

The other steps follow the ODE. The rollout sets the window (`rollout.sde_window_size`,
`rollout.sde_window_every`). Only its steps are recorded and trained on. The paper has no KL term,
so `configs/objective/mix_grpo.yaml` sets `kl_coef` to 0.
"""

from solrl_jax.rl.objectives.flow_grpo import flow_grpo

mix_grpo = flow_grpo
