"""Every objective against NumPy in float64, written from its paper: losses, log-probabilities, and
gradients by differences.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import OBJECTIVES
from solrl_jax.rl.objective import (
    MAX_RATIO,
    Objective,
    Step,
    TrainingTarget,
    Velocities,
    clipped_policy,
    load_objective,
    log_ratio,
)
from tests.cases import first_is_quick

ROWS = 6
SHAPE = (2, 2, 3)
# of the largest value of a row; float32, through an exponential
TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-4
LIMITED = {"flow_dppo": "ratio/masked"}  # other objectives: "ratio/clipped"
WIDE_CLIP = 0.02  # some ratios lie within it and some beyond, none at its ends


def policy_of(name, **changes):
    return dataclasses.replace(resolve("tiny", [f"objective={name}"]).algorithm, **changes)


# --- references, one row at a time; names are the papers' ---


def clipped(log_ratio, advantage, c):
    ratio = np.exp(log_ratio)
    return max(-advantage * ratio, -advantage * np.clip(ratio, 1 - c, 1 + c))


def gaussian(v, r):
    """The mean over dimensions of ln N(after; a x + b (x - sigma v), std^2)."""
    error = r["after"] - step_mean(v, r)
    return np.mean(
        -(error**2) / (2 * r["std"] ** 2) - np.log(r["std"]) - np.log(np.sqrt(2 * np.pi))
    )


def step_mean(v, r):
    return r["a"] * r["x"] + r["b"] * (r["x"] - r["sigma"] * v)


def flow_grpo(v, r, p):
    g = r["std"] / np.sqrt(r["length"])
    kl = np.mean((step_mean(v, r) - step_mean(r["v_ref"], r)) ** 2) / (2 * g**2)
    return (
        clipped(
            gaussian(v, r) - gaussian(r["v_old"], r),
            p.adv_clip_max * (2 * r["q"] - 1),
            p.clip_range,
        )
        + p.kl_coef * kl
    )


def dance_grpo(v, r, p):
    ratio = gaussian(v, r) - gaussian(r["v_old"], r)
    kl = np.mean((v - r["v_ref"]) ** 2)
    return clipped(ratio, p.adv_clip_max * (2 * r["q"] - 1), p.clip_range) + p.kl_coef * kl


def flow_cps(v, r, p):
    def log_p(v):
        return -np.mean((r["after"] - step_mean(v, r)) ** 2)

    kl = np.mean((step_mean(v, r) - step_mean(r["v_ref"], r)) ** 2) / (2 * r["std"] ** 2)
    ratio = log_p(v) - log_p(r["v_old"])
    return clipped(ratio, p.adv_clip_max * (2 * r["q"] - 1), p.clip_range) + p.kl_coef * kl


def opsd(v, r, p):
    """The denominators are those at the row's own v, which has no gradient there."""

    def error(of, v):
        u = p.beta * v + (1 - p.beta) * r["v_old"]
        if of == "y_neg":
            u = (1 + p.beta) * r["v_old"] - p.beta * v
        return r["x"] - r["sigma"] * u - r[of]

    def term(of):
        return np.mean(error(of, v) ** 2) / max(np.mean(np.abs(error(of, r["v"]))), 1e-5)

    policy = p.adv_clip_max * (r["q"] * term("y_pos") + (1 - r["q"]) * term("y_neg"))
    return policy + p.kl_coef * np.mean((v - r["v_ref"]) ** 2)


def refl(v, r, p):
    """The reward rises by its gradient times the change of the predicted clean latents."""
    moved = (r["x"] - r["sigma"] * v) - (r["x"] - r["sigma"] * r["v_old"])
    return -np.sum(r["g"] * moved) + p.kl_coef * np.mean((v - r["v_ref"]) ** 2)


def drift_of_means(v, r):
    return np.mean((step_mean(v, r) - step_mean(r["v_old"], r)) ** 2) / (2 * r["std"] ** 2)


def grpo_guard(v, r, p):
    g = r["std"] / np.sqrt(r["length"])
    ratio = gaussian(v, r) - gaussian(r["v_old"], r) + drift_of_means(v, r)
    policy = clipped(ratio * r["std"], p.adv_clip_max * (2 * r["q"] - 1), p.clip_range)
    kl = np.mean((step_mean(v, r) - step_mean(r["v_ref"], r)) ** 2) / (2 * g**2)
    return policy / r["length"] + p.kl_coef * kl


