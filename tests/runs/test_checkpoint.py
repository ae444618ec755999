"""Checkpoints: bit-exact on any mesh, whole after a kill at any instant, and never believed when
they are damaged.
"""

import contextlib
import errno
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from solrl_jax.errors import InputError, RunError
from solrl_jax.runs import checkpoint, checkpoint_writer
from solrl_jax.runs.checkpoint import CheckpointError
from tests.states import Policy, abstract, assert_same_bits, make_state, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A root that holds iterations 1 and 2.  Tests that damage it copy it first."""
    root = tmp_path_factory.mktemp("checkpoints")
    for iteration in (1, 2):
        save(root, iteration, make_state(iteration), {"config": "abc", "cursor": [iteration, 7]})
    return root


@pytest.fixture
def root(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_a_round_trip_keeps_every_bit_and_the_meta(saved):
    state, meta, warnings = checkpoint.restore_latest(
        saved, abstract(make_state(0)), {"config": "abc", "cursor": (2, 7)}
    )
    assert_same_bits(state, make_state(2))
    assert meta == {"config": "abc", "cursor": [2, 7], "iteration": 2}
    assert warnings == []
    state, meta = checkpoint.restore(saved / "000001", abstract(make_state(0)))
    assert_same_bits(state, make_state(1))
    assert [path.name for path in checkpoint.list_checkpoints(saved)] == ["000002", "000001"]


def test_a_parameter_that_older_checkpoints_lack_is_zero(tmp_path):
    """The bias of MHLA's `lepe`, among the trained parameters and in the state of the optimizer."""
    layer = "transformer_blocks/attn1"
    older = {"ema": {f"{layer}/lepe/kernel": jnp.arange(9.0)}, "mu": {f"{layer}/mix": jnp.ones(4)}}
    bias = {f"{layer}/lepe/bias": jnp.zeros(3, jnp.bfloat16)}
    newer = {name: leaves | bias for name, leaves in older.items()}
    save(tmp_path, 1, older, {})
    state, _ = checkpoint.restore(tmp_path / "000001", abstract(newer))
    assert_same_bits(state, newer)
    with pytest.raises(CheckpointError, match=r"other/bias.* is missing"):
        checkpoint.restore(
            tmp_path / "000001",
            abstract(older | {"ema": older["ema"] | {"other/bias": jnp.ones(3)}}),
        )


def test_nothing_saved_is_none(tmp_path):
    assert checkpoint.restore_latest(tmp_path / "absent", abstract(make_state(0)), {}) is None
    (tmp_path / "notes").mkdir()
    assert checkpoint.restore_latest(tmp_path, abstract(make_state(0)), {}) is None


@pytest.mark.slow
def test_a_state_moves_between_meshes(tmp_path):
    """From 8 devices to 4 of them, otherwise split, to one, and back."""
    eight, four = (
        jax.make_mesh(shape, ("data", "fsdp"), devices=jax.devices()[: shape[0] * shape[1]])
        for shape in ((2, 4), (2, 2))
    )
    one = SingleDeviceSharding(jax.devices()[3])
    spread = NamedSharding(eight, P("data", "fsdp"))
    whole = NamedSharding(eight, P())
    half = NamedSharding(four, P("fsdp"))
    thin = NamedSharding(four, P(("data", "fsdp")))
    state = {
        "w": jax.random.normal(jax.random.key(0), (8, 4), jnp.bfloat16),
        "v": jnp.arange(8.0),
        "step": jnp.int32(5),
    }
    wide = {"w": spread, "v": NamedSharding(eight, P("fsdp")), "step": whole}
    placements = [
        wide,
        {"w": half, "v": thin, "step": NamedSharding(four, P())},
        dict.fromkeys(state, one),
        wide,
    ]
    placed = jax.device_put(state, wide)
    for iteration, placement in enumerate(placements[1:]):
        path = save(tmp_path, iteration, placed, {})
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, placement
        )
        placed, _ = checkpoint.restore(path, target)
        assert_same_bits(placed, state)
        assert jax.tree.map(lambda leaf: leaf.sharding, placed) == placement


def test_training_goes_on_as_if_nothing_happened(tmp_path):
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(params, moments, number):
        grads = jax.grad(lambda w: jnp.sum(jnp.sin(w * number)))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, number + 1

    params = jnp.linspace(-1, 1, 32)
    states = [(params, optimizer.init(params), jnp.int32(0))]
    for _ in range(6):
        states.append(step(*states[-1]))
    path = save(tmp_path, 3, states[3], {})
    state, _ = checkpoint.restore(path, abstract(states[0]))
    for _ in range(3):
        state = step(*state)
    assert_same_bits(state, states[6])


