"""Prompt files as benchmarks and trainers ship them: JSON, JSON lines, CSV, TSV and Parquet."""

import csv
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from solrl_jax.data.prompts import load_prompts
from solrl_jax.errors import InputError

PROMPTS = ["a red circle", "a blue square, above a star", "two green triangles"]
LINES = "".join(json.dumps({"prompt": p, "tag": "colors"}) + "\n" for p in PROMPTS)


def write_table(path, delimiter, header):
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(header)
        writer.writerows([p, "Colors"] for p in PROMPTS)
    return str(path)


def test_parquet_text_and_lists_have_several_types(tmp_path):
    table = pa.table(
        {
            "prompt": pa.array(PROMPTS, pa.string_view()),
            "tag": pa.array(["colors"] * 3, pa.string_view()),
            "names": pa.array([["a"], [], ["b", "c"]], pa.list_view(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "views.parquet")
    prompts = load_prompts(str(tmp_path / "views.parquet"), "f")
    assert prompts == PROMPTS
    assert prompts[2].metadata == {"tag": "colors", "names": ["b", "c"]}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_of_texts(tmp_path, indent):
    path = tmp_path / "list.json"
    path.write_text(json.dumps(PROMPTS, indent=indent))
    assert load_prompts(str(path), "f") == PROMPTS


def test_a_json_list_of_objects(tmp_path):
    path = tmp_path / "list.JSON"
    path.write_text(json.dumps([{"caption": p, "text": "go"} for p in PROMPTS]))
    prompts = load_prompts(str(path), "f")
    assert prompts == PROMPTS
    assert prompts[0].metadata == {"text": "go"}
    with pytest.raises(InputError, match="'go' comes twice, with different metadata"):
        load_prompts(f"{path}:text", "f")


@pytest.mark.parametrize("ending", ["jsonl", "JSONL", "ndjson", "jsonlines", "json"])
def test_json_lines_by_all_their_names(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    path.write_text(LINES)
    prompts = load_prompts(str(path), "f")
    assert prompts == PROMPTS
    assert prompts[2].metadata == {"tag": "colors"}


@pytest.mark.parametrize(
    ("name", "delimiter", "header"),
    [
        ("drawbench.csv", ",", ["Prompts", "Category"]),
        ("parti.tsv", "\t", ["Prompt", "Category"]),
        ("captions.CSV", ",", ["caption", "Category"]),
    ],
)
def test_tables_with_a_header(tmp_path, name, delimiter, header):
    prompts = load_prompts(write_table(tmp_path / name, delimiter, header), "f")
    assert prompts == PROMPTS
    assert prompts[1].metadata == {"Category": "Colors"}


def test_a_tsv_file_may_have_quotation_marks_that_quote_nothing(tmp_path):
    path = tmp_path / "parti.tsv"
    path.write_text('Prompt\tNote\n"Hello" on a sign\tx\n5" of rain\ty\n')
    assert load_prompts(str(path), "f") == ['"Hello" on a sign', '5" of rain']


def test_a_parquet_file_without_the_columns_that_json_has_no_values_for(tmp_path):
    path = tmp_path / "table.parquet"
    columns = {
        "prompt": PROMPTS,
        "image": [b"png"] * 3,
        "score": [1.5, float("nan"), None],
        "objects": [["circle"], [], ["a", "b"]],
    }
    pq.write_table(pa.table(columns), path)
    prompts = load_prompts(str(path), "f")
    assert prompts == PROMPTS
    assert [p.metadata for p in prompts] == [
        {"score": 1.5, "objects": ["circle"]},
        {"score": None, "objects": []},
        {"score": None, "objects": ["a", "b"]},
    ]


def test_a_parquet_file_whose_texts_are_not_utf8_is_refused_in_one_line(tmp_path):
    path = tmp_path / "latin.parquet"
    latin = pa.array([b"caf\xe9"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"prompt": latin}), path)
    with pytest.raises(InputError, match=r"cannot be read as Parquet \('utf-8' codec") as error:
        load_prompts(str(path), "f")
    assert "\n" not in str(error.value)


def test_a_column_can_be_named(tmp_path):
    path = write_table(tmp_path / "other.csv", ",", ["Description", "prompt"])
    assert load_prompts(f"{path}:Description", "f") == PROMPTS
    assert load_prompts(f"{path}:Description", "f")[0].metadata == {"prompt": "Colors"}
    parquet = tmp_path / "other.parquet"
    pq.write_table(pa.table({"words": PROMPTS}), parquet)
    assert load_prompts(f"{parquet}:words", "f") == PROMPTS
    named = tmp_path / "odd.csv:words"
    named.write_text("a dog\na cat\n")
    assert load_prompts(str(named), "f") == ["a dog", "a cat"]


def test_a_table_may_repeat_a_prompt_in_another_row(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("prompt,kind\na dog,x\na cat,x\na dog,y\n")
    prompts = load_prompts(str(path), "f")
    assert prompts == ["a dog", "a cat"]
    assert prompts[0].metadata == {"kind": "x"}
    assert len(load_prompts(str(path), "f", distinct=False)) == 3


@pytest.mark.parametrize("content", [LINES, json.dumps(PROMPTS), json.dumps(PROMPTS, indent=2)])
def test_json_in_a_text_file_is_refused_with_a_hint(tmp_path, content):
    path = tmp_path / "rows.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=r"its lines look like JSON; .* must end in \.jsonl"):
        load_prompts(str(path), "f")


def test_brackets_and_quotation_marks_are_text(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text('[photo] a dog\n{a|b} cat\n"a bird"\n')
    assert load_prompts(str(path), "f") == ["[photo] a dog", "{a|b} cat", '"a bird"']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "Words,kind\na dog,x\n", "no column prompt, Prompt, Prompts, caption, text;"),
        ("a.csv:words", "prompt\na dog\n", "no column 'words'; there are ['prompt']"),
        ("a.csv", "prompt,kind\na dog,x,y\n", "line 2: 3 values, but the header has 2"),
        ("a.csv", 'prompt\n"a dog\n', "not CSV ("),
        ("a.tsv", "prompt\tkind\na dog\t" + "x" * 2**18, "not TSV (field larger than field limit"),
        ("a.csv", "prompt,kind\n,x\n", "line 2: expected text in the column 'prompt'"),
        ("a.csv", "prompt,kind\n", "holds no prompt"),
        ("a.json", "a dog\n", "not JSON ("),
        ("a.json", "3", "expected a JSON list of texts or of objects"),
        ("a.json", '["a dog", 3]', 'item 2: expected an object with the text under "prompt"'),
        ("a.parquet", "PAR1", "cannot be read as Parquet ("),
    ],
)
def test_files_without_prompts_are_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name.partition(":")[0]).write_text(content)
    path = str(tmp_path / name)
    with pytest.raises(InputError, match=re.escape(f"prompts.train={path!r}: {message}")) as error:
        load_prompts(path, "prompts.train")
    assert "\n" not in str(error.value)
