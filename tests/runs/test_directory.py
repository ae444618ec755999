"""The settings of a run that a command takes with overrides."""

from inspect import unwrap

import pytest

from solrl_jax.config.serialization import to_yaml
from solrl_jax.errors import InputError
from solrl_jax.runs.directory import find_checkpoint, read_target
from solrl_jax.runs.identity import check_record
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


def test_a_run_that_combines_advantages_needs_no_trust(tmp_path):
    combined = ("reward.weights={shapes: 1, tiny-clip: 0.5}", "reward.combine=advantages")
    (tmp_path / "config.yaml").write_text(to_yaml(small_config(tmp_path, *combined)))
    config, _ = read_target(str(tmp_path), (), None, trust=False)
    assert config.reward.combine == "advantages"
    (tmp_path / "config.yaml").write_text(to_yaml(small_config(tmp_path, combined[0])))
    config, _ = read_target(str(tmp_path), (combined[1],), None, trust=False)
    assert config.reward.combine == "advantages"


def test_a_checkpoint_that_is_no_text_is_refused(run):
    with pytest.raises(InputError, match=r"^checkpoint=40: expected text$"):
        unwrap(find_checkpoint)(run, 40)


def test_a_configuration_that_could_not_be_read_again_is_refused(tmp_path):
    words = "\u6f22" * 11_000  # six characters each in the file
    config = small_config(
        tmp_path, f"reward.options.tests.outside:metadata_scores={{words: '{words}'}}"
    )
    with pytest.raises(InputError, match=r"^the configuration is too large for a run: "):
        check_record(config)
    check_record(small_config(tmp_path))
