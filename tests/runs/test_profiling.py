"""Traces of iterations that cannot be written."""

import errno
import os

import jax
import pytest

from solrl_jax.runs import profiling


def refused(stop=jax.profiler.stop_trace) -> None:
    stop()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_trace_that_cannot_be_begun_is_reported(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    lines = []
    with profiling.traced(tmp_path, 1, [1], lines.append):
        assert len(lines) == 1
    (line,) = lines
    assert line.startswith("no trace of iteration 1: ")


def test_a_trace_that_cannot_be_ended_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "stop_trace", refused)
    lines = []
    with profiling.traced(tmp_path, 1, [1], lines.append):
        pass
    (line,) = lines
    assert line.startswith("no trace of iteration 1: disk full while writing ")
    assert not list((tmp_path / "profile").iterdir())


@pytest.mark.parametrize("stop", [jax.profiler.stop_trace, refused], ids=["written", "refused"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError], ids=["interrupted", "failed"])
def test_what_stops_an_iteration_passes(tmp_path, monkeypatch, error, stop):
    monkeypatch.setattr(profiling, "stop_trace", stop)
    lines = []
    with pytest.raises(error), profiling.traced(tmp_path, 1, [1], lines.append):
        raise error
    assert len(lines) == (stop is refused)
    assert not list((tmp_path / "profile").iterdir())
