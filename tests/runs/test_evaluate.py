"""Evaluations: means over pictures with a score, and the picture of fixed prompts."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from solrl_jax.diffusion.seeds import prompt_uid
from solrl_jax.errors import RunError
from solrl_jax.rewards.protocol import HostReward, HostRewards, Reward
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.iteration import iterate
from solrl_jax.rl.phase_timer import PhaseTimer
from solrl_jax.rl.trainable.trainable import flatten
from solrl_jax.runs.evaluate import (
    Evaluation,
    LargestDifferences,
    base_parameters_like,
    describe_evaluation,
    evaluate,
    paired_difference,
    pool_images,
    sample_grid,
)
from tests.cases import first_is_quick
from tests.toys import KERNELS, toy_experiment

OVERRIDES = (
    "eval.num_prompts=3",
    "eval.num_images_per_prompt=4",
    "eval.num_grid_images=8",
    "eval.num_steps=2",
)
DARK = 0.565  # as the mean of a picture; some pictures of a prompt are darker, others are not


@pytest.fixture(scope="module")
def toy():
    return toy_experiment(*OVERRIDES)


@pytest.mark.slow
def test_a_policy_before_training_is_the_base_model(toy):
    adapted, whole = KERNELS
    trained = {
        adapted: jax.tree.map(lambda x: x + 0.1, fresh_state(toy).ema[adapted]),
        whole: flatten(toy.backbone.transformer)[whole].astype(jnp.float32) + 0.1,
    }
    before = base_parameters_like(toy, trained)
    assert jax.tree.structure(before) == jax.tree.structure(trained)
    images = sample_grid(toy, before).images
    np.testing.assert_array_equal(images, sample_grid(toy, {}).images)
    assert np.abs(images - sample_grid(toy, trained).images).max() > 0.01


def judge(*, strict=True) -> Reward:
    """The mean of a picture; no score for those of the second prompt that are dark, none at all for
    the third prompt.
    """

    def score(params, images, prompt):
        mean = images.mean((1, 2, 3))
        reward = jnp.where((prompt == 2) | ((prompt == 1) & (mean < DARK)), jnp.nan, mean)
        return {"reward": reward} | (
            {"toy/strict": (mean > DARK).astype(jnp.float32)} if strict else {}
        )

    return Reward(None, lambda prompts: np.arange(len(prompts), dtype=np.int32), score)


def outside(*others) -> Reward:
    """The same beside a reward outside JAX that cannot be imported, which has these scores."""
    unreachable = HostReward("paid", "no_such_module:score", {}, others, 8)
    host = HostRewards((unreachable,), {"paid": 1.0}, 1, 5.0, skip=False)
    return dataclasses.replace(judge(), host=host)


def test_an_image_grid_makes_no_requests(toy):
    """A failure of a judge would end the run, for images whose scores are not shown."""
    paid = dataclasses.replace(toy, evaluation_reward=outside("alignment"))
    grid = sample_grid(paid, fresh_state(toy).ema)
    marked = sample_grid(dataclasses.replace(toy, evaluation_reward=judge()), fresh_state(toy).ema)
    np.testing.assert_array_equal(grid.images, marked.images)
    np.testing.assert_array_equal(grid.accepted, marked.accepted)
    alone = dataclasses.replace(outside("alignment"), score=None)
    unmarked = sample_grid(dataclasses.replace(toy, evaluation_reward=alone), fresh_state(toy).ema)
    np.testing.assert_array_equal(unmarked.images, marked.images)
    assert unmarked.accepted is None


def mark(images, prompts, metadata):
    """A reward outside JAX that marks images."""
    return {"reward": images.mean((1, 2, 3)), "strict": images.mean((1, 2, 3)) > DARK}


def test_an_image_grid_has_the_marks_of_a_reward_beside_one_that_is_not_asked(toy):
    paid = outside("alignment").host
    marking = HostReward("toy", f"{__name__}:mark", {}, ("strict",), 8)
    host = dataclasses.replace(
        paid, rewards=(*paid.rewards, marking), weights={"paid": 1.0, "toy": 0.5}, timeout=60.0
    )
    reward = dataclasses.replace(judge(strict=False), host=host)
    grid = sample_grid(dataclasses.replace(toy, evaluation_reward=reward), fresh_state(toy).ema)
    np.testing.assert_array_equal(grid.accepted, grid.images.mean((2, 3, 4)) > DARK)


def test_an_image_grid_asks_a_reward_outside_jax_that_marks_images(toy):
    strict = dataclasses.replace(toy, evaluation_reward=outside("strict"))
    with pytest.raises(RunError, match=r"paid"):
        sample_grid(strict, fresh_state(toy).ema)


@pytest.mark.slow
def test_scores_are_those_of_the_policy_in_the_training_precision(toy):
    adapters = jax.tree.map(lambda x: x + 0.1, fresh_state(toy).ema)
    result = evaluate(toy, adapters)
    counts = []
    prompts = toy.test_prompts[:3]
    sampler = toy.sampler("evaluate", adapters, 2)
    prompted = toy.encode_prompts(prompts, toy.evaluation_reward)
    samples = generate(
        toy.backbone,
        sampler,
        prompted,
        SeedBatch.from_seeds(toy.seeds("evaluation", prompts, 4, seed=toy.config.eval.seed)),
        toy.evaluation_reward,
    )
    for name, scores in samples.scores.items():
        np.testing.assert_array_equal(result.scores[name], scores.reshape(3, 4))
        assert result.means[name] == pytest.approx(scores.mean(), rel=1e-6)
        assert result.errors[name] == pytest.approx(scores.std() / np.sqrt(12), rel=1e-5)
    assert result.scores.keys() == {"reward", "mean"}
    other = evaluate(toy, fresh_state(toy).ema, counts.append)
    assert np.abs(other.scores["reward"] - result.scores["reward"]).max() > 1e-3
    assert sum(counts) == 12


def test_pictures_without_a_score_are_left_out_of_means(toy):
    result = evaluate(dataclasses.replace(toy, evaluation_reward=judge()), fresh_state(toy).ema)
    scores = result.scores["reward"]
    assert np.isfinite(scores[0]).all()
    assert np.isnan(scores[2]).all()
    finite = scores[np.isfinite(scores)]
    assert 4 < len(finite) < 8
    assert result.means["reward"] == pytest.approx(finite.mean(), rel=1e-6)
    assert result.errors["reward"] == pytest.approx(finite.std() / np.sqrt(len(finite)), rel=1e-5)
    assert result.means["toy/strict"] == pytest.approx(
        result.scores["toy/strict"].mean(), rel=1e-6
    )  # each by itself
    nothing = Reward(
        None,
        lambda prompts: np.zeros(len(prompts)),
        lambda p, images, _: {"reward": images.mean((1, 2, 3)) / 0},
    )
    empty = evaluate(dataclasses.replace(toy, evaluation_reward=nothing), fresh_state(toy).ema)
    assert np.isnan(empty.means["reward"])
    assert np.isnan(empty.errors["reward"])


def test_a_single_image_has_no_standard_error(toy):
    section = dataclasses.replace(toy.config.eval, num_prompts=1, num_images_per_prompt=1)
    one = dataclasses.replace(toy, config=dataclasses.replace(toy.config, eval=section))
    result = evaluate(one, fresh_state(toy).ema)
    assert np.isfinite(result.means["reward"])
    assert np.isnan(result.errors["reward"])


def test_scores_whose_squares_float32_cannot_hold_have_an_error(toy, recwarn):
    vast = Reward(
        None,
        lambda prompts: np.zeros(len(prompts)),
        lambda p, images, _: {"reward": 3e38 * images.mean((1, 2, 3))},
    )
    result = evaluate(dataclasses.replace(toy, evaluation_reward=vast), fresh_state(toy).ema)
    assert np.isfinite([result.means["reward"], result.errors["reward"]]).all()
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


def test_the_picture_has_four_of_each_prompt_and_says_which_are_right(toy):
    experiment = dataclasses.replace(toy, evaluation_reward=judge())
    grid = sample_grid(experiment, fresh_state(toy).ema)
    assert grid.prompts == toy.test_prompts[:2]
    assert grid.images.shape[:2] == (2, 4)
    assert ((grid.images >= 0) & (grid.images <= 1)).all()
    np.testing.assert_array_equal(grid.accepted, grid.images.mean((2, 3, 4)) > DARK)
    assert 0 < grid.accepted.sum() < 8
    assert (
        sample_grid(
            dataclasses.replace(toy, evaluation_reward=judge(strict=False)), fresh_state(toy).ema
        ).accepted
        is None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "shape"), first_is_quick([(1, (1, 1)), (3, (1, 3)), (11, (2, 4)), (400, (6, 4))])
)
def test_a_picture_of_any_number_is_filled_as_far_as_prompts_go(count, shape):
    toy = toy_experiment(*OVERRIDES, f"eval.num_grid_images={count}")
    assert sample_grid(toy, fresh_state(toy).ema).images.shape[:2] == shape


def test_the_clock_tells_seconds_by_phase_and_what_was_compiled():
    clock = PhaseTimer()
    for number, phase in enumerate(("explore", "regenerate", "update")):
        clock.start(phase)
        jax.block_until_ready(jax.jit(lambda x, n=number: x * n + 1)(jnp.ones(3)))
    clock.stop()
    clock.stop()  # of nothing
    assert list(clock.seconds) == ["explore", "regenerate", "update"]

    figures = clock.report(6, 2)
    assert {name for name in figures if name.startswith("seconds/")} == {
        "seconds/explore",
        "seconds/regenerate",
        "seconds/update",
        "seconds/compile",
    }
    assert figures["seconds"] == pytest.approx(sum(clock.seconds.values()))
    assert figures["images_per_second/explore"] == pytest.approx(6 / clock.seconds["explore"])
    assert 0 < figures["seconds/compile"] <= figures["seconds"]
    assert figures["images_per_second/regenerate"] == pytest.approx(2 / clock.seconds["regenerate"])
    assert "images_per_second/regenerate" not in clock.report(6, None)


NOT_REGENERATED = ("rollout.regenerate=false", "rollout.explore.num_steps=3")
MOVING_WINDOW = (
    "algorithm.objective=mix_grpo",
    "rollout.solver=flow_sde",
    "rollout.noise_level=0.7",
    "rollout.sde_window_size=1",
    "rollout.sde_window_every=1",
    "algorithm.timestep_fraction=0.4",
    "rollout.explore.num_steps=3",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), NOT_REGENERATED, MOVING_WINDOW], ids=["plain", "explored", "window"]
)
def test_pictures_of_a_pool_are_those_whose_rewards_the_ledger_has(settings):
    """The toy's reward can be had from the picture: how near its mean is to a number of the
    prompt.
    """
    toy = toy_experiment(*OVERRIDES, "rollout.explore.precision=nvfp4", *settings)
    state, _ = iterate(toy, fresh_state(toy), 1)  # so that the adapters do something
    old = jax.tree.map(jnp.copy, state.old)
    _, outcome = iterate(toy, state, 2)
    pool = pool_images(toy, old, toy.explorer.settings[0], outcome.ledger, 2)
    columns = {
        name: np.ma.getdata(values).reshape(2, -1)
        for name, values in outcome.ledger.items()
        if np.ndim(values)
    }
    assert list(pool.prompts) == columns["prompt"][:, 0].tolist()
    assert pool.phases.keys() == (
        {"explored"} if settings == NOT_REGENERATED else {"explored", "regenerated"}
    )
    for row, prompt in enumerate(pool.prompts):
        kept = np.flatnonzero(columns["kept"][row])
        by_rank = kept[np.argsort(columns["rank"][row][kept])]
        assert pool.candidates[row].tolist() == by_rank[[0, 1, -2, -1]].tolist()
        for phase, grid in pool.phases.items():
            rewards = columns["proxy_reward" if phase == "explored" else "regenerated_reward"][
                row, pool.candidates[row]
            ]
            drawn = 1 - np.abs(grid.images[row].mean((1, 2, 3)) - prompt_uid(prompt) / 2**32)
            np.testing.assert_allclose(drawn, rewards, atol=1e-6)
    assert np.ptp(columns["proxy_reward"]) > 1e-3


def of_scores(scores) -> Evaluation:
    return Evaluation({}, {}, {"reward": np.asarray(scores, float)}, {})


def test_a_paired_difference_is_students_over_prompts():
    rng = np.random.default_rng(0)
    prompts, noise = rng.standard_normal((2, 8, 1))  # what is shared by both policies cancels
    pictures = prompts + 0.3 * rng.standard_normal((8, 5))
    better = pictures + 0.2 + 0.1 * noise
    gain, half = paired_difference(of_scores(better), of_scores(pictures))["reward"]
    interval = stats.ttest_rel(better.mean(1), pictures.mean(1)).confidence_interval(0.95)
    assert (gain - half, gain + half) == pytest.approx((interval.low, interval.high))
    assert (
        half
        < stats.ttest_ind(better.mean(1), pictures.mean(1)).confidence_interval(0.95).high - gain
    )
    assert paired_difference(of_scores(pictures), of_scores(pictures))["reward"] == (0, 0)


def test_a_picture_without_a_score_takes_no_part_in_a_difference():
    first = np.array([[1.0, np.nan], [2.0, 4.0], [np.nan, np.nan]])
    second = np.array([[0.5, 9.0], [np.inf, 3.0], [1.0, 1.0]])
    gain, half = paired_difference(of_scores(first), of_scores(second))["reward"]
    assert gain == pytest.approx(0.75)
    assert half == pytest.approx(stats.t.ppf(0.975, 1) * 0.25)
    assert np.isnan(paired_difference(of_scores(first[:1]), of_scores(second[:1]))["reward"][1])


def test_where_two_policies_differ_most_is_drawn_as_it_was_scored(toy):
    """The toy's score "mean" is the mean of a picture, so what is drawn again must have it."""
    policies = [fresh_state(toy).ema, jax.tree.map(lambda x: x + 0.1, fresh_state(toy).ema)]
    first, second = (evaluate(toy, adapters) for adapters in policies)
    gains = first.scores["reward"] - second.scores["reward"]
    differing = LargestDifferences.find(first, second, 2, 3)
    sizes = np.abs(gains)
    order = np.argsort(-sizes.max(1))
    assert differing.prompts.tolist() == order[:2].tolist()
    for prompt, pictures, differences in zip(
        differing.prompts, differing.images, differing.gains, strict=True
    ):
        assert pictures.tolist() == np.argsort(-sizes[prompt])[:3].tolist()
        np.testing.assert_array_equal(differences, gains[prompt, pictures])
    for adapters, result in zip(policies, (first, second), strict=True):
        grid = differing.generate_images(toy, adapters)
        assert list(grid.prompts) == [toy.test_prompts[i] for i in differing.prompts]
        expected = np.take_along_axis(
            result.scores["mean"][differing.prompts], differing.images, axis=1
        )
        np.testing.assert_allclose(grid.images.mean((2, 3, 4)), expected, rtol=1e-5)


