"""Saving beside the training: what is saved, when errors are told, what is kept; two processes that
save together.
"""

import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from solrl_jax.errors import RunError
from solrl_jax.runs import checkpoint, checkpoint_writer
from solrl_jax.runs.saver import Saver
from tests.states import abstract, abstract_on, assert_same_bits, flat, make_state, placed, save

SMALL = {"w": jnp.arange(4.0)}


def full(*_args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("spread", [False, True])
def test_a_state_may_be_overwritten_as_soon_as_its_save_has_begun(tmp_path, spread):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    # large and random, so that it is hardly written before the next update has ended
    values = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    where = NamedSharding(mesh, P(None, "fsdp")) if spread else jax.devices()[0]
    state = {"w": jax.device_put(values, where), "n": jnp.int32(1)}
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: -leaf, state), donate_argnums=0)
    update.lower(state).compile()
    with Saver(tmp_path, keep=9, best=0) as saver:
        for iteration in (1, 2):
            saver.save(iteration, state, {})
            state = jax.block_until_ready(update(state))
    for iteration, sign in ((1, 1), (2, -1)):
        saved, _ = checkpoint.restore(tmp_path / f"{iteration:06d}", abstract(state))
        assert_same_bits(saved, {"w": jnp.asarray(sign * values), "n": jnp.int32(sign)})


@pytest.mark.parametrize("temporary", ["plain", "job[5].server"])
def test_a_path_may_have_brackets_and_other_signs_of_patterns(tmp_path, monkeypatch, temporary):
    (tmp_path / temporary).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    root = tmp_path / "lr[1e-4] * 2?"
    save(root, 1, SMALL, {})
    state, _ = checkpoint.restore(root / "000001", abstract(SMALL))
    assert_same_bits(state, SMALL)


def test_arrays_that_orbax_did_not_merge_are_no_checkpoint(tmp_path, monkeypatch):
    handler = "orbax.checkpoint.PyTreeCheckpointHandler"
    monkeypatch.setattr(f"{handler}.finalize", lambda *_args: None)
    with pytest.raises(RunError, match="the files of the processes were not merged"):
        save(tmp_path, 1, SMALL, {})
    assert not checkpoint.list_checkpoints(tmp_path)


@pytest.mark.parametrize("call", ["save", "wait", "end", "end of a run that failed"])
def test_what_goes_wrong_beside_the_training_is_raised_by_the_next_call(
    tmp_path, monkeypatch, call
):
    save(tmp_path, 1, SMALL, {})
    saver = Saver(tmp_path, keep=3, best=0)
    expected = (
        f"disk full while writing {tmp_path / '000002'};"
        f" the last checkpoint is {tmp_path / '000001'}"
    )
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "start_writing", lambda *_: (full, lambda: None))
        saver.save(2, SMALL, {})

    def end(error: Exception | None = None) -> None:
        with saver:
            if error is not None:
                raise error

    calls = {"save": lambda: saver.save(3, SMALL, {}), "wait": saver.wait, "end": end}
    with pytest.raises(RunError) as error:
        calls.get(call, lambda: end(ValueError("the run failed for another reason")))()
    assert str(error.value) == expected
    assert os.listdir(tmp_path) == ["000001"]
    saver.wait()  # it is told once


def test_one_save_at_a_time_and_one_an_iteration(tmp_path, monkeypatch):
    events = []
    go = threading.Event()
    original = checkpoint_writer.start_writing

    def gated(folder, arrays):
        number = folder.parent.name[-1]
        events.append(f"copied {number}")
        wait, merge = original(folder, arrays)

        def gated_wait() -> None:
            assert go.wait(60)
            wait()
            events.append(f"written {number}")

        return gated_wait, merge

    monkeypatch.setattr(checkpoint_writer, "start_writing", gated)
    with Saver(tmp_path, keep=3, best=0) as saver:
        saver.save(1, SMALL, {})
        threading.Timer(0.3, go.set).start()
        assert events == ["copied 1"]
        saver.save(1, SMALL, {})
        saver.save(2, SMALL, {})
    assert events == ["copied 1", "written 1", "copied 2", "written 2"]
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["000002", "000001"]


