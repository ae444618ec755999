"""`TrainState`: everything that training changes and that a checkpoint contains."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from solrl_jax.config.schema import Lora, Optimizer
from solrl_jax.errors import InputError
from solrl_jax.models.loading.weights import Params
from solrl_jax.parallel import sharding
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.rl.trainable.lora_settings import Table
from solrl_jax.rl.trainable.trainable import (
    Adapter,
    Trainable,
    TrainedPaths,
    flatten,
    init_adapters,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training: three sets of trainable parameters, and the state of the optimizer.

    Each set is a dict from the path of a parameter to its LoRA adapter {"a": [..., in, rank], "b":
    [..., rank, out]} or, if the parameter is trained in full, to the whole array. All three have
    the same paths. They are float32, except that the whole arrays in `old` have the dtype of the
    base.

    Attributes:
        step: The number of optimizer steps taken, an int32.
        adapters: The parameters of the trained policy (the adapter "default" in the released code
            of DiffusionNFT): LoRA adapters, and also the arrays that are trained in full.
        old: The parameters of the old policy, which generates the samples.
        ema: The exponential moving average of the trained parameters, which is evaluated.
        opt_state: The state of the optimizer that `make_optimizer` returns.
    """

    step: Int[Array | np.ndarray, ""]
    adapters: Trainable
    old: Trainable
    ema: Trainable
    opt_state: Any


def make_optimizer(config: Optimizer) -> optax.GradientTransformation:
    """Makes the optimizer: AdamW (arXiv 1711.05101) on gradients whose global norm is clipped.

    Args:
        config: The optimizer section of the configuration. If the global norm of the gradient
            exceeds `max_grad_norm`, the gradient is scaled down to that norm. `beta1`, `beta2`,
            `eps` and `weight_decay` are the constants of AdamW. The learning rate falls linearly
            from `learning_rate` to 0 over `decay_steps` optimizer steps and then stays 0, or is
            constant if `decay_steps` is 0. Weight decay applies to all trainable parameters.

    Returns:
        The optax transformation. Its updates are to be added to the parameters.
    """
    rate = (
        optax.linear_schedule(config.learning_rate, 0.0, config.decay_steps)
        if config.decay_steps
        else config.learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            rate, b1=config.beta1, b2=config.beta2, eps=config.eps, weight_decay=config.weight_decay
        ),
    )


def read_start(lora: Lora, adapted: Collection[str], table: Table) -> dict[str, Adapter]:
    """Reads the adapters that a run starts from.

    Args:
        lora: The LoRA section of the configuration: `path` is a LoRA file or directory on disk, or
            None. The file must have the same `rank` and `alpha`. With `skip_text_encoders`,
            adapters of text encoders in the file are ignored, otherwise they are an error.
        adapted: The paths of the parameters that have an adapter in the run.
        table: The network's parameters with their names in released files
            (`Backbone.parameter_table`), which map names in the LoRA file to paths.

    Returns:
        The adapters {"a": [..., in, rank], "b": [..., rank, out]} by path, float32. The file need
        not have all paths in `adapted`. Empty if `path` is None.

    Raises:
        InputError: If the file is missing, unreadable, not plain LoRA or not of this network, if it
            has adapters on other paths, or if its rank or alpha differs from that of the run. If
            layers of the file differ in rank or alpha, its rank and its alpha are both the largest
            rank (`import_lora`). The message names the path of the file.
    """
    if lora.path is None:
        return {}
    name = f"lora.path={lora.path!r}"
    try:
        adapters, settings = import_lora(
            Path(lora.path), table, skip_text_encoders=lora.skip_text_encoders
        )
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if outside := sorted(adapters.keys() - set(adapted)):
        raise InputError(
            f"{name}: has adapters on parameters that lora.target_modules and train.parameters "
            f"do not adapt: {', '.join(outside)}"
        )
    pairs = (("rank", settings.rank, lora.rank), ("alpha", settings.alpha, lora.alpha))
    if other := [
        f"{field} {theirs}, but lora.{field}={ours}"
        for field, theirs, ours in pairs
        if theirs != ours
    ]:
        raise InputError(f"{name}: is of {', and of '.join(other)}; they must be equal")
    return adapters


