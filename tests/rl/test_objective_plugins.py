"""Objectives outside the package: how they are loaded, what they train on, and who may name one."""

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
    with pytest.raises(InputError, match=rf"^algorithm\.objective='{name}': {message}"):
        load_objective(name)


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
