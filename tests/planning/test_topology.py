"""Compiling for devices that are not here: `planning.topology`, `planning.targets`."""

import ctypes.util
import functools
import importlib.util
import os
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from solrl_jax.errors import InputError
from solrl_jax.planning import topology
from solrl_jax.planning.hlo import parse
from solrl_jax.planning.kernels import count_library_kernels, kernels
from solrl_jax.planning.roofline import roofline
from solrl_jax.planning.targets import TARGETS, description
from tests.planning.programs import PROGRAMS, compiled, text

HERE = {
    platform: any(map(importlib.util.find_spec, wheels))
    for platform, wheels in topology.WHEELS.items()
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """What `prepare` sets is forgotten; no program is kept, for JAX had started before."""
    for name, value in topology.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(("device", "extra"), [("b200", "plan-cuda"), ("tpu-v6e", "plan-tpu")])
def test_a_compiler_that_is_not_installed_is_named(monkeypatch, device, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=rf"^device={device}: .*pip install 'solrl_jax\[{extra}\]'$"
    ):
        topology.prepare(TARGETS[device])


def test_any_cuda_plug_in_will_do_and_jax_stays_on_the_cpu(monkeypatch, tmp_path):
    plugin_alone(monkeypatch, tmp_path)
    (tmp_path / "ptxas").touch(0o755)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    topology.prepare(TARGETS["h100"])
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_without_cudas_assembler_the_compiler_is_not_installed(monkeypatch, tmp_path):
    """XLA would end in an error of its own, or in a crash (JAX 0.11)."""
    plugin_alone(monkeypatch, tmp_path)
    with pytest.raises(
        InputError,
        match=r"^device=h100: its compiler is not installed: pip install 'solrl_jax\[plan-cuda\]'$",
    ):
        topology.prepare(TARGETS["h100"])
    wheel = tmp_path / "nvidia" / "cu13" / "bin"
    wheel.mkdir(parents=True)
    (wheel / "ptxas").touch()
    topology.prepare(TARGETS["h100"])


def test_without_cudnn_attention_could_not_be_traced(monkeypatch, tmp_path):
    plugin_alone(monkeypatch, tmp_path)
    (tmp_path / "ptxas").touch(0o755)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nvidia.cudnn" else find(name)
    )
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(InputError, match="its compiler is not installed"):
        topology.prepare(TARGETS["h100"])
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.9")
    topology.prepare(TARGETS["h100"])


def plugin_alone(monkeypatch, folder):
    """Installs JAX's plug-in and cuDNN, and empty folders for CUDA's other wheels and its
    toolkit.
    """
    nvidia = SimpleNamespace(submodule_search_locations=[str(folder / "nvidia")])
    specs = {
        "jax_cuda12_plugin": SimpleNamespace(),
        "nvidia": nvidia,
        "nvidia.cudnn": SimpleNamespace(),
    }
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(topology, "TOOLKIT", folder)
    monkeypatch.setenv("PATH", "")


@pytest.mark.parametrize(
    ("device", "count", "hosts", "message"),
    [
        ("h200", 0, 1, "devices=0, hosts=1: expected at least 1 of each"),
        ("b200", 8, -1, "devices=8, hosts=-1: expected at least 1 of each"),
        ("h200", 9, 1, "devices=9: a host has at most 8 h200; name more hosts"),
        ("gb200", 8, 1, "devices=8: a host has at most 4 gb200; name more hosts"),
        ("tpu-v6e", 3, 1, "devices=3: a host has 1 or 4 or 8 tpu-v6e; name more hosts"),
        ("tpu7x", 4, 1, "devices=4: a host has 2 or 8 tpu7x; name more hosts"),
        (
            "tpu-v6e",
            8,
            64,
            "hosts=64: expected a power of two, at most 256 chips in all, "
            "and at least 4 chips per host",
        ),
        (
            "tpu-v5p",
            4,
            3,
            "hosts=3: expected a power of two, at most 8192 chips in all, "
            "and at least 4 chips per host",
        ),
        (
            "tpu-v5e",
            1,
            2,
            "hosts=2: expected a power of two, at most 256 chips in all, "
            "and at least 4 chips per host",
        ),
    ],
)
def test_devices_that_no_topology_has_are_refused(device, count, hosts, message):
    with pytest.raises(InputError) as refused:
        topology.devices(TARGETS[device], count, hosts)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("device", "count", "hosts", "name"),
    [
        ("tpu-v6e", 1, 1, "v6e:1x1"),
        ("tpu-v6e", 8, 1, "v6e:2x4"),
        ("tpu-v6e", 4, 16, "v6e:8x8"),
        ("tpu-v5e", 8, 32, "v5e:16x16"),
        ("tpu-v5p", 4, 1, "v5p:2x2x1"),
        ("tpu-v5p", 4, 4, "v5p:2x2x4"),
        ("tpu-v5p", 4, 16, "v5p:4x4x4"),
        ("tpu7x", 8, 2, "tpu7x:2x2x2"),
    ],
)
def test_slices_of_tpus_are_as_square_as_they_can_be(device, count, hosts, name):
    assert topology.tpu_topology(TARGETS[device], count, hosts)[0] == name


