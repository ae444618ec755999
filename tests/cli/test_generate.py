"""`solrl generate` and `solrl.generate` on model directories: diffusers' pictures, its own files
read back, and what it says of bad input.

Pictures are compared in float32 on the 0..1 scale, from the same initial noise; largest difference
at most 1e-3.
"""

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import SanaPipeline
from PIL import Image
from safetensors.numpy import load_file, save_file

import solrl_jax as solrl
from solrl_jax.cli import main
from solrl_jax.runs import generation
from tests import pipelines

TOLERANCE = 1e-3
# one word; as many as fit; more than fit, so that the end is cut off
PROMPTS = [
    "Star",
    " a large Red circle above the small blue square",
    "one happy cat left of " + "green triangle " * 5,
]
SCHEDULERS = {  # (as saved, with another shift)
    "dpm": (pipelines.dpm, lambda: pipelines.dpm(flow_shift=2.5)),
    "euler": (pipelines.euler, lambda: pipelines.euler(shift=1.7)),
}
CASES = [  # every pair of values of two columns is in some row
    pytest.param("dpm", 4, 1.0, (32, 32), marks=pytest.mark.exhaustive),
    pytest.param("euler", 4, 4.5, (32, 64), marks=pytest.mark.exhaustive),
    ("dpm", 10, 4.5, (64, 32)),
    pytest.param("euler", 10, 1.0, (32, 32), marks=pytest.mark.exhaustive),
    pytest.param("dpm", 28, 1.0, (32, 64), marks=pytest.mark.exhaustive),
    pytest.param("euler", 28, 4.5, (32, 32), marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model directory a scheduler, of the same weights; and diffusers' own form of them."""
    folder = tmp_path_factory.mktemp("models")
    reference = pipelines.save_pipeline(folder / "dpm")
    shutil.copytree(folder / "dpm", folder / "euler")
    pipelines.euler().save_pretrained(folder / "euler" / "scheduler")
    return folder, reference


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


def noise(size, count=3):
    """Initial noise as diffusers holds it."""
    shape = (count, pipelines.CHANNELS, *(n // pipelines.COMPRESSION for n in size))
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def generate(model, prompts, out, *options):
    """Runs the command in this process; returns images.npy, latents.npy and the JSON line."""
    arguments = [
        "generate",
        model,
        "--prompts",
        prompts,
        "--out",
        out,
        "--max-sequence-length",
        pipelines.MAX_TOKENS,
        "--json",
        "--force",
    ]
    result = CliRunner().invoke(
        main.cli, [str(a) for a in (*arguments, *options)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return (
        np.load(out / "images.npy"),
        np.load(out / "latents.npy"),
        json.loads(result.stdout.splitlines()[-1]),
    )


def diffusers_images(
    pipeline,
    scheduler,
    latents,
    steps,
    guidance,
    prompts=PROMPTS,
    timestep_scale=1.0,
    negative="",
    instruction=None,
):
    pipeline.scheduler = scheduler
    pipeline.transformer.register_to_config(timestep_scale=timestep_scale)
    height, width = (n * pipelines.COMPRESSION for n in latents.shape[2:])
    return pipeline(
        prompts,
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=torch.from_numpy(latents),
        use_resolution_binning=False,
        output_type="np",
        negative_prompt=negative,
        complex_human_instruction=instruction,
        max_sequence_length=pipelines.MAX_TOKENS,
    ).images


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "steps", "guidance", "size"), CASES)
def test_images_equal_those_of_diffusers(
    scheduler, steps, guidance, size, models, prompt_file, tmp_path
):
    folder, reference = models
    as_saved, shifted = SCHEDULERS[scheduler]
    latents = noise(size)
    want = diffusers_images(reference, as_saved(), latents, steps, guidance)
    np.save(tmp_path / "noise.npy", latents)
    pictures, _, summary = generate(
        folder / scheduler,
        prompt_file,
        tmp_path / "out",
        "--latents",
        tmp_path / "noise.npy",
        "--precision",
        "fp32",
        "--num-steps",
        steps,
        "--guidance-scale",
        guidance,
    )
    assert pictures.shape == (len(PROMPTS), *size, 3)
    difference = np.abs(pictures - want).max()
    print(f"{scheduler}, {steps} steps, guidance {guidance}, {size}: {difference:.1e}")
    assert difference <= TOLERANCE
    assert (summary["height"], summary["width"], summary["steps"]) == (*size, steps)

    # the case can fail: everything the picture is made from moves every picture by many tolerances
    others = {
        "prompt": dict(prompts=PROMPTS[1:] + PROMPTS[:1]),
        "guidance": dict(guidance=guidance + 0.5),
        "steps": dict(steps=steps + 1),
        "shift": dict(scheduler=shifted()),
        "timestep": dict(timestep_scale=0.99),
    }
    for name, other in others.items():
        arguments = (
            dict(scheduler=as_saved(), latents=latents, steps=steps, guidance=guidance) | other
        )
        change = np.abs(diffusers_images(reference, **arguments) - want).max(axis=(1, 2, 3))
        assert change.min() > 20 * TOLERANCE, name


# the text that SANA is released with, as diffusers has it: a list of lines
RELEASED = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


@pytest.mark.slow
def test_an_instruction_and_a_negative_prompt_are_those_of_diffusers(models, prompt_file, tmp_path):
    folder, reference = models
    latents = noise((32, 32))
    negative = "Two small blue dog "
    run = {}
    for name, lines in (("released", RELEASED), ("short", ["Photo of"]), ("none", None)):
        arguments = dict(
            scheduler=pipelines.euler(), latents=latents, steps=4, guidance=4.5, instruction=lines
        )
        run[name] = diffusers_images(reference, **arguments, negative=negative)
        run[name, "no negative"] = diffusers_images(reference, **arguments)
    np.save(tmp_path / "noise.npy", latents)
    for name, lines in (("released", RELEASED), ("short", ["Photo of"])):
        (tmp_path / "instruction.txt").write_text("\n".join(lines) + "\n")  # as editors end a file
        pictures, _, _ = generate(
            folder / "euler",
            prompt_file,
            tmp_path / "out",
            "--latents",
            tmp_path / "noise.npy",
            "--precision",
            "fp32",
            "--num-steps",
            4,
            "--guidance-scale",
            4.5,
            "--negative-prompt",
            negative,
            "--instruction",
            tmp_path / "instruction.txt",
        )
        difference = np.abs(pictures - run[name]).max()
        print(f"instruction {name}: {difference:.1e}")
        assert difference <= TOLERANCE
        for other in ("none", "short" if name == "released" else "released", (name, "no negative")):
            assert np.abs(run[other] - run[name]).max(axis=(1, 2, 3)).min() > 20 * TOLERANCE, (
                name,
                other,
            )


@pytest.mark.slow
def test_text_encoders_are_gone_before_the_first_step(models, prompt_file, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    def stop(backbone, sampler, prompted, rows, **options):
        assert prompted.conditions.cond["text"].shape[0] == len(rows) == len(PROMPTS)
        assert not backbone.text_encoders.loaded
        raise Enough

    monkeypatch.setattr(generation, "generate", stop)
    with pytest.raises(Enough):
        generate(models[0] / "euler", prompt_file, tmp_path / "out", "--precision", "fp32")


@pytest.fixture(scope="module")
def first(models, tmp_path_factory):
    """A first call, to compare others with: three prompts, of which two are the same."""
    folder = tmp_path_factory.mktemp("first")
    prompts = folder / "prompts.txt"
    prompts.write_text("red star\nblue square\nred star\n")

    def run(out, *options):
        return generate(
            models[0] / "euler", prompts, out, "--num-steps", 4, "--precision", "fp32", *options
        )

    return folder / "out", run, run(folder / "out", "--seed", 3)


def test_files_are_what_they_promise(first):
    out, _, (images, latents, summary) = first
    assert sorted(p.name for p in out.iterdir()) == [
        "00000.png",
        "00001.png",
        "00002.png",
        "grid.png",
        "images.npy",
        "latents.npy",
    ]
    assert images.dtype == latents.dtype == np.float32
    assert images.shape == (3, 32, 32, 3)  # the model's own size
    assert latents.shape == (3, pipelines.CHANNELS, 8, 8)
    assert images.min() >= 0
    assert images.max() <= 1
    assert abs(latents.mean()) < 0.1
    assert abs(latents.std() - 1) < 0.1
    for i, image in enumerate(images):
        np.testing.assert_array_equal(
            np.asarray(Image.open(out / f"{i:05d}.png")), np.round(255 * image)
        )
    assert summary == {"out": str(out), "images": 3, "height": 32, "width": 32, "steps": 4} | {
        "precision": "fp32 (no linear layer is quantized; native)"
    }


@pytest.mark.slow
def test_its_own_latents_given_back_give_the_same_images_whatever_the_seed(first, tmp_path):
    out, run, (images, latents, _) = first
    again, kept, _ = run(
        tmp_path / "out", "--seed", 99, "--latents", out / "latents.npy", "--size", "32X32"
    )
    np.testing.assert_array_equal(again, images)
    np.testing.assert_array_equal(kept, latents)


@pytest.mark.exhaustive
def test_the_function_and_the_old_names_of_the_command_give_the_same_images(
    first, models, tmp_path, capsys
):
    out, _, (images, latents, _) = first
    prompts = ["red star", "blue square", "red star"]
    options = dict(num_steps=4, precision="fp32", max_sequence_length=pipelines.MAX_TOKENS)
    repeated_images = solrl.generate(models[0] / "euler", prompts, seed=3, **options)
    assert isinstance(repeated_images, np.ndarray)
    np.testing.assert_array_equal(repeated_images, images)
    alone = solrl.generate(str(models[0] / "euler"), "red star", latents=latents[:1], **options)
    np.testing.assert_allclose(alone, images[:1], atol=1e-6)
    old = ["sample", models[0] / "euler", "--prompts", out.parent / "prompts.txt", "--seed", 3]
    old += ["--out", tmp_path, "--steps", 4, "--precision", "fp32", "--chunk", 16]
    result = CliRunner().invoke(main.cli, [*map(str, old), "--max-tokens", "10", "--guidance", "1"])
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0] == "solrl sample is now solrl generate"
    np.testing.assert_array_equal(np.load(tmp_path / "images.npy"), images)


@pytest.mark.exhaustive
def test_guidance_up_to_1_is_none_as_in_diffusers(models):
    folder, reference = models
    latents = noise((32, 32), count=1)
    want = diffusers_images(reference, pipelines.euler(), latents, 2, 0.5, prompts=["red star"])
    for scale in (0.0, 0.5, 1.0):
        pictures = solrl.generate(
            folder / "euler",
            "red star",
            num_steps=2,
            guidance_scale=scale,
            latents=latents,
            precision="fp32",
            max_sequence_length=pipelines.MAX_TOKENS,
        )
        assert np.abs(pictures - want).max() <= TOLERANCE, scale


@pytest.mark.slow
def test_the_seed_makes_the_images(first, tmp_path):
    _, run, (images, latents, _) = first
    same, _, _ = run(tmp_path / "same", "--seed", 3)
    other, other_latents, _ = run(tmp_path / "other", "--seed", 4)
    np.testing.assert_array_equal(same, images)
    assert (np.abs(other - images).max(axis=(1, 2, 3)) > 0.1).all()
    assert (np.abs(other_latents - latents).max(axis=(1, 2, 3)) > 1).all()


def test_a_prompt_that_comes_twice_gets_two_images(first):
    _, _, (images, latents, _) = first
    assert np.abs(images[0] - images[2]).max() > 0.1
    assert np.abs(latents[0] - latents[2]).max() > 1


@pytest.mark.slow
def test_an_image_does_not_depend_on_the_others_in_the_file(first, models, tmp_path):
    _, _, (images, _, _) = first
    (tmp_path / "prompts.txt").write_text("a cat\nred star\n")
    alone, _, _ = generate(
        models[0] / "euler",
        tmp_path / "prompts.txt",
        tmp_path / "out",
        "--num-steps",
        4,
        "--precision",
        "fp32",
        "--seed",
        3,
    )
    np.testing.assert_allclose(alone[1], images[0], atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "smallest", "largest", "correlation"),
    [
        pytest.param("bf16", 5e-4, 0.01, 0.995, marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", 5e-3, 0.04, 0.98, marks=pytest.mark.exhaustive),
    ],
)
def test_lower_precisions_differ_a_little(
    precision, smallest, largest, correlation, first, tmp_path
):
    out, run, (images, _, _) = first
    low, _, _ = run(tmp_path / "out", "--latents", out / "latents.npy", "--precision", precision)
    difference = np.abs(low - images).mean()
    correlated = np.corrcoef(low.ravel(), images.ravel())[0, 1]
    print(f"{precision}: mean difference {difference:.4f}, correlation {correlated:.4f}")
    assert smallest < difference < largest
    assert correlated > correlation


# --------------------------------------------------------------------------------------------------
# bad input


def set_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop_weight(path: Path, name: str) -> None:
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


WEIGHTS = Path("transformer/diffusion_pytorch_model.safetensors")
SCHEDULER = Path("scheduler/scheduler_config.json")
BROKEN_MODELS = {  # what is done to a copy of the directory, what the line has to say
    "no such directory": (shutil.rmtree, "no such directory"),
    "no index": (lambda m: (m / "model_index.json").unlink(), "has no model_index.json"),
    "index is no object": (lambda m: (m / "model_index.json").write_text("[]"), "model_index.json"),
    "index is no JSON": (
        lambda m: (m / "model_index.json").write_text("{"),
        "model_index.json: not JSON",
    ),
    "unknown pipeline": (
        lambda m: set_json(m / "model_index.json", _class_name="OtherPipeline"),
        "_class_name='OtherPipeline'",
    ),
    "no tokenizer": (lambda m: shutil.rmtree(m / "tokenizer"), "tokenizer"),
    "no vocabulary": (lambda m: (m / "tokenizer/tokenizer.json").unlink(), "tokenizer"),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), "transformer: expected one .safetensors file"),
    "truncated weights": (
        lambda m: truncate(m / WEIGHTS),
        f"{WEIGHTS.name}: not a readable safetensors file",
    ),
    "a weight is missing": (
        lambda m: drop_weight(m / WEIGHTS, "proj_out.bias"),
        "missing proj_out.bias (8,)",
    ),
    "components do not fit": (
        lambda m: set_json(m / "transformer/config.json", caption_channels=24),
        "caption_channels=24",
    ),
    "unknown network setting": (
        lambda m: set_json(m / "transformer/config.json", dropout=0.5),
        "dropout=0.5",
    ),
    "unknown scheduler": (
        lambda m: set_json(m / SCHEDULER, _class_name="DDPMScheduler"),
        "scheduler 'DDPMScheduler'",
    ),
    "unknown scheduler setting": (
        lambda m: set_json(m / SCHEDULER, algorithm_type="sde-dpmsolver++"),
        "'sde-dpmsolver++'",
    ),
    "another family's scheduler": (
        lambda m: set_json(m / SCHEDULER, use_flow_sigmas=False),
        "use_flow_sigmas=False",
    ),
}


def run_main(arguments, monkeypatch, capsys):
    """`solrl` in this process: (exit code, standard error)."""
    monkeypatch.setattr(sys, "argv", ["solrl", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main.main()
    return stop.value.code, capsys.readouterr().err


def assert_refused(code, stderr, out, *parts):
    assert code == 2, stderr
    assert stderr.startswith("solrl: ")
    assert len(stderr.splitlines()) == 1, stderr
    for part in parts:
        assert part in stderr
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_a_model_that_cannot_be_used_is_one_line(
    case, models, prompt_file, tmp_path, monkeypatch, capsys
):
    damage, message = BROKEN_MODELS[case]
    shutil.copytree(models[0] / "dpm", tmp_path / "model")
    damage(tmp_path / "model")
    arguments = [
        "generate",
        tmp_path / "model",
        "--prompts",
        prompt_file,
        "--out",
        tmp_path / "out",
        "--precision",
        "fp32",
    ]
    assert_refused(*run_main(arguments, monkeypatch, capsys), tmp_path / "out", message)


def saved(path: Path, array) -> Path:
    np.save(path, array)
    return path


def archive(path: Path) -> Path:
    np.savez(path, noise((32, 32)))
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


LATENTS = {
    "no file": (lambda d: d / "absent.npy", "absent.npy: not a readable .npy file"),
    "empty file": (lambda d: empty(d / "x.npy"), "x.npy: not a readable .npy file"),
    "an archive": (lambda d: archive(d / "x.npz"), "x.npz: not a readable .npy file"),
    "objects": (lambda d: saved(d / "x.npy", np.array([{}])), "x.npy: not a readable .npy file"),
    "rank": (
        lambda d: saved(d / "x.npy", noise((32, 32))[0]),
        "float32 [8, 8, 8]; expected float32 [N, C, h, w] with N = 3",
    ),
    "dtype": (
        lambda d: saved(d / "x.npy", noise((32, 32)).astype(np.float64)),
        "float64 [3, 8, 8, 8]; expected float32",
    ),
    "count": (lambda d: saved(d / "x.npy", noise((32, 32), count=2)), "[2, 8, 8, 8]; expected"),
    "channels": (
        lambda d: saved(d / "x.npy", noise((32, 32))[:, :6]),
        "6 channels; this model's have 8",
    ),
    "no pixels": (lambda d: saved(d / "x.npy", noise((32, 32))[:, :, :0]), "size 0x32"),
}


@pytest.mark.parametrize("case", LATENTS)
def test_latents_that_cannot_be_used_are_one_line(
    case, models, prompt_file, tmp_path, monkeypatch, capsys
):
    make, message = LATENTS[case]
    arguments = [
        "generate",
        models[0] / "dpm",
        "--prompts",
        prompt_file,
        "--out",
        tmp_path / "out",
        "--latents",
        make(tmp_path),
    ]
    assert_refused(*run_main(arguments, monkeypatch, capsys), tmp_path / "out", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "33x32"], "size 33x32: this model supports heights in multiples of 4 pixels"),
        (["--size", "32"], "--size='32': expected HEIGHTxWIDTH"),
        (["--size", "32x"], "--size='32x': expected HEIGHTxWIDTH"),
        (["--size", "0x32"], "--size='0x32': expected HEIGHTxWIDTH"),
        (["--size", "3²x32"], "expected HEIGHTxWIDTH"),
        (["--prompts", "{dir}/absent.txt"], "absent.txt': no such file"),
        (["--prompts", "{dir}/blank.txt"], "blank.txt': holds no prompt"),
        (["--prompts", "{dir}/image.txt"], "image.txt': cannot be read as UTF-8 text"),
        (["--prompts", "embedded:nothing"], "no such embedded prompt set"),
        (
            ["--latents", "{dir}/noise.npy", "--size", "32x64"],
            "--size=32x64: the given latents are those of 32x32",
        ),
        (
            ["--negative-prompt", "a cat"],
            "--negative-prompt='a cat': has no effect without guidance_scale above 1; it is 1.0",
        ),
        (
            ["--true-cfg-scale", "2"],
            "--true-cfg-scale=2.0: must be 1 for a SanaPipeline, whose guidance_scale is"
            " classifier-free",
        ),
        (
            ["--instruction", "{dir}/absent.txt"],
            "--instruction='{dir}/absent.txt': no such file; expected a text file",
        ),
        (
            ["--instruction", "{dir}/blank.txt"],
            "--instruction='{dir}/blank.txt': holds no instruction",
        ),
        (
            ["--instruction", "{dir}/image.txt"],
            "--instruction='{dir}/image.txt': cannot be read as UTF-8 text",
        ),
        (
            ["--vae-tile-size", "10"],
            "--vae-tile-size=10: must be a multiple of 4, the pixels per latent pixel",
        ),
    ],
)
def test_options_that_cannot_be_used_are_one_line(
    options, message, models, prompt_file, tmp_path, monkeypatch, capsys
):
    (tmp_path / "blank.txt").write_text("\n  \n")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\xff")
    np.save(tmp_path / "noise.npy", noise((32, 32)))
    options = [o.format(dir=tmp_path) for o in options]
    arguments = [
        "generate",
        models[0] / "dpm",
        "--prompts",
        prompt_file,
        "--out",
        tmp_path / "out",
        *options,
    ]
    assert_refused(
        *run_main(arguments, monkeypatch, capsys), tmp_path / "out", message.format(dir=tmp_path)
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--num-steps", "0"],
        ["--num-steps", "many"],
        ["--precision", "fp4"],
        ["--seed", "-1"],
        ["--color"],
    ],
)
def test_options_that_do_not_exist_are_refused(
    options, models, prompt_file, tmp_path, monkeypatch, capsys
):
    arguments = [
        "generate",
        models[0] / "dpm",
        "--prompts",
        prompt_file,
        "--out",
        tmp_path / "out",
        *options,
    ]
    assert_refused(*run_main(arguments, monkeypatch, capsys), tmp_path / "out", options[0])


def test_an_output_path_that_is_a_file_is_left_alone(
    models, prompt_file, tmp_path, monkeypatch, capsys
):
    (tmp_path / "out").write_text("mine")
    arguments = ["generate", models[0] / "dpm", "--prompts", prompt_file, "--out", tmp_path / "out"]
    code, stderr = run_main(arguments, monkeypatch, capsys)
    assert_refused(code, stderr, tmp_path / "nothing", "out is a file")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["prompts", pytest.param("weights", marks=pytest.mark.exhaustive)])
def test_the_program_itself_ends_with_code_2_and_no_traceback(case, models, prompt_file, tmp_path):
    shutil.copytree(models[0] / "dpm", tmp_path / "model")
    if case == "prompts":
        prompt_file = tmp_path / "absent.txt"
    else:
        (tmp_path / "model" / WEIGHTS).unlink()
    command = [
        sys.executable,
        "-m",
        "solrl_jax",
        "generate",
        tmp_path / "model",
        "--prompts",
        prompt_file,
    ]
    process = subprocess.run(
        [*map(str, command), "--out", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert_refused(process.returncode, process.stderr, tmp_path / "out")
    assert not process.stdout
