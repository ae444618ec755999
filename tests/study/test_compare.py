"""The tables of a study against what hand-made runs must give."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from solrl_jax.errors import InputError
from solrl_jax.rl.experiment import load_prompt_sets
from solrl_jax.study import page, summary
from solrl_jax.study.compare import cost_to_reach, estimate, read_course, reward_at_cost
from solrl_jax.study.cost import Prices
from solrl_jax.study.plan import runs_of
from solrl_jax.study.runs import finished
from tests.study.hand import make_runs, plan_of, write_run

# an exploring evaluation costs 1, a full one 2, a picture 10, a term 3, a sync 5
PRICES = Prices("toy-device", {"nvfp4": 1.0, "bf16": 2.0}, scored=10.0, trained=3.0, synced=5.0)
ARMS = {
    "sol": ("family=sol_rl", "train.iterations=4"),
    "plain": ("family=naive_scaling", "train.iterations=4"),
}
# of an iteration: 2 prompts, 4 candidates, 2 kept, 10 steps (sol explores with 6), 5 sigmas
SOL = 2 * 4 * 6 * 1 + 2 * 2 * 10 * 2 + (8 + 4) * 10 + 4 * 5 * 3 + 5
PLAIN = 2 * 4 * 10 * 2 + 8 * 10 + 4 * 5 * 3
REWARDS = {"sol": [[0.5, 0.7, 0.8], [0.5, 0.6, 0.8]], "plain": [[0.5, 0.6, 0.7], [0.5, 0.5, 0.7]]}


def small_study(tmp_path, arms=ARMS, rewards=REWARDS, sweeps=None, **others):
    plan = plan_of(arms, (("sol", "plain"),), sweeps)
    runs = make_runs(plan, tmp_path, rewards, **others)
    return plan, runs, *summary.summarize("hand", plan, runs, PRICES, {})


def test_cost_is_counted_work(tmp_path):
    *_, study, courses = small_study(tmp_path)
    assert courses["sol"][0].cost.tolist() == [0, 2 * SOL, 4 * SOL]
    assert courses["plain"][1].cost.tolist() == [0, 2 * PLAIN, 4 * PLAIN]
    assert study["arms"]["sol"]["cost"] == 4 * SOL
    assert study["arms"]["sol"]["network_evaluations"] == 4 * 2 * (4 * 6 + 2 * 10)
    assert study["arms"]["plain"]["network_evaluations"] == 4 * 2 * 4 * 10


def test_rewards_are_means_and_standard_errors_over_seeds(tmp_path):
    rewards = REWARDS | {"sol": [[0.5, 0.7, 0.9], [0.5, 0.6, 0.7]]}
    *_, study, _ = small_study(tmp_path, rewards=rewards)
    arm = study["arms"]["sol"]
    assert arm["scores"]["reward"] == pytest.approx((0.8, 0.1))  # of 0.9 and 0.7: 0.1414 / sqrt(2)
    assert arm["scores"]["shapes/strict"] == pytest.approx((0.4, 0.05))
    assert "shapes" not in arm["scores"]  # is the reward
    assert arm["gain"] == pytest.approx((0.3, 0.1))
    pair = study["compared"][0]
    assert pair["final"] == pytest.approx((0.1, 0.1))  # of 0.2 and 0.0, seed by seed
    assert pair["final_share"] == pytest.approx((0.1 / 0.7, 0.1 / 0.7))
    assert pair["cost_share"] == pytest.approx(SOL / PLAIN)
    assert math.isnan(estimate([1.0])[1])


def test_more_reward_is_a_positive_share_of_a_negative_one(tmp_path):
    rewards = {"sol": 2 * [[-0.5, -0.4, -0.3]], "plain": 2 * [[-0.5, -0.6, -0.6]]}
    *_, study, _ = small_study(tmp_path, rewards=REWARDS | rewards)
    assert study["compared"][0]["final_share"][0] == pytest.approx(0.3 / 0.6)


def test_rewards_at_equal_cost_lie_on_the_line_between_evaluations(tmp_path):
    *_, study, courses = small_study(tmp_path)
    assert math.isnan(reward_at_cost(courses["sol"][0], 4 * SOL + 1))  # beyond the run
    cheap, dear = ("plain", "sol") if PLAIN < SOL else ("sol", "plain")
    equal = 4 * min(PLAIN, SOL)

    def at(reward, cost):
        return np.interp(equal, [0, 2 * cost, 4 * cost], reward)

    costs = {"sol": SOL, "plain": PLAIN}
    for arm in ("sol", "plain"):
        expected = np.mean([at(reward, costs[arm]) for reward in REWARDS[arm]])
        assert study["arms"][arm]["at_equal_cost"]["cost"] == equal
        assert study["arms"][arm]["at_equal_cost"]["reward"][0] == pytest.approx(expected)
    assert study["arms"][cheap]["at_equal_cost"]["reward"][0] == pytest.approx(
        np.mean(REWARDS[cheap], 0)[-1]
    )
    assert study["arms"][dear]["at_equal_cost"]["reward"][0] < np.mean(REWARDS[dear], 0)[-1]


def test_speed_up_is_at_parts_of_the_others_progress(tmp_path):
    """Mean curves: plain 0.5, 0.55, 0.7; sol 0.5, 0.65, 0.8; evaluations are two iterations
    apart.
    """
    *_, study, _ = small_study(tmp_path)
    speed = study["compared"][0]["speed_up"]
    plain = {
        "25": 2.0,
        "50": 2 + 2 / 3,
        "75": 2 + 4 / 3,
        "100": 4.0,
    }  # iterations to 0.55, 0.60, 0.65, 0.70
    sol = {"25": 2 / 3, "50": 4 / 3, "75": 2.0, "100": 2 + 2 / 3}
    for part in plain:
        assert speed[part][0] == pytest.approx(plain[part] * PLAIN / (sol[part] * SOL))
    # without the second seed: plain to 0.7 in 4 iterations, sol in 2; without the first: plain in
    # 4, sol in 3
    without = np.array([4 / 3, 4 / 2]) * PLAIN / SOL
    assert speed["100"][1] == pytest.approx(abs(without[0] - without[1]) / 2)


def test_an_arm_that_does_not_get_there_has_no_speed_up(tmp_path):
    rewards = REWARDS | {"sol": [[0.5, 0.55, 0.56]] * 2}
    *_, study, _ = small_study(tmp_path, rewards=rewards)
    speed = study["compared"][0]["speed_up"]
    assert speed["25"][0] > 0
    assert math.isnan(speed["75"][0])
    assert math.isnan(speed["100"][0])
    *_, study, _ = small_study(
        tmp_path / "fallen", rewards=REWARDS | {"plain": [[0.5, 0.4, 0.3]] * 2}
    )
    assert all(math.isnan(mean) for mean, _ in study["compared"][0]["speed_up"].values())


def test_a_run_with_all_prompts_that_there_are_is_finished(tmp_path):
    """A run lowers `eval.num_prompts` to the prompts of its set, and records the lower number."""
    arms = {"sol": (*ARMS["sol"], "eval.num_prompts=100000")}
    (run,) = runs_of(plan_of(arms, seeds=(0,)), tmp_path, False, ())
    test_prompts = load_prompt_sets(run.config)[1]
    fitted = dataclasses.replace(run.config.eval, num_prompts=len(test_prompts))
    other = dataclasses.replace(run.config.eval, num_prompts=len(test_prompts) - 1)
    for evaluation, ended in ((fitted, True), (other, False)):
        config = dataclasses.replace(run.config, eval=evaluation)
        write_run(dataclasses.replace(run, config=config), REWARDS["sol"][0])
        assert finished(run) == ended
        shutil.rmtree(run.folder)


def test_a_run_is_priced_with_the_training_prompts_that_there_are(tmp_path):
    (tmp_path / "two.txt").write_text("a red disc\na blue disc\n")
    settings = (f"prompts.train={tmp_path / 'two.txt'}", "train.num_prompts=3")
    (run,) = runs_of(plan_of({"sol": (*ARMS["sol"], *settings)}, seeds=(0,)), tmp_path, False, ())
    fitted = dataclasses.replace(run.config.train, num_prompts=2)
    trained = dataclasses.replace(run, config=dataclasses.replace(run.config, train=fitted))
    write_run(trained, REWARDS["sol"][0])
    assert finished(run)
    assert read_course(run, PRICES).cost.tolist() == [0, 2 * SOL, 4 * SOL]


def test_steps_that_a_run_took_again_are_priced(tmp_path):
    """The metric decides, because an objective may need a state of the steps that others skip."""
    arm = ("rollout.explore.exact_steps=1", "rollout.explore.sigmas=first", "train.iterations=4")
    (run,) = runs_of(plan_of({"sol": arm}, seeds=(0,)), tmp_path, False, ())
    write_run(run, REWARDS["sol"][0])
    before = read_course(run, PRICES)
    path = run.folder / "metrics.jsonl"
    rows = [json.loads(line) | {"continued_steps": 0.0} for line in path.open()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = read_course(run, PRICES)
    kept = 2 * 2  # of 2 prompts
    np.testing.assert_allclose(after.cost - before.cost, np.array([0, 2, 4]) * kept * 2)
    assert after.network_evaluations - before.network_evaluations == 4 * kept


@pytest.mark.slow
def test_a_watched_score_has_a_panel(tmp_path, monkeypatch):
    watching = ("reward=tiny-clip", "reward.eval_only=[shapes]")
    arms = {"sol": (*ARMS["sol"], *watching), "plain": ARMS["plain"]}
    *_, courses = small_study(tmp_path, arms=arms)
    figures = []
    monkeypatch.setattr(page, "save_figure", lambda path, figure: figures.append(figure))
    page.draw(tmp_path / "study.png", courses, {}, "")
    panels = {panel.get_ylabel(): panel for panel in figures[0].axes}
    watched_line, trained_line = panels["held-out shapes (watched)"].lines
    assert (watched_line.get_label(), trained_line.get_label()) == ("sol", "plain")
    np.testing.assert_array_equal(watched_line.get_xdata(), [0, 2 * SOL, 4 * SOL])
    np.testing.assert_allclose(watched_line.get_ydata(), [0.5, 0.65, 0.8])
    np.testing.assert_array_equal(trained_line.get_xdata(), [0, 2 * PLAIN, 4 * PLAIN])
    np.testing.assert_allclose(trained_line.get_ydata(), [0.5, 0.55, 0.7])


def test_an_arm_that_starts_there_is_infinitely_faster(tmp_path):
    *_, study, _ = small_study(tmp_path, rewards=REWARDS | {"sol": [[0.7, 0.7, 0.8]] * 2})
    assert study["compared"][0]["speed_up"]["100"][0] == math.inf


def test_rounding_does_not_put_the_whole_gain_out_of_reach(tmp_path):
    rewards = [[0.1748428347610503, 0.3, 0.4945397334512545]] * 2
    assert rewards[0][0] + (rewards[0][2] - rewards[0][0]) > rewards[0][2]
    *_, study, _ = small_study(tmp_path, rewards={"plain": rewards, "sol": rewards})
    assert study["compared"][0]["speed_up"]["100"][0] == pytest.approx(PLAIN / SOL)


def test_progress_ends_where_the_other_ends_not_at_its_peak(tmp_path):
    """plain: 0.5, 0.8, 0.7 is at 0.7 after 4/3 iterations; sol: 0.5, 0.65, 0.8 after 8/3."""
    *_, study, _ = small_study(tmp_path, rewards=REWARDS | {"plain": [[0.5, 0.8, 0.7]] * 2})
    assert study["compared"][0]["speed_up"]["100"][0] == pytest.approx(
        4 / 3 * PLAIN / (8 / 3 * SOL)
    )


@pytest.mark.slow
def test_a_damaged_run_is_named(tmp_path):
    plan, runs, *_ = small_study(tmp_path)
    (runs[0].folder / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"sol-0/run\.json: cannot be read"):
        summary.summarize("hand", plan, runs, PRICES, {})
    (runs[0].folder / "run.json").unlink()
    assert (
        "unknown" in summary.summarize("hand", plan, runs, PRICES, {})[0]["setting"]["evaluation"]
    )
    second = runs[0].folder / "ledger" / "iteration-000002.parquet"
    pq.write_table(pq.read_table(second).slice(0, 3), second)
    with pytest.raises(InputError, match=r"sol-0: its ledger has 3 rows of iteration 2"):
        summary.summarize("hand", plan, runs, PRICES, {})
    second.write_text("")
    with pytest.raises(InputError, match=r"iteration-000002\.parquet: cannot be read"):
        summary.summarize("hand", plan, runs, PRICES, {})


def test_what_a_curve_reaches():
    cost = np.array([0.0, 10.0, 30.0])
    reward = np.array([0.1, 0.3, 0.2])
    assert cost_to_reach(cost, reward, 0.1) == 0
    assert cost_to_reach(cost, reward, 0.2) == pytest.approx(5)
    assert cost_to_reach(cost, reward, 0.3) == 10
    assert math.isnan(cost_to_reach(cost, reward, 0.31))


def test_a_run_has_no_reward_at_a_cost_that_is_not_known(tmp_path):
    *_, courses = small_study(tmp_path)
    course = dataclasses.replace(
        courses["sol"][0],
        cost=np.array([0.0, 10.0, np.nan]),
        scores={"reward": np.array([0.5, 1.0, 1.0])},
    )
    assert reward_at_cost(course, 5.0) == pytest.approx(0.75)
    assert math.isnan(reward_at_cost(course, 15.0))


@pytest.mark.parametrize(("swapped", "ranks"), [(False, (1, 2)), (True, (2, 1))])
def test_true_ranks_are_those_of_the_regenerated_rewards(tmp_path, swapped, ranks):
    *_, study, _ = small_study(tmp_path, sol={"swapped": swapped, "spearman": 0.25})
    fidelity = study["arms"]["sol"]["fidelity"]
    assert (fidelity["best"]["first"][0], fidelity["worst"]["last"][0]) == ranks
    assert fidelity["spearman"]["last"] == pytest.approx((0.25, 0.0))
    assert study["arms"]["plain"]["fidelity"] == {}  # nothing is regenerated


def test_a_format_without_a_price_has_no_cost(tmp_path):
    arms = ARMS | {"sol": ("family=sol_rl", "rollout.explore.precision=fp8", "train.iterations=4")}
    *_, study, _ = small_study(tmp_path, arms)
    assert math.isnan(study["arms"]["sol"]["cost"])
    # Arms with a price are compared at their own smallest cost, whatever the order of the arms.
    priced = [study["arms"][arm]["cost"] for arm in arms if arm != "sol"]
    assert study["arms"]["plain"]["at_equal_cost"]["cost"] == pytest.approx(min(priced))
    assert "–" in page.markdown(study)


def test_seeds_that_one_arm_lacks_are_left_out_of_the_pair(tmp_path):
    plan = plan_of(ARMS, (("sol", "plain"),))
    runs = make_runs(plan, tmp_path, REWARDS)
    (runs[-1].folder / "metrics.jsonl").unlink()  # plain-1
    study, _ = summary.summarize("hand", plan, runs, PRICES, {"plain-1": "disk full"})
    assert study["compared"][0]["seeds"] == [0]
    assert study["compared"][0]["final"][0] == pytest.approx(0.1)
    assert study["missing"] == {"plain-1": "disk full"}
    assert "* `plain-1`: disk full" in page.markdown(study)


def test_an_evaluation_that_is_missing_is_named(tmp_path):
    plan, runs, *_ = small_study(tmp_path)
    path = runs[0].folder / "metrics.jsonl"
    path.write_text(
        "".join(line for line in path.read_text().splitlines(True) if '"iteration": 2,' not in line)
    )
    with pytest.raises(InputError, match=r"sol-0: has no held-out reward after iteration 2"):
        summary.summarize("hand", plan, runs, PRICES, {})


def test_a_run_without_a_finite_reward_does_not_stop_the_others(tmp_path):
    plan, runs, *_ = small_study(tmp_path)
    path = runs[0].folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"eval/reward": 0.8', '"eval/reward": null'))
    study, courses = summary.summarize("hand", plan, runs, PRICES, {})
    assert np.isnan(courses["sol"][0].reward).tolist() == [False, False, True]
    assert math.isnan(study["arms"]["sol"]["scores"]["reward"][1])  # no error without all seeds
    assert study["arms"]["plain"]["scores"]["reward"][0] == pytest.approx(0.7)
    assert math.isnan(study["compared"][0]["speed_up"]["100"][0])


def test_a_record_without_standard_errors_has_a_reward(tmp_path):
    plan, runs, before, _ = small_study(tmp_path)
    for run in runs:
        path = run.folder / "metrics.jsonl"
        path.write_text(path.read_text().replace("/standard_error", "/other"))
    after, _ = summary.summarize("hand", plan, runs, PRICES, {})
    assert after["arms"]["sol"]["scores"] == {"reward": before["arms"]["sol"]["scores"]["reward"]}


@pytest.mark.slow
def test_the_page_and_the_figure_say_what_was_found(tmp_path):
    plan, runs, study, courses = small_study(
        tmp_path, sweeps={"rollout.explore.num_steps": ("sol", "plain")}
    )
    page.write(tmp_path, study, courses, summary.sweeps(plan, runs))
    text = (tmp_path / "study.md").read_text()
    assert f"| `sol` | 2 | 4 | 0.800 ± 0.000 | 0.400 ± 0.000 | {4 * SOL:.3g} | 352 |" in text
    assert "2 prompts x 3 pictures" in text
    assert "roofline seconds of toy-device" in text
    assert summary.sweeps(plan, runs) == {"rollout.explore.num_steps": [(6, "sol"), (10, "plain")]}
    assert (tmp_path / "study.png").stat().st_size > 10_000
    alone = summary.summarize("hand", plan, runs[:1], PRICES, {})
    page.write(tmp_path, *alone, {})  # one seed of one arm
    nothing = summary.summarize("hand", plan, [], PRICES, {})
    page.write(tmp_path, *nothing, {})
    assert "no run is finished" in (tmp_path / "study.md").read_text()