def test_another_structure_shape_or_dtype_is_refused_by_leaf(saved):
    good = abstract(make_state(0))
    leaf = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    for weights, words in (
        ({**good.weights, "new": leaf}, ".weights['new'] is missing"),
        (
            {k: v for k, v in good.weights.items() if k != "codes"},
            ".weights['codes'] is unknown here",
        ),
        ({**good.weights, "codes": leaf}, ".weights['codes'] is uint8[8, 2], not float32[2, 2]"),
    ):
        with pytest.raises(CheckpointError) as error:
            checkpoint.restore(saved / "000002", Policy(weights, good.optimizer, good.step))
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_a_leaf_that_is_no_plain_array_is_refused(tmp_path):
    for leaf in (np.zeros(2), 1.0, jax.random.key(0)):
        with pytest.raises(TypeError, match=r"\['x'\]"):
            save(tmp_path, 0, {"x": leaf}, {})


def files_of(path):
    return sorted(name for name in path.rglob("*") if name.is_file())


def assert_skipped(root, reason=""):
    """The newest checkpoint is refused with one line, and the one before is restored."""
    newest = checkpoint.list_checkpoints(root)[0]
    with pytest.raises(CheckpointError) as error:
        checkpoint.verify(newest)
    state, meta, warnings = checkpoint.restore_latest(
        root, abstract(make_state(0)), {"config": "abc"}
    )
    assert meta["iteration"] == 1
    assert_same_bits(state, make_state(1))
    assert warnings == [f"skipped checkpoint {error.value}"]
    assert "\n" not in warnings[0]
    assert reason in warnings[0]


@pytest.mark.slow
def test_damage_to_any_file_is_found(root):
    rng = random.Random(0)
    for path in files_of(root / "000002"):
        whole = path.read_bytes()
        name = path.name
        path.write_bytes(whole[: rng.randrange(len(whole))])
        assert_skipped(root, name)
        for _ in range(4):
            bits = bytearray(whole)
            bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
            path.write_bytes(bits)
            with pytest.raises(CheckpointError):
                checkpoint.verify(root / "000002")
        path.unlink()
        assert_skipped(root, name)
        path.write_bytes(whole)
    checkpoint.verify(root / "000002")


def test_an_extra_file_a_foreign_directory_and_another_name_are_refused(root):
    extra = root / "000002" / "arrays" / "extra"
    extra.touch()
    assert_skipped(root, "unknown file arrays/extra")
    extra.unlink()
    (root / "000002").rename(root / "000003")
    assert_skipped(root, "holds iteration 2, not 3")
    shutil.rmtree(root / "000003")
    (root / "000007").mkdir()
    assert_skipped(root, "manifest.json")
    (root / "000007" / "thesis.txt").write_text("do not remove")
    assert_skipped(root, "manifest.json")
    for iteration in (8, 9):
        save(root, iteration, make_state(iteration), {}, keep=1)
    assert (root / "000007" / "thesis.txt").exists()


def test_when_nothing_is_good_the_run_stops(root):
    for path in root.glob("*/manifest.json"):
        path.unlink()
    with pytest.raises(RunError, match=r"no checkpoint .*/000002: .*/000001: ") as error:
        checkpoint.restore_latest(root, abstract(make_state(0)), {})
    assert "\n" not in str(error.value)


def test_what_a_run_beside_removes_while_it_is_looked_for_is_looked_for_again(root, monkeypatch):
    restore = checkpoint.restore

    def slow(path, *arguments):
        if path.name == "000002":  # the run saves, and keeps one
            save(root, 3, make_state(3), {}, keep=1)
        return restore(path, *arguments)

    monkeypatch.setattr(checkpoint, "restore", slow)
    state, meta, _ = checkpoint.restore_latest(root, abstract(make_state(0)), {})
    assert_same_bits(state, make_state(3))
    assert meta["iteration"] == 3


def test_a_good_checkpoint_of_another_run_is_refused(root):
    with pytest.raises(
        InputError, match=r"another run: config \('abc' there, 'xyz' here\), model \(None there"
    ):
        checkpoint.restore_latest(root, abstract(make_state(0)), {"config": "xyz", "model": "sana"})


def test_pruning_counts_good_ones_only(root):
    save(root, 3, make_state(3), {"config": "abc"})
    newest = files_of(root / "000003")[0]
    newest.write_bytes(bytes(newest.stat().st_size))
    checkpoint_writer.prune(root, 1)
    assert [path.name for path in checkpoint.list_checkpoints(root)] == ["000003", "000002"]
    checkpoint_writer.prune(root, 0)
    assert [path.name for path in checkpoint.list_checkpoints(root)] == ["000003", "000002"]
    save(root, 3, make_state(3), {"config": "abc"}, keep=1)
    assert os.listdir(root) == ["000003"]
    checkpoint.verify(root / "000003")


