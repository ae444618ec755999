"""Publishing a run: the folder with its model card, and the upload."""

import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys

import diffusers
import pytest
import yaml

import solrl_jax as solrl
from solrl_jax.config.presets import resolve
from solrl_jax.errors import InputError
from solrl_jax.models.flux.pipeline import FluxPipeline
from solrl_jax.models.locate import open_model
from solrl_jax.models.registry import PIPELINES
from solrl_jax.models.wan.pipeline import WanPipeline
from solrl_jax.rl.trainable.lora_files import import_lora
from solrl_jax.runs import model_card
from solrl_jax.runs.directory import read_run
from solrl_jax.storage.hub import CARRIED
from tests.hub_server import serve

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    """A finished run that records a score of `tiny-clip` beside the reward."""
    folder = tmp_path_factory.mktemp("published") / "run"
    shutil.copytree(tiny_run[0], folder)
    config = folder / "config.yaml"
    watched = config.read_text().replace("eval_only: []", "eval_only: [tiny-clip]")
    assert "tiny-clip" in watched
    config.write_text(watched)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["eval/tiny-clip"] = 0.2 + row["iteration"] / 10
        row["eval/tiny-clip/standard_error"] = 0.01
        row["eval/tiny-clip/raw"] = 0.3
        row["eval/tiny-clip/raw/standard_error"] = 0.02
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def metadata(card):
    """The metadata at the top of a card."""
    return yaml.safe_load(card.split("---")[1])


@pytest.mark.slow
def test_the_folder_holds_weights_images_and_a_card_with_everything(run, tmp_path):
    out = tmp_path / "hub"
    summary = solrl.export(run, out, hub="me/lora", dry_run=True)
    assert summary == {"iteration": 2, "rank": 32, "alpha": 64.0, "folder": str(out)}
    files = sorted(str(f.relative_to(out)) for f in out.rglob("*") if f.is_file())
    assert files == ["README.md", "images/before-after.png", LORA]
    card = (out / "README.md").read_text()
    assert metadata(card) == {
        "license": "apache-2.0",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["text-to-image", "solrl_jax", "reinforcement-learning", "lora"],
    }
    assert "![held-out prompts before and after training](images/before-after.png)" in card
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, _, last = (row for row in rows if "eval/reward" in row)
    watched = {name: f"{name} (not trained on)" for name in ("tiny-clip", "tiny-clip/raw")}
    for name, label in {"reward": "reward", **watched}.items():
        cells = [
            f"{row[f'eval/{name}']:.4f} ± {row[f'eval/{name}/standard_error']:.4f}"
            for row in (first, last)
        ]
        assert f"| {label} | {' | '.join(cells)} |" in card
    assert "| score | before training | after iteration 2 |" in card
    config = read_run(run)
    part = dataclasses.replace(config.reward, weights={"tiny-clip/raw": 1.0})
    trained = model_card._scores(run, dataclasses.replace(config, reward=part), 2)
    assert "tiny-clip/raw (not trained on)" not in trained
    assert "tiny-clip (not trained on)" in trained
    assert 'pipeline.load_lora_weights("me/lora")' in card
    (command,) = (line for line in card.splitlines() if line.startswith("solrl train tiny "))
    assert " rollout.schedule=sd3 " in command
    assert str(run) not in card
    with pytest.raises(InputError, match=r"^out=.*hub: exists; .*force=True"):
        solrl.export(run, out, hub="me/lora", dry_run=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"^out=.*: holds notes.txt, which would be removed"):
        solrl.export(run, out, hub="me/lora", dry_run=True, force=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "out=None: expected the file or directory to write, or hub=OWNER/NAME"),
        ({"dry_run": True, "out": "x.safetensors"}, "dry_run=True: is for an upload; it needs hub"),
        ({"hub": "lora"}, "hub='lora': expected the name of a repository, OWNER/NAME"),
        ({"hub": "me/lora", "form": "peft"}, "form='peft': a run is published as diffusers"),
        ({"hub": "me/lora"}, "hub='me/lora': HF_HUB_OFFLINE is set, so nothing can be uploaded"),
    ],
)
def test_what_cannot_be_published_is_one_line_before_anything_is_written(run, options, message):
    with pytest.raises(InputError) as error:
        solrl.export(run, **options)
    assert str(error.value).startswith(message)
    assert not (run / "hub").exists()


def upload(run, environment, token, *options):
    process = subprocess.run(
        [sys.executable, "-m", "solrl_jax", "export", str(run), "--hub", "owner/lora", *options],
        env=os.environ | environment | {"HF_TOKEN": token, "HF_HOME": str(run / "home")},
        capture_output=True,
        text=True,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.slow
def test_a_run_is_uploaded_and_a_refusal_is_one_line(run, tmp_path):
    repositories: dict[str, dict[str, bytes]] = {}
    with serve(repositories) as (_, environment):
        code, _, err = upload(run, environment, "hf_wrong", "--out", str(tmp_path / "refused"))
        assert code == 2
        assert err.startswith("solrl: --hub='owner/lora': the Hub refuses (")
        assert "hf auth login" in err
        assert not (tmp_path / "refused").exists()
        code, out, err = upload(run, environment, "hf_right", "--out", str(tmp_path / "sent"))
        assert code == 0, err
        assert out.rstrip().endswith("/owner/lora")
    uploaded = repositories["models/owner/lora"]
    assert sorted(uploaded) == ["README.md", "images/before-after.png", LORA]
    for name, content in uploaded.items():
        assert (tmp_path / "sent" / name).read_bytes() == content
    path = tmp_path / "sent" / LORA
    experiment = solrl.load("tiny", "rollout.precision=fp32")
    _, settings = import_lora(path, experiment.backbone.parameter_table())
    assert (settings.rank, settings.alpha) == (32, 64)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("black-forest-labs/FLUX.1-dev", "flux-1-dev-non-commercial-license"),
        ("Tongyi-MAI/Z-Image", None),
        ("embedded:tiny-flux", None),
    ],
)
def test_the_license_of_the_base_is_that_of_its_card(base, name):
    assert model_card.find_license(base).license_name == name


