"""Objectives: their protocol, how they are loaded, and the terms that several of them share.

An objective is one function. It takes the velocities that three policies predict, the training
target, and the algorithm section of the configuration, and returns one loss and some metrics per
sample. Each objective of the package is a file in `rl/objectives/`, has a line in
`config.schema.OBJECTIVES` that says what it trains on, and a file with its settings in
`configs/objective/`.

An objective of your own is a function `my_module:loss`, named by `algorithm.objective`. Its
attribute `trains_on` says which kind of samples it needs:

    def loss(velocities, target, algorithm): ...
    loss.trains_on = "pairs"      # or "samples", which is the default, or "transitions"

An objective that trains on the gradient of the reward has a second function, which makes targets
from that gradient:

    @reward_gradients(targets)
    def loss(velocities, target, algorithm): ...
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from solrl_jax.config.plugins import import_objective
from solrl_jax.config.schema import Algorithm as AlgorithmConfig
from solrl_jax.config.schema import is_plugin
from solrl_jax.errors import InputError

Latents: TypeAlias = Float[Array, " b *latent"]
PerSample: TypeAlias = Float[Array, " b"]
# Clean latents -> the reward of each sample, and its gradient by these latents, float32. The reward
# is the weighted sum of the scores of the decoded images. Each call decodes and scores them.
RewardGradient: TypeAlias = Callable[[Latents], tuple[PerSample, Latents]]
# (function for the gradient of the reward, clean latents that the old policy predicts, algorithm
# section of the configuration) -> latents by name, one row per sample. It is called outside of jit,
# once per chunk of samples.
MakeTargets: TypeAlias = Callable[[RewardGradient, Latents, AlgorithmConfig], dict[str, Latents]]
F = TypeVar("F", bound=Callable)
# The smallest divisor of `self_weighted_error`.
SMALLEST_ERROR = 1e-5
# The largest probability ratio among the metrics. An infinite one would make their mean infinite.
MAX_RATIO = 1e6


class Velocities(NamedTuple):
    """The velocities `noise - x0` that three policies predict at the same latents, float32.

    Attributes:
        trained: The prediction of the trained policy, the only one with a gradient.
        old: The prediction of the old policy, which generated the samples.
        reference: The prediction of the base model, without adapters or trained arrays. Never None;
            XLA does not compute it if neither loss nor metrics depend on it. With
            `algorithm.kl_fraction` below 1 it is evaluated for some samples only; the others have a
            copy of `trained` without gradient.
        reference_weight: The weight of each sample in the KL term, which keeps its mean unbiased.
            Samples for which the reference was evaluated have the number of rows of this
            micro-batch divided by the number of its evaluated rows; the others have 0. None means 1
            for all.
    """

    trained: Latents
    old: Latents
    reference: Latents
    reference_weight: PerSample | None = None


class Step(NamedTuple):
    """A recorded step of an SDE solver, a draw from the Gaussian N(a x + b x0_hat, std^2).

    The step started at x (`TrainingTarget.x`), where a policy with velocity v predicts the clean
    latents `x0_hat = x - sigma v`. The mean of the step therefore differs between policies.

    Attributes:
        after: The latents that the step ended at.
        a: The coefficient of x in the mean.
        b: The coefficient of x0_hat in the mean.
        std: The standard deviation of the Gaussian, above 0.
        length: The sigma before the step minus that after it, above 0.
    """

    after: Latents
    a: PerSample
    b: PerSample
    std: PerSample
    length: PerSample


class TrainingTarget(NamedTuple):
    """The samples that one micro-batch is trained on.

    For an objective that trains on pairs, row 2 i is the better sample of a pair and row 2 i + 1
    the worse one, at the same noise and sigma. Samples of weight 0 (`PolicyBatch.weight`) do not
    count: padding, pairs with equal rewards, and samples without a finite reward or target. Their
    clean and recorded latents and their targets are replaced by zeros. `x` is then zero, or
    `sigma noise` if the samples are noised.

    Attributes:
        x: The latents at which the velocities are predicted: the noised sample `(1 - sigma) x0 +
            sigma noise`, or a recorded state of the trajectory.
        x0: The clean latents of the samples, at the end of their trajectories (sigma 0).
        sigma: The noise level of `x`, in (0, 1].
        optimality: The probability q in [0, 1] that the sample is one to imitate. `2 q - 1` is the
            advantage divided by its bound, `algorithm.adv_clip_max`.
        step: The recorded step from `x`. None unless the objective trains on transitions.
        targets: The latents that the objective has made from the gradient of the reward, by name.
            None unless it trains on reward gradients.
    """

    x: Latents
    x0: Latents
    sigma: PerSample
    optimality: PerSample
    step: Step | None = None
    targets: dict[str, Latents] | None = None


@runtime_checkable
class Objective(Protocol):
    """A loss: a pure function of velocities and samples, which is traced under jit.

    The attribute `trains_on` of a user's function says what its samples are: "samples" (noised
    samples, also without the attribute), "pairs" (of a better and a worse sample at the same
    noise), "transitions" (recorded solver steps), or "reward_gradients" (set by the decorator
    `reward_gradients`). For objectives of the package, `config.schema.OBJECTIVES` says it.
    `isinstance` accepts any callable: it does not check the arguments.
    """

    def __call__(
        self, velocities: Velocities, target: TrainingTarget, algorithm: AlgorithmConfig
    ) -> tuple[PerSample, dict[str, PerSample]]:
        """Computes the loss.

        Args:
            velocities: The predictions of the trained, the old and the reference policy at
                `target.x`, float32.
            target: The training samples: noised or recorded latents, sigmas and optimalities (the
                probability in [0, 1] that a sample is one to imitate).
            algorithm: The algorithm section of the configuration, which has the coefficients of the
                losses, such as `beta`, `kl_coef` and `clip_range`.

        Returns:
            One loss per sample, whose mean is minimized, and metrics by name with one value per
            sample, whose means are written to the run's metrics. Samples of weight 0
            (`TrainingTarget`) are left out of the means.
        """
        ...


def load_objective(name: str) -> Objective:
    """Loads an objective by its name in the configuration.

    For `module:function`, this imports the module, which may be in the working directory. As a side
    effect, the working directory is appended to `sys.path`, unless it or "" is in it.

    Args:
        name: The value of `algorithm.objective`: a key of `config.schema.OBJECTIVES` such as "nft"
            or "flow_grpo", which is a function in the file of that name in `rl/objectives/`; or
            `module:function`.

    Returns:
        The function: (velocities, target, algorithm) -> (losses, metrics), as in `Objective`. Its
        signature is not checked. Repeated calls return the same function.

    Raises:
        InputError: If importing the module of `module:function` raises any exception, the module
            has no such attribute, or the attribute is not callable.
        ImportError: If the name does not have the form `module:function` and there is no file of
            that name in `rl/objectives/`.
    """
    if not is_plugin(name):
        return getattr(importlib.import_module(f"solrl_jax.rl.objectives.{name}"), name)
    objective = import_objective(name)
    if not callable(objective):
        raise InputError(f"algorithm.objective={name!r}: is not a function")
    return objective


def reward_gradients(targets: MakeTargets) -> Callable[[F], F]:
    """Decorates an objective that trains on the gradient of the reward.

    Each kept sample is trained at one state of its trajectory, the start of a solver step. If
    `algorithm.last_steps` is None, it is the step that starts nearest to `algorithm.query_sigma`.
    Otherwise it is one of that many last steps, drawn from the sample's seed. Before the update,
    `targets` makes latents from the clean latents that the old policy predicts there. The update
    passes them to the objective, without a gradient, as `target.targets`.

    Args:
        targets: A function (gradient, anchor, algorithm) -> latents by name. `anchor` has the
            predicted clean latents, float32. `gradient` maps clean latents to the reward of each
            sample and its gradient. A call of `gradient` takes about four times as long as decoding
            and scoring. The number of calls should not depend on the values of the latents, because
            plans count them in a trial with zeros. A sample is not trained on if a value of its
            returned latents is not finite. The function is called outside of jit, once per chunk of
            samples (`samples_per_call`; the last chunk has padding). An exception that it raises
            ends the iteration.

    Returns:
        A decorator, which sets the attributes `trains_on` and `targets` of the objective and
        returns it.
    """

    def decorate(objective: F) -> F:
        vars(objective).update(trains_on="reward_gradients", targets=targets)
        return objective

    return decorate


def make_targets_of(objective: Objective) -> MakeTargets:
    """Returns the function with which an objective makes targets from the gradient of the reward.

    Args:
        objective: An objective that trains on reward gradients.

    Returns:
        The function (gradient, anchor, algorithm) -> latents by name. `gradient` maps clean latents
        to their rewards and gradients, `anchor` has the clean latents that the old policy predicts,
        and `algorithm` is the section of the configuration.

    Raises:
        InputError: If the objective has no attribute `targets` that is callable.
    """
    targets = getattr(objective, "targets", None)
    if not callable(targets):
        raise InputError(
            f"algorithm.objective: {objective!r} trains on reward gradients and has no function "
            "`targets`; decorate it with solrl_jax.rl.objective.reward_gradients(targets)"
        )
    return targets


def mean_per_sample(x: Latents) -> PerSample:
    """Returns the mean over all axes but the first.

    Args:
        x: An array with one row per sample and at least one further axis.

    Returns:
        One mean per row, in the dtype of `x`.
    """
    return x.mean(tuple(range(1, x.ndim)))


def expand_like(values: PerSample, x: Latents) -> Float[Array, " b *ones"]:
    """Reshapes one value per sample so that it broadcasts against latents.

    Args:
        values: One value per sample.
        x: Latents with one row per sample. Only their number of axes matters.

    Returns:
        The values [b, 1, ..., 1], with as many axes as `x`.
    """
    return values.reshape(-1, *(1,) * (x.ndim - 1))


def distance_to_reference(velocities: Velocities) -> PerSample:
    """Computes the KL term of an objective: `mean((v - v_ref)^2)` over the dimensions of a sample,
    times `velocities.reference_weight`.

    With `algorithm.kl_fraction` below 1, it is 0 for samples for which the reference was not
    evaluated, and scaled up for the others, so its mean over samples has the same expectation.

    Args:
        velocities: The velocities of the trained (v) and the reference policy (v_ref, which gets no
            gradient), and the weights of the reference. The old policy is not read.

    Returns:
        One value per sample, at least 0.
    """
    reference = jax.lax.stop_gradient(velocities.reference)
    distance = mean_per_sample(jnp.square(velocities.trained - reference))
    weight = velocities.reference_weight
    return distance if weight is None else weight * distance


def add_reference_term(
    loss: PerSample, metrics: dict[str, PerSample], kl: PerSample, kl_coef: float
) -> tuple[PerSample, dict[str, PerSample]]:
    """Adds the KL term to a loss, and the metric "loss/kl" to its metrics.

    If `kl_coef` is 0, both are returned unchanged. Nothing then reads `kl`, so XLA does not
    evaluate the reference policy, one of the three predictions of the update.

    Args:
        loss: One loss per sample, without the term.
        metrics: Metrics by name, with one value per sample.
        kl: One distance to the reference policy per sample: `distance_to_reference`, or the
            `step_divergence` that is computed from it.
        kl_coef: The weight of the term, `algorithm.kl_coef`, a Python number.

    Returns:
        The loss `loss + kl_coef kl`, and a new dict of the metrics with `kl` as "loss/kl".
    """
    if kl_coef == 0:
        return loss, metrics
    return loss + kl_coef * kl, metrics | {"loss/kl": kl}


def distance_to_old(velocities: Velocities) -> PerSample:
    """Computes `mean((v - v_old)^2)` over the dimensions of a sample, for the velocities of the
    trained (v) and the old policy (v_old, which gets no gradient).

    Args:
        velocities: The velocities that the trained and the old policy predict. The reference is not
            read.

    Returns:
        One value per sample, at least 0.
    """
    return mean_per_sample(jnp.square(velocities.trained - jax.lax.stop_gradient(velocities.old)))


def step_divergence(distance: PerSample, target: TrainingTarget) -> PerSample:
    """Computes the Kullback-Leibler divergence of a recorded step between two policies, as the mean
    over dimensions: `mean((m_1 - m_2)^2) / (2 std^2)`.

    Both policies make the step a Gaussian with the standard deviation `std`. Their means `m = a x +
    b (x - sigma v)` differ by `b sigma` times the difference of their velocities.

    Args:
        distance: `mean((v_1 - v_2)^2)`, the mean squared difference of the two velocities over
            dimensions: the result of `distance_to_reference` or `distance_to_old`.
        target: The recorded steps (`step`, with b and `std`) and their sigmas.

    Returns:
        One value per sample, at least 0.

    Raises:
        AssertionError: If `target.step` is None, because nothing was recorded.
    """
    step = target.step
    assert step is not None
    return distance * (step.b * target.sigma) ** 2 / (2 * step.std**2)


def self_weighted_error(velocity: Latents, target: TrainingTarget, clean: Latents) -> PerSample:
    """Computes the squared error of the clean latents that a velocity predicts, divided by their
    absolute error (DiffusionNFT, arXiv 2509.16117, section 3.3).

    Args:
        velocity: The velocity at `target.x`. It predicts the clean latents `x - sigma velocity`.
        target: The latents x, and their sigmas.
        clean: The clean latents that should be predicted.

    Returns:
        One value per sample. Both errors are means over dimensions. The divisor has no gradient and
        is at least 1e-5.
    """
    error = target.x - expand_like(target.sigma, target.x) * velocity - clean
    weight = jax.lax.stop_gradient(jnp.maximum(mean_per_sample(jnp.abs(error)), SMALLEST_ERROR))
    return mean_per_sample(jnp.square(error)) / weight


def matching_error(velocity: Latents, target: TrainingTarget) -> PerSample:
    """Computes the flow-matching loss: the mean over dimensions of a velocity's squared error.

    Args:
        velocity: The predicted velocity at `target.x`.
        target: The samples, whose true velocity is `(x - x0) / sigma`, which equals `noise - x0`.

    Returns:
        One loss per sample.
    """
    return mean_per_sample(jnp.square(velocity - _true_velocity(target)))


def matching_gap(velocity: Latents, other: Latents, target: TrainingTarget) -> PerSample:
    """Computes the flow-matching loss (`matching_error`, a mean over dimensions) of one velocity
    minus that of another.

    It is computed from the difference of the two velocities. The result is therefore exactly 0
    where they are equal, and does not lose digits where they are close.

    Args:
        velocity: The predicted velocity at `target.x` whose loss counts positively.
        other: The predicted velocity at `target.x` whose loss is subtracted. The result has a
            gradient with respect to it, too.
        target: The samples, whose true velocity is `(x - x0) / sigma`.

    Returns:
        One difference per sample, negative where the first velocity is nearer to the true one.
    """
    true_velocity = _true_velocity(target)
    return mean_per_sample((velocity - other) * (velocity + other - 2 * true_velocity))


def _true_velocity(target: TrainingTarget) -> Latents:
    """Returns the true velocity at `target.x`: the one from `x0` to `x`, `(x - x0) / sigma`.

    Args:
        target: The samples. Its sigmas are above 0; a sigma of 0 would give NaN.

    Returns:
        The velocities `noise - x0`, in the shape of `target.x`.
    """
    return (target.x - target.x0) / expand_like(target.sigma, target.x)


def log_ratio(velocity: Latents, old: Latents, target: TrainingTarget) -> PerSample:
    """Computes the log-ratio of the probabilities of a recorded step under two policies: `ln
    p(after | x) - ln p_old(after | x)`.

    Both densities are Gaussians with the same standard deviation. As in Flow-GRPO (arXiv
    2505.05470), their logarithms are averaged over the dimensions of a sample, not summed. The
    result is exactly 0 where the velocities are equal.

    Args:
        velocity: The velocity that the policy of p predicts at `target.x`.
        old: The velocity that the policy of p_old predicts there. Its gradient is not stopped here.
        target: The recorded steps: the latents x and `after`, the coefficients a and b, `std` and
            sigma.

    Returns:
        One log-ratio per sample, above 0 where the first policy makes the step more probable.

    Raises:
        AssertionError: If `target.step` is None, because nothing was recorded.
    """
    assert target.step is not None
    a = expand_like(target.step.a, target.x)
    b = expand_like(target.step.b, target.x)
    sigma = expand_like(target.sigma, target.x)
    both = 2 * (a * target.x + b * target.x - target.step.after) - b * sigma * (velocity + old)
    return mean_per_sample(b * sigma * (velocity - old) * both) / (2 * target.step.std**2)


def clipped_policy(
    log_r: PerSample, target: TrainingTarget, algorithm: AlgorithmConfig, scale: float
) -> tuple[PerSample, dict[str, PerSample]]:
    """Computes the clipped loss of PPO (arXiv 1707.06347, eq. 7).

        max(-A R, -A clip(R, 1 - c, 1 + c))

    Args:
        log_r: The natural logarithm of the probability ratio R of the trained to the old policy.
        target: Its optimality q gives the advantage `A = scale (2 q - 1)`.
        algorithm: `clip_range` is c: the ratio is clipped to the range from 1 - c to 1 + c.
        scale: The advantage of a sample with q = 1.

    Returns:
        One loss per sample, and metrics with one value per sample: "loss/policy" (the loss),
        "ratio" (R without gradient, at most `MAX_RATIO`, 1e6) and "ratio/clipped" (1 if R differs
        from 1 by more than c, else 0). If R overflows to infinity, the loss is `-A (1 + c)` without
        a gradient where A is at least 0. Where A is below 0, the clip does not bound the loss, and
        it is then infinite.
    """
    advantage = scale * (2 * target.optimality - 1)
    ratio = jax.lax.stop_gradient(jnp.exp(log_r))
    c = algorithm.clip_range
    # Where the loss is clipped at 1 + c, the ratio may have overflowed. It must not reach the
    # gradient, where 0 * inf is NaN.
    capped = (advantage >= 0) & (ratio > 1 + c)
    bounded = jnp.exp(jnp.where(capped, 0.0, log_r))
    loss = jnp.maximum(-advantage * bounded, -advantage * jnp.clip(bounded, 1 - c, 1 + c))
    loss = jnp.where(capped, -advantage * (1 + c), loss)
    return loss, {
        "loss/policy": loss,
        "ratio": jnp.minimum(ratio, MAX_RATIO),
        "ratio/clipped": (jnp.abs(ratio - 1) > c).astype(jnp.float32),
    }