def init_state(
    key: Array,
    base: Params,
    trained_paths: TrainedPaths,
    lora: Lora,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    start: Mapping[str, Adapter] | None = None,
) -> TrainState:
    """Makes the state before the first step: three policies (trained, old, EMA) that equal the
    base, or the base with the adapters `start`. Every process of a run must call it.

    Args:
        key: The key from which the factors A of the initial adapters are drawn, a typed key of JAX.
        base: The parameters of the base, a nested dictionary. Parameters that are trained in full
            start as copies of them.
        trained_paths: The paths of the parameters that are trained, with adapters and in full.
        lora: The LoRA section of the configuration. Its `rank` is the rank of all adapters.
        optimizer: The optimizer section of the configuration, for the state of the optimizer.
        mesh: The mesh on which the state is placed (`sharding.parameter_sharding`). Arrays of fewer
            than 4096 elements are on every device. Others are divided over the mesh axis `fsdp` if
            its size divides one of their axes, and the outputs of linear layers also over `tensor`
            if its size divides their number.
        start: Adapters by path, from `read_start`, for all three policies. Other paths get initial
            adapters: the factor A is drawn from a Gaussian with the standard deviation 1 / rank,
            and the factor B is zero. Unused ranks of the adapters in `start` (a column of A and a
            row of B that are both zero) are initialized likewise, because they could not be trained
            otherwise. None: all adapters are initial.

    Returns:
        The state on the mesh with step 0. The three policies have separate buffers.

    Raises:
        KeyError: If a path in `trained_paths` is not one of the base, or one in `start` is not in
            `trained_paths.adapted`.
    """
    return jax.jit(
        lambda key, base, start: _fresh(key, base, trained_paths, lora, optimizer, start),
        out_shardings=jax.tree.map(
            lambda s: s.sharding, abstract_state(base, trained_paths, lora, optimizer, mesh)
        ),
    )(key, base, start or {})


def abstract_state(
    base: Params, trained_paths: TrainedPaths, lora: Lora, optimizer: Optimizer, mesh: Mesh
) -> Any:
    """Returns the shapes, dtypes and shardings of the state. Nothing is allocated.

    Args:
        base: The parameters of the base, or their shapes.
        trained_paths: The paths of the parameters that are trained, with adapters and in full.
        lora: The LoRA section of the configuration. Its `rank` is the rank of all adapters.
        optimizer: The optimizer section of the configuration, for the state of the optimizer.
        mesh: The mesh of the run.

    Returns:
        A `TrainState` with a `jax.ShapeDtypeStruct` in place of each array. Its sharding is that of
        `sharding.parameter_sharding`: arrays of fewer than 4096 elements are replicated. Others are
        divided over the mesh axis `fsdp` if its size divides one of their axes, and the outputs of
        linear layers also over `tensor` if its size divides their number.
    """
    shapes = jax.eval_shape(
        lambda key, base: _fresh(key, base, trained_paths, lora, optimizer, {}),
        jax.random.key(0),
        base,
    )

    def place(leaf, where):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(place, shapes, sharding.parameter_sharding(mesh, shapes))


def _fresh(
    key: Array,
    base: Params,
    trained_paths: TrainedPaths,
    lora: Lora,
    optimizer: Optimizer,
    start: Mapping[str, Adapter],
) -> TrainState:
    """Computes the state before the first step, for `init_state`. It is used under jit.

    Args:
        key: The key from which the factors A of the initial adapters are drawn.
        base: The parameters of the base, a nested dictionary. Parameters that are trained in full
            start as copies of them.
        trained_paths: The paths of the parameters that are trained, with adapters and in full.
        lora: The LoRA section of the configuration. Its `rank` is the rank of all adapters.
        optimizer: The optimizer section of the configuration, for the state of the optimizer.
        start: Adapters by path to start from. Other paths, and unused ranks of these adapters, get
            initial factors (A random, B zero), which do not change the policy. May be empty.

    Returns:
        The state with step 0. Its three sets of trainable parameters (`adapters`, `old` and `ema`)
        are equal except for their dtypes.
    """
    flat = flatten(base)
    adapters = init_adapters(key, base, trained_paths.adapted, lora.rank)
    adapters |= {path: _fill_unused_ranks(ab, adapters[path]) for path, ab in start.items()}
    trained: Trainable = {
        **adapters,
        **{path: flat[path].astype(jnp.float32) for path in trained_paths.whole},
    }
    old: Trainable = {**adapters, **{path: flat[path] for path in trained_paths.whole}}

    def copy(tree):
        return jax.tree.map(jnp.copy, tree)  # separate buffers: the state is donated

    return TrainState(
        jnp.zeros((), jnp.int32),
        trained,
        copy(old),
        copy(trained),
        make_optimizer(optimizer).init(trained),
    )


def _fill_unused_ranks(adapter: Adapter, fresh: Adapter) -> Adapter:
    """Replaces the unused ranks of an imported adapter by freshly initialized ones.

    A rank is unused if its column of A and its row of B are both zero. Its gradient is then always
    zero. In a stack, layers that the file lacks have only unused ranks.

    Args:
        adapter: The imported adapter, with A [..., in, rank] and B [..., rank, out].
        fresh: A freshly initialized adapter with factors of these shapes, whose B is zero.

    Returns:
        The adapter, with A and B of `fresh` for unused ranks. The product A B is unchanged.
    """
    used = adapter["a"].any(-2) | adapter["b"].any(-1)
    return {
        "a": jnp.where(used[..., None, :], adapter["a"], fresh["a"]),
        "b": jnp.where(used[..., :, None], adapter["b"], fresh["b"]),
    }
