"""The policy update: from kept samples to new adapters, in one jitted function with donated state (spec, sections 4 and 5)."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from solrl_jax.backbone.backbone import Backbone, Conditioning, Params
from solrl_jax.config.schema import Config
from solrl_jax.flow.sampler import interpolate
from solrl_jax.numerics.randomness import stream
from solrl_jax.parallel import sharding
from solrl_jax.parallel.sums import Sum, add, join, zero
from solrl_jax.policy.lora import Adapters, attach
from solrl_jax.policy.objective import nft_loss
from solrl_jax.policy.state import TrainState, make_optimizer

EMA_WARMUP = 10
# decay of `old` by optimiser step t: 0 before `flat`, then min(rate (t - flat), cap) (facts of DiffusionNFT's return_decay)
OLD_DECAY = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}


@partial(jax.tree_util.register_dataclass, data_fields=["latents", "optimality", "weight", "prompt", "seeds"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PolicyBatch:
    """The kept samples of an iteration, B rows."""

    latents: Float[Array, "b h w c"]  # clean, float32, as sampled in the training precision
    optimality: Float[Array, " b"]  # q in [0, 1]
    weight: Float[Array, " b"]  # 1, or 0 for a row that must not be trained on
    prompt: Int[Array, " b"]  # row of the conditioning
    seeds: UInt32[Array, "b 2"]  # the candidates': training noise and sigmas are drawn from them


@partial(sharding.jit, static_argnums=(0, 1), donate_argnums=2)
def update(
    backbone: Backbone, config: Config, state: TrainState, base: Params, conditioning: Conditioning, batch: PolicyBatch,
    sigmas: Float[Array, " steps"], times: Float[Array, " steps"],
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:  # fmt: skip
    """Optimiser step(s) on every kept sample at a random part of its schedule; then the EMA and the old policy follow.

    Terms are (sample, sigma) pairs: each sample at `config.trained_sigmas` sigmas of the rollout's own schedule (`sigmas`,
    without the final 0; `times`: what the network is told there), drawn without replacement, with fresh noise. Gradients
    are averaged over all terms of a step; a micro-batch whose loss is not finite contributes nothing and is counted.
    """
    rows, slots = len(batch.weight), config.trained_sigmas
    chosen = jax.vmap(partial(_draw_sigmas, count=len(sigmas)))(batch.seeds)[:, :slots]
    terms = jnp.arange(rows * slots).reshape(config.optimizer.steps_per_iteration, -1)
    optimizer = make_optimizer(config.optimizer)
    loss = partial(_micro_batch_loss, backbone, config, base, conditioning, batch, state.old, chosen, sigmas, times)

    def optimizer_step(state: TrainState, terms: Int[Array, " terms"]):
        total = jnp.maximum(batch.weight[terms % rows].sum(), 1.0)
        gradient, metrics = _accumulate(loss, state.adapters, terms, total, config.optimizer.micro_batch, backbone.mesh)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        change, opt_state = optimizer.update(gradient, state.opt_state, state.adapters)
        adapters, step = optax.apply_updates(state.adapters, change), state.step + 1
        decay = jnp.minimum((1 + step) / (EMA_WARMUP + step), config.policy.ema_decay)
        return TrainState(step, adapters, state.old, blend(state.ema, adapters, decay), opt_state), metrics

    state, metrics = jax.lax.scan(optimizer_step, state, terms)
    metrics = {name: values.sum() if name == "skipped_micro_batches" else values.mean() for name, values in metrics.items()}
    decay = old_decay(state.step, config.policy.decay_type)
    state = dataclasses.replace(state, old=blend(state.old, state.adapters, decay))
    # where it came from, so that the next iteration runs the same programs
    state = jax.lax.with_sharding_constraint(state, sharding.parameter_sharding(backbone.mesh, state))
    return state, metrics | {"old_decay": decay}


def old_decay(step: Int[Array, ""], decay_type: int) -> Float[Array, ""]:
    """How much of the old policy stays after an iteration that ended at optimiser step `step`."""
    flat, rate, cap = OLD_DECAY[decay_type]
    return jnp.clip((step - flat).astype(jnp.float32) * rate, 0.0, cap)


def blend(kept: Adapters, new: Adapters, decay: Float[Array, ""]) -> Adapters:
    """`decay * kept + (1 - decay) * new`, leaf by leaf."""
    return jax.tree.map(lambda k, n: decay * k + (1 - decay) * n, kept, new)


def _draw_sigmas(seed: UInt32[Array, " 2"], count: int) -> Int[Array, " {count}"]:
    return jax.random.permutation(stream(jax.random.wrap_key_data(seed), "sigmas"), count)


def _accumulate(
    loss: Any, adapters: Adapters, terms: Int[Array, " terms"], total: Array, micro: int, mesh: Mesh
) -> tuple[Adapters, dict[str, Array]]:
    """The gradient of the loss over all `terms`, `micro` of them at a time on each group of devices that shares rows.

    Micro-batches are the same on every mesh, and sums do not depend on the order of their terms (`numerics.sums`); so neither
    do gradients on the mesh. A group adds up its own, and only the sums are sent.
    """
    groups = sharding.row_groups(mesh)
    split = lambda x: jnp.pad(x, (0, -len(terms) % (groups * micro))).reshape(-1, groups, micro)

    def micro_batch(terms: Int[Array, " micro"], valid: Float[Array, " micro"]):
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(adapters, terms, valid, total)
        finite = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(gradient))
        keep = lambda tree: jax.tree.map(lambda x: jnp.where(finite, x, 0.0), tree)
        return keep(gradient), keep(metrics | {"loss": value}) | {"skipped_micro_batches": 1.0 - finite}

    on_groups = jax.vmap(micro_batch, spmd_axis_name=sharding.AXES[:2])

    def one(sums: Sum, inputs):
        gradients, metrics = on_groups(*map(sharding.split_rows, inputs))
        return sharding.split_rows(add(sums, gradients)), metrics

    sums = sharding.split_rows(zero(jax.tree.map(lambda x: jnp.zeros((groups, *x.shape), x.dtype), adapters)))
    sums, metrics = jax.lax.scan(one, sums, (split(terms), split(jnp.ones(len(terms)))))
    # each device joins all groups' sums of some of the numbers, and is then told those of the others
    joined = join(Sum(*(jax.tree.map(_dealt, part) for part in (sums.rounded, sums.lost)))).value
    gradient = jax.tree.map(lambda x, like: sharding.whole(x)[: like.size].reshape(like.shape), joined, adapters)
    return gradient, {name: x.sum() for name, x in metrics.items()}


def _dealt(x: Float[Array, " groups *shape"]) -> Float[Array, "groups padded_size"]:
    """`x`, of which each group holds its own row whole, dealt out by columns."""
    rows = x.reshape(len(x), -1)
    rows = sharding.split_rows(jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % len(x)))))  # said, or axes of `x` are split
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(None, sharding.AXES[:2]))


def _micro_batch_loss(
    backbone: Backbone, config: Config, base: Params, conditioning: Conditioning, batch: PolicyBatch, old: Adapters,
    chosen: Int[Array, "b slots"], sigmas: Array, times: Array,
    adapters: Adapters, terms: Int[Array, " m"], valid: Float[Array, " m"], total: Array,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:  # fmt: skip
    """This micro-batch's share of the mean loss over `total` terms. A term's number says its row and its slot of `chosen`."""
    row, slot = terms % len(batch.weight), terms // len(batch.weight)
    x0 = sharding.whole(batch.latents[row])
    draw = lambda seed, slot: jax.random.normal(
        jax.random.fold_in(stream(jax.random.wrap_key_data(seed), "training"), slot), x0.shape[1:], jnp.float32
    )
    noise = sharding.whole(jax.vmap(draw)(batch.seeds[row], slot))
    sigma, time = sigmas[chosen[row, slot]], times[chosen[row, slot]]
    x = interpolate(x0, noise, sigma)
    of_rows = jax.tree.map(lambda c: c[batch.prompt[row]], conditioning)
    scale, guidance = config.lora.alpha / config.lora.rank, jnp.float32(config.rollout.guidance)
    velocity = lambda params: backbone.velocity(params, x, of_rows, time, guidance).astype(jnp.float32)

    losses, metrics = nft_loss(
        velocity(attach(base, adapters, scale)), velocity(attach(base, old, scale)), velocity(base),
        x, x0, sigma, batch.optimality[row],
        beta=config.policy.beta, kl_weight=config.policy.kl_weight, advantage_clip=config.policy.advantage_clip,
    )  # fmt: skip
    # `where`, not a product: a row that must not count may hold anything
    weight = valid * batch.weight[row]
    mean = lambda values: jnp.where(weight > 0, values, 0.0).sum() / total
    return mean(losses), {name: mean(values) for name, values in metrics.items()}
