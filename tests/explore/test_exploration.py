"""The format that exploration runs in: taken by name or from the device, kept with the run, and close to BF16 by its figure."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from solrl_jax.config.presets import to_yaml
from solrl_jax.numerics.formats import FORMATS, Device
from solrl_jax.numerics.fp8 import FP8Tensor
from solrl_jax.numerics.matmul import LowRank
from solrl_jax.numerics.mx import MXTensor
from solrl_jax.numerics.nvfp4 import QTensor
from solrl_jax.policy.lora import flatten
from solrl_jax.rollout.generate import Relay, generate, prepare
from solrl_jax.run import identity
from solrl_jax.run import loop as trainer
from solrl_jax.storage.errors import InputError
from solrl_jax.training import experiment as experiments
from tests.small import fresh_state, small_config

LEAVES = {"nvfp4": QTensor, "mxfp4": MXTensor, "mxfp8": MXTensor, "fp8": FP8Tensor}
ERRORS = {
    "nvfp4": 0.09,
    "mxfp4": 0.14,
    "mxfp8": 0.03,
    "fp8": 0.025,
}  # of velocities, relative
H200, B200 = Device("gpu", "NVIDIA H200", (9, 0)), Device("gpu", "NVIDIA B200", (10, 0))


@pytest.fixture(scope="module")
def experiment():
    return experiments.build(small_config("unused", "rollout.explore.precision=auto"))


@pytest.fixture
def quickly():
    """Without LLVM's optimisations, which are half of the time of compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(("device", "name"), [(H200, "fp8"), (B200, "nvfp4"), (None, "bf16")])
def test_auto_is_what_the_devices_run_natively(experiment, device, name):
    there = experiment if device is None else dataclasses.replace(experiment, device=device)
    assert there.config.rollout.explore.precision == "auto"
    assert there.format is FORMATS[name]


@pytest.mark.exhaustive
def test_a_policy_in_each_format_predicts_what_the_exact_one_does_nearly(experiment, quickly):
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(experiment).old)
    backbone, shape = experiment.backbone, (4, *experiment.backbone.pipeline.latent_shape(32, 32))
    conditioning = backbone.encode(experiment.test_prompts[:4], experiment.config.model.max_tokens)
    latents = jax.random.normal(jax.random.key(0), shape)
    policies = {name: experiment.exploring_policy(adapters, name) for name in (*LEAVES, "bf16")}

    @jax.jit
    def predict(policies):
        return {name: backbone.velocity(params, latents, conditioning, 500.0, 1.0) for name, params in policies.items()}

    with jax.set_mesh(backbone.mesh):
        velocities = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(predict(policies)))
    exact = velocities["bf16"]
    for name, leaf in LEAVES.items():
        flat = flatten(policies[name])
        assert {path for path in flat if isinstance(flat[path], leaf)} == set(experiment.quantized)
        assert {path for path in flat if isinstance(flat[path], LowRank)} == set(experiment.targets) - set(experiment.quantized)
        error = np.linalg.norm(velocities[name] - exact) / np.linalg.norm(exact)
        print(f"{name}: {error:.4f}")
        assert ERRORS[name] / 3 < error < ERRORS[name], name


def test_the_first_steps_are_exact_where_the_others_are_quantised():
    """The more of them, the nearer are latents to the exact policy's; what both policies have is held once."""
    there = experiments.build(small_config("unused", "rollout.steps=4", "rollout.explore.steps=4"))
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(there).old)
    relay = there.explorer(adapters, "nvfp4")
    assert isinstance(relay, Relay)
    assert relay.steps == there.config.rollout.explore.exact_steps == 1
    first, rest = flatten(relay.first), flatten(relay.rest)
    assert {path for path in first if first[path] is not rest[path]} >= set(there.quantized)
    assert all(first[path] is rest[path] for path in first.keys() - set(there.quantized) - set(there.targets))
    assert not isinstance(there.explorer(adapters, "bf16"), Relay)

    prompts, size = there.test_prompts[:2], there.size
    prompted = prepare(there.backbone, None, prompts, there.config.model.max_tokens)
    seeds = there.seeds(0, 8, prompts, 8).reshape(16, -1)  # one picture's error says little: over 16 the ratios are 0.4 to 0.9
    owners = np.repeat(np.arange(2), 8)
    end = lambda params: generate(there.backbone, params, there.grid(4), prompted, owners, seeds, size, 16, None).latents
    exact, quantised = end(relay.first), end(relay.rest)
    mixed = {n: end(dataclasses.replace(relay, steps=n)) for n in (1, 2)}
    error = [np.linalg.norm(x - exact) for x in (quantised, mixed[1], mixed[2])]
    print(error)
    assert 0 < error[2] < 0.8 * error[1]
    assert error[1] < 0.95 * error[0]
    np.testing.assert_array_equal(end(Relay(relay.first, relay.first, 2)), exact)
    np.testing.assert_array_equal(end(Relay(relay.rest, relay.rest, 2)), quantised)


