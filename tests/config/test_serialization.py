"""Configurations as text: exact round trips, older files, and fields that are added later."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import solrl_jax
from solrl_jax.config.migrations import RENAMED, RENAMED_VALUES, VERSION, current_name
from solrl_jax.config.presets import resolve
from solrl_jax.config.schema import Config
from solrl_jax.config.serialization import drop_defaults, from_yaml, to_tree, to_yaml
from solrl_jax.config.validation import field_names
from solrl_jax.config.values import ConfigError

TINY = resolve("tiny")

# What looks like the URL of a service may be refused.
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda word: "://" not in word
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(1e-37, 1e37),
    weights=st.dictionaries(WORDS, st.floats(-1e9, 1e9), min_size=1, max_size=3),
    path=WORDS.filter(lambda word: not word.startswith("~")),  # a home directory is expanded
)
@example(seed=0, rate=1e-5, weights={"\U00093329\x85": -0.0}, path="\U00093329\x85")
def test_text_round_trip_is_exact(seed, rate, weights, path):
    config = dataclasses.replace(
        TINY,
        seed=seed,
        optimizer=dataclasses.replace(TINY.optimizer, learning_rate=rate),
        reward=dataclasses.replace(TINY.reward, weights=weights),
        prompts=dataclasses.replace(TINY.prompts, train=path),
    )
    assert from_yaml(to_yaml(config)) == config
    assert to_tree(config) == yaml.safe_load(to_yaml(config))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "configuration=None: expected a mapping of its fields"),
        ("[1]", "configuration=[1]: expected a mapping of its fields"),
        ("a: [", "configuration: not YAML (line 1: "),
        ("seed: 0", "missing key 'version'"),
        (f"version: {VERSION + 1}", f"version={VERSION + 1}: expected {VERSION}"),
        ("version: two", "version='two': expected 3"),
        ("version: 3\nsede: 1", "unknown key 'sede': did you mean 'seed'?"),
        ("version: 3\nrollout: 3", "rollout=3: expected a mapping of its fields"),
        (
            "version: 2\nrollout: {explore: 3}",
            "rollout.explore=3: expected a mapping of its fields",
        ),
    ],
)
def test_text_that_is_no_configuration_is_refused(text, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        from_yaml(text)
    assert "\n" not in str(caught.value)


def test_only_fields_without_their_default_are_kept():
    assert drop_defaults(to_tree(Config())) == {}
    config = dataclasses.replace(
        Config(), reward=dataclasses.replace(Config().reward, weights={"pickscore": 1.0, "ocr": 2})
    )
    assert drop_defaults(to_tree(config)) == {"reward": {"weights": {"pickscore": 1.0, "ocr": 2}}}


# --- fields that are added later ---

READ_RUN = """
import dataclasses, sys
from pathlib import Path
from solrl_jax.config.schema import Algorithm
from solrl_jax.runs.directory import read_run
from solrl_jax.runs.identity import fingerprint, refuse_another_run
folder = Path(sys.argv[1])
config = read_run(folder)
refuse_another_run(folder, config)  # would this run go on in this directory?
fields = [field.name for field in dataclasses.fields(Algorithm)]
print("added_later" in fields, fingerprint(config, "nvfp4"))
"""


@pytest.mark.slow
def test_a_field_that_is_added_later_leaves_runs_readable_and_resumable(tmp_path):
    """The package and a copy of it with one more field read the same run directory."""
    package = Path(solrl_jax.__file__).parent
    copy = tmp_path / "later" / "solrl_jax"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (copy / "assets").symlink_to(package / "assets")
    schema = copy / "config" / "schema.py"
    field = "    ema_decay: Decay = 0.9\n"
    assert schema.read_text().count(field) == 1
    schema.write_text(schema.read_text().replace(field, f"{field}    added_later: Bool = True\n"))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(resolve("tiny", ["seed=3"])))

    def read_with(parent: Path) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(parent), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", READ_RUN, str(run)]
        process = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.split()

    has_field, before = read_with(package.parent)
    assert has_field == "False"
    has_field, after = read_with(copy.parent)
    assert has_field == "True"
    assert before == after  # the fingerprint that a checkpoint of the run must have


# --- the previous version ---


def old_names(tree: dict, prefix: str = "") -> dict:
    """A tree of the present version with the names and values of version 2."""
    old = {new: name for name, new in RENAMED.items()}
    translated = {}
    for key, value in tree.items():
        new_name = f"{prefix}{key}"
        old_name = old.get(new_name, new_name)
        if isinstance(value, dict):
            value = old_names(value, f"{new_name}.")
        renamed = {new: name for name, new in RENAMED_VALUES.get(old_name, {}).items()}
        translated[old_name.rpartition(".")[2]] = (
            renamed.get(value, value) if isinstance(value, str) else value
        )
    return translated


@pytest.mark.parametrize("overrides", [(), ("model=tiny-flux", "objective=mix_grpo")])
def test_files_of_version_2_are_read(overrides):
    config = resolve("tiny", ("rollout.explore.correction_rank=4", *overrides))
    tree = {**old_names(to_tree(config)), "version": 2}
    assert tree["policy"]["kl_weight"] == config.algorithm.kl_coef
    assert tree["model"]["quantize"]["min_dim"] == config.model.quantization.min_width_ratio
    assert tree["rollout"]["explore"]["sigmas"] == "own"
    assert from_yaml(yaml.safe_dump(tree)) == config


def test_old_names_are_no_present_names():
    assert not RENAMED.keys() & set(field_names())
    assert {current_name(name) for name in RENAMED} <= set(field_names())
