"""The command line as others script against it: exit codes, one-line errors, JSON, files."""

import gzip
import json
import os
import shutil
import subprocess
import sys

import click
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from solrl_jax.cli import main, rank
from solrl_jax.config.presets import released_models
from solrl_jax.errors import RunError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.runs import metrics
from solrl_jax.runs.directory import load_ema, read_run
from solrl_jax.runs.evaluate import Evaluation
from solrl_jax.storage.stores import StoreError, run_path
from tests.small import SMALL

TINY = "embedded:tiny-sana"
BASE = EMBEDDED_FOLDER / "tiny-sana"
GENERATE = ("--prompts", "embedded:shapes-test", "--num-steps", "1", "--out", "{dir}/out")


def solrl(*arguments: str, monkeypatch, capsys) -> tuple[int, str, str]:
    """Runs the entry point in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "argv", ["solrl", *arguments])
    code = 0
    try:
        main.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    streams = capsys.readouterr()
    return code, streams.out, streams.err


@pytest.fixture
def call(monkeypatch, capsys):
    return lambda *arguments: solrl(*arguments, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture(scope="module")
def trained(tiny_run):
    """A finished run of two iterations: its directory, its summary, and its standard error."""
    return tiny_run


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The LoRA file of that run, float32, in a directory that was not there."""
    file = tmp_path_factory.mktemp("lora") / "new" / "lora.safetensors"
    result = CliRunner().invoke(
        main.cli, ["export", str(trained[0]), "--out", str(file), "--json"], catch_exceptions=False
    )
    expected = {
        "out": str(file),
        "format": "diffusers",
        "dtype": "fp32",
        "iteration": 2,
        "rank": 32,
        "alpha": 64.0,
    }
    assert json.loads(result.stdout) == expected
    return file


def test_a_report_is_of_the_whole_run_and_can_be_made_again(trained, call, tmp_path):
    folder = trained[0]
    out = tmp_path / "page.html"

    def page(path):
        return json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])

    code, output, _ = call("report", str(folder), "--out", str(out), "--json")
    assert (code, json.loads(output)) == (0, {"out": str(out), "runs": [str(folder)]})
    ours = page(out)
    live = page(folder / "report.html")
    assert ours["runs"] == live["runs"]  # what training wrote last
    assert not live["live"]
    (run,) = ours["runs"]
    assert run["metrics"]["iteration"] == [0, 1, 2]
    assert [grid["iteration"] for grid in run["grids"]] == [0, 1, 2]
    assert [pool["iteration"] for pool in run["pools"]] == [1, 2]
    assert {cell["phase"] for cell in run["pools"][0]["cells"]} == {"explored", "regenerated"}


def test_train_leaves_everything_a_run_has(trained):
    folder, summary, log = trained
    assert summary["iterations"] == 2
    assert not summary["interrupted"]
    assert summary["trained_in_full"] == 0
    assert {"eval/reward", "eval/shapes"} <= summary["after"].keys()
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "ledger/iteration-000002.parquet",
        "checkpoints/000002",
        "pictures/iteration-000000.png",
        "pictures/iteration-000001.png",
        "pictures/before-after.png",
        "pictures/pool-000001.png",
        "report.html",
    ):
        assert (folder / name).exists(), name
    assert list((folder / "tensorboard").iterdir())
    assert "2 prompts x 4 kept x 2 sigmas = 16 terms" in log
    assert (
        "exploration in nvfp4 (weights and activations in E2M1, blocks of 16; emulated: cpu" in log
    )
    assert "has no units for it)" in log
    rows = metrics.read(folder)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert {"seconds/explore", "images_per_second/explore", "fidelity/spearman", "loss"} <= rows[
        1
    ].keys()
    assert rows[1]["seconds/compile"] > 0
    assert rows[2]["seconds/compile"] == 0
    facts = json.loads((folder / "run.json").read_text())
    assert facts["packages"]["jax"]