def test_every_model_of_the_presets_has_a_license():
    for model in solrl.preset_names():
        assert model_card.find_license(resolve(model).model.path) is not None


def test_a_directory_says_its_license_by_its_card_or_nothing_is_said(tmp_path):
    assert model_card.find_license(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert model_card.find_license(str(tmp_path)) == model_card.License("mit")


def test_the_command_has_what_differs_and_no_places():
    overrides = ("family=naive_quant", "seed=2", "rollout.size=[[32,32],[24,32]]")
    config = resolve("tiny", (*overrides, "run.dir=/secret/run", "mesh.data=1"))
    command = model_card.training_command(config)
    assert command is not None
    assert command.startswith("solrl train tiny family=naive_quant seed=2 ")
    assert "secret" not in command
    arguments = command.split()[3:]
    assert resolve("tiny", [a.strip("'") for a in arguments[:2]]).family == "naive_quant"


def test_absolute_paths_do_not_leave_the_machine(tmp_path):
    config = resolve("tiny", (f"prompts.train={tmp_path}/prompts.txt", "prompts.test=set.txt"))
    command = model_card.training_command(config)
    assert "prompts.train=prompts.txt prompts.test=set.txt" in command
    assert tmp_path.name not in command


@pytest.mark.parametrize(("scale", "guidance"), [(1.0, False), (4.0, True)])
def test_the_example_guides_as_the_run_does(scale, guidance):
    """By classifier-free guidance too, for models that embed the scale of their own guidance."""
    config = resolve("flux1_sol_rl_hpsv2", (f"rollout.true_cfg_scale={scale}",))
    example = model_card._usage(config, "someone/lora", FluxPipeline, whole=False)
    assert "    guidance_scale=1,\n" in example
    assert ('    true_cfg_scale=4,\n    negative_prompt="",\n' in example) is guidance
    compile(example.split("```")[1].removeprefix("python"), "example", "exec")


def test_every_pipeline_in_diffusers_is_told_the_number_of_tokens():
    for name in PIPELINES:
        accepted = inspect.signature(getattr(diffusers, name).__call__).parameters
        assert "max_sequence_length" in accepted, name


@pytest.mark.parametrize(
    ("model", "scale", "arguments"),
    [
        ("zimage", 1, ["guidance_scale=0,"]),  # it guides by 1 plus its scale
        ("zimage", 5, ["guidance_scale=4,"]),
        ("qwen-image", 1, []),  # it has no embedded guidance to set
        ("qwen-image", 4, ["true_cfg_scale=4,", 'negative_prompt="",']),
        ("sana", 1, ["guidance_scale=1,", "complex_human_instruction=None,"]),
    ],
)
def test_the_example_has_the_arguments_of_its_pipeline_in_diffusers(model, scale, arguments):
    config = resolve(f"{model}_sol_rl_pickscore", (f"rollout.guidance_scale={scale}",))
    released = CARRIED / config.model.path / "model_index.json"
    kind = PIPELINES[json.loads(released.read_text())["_class_name"]]
    example = model_card._usage(config, "someone/lora", kind, whole=False)
    lines = [line.strip() for line in example.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("height="))
    tokens = f"max_sequence_length={config.model.max_sequence_length},"
    assert lines[start + 1 : lines.index(").images[0]")] == [*arguments, tokens]
    accepted = inspect.signature(getattr(diffusers, kind.kind).__call__).parameters
    assert all(argument.split("=")[0] in accepted for argument in (*arguments, tokens))


@pytest.mark.parametrize("adapters", [True, False])
def test_the_example_of_a_whole_transformer_loads_its_adapters_too(adapters, run, tmp_path):
    (tmp_path / "transformer").mkdir()
    if adapters:
        (tmp_path / "transformer" / LORA).touch()
    export = {"iteration": 2, "rank": 4, "alpha": 4.0, "trained_in_full": 1}
    kind = open_model("embedded:tiny-sana")
    model_card.add_card(tmp_path, run, read_run(run), "me/policy", export, type(kind))
    card = (tmp_path / "README.md").read_text()
    assert 'AutoModel.from_pretrained(\n    "me/policy", subfolder="transformer"' in card
    # Without the name of the file, diffusers would put the folder before its path in the repository.
    loads = f'load_lora_weights(\n    "me/policy", subfolder="transformer", weight_name="{LORA}"\n)'
    assert (loads in card) is adapters
    compile(card.split("```")[1].removeprefix("python"), "example", "exec")


def test_the_example_of_a_model_of_clips_makes_a_clip():
    config = resolve("wan-2.1-1.3b_sol_rl_pickscore")
    example = model_card._usage(config, "someone/lora", WanPipeline, whole=False)
    assert "clip = pipeline(" in example
    assert "height=480, width=832, num_inference_steps=20," in example
    assert "    num_frames=41,\n).frames[0]" in example
