"""The policy update: from kept samples to the trained parameters, in one jitted function.

See docs/method.md, sections 4 and 5, and DiffusionNFT (arXiv 2509.16117).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from solrl_jax.config.schema import Config
from solrl_jax.diffusion.sampler import interpolate
from solrl_jax.diffusion.schedule import Schedule
from solrl_jax.diffusion.seeds import draw_steps, normal, permutations
from solrl_jax.models.backbone import Backbone
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sums import Sum, add, add_each, join, zero
from solrl_jax.quant.mesh_axes import SEQUENCE
from solrl_jax.rl.objective import Objective, Step, TrainingTarget, Velocities, load_objective
from solrl_jax.rl.state import TrainState, make_optimizer
from solrl_jax.rl.trainable.trainable import (
    Adapter,
    Trainable,
    attach,
    split_adapters,
    within_bounds,
)

# After optimizer step t, the decay of the EMA is at most (1 + t) / (EMA_WARMUP + t).
EMA_WARMUP = 10
# By `algorithm.decay_type`, (start, rate, cap): after optimizer step t, the decay of the old policy
# is 0 up to t = start, and then min(rate (t - start), cap).
OLD_DECAY = {
    0: (0, 0.0, 0.0),
    1: (0, 0.001, 0.5),
    2: (75, 0.0075, 0.999),
    3: (0, 0.001, 0.3),
}
# The sum of the weights of the terms that count, among the metrics of micro-batches.
_USED = "used_terms"

Metrics: TypeAlias = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyBatch:
    """The b kept samples of an iteration, and the embeddings of their p prompts.

    All arrays are on every device. For an objective that trains on pairs, rows 2 i and 2 i + 1 are
    the better and the worse sample of pair i, with the same seed.

    Attributes:
        latents: The clean latents, float32.
        optimality: The probability q in [0, 1] that a sample is one to imitate.
        weight: 1, or 0 for a sample that must not be trained on.
        prompt: The row of each sample's prompt in `conditioning`.
        seeds: The seeds that training noise and sigmas are drawn from: the two words of a key each.
        conditioning: The prompt embeddings. Every leaf has a leading axis of p prompts.
        states: The recorded latents of each sample's trajectory, float32: those before the first
            step that adds noise and after each step that does. With `targets` there are just two:
            the latents before the step at which the sample is trained, and the clean latents
            predicted there. None if the objective trains on noised latents.
        targets: The latents that the objective has made from the gradient of the reward, by name,
            float32. None if the objective does not train on reward gradients.
    """

    latents: Float[Array, "b ... c"]
    optimality: Float[Array, " b"]
    weight: Float[Array, " b"]
    prompt: Int[Array, " b"]
    seeds: UInt32[Array, "b 2"]
    conditioning: Conditioning
    states: Float[Array, "b states ... c"] | None = None
    targets: dict[str, Float[Array, "b ... c"]] | None = None


@dataclasses.dataclass(frozen=True)
class _LossInputs:
    """The inputs of the loss of a micro-batch, apart from the trained parameters.

    Attributes:
        backbone: The networks, which predict velocities, and the mesh.
        config: The configuration of the run: its algorithm and optimizer sections and the scale of
            its adapters.
        base: The parameters of the base transformer, a nested dictionary. The policies are built on
            them; alone they are the reference policy.
        old: The trainable parameters of the old policy, by path.
        batch: All b kept samples of the iteration, with their prompts.
        schedule: The schedule on which the samples were generated. Training uses its sigmas,
            timesteps and embedded guidance and, for recorded steps (`PolicyBatch.states`), its
            solver coefficients.
        objective: The function (`Velocities`, `TrainingTarget`, algorithm section) -> (losses,
            metrics), one value per sample of a micro-batch.
        chosen: The indices of the steps of `schedule` at which each of the b samples of `batch` is
            trained, with one row per sample. A sample is trained `config.num_train_sigmas` times,
            and each time has one column ("slot").
    """

    backbone: Backbone
    config: Config
    base: Params
    old: Trainable
    batch: PolicyBatch
    schedule: Schedule
    objective: Objective
    chosen: Int[Array, "b slots"]


@partial(sharding.jit, static_argnums=(0, 1), static_argnames="objective", donate_argnums=2)
def update(
    backbone: Backbone,
    config: Config,
    state: TrainState,
    base: Params,
    batch: PolicyBatch,
    schedule: Schedule,
    objective: Objective | None = None,
) -> tuple[TrainState, Metrics]:
    """Takes the optimizer steps of one iteration, and then updates the old policy. The EMA is
    updated after each optimizer step.

    Each sample is trained at `config.num_train_sigmas` sigmas of its schedule, drawn without
    replacement from its seed. The objective decides how:

    * By default, the sample is noised anew to the sigma, with noise from its seed.
    * For objectives on transitions, the recorded step that starts at the sigma is used. Only steps
        that add noise are drawn.
    * For objectives on reward gradients, the one recorded state is used.

    Each pair of a sample and a sigma is a term of the loss. The terms are ordered by slot: first
    those at the first drawn sigma of each sample, then those at the second, and so on. In this
    order they are divided equally among the optimizer steps. Each optimizer step minimizes the mean
    of its terms, in micro-batches of at most `optimizer.per_device_batch_size` terms per device
    (devices along the mesh axes `sequence` and `tensor` share a micro-batch). The mean leaves out
    terms of samples of weight 0, and those of a micro-batch whose loss or gradient is not finite.
    Every process of a run must call it.

    Args:
        backbone: The networks and the mesh, which must also be the ambient mesh; static.
        config: The configuration of the run; static. The terms must divide among
            `optimizer.steps_per_iteration`.
        state: The state before the update. It is donated: its arrays are deleted.
        base: The parameters of the base transformer.
        batch: The kept samples, on every device.
        schedule: The schedule on which the samples were generated, with all steps of the
            regeneration. Its sigmas are used for training.
        objective: Overrides the configured objective; static. None: the one that
            `algorithm.objective` names. Pass the same function object every time, otherwise the
            update recompiles.

    Returns:
        The new state, with the shardings of the old one, and the metrics of the iteration as
        float32 scalars:

        * "loss" and the metrics of the objective by name (e.g. "loss/policy"): the mean over the
            terms of an optimizer step that are not left out (0 if all are), averaged over the
            optimizer steps.
        * "grad_norm": the norm of the gradient before clipping, mean over the optimizer steps.
        * "skipped_micro_batches": the number of micro-batches, in all optimizer steps, whose loss
            or gradient was not finite.
        * "old_decay": the weight of the previous old policy in the new one (`old_decay`).

    Raises:
        InputError: While tracing, if an objective `module:function` cannot be imported.
        ValueError: While tracing, if the network does not support the size of the latents.
        TypeError: While tracing, if the terms do not divide among the optimizer steps.
    """
    problem = _LossInputs(
        backbone=backbone,
        config=config,
        base=base,
        old=state.old,
        batch=batch,
        schedule=schedule,
        objective=objective or load_objective(config.algorithm.objective),
        chosen=_choose_steps(batch, schedule, config),
    )
    num_terms = len(batch.weight) * config.num_train_sigmas
    terms = jnp.arange(num_terms).reshape(config.optimizer.steps_per_iteration, -1)
    state, metrics = jax.lax.scan(partial(_optimizer_step, problem), state, terms)
    metrics = {
        name: values.sum() if name == "skipped_micro_batches" else values.mean()
        for name, values in metrics.items()
    }
    decay = old_decay(jnp.asarray(state.step), config.algorithm.decay_type)
    state = dataclasses.replace(state, old=blend(state.old, state.adapters, decay))
    # The shardings are those of the input state, so that the next iteration does not recompile.
    state = jax.lax.with_sharding_constraint(
        state, sharding.parameter_sharding(backbone.mesh, state)
    )
    return state, metrics | {"old_decay": decay}


def _choose_steps(batch: PolicyBatch, schedule: Schedule, config: Config) -> Int[Array, "b slots"]:
    """Draws the steps of the schedule at which each sample is trained, from its seed.

    Args:
        batch: The kept samples. With `batch.targets`, each sample is trained at the one step at
            which the gradient of the reward was taken; it is drawn again from the seed. Otherwise
            `num_train_sigmas` different steps are drawn: with `batch.states` only steps that add
            noise, without it any steps.
        schedule: The schedule on which the samples were generated.
        config: `num_train_sigmas` is the number of steps per sample; with `batch.targets` it must
            be 1. Gradients of the reward are taken at one of the `algorithm.last_steps` last steps
            or, if that is None, at the step that starts nearest to `algorithm.query_sigma`.

    Returns:
        The indices of the steps in the schedule, int32, with one row per sample and one column for
        each time that the sample is trained ("slot").
    """
    if batch.targets is not None:
        algorithm = config.algorithm
        first, count = schedule.locate_query_steps(algorithm.last_steps, algorithm.query_sigma)
        return draw_steps(batch.seeds, first, count)[:, None]
    steps = permutations(batch.seeds, "sigmas", schedule.steps)
    if batch.states is not None:  # only steps that add noise are recorded, so they come first
        deterministic = jnp.asarray(schedule.noise_std)[steps] == 0
        steps = jnp.take_along_axis(steps, jnp.argsort(deterministic, axis=1), axis=1)
    return steps[:, : config.num_train_sigmas]


def old_decay(step: Int[Array, ""], decay_type: int) -> Float[Array, ""]:
    """Returns the weight d of the old policy in its update after an iteration.

        old = d old + (1 - d) trained

    Args:
        step: The number of optimizer steps taken so far, t.
        decay_type: `algorithm.decay_type`. 0 gives 0; 1 gives min(0.001 t, 0.5); 2 gives 0 up to t
            = 75 and then min(0.0075 (t - 75), 0.999); 3 gives min(0.001 t, 0.3).

    Returns:
        The weight in [0, 1), float32. With 0, the trained policy replaces the old one.

    Raises:
        KeyError: If there is no such decay type.
    """
    start, rate, cap = OLD_DECAY[decay_type]
    return jnp.clip((step - start).astype(jnp.float32) * rate, 0.0, cap)


def blend(kept: Trainable, new: Trainable, decay: Float[Array, ""]) -> Trainable:
    """Computes `decay * kept + (1 - decay) * new` for each leaf, in float32.

    Args:
        kept: The slowly moving parameters, float32 or BF16. The result has their dtypes.
        new: The trained parameters, float32: a tree with the structure and shapes of `kept`.
        decay: The weight of `kept`, in [0, 1].

    Returns:
        The blended parameters, a new tree with the structure, shapes and dtypes of `kept`.
    """
    return jax.tree.map(lambda k, n: (decay * k + (1 - decay) * n).astype(k.dtype), kept, new)


def _optimizer_step(
    problem: _LossInputs, state: TrainState, terms: Int[Array, " terms"]
) -> tuple[TrainState, Metrics]:
    """Takes one optimizer step on the mean loss over some terms, and one step of the EMA.

    The optimizer (`make_optimizer`) clips the gradient. Parameters that are trained in full are
    clipped to their bounds, if they have any. The decay of the EMA is min((1 + t) / (10 + t),
    `algorithm.ema_decay`), where t is the number of optimizer steps taken, this one included.

    Args:
        problem: The inputs of the loss, apart from the trained parameters.
        state: The state before the optimizer step.
        terms: The numbers of the terms of the loss. With b samples, term n is sample n mod b at the
            step `problem.chosen[n mod b, n div b]` of the schedule.

    Returns:
        The state after the step, whose old policy is unchanged, and the metrics of the step as
        scalars: "loss" and those of the objective, as means over the terms whose sample has weight
        1 (`PolicyBatch.weight`), outside of skipped micro-batches; "grad_norm", the norm of the
        gradient before clipping; and "skipped_micro_batches", the number of micro-batches whose
        loss or gradient was not finite. If no term is left, the gradient is 0, but the step is
        still taken, with momentum and weight decay.
    """
    config = problem.config
    batch = problem.batch
    total = jnp.maximum(batch.weight[terms % len(batch.weight)].sum(), 1.0)

    loss = partial(_micro_batch_loss, problem, total=total)
    micro = min(config.optimizer.per_device_batch_size, len(terms))
    gradient, metrics = _accumulate(loss, state.adapters, terms, micro, problem.backbone.mesh)
    # The mean leaves out the terms of skipped micro-batches, as it does samples of weight 0. If no
    # micro-batch was skipped, the factor is exactly 1.
    factor = total / jnp.maximum(metrics.pop(_USED), 1.0)
    gradient = jax.tree.map(lambda x: factor * x, gradient)
    metrics = {
        name: value if name == "skipped_micro_batches" else factor * value
        for name, value in metrics.items()
    }
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
    trainable: Trainable,
    terms: Int[Array, " terms"],
    micro: int,
    mesh: Mesh,
) -> tuple[Trainable, Metrics]:
    """Accumulates the gradient of the loss over all terms, one micro-batch at a time per group of
    devices.

    A group is the devices along the mesh axes `sequence` and `tensor`, which share samples;
    different groups take different micro-batches at the same time. The sums of gradients are
    compensated (`parallel.sums`), so they almost never depend on the order of their terms or on the
    mesh. Along `sequence`, however, the gradient of a micro-batch is a plain sum over tokens.
    Metrics are plain sums.

    The gradients of adapters are summed within each group, and only the sums are communicated. For
    arrays that are trained in full, such sums would take several times the memory of the network on
    each device. They are therefore divided over the groups, and each group receives its part of the
    gradient of each micro-batch.

    Args:
        loss: (trainable, terms, valid) -> (loss, metrics) of one micro-batch, as sums over its
            terms. `valid` is 0 for terms that pad the last micro-batches, else 1.
        trainable: The trained parameters by path. The loss is differentiated with respect to them.
        terms: The numbers of all terms of the optimizer step (as in `_optimizer_step`), which are
            passed to `loss` one micro-batch at a time.
        micro: The number of terms of one micro-batch.
        mesh: The mesh of the run, which must be the ambient one.

    Returns:
        The gradient, with the structure and shapes of `trainable`, and a dict of sums over all
        micro-batches: the metrics of `loss`, its value as "loss", and the number of micro-batches
        whose loss or gradient is not finite as "skipped_micro_batches". Such micro-batches add
        nothing to the other sums. The gradient of adapters is on every device. The gradient of
        arrays that are trained in full is sharded like these arrays.
    """
    adapters, arrays = split_adapters(trainable)
    groups = sharding.row_groups(mesh)

    def split(x):
        return jnp.pad(x, (0, -len(terms) % (groups * micro))).reshape(-1, groups, micro)

    def micro_batch(terms: Int[Array, " micro"], valid: Float[Array, " micro"]):
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(trainable, terms, valid)
        finite = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(gradient))

        def keep(tree):
            return jax.tree.map(lambda x: jnp.where(finite, x, 0.0), tree)

        return keep(gradient), keep(metrics | {"loss": value}) | {
            "skipped_micro_batches": 1.0 - finite
        }

    # `spmd_axis_name` does not work with a `shard_map` that leaves axes to the partitioner, which
    # sequence parallelism uses. The partitioner then infers the sharding of the groups from inputs
    # and sums.
    axes = sharding.AXES[:2] if mesh.shape[SEQUENCE] == 1 else None
    on_groups = jax.vmap(micro_batch, spmd_axis_name=axes)

    def accumulate(sums: tuple[Sum, Sum], inputs):
        adapter_sum, array_sum = sums
        gradients, metrics = on_groups(*map(sharding.split_rows, inputs))
        adapter_gradients, array_gradients = split_adapters(gradients)
        adapter_sum = sharding.split_rows(add(adapter_sum, adapter_gradients))
        array_sum = add_each(array_sum, _divide_over_groups(array_gradients), groups)
        return (adapter_sum, array_sum), metrics

    def one_per_group(tree):
        return jax.tree.map(lambda x: jnp.zeros((groups, *x.shape), x.dtype), tree)

    array_shares = jax.tree.map(lambda x: x[0], _divide_over_groups(one_per_group(arrays)))
    empty = (sharding.split_rows(zero(one_per_group(adapters))), zero(array_shares))
    inputs = (split(terms), split(jnp.ones(len(terms))))
    (adapter_sum, array_sum), metrics = jax.lax.scan(accumulate, empty, inputs)
    gradient = _join_adapter_sum(adapter_sum, adapters) | _join_array_sum(array_sum, arrays, mesh)
    return gradient, {name: x.sum() for name, x in metrics.items()}


def _join_adapter_sum(total: Sum, adapters: dict[str, Adapter]) -> dict[str, Adapter]:
    """Adds up the gradients of adapters that were summed within each group of devices.

    Each group of devices adds up the sums of all groups for one part of the elements, and then
    receives the other parts.

    Args:
        total: The sums by path (a compensated sum, `parallel.sums.Sum`), whose arrays have one row
            per group of devices.
        adapters: The adapters by path, which give the shapes of the gradients.

    Returns:
        The sums over all groups by path, float32, in the shapes of the adapters, on every device.
    """
    shares = Sum(_divide_over_groups(total.rounded), _divide_over_groups(total.rounding_error))
    return jax.tree.map(_gather, join(shares).value, adapters)


def _join_array_sum(total: Sum, arrays: dict[str, Array], mesh: Mesh) -> dict[str, Array]:
    """Gathers the sums of the gradients of arrays that are trained in full.

    Args:
        total: The sums by path (a compensated sum, `parallel.sums.Sum`): flat arrays, padded with
            zeros, that are divided over the groups of devices (the mesh axes `data` and `fsdp`).
        arrays: The trained arrays by path, which give the shapes of the gradients.
        mesh: The mesh of the run.

    Returns:
        The gradients by path, float32, with the shapes and shardings of the arrays.
    """
    gradients = jax.tree.map(_gather, total.value, arrays)
    return jax.lax.with_sharding_constraint(gradients, sharding.parameter_sharding(mesh, arrays))


def _gather(x: Float[Array, " padded_size"], like: Array) -> Array:
    """Gathers a flat array that is divided over the devices, on every device.

    Args:
        x: The flat elements of the result, padded with zeros at the end.
        like: An array with the shape of the result. Its values are not read.

    Returns:
        The elements in that shape, with the dtype of `x`.
    """
    return sharding.replicate(x)[: like.size].reshape(like.shape)


def _divide_over_groups(tree: Any) -> Any:
    """Flattens all axes of arrays but the first, and reshards them from rows to columns.

    Each group of devices starts with one row and ends with some columns of all rows.

    Args:
        tree: A tree of float arrays with one row per group of devices. A group is the devices at
            the same position of the axes `data` and `fsdp` of the ambient mesh.

    Returns:
        The tree with flat rows, whose length is padded with zeros to a multiple of the number of
        groups. Every device has all rows, and the columns are divided over the groups.
    """

    def divide(x: Float[Array, " groups *shape"]) -> Float[Array, " groups padded_size"]:
        flat = x.reshape(len(x), -1)
        # The constraint on the first axis keeps the partitioner from splitting other axes of `x`.
        flat = sharding.split_rows(jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % len(x)))))
        return jax.lax.with_sharding_constraint(flat, PartitionSpec(None, sharding.AXES[:2]))

    return jax.tree.map(divide, tree)


def _micro_batch_loss(
    problem: _LossInputs,
    adapters: Trainable,
    terms: Int[Array, " m"],
    valid: Float[Array, " m"],
    total: Float[Array, ""],
) -> tuple[Float[Array, ""], Metrics]:
    """Computes the contribution of one micro-batch to the mean loss over all terms of an optimizer
    step.

    The trained, the old and the reference policy are evaluated at the same latents. If
    `algorithm.kl_fraction` is below 1, the reference is evaluated only at that fraction of the
    terms (`reference_terms`). Their KL losses get a larger weight, which keeps the mean unbiased
    (`Velocities.reference_weight`). Terms of samples of weight 0 and padding contribute 0, also to
    the gradient.

    Args:
        problem: The samples, the policies and the objective.
        adapters: The trainable parameters of the trained policy by path, adapters and whole arrays.
        terms: The numbers of the terms. With b samples, term n is sample n mod b at the step
            `problem.chosen[n mod b, n div b]` of the schedule.
        valid: 0 for terms that pad the micro-batch, else 1.
        total: The total weight of the terms of the optimizer step, by which sums are divided; at
            least 1.

    Returns:
        The loss and the metrics of the objective. All of them are sums over the terms of the
        micro-batch divided by `total`. The metrics also have the sum of the weights of the terms,
        not divided, under the name `_USED`.
    """
    batch = problem.batch
    config = problem.config
    row = terms % len(batch.weight)
    slot = terms // len(batch.weight)
    # Samples of weight 0 may have any values, also NaN. They are zeroed before the loss. A `where`
    # after the loss would not suffice, because its gradient would be 0 * NaN.
    weight = valid * batch.weight[row]
    counts = (weight > 0).reshape(-1, *(1,) * (batch.latents.ndim - 1))
    time, target = _target(
        problem, row, slot, lambda x: sharding.replicate(jnp.where(counts, x, 0.0))
    )
    conditioning = jax.tree.map(lambda c: c[batch.prompt[row]], batch.conditioning)
    scale = config.lora.alpha / config.lora.rank
    guidance = jnp.asarray(problem.schedule.embedded_guidance)

    def velocity(params, subset: Int[Array, " n"] | slice = slice(None)):
        cond = jax.tree.map(lambda c: c[subset], conditioning)
        v = problem.backbone.velocity(params, target.x[subset], cond, time[subset], guidance)
        return v.astype(jnp.float32)

    trained = velocity(attach(problem.base, adapters, scale))
    old = velocity(attach(problem.base, problem.old, scale))
    if config.algorithm.kl_fraction == 1:
        velocities = Velocities(trained, old, velocity(problem.base))
    else:
        subset = reference_terms(batch.seeds[row], slot, config.algorithm.kl_fraction)
        reference = jax.lax.stop_gradient(trained).at[subset].set(velocity(problem.base, subset))
        reference_weight = jnp.zeros(len(terms)).at[subset].set(len(terms) / len(subset))
        velocities = Velocities(trained, old, reference, reference_weight)
    losses, metrics = problem.objective(velocities, target, config.algorithm)

    def mean(values):
        return jnp.where(weight > 0, values, 0.0).sum() / total

    means = {name: mean(values) for name, values in metrics.items()}
    return mean(losses), means | {_USED: weight.sum()}


def reference_terms(
    seeds: UInt32[Array, "m 2"], slot: Int[Array, " m"], fraction: float
) -> Int[Array, " n"]:
    """Draws the terms of a micro-batch at which the reference policy is evaluated.

    A term is a sample at one of the sigmas at which it is trained. Every subset of n of the m terms
    is equally probable. The draw is made from the seeds (stream "reference"); it depends on the
    arguments alone, not on the mesh.

    Args:
        seeds: The seed of the sample of each term, the two words of a key.
        slot: The slot of each term, counted from 0: the column of `_LossInputs.chosen`. It gives
            the terms of one sample different random numbers.
        fraction: The fraction of the terms, in (0, 1]. n is `fraction * m` rounded up.

    Returns:
        The indices of n different terms in the micro-batch, int32, in no particular order.
    """
    size = len(slot)
    count = math.ceil(round(fraction * size, 9))
    # The position in the micro-batch distinguishes terms that share a seed: pairs, and padding.
    number = slot * size + jnp.arange(size)
    return jnp.argsort(normal(seeds, "reference", (), number))[:count]


def _target(
    problem: _LossInputs,
    row: Int[Array, " m"],
    slot: Int[Array, " m"],
    clean: Callable[[Array], Array],
) -> tuple[Float[Array, " m"], TrainingTarget]:
    """Makes the training targets of a micro-batch from samples that are noised anew, or from their
    recorded steps or states.

    A term is a sample at one of the steps at which it is trained. The noise of a term is drawn from
    the stream "training" of its sample's seed. It depends on the seed and the slot alone.

    Args:
        problem: The samples (`batch`), their schedule, and the steps at which each sample is
            trained (`chosen`). If `batch.states` is None, the clean latents are noised anew.
            Otherwise the targets are recorded steps, or with `batch.targets` the first recorded
            state.
        row: The index of the sample of each term in `problem.batch`.
        slot: The column of `problem.chosen` that has the step of each term.
        clean: A function of latents with one row per term. It replaces the rows of padding and of
            samples of weight 0, which may be NaN, by zeros.

    Returns:
        The timestep of each term for the network, in (0, 1000], and the training target.
    """
    batch = problem.batch
    schedule = problem.schedule
    step = problem.chosen[row, slot]
    x0 = clean(batch.latents[row])
    sigmas = jnp.asarray(schedule.sigmas)
    time = jnp.asarray(schedule.timesteps)[step]
    sigma = sigmas[step]
    optimality = batch.optimality[row]
    if batch.states is None:
        noise = sharding.replicate(normal(batch.seeds[row], "training", x0.shape[1:], slot))
        return time, TrainingTarget(interpolate(x0, noise, sigma), x0, sigma, optimality)
    if batch.targets is not None:
        targets = {name: clean(latents[row]) for name, latents in batch.targets.items()}
        x = clean(batch.states[row, 0])
        return time, TrainingTarget(x, x0, sigma, optimality, targets=targets)
    table = jnp.asarray(schedule.table)
    a, b, _, _, std = table[step].T
    # Counted from the first recorded step.
    number = step - jnp.argmax(jnp.asarray(schedule.noise_std) > 0)
    step_taken = Step(
        clean(batch.states[row, number + 1]), a, b, std, sigma - jnp.append(sigmas, 0.0)[step + 1]
    )
    return time, TrainingTarget(clean(batch.states[row, number]), x0, sigma, optimality, step_taken)
