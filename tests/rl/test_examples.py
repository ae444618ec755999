"""Every example runs, at the smallest settings; README shows the first of them as it is."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import solrl_jax
from solrl_jax.rl import generate
from tests.small import SMALL

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
TWO = (*SMALL, "train.iterations=2")


def load(name):
    """The module of an example, under its own name, as a user's script would be."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES[name])
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_for_each_purpose():
    assert set(EXAMPLES) == {
        "generate_images",
        "latent_reward",
        "own_objective",
        "own_reward",
        "quantize_a_matrix",
        "rank_preservation_test",
        "train_tiny",
    }
    assert all(15 <= len(path.read_text().splitlines()) <= 60 for path in EXAMPLES.values())


def test_readme_shows_the_loop_as_it_runs():
    lines = EXAMPLES["train_tiny"].read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def main"))
    body = textwrap.dedent("\n".join(lines[start + 1 : lines.index("", start)]))
    code = body.replace("*overrides", '"train.iterations=20"')
    assert code in (ROOT / "README.md").read_text()
    assert len(code.splitlines()) <= 20


@pytest.mark.slow
def test_training_from_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    load("train_tiny").main(*TWO)
    output = capsys.readouterr().out
    assert output.count("kept") == 2
    assert "held-out reward" in output
    assert (tmp_path / "tiny-lora.safetensors").stat().st_size > 1000


@pytest.mark.exhaustive
def test_an_objective_of_your_own_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "own_objective", load("own_objective"))
    sys.modules["own_objective"].main(*TWO)
    assert "reward: " in capsys.readouterr().out
    assert (tmp_path / "runs" / "own-objective" / "checkpoints").is_dir()


@pytest.mark.exhaustive
def test_a_reward_of_your_own_trains(tmp_path):
    """In a process of its own, from another directory: the reward is imported by name in worker
    processes.
    """
    here = [f"{EXAMPLES['own_reward'].parent}", str(ROOT), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(here)}
    command = [sys.executable, str(EXAMPLES["own_reward"]), *TWO]
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("reward: ")
    assert (tmp_path / "runs" / "own-reward" / "checkpoints").is_dir()


@pytest.mark.exhaustive
def test_a_reward_on_latents_trains(tmp_path, monkeypatch, capsys):
    """It is a reward inside JAX, and nothing is decoded for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "latent_reward", load("latent_reward"))
    monkeypatch.setattr(generate, "decode_chunk", lambda *_: pytest.fail("decoded"))
    sys.modules["latent_reward"].main(*TWO, "eval.num_grid_images=0")
    assert capsys.readouterr().out.count("calmness") == 2


@pytest.mark.slow
def test_formats_cost_what_they_should(capsys):
    load("quantize_a_matrix").main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    quantizing = [name for name, form in solrl_jax.FORMATS.items() if form.quantize is not None]
    assert [row[0] for row in rows] == quantizing
    assert all(0 < float(row[2]) < 0.2 and 0 < float(row[3]) < 0.25 for row in rows)


@pytest.mark.exhaustive
def test_images_in_two_precisions(capsys):
    load("generate_images").main("embedded:tiny-sana")
    assert "images: (3, 32, 32, 3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "test_a_proxy_with_small_errors_keeps_the_order",
        pytest.param("test_exploration_finds_both_ends", marks=pytest.mark.exhaustive),
    ],
)
def test_rank_preservation(name):
    getattr(load("rank_preservation_test"), name)()
