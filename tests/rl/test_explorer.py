"""The format that exploration runs in: taken by name or from the device, kept with the run, and
close to BF16 by its figure.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from solrl_jax.config.presets import override
from solrl_jax.config.serialization import to_yaml
from solrl_jax.errors import InputError
from solrl_jax.quant.formats import FORMATS, DeviceInfo
from solrl_jax.quant.fp8 import FP8Tensor
from solrl_jax.quant.low_rank import LowRank
from solrl_jax.quant.matmul import dequantize
from solrl_jax.quant.nvfp4 import NVFP4Tensor
from solrl_jax.rl import experiment as experiments
from solrl_jax.rl.experiment import fresh_state
from solrl_jax.rl.generate import SeedBatch, generate
from solrl_jax.rl.sampler import Segment
from solrl_jax.rl.trainable.trainable import flatten
from solrl_jax.runs import identity, record
from solrl_jax.runs.progress import TerminalProgress
from tests.small import small_config

LEAVES = {"nvfp4": NVFP4Tensor, "fp8": FP8Tensor}
ERRORS = {"nvfp4": 0.09, "fp8": 0.025}  # of velocities, relative
H200 = DeviceInfo("gpu", "NVIDIA H200", (9, 0))
B200 = DeviceInfo("gpu", "NVIDIA B200", (10, 0))


@pytest.fixture(scope="module")
def experiment():
    return experiments.build(small_config("unused", "rollout.explore.precision=auto"))


@pytest.fixture
def quickly():
    """Without LLVM's optimizations, which are half of the time of compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def explored(experiment, device=None, *overrides):
    """The same experiment, backbone and all, exploring otherwise or on another device."""
    config = override(experiment.config, overrides)
    device = device or experiment.device
    return dataclasses.replace(experiment, config=config, device=device)


@pytest.mark.parametrize(("device", "name"), [(H200, "fp8"), (B200, "nvfp4"), (None, "bf16")])
def test_auto_is_what_the_devices_run_natively(experiment, device, name):
    explorer = explored(experiment, device).explorer
    assert explorer.explore.precision == "auto"
    assert explorer.format is FORMATS[name]
    assert explorer.settings[0].precision == name
    assert (
        explored(experiment, device, "rollout.explore.precision=fp8").explorer.format
        is FORMATS["fp8"]
    )


def test_levels_go_from_what_is_configured_to_the_policy_that_regenerates(experiment):
    """Two steps of three; then three, in finer formats.

    The last level is the regeneration itself.
    """
    variant = explored(experiment, B200)
    adapters = fresh_state(experiment).old
    levels = variant.explorer.settings
    assert [(level.precision, level.steps) for level in levels] == [
        ("nvfp4", 2),
        ("nvfp4", 3),
        ("fp8", 3),
        ("bf16", 3),
    ]
    (last,), (exact,) = (
        variant.explorer.sampler(adapters, levels[-1]).segments,
        variant.sampler("regenerate", adapters, 3).segments,
    )
    assert jax.tree.structure(last) == jax.tree.structure(exact)
    assert all(map(np.array_equal, jax.tree.leaves(last), jax.tree.leaves(exact)))


@pytest.mark.exhaustive
def test_a_policy_in_each_format_predicts_what_the_exact_one_does_nearly(experiment, quickly):
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(experiment).old)
    backbone = experiment.backbone
    shape = (4, *experiment.backbone.pipeline.latent_shape(32, 32))
    conditioning = backbone.encode(
        experiment.test_prompts[:4], experiment.config.model.max_sequence_length
    )
    latents = jax.random.normal(jax.random.key(0), shape)
    policies = {name: experiment.explorer.policy(adapters, name) for name in (*LEAVES, "bf16")}
    quantized = set(experiment.explorer.quantized)

    @jax.jit
    def predict(policies):
        inputs = (conditioning, jnp.float32(500), jnp.float32(1))
        return {
            name: backbone.velocity(params, latents, *inputs) for name, params in policies.items()
        }

    with jax.set_mesh(backbone.mesh):
        velocities = jax.tree.map(
            lambda x: np.asarray(x, np.float64), jax.device_get(predict(policies))
        )
    exact = velocities["bf16"]
    for name, leaf in LEAVES.items():
        flat = flatten(policies[name])
        assert {path for path in flat if isinstance(flat[path], leaf)} == quantized
        assert {path for path in flat if isinstance(flat[path], LowRank)} == set(
            experiment.trained_paths.adapted
        ) - quantized
        error = np.linalg.norm(velocities[name] - exact) / np.linalg.norm(exact)
        print(f"{name}: {error:.4f}")
        assert ERRORS[name] / 3 < error < ERRORS[name], name


