"""The policy update: from kept samples to the trained parameters, in one jitted function with donated state.

docs/method.md, sections 4 and 5; DiffusionNFT, arXiv 2509.16117.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from solrl_jax.config.schema import Config
from solrl_jax.diffusion.sampler import interpolate
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import normal, permutations
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sums import Sum, add, add_each, join, zero
from solrl_jax.rl.objective import Objective, Step, TrainingTarget, Velocities, load_objective
from solrl_jax.rl.state import TrainState, make_optimizer
from solrl_jax.rl.trainable.trainable import Trainable, attach, within_bounds

EMA_WARMUP = 10
# Decay of `old` by optimiser step t: 0 up to `start`, then min(rate (t - start), cap), as (start, rate, cap) by `decay_type`.
OLD_DECAY = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}

Metrics: TypeAlias = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyBatch:
    """The kept samples of an iteration, b rows, and the p prompts that they were sampled for."""

    latents: Float[Array, "b h w c"]  # clean, float32, as sampled in the training precision
    optimality: Float[Array, " b"]  # q in [0, 1]
    weight: Float[Array, " b"]  # 1, or 0 for a row that must not be trained on
    prompt: Int[Array, " b"]  # row of the conditioning
    seeds: UInt32[Array, "b 2"]  # of the candidates: training noise and sigmas are drawn from them
    conditioning: Conditioning  # every leaf has a leading axis of p prompts
    # around the stochastic steps, one state after another, float32; None: the objective trains on noised latents
    states: Float[Array, "b states h w c"] | None = None


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What the loss of a micro-batch reads beside the trained adapters."""

    backbone: Backbone
    config: Config
    base: Params
    old: Trainable
    batch: PolicyBatch
    schedule: Schedule
    objective: Objective
    chosen: Int[Array, "b slots"]  # the steps of the grid at which each row is trained


@partial(sharding.jit, static_argnums=(0, 1), static_argnames="objective", donate_argnums=2)
def update(
    backbone: Backbone,
    config: Config,
    state: TrainState,
    base: Params,
    batch: PolicyBatch,
    grid: Schedule,
    objective: Objective | None = None,
) -> tuple[TrainState, Metrics]:
    """One iteration's optimiser step(s) on the kept samples; then the EMA and the old policy follow.

    A term is a (sample, sigma) pair. Each sample is trained at `config.num_train_sigmas` sigmas of the rollout's own `grid`,
    drawn without replacement, with fresh noise; or at as many recorded steps. Gradients are averaged over all terms of a step.
    A micro-batch whose loss is not finite contributes nothing and is counted. `state` is donated. objective: static; None: the
    one that the configuration names.
    """
    rows = len(batch.weight)
    slots = config.num_train_sigmas
    chosen = permutations(batch.seeds, "sigmas", grid.steps)
    if batch.states is not None:  # steps that add noise come first
        chosen = jnp.take_along_axis(
            chosen, jnp.argsort(jnp.asarray(grid.table)[chosen, 4] == 0, axis=1), axis=1
        )
    chosen = chosen[:, :slots]
    objective = objective or load_objective(config.algorithm.objective)
    problem = _Problem(backbone, config, base, state.old, batch, grid, objective, chosen)
    terms = jnp.arange(rows * slots).reshape(config.optimizer.steps_per_iteration, -1)
    state, metrics = jax.lax.scan(partial(_optimizer_step, problem), state, terms)
    metrics = {
        name: values.sum() if name == "skipped_micro_batches" else values.mean()
        for name, values in metrics.items()
    }
    decay = old_decay(jnp.asarray(state.step), config.algorithm.decay_type)
    state = dataclasses.replace(state, old=blend(state.old, state.adapters, decay))
    # where the state came from, so that the next iteration runs the same programs
    state = jax.lax.with_sharding_constraint(
        state, sharding.parameter_sharding(backbone.mesh, state)
    )
    return state, metrics | {"old_decay": decay}


