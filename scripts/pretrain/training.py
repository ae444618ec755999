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

from pretrain.recipe import Schedule, Settings

REPORT_STEPS = 500  # steps between two printed lines
SAVE_SECONDS = 60.0  # least seconds between two saved states

State = dict[str, Any]  # params, average, opt, step
# A function of the parameters, the data, a batch and a key that returns a scalar.
Loss = Callable[[Any, Any, Any, jax.Array], jax.Array]


def train(
    name: str,
    params: Any,
    loss: Loss,
    data: Any,
    batches: Callable[[int], Any],
    schedule: Schedule,
    settings: Settings,
) -> Any:
    """Trains a network, resuming from the state in `settings.work` if there is one.

    The data are put on the device once. Batches, usually indices into them, and keys are functions
    of the step alone, so an interrupted training gives the same result.

    A training with a time limit (`settings.seconds`) measures how long its steps take. If not all
    steps of its schedule fit, it skips some of them, evenly spread over the whole schedule, so that
    learning rates and batches pass through all phases. Its result depends on the machine.
    A resumed training gets the whole limit again, and starts at the schedule's step that equals its
    own count, so use a limit only with an empty `settings.work`.

    Args:
        name: The name of the state's file.
        params: The initial parameters.
        loss: Maps parameters, data, a batch and a key to a scalar.
        data: A tree of arrays that the loss reads.
        batches: Maps a step of the schedule to its batch, a tree of arrays of fixed shapes.
        schedule: The steps and learning rates.
        settings: Where files are kept, and limits of steps and time.

    Returns:
        The exponential moving average of the parameters.
    """
    start_time = time.time()
    # The learning rate is a factor of `_run`, and no part of the optimizer.
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.99),
        optax.add_decayed_weights(1e-3),
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
    data = jax.device_put(data)
    run = jax.jit(partial(_run, loss, optimizer), donate_argnums=0)
    # Steps of one compiled program. On a CPU, XLA runs convolutions inside a loop on one core.
    steps_per_call = 1 if jax.default_backend() == "cpu" else 50
    learning_rate = schedule.learning_rate()
    limit = settings.seconds.get(name)
    end = schedule.last if settings.stop is None else min(schedule.last, settings.stop)
    stride = 1.0  # schedule steps per step
    step = first = int(state["step"])
    compile_end = last_save = start_time
    losses: list[float] = []
    while step < end:
        count = min(steps_per_call, end - step)
        steps = (stride * np.arange(step, step + count)).astype(int)
        stacked = jax.tree.map(lambda *x: np.stack(x), *map(batches, steps.tolist()))
        state, values = run(state, data, stacked, np.asarray(learning_rate(steps), np.float32))
        losses += np.asarray(values).tolist()
        step += count
        now = time.time()
        if step == first + count:
            compile_end = now
        elif limit is not None:
            pace = (now - compile_end) / (step - first - steps_per_call)
            left = max(0.0, start_time + limit - now) / pace
            fitting = step + int(left) // steps_per_call * steps_per_call
            end = min(end if settings.stop else schedule.last, fitting)
            stride = max(1.0, schedule.last / end)
        if step % REPORT_STEPS < count or step >= end:
            print(
                f"{name} step {step}/{end} loss {np.mean(losses):.4f} {now - start_time:.0f} s",
                flush=True,
            )
            losses = []
        if now - last_save > SAVE_SECONDS or step >= end:
            _save(path, state)
            last_save = now
    return state["average"]


def _run(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    state: State,
    data: Any,
    batches: Any,
    rates: jax.Array,
) -> tuple[State, jax.Array]:
    """Takes one step for each row of `batches` and `rates`.

    Returns:
        The state after the last step, and the loss of each step.
    """

    def step(state: State, inputs: tuple[Any, jax.Array]) -> tuple[State, jax.Array]:
        batch, rate = inputs
        key = jax.random.fold_in(jax.random.key(0), state["step"])
        value, gradient = jax.value_and_grad(loss)(state["params"], data, batch, key)
        update, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = jax.tree.map(lambda p, u: p - rate * u, state["params"], update)
        decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
        mean = jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, state["average"], params)
        return {"params": params, "average": mean, "opt": opt, "step": state["step"] + 1}, value

    if len(rates) == 1:
        state, value = step(state, jax.tree.map(lambda x: x[0], (batches, rates)))
        return state, value[None]
    return jax.lax.scan(step, state, (batches, rates))


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
