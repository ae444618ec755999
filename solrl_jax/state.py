"""`TrainState`: everything that training changes, hence everything that a checkpoint holds (with the cursor beside it)."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from solrl_jax import sharding
from solrl_jax.backbone import Params
from solrl_jax.config import Lora, Optimizer
from solrl_jax.policy.lora import Adapters, init_adapters


@partial(jax.tree_util.register_dataclass, data_fields=["step", "adapters", "old", "ema", "opt_state"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All float32 but the counter; adapter trees are of one structure (`policy.lora.Adapters`)."""

    step: Int[Array, ""]  # optimiser steps taken
    adapters: Adapters  # trained ("default" in the paper)
    old: Adapters  # samples the rollouts
    ema: Adapters  # is evaluated
    opt_state: Any


def make_optimizer(config: Optimizer) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) after a clip of the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(config.learning_rate, b1=config.beta1, b2=config.beta2, eps=config.eps, weight_decay=config.weight_decay),
    )


def init_state(key: Array, base: Params, targets: list[str], lora: Lora, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """The state before the first step: all three policies equal the base. Placed on `mesh` as `abstract_state` says."""
    return jax.jit(
        lambda key: _fresh(key, base, targets, lora, optimizer),
        out_shardings=jax.tree.map(lambda s: s.sharding, abstract_state(base, targets, lora, optimizer, mesh)),
    )(key)


def abstract_state(base: Params, targets: list[str], lora: Lora, optimizer: Optimizer, mesh: Mesh) -> Any:
    """The state's shapes, dtypes and shardings; nothing is allocated."""
    shapes = jax.eval_shape(lambda key: _fresh(key, base, targets, lora, optimizer), jax.random.key(0))
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(place, shapes, sharding.parameter_sharding(mesh, shapes))


def _fresh(key: Array, base: Params, targets: list[str], lora: Lora, optimizer: Optimizer) -> TrainState:
    adapters = init_adapters(key, base, targets, lora.rank)
    copy = lambda: jax.tree.map(jnp.copy, adapters)  # separate buffers: the state is donated
    return TrainState(jnp.zeros((), jnp.int32), adapters, copy(), copy(), make_optimizer(optimizer).init(adapters))
