"""The training loop of all pretrained networks: AdamW, an average of the parameters, and resume."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from pretrain.recipe import Schedule, Settings

State = dict[str, Any]  # params, average, opt, step


def train(
    name: str,
    params: Any,
    loss: Callable[[Any, Any, jax.Array], jax.Array],
    batches: Callable[[int], Any],
    schedule: Schedule,
    settings: Settings,
) -> Any:
    """Trains a network, resuming from the state in `settings.work` if there is one.

    Batches and keys are functions of the step alone, so an interrupted training gives the same
    result.

    Args:
        name: The name of the state's file.
        params: The initial parameters.
        loss: Maps parameters, a batch and a key to a scalar.
        batches: Maps a step to its batch.
        schedule: The steps and learning rates.
        settings: Where files are kept.

    Returns:
        The exponential moving average of the parameters.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule.learning_rate(), b2=0.99, weight_decay=1e-3),
    )
    # Weakly typed parameters would compile the step twice.
    params = jax.tree.map(lambda x: jnp.array(np.asarray(x)), params)
    # The average is a copy, because a buffer can be donated only once.
    state = {
        "params": params,
        "average": jax.tree.map(jnp.copy, params),
        "opt": optimizer.init(params),
        "step": jnp.int32(0),
    }
    path = settings.work / f"{name}.safetensors"
    if path.exists():
        state = _load(path, state)
    step = jax.jit(partial(_step, loss, optimizer), donate_argnums=0)
    last = schedule.last if settings.stop is None else min(schedule.last, settings.stop)
    smooth = None
    started = time.time()
    for i in tqdm(range(int(state["step"]), last), desc=name, mininterval=30):
        state, value = step(state, batches(i))
        smooth = float(value) if smooth is None else 0.98 * smooth + 0.02 * float(value)
        if (i + 1) % 100 == 0 or i + 1 == last:
            _save(path, state)
            print(
                f"{name} step {i + 1}/{last} loss {smooth:.4f} {time.time() - started:.0f} s",
                flush=True,
            )
    return state["average"]


def _step(
    loss: Callable, optimizer: optax.GradientTransformation, state: State, batch: Any
) -> tuple[State, jax.Array]:
    key = jax.random.fold_in(jax.random.key(0), state["step"])
    value, gradient = jax.value_and_grad(loss)(state["params"], batch, key)
    update, opt = optimizer.update(gradient, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], update)
    decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
    mean = jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, state["average"], params)
    return {"params": params, "average": mean, "opt": opt, "step": state["step"] + 1}, value


def _save(path: Path, state: State) -> None:
    """Writes every leaf under its index in the flattened tree, atomically."""
    partial_path = path.with_suffix(".partial")
    save_file(
        {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}, partial_path
    )
    partial_path.replace(path)


def _load(path: Path, like: State) -> State:
    """Reads a state that `_save` wrote. Raises ValueError if it belongs to another network."""
    leaves, structure = jax.tree.flatten(like)
    stored = load_file(path)
    if [stored[str(i)].shape for i in range(len(stored))] != [np.shape(leaf) for leaf in leaves]:
        raise ValueError(f"{path}: a state of other networks; remove it to begin anew")
    return jax.tree.unflatten(structure, [jnp.asarray(stored[str(i)]) for i in range(len(leaves))])
