"""Prompt sets of the hub: which files hold a split, and reading them with and without a network."""

import io
import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from solrl_jax.data.hub_prompts import find_splits, parse_reference
from solrl_jax.data.prompts import load_prompts
from solrl_jax.errors import InputError
from tests.hub_server import COMMIT, serve

CARD = """---
license: mit
configs:
- config_name: other
  data_files: other/*.jsonl
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: unseen
    path:
    - extra/a.parquet
    - extra/b.parquet
---
# A data set
"""


def parquet(**columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


DATASET = {
    "README.md": CARD.encode(),
    "other/x.jsonl": b'{"prompt": "of another configuration"}\n',
    "data/train-00000-of-00002.parquet": parquet(prompt=["a cat", "a dog"], likes=[3, 4]),
    "data/train-00001-of-00002.parquet": parquet(prompt=["a bird", "a cat"], likes=[5, 6]),
    "extra/a.parquet": parquet(Beschreibung=["ein Haus"], image=[b"\xff\xd8"]),
    "extra/b.parquet": parquet(Beschreibung=["ein Baum"], image=[b"\xff\xd8"]),
}

SERIES = ["b/train-00000-of-00001.csv", *(f"c/train-0000{i}-of-00002.csv" for i in range(2))]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Puts a data set into an empty cache of the hub, in the layout of its client."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(files, name="owner/set"):
        folder = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        for path, content in files.items():
            file = folder / "snapshots" / COMMIT / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    return put


def read(path):
    return load_prompts(path, "prompts.train")


def refused(path):
    with pytest.raises(InputError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"prompts.train={path!r}: ")
    assert "\n" not in message
    return message


def test_a_cached_set_is_read_without_a_network_with_its_other_columns(cache):
    cache(DATASET)
    prompts = read("hub:owner/set")
    assert prompts == ["a cat", "a dog", "a bird"]
    assert [p.metadata["likes"] for p in prompts] == [3, 4, 5]
    assert read("hub:owner/set:train") == prompts
    assert read("hub:owner/set:unseen:Beschreibung") == ["ein Haus", "ein Baum"]
    assert read("hub:owner/set::prompt") == prompts


def test_what_is_not_there_is_one_line_that_says_what_is(cache):
    cache(DATASET)
    assert refused("hub:owner/set:test").endswith("no split 'test'; there are train, unseen")
    assert "no column 'text'; there are ['prompt', 'likes']" in refused("hub:owner/set::text")
    assert "hub:OWNER/DATASET:SPLIT:COLUMN" in refused("hub:owner/set:unseen")
    assert "is no name OWNER/DATASET" in refused("hub:nothing")
    message = refused("hub:owner/absent")
    assert "cannot be downloaded from the Hub (HF_HUB_OFFLINE is set): " in message


def test_a_set_without_its_other_files_is_refused(cache):
    cache({name: content for name, content in DATASET.items() if "00001" not in name})
    message = refused("hub:owner/set")
    assert "only 1 of the 2 files data/train-*-of-00002 of the split 'train' are there" in message


def test_every_series_of_files_of_a_split_is_counted(cache):
    files = {f"b/train-0000{i}-of-00003.csv": b"prompt\na cat\n" for i in (0, 2)}
    cache({"a/train.csv": b"prompt\na dog\n"} | files)
    message = refused("hub:owner/set")
    assert "only 2 of the 3 files b/train-*-of-00003 of the split 'train' are there" in message
    cache(
        {"a/train.csv": b"prompt\na dog\n"} | dict.fromkeys(SERIES, b"prompt\na cat\n"), "owner/b"
    )
    assert read("hub:owner/b") == ["a dog", "a cat"]


def test_a_set_without_any_prompt_file_is_refused(cache):
    cache({"README.md": b"# nothing", "image.png": b""})
    assert "the data set has no files that end in .parquet, " in refused("hub:owner/set")


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["prompts.txt", ".gitattributes", "README.md"], {"train": ["prompts.txt"]}),
        (["a/prompts.txt", "a/.old/train.csv"], {"train": ["a/prompts.txt"]}),
        (
            ["train.jsonl", "val.jsonl", "eval/x.jsonl", "dataset_infos.json", "notes.txt"],
            {"train": ["train.jsonl"], "validation": ["val.jsonl"], "test": ["eval/x.jsonl"]},
        ),
        (
            ["data/liked-00000-of-00001-0123abc.parquet", "data/train-00000-of-00001.parquet"],
            {
                "liked": ["data/liked-00000-of-00001-0123abc.parquet"],
                "train": ["data/train-00000-of-00001.parquet"],
            },
        ),
        (["trainer.csv", "contest.csv"], {"train": ["contest.csv", "trainer.csv"]}),
        ([], {}),
    ],
)
def test_without_a_card_the_names_of_the_files_say_the_split(files, splits):
    assert find_splits(files, {}) == splits


