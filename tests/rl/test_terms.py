"""What an objective is given by the update: recorded steps of an SDE, and pairs; against plain
loops.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.diffusion.seeds import permutations
from solrl_jax.rl.objective import Step, TrainingTarget, Velocities, load_objective
from solrl_jax.rl.trainable.trainable import attach
from solrl_jax.rl.update import update
from tests.cases import first_is_quick
from tests.rl.test_update import KEPT, ROWS, STEPS, TOLERANCE, batch_of, norm, state_of
from tests.toys import SHAPE, toy_backbone, toy_grid

SETTINGS = (
    "train.num_prompts=2",
    "rollout.candidates=4",
    f"rollout.kept={KEPT}",
    "rollout.selection=best",
    f"rollout.num_steps={STEPS}",
    "rollout.explore.num_steps=2",
    "algorithm.timestep_fraction=0.5",
    "lora.rank=2",
    "lora.alpha=4",
    "optimizer.steps_per_iteration=1",
    "algorithm.clip_range=0.5",
    "rollout.sde_window_size=null",
)
SLOTS = 2


def config_of(name, *overrides):
    return resolve("tiny", [f"objective={name}", *SETTINGS, *overrides])


def recorded(backbone, steps=STEPS - 1):
    """A batch with states of all stochastic steps; any numbers will do."""
    states = np.random.default_rng(7).standard_normal((ROWS, steps + 1, *SHAPE)).astype(np.float32)
    return dataclasses.replace(batch_of(backbone), states=jnp.asarray(states))


def run(backbone, config, batch, grid, objective=None):
    with jax.set_mesh(backbone.mesh):
        state, metrics = update(
            backbone,
            config,
            state_of(backbone, config),
            backbone.transformer,
            batch,
            grid,
            objective=objective,
        )
    return jax.device_get(state), {name: float(value) for name, value in metrics.items()}


@partial(jax.jit, static_argnums=(0, 1))
def by_hand(backbone, config, state, batch, grid):
    """The mean loss over terms and its gradient, a term after another; in float32."""
    base = backbone.transformer
    scale = config.lora.alpha / config.lora.rank
    sigmas = jnp.append(jnp.asarray(grid.sigmas), 0.0)
    table = jnp.asarray(grid.table)

    def loss(adapters):
        total = 0.0
        for row in range(ROWS):
            order = permutations(batch.seeds[row : row + 1], "sigmas", STEPS)[0]
            visited = order[jnp.argsort(order == STEPS - 1)][:SLOTS]  # the last step takes no noise
            text = jax.tree.map(lambda c, row=row: c[batch.prompt[row]][None], batch.conditioning)
            for slot in range(SLOTS):
                step = visited[slot]
                x = batch.states[row, step][None]
                after = batch.states[row, step + 1][None]

                def v(params, x=x, text=text, step=step):
                    return backbone.velocity(
                        params, x, text, jnp.asarray(grid.timesteps)[step], jnp.float32(1)
                    )

                policies = Velocities(
                    v(attach(base, adapters, scale)), v(attach(base, state.old, scale)), v(base)
                )
                a, b, _, _, std = table[step, :, None]
                solver_step = Step(after, a, b, std, (sigmas[step] - sigmas[step + 1])[None])
                target = TrainingTarget(
                    x,
                    batch.latents[row][None],
                    sigmas[step][None],
                    batch.optimality[row][None],
                    solver_step,
                )
                total += load_objective(config.algorithm.objective)(
                    policies, target, config.algorithm
                )[0][0]
        return total / (SLOTS * ROWS)

    return jax.value_and_grad(loss)(state.adapters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("flow_grpo", (2, 2)),
        pytest.param("dance_grpo", (1, 1), marks=pytest.mark.exhaustive),
        pytest.param("flow_grpo", (1, 1), marks=pytest.mark.exhaustive),
        pytest.param("grpo_guard", (2, 2, 2), marks=pytest.mark.exhaustive),
        pytest.param("flow_dppo", (2, 2, 2), marks=pytest.mark.exhaustive),
        pytest.param("flow_cps", (2, 2, 2), marks=pytest.mark.exhaustive),
    ],
)
def test_recorded_steps_are_trained_at(name, mesh):
    backbone = toy_backbone(*mesh)
    config = config_of(name)
    grid = toy_grid(STEPS, solver=config.rollout.solver)
    one = toy_backbone()
    value, gradient = by_hand(one, config, state_of(one, config), recorded(one), grid)
    _, metrics = run(backbone, config, recorded(backbone), grid)
    assert metrics["loss"] == pytest.approx(float(value), rel=10 * TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=10 * TOLERANCE)
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_micro_batches"] == 0


@pytest.mark.slow
def test_of_a_window_its_steps_alone_are_trained_at():
    """Steps 1 and 2 of four add noise: their states are the only ones there are."""
    calls = []
    backbone = toy_backbone()
    grid = toy_grid(STEPS, solver="flow_sde")
    grid = dataclasses.replace(
        grid, table=grid.table * np.float32([[1, 1, 1, 1, i in (1, 2)] for i in range(STEPS)])
    )
    batch = recorded(backbone, 2)

    def spy(velocities, target, policy):
        jax.debug.callback(
            lambda *facts: calls.append(jax.tree.map(np.asarray, facts)),
            target.x,
            target.sigma,
            target.step.after,
        )
        loss = jnp.square(velocities.trained).mean((1, 2, 3))
        return loss, {}

    run(
        backbone,
        config_of("mix_grpo", "rollout.sde_window_size=2", "optimizer.per_device_batch_size=4"),
        batch,
        grid,
        spy,
    )
    jax.effects_barrier()
    x, sigma, after = (np.concatenate(parts) for parts in zip(*calls, strict=True))
    states = np.asarray(batch.states)
    pairs = {
        (round(float(s), 4), i)
        for s, start, end in zip(sigma, x, after, strict=True)
        for i in range(2)
        if any(np.array_equal(start, row[i]) and np.array_equal(end, row[i + 1]) for row in states)
    }
    assert pairs == {(0.75, 0), (0.5, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_is_quick(["flow_grpo", "awm", "flow_cps", "grpo_guard", "flow_dppo"])
)
def test_on_policy_the_ratio_is_exactly_one(name):
    """In the trained network's own precision, although it is evaluated once with and once without a
    gradient.
    """
    backbone = toy_backbone(dtype="bfloat16")
    config = config_of(name)
    state = state_of(backbone, config)
    state = dataclasses.replace(state, old=jax.tree.map(jnp.copy, state.adapters))
    batch = batch_of(backbone) if name == "awm" else recorded(backbone)
    with jax.set_mesh(backbone.mesh):
        _, metrics = update(
            backbone, config, state, backbone.transformer, batch, toy_grid(STEPS, solver="flow_sde")
        )
    assert float(metrics["ratio"]) == 1.0
    limited = "ratio/masked" if name == "flow_dppo" else "ratio/clipped"
    assert float(metrics[limited]) == 0.0
    assert float(metrics["grad_norm"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", first_is_quick(["dance_grpo", "dpo", "flow_dppo"]))
def test_a_row_that_must_not_count_may_hold_anything(name):
    backbone = toy_backbone()
    grid = toy_grid(STEPS, solver="flow_sde")
    batch = batch_of(backbone) if name == "dpo" else recorded(backbone)
    weight = jnp.asarray([1, 1, 0, 0, 1, 1], jnp.float32)

    def spoil(x):
        return x.at[2:4].set(jnp.nan)

    spoilt = dataclasses.replace(batch, weight=weight, latents=spoil(batch.latents))
    if batch.states is not None:
        spoilt = dataclasses.replace(spoilt, states=spoil(batch.states))
    config = config_of(
        name,
        "optimizer.per_device_batch_size=4",
        "rollout.candidates=6",
        "rollout.kept=2",
        "train.num_prompts=3",
    )
    want, expected_metrics = run(backbone, config, dataclasses.replace(batch, weight=weight), grid)
    got, metrics = run(backbone, config, spoilt, grid)
    assert metrics == expected_metrics
    assert metrics["skipped_micro_batches"] == 0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)
