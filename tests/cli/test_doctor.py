"""`solrl doctor`: what this machine supports, and what a preset still requires."""

import dataclasses
import json
import shutil

import jax
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from solrl_jax.cli import doctor, main
from solrl_jax.config.presets import resolve
from solrl_jax.errors import InputError
from solrl_jax.models.locate import EMBEDDED_FOLDER
from solrl_jax.planning import device_checks
from solrl_jax.quant.formats import DeviceInfo
from solrl_jax.quant.matmul import matmul
from solrl_jax.rl import memory_check
from solrl_jax.storage import hub

HPS = "HPS_v2.1_compressed"
PROMPTS = (
    "prompts.train=embedded:shapes-train",
    "prompts.test=embedded:shapes-test",
    "eval.num_prompts=8",
)


@pytest.fixture
def diagnosed(monkeypatch, tmp_path):
    """Calls the command in an empty folder, with an empty cache of the hub: (exit code, its
    JSON).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "no driver")

    def call(*arguments):
        result = CliRunner().invoke(main.cli, ["doctor", *arguments, "--json"])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result.exit_code, json.loads(result.stdout)

    return call


def test_it_says_what_the_machine_has(diagnosed):
    code, report = diagnosed()
    assert (code, report["missing"]) == (0, [])
    assert report["versions"]["jax"] == jax.__version__
    assert report["devices"]["count"] == jax.device_count()
    assert report["devices"]["memory"] == memory_check.device_memory()
    assert report["formats"] == {
        "fp32": True,
        "bf16": True,
        "fp8": False,
        "int8": False,
        "nvfp4": False,
    }
    assert (report["auto"], report["cudnn"]) == ("bf16", None)
    assert (report["checks"], report["warnings"]) == ({}, [])
    assert "\nchecks     nothing to try on cpu; only GPUs have" in doctor.table(report)


def test_the_embedded_preset_lacks_nothing(diagnosed):
    code, report = diagnosed("tiny")
    assert (code, report["missing"], report["downloads"]) == (0, [], [])
    assert report["proposal"]["settings"] == []
    assert report["proposal"]["reason"].startswith("no plan on record of tiny-sana at 32 x 32 for ")
    pipeline = doctor.open_configurations("embedded:tiny-sana")
    assert report["weights"]["transformer"] == 2 * pipeline.transformer.num_parameters


def test_all_that_a_released_preset_lacks_is_told_at_once(diagnosed):
    code, report = diagnosed(
        "flux1_sol_rl_hpsv2",
        "model.instruction=absent.txt",
        "prompts.train=train.txt",
        "prompts.test=test.txt",
    )
    assert code == 1
    assert report["downloads"] == [
        "black-forest-labs/FLUX.1-dev",
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    ]
    expected = ("prompts.train=", "prompts.test=", "model.instruction=", "reward 'hpsv2'")
    assert [
        line.startswith(begin) for line, begin in zip(report["missing"], expected, strict=True)
    ] == [True] * 4
    assert report["weights"]["transformer"] == 2 * 11_901_408_320  # FLUX.1-dev's parameters in BF16
    assert report["weights"]["vae"] == 4 * 49_545_475  # of its decoder, which decodes in float32


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_a_download_is_missing(diagnosed, monkeypatch, variable):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv(variable, "1")
    code, report = diagnosed("flux1_sol_rl_clipscore", *PROMPTS, "train.num_prompts=4")
    assert code == 1
    names = ("black-forest-labs/FLUX.1-dev", "openai/clip-vit-large-patch14")
    assert report["missing"] == [
        f"{name}: is not in the Hub's cache, and {variable} is set" for name in names
    ]


@pytest.mark.parametrize(
    ("hub_offline", "transformers_offline", "variable"),
    [
        ("1", "", "HF_HUB_OFFLINE"),
        ("yes", "0", "HF_HUB_OFFLINE"),
        ("0", "1", None),
        ("", "1", "TRANSFORMERS_OFFLINE"),
        ("", "no", None),
        ("", "", None),
    ],
)
def test_offline_is_what_the_hubs_client_takes_for_it(
    monkeypatch, hub_offline, transformers_offline, variable
):
    monkeypatch.setenv("HF_HUB_OFFLINE", hub_offline)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", transformers_offline)
    assert hub.offline_variable() == variable


def test_weights_that_are_not_whole_are_missing(diagnosed, tmp_path):
    shutil.copytree(EMBEDDED_FOLDER / "tiny-sana", tmp_path / "model")
    assert diagnosed("tiny", f"model.path={tmp_path / 'model'}")[0] == 0
    (tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    code, report = diagnosed("tiny", f"model.path={tmp_path / 'model'}")
    assert code == 1
    (line,) = report["missing"]
    assert "vae" in line
    assert ".safetensors" in line


@pytest.mark.slow
def test_few_prompts_are_said_and_an_unknown_reward_is_missing(diagnosed, tmp_path):
    (tmp_path / "few.txt").write_text("a red circle\na blue square\n")
    code, report = diagnosed("tiny", "prompts.train=few.txt")
    assert (code, report["missing"]) == (0, [])
    assert report["adapted"] == [
        "train.num_prompts=6: prompts.train='few.txt' has 2 distinct prompts, so each iteration "
        "takes 2"
    ]
    code, report = diagnosed(
        "tiny", "prompts.train=few.txt", "train.num_prompts=8", "optimizer.steps_per_iteration=576"
    )
    assert code == 1
    assert "optimizer.steps_per_iteration" in report["missing"][0]
    _, report = diagnosed("tiny", "reward=nowhere:score")
    assert "reward 'nowhere:score': cannot be imported" in report["missing"][0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=nowhere:loss"], "algorithm.objective='nowhere:loss': cannot be imported"),
        (["objective=opsd"], "'shapes' is not declared differentiable"),
        (
            ["reward=ocr", "prompts.train=embedded:shapes-train"],
            "prompts.train: reward 'ocr': prompt",
        ),
        (
            ["model=tiny-flux", "objective=flow_grpo", "rollout.true_cfg_scale=2"],
            "rollout.true_cfg_scale=2.0: must be 1 with algorithm.objective=flow_grpo",
        ),
    ],
)
def test_what_training_would_refuse_is_missing(diagnosed, overrides, message):
    code, report = diagnosed("tiny", *overrides)
    assert code == 1
    (line,) = report["missing"]
    assert message in line


def test_a_model_that_no_device_holds_is_told_of_with_its_size(monkeypatch):
    monkeypatch.setattr(doctor, "device_memory", lambda: 16_000_000_000)
    with pytest.raises(
        InputError,
        match=r"mesh\.fsdp=1: a device would hold 23.8 GB of the transformer and has 16 GB",
    ):
        doctor.check_sizes(
            resolve("flux1_sol_rl_hpsv2", ("mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1"))
        )
    assert doctor.check_sizes(resolve("flux1_sol_rl_hpsv2", ("mesh.fsdp=8",)))["transformer"] > 16e9


@pytest.mark.parametrize(
    ("platform", "driver", "dnn", "missing"),
    [
        ("cpu", True, None, "JAX does not see the NVIDIA GPU"),
        ("gpu", True, None, "cuDNN is not found; expected 9.12.0"),
        ("gpu", True, "9.8.1", "cuDNN 9.8.1; expected 9.12.0 or newer"),
        ("gpu", True, "9.12.0", None),
        ("gpu", True, "10.0.0", None),
    ],
)
def test_what_keeps_jax_from_a_gpu_is_missing(
    monkeypatch, tmp_path, platform, driver, dnn, missing
):
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(
        doctor, "first_device_info", lambda: DeviceInfo(platform, "NVIDIA B200", (10, 0))
    )
    monkeypatch.setattr(doctor, "cudnn", lambda: dnn)
    monkeypatch.setattr(doctor.device_checks, "checks_for", lambda device: ())
    report = doctor.machine()
    assert (
        [line.startswith(missing) for line in report["missing"]] == [True]
        if missing
        else report["missing"] == []
    )
    assert report["auto"] == ("nvfp4" if platform == "gpu" else "bf16")
    assert "NVIDIA B200" in doctor.table(report)
    assert ("emulated   nothing" in doctor.table(report)) == (platform == "gpu")


@pytest.mark.slow
def test_a_wrong_kernel_and_a_known_fault_of_cudnn_are_told_in_a_line_each(diagnosed, monkeypatch):
    """A Hopper GPU whose FP8 matmul returns zeros, and whose cuDNN is old."""
    checks = device_checks.FP8_MATMUL, device_checks.FP8_ATTENTION
    zeros = dataclasses.replace(checks[0], kernel=lambda x, w: 0 * matmul(x, w))
    monkeypatch.setattr(
        doctor, "first_device_info", lambda: DeviceInfo("gpu", "NVIDIA H100", (9, 0))
    )
    monkeypatch.setattr(doctor, "cudnn", lambda: "9.12.0")
    monkeypatch.setattr(device_checks, "checks_for", lambda device: (zeros, checks[1]))
    code, report = diagnosed()
    assert (code, report["missing"]) == (1, [])
    assert report["checks"] == {"FP8 matmul": "returns zeros", "FP8 attention": None}
    lines = doctor.table(report).splitlines()
    assert "checks     FP8 attention: the same as plain JAX" in lines
    assert "wrong      FP8 matmul: returns zeros" in lines
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert "cuDNN 9.12.0: before 9.18" in warning


def test_sizes_are_those_of_the_attention_that_is_trained():
    plain = doctor.check_sizes(resolve("tiny", ()))["transformer"]
    mhla = doctor.check_sizes(
        resolve("tiny", ("model.attention=mhla", "train.parameters=.*lepe.*"))
    )
    assert mhla["transformer"] > plain
