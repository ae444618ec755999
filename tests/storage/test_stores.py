"""Paths in an object store, on a real S3 server."""

import os
import sys
from pathlib import Path

import pytest

from solrl_jax.config.presets import resolve
from solrl_jax.config.values import ConfigError
from solrl_jax.errors import InputError, RunError
from solrl_jax.runs.report import is_page
from solrl_jax.storage import files, readers
from solrl_jax.storage.stores import StoreError, StorePath, run_path


def test_paths_are_read_and_printed_as_urls():
    path = run_path("s3://bucket/runs/a/")
    assert isinstance(path, StorePath)
    assert str(path) == "s3://bucket/runs/a"
    assert str(path / "checkpoints" / "000012.replaced") == f"{path}/checkpoints/000012.replaced"
    assert (path / "000012.replaced").with_suffix("") == path / "000012"
    assert (path.name, path.parent.name, (path / "x.png").stem) == ("a", "runs", "x")
    assert run_path(Path("gs://bucket/run")) == run_path("gs://bucket/run")
    assert run_path("runs/a") == Path("runs/a")
    with pytest.raises(TypeError):
        os.fspath(path)
    with pytest.raises(InputError, match="has no bucket"):
        run_path("gs://")


@pytest.mark.parametrize(
    "url", ["az://b/run", "s3://bucket", "gs:///run", "s3://b//x", "gs://b/.."]
)
def test_a_run_directory_that_no_store_has_is_refused(url):
    with pytest.raises(ConfigError, match=r"run\.dir=.*: expected gs://BUCKET/DIRECTORY or s3://"):
        resolve("tiny", (f"run.dir={url}",))


def test_run_directories_may_be_urls_and_lose_a_last_slash():
    assert resolve("tiny", ("run.dir=s3://b/runs/x/",)).run.dir == "s3://b/runs/x"
    assert resolve("tiny", ("run.dir=runs/a://b",)).run.dir == "runs/a://b"


def test_files_are_written_listed_read_and_removed(stored, tmp_path):
    assert not stored.exists()
    assert list(stored.glob("*")) == []
    with pytest.raises(FileNotFoundError):
        list(stored.iterdir())
    files.atomic_write(stored / "a.txt", "text")
    with files.atomic(stored / "b.bin") as partial:
        partial.write_bytes(b"abc")
    with pytest.raises(ValueError, match="stop"), files.atomic(stored / "never"):
        raise ValueError("stop")
    (stored / "empty").mkdir()
    assert (stored / "empty").is_dir()
    assert list((stored / "empty").iterdir()) == []
    with files.atomic_directory(stored / "folder") as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "c").write_text("c")
    assert stored.file_sizes() == {"a.txt": 4, "b.bin": 3, "folder/deep/c": 1}
    assert [path.name for path in stored.iterdir()] == ["a.txt", "b.bin", "empty", "folder"]
    assert [path.name for path in stored.glob("*.txt")] == ["a.txt"]
    assert (stored / "a.txt").is_file()
    assert not (stored / "a.txt").is_dir()
    assert readers.read_text(stored / "a.txt") == "text"
    with pytest.raises(ValueError, match="more than 2 bytes"):
        readers.read_bytes(stored / "b.bin", 2)
    with pytest.raises(FileNotFoundError):
        readers.read_bytes(stored / "never")
    assert files.download_directory(stored / "folder", tmp_path) == ["deep/c"]
    (stored / "a.txt").unlink()
    (stored / "a.txt").unlink()
    files.remove_directory(stored / "folder")
    assert stored.file_sizes() == {"b.bin": 3}


def test_names_are_no_patterns_when_objects_are_removed(stored):
    for name in ("lr[12]", "lr1", "lr2"):
        (stored / name / "a").write_bytes(b"a")
        (stored / name / "b").write_bytes(b"b")
    (stored / "lr[12]").remove_all("a")
    assert stored.file_sizes() == {f"{name}/{x}": 1 for name in ("lr1", "lr2") for x in "ab"}


