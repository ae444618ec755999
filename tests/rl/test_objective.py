"""The policy loss and its gradient against PyTorch, written from the formula of the paper with no
thought to form.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from solrl_jax.rl.objective import TrainingTarget, Velocities
from solrl_jax.rl.objectives.nft import nft_loss

# Largest difference over largest value; float32, whose products and sums round apart, against
# float64.
TOLERANCE = 3e-6
ROWS = 5
SHAPE = (4, 4, 3)
CLIP = 5.0
CASES = {
    "beta 1": dict(beta=1.0, kl_coef=1e-4),
    "beta 0.1": dict(beta=0.1, kl_coef=1e-4),
    "kl": dict(beta=0.5, kl_coef=2.0),
}


def inputs(seed=0):
    """Predictions, noisy and clean latents, sigma, q; the last row's error lies below the floor of
    the denominator.
    """
    rng = np.random.default_rng(seed)
    v, v_old, v_ref, noise, x0 = rng.standard_normal((5, ROWS, *SHAPE))
    sigma = np.array([1.0, 0.7, 0.3, 0.05, 2.0**-20])
    s = sigma.reshape(-1, 1, 1, 1)
    x = (1 - s) * x0 + s * noise
    x[-1] = x0[-1] = 0.0  # so that float32 holds an error this small
    q = np.array([0.0, 0.3, 0.5, 0.8, 1.0])
    arrays = dict(v=v, v_old=v_old, v_ref=v_ref, x=x, x0=x0, sigma=sigma, q=q)
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def reference(data, *, beta, kl_coef, detach=True):
    """(loss [b], gradient of its weighted sum by v) in float64."""
    t = {name: torch.from_numpy(value).double() for name, value in data.items()}
    v = t["v"].requires_grad_()
    v_pos = beta * v + (1 - beta) * t["v_old"]
    v_neg = (1 + beta) * t["v_old"] - beta * v

    def weighted_error(u, row):
        error = t["x"][row] - t["sigma"][row] * u[row] - t["x0"][row]
        denominator = error.abs().mean().clamp(min=1e-5)
        return (error**2).mean() / (denominator.detach() if detach else denominator)

    losses = []
    for row in range(ROWS):
        q = t["q"][row]
        policy = q * weighted_error(v_pos, row) / beta + (1 - q) * weighted_error(v_neg, row) / beta
        losses.append(CLIP * policy + kl_coef * ((v[row] - t["v_ref"][row]) ** 2).mean())
    loss = torch.stack(losses)
    (loss * torch.from_numpy(WEIGHTS)).sum().backward()
    return loss.detach().numpy(), v.grad.numpy()


WEIGHTS = np.array([1.0, -2.0, 0.5, 3.0, 1.0])


def loss_of(data, **options):
    """`nft_loss` of named arrays."""
    x = {name: jnp.asarray(value) for name, value in data.items()}
    return nft_loss(
        Velocities(x["v"], x["v_old"], x["v_ref"]),
        TrainingTarget(x["x"], x["x0"], x["sigma"], x["q"]),
        **options,
    )


def ours(data, **options):
    def total(predictions):
        loss, metrics = loss_of(data | predictions, adv_clip_max=CLIP, **options)
        return (loss * WEIGHTS.astype(np.float32)).sum(), (loss, metrics)

    gradient, (loss, metrics) = jax.grad(total, has_aux=True)(
        {name: data[name] for name in ("v", "v_old", "v_ref")}
    )
    return loss, gradient, metrics


def relative(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_formula(case):
    data = inputs()
    want, want_gradient = reference(data, **CASES[case])
    loss, gradient, _ = ours(data, **CASES[case])
    assert loss.shape == (ROWS,)
    for row in range(ROWS):  # each by itself: they differ by orders of magnitude
        assert relative(loss[row : row + 1], want[row : row + 1]) < TOLERANCE
        assert relative(gradient["v"][row], want_gradient[row]) < TOLERANCE
        assert np.abs(want_gradient[row]).max() > 0


@pytest.mark.parametrize("case", CASES)
def test_the_comparison_catches_a_gradient_through_the_denominator(case):
    data = inputs()
    loss, gradient, _ = ours(data, **CASES[case])
    planted, planted_gradient = reference(data, **CASES[case], detach=False)
    assert relative(loss, planted) < TOLERANCE
    assert relative(gradient["v"], planted_gradient) > 1e4 * TOLERANCE
    # but not in the row that lies under the floor, which is a constant
    assert relative(gradient["v"][-1], planted_gradient[-1]) < TOLERANCE


def test_the_cases_differ_by_many_tolerances():
    losses = [reference(inputs(), **options) for options in CASES.values()]
    for i, (loss, gradient) in enumerate(losses):
        for other, other_gradient in losses[:i]:
            assert relative(loss, other) > 1e4 * TOLERANCE
            assert relative(gradient, other_gradient) > 1e4 * TOLERANCE


def test_the_old_policy_and_the_reference_have_no_gradient():
    _, gradient, _ = ours(inputs(), **CASES["kl"])
    assert np.abs(gradient["v"]).max() > 0.01
    assert not gradient["v_old"].any()
    assert not gradient["v_ref"].any()


def test_an_average_sample_gives_no_policy_gradient_at_the_old_policy():
    data = inputs()
    data["v"] = data["v_old"]
    data["q"] = np.full(ROWS, 0.5, np.float32)
    _, gradient, _ = ours(data, beta=1.0, kl_coef=0.0)
    np.testing.assert_array_equal(gradient["v"], 0)
    _, other, _ = ours(data | {"q": np.full(ROWS, 0.6, np.float32)}, beta=1.0, kl_coef=0.0)
    assert (np.abs(other["v"]).max((1, 2, 3)) > 0).all()
    # what is left is the pull towards the reference
    _, gradient, metrics = ours(data, beta=1.0, kl_coef=0.3)
    pull = 2 * 0.3 * (data["v"] - data["v_ref"]) / np.prod(SHAPE) * WEIGHTS.reshape(-1, 1, 1, 1)
    assert relative(gradient["v"], pull) < TOLERANCE
    assert not metrics["loss/drift"].any()


def test_a_good_sample_pulls_and_a_bad_one_pushes():
    data = inputs()
    data["v"] = data["v_old"]
    velocity = (data["x"] - data["x0"]) / data["sigma"].reshape(
        -1, 1, 1, 1
    )  # the one that leads to x0
    towards = (data["v"] - velocity)[:4]
    for q, sign in ((1.0, 1), (0.0, -1)):
        gradient = jax.grad(
            lambda v, q=q: loss_of(
                data | {"v": v, "q": np.full(ROWS, q, np.float32)},
                beta=1.0,
                kl_coef=0.0,
                adv_clip_max=CLIP,
            )[0].sum()
        )(data["v"])[:4]
        cosine = (gradient * towards).sum((1, 2, 3)) / np.sqrt(
            (gradient**2).sum((1, 2, 3)) * (towards**2).sum((1, 2, 3))
        )
        np.testing.assert_allclose(cosine, sign, atol=1e-5)


def test_metrics_are_the_parts_of_the_loss():
    data = inputs()
    loss, _, metrics = ours(data, **CASES["kl"])

    def square(a, b):
        return ((data[a].astype(np.float64) - data[b]) ** 2).mean((1, 2, 3))

    assert relative(metrics["loss/kl"], square("v", "v_ref")) < TOLERANCE
    assert relative(metrics["loss/drift"], square("v", "v_old")) < TOLERANCE
    np.testing.assert_allclose(
        metrics["loss/policy"] + CASES["kl"]["kl_coef"] * metrics["loss/kl"], loss, rtol=1e-6
    )
    assert set(metrics) == {"loss/policy", "loss/kl", "loss/drift"}


def test_the_advantage_clip_scales_the_policy_part_alone():
    data = inputs()

    def part(clip):
        return loss_of(data, beta=0.5, kl_coef=2.0, adv_clip_max=clip)[1]

    np.testing.assert_allclose(part(10.0)["loss/policy"], 2 * part(5.0)["loss/policy"], rtol=1e-6)
    np.testing.assert_array_equal(part(10.0)["loss/kl"], part(5.0)["loss/kl"])


def test_a_row_is_a_function_of_itself():
    data = inputs()
    loss, gradient, _ = ours(data, **CASES["beta 0.1"])
    poisoned = {
        name: np.concatenate([np.full_like(a[:1], np.nan), a[1:]]) for name, a in data.items()
    }
    poisoned_loss, poisoned_gradient, _ = ours(poisoned, **CASES["beta 0.1"])
    np.testing.assert_array_equal(poisoned_loss[1:], loss[1:])
    np.testing.assert_array_equal(poisoned_gradient["v"][1:], gradient["v"][1:])
    assert jnp.isnan(poisoned_loss[0])
