"""Valid files with random damage: whatever is done to them, a command succeeds or says one line,
within its limits.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solrl_jax.models.locate import EMBEDDED_FOLDER
from tests.hostile.harness import call

pytestmark = pytest.mark.slow

# examples of each kind of file
QUICK = 4
THOROUGH = 150
MODEL = EMBEDDED_FOLDER / "tiny-sana"
ODD: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-100, 100),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-3, 3), max_size=3),
    st.just([[[[]]]]),
    st.just({"a": {"b": [None]}}),
)


@st.composite
def damage(draw: Any, content: bytes) -> bytes:
    """The content with some bytes changed, taken away or put in, or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        what = draw(st.sampled_from(("flip", "cut", "insert", "remove", "twice")))
        if what == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del data[at:]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif what == "remove":
            del data[at : at + draw(st.integers(1, 50))]
        else:
            data += data[at:]
    return bytes(data)


@st.composite
def changed(draw: Any, tree: Any) -> Any:
    """A JSON value in which one place holds something else."""
    if isinstance(tree, dict) and tree and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(tree)))
        if not draw(st.integers(0, 5)):
            return {name: value for name, value in tree.items() if name != key}
        return tree | {key: draw(changed(tree[key]))}
    if isinstance(tree, list) and tree and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], draw(changed(tree[at])), *tree[at + 1 :]]
    return draw(ODD)


@contextlib.contextmanager
def copy(source: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / "copy")
        yield Path(folder) / "copy"


def check(*arguments: str, seconds: float = 60) -> None:
    outcome = call(list(arguments), seconds)
    assert outcome.problem(seconds) is None, outcome.problem(seconds)


def examples(count: int) -> Any:
    every = list(HealthCheck)
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=every,
    )


BOTH = pytest.mark.parametrize(
    "count", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.exhaustive)]
)
JSON = (
    "model_index.json",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/config.json",
    "tokenizer/tokenizer_config.json",
    "scheduler/scheduler_config.json",
)


@BOTH
@pytest.mark.parametrize("file", JSON)
def test_json_of_a_model(file, count):
    original = (MODEL / file).read_bytes()

    @examples(count)
    @given(
        st.one_of(
            damage(original),
            changed(json.loads(original)).map(lambda tree: json.dumps(tree).encode()),
        )
    )
    def mutate(content: bytes) -> None:
        with copy(MODEL) as model:
            (model / file).write_bytes(content)
            check("layers", "tiny", f"model.path={model}")

    mutate()


@BOTH
def test_safetensors_of_a_model(count):
    file = "transformer/diffusion_pytorch_model.safetensors"
    original = (MODEL / file).read_bytes()
    size = 8 + int.from_bytes(original[:8], "little")
    header = json.loads(original[8:size])

    def file_of(tree: Any) -> bytes:
        text = json.dumps(tree).encode()
        return len(text).to_bytes(8, "little") + text + original[size:]

    @examples(count)
    @given(
        st.one_of(
            damage(original[:size]).map(lambda head: head + original[size:]),
            changed(header).map(file_of),
        )
    )
    def mutate(content: bytes) -> None:
        with copy(MODEL) as model:
            (model / file).write_bytes(content)
            check("layers", "tiny", f"model.path={model}", "--errors")

    mutate()


@BOTH
def test_the_configuration_of_a_run(count, run):
    original = (run / "config.yaml").read_bytes()

    @examples(count)
    @given(damage(original))
    def mutate(content: bytes) -> None:
        with copy(run) as mine:
            (mine / "config.yaml").write_bytes(content)
            check("layers", str(mine))
            check("presets", "--show", "tiny", f"prompts.train={mine / 'config.yaml'}")

    mutate()


def reads_as(content: bytes, original: bytes) -> bool:
    """Whether two texts are the same JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(content) == json.loads(original)
    return False


@BOTH
@pytest.mark.parametrize(
    "file", ["meta.json", "manifest.json", "arrays/manifest.ocdbt", "arrays/_METADATA"]
)
def test_checkpoints_of_a_run(file, count, run):
    original = (run / "checkpoints" / "000002" / file).read_bytes()

    @examples(max(count // 3, 1))
    @given(damage(original))
    def mutate(content: bytes) -> None:
        with copy(run) as mine:
            (mine / "checkpoints" / "000002" / file).write_bytes(content)
            outcome = call(
                ["export", str(mine), "--out", str(mine / "x.safetensors"), "--json"], 60
            )
            assert outcome.problem(60) is None, outcome.problem(60)
            # nothing vouches for the manifest's own bytes: one with other spaces says the same
            if content != original and not (
                file == "manifest.json" and outcome.code == 0 and reads_as(content, original)
            ):
                assert json.loads(outcome.out)["iteration"] == 1  # the one before

    mutate()


@BOTH
@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "run.json", "ledger/iteration-000002.parquet", "config.yaml"]
)
def test_what_a_run_recorded(file, count, run):
    original = (run / file).read_bytes()

    @examples(count)
    @given(damage(original))
    def mutate(content: bytes) -> None:
        with copy(run) as mine:
            (mine / file).write_bytes(content)
            check("report", str(mine), "--out", str(mine / "x.html"))

    mutate()


@BOTH
def test_lines_of_prompts(count):
    line = (
        b'{"prompt": "a red circle",'
        b' "include": [{"class": "circle", "count": 1, "color": "red"}], "tag": "one"}\n'
    )

    @examples(4 * count)
    @given(
        st.one_of(
            damage(line), changed(json.loads(line)).map(lambda tree: json.dumps(tree).encode())
        )
    )
    def mutate(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "p.jsonl").write_bytes(content)
            check("presets", "--show", "tiny", f"prompts.train={folder}/p.jsonl")

    mutate()