def old_decay(step: Int[Array, ""], decay_type: int) -> Float[Array, ""]:
    """How much of the old policy stays after an iteration that ended at optimiser step `step`."""
    start, rate, cap = OLD_DECAY[decay_type]
    return jnp.clip((step - start).astype(jnp.float32) * rate, 0.0, cap)


def blend(kept: Trainable, new: Trainable, decay: Float[Array, ""]) -> Trainable:
    """`decay * kept + (1 - decay) * new`, leaf by leaf, in float32; in the dtypes of `kept`."""
    return jax.tree.map(lambda k, n: (decay * k + (1 - decay) * n).astype(k.dtype), kept, new)


def _optimizer_step(
    problem: _Problem, state: TrainState, terms: Int[Array, " terms"]
) -> tuple[TrainState, Metrics]:
    """One step of the optimiser on the mean loss over `terms`, and of the EMA."""
    config = problem.config
    batch = problem.batch
    total = jnp.maximum(batch.weight[terms % len(batch.weight)].sum(), 1.0)

    def loss(adapters, terms, valid):
        return _micro_batch_loss(problem, adapters, terms, valid, total)

    micro = min(config.optimizer.per_device_batch_size, len(terms))
    gradient, metrics = _accumulate(loss, state.adapters, terms, micro, problem.backbone.mesh)
    metrics["grad_norm"] = optax.tree.norm(gradient)
    change, opt_state = make_optimizer(config.optimizer).update(
        gradient, state.opt_state, state.adapters
    )
    adapters = optax.apply_updates(state.adapters, change)
    step = state.step + 1
    adapters = within_bounds(adapters, problem.backbone.parameter_table())
    decay = jnp.minimum((1 + step) / (EMA_WARMUP + step), config.algorithm.ema_decay)
    return TrainState(
        step, adapters, state.old, blend(state.ema, adapters, decay), opt_state
    ), metrics


def _accumulate(
    loss: Callable[..., tuple[Array, Metrics]],
    adapters: Trainable,
    terms: Int[Array, " terms"],
    micro: int,
    mesh: Mesh,
) -> tuple[Trainable, Metrics]:
    """The gradient of the loss over all `terms`, `micro` of them at a time on each group of devices that shares rows.

    Micro-batches are the same on every mesh, and the sums do not depend on the order of their terms (`parallel.sums`). So the
    gradient does not depend on the mesh. Of adapters, a group adds up its own micro-batches, and only the sums are sent. Sums
    of whole arrays would take several times the memory of the network on each device: they are divided over all devices, which
    are sent their shares of each micro-batch, and the gradient is then divided as the weights are.
    """
    whole = {path: own for path, own in adapters.items() if not isinstance(own, dict)}
    groups = sharding.row_groups(mesh)

    def split(x):
        return jnp.pad(x, (0, -len(terms) % (groups * micro))).reshape(-1, groups, micro)

    def micro_batch(terms: Int[Array, " micro"], valid: Float[Array, " micro"]):
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(adapters, terms, valid)
        finite = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(gradient))

        def keep(tree):
            return jax.tree.map(lambda x: jnp.where(finite, x, 0.0), tree)

        return keep(gradient), keep(metrics | {"loss": value}) | {
            "skipped_micro_batches": 1.0 - finite
        }

    on_groups = jax.vmap(micro_batch, spmd_axis_name=sharding.AXES[:2])

    def one(sums: tuple[Sum, Sum], inputs):
        gradients, metrics = on_groups(*map(sharding.split_rows, inputs))
        dealt = {path: _dealt(gradients.pop(path)) for path in whole}
        return (
            sharding.split_rows(add(sums[0], gradients)),
            add_each(sums[1], dealt, groups),
        ), metrics

    nothing = jax.tree.map(lambda x: jnp.zeros((groups, *x.shape), x.dtype), adapters)
    dealt = {path: _dealt(nothing.pop(path))[0] for path in whole}
    start = sharding.split_rows(zero(nothing)), zero(dealt)
    (sums, shares), metrics = jax.lax.scan(one, start, (split(terms), split(jnp.ones(len(terms)))))
    # each device joins all groups' sums of its share of the numbers, and is then sent the other shares
    joined = (
        join(Sum(*(jax.tree.map(_dealt, part) for part in (sums.rounded, sums.lost)))).value
        | shares.value
    )
    gradient = jax.tree.map(
        lambda x, like: sharding.replicate(x)[: like.size].reshape(like.shape), joined, adapters
    )
    placed = jax.lax.with_sharding_constraint(
        {p: gradient[p] for p in whole}, sharding.parameter_sharding(mesh, whole)
    )
    return gradient | placed, {name: x.sum() for name, x in metrics.items()}