@pytest.mark.slow
def test_eval_of_a_run_repeats_its_last_evaluation(trained, call):
    folder, summary, _ = trained
    code, out, _ = call("eval", str(folder), "--json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert result["iteration"] == 2
    assert result["means"]["reward"] == pytest.approx(summary["after"]["eval/reward"], abs=1e-6)


def test_eval_compares_with_a_base_whose_lora_layers_are_not_those_of_tiny(call, monkeypatch):
    """The base that is named has the settings of `tiny`, whose layers are those of SANA."""
    evaluated = []

    def evaluate(experiment, adapters):
        evaluated.append(adapters)
        scores = {"reward": np.full((2, 3), len(evaluated), np.float32)}
        return Evaluation({"reward": 1.0}, {"reward": 0.0}, scores, {}, {})

    monkeypatch.setattr("solrl_jax.cli.eval._evaluate", evaluate)
    arguments = ("tiny", "embedded:tiny-wan", "model=tiny-wan", "--paired", "--json")
    code, out, error = call("eval", *arguments)
    assert code == 0, error
    assert json.loads(out.strip().splitlines()[-1])["differences"]["reward"][0] == -1
    assert evaluated == [{}, {}]


@pytest.mark.slow
def test_eval_compares_a_lora_with_the_base_that_is_named(exported, call, monkeypatch):
    evaluated = []

    def evaluate(experiment, adapters):
        evaluated.append(adapters)
        return Evaluation({"reward": 1.0}, {"reward": 0.0}, {"reward": np.ones((2, 3))}, {}, {})

    monkeypatch.setattr("solrl_jax.cli.eval._evaluate", evaluate)
    base = "embedded:tiny-sana"
    code, _, error = call("eval", base, base, f"lora.path={exported}", "--paired", "--json")
    assert code == 0, error
    assert [len(adapters) > 0 for adapters in evaluated] == [True, False]


@pytest.mark.exhaustive
def test_eval_compares_a_run_with_itself_and_with_its_base(trained, call, tmp_path):
    folder, summary, _ = trained
    gained = summary["after"]["eval/reward"] - summary["before"]["eval/reward"]
    for other, expected in ((str(folder), 0.0), ("embedded:tiny-sana", gained), ("tiny", gained)):
        code, out, _ = call("eval", str(folder), other, "--paired", "--json")
        result = json.loads(out.strip().splitlines()[-1])
        assert code == 0
        assert result["other"] == other
        assert result["differences"]["reward"][0] == pytest.approx(expected, abs=1e-6)
    assert gained != 0
    page = tmp_path / "differ.png"
    options = ("--paired", "--rewards", "shapes, tiny-clip", "--gallery", str(page), "--json")
    code, out, _ = call("eval", str(folder), "embedded:tiny-sana", *options)
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert {"shapes", "tiny-clip"} <= result["means"].keys() & result["differences"].keys()
    assert result["setting"].startswith("2 prompts (sha256 ")
    title = Image.open(page).text["Title"]
    assert title.startswith(f"{folder}: ")
    assert "    embedded:tiny-sana: " in title
    before = page.read_bytes()
    assert call("eval", str(folder), "embedded:tiny-sana", *options)[0] == 2  # it exists
    assert page.read_bytes() == before


def test_the_iteration_that_was_asked_for_is_traced_phase_by_phase(trained):
    (folder,) = (trained[0] / "profile").iterdir()
    assert folder.name == "iteration-000002"
    (file,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    assert list(file.parent.glob("*.xplane.pb"))  # TensorBoard's
    with gzip.open(file) as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    row = metrics.read(trained[0])[2]
    for phase in ("encode", "sync", "explore", "regenerate", "update"):
        (span,) = (event for event in events if event["name"] == phase)
        assert span["dur"] / 1e6 == pytest.approx(row[f"seconds/{phase}"], rel=0.05, abs=2e-3)
    assert [event["name"] for event in events].count("iteration") == 1


@pytest.mark.exhaustive
def test_a_checkpoint_may_be_named(trained, call, tmp_path):
    folder = trained[0]
    rewards = [row["eval/reward"] for row in metrics.read(trained[0])]
    code, out, _ = call("eval", str(folder), "--checkpoint", "1", "--json")
    result = json.loads(out.strip().splitlines()[-1])
    assert (code, result["iteration"]) == (0, 1)
    assert result["means"]["reward"] == pytest.approx(rewards[1], abs=1e-6)
    assert rewards[1] != pytest.approx(rewards[2], abs=1e-6)
    best = 1 if rewards[1] > rewards[2] else 2
    code, out, _ = call(
        "export",
        str(folder),
        "--out",
        str(tmp_path / "x.safetensors"),
        "--checkpoint",
        "best",
        "--json",
    )
    assert (code, json.loads(out)["iteration"]) == (0, best)
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    options = ("--prompts", str(tmp_path / "prompts.txt"), "--num-steps", "1")
    for which in ("1", "latest"):
        assert (
            call(
                "generate",
                str(folder),
                *options,
                "--out",
                str(tmp_path / which),
                "--checkpoint",
                which,
            )[0]
            == 0
        )
    first, last = (np.load(tmp_path / which / "images.npy") for which in ("1", "latest"))
    assert (first != last).any()


def test_a_named_checkpoint_that_is_damaged_is_not_replaced_by_another(trained, call, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "000001" / "meta.json").open("a").write(" ")
    code, _, error = call(
        "export",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "x.safetensors"),
        "--checkpoint",
        "1",
    )
    assert (code, error.count("\n")) == (1, 1)
    assert "checkpoints/000001: meta.json has" in error
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.slow
def test_eval_of_a_model_directory(call):
    overrides = [
        o
        for o in SMALL
        if o.startswith(("eval", "rollout", "train", "optimizer", "mesh", "algorithm"))
    ]
    code, out, _ = call("eval", "embedded:tiny-sana", *overrides, "--json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert 0 <= result["means"]["shapes/strict"] <= 1


@pytest.mark.slow
def test_rank_of_a_run(trained, call, tmp_path):
    folder, _, _ = trained
    code, out, _ = call(
        "rank",
        str(folder),
        "reward.weights={tiny-clip: 1}",  # without the ties of few candidates
        "--prompts",
        "2",
        "--out",
        str(tmp_path / "rank"),
        "--json",
    )
    (result,) = json.loads(out.strip().splitlines()[-1])["settings"]
    assert code == 0
    assert -1 <= result["spearman"] <= 1
    assert (result["precision"], result["steps"], result["candidates"], result["prompts"]) == (
        "nvfp4",
        2,
        8,
        2,
    )
    rows = json.loads((tmp_path / "rank" / "rank.json").read_text())[0]["per_prompt"]
    assert len(rows) == 2
    assert {
        "spearman",
        "kendall",
        "top_k_match",
        "top_k_regret",
        "bottom_k_match",
        "true_rank_best",
    } <= rows[0].keys()


@pytest.mark.exhaustive
def test_rank_sweeps_recipes_and_formats(call, tmp_path):
    sweep = ("--explore", "paper,best", "--formats", "nvfp4,bf16", "--steps", "3", "--prompts", "1")
    assert call("rank", "tiny", *SMALL, *sweep, "--out", str(tmp_path))[0] == 0
    results = json.loads((tmp_path / "rank.json").read_text())
    table = {(row["explore"], row["precision"], row["steps"]): row for row in results}
    assert len(table) == len(results) == 4

    def figures(row):
        return [
            row[name] for name in ("spearman", "top_k_match", "true_rank_best", "true_rank_worst")
        ]

    # two are at an end: two of the four best
    perfect = {
        key
        for key, row in table.items()
        if figures(row) == pytest.approx([1, 0.5, 1.5, 7.5], abs=1e-6)
    }
    assert perfect >= {("paper", "bf16", 3), ("best", "bf16", 3)}  # there the proxy is the truth
    assert ("paper", "nvfp4", 3) not in perfect
    assert table["paper", "nvfp4", 3] | {"explore": "best"} != table["best", "nvfp4", 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--formats", "nvfp4,fp5"),
            "--formats=fp5: expected one of fp32, bf16, ",
        ),
        (
            ("--steps", "4,0"),
            "--steps=0: expected an integer from 1 to 1000",
        ),
        (("--steps", "4,"), "--steps=4,: expected a comma-separated list"),
        (("--explore", "paper,mine"), "unknown explore 'mine': expected one of "),
        (
            ("--steps", "all"),
            "--steps=all: expected an integer",
        ),
    ],
)
def test_rank_refuses_a_list_that_is_none(call, tmp_path, options, message):
    code, _, err = call("rank", "tiny", *options, "--out", str(tmp_path / "rank"))
    assert code == 2
    assert err.startswith(f"solrl: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "rank").exists()


def test_arguments_in_messages_become_options():
    from solrl_jax.cli.generate import command

    for message, expected in (
        ("num_steps=0: must be at least 1", "--num-steps=0: must be at least 1"),
        ("lora: x: no such file", "--lora: x: no such file"),
        ("out=a: exists; replace it with force=True", "--out=a: exists; replace it with --force"),
        ("model.seed=3: no; rollout.size=2", "model.seed=3: no; rollout.size=2"),
        ("'a/seed=3': no such file", "'a/seed=3': no such file"),
    ):
        assert main.with_options(message, command) == expected


def test_a_directory_to_compare_with_may_have_an_equals_sign(call, tmp_path):
    other = tmp_path / "lr=1"
    other.mkdir()
    code, _, error = call("eval", "embedded:tiny-sana", str(other), "--paired")
    assert code == 2
    assert error.startswith(f"solrl: {other}: ")


def test_an_error_of_a_store_ends_a_command_in_one_line(monkeypatch):
    @click.command()
    def command():
        raise StoreError(run_path("gs://bucket/run"), "permission denied")

    monkeypatch.setattr(main.Commands, "get_command", lambda *_: command)
    message = "gs://bucket/run: permission denied"
    with pytest.raises(RunError, match=f"^{message}$") as refusal:
        main.cli(["eval"], standalone_mode=False)
    assert main.describe_failure(refusal.value) == (message, 1)


def test_a_home_directory_is_expanded_where_options_are_read(trained, call, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").symlink_to(trained[0])
    out = ("--out", "~/new page.html", "--json")
    code, output, error = call("report", "~/run", *out)
    assert code == 0, error
    assert json.loads(output)["out"] == f"{tmp_path}/new page.html"
    assert (tmp_path / "new page.html").exists()
    code, _, error = call("report", "~nobody-at-all/x", *out)
    assert (code, "no home directory of ~nobody-at-all is known" in error) == (2, True)


def test_the_old_names_of_generate_and_of_its_options_still_work():
    from solrl_jax.cli.generate import command

    old = "m --prompts p --out o --steps 4 --guidance 1.5 --true-cfg 2 --negative blur --tile 64"
    context = command.make_context("generate", [*old.split(), "--chunk", "8", "--max-tokens", "10"])
    expected = {
        "num_steps": 4,
        "guidance_scale": 1.5,
        "true_cfg_scale": 2.0,
        "negative_prompt": "blur",
        "vae_tile_size": 64,
        "batch_size": 8,
        "max_sequence_length": 10,
    }
    assert {name: context.params[name] for name in expected} == expected
    result = CliRunner().invoke(main.cli, ["sample", "--help"])
    assert result.exit_code == 0
    assert result.stderr.splitlines() == ["solrl sample is now solrl generate"]


@pytest.mark.exhaustive  # tests/cli/test_generate.py has it for a model directory
def test_guidance_up_to_1_is_none_for_a_run_too(trained, call, tmp_path):
    """Scale 0 would be classifier-free guidance that ignores the prompt."""
    (tmp_path / "p.txt").write_text("a red circle\ntwo blue squares\n")
    images = {}
    for scale in ("0", "1"):
        options = ("--prompts", str(tmp_path / "p.txt"), "--num-steps", "2", "--json")
        out = tmp_path / scale
        code, _, error = call(
            "generate", str(trained[0]), *options, "--guidance-scale", scale, "--out", str(out)
        )
        assert code == 0, error
        images[scale] = np.load(out / "images.npy")
    np.testing.assert_array_equal(images["0"], images["1"])


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9")],
)
def test_memory_that_is_used_up_is_one_line_with_what_would_help(error):
    line, code = main.describe_failure(error)
    assert code == 1
    assert line.startswith("out of memory: ")
    assert line.endswith(
        "a smaller rollout.per_device_batch_size, optimizer.per_device_batch_size or"
        " model.vae_tile_size, or model.gradient_checkpointing=blocks needs less"
    )


@pytest.mark.exhaustive
def test_sample_from_a_run_is_its_base_with_its_exported_lora(trained, exported, call, tmp_path):
    folder, _, _ = trained
    (tmp_path / "prompts.txt").write_text("a red circle\ntwo blue squares\n")
    options = (
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--num-steps",
        "3",
        "--precision",
        "fp32",
        "--seed",
        "4",
    )
    stale = ("00002.png", "00117.png", "123456.png")
    mine = ("2.png", "0000007.png", "00003.txt", "a00003.png", "00004.png")
    (tmp_path / "run" / mine[-1]).mkdir(parents=True)
    for name in (*stale, *mine[:-1]):
        (tmp_path / "run" / name).write_text("of somebody")
    assert call("generate", str(folder), *options, "--out", str(tmp_path / "run"))[0] == 0
    names = ("00000.png", "00001.png", "grid.png", "images.npy", "latents.npy")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {*names, *stale, *mine}
    code, _, error = call("generate", str(folder), *options, "--out", str(tmp_path / "run"))
    assert (code, "00000.png: exists; name another one, or replace it with --force" in error) == (
        2,
        True,
    )
    assert (
        call("generate", str(folder), *options, "--out", str(tmp_path / "run"), "--force")[0] == 0
    )
    model = (
        "generate",
        "embedded:tiny-sana",
        *options,
        "--latents",
        str(tmp_path / "run" / "latents.npy"),
        "--max-sequence-length",
        "24",
    )
    assert call(*model, "--out", str(tmp_path / "base"))[0] == 0
    assert call(*model, "--lora", str(exported), "--out", str(tmp_path / "lora"))[0] == 0
    ours, base, lora = (np.load(tmp_path / name / "images.npy") for name in ("run", "base", "lora"))
    assert ours.shape == base.shape == (2, 32, 32, 3)
    assert ours.dtype == np.float32
    assert Image.open(tmp_path / "run" / "00001.png").size == (32, 32)
    change = np.abs(ours - base).max(axis=(1, 2, 3))
    rounding = np.abs(ours - lora).max()
    print(f"run and base: {change.min():.1e}, run and its LoRA: {rounding:.1e}")
    assert rounding < 1e-5
    assert change.min() > 1e-3


@pytest.mark.slow
def test_export_writes_the_averaged_adapters_in_every_form(trained, exported, call, tmp_path):
    config = read_run(trained[0])
    backbone = load_backbone("embedded:tiny-sana", "bf16", make_mesh(-1, 1))
    ema, iteration = load_ema(trained[0], config, backbone)
    table = backbone.parameter_table()
    assert iteration == 2
    cases = {  # by what is asked for: alpha as the file says it, what B is multiplied by, dtype
        ("--format", "peft"): (64.0, 1, jnp.float32),
        ("--fold-alpha",): (32.0, 2, jnp.float32),
        ("--dtype", "bf16"): (64.0, 1, jnp.bfloat16),
    }
    files = {(): (64.0, 1, jnp.float32)} | cases
    for number, (options, (alpha, factor, dtype)) in enumerate(files.items()):
        out = (
            exported
            if not options
            else tmp_path / (f"{number}" if "peft" in options else f"{number}.safetensors")
        )
        if options:
            code, output, _ = call("export", str(trained[0]), "--out", str(out), *options)
            assert (code, output) == (
                0,
                f"the averaged policy after iteration 2, rank 32, alpha {alpha:g}: {out}\n",
            )
        adapters, settings = import_lora(out, table)
        assert settings == LoraSettings(32, alpha)
        assert adapters.keys() == ema.keys()
        for path, ab in ema.items():
            assert np.asarray(ab["b"]).any(), path
            for key, value in (("a", ab["a"]), ("b", factor * ab["b"])):
                np.testing.assert_array_equal(
                    adapters[path][key],
                    value.astype(dtype).astype(jnp.float32),
                    err_msg=f"{path} {key}",
                )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2.safetensors", "3.safetensors"]
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.exhaustive
def test_a_run_that_starts_from_an_exported_file(trained, exported, call, tmp_path):
    _, summary, _ = trained
    start = shutil.copy(exported, tmp_path / "start.safetensors")
    command = [
        "train",
        "tiny",
        *SMALL,
        "rollout.schedule=sd3",
        "train.iterations=1",
        "eval.num_grid_images=0",
    ]
    command += [f"run.dir={tmp_path / 'run'}", "--json"]
    # what does not fit leaves nothing that would make the directory another run's
    for change, message in (
        (
            f"lora.path={tmp_path / 'nowhere'}",
            f"lora.path='{tmp_path / 'nowhere'}': {tmp_path / 'nowhere'}: no such file",
        ),
        (f"lora.path={start} lora.rank=8", "is of rank 32, but lora.rank=8; they must be equal"),
        (
            f"lora.path={start} lora.target_modules=[transformer_blocks/attn1/to_q/kernel]",
            "transformer_blocks/attn2/to_v/kernel",
        ),
    ):
        code, out, error = call(*command, *change.split())
        assert (code, json.loads(out)["exit_code"], len(error.splitlines())) == (2, 2, 1)
        assert message in error
        assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]

    code, out, error = call(*command, f"lora.path={start}")
    assert code == 0, error
    began = json.loads(out.strip().splitlines()[-1])
    assert began["before"] == summary["after"]  # to the last bit
    assert began["before"] != summary["before"]
    assert began["after"] != began["before"]

    start.unlink()  # not read again
    code, out, error = call(*command, f"lora.path={start}")
    assert code == 0, error
    assert "resuming after iteration 1" in error
    assert json.loads(out.strip().splitlines()[-1]) == began
    code, _, error = call(*command)
    assert code == 2
    assert "holds another run (lora.path: '" in error
    assert "start.safetensors' there, None here)" in error


