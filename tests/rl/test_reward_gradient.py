"""The gradient of the reward by the clean latents: against differences; on other meshes; of rewards
that have none; and the targets that opsd makes of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.vision.image_resize import Preprocessing
from solrl_jax.parallel import sharding
from solrl_jax.rewards.protocol import Reward
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.objectives import opsd
from solrl_jax.rl.reward_gradient import gradient_decoder, reward_gradient, try_targets
from tests.cases import first_is_quick
from tests.small import small_config
from tests.toys import SHAPE, toy_backbone, toy_experiment, toy_reward

PROMPTS = ("a red circle", "two blue squares")
OPSD = ("objective=opsd", "reward=tiny-clip", "reward.eval_only=[shapes]")
ALGORITHM = resolve("tiny", ["objective=opsd"]).algorithm


def difference(f, x, direction, h):
    """The central difference of the rewards along a direction per sample."""
    return (f(x + h * direction) - f(x - h * direction)) / (2 * h)


def smooth_reward() -> Reward:
    """A reward that is curved everywhere."""

    def score(params, images, wanted):
        return {"reward": jnp.sin(params * images).mean((1, 2, 3)) + wanted * images[:, 0, 0, 0]}

    return dataclasses.replace(toy_reward(), score=score)


def test_the_gradient_equals_differences_in_float64():
    """To 1e-8 of the largest slope, with the toy decoder."""
    reward = smooth_reward()
    backbone = toy_backbone()
    rng = np.random.default_rng(0)
    index = np.array([0, 1, 0])
    with jax.enable_x64(True), jax.set_mesh(backbone.mesh):
        decoder = dataclasses.replace(backbone.decoder, params=jnp.float64(0.7))
        latents = rng.standard_normal((3, *SHAPE))
        params = jnp.float64(3.0)
        prepared = reward.prepare(PROMPTS).astype(np.float64)

        def rewards(latents):
            return np.asarray(reward_gradient(reward, decoder, params, latents, prepared, index)[0])

        _, gradient = reward_gradient(reward, decoder, params, latents, prepared, index)
        assert gradient.dtype == np.float64
        for direction in rng.standard_normal((3, *latents.shape)):
            slope = (np.asarray(gradient) * direction).sum((1, 2, 3))
            error = np.abs(difference(rewards, latents, direction, 1e-4) - slope)
            assert error.max() < 1e-8 * np.abs(slope).max()


@pytest.mark.parametrize("preset", ["tiny", "tiny model=tiny-sd3", "tiny model=tiny-flux"])
@pytest.mark.exhaustive  # a toy in float64 is compared above
def test_the_gradient_of_an_embedded_decoder_and_tower_equals_differences(preset):
    """In float32, and pixels are clipped, so to 1 % of the norm of the gradient; along it and along
    a random direction, with whole images and with tiles.
    """
    name, *overrides = preset.split()
    overrides += ["rollout.precision=fp32", "rollout.explore.precision=fp32"]
    built = experiments.build(small_config("unused", *overrides, *OPSD, preset=name))
    reward = built.reward
    prepared = reward.prepare(PROMPTS)
    index = np.array([0, 1])
    rng = np.random.default_rng(1)
    latents = rng.standard_normal((2, *built.backbone.pipeline.latent_shape(*built.size)))
    latents = latents.astype(np.float32)
    compression = built.backbone.pipeline.compression
    for tile in (None, max(built.size[0] // 2, compression)):
        decoder = dataclasses.replace(gradient_decoder(built.backbone.decoder), tile=tile)
        with jax.set_mesh(built.backbone.mesh):

            def both(latents, decoder=decoder):
                out = reward_gradient(reward, decoder, reward.params, latents, prepared, index)
                return [np.asarray(x, np.float64) for x in out]

            _, gradient = both(latents)
            norm = np.sqrt((gradient**2).sum((1, 2, 3), keepdims=True))
            for direction in (gradient / norm, rng.standard_normal(gradient.shape)):
                unit = direction / np.sqrt((direction**2).sum((1, 2, 3), keepdims=True))

                def rewards(x):
                    return both(x.astype(np.float32))[0]

                slope = (gradient * unit).sum((1, 2, 3))
                error = np.abs(difference(rewards, latents, unit, 1e-3) - slope)
                assert error.max() < 0.01 * norm.max(), (tile, error, slope)


class Recorder:
    """A pipeline whose decoder notes how many latents it decodes at once."""

    compression = 8

    def __init__(self):
        self.counts = set()

    def decode(self, params, latents):
        self.counts.add(len(latents))
        return latents.repeat(8, 1).repeat(8, 2)[..., :3]


@pytest.mark.parametrize(
    ("side", "tile", "count"),
    [(32, None, 4), (256, None, 4), (512, None, 1), (1024, None, 1), (1024, 256, 4)],
)
def test_small_images_are_differentiated_together_and_large_ones_alone(side, tile, count):
    recorder = Recorder()
    decoder = gradient_decoder(Decoder({}, recorder, jnp.dtype("float32"), tile))
    jax.eval_shape(decoder, jax.ShapeDtypeStruct((8, side // 8, side // 8, 4), jnp.float32))
    assert recorder.counts == {count}


def test_pillows_rounding_has_the_gradient_of_the_resize_without_it():
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.random((2, 20, 30, 3)), jnp.float32)
    weights = rng.standard_normal((2, 8, 8, 3)).astype(np.float32)
    gradients = [
        jax.jit(jax.grad(lambda x, p=p: (weights * p(x)).sum()))(images)
        for p in (
            Preprocessing(8, "bicubic", eight_bit=eight_bit, fit="crop")
            for eight_bit in (True, False)
        )
    ]
    assert np.abs(gradients[1]).max() > 0
    np.testing.assert_array_equal(*gradients)


def test_on_eight_devices_targets_and_update_are_those_of_one():
    ends = []
    for mesh in ((1, 1), (2, 2, 2)):
        toy = toy_experiment(*OPSD, "rollout.candidates=8", mesh=mesh)
        state, outcome = iterate(toy, fresh_state(toy), 1)
        ends.append((jax.device_get(state), outcome))
    (one, outcome), (eight, on_eight) = ends
    assert on_eight.metrics["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-5)
    assert outcome.metrics["target/distance"] == pytest.approx(ALGORITHM.target_radius, abs=0.03)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_a_sample_has_the_gradient_that_it_has_alone_whatever_the_others_hold():
    reward = smooth_reward()
    backbone = toy_backbone()
    latents = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype(np.float32)
    prepared = reward.prepare(PROMPTS)
    spoilt = latents.copy()
    spoilt[1] = np.nan
    with jax.set_mesh(sharding.rows_only(backbone.mesh)):
        decoder = gradient_decoder(backbone.decoder)

        def gradient(latents, index):
            arguments = (reward, decoder, reward.params, latents, prepared, np.array(index))
            return np.asarray(reward_gradient(*arguments)[1])

        many = gradient(spoilt, [0, 1, 1])
        alone = gradient(latents[2:], [1])
    np.testing.assert_array_equal(many[2:], alone)
    assert np.isnan(many[1]).any()
    assert np.isfinite(many[0]).all()


# --- the targets of opsd ---


def bowl(centre):
    """R(y) = -|y - centre|^4 / 4 of each sample, and its gradient."""

    def gradient(y):
        away = y - centre
        square = (away**2).sum((1, 2, 3), keepdims=True)
        return -(square.reshape(-1) ** 2) / 4, -square * away

    return gradient


@pytest.mark.parametrize("steps", first_is_quick([2, 1, 5]))
def test_targets_equal_the_formula_in_float64(steps):
    """To 1e-6 of their size; no further than the radius, in twice the steps less one gradients."""
    rng = np.random.default_rng(steps)
    anchor, centre = rng.standard_normal((2, 4, *SHAPE))
    algorithm = dataclasses.replace(ALGORITHM, target_radius=0.3, target_steps=steps)
    got = opsd.targets(bowl(jnp.asarray(centre, jnp.float32)), jnp.float32(anchor), algorithm)
    names, calls = try_targets(algorithm)
    assert (names, calls) == (("positive", "negative"), 2 * steps - 1)
    for name, sign in (("positive", 1), ("negative", -1)):
        for row in range(4):
            y = anchor[row]
            length = 0.3 * np.linalg.norm(y) / steps
            for _ in range(steps):
                g = bowl(centre[row][None])(y[None])[1][0]
                y = y + sign * length * g / (np.linalg.norm(g) + 1e-12)
            np.testing.assert_allclose(got[name][row], y, atol=1e-6 * np.abs(y).max())
            moved = np.linalg.norm(got[name][row] - anchor[row])
            assert moved <= 0.3 * np.linalg.norm(anchor[row]) * (1 + 1e-6)


@pytest.mark.parametrize(("value", "finite"), [(0.0, True), (np.nan, False), (np.inf, False)])
def test_a_gradient_of_zero_moves_nothing_and_one_that_is_not_finite_stays_in_its_row(
    value, finite
):
    anchor = np.random.default_rng(0).standard_normal((2, *SHAPE)).astype(np.float32)

    def gradient(y):
        return jnp.zeros(len(y)), jnp.full(y.shape, jnp.float32(1e-3)).at[0].set(value)

    targets = opsd.targets(gradient, jnp.asarray(anchor), ALGORITHM)
    for latents in targets.values():
        assert np.isfinite(latents[0]).all() == finite
        if value == 0:
            np.testing.assert_array_equal(latents[0], anchor[0])
        assert np.isfinite(latents[1]).all()
        assert np.abs(latents[1] - anchor[1]).max() > 0


def test_one_sample_and_any_scale_of_the_reward_give_the_same_targets():
    rng = np.random.default_rng(0)
    anchor, centre = rng.standard_normal((2, 1, *SHAPE)).astype(np.float32)
    targets = [
        opsd.targets(
            lambda y, scale=scale: (0.0, scale * bowl(centre)(y)[1]), jnp.asarray(anchor), ALGORITHM
        )
        for scale in (1.0, 2.0**-20, 2.0**20)
    ]
    for other in targets[1:]:
        for name, latents in targets[0].items():
            np.testing.assert_allclose(latents, other[name], rtol=1e-6, atol=1e-6)


# --- what has no gradient ---


def grouped() -> Reward:
    return dataclasses.replace(toy_reward(), groupwise=True, differentiable=True)


def undeclared() -> Reward:
    return toy_reward()


def on_host(images, prompts, metadata):
    raise AssertionError("is never called")


def declared() -> Reward:
    return dataclasses.replace(toy_reward(), differentiable=True)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ("{tiny-clip: 1, shapes: 1}", "'shapes' is not declared differentiable"),
        ("{shapes/strict: 1}", "'shapes' is not declared differentiable"),
        ("{jpeg_compressibility: 1}", "'jpeg_compressibility' is scored outside JAX"),
        (f"{{'{__name__}:on_host': 1}}", f"'{__name__}:on_host' is scored outside JAX"),
        (f"{{'{__name__}:grouped': 1}}", f"'{__name__}:grouped' compares the candidates"),
        (f"{{'{__name__}:undeclared': 1}}", f"'{__name__}:undeclared' is not declared"),
    ],
)
def test_rewards_without_a_gradient_are_refused_by_name_before_anything_is_loaded(weights, reason):
    config = small_config(
        "unused", "objective=opsd", f"reward.weights={weights}", "model.path=no/such/folder"
    )
    message = f"^reward.weights: {reason}.* algorithm.objective=opsd needs its gradient; there are "
    with pytest.raises(InputError, match=message):
        experiments.build(config)


def test_a_run_that_watches_no_other_reward_says_so_and_a_declared_plugin_is_taken():
    name = f"{__name__}:declared"
    config = small_config("unused", "objective=opsd", f"reward={name}")
    with pytest.warns(
        UserWarning, match=f"opsd follows the gradient of {name}, and reward.eval_only"
    ):
        experiments.build(config)


def no_targets(velocities, target, algorithm):
    raise AssertionError("is never called")


no_targets.trains_on = "reward_gradients"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (
                "reward.weights={tiny-clip: 1, hpsv2: 1}",
                "reward.combine=advantages",
            ),
            "reward.combine='advantages': must be sum for the reward gradients",
        ),
        ((f"objective={__name__}:no_targets",), "algorithm.timestep_fraction=0.7: must be 0.333 "),
        (
            (f"objective={__name__}:no_targets", "algorithm.timestep_fraction=0.34"),
            "trains on reward gradients and has no function",
        ),
        (("rollout.guidance_scale=4.5",), "rollout.guidance_scale=4.5: must be 1 with"),
    ],
)
def test_settings_that_have_no_gradient_are_one_line(overrides, message):
    with pytest.raises((ConfigError, InputError), match=message):
        experiments.build(small_config("unused", *OPSD, *overrides))