def _dealt(x: Float[Array, " groups *shape"]) -> Float[Array, " groups padded_size"]:
    """`x`, of which each group holds its own row, divided over all devices by columns."""
    rows = x.reshape(len(x), -1)
    # the constraint on rows keeps the partitioner from splitting other axes of `x`
    rows = sharding.split_rows(jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % len(x)))))
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(None, sharding.AXES[:2]))


def _micro_batch_loss(
    problem: _Problem,
    adapters: Trainable,
    terms: Int[Array, " m"],
    valid: Float[Array, " m"],
    total: Float[Array, ""],
) -> tuple[Float[Array, ""], Metrics]:
    """This micro-batch's share of the mean loss over `total` terms.

    terms: numbers that say a row of the batch and a slot of `problem.chosen`; valid: 0 for terms that fill up the micro-batch.
    """
    batch = problem.batch
    config = problem.config
    row = terms % len(batch.weight)
    slot = terms // len(batch.weight)
    # SeedBatch of weight 0 may hold anything. They are zeroed before the loss: the gradient of `where` would be 0 * NaN.
    weight = valid * batch.weight[row]
    counts = (weight > 0).reshape(-1, *(1,) * (batch.latents.ndim - 1))
    time, target = _target(
        problem, row, slot, lambda x: sharding.replicate(jnp.where(counts, x, 0.0))
    )
    of_rows = jax.tree.map(lambda c: c[batch.prompt[row]], batch.conditioning)
    scale = config.lora.alpha / config.lora.rank
    guidance = jnp.asarray(problem.schedule.embedded_guidance)

    def velocity(params):
        return problem.backbone.velocity(params, target.x, of_rows, time, guidance).astype(
            jnp.float32
        )

    velocities = Velocities(
        velocity(attach(problem.base, adapters, scale)),
        velocity(attach(problem.base, problem.old, scale)),
        velocity(problem.base),
    )
    losses, metrics = problem.objective(velocities, target, config.algorithm)

    def mean(values):
        return jnp.where(weight > 0, values, 0.0).sum() / total

    return mean(losses), {name: mean(values) for name, values in metrics.items()}


def _target(
    problem: _Problem,
    row: Int[Array, " m"],
    slot: Int[Array, " m"],
    clean: Callable[[Array], Array],
) -> tuple[Float[Array, " m"], TrainingTarget]:
    """What is trained on: a row noised anew, or one of its recorded steps; and the time that the network is told.

    clean: zeroes latents of rows that must not count.
    """
    batch = problem.batch
    grid = problem.schedule
    step = problem.chosen[row, slot]
    x0 = clean(batch.latents[row])
    sigmas = jnp.asarray(grid.sigmas)
    time = jnp.asarray(grid.timesteps)[step]
    sigma = sigmas[step]
    optimality = batch.optimality[row]
    if batch.states is None:
        noise = sharding.replicate(normal(batch.seeds[row], "training", x0.shape[1:], slot))
        return time, TrainingTarget(interpolate(x0, noise, sigma), x0, sigma, optimality)
    table = jnp.asarray(grid.table)
    a, b, _, _, std = table[step].T
    number = step - jnp.argmax(table[:, 4] > 0)  # of the recorded steps
    taken = Step(
        clean(batch.states[row, number + 1]), a, b, std, sigma - jnp.append(sigmas, 0.0)[step + 1]
    )
    return time, TrainingTarget(clean(batch.states[row, number]), x0, sigma, optimality, taken)
