"""Objectives outside the package: how they are loaded, what they train on, and who may name one."""

import sys

import pytest

from solrl_jax.config.serialization import to_yaml
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError
from solrl_jax.rl.objective import load_objective
from solrl_jax.runs.directory import read_target
from tests.small import small_config

NAME = f"{__name__}:transitions"


def transitions(velocities, target, algorithm):
    raise AssertionError("is never called")


transitions.trains_on = "transitions"


def test_the_function_says_what_it_trains_on():
    config = small_config("unused", f"objective={NAME}")
    assert load_objective(NAME) is transitions
    assert config.algorithm.trains_on == "transitions"
    with pytest.raises(ConfigError, match=r"rollout\.noise_level=0\.0: must be above 0"):
        config.check_objective()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:loss", "cannot be imported .ModuleNotFoundError"),
        (f"{__name__}:no_such_function", "cannot be imported .AttributeError"),
        (f"{__name__}:NAME", "is not a function"),
    ],
)
def test_a_wrong_name_is_one_line(name, message):
    pattern = rf"^algorithm\.objective='{name}': {message}"
    with pytest.raises(InputError, match=pattern):
        load_objective(name)


def test_it_is_found_in_the_working_directory_whoever_asks_first(tmp_path, monkeypatch):
    """`config.algorithm.trains_on` imports it too, e.g. for the prices of a study."""
    (tmp_path / "objective_of_this_test.py").write_text(
        "def loss(velocities, target, algorithm): ...\nloss.trains_on = 'pairs'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    config = small_config("unused", "objective=objective_of_this_test:loss")
    assert config.algorithm.trains_on == "pairs"
    (tmp_path / "script_of_this_test.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(InputError, match=r"cannot be imported \(SystemExit: 3\)"):
        load_objective("script_of_this_test:loss")
    absent = small_config("unused", "objective=no_such_module:loss")
    with pytest.raises(InputError, match=r"algorithm\.objective='no_such_module:loss': cannot be"):
        _ = absent.algorithm.trains_on


def test_a_run_directory_runs_no_objective_that_is_not_trusted(tmp_path):
    config = small_config(tmp_path, f"objective={NAME}")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(InputError, match=rf"trains with {NAME}, .* trust=True"):
        read_target(str(tmp_path), (), None, trust=False)
    assert read_target(str(tmp_path), (), None, trust=True)[0].algorithm.objective == NAME
    loaded_config, _ = read_target(str(tmp_path), ("algorithm.objective=nft",), None, trust=False)
    assert loaded_config.algorithm.objective == "nft"
    for chosen in (
        f"objective={NAME}",
        f"algorithm.objective = {NAME}",
        f"algorithm={{objective: {NAME}}}",
    ):
        loaded_config, _ = read_target(str(tmp_path), (chosen,), None, trust=False)
        assert loaded_config.algorithm.objective == NAME
    with pytest.raises(InputError, match=rf"trains with {NAME}, .* trust=True"):
        read_target(str(tmp_path), ("algorithm.beta=0.5",), None, trust=False)
