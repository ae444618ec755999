"""Plans: the carried ones hold, a wrong one is refused in one line; and what counted work costs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.study.cost import find_prices, packaged_prices, prices_of
from solrl_jax.study.plan import plan_names, read_plan, runs_of

PLANS = json.loads((Path(__file__).parents[2] / "benchmarks" / "plans.json").read_text())["plans"]
GOOD = {
    "what": "Two arms.",
    "preset": "tiny",
    "overrides": [],
    "arms": {"a": [], "b": ["family=naive_quant"]},
    "seeds": [0, 1],
    "compared": [["a", "b"]],
    "sweeps": {},
    "quick": {"seeds": [0], "overrides": ["train.iterations=1"]},
}


def plan_file(tmp_path, **changed) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(
        json.dumps({key: value for key, value in (GOOD | changed).items() if value is not None})
    )
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", plan_names())
def test_the_carried_plans_hold(tmp_path, name, quick):
    plan = read_plan(name)
    runs = runs_of(plan, tmp_path, quick, ())
    seeds = plan.quick.seeds if quick else plan.seeds
    assert len(runs) == len(plan.arms) * len(seeds)
    assert len({run.folder for run in runs}) == len(runs)
    assert len(set(plan.seeds)) >= 4
    assert [run.config.seed for run in runs[: len(plan.arms)]] == [seeds[0]] * len(plan.arms)
    for run in runs:
        assert resolve(run.arguments[0], run.arguments[1:]) == run.config
    for arms in plan.sweeps.values():
        assert len(arms) > 1


def test_an_objective_that_is_missing_or_does_not_fit_is_told_before_anything_trains(tmp_path):
    arms = {
        "a": ["objective=no_such_module:loss"],
        "b": ["objective=tests.rl.test_objective_plugins:transitions"],
    }
    plan = read_plan(plan_file(tmp_path, arms=arms, compared=[]))
    with pytest.raises(ConfigError) as refused:
        runs_of(plan, tmp_path, False, ())
    message = str(refused.value)
    assert "arm a: algorithm.objective='no_such_module:loss': cannot be imported" in message
    assert "arm b: rollout.noise_level=0.0: must be above 0" in message


def test_quick_comes_after_the_arms_and_the_users_own_last(tmp_path):
    plan = read_plan(plan_file(tmp_path, arms={"a": ["train.iterations=7"]}, compared=[]))

    def iterations(quick, *overrides):
        return runs_of(plan, tmp_path, quick, overrides)[0].config.train.iterations

    assert (iterations(False), iterations(True), iterations(True, "train.iterations=3")) == (
        7,
        1,
        3,
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arms": {}}, "arms={}: must not be empty"),
        ({"arms": {"../a": []}}, "arms.../a.[key]='../a': String should match"),
        ({"arms": {"a": "x=1"}}, "arms.a='x=1': "),
        ({"seeds": []}, "seeds=[]: "),
        ({"seeds": [1, 1]}, "seeds=[1, 1]: must differ"),
        ({"seeds": [-1]}, "seeds.0=-1: must be at least 0"),
        ({"seeds": list(range(501))}, "seeds: 1002 runs of 2 arms; must be at most 1000"),
        ({"compared": [["a", "c"]]}, "compared and sweeps: no arm 'c'; there are a, b"),
        ({"sweeps": {"seed": ["d"]}}, "compared and sweeps: no arm 'd'"),
        ({"quick": None}, "missing key 'quick'"),
        ({"color": 1}, "unknown key 'color': expected one of what, preset, overrides, arms"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(tmp_path, changed, message):
    with pytest.raises(ConfigError) as error:
        read_plan(plan_file(tmp_path, **changed))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["out #1", "x: y", "123", "on", "a 'b' \"c\"", "ä\u2028\n{b}", "null"]
)
def test_runs_are_where_they_are_asked_for(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (run,) = runs_of(
        read_plan(plan_file(tmp_path, arms={"a": []}, compared=[])), Path(name), True, ()
    )
    assert run.folder == Path(name) / "a-0"


def test_a_wrong_arm_is_refused_before_anything_trains(tmp_path):
    plan = read_plan(plan_file(tmp_path, arms={"a": ["family=sol"], "b": ["rollout.kept=13"]}))
    with pytest.raises(ConfigError) as error:
        runs_of(plan, tmp_path, False, ())
    assert str(error.value).startswith("arm a: unknown family 'sol'")
    assert (
        str(error.value).count("arm b: rollout.kept=13: must be even") == 1
    )  # for both seeds once
    with pytest.raises(ConfigError, match="unknown preset 'big'"):
        runs_of(read_plan(plan_file(tmp_path, preset="big")), tmp_path, False, ())
    with pytest.raises(ConfigError, match=r"sweeps: rollout\.step is no setting"):
        runs_of(
            read_plan(plan_file(tmp_path, sweeps={"rollout.step": ["a", "b"]})), tmp_path, False, ()
        )


def test_a_plan_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(
        InputError,
        match=r"'none': no file, and no plan of the package "
        r"\(exploration, frontier, learning, objectives, paper, proxy\)",
    ):
        read_plan("none")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"broken\.yaml: cannot be read as YAML"):
        read_plan(str(tmp_path / "broken.yaml"))
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ConfigError, match=r"list\.yaml: a plan=\[1\]"):
        read_plan(str(tmp_path / "list.yaml"))


def test_the_carried_prices_are_those_of_the_compiled_plans():
    expected = {}  # formats of the same model and device are put together
    for prices in (prices_of(plan) for plan in PLANS.values() if plan["devices"] == 1):
        older = expected.get(prices.name, prices)
        expected[prices.name] = dataclasses.replace(
            older, network={**prices.network, **older.network}
        )
    assert packaged_prices() == expected


def test_prices_multiply_up_to_the_plan():
    """FLUX.1: 48 prompts, 96 candidates, 24 kept, 6 exploring steps of 10, 4 sigmas."""
    prices = packaged_prices()["flux1-b200"]
    plan = PLANS["flux1-b200"]
    seconds = {phase["name"]: phase["seconds"] for phase in plan["phases"]}
    assert prices.network["nvfp4"] * 48 * 96 * 6 == pytest.approx(seconds["explore"])
    assert prices.network["bf16"] * 48 * 24 * 10 == pytest.approx(seconds["regenerate"])
    assert prices.scored * 48 * 120 == pytest.approx(seconds["score"])
    assert prices.trained * 48 * 24 * 4 == pytest.approx(seconds["update"])
    config = resolve("flux1_sol_rl_hpsv2")
    whole = plan["seconds"] - seconds["encode"]
    assert prices.iteration_seconds(config, "nvfp4", 6) == pytest.approx(whole)
    naive = resolve("flux1_naive_scaling_hpsv2")
    assert prices.iteration_seconds(naive, "bf16", 10) == pytest.approx(
        plan["naive_scaling"]["seconds"] - seconds["encode"]
    )
    # One sigma, at which the reference predicts nothing, and three gradients.
    opsd = resolve("flux1_sol_rl_pickscore", ["objective=opsd"])
    reference = prices.network["bf16"]
    gradients = 48 * 24 * (3 * 4 * prices.scored - 3 * prices.trained - reference)
    assert prices.iteration_seconds(opsd, "nvfp4", 6) == pytest.approx(whole + gradients)
    draft = resolve("flux1_sol_rl_pickscore", ["objective=draft"])  # one gradient
    gradients = 48 * 24 * (4 * prices.scored - 3 * prices.trained - reference)
    assert prices.iteration_seconds(draft, "nvfp4", 6) == pytest.approx(whole + gradients)
    for name, skipped in (("dance_grpo", reference), ("flow_grpo", 0.0), ("dpo", 0.0)):
        other = resolve("flux1_sol_rl_hpsv2", [f"objective={name}"])
        terms = 48 * 24 * other.num_train_sigmas
        update = terms * (prices.trained - skipped) - seconds["update"]
        assert prices.iteration_seconds(other, "nvfp4", 6) == pytest.approx(whole + update)
    phase = {"name": "targets", "seconds": 48 * 24 * 3 * 0.5}
    update = {"name": "update", "seconds": 48 * 24 * (prices.trained - reference)}
    others = [phase for phase in plan["phases"] if phase["name"] != "update"]
    planned = prices_of(
        {**plan, "overrides": ["objective=opsd"], "phases": [*others, phase, update]}
    )
    assert planned.differentiated == pytest.approx(0.5)
    assert planned.trained == pytest.approx(prices.trained)
    gradients = 48 * 24 * (3 * 0.5 - 3 * prices.trained - reference)
    assert planned.iteration_seconds(opsd, "nvfp4", 6) == pytest.approx(whole + gradients)
    exact = dataclasses.replace(config.rollout.explore, exact_steps=1)
    mixed = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, explore=exact))
    more = 48 * 96 * (prices.network["bf16"] - prices.network["nvfp4"])
    assert prices.iteration_seconds(mixed, "nvfp4", 6) == pytest.approx(whole + more)


def test_a_plan_with_other_numbers_of_samples_and_steps_has_the_same_prices():
    plan = PLANS["flux1-b200"]
    overrides = ["rollout.candidates=48", "rollout.explore.num_steps=4", "rollout.kept=6"]
    # Of 96 candidates, 24 kept and 6 steps; all candidates and kept images are scored.
    factors = {"explore": 1 / 3, "regenerate": 1 / 4, "score": 54 / 120, "update": 1 / 4}
    phases = [
        {**phase, "seconds": phase["seconds"] * factors.get(phase["name"], 1.0)}
        for phase in plan["phases"]
    ]
    prices = prices_of({**plan, "overrides": overrides, "phases": phases})
    expected = packaged_prices()["flux1-b200"]
    for name in ("scored", "trained", "synced"):
        assert getattr(prices, name) == pytest.approx(getattr(expected, name), rel=1e-12)
    assert prices.network == pytest.approx(dict(expected.network), rel=1e-12)


def test_a_negative_price_of_a_gradient_is_refused(tmp_path):
    plan = PLANS["flux1-b200"]
    phases = [*plan["phases"], {"name": "targets", "seconds": -3.0}]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**plan, "overrides": ["objective=opsd"], "phases": phases}))
    with pytest.raises(InputError, match=r"its seconds must be above 0"):
        find_prices(str(path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.explore.exact_steps=1", "rollout.explore.exact_steps=1: expected a plan with 0;"),
        ("algorithm.kl_fraction=0.25", "algorithm.kl_fraction=0.25: expected a plan with 1;"),
        ("objective=tests.outside:gone", "algorithm.objective=tests.outside:gone: expected a plan"),
    ],
)
def test_a_plan_that_does_not_divide_into_prices_is_refused(override, message, tmp_path):
    """An objective outside the package is not imported: a plan may be a stranger's file."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**PLANS["flux1-b200"], "overrides": [override]}))
    with pytest.raises(InputError, match=re.escape(message)):
        find_prices(str(path))


def test_a_plan_of_an_older_version_has_the_objective_alone():
    plan = PLANS["flux1-b200"]
    phase = {"name": "targets", "seconds": 48 * 24 * 3 * 0.5}
    old = {**plan, "objective": "opsd", "phases": [*plan["phases"], phase]}
    assert prices_of(old).differentiated == pytest.approx(0.5)


def test_prices_come_from_a_plan_of_ones_own(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLANS["sana-h200"]))
    assert find_prices(str(path)) == prices_of(PLANS["sana-h200"]) == packaged_prices()["sana-h200"]
    path.write_text("{}")
    with pytest.raises(InputError, match=r"plan\.json: not the JSON that `solrl plan` prints"):
        find_prices(str(path))
    with pytest.raises(InputError, match=r"prices=flux: no file, and none of sana-h200, "):
        find_prices("flux")