def test_attention_is_traced_for_the_targets_cudnn():
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), "bfloat16")

    def primitives() -> str:
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return str(jax.make_jaxpr(attend)(q, q, q))

    if HERE["gpu"]:
        assert "dot_product_attention_fwd" in primitives()
    else:
        with pytest.raises(RuntimeError, match="cuDNN"):
            primitives()


def test_targets_are_consistent():
    for name, target in TARGETS.items():
        peaks = target.peaks
        assert target.name == name
        assert (
            min(peaks.int8, peaks.fp8)
            >= peaks.bf16
            > peaks.tf32
            > peaks.fp32
            > peaks.memory
            > peaks.link
            >= peaks.network
        )
        assert 10e9 < target.memory < 200e9
        assert (
            (target.platform == "gpu")
            == (target.chip is not None)
            == (target.capability > (0, 0))
            == (not target.axes)
        )
        if target.chip is not None:
            text = description(target)
            assert text.count("{") == text.count("}") == 3
            assert ("ACCELERATED" in text) == (target.capability >= (9, 0))


@pytest.mark.parametrize(
    ("device", "count", "hosts"),
    [("h200", 8, 1), ("b200", 4, 2), ("tpu-v6e", 4, 2), ("tpu7x", 8, 1)],
)
def test_devices_come_host_by_host_and_say_what_they_are(device, count, hosts):
    target = TARGETS[device]
    if not HERE[target.platform]:
        pytest.skip(f"no compiler for {device}: {topology.EXTRAS[target.platform]}")
    devices = topology.devices(target, count, hosts)
    assert [one.process_index for one in devices] == [i // count for i in range(count * hosts)]
    assert {(one.platform, one.device_kind) for one in devices} == {(target.platform, target.kind)}
    mesh = jax.make_mesh((count * hosts,), ("x",), devices=devices)
    with jax.set_mesh(mesh):
        assert jax.sharding.get_abstract_mesh().abstract_device.platform == target.platform


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compilers_still_make_what_the_texts_say(name):
    """Of a program compiled now: the same native kernels, operations and messages, and memory
    traffic within a tenth.
    """
    program = PROGRAMS[name]
    target = TARGETS[program.device]
    if not HERE[target.platform]:
        pytest.skip(f"no compiler for {program.device}: {topology.EXTRAS[target.platform]}")
    now, then = (
        roofline(t, target, program.devices).summary()
        for t in (compiled(program).as_text(), text(name))
    )
    for figure in ("native", "operations"):
        assert now[figure] == then[figure]

    def counted(summary):
        return {row["kind"]: row["sent"] for row in summary["collectives"]}

    assert counted(now) == counted(then)
    assert now["memory_traffic"] == pytest.approx(then["memory_traffic"], rel=0.1)


@pytest.mark.skipif(not HERE["gpu"], reason="no compiler for GPUs: plan-cuda")
@pytest.mark.parametrize(
    "device", [name for name, target in TARGETS.items() if target.platform == "gpu"]
)
def test_formats_are_native_where_there_are_units(device):
    """Block-scaled products on Blackwell, FP8 from Ada on."""
    target = TARGETS[device]
    capability = TARGETS[device].capability

    def library_kernels(name):
        return count_library_kernels(
            kernels(parse(compiled(PROGRAMS[name]._replace(device=device)).as_text()))
        )

    assert ("__cudnn$blockScaledDot f4e2m1fn" in library_kernels("nvfp4-b200")) == (
        capability >= (10, 0)
    )
    assert ("__cublas$lt$matmul$f8 f8e4m3fn" in library_kernels("fp8-h200")) == (
        capability >= (8, 9)
    )
    assert target.platform == "gpu"
