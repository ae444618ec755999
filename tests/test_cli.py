"""The command line as others script against it: exit codes, one-line errors, JSON, files."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from solrl_jax import cli, metrics
from tests.small import SMALL


def solrl(*arguments: str, monkeypatch, capsys) -> tuple[int, str, str]:
    """Runs the entry point in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["solrl", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def call(monkeypatch, capsys):
    return lambda *arguments: solrl(*arguments, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of two iterations, made by the command in a process of its own."""
    folder = tmp_path_factory.mktemp("runs") / "cli"
    arguments = ["train", "tiny", *SMALL, "train.iterations=2", "eval.every=1", f"run.dir={folder}", "--json"]
    arguments += ["run.tensorboard=true", "reward=tiny-clip"]
    done = subprocess.run([sys.executable, "-m", "solrl_jax.cli", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


def test_train_leaves_everything_a_run_has(trained):
    folder, summary, said = trained
    assert summary["iterations"] == 2
    assert not summary["interrupted"]
    assert {"eval/reward", "eval/tiny-clip"} <= summary["after"].keys()
    for name in (
        "config.yaml", "run.json", "metrics.jsonl", "metrics.csv", "ledger/iteration-000002.parquet", "checkpoints/000002",
        "pictures/iteration-000000.png", "pictures/iteration-000001.png", "pictures/before-after.png", "pictures/reward.png",
    ):  # fmt: skip
        assert (folder / name).exists(), name
    assert list((folder / "tensorboard").iterdir())
    assert "2 prompts x 4 kept x 2 sigmas = 16 terms" in said
    assert "no FP4 units here: expanded exactly" in said
    rows = metrics.read(folder)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert {"seconds/explore", "images_per_second/explore", "fidelity/spearman", "loss"} <= rows[1].keys()
    facts = json.loads((folder / "run.json").read_text())
    assert facts["packages"]["jax"]


def test_eval_of_a_run_repeats_its_last_evaluation(trained, call):
    folder, summary, _ = trained
    code, out, _ = call("eval", str(folder), "--json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert result["iteration"] == 2
    assert result["means"]["reward"] == pytest.approx(summary["after"]["eval/reward"], abs=1e-6)


def test_eval_of_a_model_directory(call):
    overrides = [o for o in SMALL if o.startswith(("eval", "rollout", "train", "optimizer", "mesh", "policy"))]
    code, out, _ = call("eval", "embedded:tiny-sana", *overrides, "--json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert 0 <= result["means"]["shapes/strict"] <= 1


def test_rank_of_a_run_and_of_a_preset(trained, call, tmp_path):
    folder, _, _ = trained
    code, out, _ = call("rank", str(folder), "--prompts", "2", "--out", str(tmp_path / "rank"), "--json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert -1 <= result["spearman"] <= 1
    assert result["prompts"] == 2
    rows = json.loads((tmp_path / "rank" / "rank.json").read_text())["per_prompt"]
    assert len(rows) == 2
    assert {"spearman", "kendall", "top_k_match", "bottom_k_match", "largest_difference"} <= rows[0].keys()
    assert Image.open(tmp_path / "rank" / "rank.png").size[0] > 100
    code, out, _ = call("rank", "tiny", *SMALL, "rollout.explore.precision=bf16", "rollout.explore.steps=3", "--prompts", "1",
                        "--out", str(tmp_path / "same"))  # fmt: skip
    assert code == 0
    assert "all prompts" in out
    same = json.loads((tmp_path / "same" / "rank.json").read_text())
    assert same["spearman"] == pytest.approx(1.0)  # the proxy is the truth
    assert same["largest_difference"] == 0


def test_sample_from_a_run_differs_from_its_base(trained, call, tmp_path):
    folder, _, _ = trained
    (tmp_path / "prompts.txt").write_text("a red circle\ntwo blue squares\n")
    options = ("--prompts", str(tmp_path / "prompts.txt"), "--steps", "3", "--precision", "fp32", "--seed", "4")
    assert call("sample", str(folder), *options, "--out", str(tmp_path / "run"))[0] == 0
    noise = str(tmp_path / "run" / "latents.npy")
    assert call("sample", "embedded:tiny-sana", *options, "--latents", noise, "--out", str(tmp_path / "base"))[0] == 0
    ours, base = (np.load(tmp_path / name / "images.npy") for name in ("run", "base"))
    assert ours.shape == base.shape == (2, 32, 32, 3)
    assert ours.dtype == np.float32
    assert Image.open(tmp_path / "run" / "00001.png").size == (32, 32)


def test_presets_lists_them_all(call):
    code, out, _ = call("presets")
    assert code == 0
    assert len(out.strip().splitlines()) == 1 + 49
    assert len(json.loads(call("presets", "--json")[1])["presets"]) == 49


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "tinny"), "did you mean 'tiny'"),
        (("train", "tiny", "rollout.canditates=4"), "did you mean 'rollout.candidates'"),
        (("train", "tiny", "rollout.kept=97"), "must be at most rollout.candidates"),
        (("train", "tiny", "rollout.kept=3"), "must be even"),
        (("train", "tiny", "train.iterations=x"), "expected an integer"),
        (("train", "tiny", "rollout.steps=0"), "must be at least 1"),
        (("train", "tiny", "rollout.chunk=7"), "must divide"),
        (("train", "tiny", "prompts.train=nowhere.txt"), "prompts.train='nowhere.txt': no such file"),
        (("train", "tiny", "reward.weights={beauty: 1}"), "unknown reward 'beauty'"),
        (("train", "tiny", "lora.targets=[blocks/nothing]"), "lora.targets: 'blocks/nothing' matches no parameter"),
        (("train", "tiny", "model.path=embedded:big-sana"), "no such embedded pipeline; there are tiny-sana"),
        (("train", "tiny", "model.height=30"), "size 30x32"),
        (("train", "tiny", "eval.prompts=5000"), "eval.prompts=5000: must be at most"),
        (("train", "tiny", "mesh.data=64"), "mesh.data=64"),
        (("train", "sana_sol_rl_pickscore"), "unknown reward 'pickscore'"),
        (("eval", "nowhere"), "'nowhere': no run directory and no preset"),
        (("rank", "nowhere"), "'nowhere': no run directory and no preset"),
        (("sample", "nowhere", "--prompts", "embedded:shapes-test", "--out", "o"), "model.path='nowhere': no such directory"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, said, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = call(*arguments)
    assert code == 2
    assert out == ""
    assert said in error
    assert error.startswith("solrl: ")
    assert len(error.strip().splitlines()) == 1


def test_an_empty_prompt_file(call, tmp_path):
    (tmp_path / "empty.txt").write_text("\n  \n")
    code, _, error = call("train", "tiny", f"prompts.train={tmp_path / 'empty.txt'}", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    assert "holds no prompt" in error


def test_a_prompt_the_reward_cannot_read(call, tmp_path):
    (tmp_path / "prose.txt").write_text("an astronaut on a horse\n" * 2 + "a dog\n")
    code, _, error = call("train", "tiny", *SMALL, f"prompts.train={tmp_path / 'prose.txt'}", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    assert "an astronaut on a horse" in error


def test_a_run_directory_that_is_a_file(call, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = call("train", "tiny", f"run.dir={tmp_path / 'file'}")
    assert code == 2
    assert "is a file" in error


def test_a_read_only_run_directory(tmp_path):
    """In a process that may not write there (permissions do not stop root; a kernel file system does)."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    path = "/proc/solrl" if os.geteuid() == 0 else str(folder)  # root cannot write to the former either
    done = subprocess.run(
        [sys.executable, "-m", "solrl_jax.cli", "train", "tiny", f"run.dir={path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert path in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