@pytest.mark.exhaustive
def test_eval_of_a_model_directory_with_a_lora(trained, exported, call):
    _, summary, _ = trained
    overrides = [
        o
        for o in SMALL
        if o.startswith(("eval", "rollout", "train", "optimizer", "mesh", "algorithm"))
    ]
    overrides += ["rollout.schedule=sd3", f"lora.path={exported}"]
    code, out, _ = call("eval", "embedded:tiny-sana", *overrides, "--json")
    assert code == 0
    means = {f"eval/{k}": v for k, v in json.loads(out.strip().splitlines()[-1])["means"].items()}
    assert means["eval/reward"] == pytest.approx(summary["after"]["eval/reward"], abs=1e-6)
    assert means["eval/reward"] != pytest.approx(summary["before"]["eval/reward"], abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "{run}", *GENERATE, "--lora", "{file}"),
            "--lora={file}: {run} is a run and has its own adapters",
        ),
        (
            ("generate", TINY, *GENERATE, "--lora", "{dir}/none"),
            "--lora: {dir}/none: no such file or directory",
        ),
        (
            ("generate", TINY, *GENERATE, "--guidance-scale", "inf"),
            "--guidance-scale=inf: expected a finite number",
        ),
        (
            ("generate", TINY, *GENERATE, "--guidance-scale", "nan"),
            "--guidance-scale=nan: expected a finite number",
        ),
        (
            ("generate", TINY, "--prompts", "embedded:shapes-test", "--out", "{file}"),
            "--out {file} is a file; name another one",
        ),
        (("rank", "tiny", "--out", "{file}/below"), "--out {file}/below cannot be written"),
        (
            ("export", "{dir}/none", "--out", "{dir}/x.safetensors"),
            "{dir}/none: not a run directory",
        ),
        (("export", "{empty}", "--out", "{dir}/x.safetensors"), "{empty}: has no checkpoint yet"),
        (
            ("export", "{run}", "--out", "{dir}/x"),
            "{dir}/x: a LoRA of diffusers is one file; give it a name that ends in",
        ),
        (
            ("export", "{run}", "--out", "{file}", "--format", "peft"),
            "{file}: is a file; PEFT's format is a directory",
        ),
        (
            ("export", "{run}", "--out", "{run}", "--format", "peft"),
            "which an export would remove; name another directory",
        ),
        (("export", "{run}", "--out", "{file}/x.safetensors"), "--out {file} is a file"),
        (
            ("export", "{run}", "--out", f"{BASE}/vae/x.safetensors"),
            "x.safetensors: belongs to the base model",
        ),
        (
            ("export", "{run}", "--out", "{dir}/x", "--format", "peft", "--fold-alpha"),
            "--fold-alpha: PEFT always reads alpha",
        ),
        (
            ("export", "{run}", "--out", "{dir}/x", "--dtype", "fp16"),
            "'fp16' is not one of 'fp32', 'bf16'",
        ),
        (("export", "{run}"), "--out=None: expected the file or directory to write"),
        (
            ("export", "{run}", "--out", "{dir}/x.safetensors", "--checkpoint", "7"),
            "checkpoint=7: {run}/checkpoints has 1, 2",
        ),
        (
            ("eval", "{run}", "lora.path={dir}/x"),
            "lora.path={dir}/x: {run} is a run and has its own adapters; leave it out",
        ),
        (
            ("rank", "{run}", "lora.alpha=1"),
            "lora.alpha=1.0: {run} is a run and has its own adapters; leave it out",
        ),
        (
            ("eval", "{run}", "--checkpoint", "newest"),
            "checkpoint=newest: must be best, latest or an iteration",
        ),
        (
            ("eval", "{empty}", "--checkpoint", "best"),
            "checkpoint=best: no checkpoint in {empty}/checkpoints holds an evalua",
        ),
        (
            ("generate", TINY, *GENERATE, "--checkpoint", "best"),
            f"checkpoint=best: {TINY} is no run directory",
        ),
        (
            ("train", "tiny", "run.dir={dir}/run", "--profile", "1,31"),
            "--profile=31: must be in 1..30 (train.iterations)",
        ),
        (
            ("train", "tiny", "run.dir={dir}/run", "--profile", "0"),
            "--profile=0: must be in 1..30 (train.iterations)",
        ),
        (
            ("train", "tiny", "run.dir={dir}/run", "--profile", "2:3"),
            "'2:3' is no iteration; expected e.g. 3 or 3,10",
        ),
        (
            ("train", "tiny", "run.dir={run}", "--profile", "3", "--profile", "2"),
            "--profile=2: done already, see {run}/checkpoin",
        ),
    ],
)
def test_a_lora_or_an_output_that_cannot_be_is_one_line_and_nothing_is_written(
    arguments, message, trained, exported, call, tmp_path
):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(trained[0] / "config.yaml", empty)
    names = {"run": trained[0], "file": exported, "dir": tmp_path, "empty": empty}
    before = {
        p: p.stat().st_mtime_ns for p in [*exported.parent.rglob("*"), *trained[0].rglob("*")]
    }
    code, out, error = call(*(a.format(**names) for a in arguments))
    assert (code, out) == (2, "")
    assert error.startswith("solrl: ")
    assert message.format(**names) in error
    assert len(error.strip().splitlines()) == 1
    assert {
        p: p.stat().st_mtime_ns for p in [*exported.parent.rglob("*"), *trained[0].rglob("*")]
    } == before
    assert {p.name for p in tmp_path.rglob("*")} <= {"empty", "config.yaml", "out"}


