"""The cache of encodings: what is read has the bits that were written, and a damaged entry is never
used.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from solrl_jax.errors import RunError
from solrl_jax.models.text_encoders.cache import Cache, open_cache
from tests.cases import first_is_quick

KEY = "ab" + "0" * 62
ENCODING = {
    "text": (np.arange(12).reshape(3, 4) / 7).astype(ml_dtypes.bfloat16),
    "mask": np.array([True, True, False]),
    "pooled": np.array([np.pi, -0.0, 1e-40], np.float32),
}


def bits(encoding) -> dict[str, tuple]:
    return {
        name: (np.asarray(x).dtype, x.shape, np.asarray(x).tobytes())
        for name, x in encoding.items()
    }


def files_below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_what_is_written_is_read_to_the_bit(tmp_path):
    cache = Cache(tmp_path / "new" / "cache")
    assert cache.read(KEY) is None
    cache.write(KEY, ENCODING)
    assert bits(cache.read(KEY)) == bits(ENCODING)
    assert cache.read("ac" + KEY[2:]) is None
    assert [p.relative_to(cache.folder) for p in files_below(tmp_path)] == [
        Path("ab", f"{KEY}.safetensors")
    ]


def widened(data: bytes, more: int) -> bytes:
    """The file after its header has grown by `more` bytes."""
    return (int.from_bytes(data[:8], "little") + more).to_bytes(8, "little") + data[8:]


DAMAGE = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[:40],
    "cut in the numbers": lambda data: data[:-1],
    "a bit of a number": lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
    "the length of the header": lambda data: b"\xff" * 8 + data[8:],
    "a shape": lambda data: data.replace(b"[3,4]", b"[4,3]"),
    "a dtype": lambda data: data.replace(b'"F32"', b'"I32"'),
    "a dtype of safetensors alone": lambda data: widened(data.replace(b'"BOOL"', b'"F8_E4M3"'), 3),
    "a dtype that is none": lambda data: data.replace(b'"F32"', b'"Q32"'),
    "a name": lambda data: data.replace(b'"pooled"', b'"poopoo"'),
    "offsets": lambda data: data.replace(b"data_offsets", b"data_offsetz"),
    "no header": lambda data: (2).to_bytes(8, "little") + b"[]" + data[10:],
    "a header of brackets": lambda data: (10**5).to_bytes(8, "little") + b"[" * 10**5,
}


@pytest.mark.parametrize("case", first_is_quick(DAMAGE))
def test_a_damaged_entry_is_none_and_is_replaced(case, tmp_path):
    cache = Cache(tmp_path)
    cache.write(KEY, ENCODING)
    (path,) = files_below(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[case](whole))
    assert path.read_bytes() != whole
    assert cache.read(KEY) is None
    cache.write(KEY, ENCODING)
    assert path.read_bytes() == whole
    assert bits(cache.read(KEY)) == bits(ENCODING)


def test_pipes_in_the_folder_are_not_waited_for(tmp_path):
    cache = Cache(tmp_path / "cache")
    file = tmp_path / "weights"
    file.write_text("weights")
    cache.write(KEY, ENCODING)
    digest = cache.file_sha256(file)
    for path in files_below(tmp_path / "cache"):
        path.unlink()
        os.mkfifo(path)
    assert (cache.read(KEY), cache.file_sha256(file)) == (None, digest)


def test_an_entry_under_the_name_of_another_is_none(tmp_path):
    cache = Cache(tmp_path)
    other = "ab" + "1" * 62
    cache.write(other, ENCODING)
    cache.entry_path(other).rename(cache.entry_path(KEY))
    assert cache.read(KEY) is None


WRITER = """
import sys, numpy as np
from pathlib import Path
from solrl_jax.models.text_encoders.cache import Cache
cache = Cache(Path(sys.argv[1]))
for i in range(400):
    cache.write(sys.argv[2], {"text": np.full((300, 64), 1.5, np.float32)})
"""


def test_two_processes_may_write_the_same_entry(tmp_path):
    cache = Cache(tmp_path)
    hits = 0
    command = [sys.executable, "-c", WRITER, str(tmp_path), KEY]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        entry = cache.read(KEY)
        assert entry is None or (entry["text"] == 1.5).all()
        assert entry is not None or not hits  # once there, it is there and whole at every moment
        hits += entry is not None
    assert [writer.communicate()[1] for writer in writers] == ["", ""]
    assert hits > 10
    assert files_below(tmp_path) == [cache.entry_path(KEY)]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=r"^disk full while writing .*safetensors$"):
        Cache(tmp_path).write(KEY, ENCODING)
    assert not files_below(tmp_path)


def test_the_users_own_cache_is_where_the_desktop_standard_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_cache("").folder == tmp_path / "xdg" / "solrl_jax" / "prompts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert open_cache("").folder == tmp_path / "me" / ".cache" / "solrl_jax" / "prompts"
    assert open_cache("~/x").folder == tmp_path / "me" / "x"
    assert open_cache(None) is None
    assert not files_below(tmp_path)


def test_the_digest_of_a_file_is_of_its_content_and_is_taken_once(tmp_path, monkeypatch):
    read = []
    original = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda f, name: read.append(f.name) or original(f, name)
    )
    a = tmp_path / "a"
    b = tmp_path / "b"
    cache = Cache(tmp_path / "cache")
    a.write_bytes(b"weights")
    b.write_bytes(b"weights")
    first = cache.file_sha256(a)
    assert cache.file_sha256(a) == first == Cache(cache.folder).file_sha256(a)
    assert len(read) == 1
    assert cache.file_sha256(b) == first
    assert len(read) == 2
    for known in files_below(cache.folder):  # a damaged note is no note
        known.write_bytes(known.read_bytes()[:-1])
    assert cache.file_sha256(a) == first
    assert len(read) == 3
    times = a.stat()
    a.write_bytes(b"Weights")  # of the same length, and made to look as old
    os.utime(a, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.file_sha256(a) != first
