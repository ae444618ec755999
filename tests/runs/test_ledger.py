"""The ledger: exact types, nulls apart from NaN, the same bytes when written again."""

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from solrl_jax.errors import InputError, RunError
from solrl_jax.runs import ledger

ROWS = 6


def columns(**changes):
    kept = np.array([True, False, False, True, False, True])
    return {
        "prompt": np.array(
            ["a red circle", "a red circle", "a red circle", "un café", "un café", "un café"]
        ),
        "prompt_uid": np.array([7, 7, 7, 2**32 - 1, 2**32 - 1, 2**32 - 1]),
        "candidate": np.arange(ROWS) % 3,
        "seed": np.array([0, 1, 2**63, 2**64 - 1, 3, 4], np.uint64),
        "precision": "nvfp4",
        "steps": 6,
        "proxy_reward": np.array([0.5, np.nan, -np.inf, 0.1, 0.2, 0.3], np.float32),
        "rank": np.array([0, 1, 2, 2, 1, 0]),
        "kept": kept,
        "regenerated_reward": np.ma.masked_array(np.linspace(0, 1, ROWS), ~kept),
        "advantage": np.ma.masked_array([1, 0, 0, np.nan, 0, -1], ~kept),
        "policy_revision": 12,
        **changes,
    }


def test_any_directory_name_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("flux:seed1", "~", "a b", "s3:"):
        path = ledger.write(Path(name), 1, columns())
        assert path.stat().st_size > 0
        assert ledger.read(Path(name), 1).num_rows == ROWS


def test_a_row_reads_back_exactly(tmp_path):
    path = ledger.write(tmp_path / "ledger", 12, columns())
    assert path == tmp_path / "ledger" / "iteration-000012.parquet"
    table = pq.read_table(tmp_path / "ledger")
    assert table.schema.equals(ledger.SCHEMA, check_metadata=True)
    rows = table.to_pylist()
    assert len(rows) == ROWS
    assert rows[0] == {
        **{
            "iteration": 12,
            "prompt": "a red circle",
            "prompt_uid": 7,
            "candidate": 0,
            "seed": 0,
            "precision": "nvfp4",
        },
        **{
            "steps": 6,
            "proxy_reward": 0.5,
            "rank": 0,
            "kept": True,
            "regenerated_reward": 0.0,
            "advantage": 1.0,
        },
        "policy_revision": 12,
    }
    assert rows[3]["seed"] == 2**64 - 1
    assert rows[3]["prompt_uid"] == 2**32 - 1


def test_nan_stays_and_null_is_what_is_masked(tmp_path):
    ledger.write(tmp_path, 0, columns())
    table = pq.read_table(tmp_path)
    assert table["proxy_reward"].null_count == 0
    assert np.isnan(table["proxy_reward"][1].as_py())
    assert np.isnan(table["advantage"][3].as_py())
    for name in ("regenerated_reward", "advantage"):
        assert table[name].is_null().to_pylist() == [False, True, True, False, True, False]


def test_a_mask_or_none_decides_the_nulls(tmp_path):
    masked = np.ma.masked_array(np.arange(ROWS, dtype=np.float32), [1, 1, 0, 0, 0, 0])
    ledger.write(tmp_path, 0, columns(regenerated_reward=masked, advantage=None))
    table = pq.read_table(tmp_path)
    assert table["regenerated_reward"].to_pylist() == [None, None, 2, 3, 4, 5]
    assert table["advantage"].null_count == ROWS


def test_what_is_masked_out_leaves_no_trace_in_the_bytes(tmp_path):
    first = ledger.write(tmp_path, 3, columns()).read_bytes()
    other = np.ma.masked_array(
        np.where(columns()["kept"], np.linspace(0, 1, ROWS), 99.0), ~columns()["kept"]
    )
    assert ledger.write(tmp_path, 3, columns(regenerated_reward=other)).read_bytes() == first


def test_the_files_sort_by_iteration(tmp_path):
    for iteration in (10, 2, 1_000_000):
        ledger.write(tmp_path, iteration, columns())
    assert pq.read_table(tmp_path)["iteration"].unique().to_pylist() == [2, 10, 1_000_000]


def test_resume_discards_what_came_after(tmp_path):
    for iteration in range(5):
        ledger.write(tmp_path, iteration, columns())
    others = [
        "iteration-0000099.parquet",
        "notes.txt",
    ]  # no ledger writes six digits and a zero before them
    for name in others:
        (tmp_path / name).touch()
    ledger.discard_after(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [*(f"iteration-{i:06d}.parquet" for i in range(3)), *others]
    )
    ledger.discard_after(tmp_path / "absent", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": np.arange(5)},
        {"seed": np.array([0, 1, 2, 3, 4, -1])},
        {"prompt_uid": 2**32},
        {"candidate": np.linspace(0, 1, ROWS)},
        {"steps": np.nan},
    ],
)
def test_wrong_columns_are_refused(tmp_path, change):
    with pytest.raises((ValueError, TypeError)):
        ledger.write(tmp_path, 0, columns(**change))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("rows", "letters", "words"), [(10**7, 1, "accepted are"), (2000, 10**6, "bytes of text")]
)
def test_a_file_that_unpacks_to_gigabytes_is_refused_before_that(rows, letters, words, tmp_path):
    """A column of one value takes no room on the disk."""
    column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int8), [letters * "a"])
    pq.write_table(pa.table({"kept": column}), ledger.path_of(tmp_path, 1), store_schema=False)
    with pytest.raises(InputError, match=words):
        ledger.read(tmp_path, 1)


def test_a_full_disk_keeps_the_file_before(tmp_path, monkeypatch):
    before = ledger.write(tmp_path, 0, columns()).read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(ledger.pq, "write_table", full)
    with pytest.raises(RunError, match=r"^disk full while writing .*iteration-000000.parquet$"):
        ledger.write(tmp_path, 0, columns(steps=10))
    assert os.listdir(tmp_path) == ["iteration-000000.parquet"]
    assert ledger.path_of(tmp_path, 0).read_bytes() == before


def test_every_column_says_what_it_is():
    for field in ledger.SCHEMA:
        assert len(field.metadata[b"description"]) > 10, field.name
    assert [field.name for field in ledger.SCHEMA if field.nullable] == [
        "regenerated_reward",
        "advantage",
    ]
