"""Odd values in every field of every released and embedded configuration: the pipeline opens, or
one line names the field.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solrl_jax.errors import InputError
from solrl_jax.models.locate import EMBEDDED_FOLDER, open_model
from solrl_jax.storage.hub import CARRIED
from tests.hostile.harness import PEAK, at_most, memory
from tests.hostile.test_mutations import ODD, examples

pytestmark = pytest.mark.slow

ABSENT = "a field that is taken away"
WRONG: tuple[Any, ...] = (
    ABSENT,
    None,
    True,
    0,
    -3,
    1,
    1.5,
    10**9,
    10**30,
    1e300,
    "",
    "x",
    [],
    [1],
    [0, -1],
    [10**9] * 4,
    [[[[1]]]],
    {},
    {"a": {}},
)
SECONDS = 60
PIPELINES = sorted(
    index.parent for root in (CARRIED, EMBEDDED_FOLDER) for index in root.rglob("model_index.json")
)


def files_of(pipeline: Path) -> Iterator[Path]:
    """Its JSON files that `open_model` reads: not those of tokenizers."""
    yield from (
        file
        for file in sorted(pipeline.rglob("*.json"))
        if not file.parent.name.startswith("tokenizer")
    )


FIELDS = [
    (pipeline, file.relative_to(pipeline), field)
    for pipeline in PIPELINES
    for file in files_of(pipeline)
    for field in json.loads(file.read_text())
]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """By pipeline, a copy of its JSON files."""
    folders = {}
    for pipeline in PIPELINES:
        folders[pipeline] = tmp_path_factory.mktemp(pipeline.name) / "model"
        shutil.copytree(pipeline, folders[pipeline], ignore=shutil.ignore_patterns("*.safetensors"))
    return folders


def problem(folder: Path, file: Path, field: str, value: Any) -> str | None:
    """Why the pipeline must not open, or fail, as it does with this value; None if it may."""
    content = (folder / file).read_text()
    before = memory("VmRSS")
    fields = json.loads(content) | {field: value}
    text = json.dumps({name: one for name, one in fields.items() if one is not ABSENT})
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    (folder / file).write_text(text)
    try:
        with at_most(SECONDS):
            pipeline = open_model(str(folder))
            assert pipeline.transformer.num_parameters > 0
            with contextlib.suppress(ValueError):  # a model may be too small for this size
                assert min(pipeline.latent_shape(1024, 1024)) > 0
    except InputError as error:
        message = str(error)
        if "\n" in message or len(message) > 1000:
            return f"{len(message)} characters: {message[:500]}"
        if str(folder) not in message:
            return f"names no file: {message}"
        if (
            field not in message and "does not fit" not in message
        ):  # what contradicts another file names both
            return f"names no field: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        (folder / file).write_text(content)
    if (peak := memory("VmHWM") - before) > PEAK:
        return f"took {peak / 1e9:.1f} GB"
    return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda path: path.name)
def test_every_wrong_value_of_every_field(pipeline, copies):
    problems = {
        f"{file}: {field}={value!r}": why
        for owner, file, field in FIELDS
        if owner == pipeline
        for value in WRONG
        if (why := problem(copies[pipeline], file, field, value))
    }
    assert problems == {}


@pytest.mark.exhaustive
def test_odd_values_of_any_field(copies):
    @examples(40)
    @given(st.sampled_from(FIELDS), st.one_of(ODD, st.sampled_from(WRONG)))
    def change(where: tuple[Path, Path, str], value: Any) -> None:
        pipeline, file, field = where
        assert problem(copies[pipeline], file, field, value) is None

    change()
