"""A file that `storage.files` writes appears whole, or not at all, and with usual permissions."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from solrl_jax.storage import files


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    """safetensors creates its files readable by their owner alone."""
    plain = tmp_path / "plain"
    plain.touch()
    with files.atomic(tmp_path / "weights.safetensors") as partial:
        save_file({"w": np.zeros(3)}, partial)
    files.atomic_write(tmp_path / "text", "text")
    assert plain.stat().st_mode & 0o077  # otherwise the test could not fail
    for name in ("weights.safetensors", "text"):
        assert (tmp_path / name).stat().st_mode == plain.stat().st_mode


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    files.atomic_write(path, "old")

    def stop_half_way():
        with files.atomic(path) as partial:
            partial.write_text("half")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years")
    for target in ("theirs", "missing"):
        link = tmp_path / f"to-{target}"
        link.symlink_to(target)
        with files.atomic_directory(link) as partial:
            (partial / "a").write_text("ours")
        assert not link.is_symlink()
        assert (link / "a").read_text() == "ours"
    assert (tmp_path / "theirs" / "thesis.tex").read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs", "to-missing", "to-theirs"]