def directory(folder, precision, explored_in=None):
    """A run directory that holds what a run on a device where `precision` was `explored_in` leaves there."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(small_config(folder, f"rollout.explore.precision={precision}")))
    if explored_in:
        (folder / "run.json").write_text(json.dumps({"exploration": {"format": explored_in}}))
    return folder


def refusal(folder, precision):
    """The line that refuses to go on with the run in `folder`; '' if nothing does."""
    try:
        identity.refuse_another_run(folder, small_config(folder, f"rollout.explore.precision={precision}"))
    except InputError as error:
        return str(error)
    return ""


def test_a_run_goes_on_in_the_format_that_it_began_in_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "device_facts", lambda: H200)
    folder = directory(tmp_path / "run", "auto", "nvfp4")  # it began on Blackwell
    said = refusal(folder, "auto")
    assert said == (
        f"run.dir={str(folder)!r} explored in nvfp4, and rollout.explore.precision=auto is fp8 here; "
        "set rollout.explore.precision=nvfp4 to go on, or name another directory"
    )
    assert "rollout.explore.precision=mxfp4 is mxfp4 here" in refusal(folder, "mxfp4")
    assert not refusal(folder, "nvfp4")  # as it says
    monkeypatch.setattr(identity, "device_facts", lambda: B200)
    assert not refusal(folder, "auto")
    assert not refusal(directory(tmp_path / "named", "nvfp4", "nvfp4"), "auto")
    assert not refusal(directory(tmp_path / "early", "auto"), "auto")  # it stopped before it had a record
    assert "explored in fp8, and rollout.explore.precision=auto is nvfp4 here" in refusal(
        directory(tmp_path / "fp8", "fp8", "fp8"), "auto"
    )


def test_a_fingerprint_holds_the_format_and_not_the_word_for_it():
    auto, named = (small_config("unused", f"rollout.explore.precision={p}") for p in ("auto", "fp8"))
    assert identity.fingerprint(auto, "fp8") == identity.fingerprint(named, "fp8") != identity.fingerprint(auto, "nvfp4")


@pytest.mark.parametrize("precision", ["auto", "mxfp8"])
def test_the_record_says_what_runs_and_how(experiment, precision, tmp_path):
    explore = dataclasses.replace(experiment.config.rollout.explore, precision=precision)
    config = dataclasses.replace(experiment.config, rollout=dataclasses.replace(experiment.config.rollout, explore=explore))
    there = dataclasses.replace(experiment, config=config, device=H200)
    said = []
    trainer._describe(there, tmp_path, 0, type("Silent", (), {"line": lambda self, text: said.append(text)})())
    facts = json.loads((tmp_path / "run.json").read_text())
    name = {"auto": "fp8"}.get(precision, precision)
    assert facts["exploration"] == {
        "precision": precision, "format": name, "native": name == "fp8", "exact_steps": 1, "vae": None,
        "means": FORMATS[name].describe(H200),
    }  # fmt: skip
    assert any(f"{FORMATS[name].describe(H200)}, the first 1 of 2 steps in bf16" in line for line in said)
    assert facts["quantized"] == list(experiment.quantized)
    assert facts["linears"]["quantized"] == 16
    assert facts["linears"]["quantized_bytes_after"] == sum(
        leaf.nbytes for leaf in flatten(there.exploring_policy(fresh_state(experiment).old, name)).values()
        if isinstance(leaf, LEAVES[name])
    )  # fmt: skip


def test_rules_that_leave_nothing_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(experiments, "load_backbone", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(InputError, match=r"^model\.quantize: leaves no linear to quantise \(.*\)$"):
        experiments.build(small_config("unused", "model.quantize.min_dim=100"))
    with pytest.raises(InputError, match=r"^model\.quantize\.skip: 'nothing' is in no linear's name; there are "):
        experiments.build(small_config("unused", "model.quantize.skip=[nothing]"))
