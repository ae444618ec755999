"""MixGRPO (arXiv 2507.21802): Flow-GRPO's loss on a window of stochastic steps; the others follow the ODE.

The window is the rollout's (`rollout.sde_window_size`, `rollout.sde_window_every`); only its steps are recorded and trained. The paper has
no KL: `configs/objective/mix_grpo.yaml` gives it no weight.
"""

from solrl_jax.rl.objectives.flow_grpo import flow_grpo

mix_grpo = flow_grpo