def flow_dppo(v, r, p):
    ratio = np.exp(gaussian(v, r) - gaussian(r["v_old"], r))
    advantage = p.adv_clip_max * (2 * r["q"] - 1)
    outwards = (ratio > 1 and advantage > 0) or (ratio < 1 and advantage < 0)
    masked = drift_of_means(v, r) >= p.kl_mask_threshold and outwards
    kl = np.mean((step_mean(v, r) - step_mean(r["v_ref"], r)) ** 2) / (2 * r["std"] ** 2)
    return (0.0 if masked else -advantage * ratio) + p.kl_coef * kl


def awm(v, r, p):
    def log_p(v):
        error = np.mean((v - (r["noise"] - r["x0"])) ** 2)
        return -r["sigma"] * ((error + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25

    anchors = p.kl_coef * np.mean((v - r["v_ref"]) ** 2) + np.mean((v - r["v_old"]) ** 2)
    return clipped(log_p(v) - log_p(r["v_old"]), 2 * r["q"] - 1, p.clip_range) + anchors


def dpo(v, r, p):
    """Of the better row, with the worse one, which does not move, in `r["other"]`; or the other way
    round.
    """

    def error(v, r):
        return np.mean((v - (r["noise"] - r["x0"])) ** 2)

    gained = error(v, r) - error(r["v_ref"], r)
    other = error(r["other"]["v"], r["other"]) - error(r["other"]["v_ref"], r["other"])
    margin = -p.beta / 2 * (gained - other if r["better"] else other - gained)
    return np.logaddexp(0, -margin) + p.kl_coef * np.mean((v - r["v_ref"]) ** 2)


REFERENCES = {
    "flow_grpo": flow_grpo,
    "mix_grpo": flow_grpo,
    "dance_grpo": dance_grpo,
    "flow_cps": flow_cps,
    "grpo_guard": grpo_guard,
    "flow_dppo": flow_dppo,
    "awm": awm,
    "dpo": dpo,
    "opsd": opsd,
    "refl": refl,
    "draft": refl,
}
POLICIES = {
    "flow_grpo": {"kl_coef": 0.3, "clip_range": WIDE_CLIP},
    "mix_grpo": {"kl_coef": 0.1, "clip_range": WIDE_CLIP},
    "dance_grpo": {"kl_coef": 0.2, "clip_range": WIDE_CLIP},
    "flow_cps": {"kl_coef": 0.3, "clip_range": 0.003},
    "grpo_guard": {"kl_coef": 0.3, "clip_range": 0.005},
    "flow_dppo": {"kl_coef": 0.3, "kl_mask_threshold": 0.005},
    "awm": {"kl_coef": 0.2},
    "dpo": {"kl_coef": 0.2, "beta": 7.0},
    "opsd": {"kl_coef": 0.2, "beta": 0.7},
    "refl": {"kl_coef": 0.2},
    "draft": {"kl_coef": 0.2},
}


def inputs(seed=0, apart=0.3):
    """SeedBatch whose ratios lie on both sides of the clip; small sigmas and deviations; advantages
    at both ends and at 0.
    """
    rng = np.random.default_rng(seed)
    v, v_old, v_ref, x0, noise = rng.standard_normal((5, ROWS, *SHAPE))
    v_old = v + apart * v_old
    v_ref = v + apart * v_ref
    sigma = np.array([1.0, 0.7, 0.5, 0.3, 0.1, 2.0**-10])
    per_row = {
        "sigma": sigma,
        "q": np.array([1.0, 0.0, 0.9, 0.3, 0.5, 0.75]),
        "length": np.array([0.1, 0.1, 0.2, 0.1, 0.05, 1e-3]),
        "a": np.array([0.6, 0.8, 0.7, 0.6, 0.3, 0.0]),
        "b": np.array([0.1, 0.2, 0.3, 0.4, 0.7, 1.0]),
        "std": np.array([0.7, 0.4, 0.3, 0.1, 0.02, 1e-3]),
    }

    def along(values):
        return values.reshape(-1, 1, 1, 1)

    x = (1 - along(sigma)) * x0 + along(sigma) * noise
    mean = along(per_row["a"]) * x + along(per_row["b"]) * (x - along(sigma) * v_old)
    after = mean + along(per_row["std"]) * rng.standard_normal(v.shape)
    arrays = {"v": v, "v_old": v_old, "v_ref": v_ref, "x": x, "x0": x0, "after": after} | per_row
    for name in ("y_pos", "y_neg"):
        arrays[name] = x - along(sigma) * v_old + 0.1 * rng.standard_normal(v.shape)
    arrays["g"] = rng.standard_normal(v.shape)
    rounded = {name: value.astype(np.float32) for name, value in arrays.items()}
    # noise that float32 latents stand for
    exact = {name: value.astype(np.float64) for name, value in rounded.items()}
    exact["noise"] = exact["x0"] + (exact["x"] - exact["x0"]) / along(exact["sigma"])
    return rounded, exact


def target_of(name, data):
    step = Step(*(data[field] for field in ("after", "a", "b", "std", "length")))
    target = TrainingTarget(data["x"], data["x0"], data["sigma"], data["q"])
    if OBJECTIVES[name] == "transitions":
        return target._replace(step=step)
    if OBJECTIVES[name] == "reward_gradients":
        names = {"positive": "y_pos", "negative": "y_neg", "gradient": "g"}
        return target._replace(targets={name: data[field] for name, field in names.items()})
    return target


def ours(name, data, algorithm):
    """Loss a row, metrics, and the gradient of the sum of the losses by all three predictions."""
    data = {field: jnp.asarray(value) for field, value in data.items()}

    def total(velocities):
        loss, metrics = load_objective(name)(velocities, target_of(name, data), algorithm)
        return loss.sum(), (loss, metrics)

    velocities = Velocities(data["v"], data["v_old"], data["v_ref"])
    gradient, (loss, metrics) = jax.jit(jax.grad(total, has_aux=True))(velocities)
    return np.asarray(loss, np.float64), metrics, jax.tree.map(np.asarray, gradient)


def references(name, exact, algorithm):
    """Loss a row, and its gradient by central differences."""
    rows = [{field: values[i] for field, values in exact.items()} for i in range(ROWS)]
    for i, row in enumerate(rows):
        row |= {"other": rows[i ^ 1], "better": i % 2 == 0}
    loss = []
    gradient = []
    h = 1e-5
    for row in rows:

        def f(v, row=row):
            return REFERENCES[name](v, row, algorithm)

        bumps = h * np.eye(np.prod(SHAPE)).reshape(-1, *SHAPE)
        slopes = [(f(row["v"] + bump) - f(row["v"] - bump)) / (2 * h) for bump in bumps]
        loss.append(f(row["v"]))
        gradient.append(np.reshape(slopes, SHAPE))
    return np.array(loss), np.array(gradient)


def error(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("seed", first_is_quick(range(3)))
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_equal_the_formula(name, seed):
    data, exact = inputs(seed)
    algorithm = policy_of(name, **POLICIES[name])
    want, want_gradient = references(name, exact, algorithm)
    loss, _, gradient = ours(name, data, algorithm)
    rows = (
        range(ROWS - 1) if OBJECTIVES[name] == "samples" or name == "dpo" else range(ROWS)
    )  # x - x0 of the last is rounding
    for row in rows:
        assert error(loss[row], want[row]) < TOLERANCE, row
        count = 2 if name == "dpo" else 1  # the sum has the pair's loss twice, but the KL once
        expected = want_gradient[row]
        if name == "dpo":
            pull = 2 * algorithm.kl_coef * (exact["v"][row] - exact["v_ref"][row]) / np.prod(SHAPE)
            expected = count * (expected - pull) + pull
        assert error(gradient.trained[row], expected) < GRADIENT_TOLERANCE, row
    assert not gradient.old.any()
    assert not gradient.reference.any()


@pytest.mark.parametrize(
    "name", [name for name, kind in OBJECTIVES.items() if kind == "transitions"]
)
def test_a_planted_mistake_is_seen(name):
    """A sum for a mean, a clip that is none, a KL by another variance: each is many tolerances
    away.
    """
    data, exact = inputs()
    algorithm = policy_of(name, **POLICIES[name])
    loss, metrics, _ = ours(name, data, algorithm)
    assert 0 < float(metrics[LIMITED.get(name, "ratio/clipped")].mean()) < 1
    for planted in (
        dataclasses.replace(algorithm, clip_range=1e6, kl_mask_threshold=1e6),
        dataclasses.replace(algorithm, kl_coef=0.0),
    ):
        want, _ = references(name, exact, planted)
        assert (np.abs(loss - want) / np.maximum(np.abs(want), 1e-6)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - {"dpo"}))
def test_without_a_weight_nothing_reads_the_reference(name):
    """By the program: a NaN in its prediction would spread to whatever reads it."""
    data, _ = inputs()
    algorithm = policy_of(name, **POLICIES.get(name, {}) | {"kl_coef": 0.0})
    data["v_ref"] = np.full_like(data["v_ref"], np.nan)
    loss, metrics, gradient = ours(name, data, algorithm)
    assert "loss/kl" not in metrics
    assert all(np.isfinite(x).all() for x in (loss, gradient.trained, *metrics.values()))


def test_a_log_ratio_is_the_difference_of_log_densities():
    """The mean over dimensions; exactly 0 at the old policy."""
    data, exact = inputs()
    v = jnp.asarray(data["v"])
    old = jnp.asarray(data["v_old"])
    target = target_of("flow_grpo", jax.tree.map(jnp.asarray, data))
    rows = [{field: values[i] for field, values in exact.items()} for i in range(ROWS)]
    want = np.array([gaussian(row["v"], row) - gaussian(row["v_old"], row) for row in rows])
    np.testing.assert_allclose(log_ratio(v, old, target), want, rtol=TOLERANCE, atol=1e-7)
    np.testing.assert_array_equal(log_ratio(v, v, target), 0.0)


@pytest.mark.parametrize(
    "name",
    ["flow_grpo", "mix_grpo", "dance_grpo", "flow_cps", "grpo_guard", "flow_dppo", "awm"],
)
def test_at_the_old_policy_the_ratio_is_one_and_good_steps_become_more_probable(name):
    data = {field: jnp.asarray(value) for field, value in inputs()[0].items()}
    data["v_old"] = data["v"]
    algorithm = policy_of(name, kl_coef=0.0)
    loss, metrics, gradient = ours(name, data, algorithm)
    np.testing.assert_array_equal(metrics["ratio"], 1.0)
    np.testing.assert_array_equal(metrics[LIMITED.get(name, "ratio/clipped")], 0.0)
    scale = 1.0 if name == "awm" else algorithm.adv_clip_max
    if name == "grpo_guard":
        scale = scale / data["length"]
    np.testing.assert_allclose(loss, -scale * (2 * data["q"] - 1), rtol=1e-7)

    def log_p(v):
        if OBJECTIVES[name] == "transitions":
            return log_ratio(v, data["v_old"], target_of(name, data)).sum()
        better = {**data, "v": v, "q": jnp.ones(ROWS)}  # -loss + constants at advantage 1
        return -load_objective(name)(
            Velocities(v, data["v_old"], data["v_ref"]), target_of(name, better), algorithm
        )[0].sum()

    slope = np.asarray(jax.grad(log_p)(jnp.asarray(data["v"])))
    # of the log-ratio that the objective takes, in log-ratios of Gaussians
    unit = {"grpo_guard": data["std"], "flow_cps": 2 * data["std"] ** 2}.get(name, 1.0)
    weight = (scale * unit * (2 * data["q"] - 1)).reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(
        gradient.trained, -weight * slope, rtol=1e-4, atol=1e-6 * np.abs(weight * slope).max()
    )
    assert not gradient.trained[4].any()  # advantage 0


def test_awm_is_finite_where_the_policy_fits_much_better_than_the_old_one():
    """The error of the trained velocity is 1e-10 of the old one's, below the rounding of their
    difference.
    """
    rows = 200
    width = 1024
    rng = np.random.default_rng(0)
    x0, noise, apart = rng.standard_normal((3, rows, width)).astype(np.float32)
    x = np.float32(0.5) * (x0 + noise)
    lead = (x - x0) / np.float32(0.5)
    v = lead + np.float32(1e-5) * np.sign(apart)
    v_old = lead + apart / np.sqrt((apart**2).mean(1, keepdims=True))
    sigma = np.full(rows, 0.5, np.float32)
    q = np.full(rows, 0.75, np.float32)
    target = TrainingTarget(*map(jnp.asarray, (x, x0, sigma, q)))
    algorithm = policy_of("awm", kl_coef=0.0, clip_range=1e6)

    def total(v):
        velocities = Velocities(v, jnp.asarray(v_old), v)
        loss, metrics = load_objective("awm")(velocities, target, algorithm)
        return loss.sum(), metrics

    gradient, metrics = jax.grad(total, has_aux=True)(jnp.asarray(v))
    exact = [np.mean((u.astype(np.float64) - lead) ** 2, axis=1) for u in (v, v_old)]
    log_p, log_p_old = (-0.5 * ((e + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25 for e in exact)
    np.testing.assert_allclose(metrics["ratio"], np.exp(log_p - log_p_old), rtol=1e-4)
    assert np.isfinite(gradient).all()


def test_the_grpo_recipes_divide_by_the_deviation_that_their_code_divides_by():
    deviations = {name: policy_of(name).global_std for name in OBJECTIVES}
    assert not deviations["mix_grpo"]
    assert not deviations["dance_grpo"]
    assert not deviations["grpo_guard"]
    assert not deviations["flow_cps"]
    assert deviations["flow_dppo"]
    assert deviations["flow_grpo"]
    assert deviations["awm"]


@pytest.mark.parametrize(
    ("q", "log_ratio", "loss", "slope"),
    [
        (1.0, 500.0, -1.1, 0.0),  # the ratio overflows past the clip, and where A is 0
        (0.75, np.inf, -0.55, 0.0),
        (0.5, 500.0, 0.0, 0.0),
        (0.0, -500.0, 0.9, 0.0),  # it underflows to 0
        (1.0, -500.0, 0.0, 0.0),
        (1.0, 0.05, -np.exp(0.05), -np.exp(0.05)),  # the clip does not decide
        (0.0, 0.5, np.exp(0.5), np.exp(0.5)),
        (0.0, 500.0, np.inf, np.inf),  # not bounded by the clip
    ],
)
def test_a_clipped_ratio_that_overflows_leaves_loss_and_gradient_finite(q, log_ratio, loss, slope):
    algorithm = policy_of("flow_grpo", clip_range=0.1)
    one = jnp.ones(1)
    target = TrainingTarget(one, one, one, jnp.float32([q]))

    def total(log_r):
        return clipped_policy(log_r, target, algorithm, 1.0)[0].sum()

    got = jax.jit(jax.value_and_grad(total))(jnp.float32([log_ratio]))
    np.testing.assert_allclose(np.hstack(got), [loss, slope], rtol=1e-6)


@pytest.mark.slow
def test_the_clipped_loss_has_the_bits_of_its_formula_for_ratios_that_are_finite():
    algorithm = policy_of("flow_grpo", clip_range=0.1)
    rng = np.random.default_rng(0)
    log_r = jnp.asarray(np.concatenate([rng.normal(0, 0.2, 500), rng.normal(0, 20, 100), [0.0]]))
    q = jnp.asarray(rng.random(601).round(2), jnp.float32)
    target = TrainingTarget(log_r, log_r, log_r, q)

    def formula(log_r):
        advantage = 5 * (2 * q - 1)
        ratio = jnp.exp(log_r)
        return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1 - 0.1, 1 + 0.1))

    def ours(log_r):
        return clipped_policy(log_r, target, algorithm, 5.0)[0]

    for function in (lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())):
        np.testing.assert_array_equal(function(ours)(log_r), function(formula)(log_r))


def test_a_masked_ratio_that_overflows_reaches_neither_loss_nor_gradient():
    data, _ = inputs()
    data["q"] = np.array([1.0] * (ROWS - 1) + [0.5], np.float32)  # the last has no advantage
    # The step ends far beyond the trained policy's mean, as seen from the old one's.
    far = data["b"] * data["sigma"] / data["std"] ** 2
    ahead = (data["v_old"] - data["v"]) * (3e3 / far).reshape(-1, 1, 1, 1)
    data["after"] = (data["after"] + ahead).astype(np.float32)
    algorithm = policy_of("flow_dppo", kl_coef=0.0, kl_mask_threshold=1e-6)
    loss, metrics, gradient = ours("flow_dppo", data, algorithm)
    assert metrics["ratio"].max() == metrics["ratio"][-1] == MAX_RATIO
    np.testing.assert_array_equal(metrics["ratio/masked"], [1.0] * (ROWS - 1) + [0.0])
    np.testing.assert_array_equal(loss, 0.0)
    assert not gradient.trained.any()


def test_a_gradient_of_zero_trains_nothing_and_at_the_old_policy_the_loss_of_refl_is_zero():
    data, _ = inputs()
    data["g"][0] = 0.0
    loss, metrics, gradient = ours("refl", data, policy_of("refl"))
    assert loss[0] == metrics["gradient/norm"][0] == 0
    assert not gradient.trained[0].any()
    assert all(gradient.trained[row].any() for row in range(1, ROWS))
    data["v_old"] = data["v"]
    loss, _, gradient_at_old = ours("refl", data, policy_of("refl"))
    np.testing.assert_array_equal(loss, 0.0)
    np.testing.assert_array_equal(gradient_at_old.trained, gradient.trained)


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo", "flow_cps", "grpo_guard", "flow_dppo"])
def test_a_ratio_past_the_clip_has_no_gradient(name):
    """Only where it has gone the way that its advantage pushes. The clip of flow_dppo is a
    divergence.
    """
    data, exact = inputs(apart=1.0)
    algorithm = policy_of(name, kl_coef=0.0, clip_range=0.01, kl_mask_threshold=0.2)
    _, metrics, gradient = ours(name, data, algorithm)
    ratio = np.asarray(metrics["ratio"])
    advantage = 2 * exact["q"] - 1
    clip = 0.0 if name == "flow_dppo" else 0.01
    mask = (advantage * (ratio - 1) > clip * np.abs(advantage)) & (advantage != 0)
    if name == "flow_dppo":
        divergence = np.array(
            [
                drift_of_means(row["v"], row)
                for row in ({f: x[i] for f, x in exact.items()} for i in range(ROWS))
            ]
        )
        np.testing.assert_allclose(metrics["divergence"], divergence, rtol=TOLERANCE)
        mask &= divergence >= 0.2
    assert 0 < mask.sum() < ROWS - 1
    assert not gradient.trained[mask].any()
    assert all(gradient.trained[row].any() for row in np.flatnonzero(~mask & (advantage != 0)))


def test_dpo_prefers_the_better_sample_of_a_pair():
    data, _ = inputs()
    data["v_ref"] = data["v"]
    loss, metrics, gradient = ours("dpo", data, policy_of("dpo"))
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    lead = (data["x"] - data["x0"]) / data["sigma"].reshape(-1, 1, 1, 1)
    for row in range(ROWS - 1):
        towards = (gradient.trained[row] * (data["v"][row] - lead[row])).sum()
        assert towards > 0 if row % 2 == 0 else towards < 0
    data["v"] = data["v"] - 1e-3 * gradient.trained / np.abs(gradient.trained).max()
    after, metrics, _ = ours("dpo", data, policy_of("dpo"))
    assert (after < loss).all()
    np.testing.assert_array_equal(metrics["preferred"], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_is_a_function_of_itself_or_of_its_pair(name):
    assert isinstance(load_objective(name), Objective)
    data, _ = inputs()
    algorithm = policy_of(name)
    loss, _, gradient = ours(name, data, algorithm)
    poisoned = {
        field: np.concatenate([np.full_like(a[:1], np.nan), a[1:]]) for field, a in data.items()
    }
    got, _, got_gradient = ours(name, poisoned, algorithm)
    others = slice(2 if name == "dpo" else 1, None)
    np.testing.assert_array_equal(got[others], loss[others])
    np.testing.assert_array_equal(got_gradient.trained[others], gradient.trained[others])
    assert np.isnan(got[0])