def test_the_beginning_of_an_object_is_read_without_the_rest(stored, tmp_path, monkeypatch):
    page = b"<title>solrl report</title>" + b"x" * 10_000
    (stored / "report.html").write_bytes(page)
    (stored / "other.html").write_bytes(b"x" * 1000 + page)
    (stored / "empty").write_bytes(b"")
    (tmp_path / "report.html").write_bytes(page)
    monkeypatch.setattr(StorePath, "read_bytes", lambda path: pytest.fail("read as a whole"))
    assert [is_page(stored / name) for name in ("report.html", "other.html", "empty", "none")] == [
        True,
        False,
        False,
        False,
    ]
    assert is_page(tmp_path / "report.html")
    for path in (stored, tmp_path):
        assert readers.read_start(path / "report.html", 12) == page[:12]
        assert readers.read_start(path / "report.html", 20_000) == page
    (stored / "folder" / "page").write_bytes(page)
    for name in ("folder", "never"):
        with pytest.raises(FileNotFoundError):
            readers.read_start(stored / name, 12)


def test_a_sealed_directory_is_compared_with_its_manifest(stored, tmp_path):
    (tmp_path / "x").write_bytes(b"x" * 10)
    (tmp_path / "y").write_bytes(b"y")
    files.write_manifest(tmp_path)
    files.upload_directory(tmp_path, stored)
    assert files.stored_damage(stored) is None
    (stored / "z").write_bytes(b"")
    assert files.stored_damage(stored) == "unknown file z"
    (stored / "x").write_bytes(b"x")
    assert files.stored_damage(stored) == "x has 1 bytes, not the number that was written"
    (stored / "x").unlink()
    assert files.stored_damage(stored) == "missing file x"
    (stored / files.MANIFEST).write_bytes(b"[]")
    assert files.stored_damage(stored) == "manifest.json is damaged"
    (stored / files.MANIFEST).unlink()
    assert files.stored_damage(stored).startswith("manifest.json cannot be read: ")


def test_the_last_start_owns_a_directory(stored):
    with files.exclusive_lock(stored):
        files.check_owner(stored)
        (stored / ".lock").write_bytes(b"process 7 on elsewhere")
        with pytest.raises(RunError, match=rf"taken over .* {stored}: process 7 on elsewhere$"):
            files.check_owner(stored)
    assert (stored / ".lock").exists()  # it is the lock of the other one
    with files.exclusive_lock(stored):
        files.check_owner(stored)
    assert not (stored / ".lock").exists()


def test_a_store_that_refuses_is_one_line(stored, object_store):
    files.atomic_write(stored / "a", "a")
    with object_store.refusing(lambda method, path: True):
        with pytest.raises(StoreError, match=rf"^{stored}/a: permission denied \(.+\)$"):
            (stored / "a").read_bytes()
        with pytest.raises(StoreError, match=r"permission denied \(Forbidden\)$"):
            (stored / "a").exists()
        with pytest.raises(RunError, match=rf"^permission denied .* while writing {stored}/b$"):
            files.atomic_write(stored / "b", "b")
        with pytest.raises(
            InputError, match=rf"^the run directory {stored} cannot be written: per"
        ):
            files.writable_directory(stored)
    missing = run_path("s3://no-such-bucket/run")
    with pytest.raises(InputError, match=r"written: there is no bucket no-such-bucket$"):
        files.writable_directory(missing)
    assert files.writable_directory(stored) == stored
    assert stored.file_sizes() == {"a": 1}


def test_a_store_whose_package_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r"^gs:// needs gcsfs: pip install 'solrl_jax\[stores\]'$"):
        run_path("gs://bucket/run").exists()


def test_buckets_are_never_created(object_store):
    with pytest.raises(InputError):
        files.writable_directory(run_path("s3://another-bucket/run"))
    assert ("PUT", "/another-bucket") not in object_store.requests