def test_the_best_stay_beside_the_newest(tmp_path):
    def names(iteration: int, reward: float | None, **options: int) -> list[int]:
        evaluation = None if iteration == 3 else {"eval/reward": reward}
        save(tmp_path, iteration, SMALL, {"evaluation": evaluation}, keep=1, **options)
        return [checkpoint.iteration_of(path) for path in checkpoint.list_checkpoints(tmp_path)]

    assert names(1, 0.5, best=2) == [1]
    assert names(2, 0.9, best=2) == [2, 1]
    assert names(3, None, best=2) == [3, 2, 1]  # not evaluated
    assert names(4, None, best=2) == [4, 2, 1]  # its reward was not finite
    assert names(5, 0.5, best=2) == [5, 2]  # of equal ones the newer is the better
    assert names(6, 0.95, best=2) == [6, 2]
    assert [path.name for path in checkpoint.rank_by_reward(tmp_path)] == ["000006", "000002"]
    (
        tmp_path / "000006" / "manifest.json"
    ).unlink()  # damaged: neither the best nor the newest good one
    assert names(7, 0.1, best=1) == [7, 6, 2]
    assert [path.name for path in checkpoint.rank_by_reward(tmp_path)] == ["000002", "000007"]
    assert names(8, 0.2) == [8, 6]  # what has no manifest is not ours to remove


def test_a_checkpoint_that_is_removed_while_they_are_ranked_is_left_out(tmp_path, monkeypatch):
    for iteration in (1, 2):
        evaluation = {"eval/reward": iteration / 10}
        save(tmp_path, iteration, SMALL, {"evaluation": evaluation}, keep=2)
    verify = checkpoint.verify

    def verify_then_remove(path, *, contents=True):
        verify(path, contents=contents)
        if path.name == "000002":
            shutil.rmtree(path)

    monkeypatch.setattr(checkpoint, "verify", verify_then_remove)
    assert [path.name for path in checkpoint.rank_by_reward(tmp_path)] == ["000001"]


# --------------------------------------------------------------------------------------------------

