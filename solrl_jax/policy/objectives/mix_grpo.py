"""MixGRPO (arXiv 2507.21802): Flow-GRPO's loss on a window of stochastic steps; the others follow the ODE.

The window is the rollout's (`rollout.window`, `rollout.window_every`); only its steps are recorded and trained.
"""

from solrl_jax.config.schema import Policy as PolicyConfig
from solrl_jax.policy.objective import PerRow, Target, Velocities
from solrl_jax.policy.objectives.flow_grpo import flow_grpo


def mix_grpo(velocities: Velocities, target: Target, policy: PolicyConfig) -> tuple[PerRow, dict[str, PerRow]]:
    """As `flow_grpo`; the paper has no KL."""
    return flow_grpo(velocities, target, policy)
