"""DRaFT-1 (arXiv 2309.17400): the gradient of the reward of a sample through the last step of its
sampler.

    loss = -<g, x' - x'_old>          x' = x - sigma v: the last step of every solver, to sigma 0

The paper's DRaFT-K follows the gradient of -R(x') through the last K steps; earlier steps get no
gradient. The last step ends at the clean latents that are predicted in it, so DRaFT-1 is ReFL at
the last step, and the loss is the same function. `configs/objective/draft.yaml` therefore sets
`algorithm.last_steps` to 1. K above 1 is refused: with K = 3, `tiny` learned no faster, and each
iteration cost more (docs/objectives.md).
"""

from solrl_jax.rl.objectives.refl import refl

draft = refl