@pytest.mark.parametrize(
    ("text", "result"),
    [('[{"per_prompt": []}]', True), ('["per_prompt"]', False), ("[]", False), ("{", False)],
)
def test_only_a_result_of_rank_is_replaced_without_asking(text, result, tmp_path):
    (tmp_path / "rank.json").write_text(text)
    assert rank._is_rank_result(tmp_path / "rank.json") is result


def test_presets_shows_the_prompt_sets_of_one(call, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "a dog", "tag": "one"}\n'
        '{"prompt": "a cat"}\n'
        '{"prompt": "a dog", "tag": "one"}\n'
    )
    code, out, _ = call("presets", "--show", "tiny", f"prompts.train={prompts}")
    assert code == 0
    sizes = f"2 train prompts ({prompts}), 26 test prompts (embedded:shapes-test), 0 in both;"
    assert f"\ntiny: {sizes}" in out
    outputs = [
        json.loads(
            call("presets", "--show", "tiny", f"prompts.train={prompts}", f"seed={s}", "--json")[1]
        )
        for s in (0, 0, 7)
    ]
    assert outputs[0] == outputs[1]
    assert sorted(row["prompt"] for row in outputs[2]["first"]) == ["a cat", "a dog"]
    assert {row["prompt"]: row["metadata"] for row in outputs[0]["first"]} == {
        "a cat": {},
        "a dog": {"tag": "one"},
    }
    code, _, err = call("presets", "train.num_prompts=1")
    assert (code, err) == (
        2,
        "solrl: train.num_prompts=1: overrides need --show PRESET before them\n",
    )


