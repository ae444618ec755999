"""`scripts/bench_gpu.py` at the smallest size: its files, what it does without time, and how it
records an error.
"""

import dataclasses
import itertools
import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import bench_gpu
import jax
import pytest
from bench.gpu import checks, kernels, measure, parity, schedule, step, summary
from bench.gpu.record import Record, Task
from bench.random_weights import shapes_of_experiment

from solrl_jax.config.presets import resolve
from solrl_jax.planning.device_checks import FP8_MATMUL
from solrl_jax.planning.targets import TARGETS
from tests.small import SMALL

HLO = Path(__file__).parents[1] / "planning" / "hlo"


def task(folder: Path, step_name: str, model: str = "") -> Task:
    return Task(step_name, model, ("tiny",), SMALL, ("nvfp4",), 1, str(folder))


def ran(step_task: Task) -> dict:
    """The figures of a step that went well, run in this process."""
    step.run(step_task)
    record = json.loads(step_task.path.read_text())
    assert (record["state"], record["reason"]) == ("done", "")
    return record["result"]


def test_no_step_begins_without_time(tmp_path, capsys):
    bench_gpu.main(["--minutes", "0", "--out", str(tmp_path), "--models", "tiny,sana"])
    model_steps = [
        f"{name}-{m}" for m in ("tiny", "sana") for name in ("steps", "rollout", "update")
    ]
    names = ["facts", "checks", "kernels", "parity", *model_steps, "products"]
    assert {path.stem for path in tmp_path.glob("*.json")} == {*names}
    for name in names:
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert (record["state"], record["reason"]) == ("skipped", "0 of 0 s left, a step needs 15")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[: len(names)]] == names
    assert (tmp_path / "summary.md").read_text().count("| skipped |") == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "huge"], "--models huge"),
        (["--steps", "all"], "--steps all"),
        (["--formats", "int3"], "--formats int3"),
        (["rollout.per_device_batch_size=0"], "rollout.per_device_batch_size"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench_gpu.main([*arguments, "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_a_step(tmp_path, capsys):
    bench_gpu.main(
        ["--minutes", "5", "--out", str(tmp_path), "--models", "tiny", "--steps", "facts"]
    )
    record = json.loads((tmp_path / "facts.json").read_text())
    assert record["state"] == "done"
    assert record["result"]["device"]["platform"] == "cpu"
    assert record["result"]["plan"] == {"target": None}
    assert record["result"]["versions"].keys() >= {"jax", "jaxlib", "backend"}
    assert "| device: kind | cpu |" in capsys.readouterr().out


def test_a_step_that_takes_too_long_is_ended(tmp_path):
    record = schedule.run_one(task(tmp_path, "facts"), 0.01)
    assert (record.state, record.result) == ("cut off", {})


@pytest.mark.exhaustive
def test_errors_are_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    record = step.run(task(tmp_path, "steps", "no-such-model"))
    assert (record.state, record.reason) == ("failed", "KeyError: 'no-such-model'")
    assert Record.read(tmp_path / "steps-no-such-model.json") == record

    def broken(gauge, form, shape):
        if form == "nvfp4":
            raise ValueError("no such kernel\nat all")
        return {"seconds": 1.0}

    monkeypatch.setattr("bench.gpu.products.measure", broken)
    record = step.run(task(tmp_path, "products"))
    assert record.state == "failed"
    assert record.reason.endswith("nvfp4: ValueError: no such kernel")
    assert [value.get("error") for value in record.result.values()] == [
        None,
        "ValueError: no such kernel",
    ] * 3
    assert len(record.figures()) == 3
    assert step.run(task(tmp_path, "rollout", "tiny")).state == "skipped"  # no chunk was measured


@pytest.mark.exhaustive
def test_products_of_every_quantized_linear(tmp_path):
    rows = ran(task(tmp_path, "products"))
    assert {row["format"] for row in rows.values()} == {"bf16", "nvfp4"}
    assert sum(row["linears"] for row in rows.values()) == 2 * 16  # as `solrl layers tiny` says
    for row in rows.values():
        assert row["tflops"] * 1e12 == pytest.approx(
            2 * row["rows"] * row["in"] * row["out"] / row["seconds"]
        )
        assert (row["plan"], row["ratio"], row["share_of_peak"]) == (None, None, None)


@pytest.mark.exhaustive
def test_an_iteration_is_put_together_from_its_programs(tmp_path):
    chunks = ran(task(tmp_path, "steps", "tiny"))
    assert [(name, row["rows"], row["steps"], row["calls"]) for name, row in chunks.items()] == [
        ("regenerate", 2, 3, 4),
        ("nvfp4", 2, 2, 8),
    ]
    for row in chunks.values():
        assert row["step_seconds"] == pytest.approx(row["seconds"] / row["steps"])
        assert row["memory"]["planned"] > row["memory"]["held"] > 0
    rollout = ran(task(tmp_path, "rollout", "tiny"))
    scores = [rollout[name] for name in ("decode_chunk", "score_images")]
    assert [row["calls"] for row in scores] == [12, 12]
    once = sum(row["seconds"] for row in scores)
    whole = (
        8 * chunks["nvfp4"]["seconds"]
        + chunks["nvfp4"]["sync"]["seconds"]
        + 4 * chunks["regenerate"]["seconds"]
        + 12 * once
    )
    assert rollout["sol_rl nvfp4"]["seconds"] == pytest.approx(whole)
    assert rollout["naive_scaling"]["seconds"] == pytest.approx(
        8 * chunks["regenerate"]["seconds"] + 8 * once
    )
    (row,) = ran(task(tmp_path, "update", "tiny")).values()
    assert (row["micro_batches"], row["micro_batches_of_iteration"]) == (
        2,
        8,
    )  # of 2 terms; 2 prompts, 4 kept, 2 sigmas
    assert row["iteration_seconds"] == pytest.approx(row["seconds"] / 2 * 8)
    page = summary.page([task(tmp_path, name, "tiny") for name in schedule.EACH])
    assert page.count("\n| tiny |") == 2 + 4 + 1


@pytest.mark.exhaustive
def test_the_gradient_of_the_reward_belongs_to_the_rollout_phase(tmp_path):
    settings = ("reward=tiny-clip", "objective=opsd")

    def of_opsd(step):
        plain = task(tmp_path, step, "tiny")
        return ran(dataclasses.replace(plain, overrides=(*plain.overrides, *settings)))

    chunks = of_opsd("steps")
    rollout = of_opsd("rollout")
    gradient = rollout["reward_gradient"]
    assert gradient["finite"]
    assert gradient["calls"] == 12  # 3 gradients for each of 4 batches of 2 kept samples
    scored = rollout["decode_chunk"]["seconds"] + rollout["score_images"]["seconds"]
    assert rollout["naive_scaling"]["seconds"] == pytest.approx(
        8 * (chunks["regenerate"]["seconds"] + scored) + 12 * gradient["seconds"]
    )


@pytest.mark.exhaustive
def test_rewards_here_are_those_of_the_other_process(tmp_path):
    with schedule.references(task(tmp_path, "parity")):
        rows = ran(task(tmp_path, "parity"))
    assert rows.keys() == {"tiny regenerate", "tiny nvfp4", "tiny fp8", "tiny iteration"}
    for row in rows.values():  # here both are CPUs, compiled with other options
        assert row["spearman"] > 0.99
    assert rows["tiny iteration"]["kept_alike"] > 0.9


def test_a_check_that_fails_is_an_error(monkeypatch):
    check = dataclasses.replace(FP8_MATMUL, kernel=lambda x, w: 2 * FP8_MATMUL.kernel(x, w))
    with pytest.raises(RuntimeError, match="differs from plain JAX by 1 "):
        checks.compare(check)
    assert checks.compare(FP8_MATMUL) == {"tolerance": FP8_MATMUL.tolerance}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [kernels.Sizes(), kernels.SMALL], ids=["released", "small"])
def test_a_kernel_and_its_twin_have_results_of_the_same_shapes(sizes):
    for case in kernels.cases(sizes):
        ours, twin = (jax.eval_shape(f, *case.shapes) for f in (case.ours, case.twin))
        shapes = [[x.shape for x in jax.tree.leaves(outputs)] for outputs in (ours, twin)]
        assert shapes[0] == shapes[1], case.name


@pytest.mark.exhaustive
def test_a_kernel_beside_its_twin():
    case = next(
        case for case in kernels.cases(kernels.SMALL) if case.name == "one_pass norm, SANA fp8"
    )
    with ThreadPoolExecutor(2) as threads:
        compiled = [
            threads.submit(kernels.compile_case, f, case.shapes) for f in (case.ours, case.twin)
        ]
        figures = kernels.compare(case, *compiled, repeat=1)
    assert (figures["difference"], figures["alike"], figures["finite"]) == (0.0, 1.0, True)
    assert figures["times"] == pytest.approx(figures["twin_seconds"] / figures["seconds"], abs=1e-3)


def test_a_group_of_kernels_is_measured_before_the_next_one_is_compiled(monkeypatch):
    """So that a step that runs out of time keeps the figures of whole groups."""
    compiled = []
    monkeypatch.setattr(kernels, "compile_case", lambda f, shapes: compiled.append(f))
    sizes = [len(list(group(kernels.SMALL))) for group in kernels.groups()]
    yielded = 0
    for _ in kernels.kernels(SimpleNamespace(repeat=1)):
        yielded += 1
        reached = next(total for total in itertools.accumulate(sizes) if total >= yielded)
        assert len(compiled) == 2 * reached
    assert yielded == sum(sizes)


@pytest.mark.slow
def test_a_twin_that_fails_leaves_the_kernels_own_figures():
    case = next(kernels.cases(kernels.SMALL))
    success = Future()
    failure = Future()
    success.set_result((lambda *arrays: arrays[0], 0.1))
    failure.set_exception(MemoryError("too large"))
    figures = kernels.compare(case, success, failure, repeat=1)
    assert figures["twin_error"] == "MemoryError: too large"
    assert figures["finite"]


@pytest.mark.slow
def test_the_update_keeps_what_the_configuration_says():
    """Without a policy the gradient of FLUX.1 keeps every intermediate, which no GPU holds."""
    for kind in ("none", "blocks"):
        config = resolve("tiny", ("mesh.data=1", f"model.gradient_checkpointing={kind}"))
        assert shapes_of_experiment(config).backbone.pipeline.gradient_checkpointing == kind


def test_how_rewards_differ():
    here = {"rewards": [[1.0, 2.0, 3.0]], "kept": [True, False, True], "native": {}}
    cpu = {"rewards": [[1.0, 2.5, 3.0]], "kept": [True, True, True], "native": {}}
    comparison = parity.compared(here, cpu)
    assert (comparison["largest_difference"], comparison["range"]) == (0.5, 2.0)
    assert (comparison["spearman"], comparison["kept_alike"]) == (
        pytest.approx(1.0),
        pytest.approx(2 / 3),
    )


def test_a_compiled_text_beside_the_peaks_of_its_device():
    figures = measure.Gauge(1, TARGETS["h200"]).plan(
        (HLO / "fp8-h200.hlo").read_text(), 1, seconds=1e-3
    )
    assert figures["ratio"] == pytest.approx(1e-3 / figures["plan"]["seconds"], abs=1e-3)
    assert any("f8e4m3fn" in name for name in figures["native"])
    assert math.isclose(figures["tflops"], 3 * 2 * 128 * 256 * 256 / 1e-3 / 1e12)
    gauge = measure.Gauge(1, TARGETS["b200"])
    assert [gauge.share_of_peak(name, 4.5e15, 1.0) for name in ("bf16", "fp8", "nvfp4")] == [
        2.0,
        1.0,
        0.5,
    ]