WORKER = textwrap.dedent(
    """
    import errno, json, os, pickle, sys
    from pathlib import Path
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    port, me, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, me)

    from solrl_jax.runs import checkpoint
    from solrl_jax.parallel import consensus
    from solrl_jax.runs import checkpoint_writer
    from solrl_jax.runs.saver import Saver
    from solrl_jax.runs.checkpoint import CheckpointError
    from solrl_jax.errors import RunError
    from tests.states import abstract_on, assert_holds, placed, save

    states = pickle.loads((root / "states").read_bytes())
    wide, tall = (jax.make_mesh(shape, ("data", "fsdp")) for shape in ((2, 4), (4, 2)))
    results = {}

    def line(act):
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    # what one process with eight devices saved
    state, results["meta"] = checkpoint.restore(
        root / "one" / "000001", abstract_on(states[1], tall)
    )
    assert_holds(state, states[1])

    # two saves beside collectives of the devices
    mean = jax.jit(lambda x: x * 0 + x.sum() / 8)
    with Saver(root / "two", keep=3, best=0) as saver:
        for iteration in (1, 2):
            state = placed(states[iteration], wide)
            saver.save(iteration, state, {"by": me})
            rows = jax.device_put(jnp.ones(8), NamedSharding(wide, P(("data", "fsdp"))))
            for _ in range(20):
                rows = mean(rows)
    state, meta, warnings = checkpoint.restore_latest(
        root / "two", abstract_on(states[1], tall), {}
    )
    assert_holds(state, states[2])
    results["newest"] = [meta["iteration"], meta["by"], warnings]

    # a disk that refuses one process, at once and later
    original = checkpoint_writer.start_writing
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    def early(folder, arrays):
        if me == 1:
            raise full
        return original(folder, arrays)
    def late(folder, arrays):
        wait, merge = original(folder, arrays)
        def refused():
            wait()
            if me == 1:
                raise full
        return refused, merge
    for number, broken in enumerate((late, early), start=3):
        checkpoint_writer.start_writing = broken
        results[f"full {number}"] = line(lambda: save(root / "two", number, state, {}))
    checkpoint_writer.start_writing = original
    results["there"] = consensus.from_first("there", lambda: sorted(os.listdir(root / "two")))

    # the newest one is damaged: no process may take another one than the others
    def damage():
        file = next((root / "two" / "000002" / "arrays" / "d").iterdir())
        file.write_bytes(file.read_bytes()[:-1])
    consensus.from_first("damage", damage)
    state, meta, warnings = checkpoint.restore_latest(
        root / "two", abstract_on(states[1], wide), {}
    )
    assert_holds(state, states[1])
    results["before"] = [meta["iteration"], len(warnings)]

    # what one process alone cannot read, none has
    compare = checkpoint.compare_leaves
    def other(*arguments):
        raise CheckpointError("not here")
    checkpoint.compare_leaves = other if me == 1 else compare
    results["unread"] = line(
        lambda: checkpoint.restore(root / "two" / "000001", abstract_on(states[1], wide))
    )

    def wrong():
        if me == 1:
            raise KeyError("gone")
        return me
    results["other"] = line(lambda: consensus.on_every("wrong", wrong))
    results["no JSON"] = line(
        lambda: consensus.on_every("no JSON", lambda: {me} if me == 1 else me)
    )
    for count in range(5):
        consensus.on_every("counted", lambda: count)
    results["all"] = consensus.on_every("right", lambda: me)
    results["counted"] = sorted(
        key for key, _ in consensus.client().key_value_dir_get("solrl_jax/counted")
    )
    print(json.dumps(results), flush=True)
    """
)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes of four devices each said, and the directory in which they saved."""
    root = tmp_path_factory.mktemp("processes")
    # flat, and made here: the processes have little else to compile
    states = {number: jax.tree.map(np.asarray, flat(make_state(number))) for number in (1, 2)}
    (root / "states").write_bytes(pickle.dumps(states))
    save(root / "one", 1, placed(states[1], jax.make_mesh((2, 4), ("data", "fsdp"))), {"by": "one"})
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, port, str(me), str(root)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs], root


@pytest.mark.slow
def test_two_processes_save_and_restore_as_one(two):
    for result in two[0]:
        assert result["meta"] == {"by": "one", "iteration": 1}
        assert result["newest"] == [2, 0, []]


@pytest.mark.slow
def test_what_two_processes_saved_one_restores_on_eight_four_and_one_device(two):
    path = two[1] / "two" / "000001"
    expected = flat(make_state(1))
    assert checkpoint.meta_of(path) == {"by": 0, "iteration": 1}
    for shape in ((4, 2), (2, 2), (1, 1)):
        mesh = jax.make_mesh(shape, ("data", "fsdp"), devices=jax.devices()[: shape[0] * shape[1]])
        state, _ = checkpoint.restore(path, abstract_on(expected, mesh))
        assert_same_bits(state, expected)


@pytest.mark.slow
def test_no_process_decides_alone(two):
    one, other = two[0]
    root = two[1] / "two"
    for number in (3, 4):
        line = (
            f"RunError: disk full while writing {root / f'{number:06d}'};"
            f" the last checkpoint is {root / '000002'}"
        )
        assert one[f"full {number}"] == other[f"full {number}"] == line
    assert one["there"] == other["there"] == ["000001", "000002"]
    assert one["before"] == other["before"] == [1, 1]
    assert one["unread"] == other["unread"] == "CheckpointError: not here"
    assert (one["other"], other["other"]) == (
        "RunError: process 1: KeyError: 'gone'",
        "KeyError: 'gone'",
    )
    problem = "TypeError: Object of type set is not JSON serializable"
    assert (one["no JSON"], other["no JSON"]) == (f"RunError: process 1: {problem}", problem)
    assert one["all"] == other["all"] == [0, 1]
    # of five answers the service holds the last
    assert one["counted"] == other["counted"] == ["solrl_jax/counted/4/0", "solrl_jax/counted/4/1"]
