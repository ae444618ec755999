"""The settings of a run that a command takes with overrides."""

import pytest

from solrl_jax.config.serialization import to_yaml
from solrl_jax.errors import InputError
from solrl_jax.runs.directory import read_target
from tests.small import small_config

JUDGED = (
    "reward.eval_only=[geneval, judge]",
    "reward.options={geneval: {detector: shapes}, judge: {base_url: 'http://localhost:9/v1'}}",
)


@pytest.fixture
def run(tmp_path):
    """A run directory whose rewards that are not trained on have options."""
    (tmp_path / "config.yaml").write_text(to_yaml(small_config(tmp_path, *JUDGED)))
    return str(tmp_path)


def options(run, *overrides, trust=False):
    config, _ = read_target(run, overrides, None, trust=trust)
    return dict(config.reward.options)


def test_options_of_rewards_that_are_replaced_go_with_them(run):
    assert options(run, trust=True).keys() == {"geneval", "judge"}
    assert options(run, "reward.eval_only=[]") == {}
    assert options(run, "reward.eval_only=[geneval]") == {"geneval": {"detector": "shapes"}}


def test_options_that_the_user_sets_stay_and_are_checked_with_the_rewards(run):
    chosen = "reward.options.ocr={languages: [en]}"
    assert options(run, "reward.eval_only=[]", chosen) == {"ocr": {"languages": ["en"]}}


def test_a_service_of_the_run_is_refused_until_another_reward_takes_its_place(run):
    with pytest.raises(InputError, match=r"scores with http://localhost:9/v1, which"):
        options(run)
    assert options(run, "reward.eval_only=[geneval]").keys() == {"geneval"}
