"""The training loop of every network here: AdamW, an average of the parameters, and a state on disk to go on from."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file
from tqdm import tqdm


def train(
    name: str,
    params: Any,
    loss: Callable,
    batches: Callable[[int], Any],
    steps: int,
    rate: float,
    work: Path,
    stop: int | None = None,
    more: Sequence[int] = (),
) -> Any:
    """Training with warm-up and a cosine end over `steps`; returns the averaged parameters. Resumes from `work`.

    stop: leave the schedule there, before its end; more: further legs, of so many steps from half the rate to a tenth of it.

    loss(params, batch, key) -> scalar; batches(step) -> batch. Both are functions of the step alone, so that an interrupted
    training ends where an uninterrupted one does.
    """
    last = steps if stop is None else stop
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 100, steps, rate / 20)
    for leg in more:
        schedule = optax.join_schedules([schedule, optax.cosine_decay_schedule(rate / 2, leg, 0.2)], [last])
        last += leg
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=1e-3))
    params = jax.tree.map(lambda x: jnp.array(np.asarray(x)), params)  # of no weak type, which would compile a step twice
    # a copy: donated buffers may appear once
    state = {"params": params, "average": jax.tree.map(jnp.copy, params), "opt": optimizer.init(params), "step": jnp.int32(0)}
    path = work / f"{name}.safetensors"
    if path.exists():
        state = _load(path, state)

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(0), state["step"])
        value, gradient = jax.value_and_grad(loss)(state["params"], batch, key)
        update, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], update)
        decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
        mean = jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, state["average"], params)
        return {"params": params, "average": mean, "opt": opt, "step": state["step"] + 1}, value

    smooth, started = None, time.time()
    for i in tqdm(range(int(state["step"]), last), desc=name, mininterval=30):
        state, value = step(state, batches(i))
        smooth = float(value) if smooth is None else 0.98 * smooth + 0.02 * float(value)
        if (i + 1) % 100 == 0 or i + 1 == last:
            _save(path, state)
            print(f"{name} step {i + 1}/{last} loss {smooth:.4f} {time.time() - started:.0f} s", flush=True)
    return state["average"]


def _save(path: Path, state: Any) -> None:
    """Every leaf under its place in the flattened tree; the file appears by rename."""
    partial_path = path.with_suffix(".partial")
    save_file({str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}, partial_path)
    partial_path.replace(path)


def _load(path: Path, like: Any) -> Any:
    """The state that `_save` wrote. Raises ValueError where it is of other networks than `like`."""
    leaves, structure = jax.tree.flatten(like)
    stored = load_file(path)
    if [stored[str(i)].shape for i in range(len(stored))] != [np.shape(leaf) for leaf in leaves]:
        raise ValueError(f"{path}: a state of other networks; remove it to begin anew")
    return jax.tree.unflatten(structure, [jnp.asarray(stored[str(i)]) for i in range(len(leaves))])