@pytest.mark.parametrize(
    "data_files", ["a/*.csv", ["a/x.csv", "a/y.csv"], {"train": "a/?.csv"}], ids=str
)
def test_a_card_may_name_the_files_of_one_split_in_several_ways(data_files):
    card = {"configs": [{"config_name": "plain", "data_files": data_files}]}
    assert find_splits(["a/x.csv", "a/y.csv", "b/z.csv"], card) == {"train": ["a/x.csv", "a/y.csv"]}


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("*.csv", ["x.csv"]),
        ("./x.csv", ["x.csv"]),
        ("/x.csv", ["x.csv"]),
        ("*/*.csv", ["old/x.csv"]),
        ("old/*", ["old/x.csv"]),
        ("old/**", ["old/new/x.csv", "old/x.csv"]),
        ("old/**/x.csv", ["old/new/x.csv", "old/x.csv"]),
        ("**/*.csv", ["old/new/x.csv", "old/x.csv", "x.csv"]),
        ("**", ["old/new/x.csv", "old/x.csv", "x.csv"]),
        ("**.csv", ["old/new/x.csv", "old/x.csv", "x.csv"]),
        ("old/new/[w-y].csv", ["old/new/x.csv"]),
        ("old**/x.csv", ["old/x.csv"]),
        ("new/*.csv", []),
    ],
)
def test_patterns_of_a_card_match_as_the_hubs(pattern, files):
    card = {"configs": [{"data_files": pattern}]}
    names = ["x.csv", "old/x.csv", "old/new/x.csv"]
    splits = find_splits(names, card)
    assert splits == ({"train": files} if files else {})
    card["configs"][0]["data_dir"] = "./top/"
    moved = find_splits([f"top/{name}" for name in names], card)
    assert moved == {split: [f"top/{name}" for name in paths] for split, paths in splits.items()}


def test_a_column_may_hold_a_colon():
    assert parse_reference("hub:a/b:train:c:d", "f") == ("a/b", "train", "c:d")


def online(tmp_path, environment, path):
    """The prompts that another process reads from the server, or its error."""
    code = (
        "import sys, json\n"
        "from solrl_jax.data.prompts import load_prompts\n"
        "try: print(json.dumps(load_prompts(sys.argv[1], 'prompts.train')))\n"
        "except ValueError as error: print(json.dumps(str(error)))\n"
    )
    places = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path / "home")}
    process = subprocess.run(
        [sys.executable, "-c", code, path],
        env=os.environ | environment | places,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.slow
def test_a_set_is_downloaded_once_and_only_the_files_of_the_split(tmp_path, monkeypatch):
    huge = {"README.md": b"# big", "train.parquet": b"x"}
    odd = {"README.md": b"# odd", "train[1].csv": b"prompt\na house\n"}
    sets = {"set": dict(DATASET), "huge": huge, "odd": odd}
    with serve({f"datasets/owner/{name}": files for name, files in sets.items()}) as served:
        _, environment = served
        prompts = online(tmp_path, environment, "hub:owner/set")
        assert online(tmp_path, environment, "hub:owner/odd") == ["a house"]
        absent = online(tmp_path, environment, "hub:owner/absent")
    assert prompts == ["a cat", "a dog", "a bird"]
    assert re.match(
        r"prompts.train='hub:owner/absent': cannot be downloaded from the Hub: .*404", absent
    )
    snapshot = tmp_path / "hub" / "datasets--owner--set" / "snapshots" / COMMIT
    names = sorted(str(f.relative_to(snapshot)) for f in snapshot.rglob("*") if f.is_file())
    assert names == ["README.md", *(f"data/train-0000{i}-of-00002.parquet" for i in range(2))]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read("hub:owner/set") == prompts