@pytest.mark.slow
def test_presets_lists_them_all(call):
    code, out, _ = call("presets")
    assert code == 0
    count = len(released_models()) * 4 * 4 + 1  # families and rewards of each model, and tiny
    assert len(out.strip().splitlines()) == 1 + count
    assert len(json.loads(call("presets", "--json")[1])["presets"]) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "tinny"), "did you mean 'tiny'"),
        (("report", "{dir}"), "not a run directory"),
        (("report", "{dir}", "--out", "{dir}"), "is a directory; name a file"),
        (("train", "tiny", "rollout.canditates=4"), "did you mean 'rollout.candidates'"),
        (("train", "tiny", "rollout.kept=97"), "must be at most rollout.candidates"),
        (("train", "tiny", "rollout.kept=3"), "must be even"),
        (("train", "tiny", "train.iterations=x"), "expected an integer"),
        (("train", "tiny", "rollout.num_steps=0"), "must be at least 1"),
        (("train", "tiny", "explore=papers"), "unknown explore 'papers': did you mean 'paper'"),
        (
            ("train", "tiny", "prompts.train=nowhere.txt"),
            "prompts.train='nowhere.txt': no such file",
        ),
        (("train", "tiny", "reward.weights={beauty: 1}"), "unknown reward 'beauty'"),
        (
            ("train", "tiny", "lora.target_modules=[blocks/nothing]"),
            "lora.target_modules: 'blocks/nothing' matches no parameter",
        ),
        (
            ("train", "tiny", "model.path=embedded:big-sana"),
            "accepted: tiny-flux, tiny-sana, tiny-sd3, tiny-wan",
        ),
        (("train", "tiny", "model.height=30"), "size 30x32"),
        (
            ("train", "tiny", "rollout.size=[[32,32],[24,30]]"),
            "rollout.size: size 24x30: this model supports heights in multiples of 4 pixels and"
            " widths in multiples of 4",
        ),
        (
            ("eval", "embedded:tiny-sana", "eval.size=[30,32]"),
            "eval.size: size 30x32: this model supports heights in multiples of 4 pixels",
        ),
        (("train", "tiny", "mesh.data=64"), "mesh.data=64"),
        (
            ("train", "sana_sol_rl_pickscore", "eval.num_prompts=4"),
            "reward 'pickscore': yuvalkirstain/PickScore_v1",
        ),
        (("eval", "nowhere"), "'nowhere': no run directory and no preset"),
        (
            ("eval", "embedded:tiny-sana", "--paired"),
            "--paired: expected two runs or models, e.g. ",
        ),
        (
            ("eval", "embedded:tiny-sana", "embedded:tiny-flux", "--paired"),
            "embedded:tiny-flux: is a policy for embedded:tiny-flux, not for ",
        ),
        (("eval", "embedded:tiny-sana", "~nobody-at-all/a", "--paired"), "no home directory of"),
        (
            ("eval", "embedded:tiny-sana", "seed=1", "--paired"),
            "--paired: expected two runs or models, e.g. ",
        ),
        (
            ("eval", "tiny", "--gallery", "x.png"),
            "--gallery=x.png: shows two policies; it needs --paired",
        ),
        (
            ("eval", "tiny", "--rewards", "shapes,,"),
            "--rewards='shapes,,': expected names separated by commas",
        ),
        (("eval", "tiny", "--rewards", "beauty"), "reward 'beauty'"),
        (
            ("study", "everything"),
            "'everything': no file, and no plan of the package (exploration, frontier, learning,"
            " objectives, paper, proxy)",
        ),
        (("study", "paper", "--prices", "tpu"), "--prices=tpu: no file, and none of sana-h200, "),
        (("rank", "nowhere"), "'nowhere': no run directory and no preset"),
        (
            ("generate", "nowhere", "--prompts", "embedded:shapes-test", "--out", "o"),
            "model='nowhere': no such directory",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = call(*(argument.replace("{dir}", str(tmp_path)) for argument in arguments))
    assert code == 2
    assert out == ""
    assert message in error
    assert error.startswith("solrl: ")
    assert len(error.strip().splitlines()) == 1


def test_an_empty_prompt_file(call, tmp_path):
    (tmp_path / "empty.txt").write_text("\n  \n")
    code, _, error = call(
        "train", "tiny", f"prompts.train={tmp_path / 'empty.txt'}", f"run.dir={tmp_path / 'run'}"
    )
    assert code == 2
    assert "holds no prompt" in error


def test_a_prompt_the_reward_cannot_read(call, tmp_path):
    (tmp_path / "prose.txt").write_text("an astronaut on a horse\n" * 2 + "a dog\n")
    code, _, error = call(
        "train",
        "tiny",
        *SMALL,
        f"prompts.train={tmp_path / 'prose.txt'}",
        f"run.dir={tmp_path / 'run'}",
    )
    assert code == 2
    assert "an astronaut on a horse" in error


def test_a_run_directory_that_is_a_file(call, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, error = call("train", "tiny", f"run.dir={tmp_path / 'file'}")
    assert code == 2
    assert "is a file" in error


@pytest.mark.slow
def test_a_read_only_run_directory(tmp_path):
    """In a process that may not write there (permissions do not stop root; a kernel file system
    does).
    """
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    path = (
        "/proc/solrl" if os.geteuid() == 0 else str(folder)
    )  # root cannot write to the former either
    process = subprocess.run(
        [sys.executable, "-m", "solrl_jax", "train", "tiny", f"run.dir={path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    assert path in process.stderr
    assert len(process.stderr.strip().splitlines()) == 1