@pytest.mark.slow
def test_exploration_merges_adapters_and_keeps_the_rest_exact(experiment):
    """Leaves in the format are the quantized merged weights; every other adapted linear keeps base
    and adapter apart.
    """
    adapters = jax.tree.map(lambda x: x + 0.05, fresh_state(experiment).adapters)
    params = flatten(experiment.explorer.policy(adapters, "nvfp4"))
    base = flatten(experiment.backbone.transformer)
    for path in experiment.explorer.quantized:
        assert isinstance(params[path], NVFP4Tensor)
        merged = base[path].astype(jnp.float32)
        if path in adapters:
            merged = merged + experiment.scale * adapters[path]["a"] @ adapters[path]["b"]
        error = np.linalg.norm(dequantize(params[path]) - merged) / np.linalg.norm(merged)
        assert error < 0.12
    for path in set(experiment.trained_paths.adapted) - set(experiment.explorer.quantized):
        assert isinstance(params[path], LowRank)


@pytest.mark.exhaustive
def test_the_first_steps_are_exact_where_the_others_are_quantized(experiment):
    """The more of them, the nearer are latents to the exact policy's; what both policies have is
    held once.
    """
    steps = (
        "rollout.num_steps=4",
        "rollout.explore.num_steps=4",
        "rollout.per_device_batch_size=16",
        "rollout.explore.precision=nvfp4",
    )
    variant = explored(experiment, None, *steps)
    adapters = jax.tree.map(lambda x: x + 0.01, fresh_state(variant).old)
    explorers = {}
    for count in (0, 1, 2):
        explorers[count] = explored(variant, None, f"rollout.explore.exact_steps={count}").explorer
    first, rest = (
        flatten(segment.policy)
        for segment in explorers[1].sampler(adapters, explorers[1].settings[0]).segments
    )
    assert {path for path in first if first[path] is not rest[path]} >= set(
        variant.explorer.quantized
    )
    apart = set(variant.explorer.quantized) | set(variant.trained_paths.adapted)
    assert all(first[path] is rest[path] for path in first.keys() - apart)

    prompts = variant.test_prompts[:2]
    prompted = variant.encode_prompts(prompts)
    # one picture's error says little: over 16 the ratios are 0.4 to 0.9
    rows = SeedBatch.from_seeds(variant.seeds("candidate", prompts, 8))
    plain = explorers[0].sampler(adapters, explorers[0].settings[0])

    def end(*segments):
        return generate(
            variant.backbone, dataclasses.replace(plain, segments=segments), prompted, rows
        ).latents

    exact = end(Segment(variant.policy(adapters), variant.schedule(4)))
    quantized = end(*plain.segments)
    mixed = {
        n: end(*explorers[n].sampler(adapters, explorers[n].settings[0]).segments) for n in (1, 2)
    }
    error = [np.linalg.norm(x - exact) for x in (quantized, mixed[1], mixed[2])]
    print(error)
    assert 0 < error[2] < 0.8 * error[1]
    assert error[1] < 0.95 * error[0]


def directory(folder, precision, explored_in=None):
    """A run directory that holds what a run on a device where `precision` was `explored_in` leaves
    there.
    """
    folder.mkdir()
    (folder / "config.yaml").write_text(
        to_yaml(small_config(folder, f"rollout.explore.precision={precision}"))
    )
    if explored_in:
        (folder / "run.json").write_text(json.dumps({"exploration": {"format": explored_in}}))
    return folder


