"""`import solrl_jax`: the public names, listed once, found lazily; what they refuse."""

import importlib.metadata
import subprocess
import sys
from inspect import unwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import solrl_jax as solrl
from solrl_jax import api
from solrl_jax.models.locate import open_model
from solrl_jax.runs import generation
from tests.small import SMALL
from tests.toys import TOY


def test_every_public_name_is_there():
    assert len(solrl.__all__) == len(set(solrl.__all__))
    for name in solrl.__all__:
        assert getattr(solrl, name) is not None
    assert set(dir(solrl)) == set(solrl.__all__)
    assert solrl.__version__ == importlib.metadata.version("solrl_jax")
    assert Path(solrl.__file__).with_name("py.typed").exists()


def test_type_checkers_see_the_same_names():
    source = Path(solrl.__file__).read_text()
    typed = {
        line.split(" as ")[1]
        for line in source.splitlines()
        if line.startswith("    from solrl_jax.")
    }
    assert typed | {"__version__"} == set(solrl.__all__)


def test_a_name_that_is_not_there_says_what_is():
    with pytest.raises(AttributeError, match=r"has no attribute 'lod'; it has .*load"):
        solrl.lod  # noqa: B018


def test_importing_it_is_quick():
    code = "import sys, solrl_jax; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def experiment():
    return solrl.load("tiny")


