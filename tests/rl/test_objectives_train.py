"""Every objective through whole iterations, under the families that can supply it; and what each is
given.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import OBJECTIVES
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl import iteration as iterations
from solrl_jax.rl.experiment import fresh_state, state_shapes
from solrl_jax.rl.generate import sample_chunk
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.reward_gradient import reward_gradient
from solrl_jax.rl.update import update
from solrl_jax.runs import checkpoint
from solrl_jax.runs.evaluate import evaluate
from tests.cases import first_is_quick
from tests.small import small_config
from tests.states import assert_same_bits, save
from tests.toys import toy_experiment

TRANSITIONS = [name for name, kind in OBJECTIVES.items() if kind == "transitions"]
EXPLORED = {
    "sol_rl": (),
    "naive_scaling": ("rollout.explore.num_steps=3",),
    "naive_quant": ("rollout.explore.num_steps=3",),
}
EXPLORED["diffusionnft"] = ("rollout.explore.num_steps=3", "rollout.kept=8")
SHORT = {
    "mix_grpo": (
        "rollout.sde_window_size=1",
        "rollout.sde_window_every=1",
        "algorithm.timestep_fraction=0.34",
    )
}


for name, kind in OBJECTIVES.items():
    if kind == "reward_gradients":  # the verifier of shapes, which `tiny` trains on, has none
        SHORT[name] = ("reward=tiny-clip", "reward.eval_only=[shapes]")


def settings(objective, family):
    return (
        f"objective={objective}",
        f"family={family}",
        "rollout.candidates=8",
        "algorithm.timestep_fraction=0.67",
        *EXPLORED[family],
        *SHORT.get(objective, ()),
    )


# A combination takes seconds to compile, so most are for the whole suite. Further tests of this
# file train on pairs and on samples.
QUICK = {("mix_grpo", "sol_rl"), ("opsd", "sol_rl")}
COMBINATIONS = [
    pytest.param(
        objective, family, marks=[] if (objective, family) in QUICK else pytest.mark.exhaustive
    )
    for objective in OBJECTIVES
    for family in EXPLORED
]


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "family"), COMBINATIONS)
def test_every_objective_trains_under_every_family_that_can_supply_it(objective, family):
    if OBJECTIVES[objective] in ("transitions", "reward_gradients") and family == "naive_quant":
        with pytest.raises(
            ConfigError,
            match=f"rollout.regenerate=False: must be true, .* algorithm.objective={objective}",
        ):
            toy_experiment(*settings(objective, family))
        return
    toy = toy_experiment(*settings(objective, family))
    state = fresh_state(toy)
    sizes = []
    for i in (1, 2, 3):
        state, outcome = iterate(toy, state, i)
        sizes.append([p._cache_size() for p in (update, sample_chunk, reward_gradient)])
        assert np.isfinite(outcome.metrics["loss"])
        assert outcome.metrics["grad_norm"] > 0
        assert outcome.metrics["skipped_micro_batches"] == 0
        if objective == "awm":  # anchored to a slow copy, which is the policy until the first step
            assert (outcome.metrics["loss/drift"] > 0) == (i > 1)
        elif "ratio" in outcome.metrics and toy.config.optimizer.steps_per_iteration == 1:
            # 1, but for the rounding of a mean over terms
            assert outcome.metrics["ratio"] == pytest.approx(1, abs=1e-6)
            assert outcome.metrics["loss/drift"] == 0
    assert sizes[1:] == sizes[:1] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["sol_rl", "naive_scaling"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_the_embedded_pipeline_and_recompiles_nothing(objective, family):
    built = experiments.build(small_config("unused", *settings(objective, family)))
    state = fresh_state(built)
    state, outcome = iterate(built, state, 1)
    if "ratio" in outcome.metrics and built.config.optimizer.steps_per_iteration == 1:
        assert (outcome.metrics["ratio"], outcome.metrics["loss/drift"]) == (
            pytest.approx(1, abs=1e-6),
            0,
        )
    state, outcome = iterate(built, state, 2)
    assert outcome.metrics["seconds/compile"] == 0
    assert np.isfinite(outcome.metrics["loss"])


RESUMED = {
    "opsd": (),
    "refl": (),
    "draft": (),
    "flow_dppo": (),
    "grpo_guard": (),
    "flow_cps": (),
    "nft": ("reward.combine=advantages",),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", RESUMED)
def test_an_objective_goes_on_from_a_checkpoint_to_the_bit(objective, tmp_path):
    """Two iterations, and one of them after the state was read into another experiment."""
    overrides = RESUMED[objective]
    weights = ("reward.weights={toy: 1, mean: 1}",) if overrides else ()
    ends = []
    for resumed in (False, True):
        toy = toy_experiment(*settings(objective, "sol_rl"), *weights, *overrides)
        if overrides:
            score = toy.reward.score

            def both(params, images, prepared, score=score):
                scores = score(params, images, prepared)
                return {**scores, "toy": scores["reward"]}

            toy = dataclasses.replace(toy, reward=dataclasses.replace(toy.reward, score=both))
        if resumed:
            state, _ = checkpoint.restore(tmp_path / "000001", state_shapes(toy))
        else:
            state, _ = iterate(toy, fresh_state(toy), 1)
            save(tmp_path, 1, state, {})
        ends.append(jax.device_get(iterate(toy, state, 2)[0]))
    assert_same_bits(*ends)


@pytest.fixture
def spied(monkeypatch):
    """Batches, and samples of each roll-out, in their order."""
    batches = []
    pools = []
    make = iterations.policy_batch
    generate = iterations.generate
    monkeypatch.setattr(
        iterations, "policy_batch", lambda *a: batches.append(make(*a)) or batches[-1]
    )
    monkeypatch.setattr(
        iterations,
        "generate",
        lambda *a, **k: pools.append(generate(*a, **k)) or pools[-1],
    )
    return batches, pools


@pytest.mark.slow
def test_trajectories_are_those_of_the_regeneration(spied):
    batches, pools = spied
    toy = toy_experiment(*settings("flow_grpo", "sol_rl"))
    iterate(toy, fresh_state(toy), 1)
    explored, regenerated = pools
    (batch,) = batches
    assert explored.states is None
    assert batch.states.shape == (8, 3, *batch.latents.shape[1:])  # two of three steps add noise
    np.testing.assert_array_equal(batch.states, regenerated.states)
    table = toy.schedule(3).table
    predicted = regenerated.states[:, -1]  # from there an ODE's step leads to the sample
    assert table[-1, 4] == 0
    assert np.abs(predicted - regenerated.latents).max() > 1e-3


@pytest.mark.slow
def test_without_regeneration_the_kept_trajectories_are_those_explored(spied):
    batches, pools = spied
    toy = toy_experiment(*settings("dance_grpo", "naive_scaling"))
    _, outcome = iterate(toy, fresh_state(toy), 1)
    (pool,) = pools
    (batch,) = batches
    assert pool.states.shape[0] == 16
    np.testing.assert_array_equal(batch.states, pool.states[outcome.ledger["kept"]])


@pytest.mark.slow
def test_a_seed_is_the_same_path_explored_and_regenerated(spied):
    """Explored in the training precision with all steps, a candidate is what it will be regenerated
    to, noise and all.
    """
    _, pools = spied
    toy = toy_experiment(
        *settings("flow_grpo", "sol_rl"),
        "rollout.explore.precision=bf16",
        "rollout.explore.num_steps=3",
    )
    _, outcome = iterate(toy, fresh_state(toy), 1)
    explored, regenerated = pools
    np.testing.assert_array_equal(regenerated.latents, explored.latents[outcome.ledger["kept"]])


@pytest.mark.slow
@pytest.mark.parametrize("family", first_is_quick(["sol_rl", "naive_scaling"]))
def test_a_query_is_the_nearest_state_of_the_trajectory_and_what_was_predicted_there(spied, family):
    """Of three linear steps from 1, step 2 starts nearest to 0.278. It ends at the sample."""
    batches, pools = spied
    toy = toy_experiment(*settings("opsd", family))
    _, outcome = iterate(toy, fresh_state(toy), 1)
    (batch,) = batches
    assert toy.query_steps == range(2, 3)
    kept = (
        pools[-1] if family == "sol_rl" else pools[0].take(np.flatnonzero(outcome.ledger["kept"]))
    )
    np.testing.assert_array_equal(batch.states, kept.states)
    np.testing.assert_allclose(batch.states[:, 1], batch.latents, atol=1e-6)
    text = jax.tree.map(lambda c: c[batch.prompt], batch.conditioning)
    with jax.set_mesh(toy.backbone.mesh):
        v = toy.backbone.velocity(
            toy.policy(fresh_state(toy).old),
            batch.states[:, 0],
            text,
            np.float32(1000 / 3),
            np.float32(1),
        )
    np.testing.assert_allclose(batch.states[:, 0] - v / 3, batch.states[:, 1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("objective", first_is_quick(["opsd", "refl"]))
def test_a_sample_whose_target_is_not_finite_does_not_count(spied, objective):
    """A reward that is finite, but whose gradient is not, as that of a root at 0."""
    batches, _ = spied
    toy = toy_experiment(*settings(objective, "sol_rl"))

    def score(params, images, prepared):
        flat = jnp.where(images.mean((1, 2, 3)) > prepared, 0.0, 1.0)
        return {"reward": images.mean((1, 2, 3)) + jnp.sqrt(flat * 0 * images[:, 0, 0, 0])}

    rough = dataclasses.replace(toy.reward, score=score, others=())
    _, outcome = iterate(dataclasses.replace(toy, reward=rough), fresh_state(toy), 1)
    assert not np.asarray(batches[0].weight).any()
    assert outcome.metrics["loss"] == outcome.metrics["skipped_micro_batches"] == 0


@pytest.mark.slow
def test_pairs_are_best_and_worst_at_the_same_noise(spied):
    batches, pools = spied
    toy = toy_experiment(*settings("dpo", "sol_rl"))
    iterate(toy, fresh_state(toy), 1)
    _, regenerated = pools
    (batch,) = batches
    rewards = regenerated.reward.reshape(2, 4)
    rows = [
        int(np.flatnonzero((regenerated.latents == x).all((1, 2, 3)))[0])
        for x in np.asarray(batch.latents)
    ]
    expected = []
    for prompt in range(2):
        best = (prompt * 4 + np.argsort(-rewards[prompt])).tolist()
        expected += [best[0], best[3], best[1], best[2]]
    assert rows == expected
    np.testing.assert_array_equal(batch.seeds[::2], batch.seeds[1::2])
    np.testing.assert_array_equal(batch.prompt, [0] * 4 + [1] * 4)
    assert (np.asarray(batch.optimality[::2]) > np.asarray(batch.optimality[1::2])).all()
    assert np.asarray(batch.weight).all()


@pytest.mark.slow
def test_pairs_are_formed_among_the_finite_rewards(monkeypatch):
    """The best sample is not lost because another one has no reward. Targets are paired too."""
    batches = []
    with_targets = []
    make = iterations.policy_batch
    rewards = np.array([[0.9, np.nan, 0.1, 0.5], [0.2, 0.4, 0.3, np.inf]])

    def spy(experiment, prompts, selection, samples, _, advantage):
        batches.append((samples, make(experiment, prompts, selection, samples, rewards, advantage)))
        targeted = dataclasses.replace(samples, targets={"same": samples.latents})
        with_targets.append(make(experiment, prompts, selection, targeted, rewards, advantage))
        return batches[-1][1]

    monkeypatch.setattr(iterations, "policy_batch", spy)
    toy = toy_experiment(*settings("dpo", "sol_rl"))
    iterate(toy, fresh_state(toy), 1)
    ((samples, batch),) = batches
    np.testing.assert_array_equal(batch.weight, [1, 1, 0, 0, 1, 1, 0, 0])
    counted = np.flatnonzero(batch.weight)
    np.testing.assert_array_equal(batch.latents[counted], samples.latents[np.array([0, 2, 5, 4])])
    np.testing.assert_array_equal(with_targets[0].targets["same"], batch.latents)


@pytest.mark.slow
def test_a_pair_without_a_better_one_does_not_count(spied):
    batches, _ = spied
    toy = toy_experiment(*settings("dpo", "sol_rl"))
    flat = dataclasses.replace(
        toy.reward,
        score=lambda params, images, prompt: {"reward": 0.0 * images.mean((1, 2, 3))},
        others=(),
    )
    iterate(dataclasses.replace(toy, reward=flat), fresh_state(toy), 1)
    assert not np.asarray(batches[0].weight).any()


@pytest.mark.slow
def test_a_pair_that_differs_by_rounding_does_not_count(spied):
    """Devices may round otherwise, and that must not decide which of two samples is preferred."""
    batches, _ = spied
    toy = toy_experiment(*settings("dpo", "sol_rl"))
    flat = dataclasses.replace(
        toy.reward,
        score=lambda params, images, _: {"reward": 1 + 1e-6 * images.mean((1, 2, 3))},
        others=(),
    )
    _, outcome = iterate(dataclasses.replace(toy, reward=flat), fresh_state(toy), 1)
    assert outcome.metrics["kept/spread"] > 0
    assert not np.asarray(batches[0].weight).any()


@pytest.mark.slow
def test_an_evaluation_follows_the_ode():
    sde = toy_experiment(*settings("flow_grpo", "sol_rl"))
    ode = toy_experiment()
    scores = [evaluate(toy, fresh_state(toy).ema).scores["reward"] for toy in (sde, ode)]
    np.testing.assert_allclose(*scores, atol=1e-6)


@pytest.mark.slow
def test_classifier_free_guidance_is_refused_where_steps_are_trained():
    with pytest.raises(
        InputError,
        match=r"^rollout.guidance_scale=4.5: must be 1 with algorithm.objective=flow_grpo, ",
    ):
        experiments.build(
            small_config("unused", *settings("flow_grpo", "sol_rl"), "rollout.guidance_scale=4.5")
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "preset", ["tiny", "sana_sol_rl_hpsv2", "flux1_sol_rl_hpsv2", "sd3_naive_scaling_pickscore"]
)
def test_every_preset_takes_every_objective(preset, objective):
    config = resolve(preset, [f"objective={objective}"])
    assert config.algorithm.objective == objective
    assert config.num_recorded_steps == (
        0 if objective not in TRANSITIONS else 4 if objective == "mix_grpo" else 9
    )
    assert config.num_train_sigmas == {
        "mix_grpo": 4,
        "flow_grpo": 9,
        "flow_cps": 9,
        "grpo_guard": 9,
        "flow_dppo": 9,
        "dance_grpo": 5,
        "awm": 6,
        "opsd": 1,
        "refl": 1,
        "draft": 1,
    }.get(objective, 4 if preset.startswith("flux1") else 6)
