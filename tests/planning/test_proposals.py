"""Settings that recorded plans propose for a machine: `mesh=auto`."""

import json
from pathlib import Path

import plan_records
import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.planning.proposals import (
    RECORDS,
    Machine,
    expand_mesh_auto,
    load_records,
    propose,
)
from solrl_jax.planning.targets import target_of

H100 = "NVIDIA H100 80GB HBM3"
GB = 10**9


def proposed(preset, devices, memory, platform="gpu", kind=H100, *overrides):
    config = resolve(preset, overrides)
    chosen = propose(config, Machine(platform, kind, devices, memory * GB), load_records())
    return chosen, chosen.overrides(config)


def test_the_records_of_the_package_are_those_of_the_benchmarks():
    assert json.loads(RECORDS.read_text()) == plan_records.collect()


def test_the_page_has_the_table_of_these_records():
    assert plan_records.table() in Path("docs/hardware.md").read_text()


def test_a_plan_that_fits_without_recomputing_blocks_comes_first():
    chosen, settings = proposed("sana_sol_rl_pickscore", 8, 75)
    assert chosen.record.peak == pytest.approx(29e9, rel=0.01)
    assert settings == ["model.gradient_checkpointing=matmuls"]
    assert "planned 29 GB" in chosen.reason
    assert chosen.reason.endswith(f"of 8 x {H100}, 75 GB each")


def test_on_one_host_the_base_is_divided_before_blocks_are_recomputed():
    chosen, settings = proposed("flux1_sol_rl_pickscore", 8, 75)
    assert settings == ["mesh.fsdp=8"]
    assert chosen.record.source == "benchmarks/scaling.json"
    chosen, settings = proposed("flux1_sol_rl_pickscore", 1, 75)
    assert settings == ["model.gradient_checkpointing=blocks"]
    assert chosen.record.device == "h100"


def test_a_plan_for_the_same_kind_of_device_is_preferred():
    for device, kind in (("h200", "NVIDIA H200"), ("b200", "NVIDIA B200")):
        chosen, _ = proposed("flux1_sol_rl_pickscore", 1, 130, "gpu", kind)
        assert chosen.record.device == device


def test_a_plan_for_another_kind_of_device_needs_a_margin():
    kinds = {"tpu-v5e": "TPU v5 lite", "tpu-v6e": "TPU v6 lite"}
    for device, kind in kinds.items():
        chosen, settings = proposed("sana_sol_rl_pickscore", 8, 14.72, "tpu", kind)
        assert chosen.record.device == device
        assert chosen.record.peak < 14.72 * GB
        assert ("mesh.fsdp=8" in settings) is (device == "tpu-v5e")


def test_where_no_plan_fits_the_guess_says_so():
    chosen, settings = proposed("sana_sol_rl_pickscore", 2, 20)
    assert chosen.record is None
    assert "no plan on record fits 2 x " in chosen.reason
    assert settings == [
        "mesh.fsdp=2",
        "model.gradient_checkpointing=blocks",
        "optimizer.per_device_batch_size=8",
        "rollout.per_device_batch_size=8",
        "model.vae_tile_size=512",
    ]


@pytest.mark.parametrize("group", ["mesh.tensor=2", "mesh.sequence=2"])
def test_devices_that_compute_a_sample_together_leave_fewer_for_fsdp(group):
    _, settings = proposed("sana_sol_rl_pickscore", 8, 20, "gpu", H100, group)
    assert "mesh.fsdp=4" in settings
    assert not [setting for setting in settings if setting.startswith(group.split("=")[0])]
    # With memory for any plan, a plan's own `mesh.fsdp` still leaves room for the group.
    _, settings = proposed("flux1_sol_rl_pickscore", 8, 180, "gpu", H100, group)
    sizes = dict(setting.split("=") for setting in [*settings, group])
    assert 8 % (int(sizes.get("mesh.fsdp", 1)) * 2) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tiny", 1, 8, "cpu", "cpu"), "no plan on record of tiny-sana at 32 x 32 for 1 x cpu"),
        (
            ("sana_sol_rl_pickscore", 1, 8, "gpu", H100, "train.parameters=all"),
            "no plan on record has train.parameters=all",
        ),
        (
            ("sana_sol_rl_pickscore", 1, 99, "gpu", H100, "model.height=2048", "model.width=2048"),
            "no plan on record of sana at 2048 x 2048",
        ),
    ],
)
def test_without_a_record_the_settings_stay(arguments, reason):
    chosen, settings = proposed(*arguments)
    assert settings == []
    assert chosen.reason.startswith(reason)


def test_mesh_auto_stands_for_the_settings_and_others_win():
    preset = "flux1_sol_rl_pickscore"

    def find_machine():
        return Machine("gpu", H100, 8, 75 * GB)

    def not_called():
        raise AssertionError("without mesh=auto, JAX's backend must not be started")

    assert expand_mesh_auto(preset, ("seed=1",), not_called) == (["seed=1"], None)
    overrides, line = expand_mesh_auto(preset, ("mesh=auto", "seed=1"), find_machine)
    assert overrides == ["mesh.fsdp=8", "seed=1"]
    assert line.startswith("mesh=auto: mesh.fsdp=8: planned ")
    overrides, line = expand_mesh_auto(preset, ("mesh.fsdp=4", "mesh=auto"), find_machine)
    assert overrides == ["mesh.fsdp=4"]
    assert line.startswith("mesh=auto: the preset's own settings: ")


def test_a_device_is_recognized_by_the_beginning_of_its_name():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx6000pro",
        "NVIDIA L4": "l4",
        "TPU v5 lite": "tpu-v5e",
        "NVIDIA L40S": None,
        "NVIDIA H100 PCIe": None,
        "NVIDIA H100 NVL": None,
        "cpu": None,
    }
    found = {kind: target_of(kind) for kind in names}
    assert {kind: target and target.name for kind, target in found.items()} == names


def test_a_plan_of_an_h100_needs_no_margin_on_an_h100():
    chosen, _ = proposed("flux1_sol_rl_pickscore", 1, 43)
    assert chosen.record.device == "h100"
    assert 0.95 * 43e9 < chosen.record.peak < 43e9
    chosen, _ = proposed("flux1_sol_rl_pickscore", 1, 43, "gpu", "NVIDIA H100 PCIe")
    assert chosen.record is None