BAD = {  # unwrapped where the types are wrong, which these tests check before
    "a format that does not exist": (
        lambda _: solrl.quantize(np.zeros((32, 2), np.float32), "fp5"),
        "precision='fp5': accepted are fp8, int8, nvfp4",
    ),
    "a list of formats": (
        lambda _: unwrap(solrl.quantize)(np.zeros((32, 2), np.float32), ["fp8"]),
        "precision=.*accepted are fp8",
    ),
    "a vector": (
        lambda _: unwrap(solrl.quantize)(np.zeros(3)),
        r"w: is float32 \[3\]; accepted: real matrices",
    ),
    "an empty matrix": (
        lambda _: solrl.quantize(np.zeros((0, 4))),
        r"w: is float32 \[0, 4\]; accepted: real matrices",
    ),
    "another form": (
        lambda e: unwrap(solrl.export_lora)(e, {}, "x.safetensors", "xyz"),
        "form='xyz': accepted: diffusers, peft",
    ),
    "a LoRA in a store": (
        lambda e: unwrap(solrl.export_lora)(e, {}, "gs://b/x.safetensors"),
        "path=gs://b/x.safetensors: expected a path on this machine, not in a store",
    ),
    "a LoRA in the base model": (
        lambda e: unwrap(solrl.export_lora)(
            e, {}, e.backbone.pipeline.folder / "transformer" / "x.safetensors"
        ),
        "x.safetensors: belongs to the base model",
    ),
    "a transformer in a store": (
        lambda e: unwrap(solrl.export_transformer)(e, {}, Path("s3://b/x")),
        "folder=s3:/b/x: expected a path on this machine, not in a store",
    ),
    "a LoRA of a user who does not exist": (
        lambda e: unwrap(solrl.export_lora)(e, {}, "~no_such_user/x.safetensors"),
        "path=~no_such_user/x.safetensors: no home directory of ~no_such_user is known",
    ),
    "a run exported to a store": (
        lambda _: unwrap(solrl.export)("run", "gs://b/x.safetensors"),
        "out=gs://b/x.safetensors: expected a path on this machine, not in a store",
    ),
    "a number of prompts that is no integer": (
        lambda e: unwrap(solrl.rank)(e, None, prompts=2.0),
        "prompts=2.0: must be from 1 to ",
    ),
    "another form of a run": (
        lambda _: unwrap(solrl.export)("run", "x.safetensors", form="xyz"),
        "form='xyz': accepted: diffusers, peft",
    ),
    "another dtype": (
        lambda _: unwrap(solrl.export)("run", "x.safetensors", dtype="fp16"),
        "dtype='fp16': accepted: fp32, bf16",
    ),
    "no prompt": (lambda e: solrl.rank(e, {}, prompts=0), "prompts=0: must be from 1 to 26"),
    "more prompts than there are": (
        lambda e: solrl.rank(e, {}, prompts=27),
        "prompts=27: must be from 1 to 26",
    ),
    "a text for formats": (lambda e: solrl.rank(e, {}, formats="int4"), "formats=int4: expected"),
}
WRONG = {  # of functions on arrays
    "words for a matrix": (
        lambda: unwrap(solrl.quantize)("abc"),
        "w: 'abc'; accepted: real matrices",
    ),
    "an input that is too narrow": (
        lambda: unwrap(solrl.matmul)(
            jnp.ones((2, 60)), solrl.quantize(np.ones((64, 2), np.float32))
        ),
        "x has 60 columns, but the weight has 64 rows",
    ),
    "whole numbers to multiply": (
        lambda: unwrap(solrl.matmul)(
            np.ones((2, 64), int), solrl.quantize(np.ones((64, 2), np.float32))
        ),
        "x has dtype int64; matmul takes floating-point",
    ),
    "none to select": (
        lambda: solrl.select(np.ones((2, 4), np.float32), 0, "best"),
        "kept=0: .* from 1 to 4",
    ),
    "half of an odd number": (
        lambda: solrl.select(np.ones((2, 4), np.float32), 3, "best_worst"),
        "kept=3: .* even",
    ),
    "a clip below 0": (
        lambda: solrl.advantages(
            np.ones((2, 4), np.float32), clip=-1.0, global_std=True, mode="all"
        ),
        "clip=-1.0: .* clip must be above 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arrays_are_named(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("iteration", [0, 2**31])
def test_an_iteration_that_cannot_be_is_named_before_the_state_is_donated(iteration, experiment):
    with pytest.raises(
        solrl.InputError, match=f"iteration={iteration}: must be from 1 to 2147483647"
    ):
        unwrap(solrl.iterate)(experiment, None, iteration)


ARGUMENTS = {
    "lora": ("x.safetensors", "lora: x.safetensors: no such file"),
    "latents": (np.zeros(3), r"latents: float64 \[3\]; expected float32 \[N, C, h, w\] with N = 1"),
    "precision": ("int4", "precision='int4': expected 'auto', "),
    "batch_size": (0, "batch_size=0: must be at least 1"),
    "seed": (2**40, "seed=1099511627776: must be below 2147483648"),
    "guidance_scale": (float("nan"), "guidance_scale=nan: expected a finite number"),
    "num_steps": (3.5, "num_steps=3.5: expected an integer"),
    "max_sequence_length": (0, "max_sequence_length=0: must be at least 1"),
    "size": (512, r"size=512: expected \[HEIGHT, WIDTH\] in pixels"),
    "vae_tile_size": ([4], r"vae_tile_size=\[4\]: expected an integer"),
    "checkpoint": ("best", "checkpoint=best: embedded:tiny-sana is no run directory"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name, experiment):
    call, message = BAD[name]
    with pytest.raises(solrl.InputError, match=message):
        call(experiment)


def test_latents_that_numpy_cannot_read_are_named(monkeypatch):
    class OnAnotherDevice:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("can't convert device type tensor to numpy")

    monkeypatch.setattr(generation, "load_backbone", None)
    message = r"^latents: can't convert .*; expected float32 \[N, C, h, w\] with N = 1"
    with pytest.raises(solrl.InputError, match=message):
        unwrap(solrl.generate)("embedded:tiny-sana", ["a red circle"], latents=OnAnotherDevice())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_of_generate_are_named(name, monkeypatch):
    monkeypatch.setattr(generation, "load_backbone", None)  # nothing is loaded
    value, message = ARGUMENTS[name]
    with pytest.raises(solrl.InputError, match=f"^{message}"):
        unwrap(solrl.generate)("embedded:tiny-sana", ["a red circle"], **{name: value})


@pytest.mark.parametrize("prompts", [[], None, [3], "a\0b"])
def test_prompts_that_are_none_are_named(prompts):
    with pytest.raises(solrl.InputError, match=r"^prompts"):
        unwrap(solrl.generate_with_latents)("embedded:tiny-sana", prompts)


def test_the_home_directory_and_numpys_integers_are_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    request = generation.Request.check(
        {
            "model": "embedded:tiny-sana",
            "prompts": ["a red circle"],
            "lora": "~/x.safetensors",
            "size": (np.int64(32), np.int64(64)),
        }
    )
    assert (request.lora, request.size) == (tmp_path / "x.safetensors", (32, 64))


def test_an_argument_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="stepz"):
        solrl.generate("embedded:tiny-sana", ["a red circle"], stepz=3)
    with pytest.raises(solrl.InputError, match="unknown argument 'num_stepz': did you mean 'num_s"):
        solrl.generate_with_latents("embedded:tiny-sana", ["a red circle"], num_stepz=3)


@pytest.mark.parametrize("arguments", [(3,), (None,), ("tiny", 3), ("tiny", {"seed": 1})])
def test_presets_and_overrides_are_text(arguments):
    preset, *overrides = arguments
    with pytest.raises(solrl.ConfigError, match="expected text, a preset's name and overrides"):
        unwrap(solrl.resolve)(preset, overrides)


def test_generate_takes_from_a_run_what_is_not_given():
    config = solrl.resolve(
        "tiny", ("eval.num_steps=3", "rollout.guidance_scale=2.5", "rollout.schedule=sd3")
    )
    pipeline = open_model("embedded:tiny-sana")

    def schedule(config, **arguments):
        arguments = {"model": "run", "prompts": ["a red circle"], **arguments}
        return generation.build_schedule(
            generation.Request.check(arguments), config, pipeline, (32, 32)
        )

    def settings(schedule):
        return schedule.steps, float(schedule.guidance_scale), schedule.guided

    assert settings(schedule(config)) == (3, 2.5, True)
    assert settings(schedule(config, num_steps=np.int64(7))) == (7, 2.5, True)
    assert settings(schedule(None)) == (10, 1.0, False)
    for scale in (0.0, 0.5, 1.0):  # one definition for runs and model directories
        for run_config in (config, None):
            assert not schedule(run_config, guidance_scale=scale).guided


def test_an_interrupted_training_raises(monkeypatch):
    summary = {"interrupted": True, "saved": True, "run": "r", "iterations": 3}
    monkeypatch.setattr(api.trainer, "run", lambda *arguments, **options: summary)
    with pytest.raises(KeyboardInterrupt, match="r: saved after iteration 3") as stop:
        solrl.train("tiny")
    assert stop.value.summary == summary


@pytest.mark.usefixtures("toy_model")
def test_an_interrupted_training_does_not_claim_what_was_not_saved(tmp_path, monkeypatch):
    """Ctrl-C in the evaluation before the first iteration."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(api.trainer, "evaluate", interrupt)
    settings = (*SMALL, *TOY, "reward=tests.outside:in_jax", f"run.dir={tmp_path}")
    with pytest.raises(
        solrl.TrainingInterrupted, match="stopped after iteration 0, and nothing new was saved"
    ) as stop:
        solrl.train("tiny", *settings)
    assert not stop.value.summary["saved"]
    assert not list(tmp_path.glob("checkpoints/*"))