@pytest.mark.parametrize(
    ("word", "other"), [('"evaluation"', '"evaluatiom"'), ("0.9", "0.1"), ('"meta"', '"meat"')]
)
def test_the_best_is_not_removed_because_its_meta_is_damaged(word, other, tmp_path):
    for iteration, reward in ((1, 0.9), (2, 0.5)):
        save(
            tmp_path,
            iteration,
            make_state(iteration),
            {"evaluation": {"eval/reward": reward}},
            keep=1,
            best=1,
        )
    meta = tmp_path / "000001" / "meta.json"
    meta.write_text(meta.read_text().replace(word, other))
    save(tmp_path, 3, make_state(3), {"evaluation": {"eval/reward": 0.6}}, keep=1, best=1)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["000003", "000001"]


def test_metadata_without_an_iteration_is_that_of_no_checkpoint(tmp_path):
    path = save(tmp_path, 1, make_state(1), {})
    header = json.loads((path / "meta.json").read_text())
    del header["iteration"]
    (path / "meta.json").write_text(json.dumps(header))
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(f"{path}: ")):
        checkpoint.meta_of(path)


class Killed(BaseException):
    """The process is dead: nothing that it would still have done happens."""


@contextlib.contextmanager
def dying_at(monkeypatch, instant, arrays):
    """Every change to the directory tree from number `instant` on fails as if the process were
    gone.

    A copy of the folder `arrays` stands for what orbax writes: it is quick, and the real kills
    below meet orbax itself.
    """
    changes = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal changes
            changes += 1
            if changes > instant:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:

        def copy(folder):
            return shutil.copytree(arrays, folder, dirs_exist_ok=True)

        patch.setattr(
            checkpoint_writer,
            "start_writing",
            lambda folder, _: (lambda: copy(folder), lambda: None),
        )
        patch.setattr(os, "fsync", lambda _: None)
        for name in ("mkdir", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        yield


def test_death_between_any_two_changes_leaves_a_good_checkpoint(saved, tmp_path, monkeypatch):
    new = make_state(5)
    arrays = save(tmp_path, 5, new, {}) / "arrays"
    outcomes = []
    for instant in range(1000):
        root = Path(shutil.copytree(saved, tmp_path / str(instant)))
        try:
            with dying_at(monkeypatch, instant, arrays):
                save(root, 2, new, {"new": True}, keep=1)
        except Killed:
            newest = checkpoint.list_checkpoints(root)[0]
            checkpoint.verify(newest)
            outcomes.append(
                (newest.name, "new" in json.loads((newest / "meta.json").read_text())["meta"])
            )
        else:
            break
        if outcomes[-1] not in outcomes[:-1]:
            state, meta, warnings = checkpoint.restore_latest(root, abstract(new), {})
            assert_same_bits(state, new if "new" in meta else make_state(2))
            assert warnings == []
            save(root, 3, new, {}, keep=1)
            assert os.listdir(root) == ["000003"]
    assert len(outcomes) > 20
    assert sorted(set(outcomes)) == [
        ("000002", False),
        ("000002", True),
        ("000002.replaced", False),
    ]


SAVER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp
    from solrl_jax.runs import checkpoint
    from solrl_jax.runs import checkpoint_writer

    root, last = Path(sys.argv[1]), int(sys.argv[2])
    for iteration in range(last + 1):
        state = {"w": jnp.full((256, 64), iteration, jnp.bfloat16), "n": jnp.int32(iteration)}
        checkpoint_writer.begin(root, iteration, state, {"n": iteration}, keep=2)()
        print(iteration, flush=True)
    """
)


def saver(root, last):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SAVER, str(root), str(last)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_kill_nine_while_saving(tmp_path):
    rng = random.Random(time.time_ns())
    processes = [
        (tmp_path / str(number), saver(tmp_path / str(number), 10**6)) for number in range(3)
    ]
    for _, process in processes:
        process.stdout.readline()
    deadlines = sorted(time.monotonic() + rng.uniform(0, 1.5) for _ in processes)
    for deadline, (_, process) in zip(deadlines, processes, strict=True):
        time.sleep(max(0, deadline - time.monotonic()))
        process.send_signal(signal.SIGKILL)
    like = {
        "w": jax.ShapeDtypeStruct((256, 64), jnp.bfloat16),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    for root, process in processes:
        iterations = [0, *map(int, process.stdout.read().split())]
        assert process.wait(timeout=300) == -signal.SIGKILL
        process.stdout.close()
        process.stderr.close()
        state, meta, warnings = checkpoint.restore_latest(root, like, {})
        assert warnings == []
        assert meta["iteration"] - iterations[-1] in (0, 1)
        assert (
            np.asarray(state["w"]) == np.asarray(jnp.full((256, 64), meta["n"], jnp.bfloat16))
        ).all()
        assert int(state["n"]) == meta["n"] == meta["iteration"]
        save(root, meta["n"] + 1, state, {}, keep=1)
        assert os.listdir(root) == [f"{meta['n'] + 1:06d}"]


@pytest.mark.slow
def test_a_process_that_saved_ends_by_itself_and_says_nothing(tmp_path):
    output, noise = saver(tmp_path, 1).communicate(timeout=300)
    assert (output, noise) == ("0\n1\n", "")


def full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_in_orbax(*_args):
    raise ValueError(
        f"RESOURCE_EXHAUSTED: Failed to write 9 bytes: {os.strerror(errno.ENOSPC)}"
        " [os_error_code='28']"
    )


@pytest.mark.parametrize(
    ("owner", "name", "function"),
    [
        (checkpoint_writer, "start_writing", full),
        (checkpoint_writer, "start_writing", lambda *_: (full_in_orbax, lambda: None)),
        (checkpoint_writer, "start_writing", lambda *_: (lambda: None, full)),
        (Path, "write_text", full),
        (os, "fsync", full),
        (os, "replace", full),
    ],
)
def test_a_full_disk_is_one_line_and_takes_nothing(root, monkeypatch, owner, name, function):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, function)
        with pytest.raises(RunError) as error:
            save(root, 3, make_state(3), {})
    assert (
        str(error.value)
        == f"disk full while writing {root / '000003'}; the last checkpoint is {root / '000002'}"
    )
    assert sorted(os.listdir(root)) == ["000001", "000002"]
    checkpoint.verify(root / "000002")


def test_what_orbax_leaves_to_asyncio_is_not_told_again(caplog):
    checkpoint.orbax()
    for folder, count in (("orbax", 0), ("other", 1)):
        caplog.clear()
        with pytest.raises(ValueError, match="full") as caught:
            exec(compile("raise ValueError('full')", f"/packages/{folder}/writer.py", "exec"))
        logging.getLogger("asyncio").error(
            "Task exception was never retrieved", exc_info=caught.value
        )
        assert len(caplog.records) == count


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes"), 0),
        (ValueError("something else"), 1),
        (OSError(errno.ENOSPC, "of another library"), 1),
    ],
)
def test_a_full_disk_in_a_future_of_tensorstore_is_not_told_again(error, count, caplog):
    """asyncio logs a future whose exception nobody has asked for, and it has no stack trace."""
    checkpoint.orbax()
    caplog.clear()
    logging.getLogger("asyncio").error("Future exception was never retrieved", exc_info=error)
    assert len(caplog.records) == count


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path, capfd, caplog):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        small, big = (
            {"w": jax.random.normal(jax.random.key(0), (size,))} for size in (1000, 150_000)
        )
        for size in (60_000, 70_000, 80_000, 90_000, 100_000):
            save(tmp_path, 1, small, {})
            with contextlib.suppress(RunError):
                save(tmp_path, 2, {"w": big["w"][:size]}, {})
                shutil.rmtree(tmp_path / "000002")
        with pytest.raises(
            RunError, match=r"^disk full while writing .*000002; the last checkpoint is .*000001$"
        ):
            save(tmp_path, 2, big, {})
        assert os.listdir(tmp_path) == ["000001"]
        assert_same_bits(checkpoint.restore(tmp_path / "000001", abstract(small))[0], small)
        many = {str(i): jax.random.normal(jax.random.key(i), (4000,)) for i in range(60)}
        with pytest.raises(
            RunError, match=r"^disk full while writing .*000002; the last checkpoint is .*000001$"
        ):
            save(tmp_path, 2, many, {})
        save(tmp_path, 2, small, {})
        assert capfd.readouterr() == ("", "")  # what fails in other threads is told once
        assert not caplog.records
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_the_files_name_what_they_hold(saved):
    header = json.loads((saved / "000002" / "meta.json").read_text())
    assert header["arrays"][".weights['a/b']['c.d']"] == {"shape": [8], "dtype": "bfloat16"}
    assert (header["format"], header["iteration"], header["meta"]["cursor"]) == (1, 2, [2, 7])
