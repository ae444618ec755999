"""A resumed run notices that its base weights, its plug-ins or its texts have changed."""

import dataclasses
import shutil
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from solrl_jax.data.prompts import load_prompts
from solrl_jax.errors import InputError
from solrl_jax.models.locate import EMBEDDED_FOLDER, open_model
from solrl_jax.runs.identity import fingerprint
from solrl_jax.runs.inputs import hash_inputs, refuse_changed_inputs
from tests.small import small_config

REWARD = """
def score(images, prompts, metadata):
    return [{} for _ in prompts]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A copy of an embedded model, a reward of one's own and prompts: (configuration, folder)."""
    shutil.copytree(EMBEDDED_FOLDER / "tiny-sana", tmp_path / "model")
    (tmp_path / "own_reward_of_test.py").write_text(REWARD.format("1.0"))
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = [
        f"model.path={tmp_path / 'model'}",
        f"prompts.train={tmp_path / 'prompts.txt'}",
        "train.num_prompts=1",
        "reward=own_reward_of_test:score",
    ]
    yield small_config(tmp_path / "run", *settings), tmp_path
    sys.modules.pop("own_reward_of_test", None)


def hash_all(config):
    """The hashes of what a run of this configuration would read. No weight is loaded."""
    prompts = load_prompts(config.prompts.train, "prompts.train")
    return hash_inputs(config, open_model(config.model.path), prompts, None)


def change_weights(folder):
    path = folder / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: np.float32(1.5) * x for name, x in load_file(path).items()}, path)


def change_reward(folder):
    (folder / "own_reward_of_test.py").write_text(REWARD.format("-100.0"))


def change_prompts(folder):
    (folder / "prompts.txt").write_text("a red circle\na green square\n")


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (change_weights, "weights/vae", "the weights of vae have changed since iteration 7"),
        (
            change_reward,
            "code/own_reward_of_test:score",
            "reward.weights: the source file of own_reward_of_test:score has changed since",
        ),
        (change_prompts, "prompts", "its prompts have changed since iteration 7"),
    ],
)
def test_a_changed_input_is_noticed_by_name(files, change, name, message):
    config, folder = files
    saved = hash_all(config)
    assert {"prompts", "instruction", "weights/transformer", "weights/text_encoder"} < saved.keys()
    change(folder)
    current = hash_all(config)
    assert {key for key in current if current[key] != saved[key]} == {name}
    with pytest.raises(InputError, match=message):
        refuse_changed_inputs(config, {"iteration": 7, **saved}, current)
    refuse_changed_inputs(config, {"iteration": 7, **current}, current)


def test_an_input_that_an_older_checkpoint_does_not_record_is_not_compared(files):
    config, _ = files
    refuse_changed_inputs(config, {"iteration": 7, "prompts": "x"}, {"weights/vae": "y"})


def test_a_function_of_a_script_or_a_notebook_is_hashed_if_it_has_a_file(files, monkeypatch):
    config, folder = files
    script = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    reward = dataclasses.replace(config.reward, weights={"__main__:score": 1.0})
    config = dataclasses.replace(config, reward=reward)
    assert not any(name.startswith("code/") for name in hash_all(config))
    script.__file__ = str(folder / "own_reward_of_test.py")
    saved = hash_all(config)
    change_reward(folder)
    assert hash_all(config)["code/__main__:score"] != saved["code/__main__:score"]


def test_a_changed_reward_of_an_installed_package_is_one_of_the_weights(files, monkeypatch):
    config, folder = files
    monkeypatch.setattr(
        "solrl_jax.runs.inputs.entry_points", lambda: {"installed": "own_reward_of_test:score"}
    )
    reward = dataclasses.replace(config.reward, weights={"installed/strict": 1.0})
    config = dataclasses.replace(config, reward=reward)
    saved = hash_all(config)
    change_reward(folder)
    with pytest.raises(InputError, match=r"^reward.weights: the source file of own_reward_of_test"):
        refuse_changed_inputs(config, {"iteration": 7, **saved}, hash_all(config))


def test_a_reward_that_only_ranks_candidates_is_an_input_too(files):
    config, folder = files
    config = small_config(
        folder / "run",
        f"model.path={folder / 'model'}",
        "rollout.explore.reward={own_reward_of_test:score: 1}",
    )
    saved = hash_all(config)
    change_reward(folder)
    current = hash_all(config)
    assert {key for key in current if current[key] != saved[key]} == {
        "code/own_reward_of_test:score"
    }
    with pytest.raises(
        InputError, match=r"rollout\.explore\.reward: the source file of own_reward"
    ):
        refuse_changed_inputs(config, {"iteration": 7, **saved}, current)


def test_the_fingerprint_has_the_options_of_what_ranks_and_not_of_what_is_watched():
    def fingerprint_of(model, *settings):
        judge = f"reward.options.judge={{base_url: http://localhost:1/v1, model: {model}}}"
        return fingerprint(small_config("unused", judge, *settings), "nvfp4")

    ranks = "rollout.explore.reward={judge: 1}"
    assert fingerprint_of("one", ranks) != fingerprint_of("another", ranks)
    watched = "reward.eval_only=[judge]"
    assert fingerprint_of("one", watched) == fingerprint_of("another", watched)
