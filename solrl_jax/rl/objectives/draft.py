"""DRaFT-1 (arXiv 2309.17400): the gradient of the reward of a sample through the last step of its
sampler.

    loss = -<g, x' - x'_old>          x' = x - sigma v: the last step of every solver, to sigma 0

The paper's DRaFT-K follows the gradient of -R(x') through the last K steps, and earlier steps have
none. The last step ends at the clean latents that are predicted in it, so with K = 1 that is ReFL
at the last step, and the loss is the same function. `algorithm.last_steps`, which
`configs/objective/draft.yaml` sets to 1, says so. K above 1 is not built.
"""

from solrl_jax.rl.objectives.refl import refl

draft = refl
