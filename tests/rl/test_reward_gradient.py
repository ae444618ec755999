"""The gradient of the reward with respect to the clean latents.

It is compared with differences and between meshes, and refused for rewards that have none. The
objectives that use it are opsd, which makes targets of it, and refl and draft, which follow it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.diffusion.seeds import draw_steps, normal
from solrl_jax.errors import InputError
from solrl_jax.models.decoder import Decoder
from solrl_jax.models.vision.image_resize import Preprocessing
from solrl_jax.parallel import sharding
from solrl_jax.rewards.protocol import Reward, score_samples
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl import iteration as iterations
from solrl_jax.rl import update as updates
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.objective import TrainingTarget, Velocities, load_objective, make_targets_of
from solrl_jax.rl.objectives import opsd
from solrl_jax.rl.reward_gradient import gradient_decoder, reward_gradient, try_targets
from solrl_jax.runs import metrics, trainer
from solrl_jax.runs.progress import TerminalProgress
from tests.cases import first_is_quick
from tests.small import small_config
from tests.toys import (
    HIDDEN,
    SHAPE,
    toy_backbone,
    toy_config,
    toy_experiment,
    toy_grid,
    toy_reward,
)

PROMPTS = ("a red circle", "two blue squares")
WATCHED = ("reward=tiny-clip", "reward.eval_only=[shapes]")
OPSD = ("objective=opsd", *WATCHED)
ALGORITHM = resolve("tiny", ["objective=opsd"]).algorithm


def difference(f, x, direction, h):
    """The central difference of the rewards along a direction per sample."""
    return (f(x + h * direction) - f(x - h * direction)) / (2 * h)


def smooth_reward() -> Reward:
    """A reward that is curved everywhere."""

    def score(params, images, prepared):
        return {"reward": jnp.sin(params * images).mean((1, 2, 3)) + prepared * images[:, 0, 0, 0]}

    return dataclasses.replace(toy_reward(), score=score, others=())


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


class Painter:
    """A pipeline whose decoder paints eight pixels each way for a latent, whatever is beside it."""

    compression = 8

    def decode(self, params, latents):
        images = jax.nn.sigmoid(params * latents[..., :3] ** 2)
        return images.repeat(8, 1).repeat(8, 2)


@pytest.mark.slow
def test_tiles_have_the_gradient_of_the_whole_image_also_through_a_tower():
    """Of images of 64 pixels, in tiles of 32 that overlap and are blended; to 1e-5 of the largest
    slope, in float32.
    """
    resize = Preprocessing(16, "bicubic", eight_bit=True, fit="crop")

    def score(params, images, prepared):
        return smooth_reward().score(params, resize(images), prepared)

    reward = dataclasses.replace(toy_reward(), score=score, others=())
    pipeline = Painter()
    latents = np.random.default_rng(0).standard_normal((2, 8, 8, 4)).astype(np.float32)

    def both(tile):
        decoder = gradient_decoder(Decoder(jnp.float32(0.7), pipeline, jnp.dtype("float32"), tile))
        prepared = reward.prepare(PROMPTS)
        return reward_gradient(
            reward, decoder, jnp.float32(3.0), latents, prepared, np.array([0, 1])
        )

    with jax.set_mesh(toy_backbone().mesh):
        rewards, gradient = both(None)
        tiled_rewards, tiled_gradient = both(32)
    np.testing.assert_allclose(tiled_rewards, rewards, rtol=1e-5)
    assert (np.abs(gradient[..., :3]).max((1, 2, 3)) > 0).all()
    np.testing.assert_allclose(tiled_gradient, gradient, atol=1e-5 * np.abs(gradient).max())


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


@pytest.mark.slow
@pytest.mark.parametrize("objective", first_is_quick(["opsd", "refl", "draft"]))
def test_on_eight_devices_targets_and_update_are_those_of_one(objective):
    ends = []
    for mesh in ((1, 1), (2, 2, 2)):
        toy = toy_experiment(f"objective={objective}", *WATCHED, mesh=mesh)
        state, outcome = iterate(toy, fresh_state(toy), 1)
        ends.append((jax.device_get(state), outcome))
    (one, outcome), (eight, on_eight) = ends
    assert on_eight.metrics["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-5, abs=1e-9)
    if objective == "opsd":
        radius = pytest.approx(ALGORITHM.target_radius, abs=0.03)
        assert outcome.metrics["target/distance"] == radius
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_a_sample_has_the_gradient_that_it_has_alone_whatever_the_others_hold():
    reward = smooth_reward()
    backbone = toy_backbone()
    latents = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype(np.float32)
    prepared = reward.prepare(PROMPTS)
    spoilt = latents.copy()
    spoilt[1] = np.nan
    with jax.set_mesh(sharding.row_mesh(backbone.mesh)):
        decoder = gradient_decoder(backbone.decoder)

        def gradient(latents, index):
            arguments = (reward, decoder, reward.params, latents, prepared, np.array(index))
            return np.asarray(reward_gradient(*arguments)[1])

        many = gradient(spoilt, [0, 1, 1])
        alone = gradient(latents[2:], [1])
    np.testing.assert_array_equal(many[2:], alone)
    assert np.isnan(many[1]).any()
    assert np.isfinite(many[0]).all()


def test_a_sample_without_a_score_has_no_gradient():
    """The score is masked where a latent is NaN, which alone gives it a gradient of 0."""

    def score(params, latents, prepared):
        known = jnp.isfinite(latents).all((1, 2, 3))
        return {"reward": jnp.where(known, jnp.where(known, latents[:, 0, 0, 0], 0.0), jnp.nan)}

    reward = dataclasses.replace(toy_reward(), score=score, others=(), inputs="latents")
    backbone = toy_backbone()
    latents = np.zeros((2, *SHAPE), np.float32)
    latents[1, 0, 0, 0] = np.nan
    with jax.set_mesh(sharding.row_mesh(backbone.mesh)):
        decoder = gradient_decoder(backbone.decoder)
        arguments = (reward, decoder, None, latents, reward.prepare(PROMPTS), np.array([0, 1]))
        rewards, gradient = map(np.asarray, reward_gradient(*arguments))
    assert np.isnan(rewards).tolist() == [False, True]
    assert np.isnan(gradient[1]).all()
    assert (gradient[0].sum(), gradient[0, 0, 0, 0]) == (1, 1)


# --- the targets of opsd ---


def bowl(center):
    """R(y) = -|y - center|^4 / 4 of each sample, and its gradient."""

    def gradient(y):
        away = y - center
        square = (away**2).sum((1, 2, 3), keepdims=True)
        return -(square.reshape(-1) ** 2) / 4, -square * away

    return gradient


@pytest.mark.parametrize("steps", first_is_quick([2, 1, 5]))
def test_targets_equal_the_formula_in_float64(steps):
    """To 1e-6 of their size; no further than the radius, in twice the steps less one gradients."""
    rng = np.random.default_rng(steps)
    anchor, center = rng.standard_normal((2, 4, *SHAPE))
    algorithm = dataclasses.replace(ALGORITHM, target_radius=0.3, target_steps=steps)
    got = opsd.targets(bowl(jnp.asarray(center, jnp.float32)), jnp.float32(anchor), algorithm)
    names, calls = try_targets(algorithm)
    assert (names, calls) == (("positive", "negative"), 2 * steps - 1)
    for name, sign in (("positive", 1), ("negative", -1)):
        for row in range(4):
            y = anchor[row]
            length = 0.3 * np.linalg.norm(y) / steps
            for _ in range(steps):
                g = bowl(center[row][None])(y[None])[1][0]
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
    anchor, center = rng.standard_normal((2, 1, *SHAPE)).astype(np.float32)
    targets = [
        opsd.targets(
            lambda y, scale=scale: (0.0, scale * bowl(center)(y)[1]), jnp.asarray(anchor), ALGORITHM
        )
        for scale in (1.0, 2.0**-20, 2.0**20)
    ]
    for other in targets[1:]:
        for name, latents in targets[0].items():
            np.testing.assert_allclose(latents, other[name], rtol=1e-6, atol=1e-6)


# --- refl and draft ---


def sampled(name, steps, schedule, velocity, noise):
    """The clean latents whose reward the released objective differentiates, by plain steps of the
    solver: those predicted at `steps`, or the end of the sampler. No other step has a gradient.
    """
    last = schedule.steps - 1
    x = noise
    before = jnp.zeros_like(noise)
    predicted = jnp.zeros_like(noise)
    for i in range(schedule.steps):
        x = jax.lax.stop_gradient(x)
        a, b, c, _, _ = schedule.table[i]
        x0 = x - schedule.sigmas[i] * velocity(x, schedule.timesteps[i])
        here = jnp.asarray(steps == i).reshape(-1, *(1,) * (noise.ndim - 1))
        x = a * x + b * x0 + c * jax.lax.stop_gradient(before)
        predicted = jnp.where(here, x if name == "draft" and i == last else x0, predicted)
        before = x0
    return predicted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["refl", "draft"])
def test_the_parameters_get_the_gradient_of_the_released_objective_in_float64(name):
    """Of minus the reward, through network, solver, decoder and reward at once, to 1e-10 of the
    largest number. Only with the policy that sampled: another one has the linear approximation.
    """
    reward = smooth_reward()
    backbone = toy_backbone()
    rng = np.random.default_rng(0)
    schedule = toy_grid(5, solver="dpm2")
    steps = {"refl": np.array([2, 4, 3]), "draft": np.array([4, 4, 4])}[name]
    index = np.array([0, 1, 0])
    with jax.enable_x64(True), jax.set_mesh(backbone.mesh):
        kernels = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), backbone.transformer)
        decoder = dataclasses.replace(backbone.decoder, params=jnp.float64(0.7))
        backbone = dataclasses.replace(backbone, dtype=jnp.dtype("float64"))
        text = {"text": jnp.asarray(rng.standard_normal((3, HIDDEN)))}
        noise = jnp.asarray(rng.standard_normal((3, *SHAPE)))
        prepared = reward.prepare(PROMPTS).astype(np.float64)

        def velocity(params, x, time):
            return backbone.velocity(params, x, text, jnp.float64(time), jnp.float64(1))

        def released(params):
            fields = (schedule, lambda x, time: velocity(params, x, time), noise)
            images = decoder(sampled(name, steps, *fields))
            return -reward.score(jnp.float64(3), images, prepared[index])["reward"].sum()

        states = []
        sampled(
            name, steps, schedule, lambda x, t: states.append(x) or velocity(kernels, x, t), noise
        )
        x = jnp.stack(states)[steps, np.arange(3)]
        sigma = schedule.sigmas[steps].astype(np.float64)
        time = jnp.float64(schedule.timesteps[steps])
        algorithm = resolve("tiny", [f"objective={name}"]).algorithm
        objective = load_objective(name)

        def gradient(latents):
            return reward_gradient(reward, decoder, jnp.float64(3), latents, prepared, index)

        def predict(params):
            return backbone.velocity(params, x, text, time, jnp.float64(1))

        v_old = predict(kernels)
        targets = make_targets_of(objective)(
            gradient, x - sigma.reshape(-1, 1, 1, 1) * v_old, algorithm
        )
        target = TrainingTarget(x, x, sigma, np.full(3, 0.5), targets=targets)

        def split(params):
            velocities = Velocities(predict(params), v_old, v_old)
            return objective(velocities, target, algorithm)[0].sum()

        moved = jax.tree.map(lambda w: 1.1 * w, kernels)
        for params, bound in ((kernels, 1e-10), (moved, None)):
            expected, got = (jax.tree.leaves(jax.grad(f)(params)) for f in (released, split))
            scale = max(np.abs(x).max() for x in expected)
            error = max(np.abs(a - b).max() for a, b in zip(expected, got, strict=True)) / scale
            assert error > 1e-3 if bound is None else error < bound


FLOAT32 = ("rollout.precision=fp32", "rollout.explore.precision=fp32")


def built_toy(*overrides):
    return toy_experiment(*overrides, *FLOAT32)


def built_tiny(*overrides):
    return experiments.build(small_config("unused", *overrides, *FLOAT32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (built_toy, "refl"),
        (built_toy, "draft"),
        pytest.param(built_tiny, "refl", marks=pytest.mark.exhaustive),
        pytest.param(built_tiny, "draft", marks=pytest.mark.exhaustive),
    ],
)
def test_an_iteration_takes_the_gradient_of_the_released_objective(build, name, monkeypatch):
    """The update after exploration, regeneration and the gradient of the reward, against one
    `jax.grad` through network, solver, decoder and reward from the seeds of the kept samples; in
    float32, to 1e-4 of the largest number.
    """
    batches = []
    make = iterations.policy_batch
    monkeypatch.setattr(
        iterations, "policy_batch", lambda *a: batches.append(make(*a)) or batches[-1]
    )
    descent = optax.sgd(2.0**10)  # so large that the difference of the parameters has all digits
    monkeypatch.setattr(updates, "make_optimizer", lambda config: descent)
    built = build(f"objective={name}", *WATCHED, "rollout.solver=dpm2")
    fresh = fresh_state(built)
    rng = np.random.default_rng(0)
    trained = jax.tree.map(
        lambda x: np.asarray(x + 0.1 * rng.standard_normal(x.shape), np.float32), fresh.adapters
    )
    copies = (jax.tree.map(jnp.array, trained) for _ in range(2))
    state = dataclasses.replace(
        fresh, adapters=next(copies), old=next(copies), opt_state=descent.init(trained)
    )
    new, outcome = iterate(built, state, 1)
    got = jax.tree.map(lambda a, b: (a - np.asarray(b)) / 2**10, trained, new.adapters)
    assert outcome.metrics["loss"] == outcome.metrics["loss/drift"] == 0

    (batch,) = batches
    assert np.asarray(batch.weight).all()
    steps = built.config.rollout.num_steps
    schedule = built.schedule(steps)
    count = {"refl": 3, "draft": 1}[name]
    drawn = np.asarray(draw_steps(batch.seeds, steps - count, count))
    assert len(set(drawn.tolist())) > 1 or name == "draft"
    text = jax.tree.map(lambda c: c[batch.prompt], batch.conditioning)
    noise = normal(batch.seeds, "initial", batch.latents.shape[1:])
    reward = built.reward
    prompts = iterations.draw_prompts(
        built.train_prompts, built.config.seed, 0, built.config.train.num_prompts
    )
    prepared = reward.prepare(prompts)

    @jax.grad
    def released(adapters):
        def velocity(x, time):
            guidance = jnp.asarray(schedule.embedded_guidance)
            times = jnp.full(len(x), time)
            return built.backbone.velocity(built.policy(adapters), x, text, times, guidance)

        images = built.backbone.decoder(sampled(name, drawn, schedule, velocity, noise))
        return -score_samples(reward, reward.params, images, prepared, batch.prompt)[
            "reward"
        ].mean()

    with jax.set_mesh(built.backbone.mesh):
        expected = jax.device_get(jax.jit(released)(trained))
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4 * scale, rtol=0)


@pytest.mark.slow
def test_refl_and_draft_take_one_gradient_and_steps_are_drawn_evenly():
    for name in ("refl", "draft"):
        algorithm = resolve("tiny", [f"objective={name}"]).algorithm
        assert try_targets(algorithm) == (("gradient",), 1)
    seeds = np.random.default_rng(0).integers(0, 2**32, (3000, 2), dtype=np.uint32)
    drawn = np.asarray(draw_steps(seeds, 7, 3))
    assert (np.abs(np.bincount(drawn, minlength=10)[7:] - 1000) < 130).all()  # five deviations
    assert len(drawn) == np.bincount(drawn)[7:].sum()
    np.testing.assert_array_equal(draw_steps(seeds, 9, 1), 9)
    np.testing.assert_array_equal(draw_steps(seeds[5:9], 7, 3), drawn[5:9])


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
    message = (
        f"^reward.weights: {reason}.* algorithm.objective=opsd needs its gradient; available: "
    )
    with pytest.raises(InputError, match=message):
        experiments.build(config)


@pytest.mark.slow
def test_a_run_that_watches_no_other_reward_says_so_and_a_declared_plugin_is_taken():
    name = f"{__name__}:declared"
    config = small_config("unused", "objective=opsd", f"reward={name}")
    with pytest.warns(
        UserWarning, match=f"opsd follows the gradient of {name}, and reward.eval_only"
    ):
        experiments.build(config)


def without_slope(**options):
    """Its value is finite, and its gradient is 0 * inf."""

    def score(params, images, prepared):
        mean = images.mean((1, 2, 3))
        return {"reward": mean + jnp.sqrt(0.0 * mean)}

    return dataclasses.replace(toy_reward(), score=score, others=(), differentiable=True)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_run_without_finite_gradients_of_the_reward_ends_and_counts_them(tmp_path):
    settings = ("objective=refl", f"reward={__name__}:without_slope", "eval.num_grid_images=0")
    message = "iteration 1: no finite gradient of the reward in 1 .*; nothing is saved"
    with (
        TerminalProgress(bars=False) as progress,
        pytest.warns(UserWarning, match="eval_only"),
        pytest.raises(trainer.Diverged, match=message),
    ):
        trainer.run(toy_config(tmp_path, "train.iterations=1", *settings), progress)
    (row,) = (row for row in metrics.read(tmp_path) if row["iteration"] == 1)
    assert row["nonfinite_targets"] == 8
    assert row["nonfinite_rewards"] == row["skipped_micro_batches"] == row["grad_norm"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("toy_model")
def test_a_run_without_advantages_has_gradients_to_follow(tmp_path, monkeypatch, capsys):
    """Equal rewards have advantages of zero, which say nothing about their gradients."""

    def without_advantages(experiment, state, iteration, *arguments):
        metrics = {"skipped_micro_batches": 0.0, "grad_norm": 1.0, "kept/spread": 0.0}
        ledger = {"advantage": np.ma.masked_array(np.zeros(4), False)}
        return state, iterations.IterationResult(metrics, ledger)

    monkeypatch.setattr(trainer, "iterate", without_advantages)
    monkeypatch.setattr(trainer.ledger, "write", lambda *arguments: None)
    settings = ("objective=refl", f"reward={__name__}:declared", "eval.num_grid_images=0")
    with TerminalProgress(bars=False) as progress, pytest.warns(UserWarning, match="eval_only"):
        trainer.run(toy_config(tmp_path, "train.iterations=1", *settings), progress)
    lines = capsys.readouterr().err
    assert "iteration 1: " in lines
    assert "nothing to learn from" not in lines


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
        (
            (f"objective={__name__}:no_targets",),
            "algorithm.timestep_fraction=0.7: must be 0.333334 ",
        ),
        (
            (f"objective={__name__}:no_targets", "algorithm.timestep_fraction=0.34"),
            "trains on reward gradients and has no function",
        ),
        (("rollout.guidance_scale=4.5",), "rollout.guidance_scale=4.5: must be 1 with"),
        (
            ("objective=refl", "algorithm.last_steps=4"),
            "algorithm.last_steps=4: must be at most rollout.num_steps=3 for the reward gradients",
        ),
        (("objective=draft", "algorithm.last_steps=2"), "algorithm.last_steps=2: must be 1 with"),
        (("objective=draft", "algorithm.last_steps=null"), "algorithm.last_steps=None: must be 1"),
    ],
)
def test_settings_that_have_no_gradient_are_one_line(overrides, message):
    with pytest.raises((ConfigError, InputError), match=message):
        experiments.build(small_config("unused", *OPSD, *overrides))
