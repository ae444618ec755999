"""The text encoders and their cache: an encoding has the same bits computed or read, and its key
holds all it depends on.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from solrl_jax.cli import encode as encode_command
from solrl_jax.cli import main
from solrl_jax.cli.encode import fill_cache
from solrl_jax.data.prompts import Prompt
from solrl_jax.errors import InputError, RunError
from solrl_jax.models.backbone import open_text_encoders
from solrl_jax.models.loading.component import Component
from solrl_jax.models.locate import open_model
from solrl_jax.models.text_encoders.encode import TextEncoders
from solrl_jax.parallel import hosts, sharding
from solrl_jax.rl.experiment import build
from solrl_jax.rl.generate import prepare
from tests.cases import first_is_quick
from tests.pipelines import save_flux_pipeline, save_pipeline, save_sd3_pipeline
from tests.small import small_config

TOKENS = 8  # of a prompt
PROMPTS = [
    "a red star",
    "",
    "one happy cat left of the green triangle",
    "two",
    "star",
    "three small dog above a photo",
    "blue " * 20,
    "large yellow square",
    "a cat and a dog",
    "the circle",
    "red",
]


def bits(encoding) -> dict[str, tuple]:
    return {
        name: (np.asarray(x).dtype, x.shape, np.asarray(x).tobytes())
        for name, x in encoding.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_pipeline(root / "sana")
    save_flux_pipeline(root / "flux")
    save_sd3_pipeline(root / "sd3")
    return root


def encoders_of(
    folder: Path, cache=None, precision: str = "bf16", data: int = 1, fsdp: int = 1
) -> TextEncoders:
    mesh = sharding.make_mesh(data, fsdp)
    return open_text_encoders(
        open_model(str(folder)), precision, mesh, None if cache is None else str(cache)
    )


@pytest.fixture
def no_loading(monkeypatch):
    def load(self, *_):
        pytest.fail(f"{self.source} was loaded")

    return lambda: monkeypatch.setattr(Component, "load", load)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision"),
    [("sana", "fp32"), pytest.param("sd3", "bf16", marks=pytest.mark.exhaustive)],
)  # SD3's three are FLUX's two and one more
def test_an_encoding_does_not_depend_on_batch_mates_place_or_mesh(model, precision, folders):
    one, many = (encoders_of(folders / model, None, precision, *mesh) for mesh in ((1, 1), (2, 4)))
    whole, computed = one.encode(PROMPTS, TOKENS)  # two chunks, the second filled up
    assert computed == len(PROMPTS) > one.prompts_per_chunk
    rows = [bits({name: x[i] for name, x in whole.items()}) for i in range(len(PROMPTS))]
    assert len({str(row) for row in rows}) == len(PROMPTS)  # prompts differ
    backwards, _ = one.encode(PROMPTS[::-1], TOKENS)
    alone = [one.encode([prompt], TOKENS)[0] for prompt in PROMPTS]
    elsewhere, _ = many.encode(PROMPTS, TOKENS)
    for i, row in enumerate(rows):
        assert bits({name: x[len(PROMPTS) - 1 - i] for name, x in backwards.items()}) == row
        assert bits({name: x[0] for name, x in alone[i].items()}) == row
        assert bits({name: x[i] for name, x in elsewhere.items()}) == row


@pytest.mark.slow
def test_encoders_are_loaded_for_what_the_cache_lacks_and_for_nothing_else(
    folders, tmp_path, no_loading
):
    model = folders / "sana"
    computed, _ = encoders_of(model).encode(PROMPTS, TOKENS)
    first = encoders_of(model, tmp_path)
    assert not first.loaded
    some, new = first.encode(PROMPTS[3:7], TOKENS)
    assert (first.loaded, new) == (True, 4)
    first.release()
    assert not first.loaded
    assert bits(first.encode(PROMPTS[3:7], TOKENS)[0]) == bits(some)
    assert not first.loaded
    everything, new = first.encode(PROMPTS, TOKENS)  # some read, some computed
    assert (first.loaded, new) == (True, len(PROMPTS) - 4)
    assert bits(everything) == bits(computed)

    ahead = encoders_of(model, tmp_path / "ahead")
    reports = []
    ahead.encode(PROMPTS[:2], TOKENS)
    ahead.encode_ahead(PROMPTS, TOKENS, None, lambda count, more: reports.append((count, more)))
    assert not ahead.loaded  # what comes next has their room
    assert reports[0] == (len(PROMPTS) - 2, 0)

    def broken_progress(count, more):
        if more:
            raise RuntimeError("the terminal is gone")

    interrupted = encoders_of(model, tmp_path / "interrupted")
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        interrupted.encode_ahead(PROMPTS, TOKENS, None, broken_progress)
    assert not interrupted.loaded

    no_loading()
    assert bits(ahead.encode(PROMPTS, TOKENS)[0]) == bits(computed)
    later = encoders_of(model, tmp_path)
    read, new = later.encode(PROMPTS[::-1], TOKENS)
    assert (later.loaded, new) == (False, 0)
    assert bits({name: x[::-1] for name, x in read.items()}) == bits(computed)
    with pytest.raises(pytest.fail.Exception, match="was loaded"):
        later.encode(["a dog"], TOKENS)


@pytest.mark.slow
def test_a_damaged_entry_is_computed_again_and_replaced(folders, tmp_path):
    first, _ = encoders_of(folders / "sana", tmp_path).encode(PROMPTS[:3], TOKENS)
    entries = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(entries) == 3
    good = [entry.read_bytes() for entry in entries]
    entries[1].write_bytes(good[1][:-9] + bytes([good[1][-9] ^ 64]) + good[1][-8:])
    again, new = encoders_of(folders / "sana", tmp_path).encode(PROMPTS[:3], TOKENS)
    assert new == 1
    assert bits(again) == bits(first)
    assert [entry.read_bytes() for entry in entries] == good


def flip(path: Path) -> None:
    """The lowest bit of one number of one tensor."""
    tensors = load_file(path)
    name = sorted(tensors)[len(tensors) // 2]
    tensors[name].reshape(-1).view(np.int32)[-1] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})


def edit(path: Path, change) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def swap_words(path: Path) -> None:
    def swap(fields):
        vocabulary = fields["model"]["vocab"]
        vocabulary["▁red"], vocabulary["▁blue"] = vocabulary["▁blue"], vocabulary["▁red"]

    edit(path, swap)


OTHERS = {  # what is done to a copy of the model, what else is asked; is it another encoding?
    "the same elsewhere": (lambda m: None, {}, False),
    "the other networks": (
        lambda m: flip(m / "transformer/diffusion_pytorch_model.safetensors"),
        {},
        False,
    ),
    "a time of change": (
        lambda m: os.utime(m / "text_encoder/model.safetensors", (1, 1)),
        {},
        False,
    ),
    "capitals, which SANA does not see": (lambda m: None, {"prompt": " A Red STAR"}, False),
    "a bit of a weight": (lambda m: flip(m / "text_encoder/model.safetensors"), {}, True),
    "config": (
        lambda m: edit(m / "text_encoder/config.json", lambda c: c.update(rms_norm_eps=1e-5)),
        {},
        True,
    ),
    "tokenizer": (lambda m: swap_words(m / "tokenizer/tokenizer.json"), {}, True),
    "dtype": (lambda m: None, {"precision": "fp32"}, True),
    "longest length": (lambda m: None, {"max_tokens": TOKENS + 1}, True),
    "prompt": (lambda m: None, {"prompt": "a red cat"}, True),
    "instruction": (lambda m: None, {"instruction": "a photo of "}, True),
}


@pytest.fixture(scope="module")
def with_one(folders, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    assert encoders_of(folders / "sana", cache).encode(["a red star"], TOKENS)[1] == 1
    return cache


@pytest.mark.parametrize("case", first_is_quick(OTHERS))
def test_a_key_stands_for_all_that_an_encoding_depends_on(
    case, folders, with_one, tmp_path, monkeypatch
):
    change, options, other = OTHERS[case]
    shutil.copytree(folders / "sana", tmp_path / "model")
    shutil.copytree(with_one, tmp_path / "cache")
    change(tmp_path / "model")
    encoders = encoders_of(tmp_path / "model", tmp_path / "cache", options.get("precision", "bf16"))
    computed = []

    def compute(self, tokens):
        computed.extend(tokens["ids"])
        yield from ({"text": np.zeros(1)} for _ in tokens["ids"])

    monkeypatch.setattr(TextEncoders, "_compute", compute)
    encoders.encode(
        [options.get("prompt", "a red star")],
        options.get("max_tokens", TOKENS),
        options.get("instruction"),
    )
    assert len(computed) == other


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_loaded(
    folders, tmp_path, no_loading
):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        InputError, match=r"^model.prompt_cache_dir='.*/file': is a file; expected a directory, ''"
    ):
        encoders_of(folders / "sana", tmp_path / "file")
    no_loading()
    with pytest.raises(
        InputError,
        match=r"^model.prompt_cache_dir='.*/file/x': cannot be written \(.*\);"
        " name another directory",
    ):
        encoders_of(folders / "sana", tmp_path / "file" / "x").encode(["a cat"], TOKENS)


def test_a_failure_of_the_cache_is_one_of_all_processes(folders, tmp_path, monkeypatch):
    """The others would wait for the process that failed. `run_on_every` tells them."""
    asked = []

    def run_on_every(act):
        asked.append(len(asked))
        act()
        if asked[-1] == failing:
            raise RunError("another process failed")

    monkeypatch.setattr(hosts, "run_on_every", run_on_every)
    for failing in range(3):  # while looking up, before loading, and while storing
        asked.clear()
        encoders = encoders_of(folders / "sana", tmp_path / str(failing))
        with pytest.raises(RunError, match="another process failed"):
            encoders.encode(["a red star"], TOKENS)
        assert asked == list(range(failing + 1))


def test_a_cache_that_is_only_read_needs_no_write(folders, with_one, monkeypatch, no_loading):
    no_loading()
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("a file was written"))
    assert encoders_of(folders / "sana", with_one).encode(["a red star"], TOKENS)[1] == 0


# --------------------------------------------------------------------------------------------------
# whole runs


@pytest.mark.slow
def test_a_filled_cache_gives_a_run_all_that_it_asks_to_the_bit(tmp_path, monkeypatch, no_loading):
    sets = tmp_path / "train.txt", tmp_path / "test.txt"
    sets[0].write_text("a red circle\ntwo blue squares\na green triangle\n")
    sets[1].write_text("a yellow circle\na red circle\n")
    options = [
        f"prompts.train={sets[0]}",
        f"prompts.test={sets[1]}",
        f"model.prompt_cache_dir={tmp_path / 'cache'}",
    ]

    def fill():
        return CliRunner().invoke(
            main.cli, ["encode", "tiny", *options, "mesh.data=1", "--json"], catch_exceptions=False
        )

    summary = json.loads(fill().stdout)
    each = 24 * (2 * 64 + 1)  # tokens of 64 numbers in BF16, and of the mask
    assert summary == {
        "cache": str(tmp_path / "cache"),
        "prompts": 5,
        "encoded": 5,
        "bytes_each": each,
    }
    assert json.loads(fill().stdout)["encoded"] == 0

    plain = build(small_config("unused", *options[:2]))
    drawn = [Prompt("two blue squares"), Prompt("a yellow circle")]
    expected = prepare(plain.backbone, None, drawn, 24)
    experiment = build(small_config("unused", *options))
    no_loading()
    got = prepare(experiment.backbone, None, drawn, 24)
    assert not experiment.backbone.text_encoders.loaded
    for ours, theirs in zip(
        jax.tree.leaves(got.conditions), jax.tree.leaves(expected.conditions), strict=True
    ):
        assert ours.sharding == theirs.sharding
        assert (ours.dtype, np.asarray(ours).tobytes()) == (
            theirs.dtype,
            np.asarray(theirs).tobytes(),
        )


def test_filling_wants_a_cache():
    with pytest.raises(
        InputError,
        match=r"^model.prompt_cache_dir=None: expected a directory to be filled, or '' for the one"
        " in the user's cache directory$",
    ):
        fill_cache(small_config())


@pytest.mark.exhaustive
def test_filling_encodes_as_a_run_does_on_a_tensor_parallel_mesh(tmp_path, monkeypatch):
    """Every device has prompts of its own, so that the bits under a key do not depend on who wrote
    them.
    """
    meshes = []

    def opened(pipeline, dtype, mesh, cache):
        meshes.append(mesh)
        return open_text_encoders(pipeline, dtype, mesh, cache)

    monkeypatch.setattr(encode_command, "open_text_encoders", opened)
    mesh = ("mesh.data=2", "mesh.tensor=4")
    fill_cache(small_config("unused", *mesh, f"model.prompt_cache_dir={tmp_path / 'cache'}"))
    assert [dict(mesh.shape) for mesh in meshes] == [
        dict(build(small_config("unused", *mesh)).backbone.text_encoders.mesh.shape)
    ]
    assert meshes[0].shape["tensor"] == 1


@pytest.mark.slow
def test_options_of_the_model_reach_it_or_are_refused(folders, tmp_path):
    (tmp_path / "instruction").write_text(
        "A picture of:\n "
    )  # what is left of the last line is part of it
    experiment = build(
        small_config(
            "unused", "model.vae_tile_size=16", f"model.instruction={tmp_path / 'instruction'}"
        )
    )
    backbone = experiment.backbone
    assert (backbone.decoder.tile, backbone.instruction) == (16, "A picture of:\n ")
    conditions = prepare(backbone, None, [Prompt("a red circle")], 24).conditions

    def prompt(b):
        return np.asarray(b.encode(("a red circle",), 24)["text"])

    instructed = prompt(backbone)
    plain = prompt(dataclasses.replace(backbone, instruction=None))
    np.testing.assert_array_equal(conditions.cond["text"], instructed)
    assert np.abs(instructed.astype(np.float32) - plain.astype(np.float32)).max() > 0.1
    np.testing.assert_array_equal(
        conditions.uncond["text"], backbone.encode(("",), 24, negative=True)["text"]
    )
    assert not experiment.schedule(3).guided

    flux = (
        "model=flux1",
        f"model.path={folders / 'flux'}",
        "model.height=16",
        "model.width=16",
        "model.max_sequence_length=12",
    )
    grid = build(
        small_config("unused", *flux, "rollout.true_cfg_scale=2", "rollout.guidance_scale=3.5")
    ).schedule(3)
    assert (grid.guided, grid.embedded_guidance, grid.guidance_scale) == (True, 3.5, 2.0)
    for overrides, message in [
        (
            ("model.vae_tile_size=10",),
            "model.vae_tile_size=10: must be null or a multiple of 4, the pixels per latent pixel",
        ),
        (
            ("model.instruction=absent",),
            "model.instruction='absent': no such file; expected a text file with",
        ),
        (
            (*flux, f"model.instruction={tmp_path / 'instruction'}"),
            "model.instruction: not supported by FluxPipeline; accepted: null",
        ),
        (
            ("rollout.true_cfg_scale=2",),
            "rollout.true_cfg_scale=2.0: must be 1 for a SanaPipeline,"
            " whose rollout.guidance_scale is",
        ),
    ]:
        with pytest.raises(InputError, match=f"^{message}"):
            build(small_config("unused", *overrides))