def test_pictures_without_a_score_differ_least():
    def score(*rows):
        return Evaluation({}, {}, {"reward": np.array(rows)}, {})

    first = score([np.nan, 0.5, 0.1], [0.0, np.nan, np.nan])
    second = score([0.0, 0.0, 0.0], [0.0, 1.0, 1.0])
    differing = LargestDifferences.find(first, second, 2, 2)
    assert differing.prompts.tolist() == [0, 1]
    assert differing.images.tolist() == [[1, 2], [0, 1]]


def test_the_setting_names_all_that_a_figure_depends_on(toy):
    setting = describe_evaluation(toy)
    digest = hashlib.sha256(b"to test on 0\nto test on 1\nto test on 2\n").hexdigest()[:12]
    pictures = f"3 prompts (sha256 {digest}) x 4 images of 32 x 32"
    assert setting == f"{pictures}; euler, 2 steps, guidance 1, bf16, seed 0"
    config = toy.config
    for section, change in (
        ("eval", {"num_prompts": 2}),
        ("eval", {"num_images_per_prompt": 5}),
        ("eval", {"num_steps": 3}),
        ("eval", {"seed": 1}),
        ("rollout", {"guidance_scale": 2.0}),
        ("rollout", {"true_cfg_scale": 2.0}),
        ("rollout", {"precision": "fp32"}),
        ("rollout", {"solver": "dpm2"}),
        ("model", {"width": 64}),
    ):
        changed = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **change)}
        )
        assert describe_evaluation(dataclasses.replace(toy, config=changed)) != setting