def refusal(folder, precision):
    """The line that refuses to go on with the run in `folder`; '' if nothing does."""
    try:
        identity.refuse_another_run(
            folder, small_config(folder, f"rollout.explore.precision={precision}")
        )
    except InputError as error:
        return str(error)
    return ""


def test_a_run_goes_on_in_the_format_that_it_began_in_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "first_device_info", lambda: H200)
    folder = directory(tmp_path / "run", "auto", "nvfp4")  # it began on Blackwell
    message = refusal(folder, "auto")
    assert message == (
        f"run.dir={str(folder)!r} explored in nvfp4, and rollout.explore.precision=auto is fp8 "
        "here; set rollout.explore.precision=nvfp4 to go on, or name another directory"
    )
    assert "rollout.explore.precision=fp8 is fp8 here" in refusal(folder, "fp8")
    assert not refusal(folder, "nvfp4")  # as it says
    monkeypatch.setattr(identity, "first_device_info", lambda: B200)
    assert not refusal(folder, "auto")
    assert not refusal(directory(tmp_path / "named", "nvfp4", "nvfp4"), "auto")
    assert not refusal(
        directory(tmp_path / "early", "auto"), "auto"
    )  # it stopped before it had a record
    assert "explored in fp8, and rollout.explore.precision=auto is nvfp4 here" in refusal(
        directory(tmp_path / "fp8", "fp8", "fp8"), "auto"
    )


def test_a_fingerprint_holds_the_format_and_not_the_word_for_it():
    auto, named = (
        small_config("unused", f"rollout.explore.precision={p}") for p in ("auto", "fp8")
    )
    assert (
        identity.fingerprint(auto, "fp8")
        == identity.fingerprint(named, "fp8")
        != identity.fingerprint(auto, "nvfp4")
    )


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_the_record_says_what_runs_and_how(experiment, precision, tmp_path, monkeypatch):
    variant = explored(
        experiment, H200, f"rollout.explore.precision={precision}", "rollout.explore.exact_steps=1"
    )
    lines = []
    monkeypatch.setattr(TerminalProgress, "line", lambda self, text: lines.append(text))
    record.write_and_print(variant, tmp_path, 0, TerminalProgress())
    facts = json.loads((tmp_path / "run.json").read_text())
    name = {"auto": "fp8"}.get(precision, precision)
    means = FORMATS[name].describe(H200)
    assert facts["exploration"] == {
        "precision": precision,
        "format": name,
        "native": name == "fp8",
        "options": ["ExactSteps"],
        "means": means,
    }
    assert any(line.endswith(f"exploration in {means}, with ExactSteps") for line in lines)
    assert facts["quantized"] == list(variant.explorer.quantized)
    assert facts["linears"]["quantized"] == 16
    assert facts["linears"]["quantized_bytes_after"] == sum(
        leaf.nbytes
        for leaf in flatten(variant.explorer.policy(fresh_state(variant).old, name)).values()
        if isinstance(leaf, LEAVES[name])
    )
    lines.clear()
    record.write_and_print(explored(experiment, H200), tmp_path, 0, TerminalProgress())
    assert json.loads((tmp_path / "run.json").read_text())["exploration"]["options"] == []
    assert any(line.endswith(FORMATS["fp8"].describe(H200)) for line in lines)


@pytest.mark.slow
def test_rules_that_leave_nothing_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(
        experiments, "load_backbone", lambda *_, **__: pytest.fail("weights are loaded")
    )
    with pytest.raises(
        InputError, match=r"^model\.quantization: leaves no linear layer to quantize \(.*\)$"
    ):
        experiments.build(small_config("unused", "model.quantization.min_width_ratio=100"))
    with pytest.raises(
        InputError,
        match=r"^model\.quantization\.modules_to_not_convert: 'nothing' is in the name of no "
        r"linear layer; there are ",
    ):
        experiments.build(
            small_config("unused", "model.quantization.modules_to_not_convert=[nothing]")
        )
