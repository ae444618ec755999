"""The update against plain loops: terms, their mean, the optimizer, the copies that follow; and how
terms are grouped.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.diffusion.seeds import normal, permutations
from solrl_jax.rl.objective import TrainingTarget, Velocities
from solrl_jax.rl.objectives.nft import nft_loss
from solrl_jax.rl.state import init_state, make_optimizer
from solrl_jax.rl.trainable.trainable import TrainedPaths, attach
from solrl_jax.rl.update import PolicyBatch, update
from tests.cases import first_is_quick
from tests.toys import HIDDEN, KERNELS, SHAPE, toy_backbone, toy_grid, toy_seeds

TOLERANCE = 1e-5  # of a norm; float32
PROMPTS = ("a red circle", "two blue squares")
KEPT = 3
STEPS = 4
ROWS = len(PROMPTS) * KEPT
CONFIG = resolve(
    "tiny",
    [
        "train.num_prompts=2",
        "rollout.candidates=4",
        "rollout.kept=3",
        "rollout.selection=best",
        "rollout.num_steps=4",
        "rollout.explore.num_steps=2",
        "algorithm.timestep_fraction=0.75",
        "lora.rank=2",
        "lora.alpha=4",
        "algorithm.kl_coef=0.1",
        "algorithm.beta=0.5",
        "optimizer.max_grad_norm=0.1",
    ],
)
SLOTS = CONFIG.num_train_sigmas
assert SLOTS == 3
MESHES = {"one": (1, 1), "data=2 fsdp=2": (2, 2), "data=2 tensor=2": (2, 1, 2)}


@pytest.fixture(scope="module")
def backbones():
    return {name: toy_backbone(*mesh) for name, mesh in MESHES.items()}


def with_optimizer(**changes):
    return dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, **changes))


@cache
def fresh(backbone, config):
    return init_state(
        jax.random.key(0),
        backbone.transformer,
        TrainedPaths(KERNELS),
        config.lora,
        config.optimizer,
        backbone.mesh,
    )


def state_of(backbone, config=CONFIG):
    """Trainable that do something, and another old policy: all parts of the loss count."""
    state = jax.tree.map(
        jnp.copy, fresh(backbone, config)
    )  # an update takes the buffers of its state

    def noise(tree, seed):
        return jax.tree.map(
            lambda x: (
                x + 0.3 * np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)
            ),
            tree,
        )

    return dataclasses.replace(
        state, adapters=noise(state.adapters, 1), old=noise(state.old, 2), ema=noise(state.ema, 3)
    )


EVERY_ROW = (1,) * ROWS


def batch_of(backbone, weight=EVERY_ROW, latents=None):
    rng = np.random.default_rng(5)
    drawn = rng.standard_normal((ROWS, *SHAPE)).astype(np.float32)
    return PolicyBatch(
        latents=jnp.asarray(drawn if latents is None else latents),
        optimality=jnp.asarray(rng.random(ROWS), jnp.float32),
        weight=jnp.asarray(weight, jnp.float32),
        prompt=jnp.arange(ROWS, dtype=jnp.int32) // KEPT,
        seeds=jnp.asarray(toy_seeds(PROMPTS, KEPT).reshape(-1, 2)),
        conditioning=backbone.encode(PROMPTS, 8),
    )


def run(backbone, batch, config=CONFIG, **options):
    with jax.set_mesh(backbone.mesh):
        state, metrics = update(
            backbone,
            config,
            state_of(backbone),
            backbone.transformer,
            batch,
            toy_grid(STEPS),
            **options,
        )
    return jax.device_get(state), {name: float(value) for name, value in metrics.items()}


def norm(tree):
    return float(
        np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))
    )


def distance(a, b):
    """The relative distances of the accumulated gradients and of the adapters of two states."""

    def moments(state):
        return (optax.tree.get(state.opt_state, "mu"), state.adapters, state.old, state.ema)

    return max(
        norm(jax.tree.map(np.subtract, x, y)) / norm(y)
        for x, y in zip(moments(a), moments(b), strict=True)
    )


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


one_device = cache(toy_backbone)


def by_hand(weight=EVERY_ROW):
    """docs/method.md, section 4, a term after another on one device: the mean loss and its
    gradient, in float32.
    """
    backbone = one_device()
    state = state_of(backbone)
    batch = batch_of(backbone)
    terms = [
        (w, term(backbone, state, batch, row, slot))
        for row, w in enumerate(weight)
        if w
        for slot in range(SLOTS)
    ]

    def mean(*values):
        return sum(w * value for (w, _), value in zip(terms, values, strict=True)) / (
            SLOTS * sum(weight)
        )

    return jax.tree.map(mean, *jax.device_get([term for _, term in terms]))


@partial(jax.jit, static_argnums=0)
def term(backbone, state, batch, row, slot, reference_weight=1.0):
    """The loss of a row at its sigma number `slot`, and its gradient; the distance to the reference
    counts with a weight.
    """
    grid = toy_grid(STEPS)
    base = backbone.transformer
    algorithm = CONFIG.algorithm
    scale = CONFIG.lora.alpha / CONFIG.lora.rank
    seed = batch.seeds[row][None]
    x0 = batch.latents[row][None]
    visited = permutations(seed, "sigmas", STEPS)[0, slot]
    text = jax.tree.map(lambda c: c[batch.prompt[row]][None], batch.conditioning)
    sigma = jnp.asarray(grid.sigmas)[visited]
    time = jnp.asarray(grid.timesteps)[visited]
    x = (1 - sigma) * x0 + sigma * normal(seed, "training", SHAPE, slot)

    def loss(adapters):
        def v(params):
            return backbone.velocity(params, x, text, time, jnp.float32(1))

        policies = Velocities(
            v(attach(base, adapters, scale)),
            v(attach(base, state.old, scale)),
            v(base),
            jnp.full(1, reference_weight),
        )
        target = TrainingTarget(x, x0, sigma[None], batch.optimality[row][None])
        weights = {
            "beta": algorithm.beta,
            "kl_coef": algorithm.kl_coef,
            "adv_clip_max": algorithm.adv_clip_max,
        }
        return nft_loss(policies, target, **weights)[0][0]

    return jax.value_and_grad(loss)(state.adapters)


def test_a_row_is_trained_at_sigmas_of_the_rollouts_grid_each_once():
    visited = permutations(batch_of(toy_backbone()).seeds, "sigmas", STEPS)
    assert all(sorted(row) == list(range(STEPS)) for row in visited.tolist())
    assert len(set(map(tuple, visited.tolist()))) > 1


@pytest.mark.parametrize(
    "mesh",
    [
        "data=2 tensor=2",
        pytest.param("one", marks=pytest.mark.exhaustive),
        pytest.param("data=2 fsdp=2", marks=pytest.mark.exhaustive),
    ],
)
def test_an_update_is_the_loop_over_terms_and_the_optimizers_step(backbones, mesh):
    backbone = backbones[mesh]
    batch = batch_of(backbone)
    start = state_of(backbone)
    state, metrics = run(backbone, batch)
    value, gradient = by_hand()
    assert metrics["loss"] == pytest.approx(float(value), rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=TOLERANCE)
    assert metrics["grad_norm"] > CONFIG.optimizer.max_grad_norm  # and it is clipped
    assert metrics["skipped_micro_batches"] == 0
    optimizer = make_optimizer(CONFIG.optimizer)
    change, opt_state = optimizer.update(
        gradient, optimizer.init(gradient), jax.device_get(start.adapters)
    )
    adapters = optax.apply_updates(jax.device_get(start.adapters), change)

    def mu(s):
        return optax.tree.get(s, "mu")

    assert norm(jax.tree.map(np.subtract, mu(state.opt_state), mu(opt_state))) < TOLERANCE * norm(
        mu(opt_state)
    )
    assert norm(jax.tree.map(np.subtract, state.adapters, adapters)) < TOLERANCE * norm(change)
    assert int(state.step) == 1

    def follow(kept, decay):
        return jax.tree.map(
            lambda k, n: decay * k + (1 - decay) * n, jax.device_get(kept), state.adapters
        )

    assert norm(jax.tree.map(np.subtract, state.ema, follow(start.ema, 2 / 11))) < TOLERANCE * norm(
        state.ema
    )
    assert norm(jax.tree.map(np.subtract, state.old, follow(start.old, 0.001))) < TOLERANCE * norm(
        state.old
    )
    assert metrics["old_decay"] == pytest.approx(0.001)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "micro"),
    [
        ("data=2 tensor=2", 5),
        ("data=2 fsdp=2", 5),
        *(("one", n) for n in (1, 4, 5, 17, 100)),
    ],
)
def test_a_micro_batch_is_an_upper_limit_that_need_not_divide_the_terms(backbones, mesh, micro):
    """Eighteen terms in micro-batches that are filled up: the same update, and the same metrics."""
    want, expected_metrics = run(
        backbones["one"], batch_of(backbones["one"]), with_optimizer(per_device_batch_size=6)
    )
    got, metrics = run(
        backbones[mesh], batch_of(backbones[mesh]), with_optimizer(per_device_batch_size=micro)
    )
    assert distance(got, want) < TOLERANCE
    assert metrics == pytest.approx(expected_metrics, rel=10 * TOLERANCE)
    start = state_of(backbones["one"])
    untrained = dataclasses.replace(jax.tree.map(jnp.asarray, want), adapters=start.adapters)
    assert distance(jax.device_get(untrained), want) > 100 * TOLERANCE


BAD = {"nan": np.nan, "inf": np.inf, "huge": 3e38}


@pytest.mark.slow
@pytest.mark.parametrize("micro", first_is_quick([1, 4, 100]))
@pytest.mark.parametrize("bad", first_is_quick(BAD))
def test_a_row_of_weight_0_changes_nothing_whatever_it_holds(backbones, bad, micro):
    """At each position: the same bits as with zeros in its place, and the update by hand on the
    other rows.
    """
    backbone = backbones["one"]
    config = with_optimizer(per_device_batch_size=micro)
    whole = batch_of(backbone)
    for position in range(ROWS):
        weight = np.ones(ROWS)
        latents = np.array(whole.latents)
        weight[position] = 0
        latents[position] = 0.0
        want, expected_metrics = run(backbone, batch_of(backbone, weight, latents), config)
        latents[position] = BAD[bad]
        got, metrics = run(backbone, batch_of(backbone, weight, latents), config)
        same_bits(got, want)
        assert metrics == expected_metrics
        assert metrics["skipped_micro_batches"] == 0
        if micro == 4:
            value, gradient = by_hand(weight)
            assert metrics["loss"] == pytest.approx(float(value), rel=TOLERANCE)
            assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [*MESHES][1:])
def test_rows_of_weight_0_change_nothing_on_a_mesh(backbones, mesh):
    backbone = backbones[mesh]
    weight = np.array([0, 1, 1, 0, 1, 0])
    latents = np.array(batch_of(backbone).latents)
    latents[weight == 0] = np.array([np.nan, np.inf, -np.inf])[:, None, None, None]
    got, metrics = run(
        backbone, batch_of(backbone, weight, latents), with_optimizer(per_device_batch_size=5)
    )
    value, gradient = by_hand(weight)
    assert metrics["loss"] == pytest.approx(float(value), rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=TOLERANCE)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.slow
def test_if_every_row_has_weight_0_the_policy_stays(backbones):
    backbone = backbones["one"]
    config = with_optimizer(weight_decay=0.0, per_device_batch_size=4)
    batch = batch_of(backbone, np.zeros(ROWS), np.full((ROWS, *SHAPE), np.nan, np.float32))
    state, metrics = run(backbone, batch, config)
    same_bits(state.adapters, state_of(backbone).adapters)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped_micro_batches"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("micro", first_is_quick([1, 4, 100]))
def test_a_micro_batch_whose_loss_is_not_finite_contributes_nothing_and_is_counted(
    backbones, micro
):
    """The bad row has weight 1.

    Terms go through the rows again and again, so each slot of it spoils one micro-batch.
    """
    backbone = backbones["one"]
    position = 2
    latents = np.array(batch_of(backbone).latents)
    latents[position] = np.nan
    state, metrics = run(
        backbone, batch_of(backbone, latents=latents), with_optimizer(per_device_batch_size=micro)
    )
    spoiled = {(position + slot * ROWS) // micro for slot in range(SLOTS)}
    assert metrics["skipped_micro_batches"] == len(spoiled)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))
    if micro == 1:  # the mean is over the terms of the other rows
        value, gradient = by_hand([row != position for row in range(ROWS)])
        assert metrics["loss"] == pytest.approx(float(value), rel=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=TOLERANCE)
    if micro == 100:
        assert metrics["loss"] == metrics["grad_norm"] == 0


@pytest.mark.exhaustive
def test_several_steps_of_the_optimizer_take_the_terms_in_turn(backbones):
    """Three steps: each on the terms of one slot, so of every row once."""
    backbone = backbones["one"]
    state, metrics = run(
        backbone, batch_of(backbone), with_optimizer(steps_per_iteration=3, per_device_batch_size=4)
    )
    assert int(state.step) == 3
    assert metrics["old_decay"] == pytest.approx(0.003)
    once, _ = run(backbone, batch_of(backbone), CONFIG)
    assert distance(state, once) > 100 * TOLERANCE
    uneven, _ = run(
        backbone, batch_of(backbone), with_optimizer(steps_per_iteration=3, per_device_batch_size=6)
    )
    assert distance(uneven, state) < TOLERANCE


@pytest.mark.exhaustive
def test_the_reference_is_computed_only_if_it_has_a_weight(backbones):
    """Operations by XLA's count: three evaluations and a gradient, or one evaluation less."""
    backbone = backbones["one"]

    def operations(kl_coef):
        algorithm = dataclasses.replace(CONFIG.algorithm, kl_coef=kl_coef)
        config = dataclasses.replace(with_optimizer(per_device_batch_size=18), algorithm=algorithm)
        arguments = (
            backbone,
            config,
            state_of(backbone),
            backbone.transformer,
            batch_of(backbone),
            toy_grid(STEPS),
        )
        with jax.set_mesh(backbone.mesh):
            return update.lower(*arguments).compile().cost_analysis()["flops"]

    one = (
        2 * ROWS * SLOTS * np.prod(SHAPE) * HIDDEN
    )  # of the second linear; the first reads the same in all policies
    assert one < operations(0.1) - operations(0.0) < 2 * one


def pull_to_the_base(velocities, target, algorithm):
    kl = jnp.square(velocities.trained - velocities.reference).mean((1, 2, 3))
    return algorithm.beta * kl, {"loss/mine": 2 * kl}


@pytest.mark.exhaustive
def test_the_objective_is_a_function_that_is_given(backbones):
    backbone = backbones["one"]
    state, metrics = run(backbone, batch_of(backbone), objective=pull_to_the_base)
    assert metrics["loss"] == pytest.approx(
        CONFIG.algorithm.beta * metrics["loss/mine"] / 2, rel=TOLERANCE
    )
    assert "loss/policy" not in metrics
    usual, usual_metrics = run(backbone, batch_of(backbone))
    assert {"loss/policy", "loss/kl", "loss/drift"} < usual_metrics.keys()
    assert distance(state, usual) > 100 * TOLERANCE
