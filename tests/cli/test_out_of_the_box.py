"""`solrl train PRESET` as a new user calls it: in an empty folder, with an empty cache of the Hub
and no prompt file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel
from transformers import CLIPConfig, CLIPModel, Gemma2Config, Gemma2Model

from tests import carried
from tests.hub_server import serve
from tests.pipelines import dpm, make_tokenizer
from tests.released import save_clip_tokenizer
from tests.small import SMALL, one_run_at_a_time

pytestmark = pytest.mark.exhaustive

PRESET = "sana_sol_rl_pickscore"
PICKSCORE = "yuvalkirstain/PickScore_v1"
SIDE = 128  # pixels; bfloat16 images of the preset's 1024 take hours on two cores


def train(folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `solrl train` in the empty folder `folder / "empty"`."""
    here = folder / "empty"
    here.mkdir()
    return subprocess.run(
        [sys.executable, "-m", "solrl_jax", "train", PRESET, *overrides],
        cwd=here,
        env=os.environ
        | {"HF_HOME": str(folder / "hub"), "PYTHONPATH": str(Path(__file__).parents[2])}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("online", [True, False])
def test_only_the_download_is_missing(online, tmp_path):
    """The Hub that is asked has no repositories."""
    with serve({}) as (_, environment):
        process = train(tmp_path, **(environment if online else {"HF_HUB_OFFLINE": "1"}))
    assert (process.returncode, process.stdout) == (2, "")
    (error,) = (line for line in process.stderr.splitlines() if line.startswith("solrl: "))
    assert error.startswith(f"solrl: reward 'pickscore': {PICKSCORE}: ")
    assert "cannot be downloaded from the Hub" in error
    assert error.endswith(f"of https://huggingface.co/{PICKSCORE}")
    assert "Traceback" not in process.stderr
    assert not list(tmp_path.glob("empty/**/*.yaml"))


def save_networks(model: Path, pickscore: Path, tokenizer: Path) -> None:
    """Writes SANA 1.6B and PickScore in their released layouts and widths, with random weights.
    Each stack of layers is reduced to one layer, and the vocabularies are small.
    """
    torch.manual_seed(0)
    words = make_tokenizer()
    words.model_max_length = 512  # the released one has no limit; the preset reads 300 tokens
    one_each = {f"{side}_layers_per_block": [1] * 6 for side in ("encoder", "decoder")}
    gemma = carried.config(carried.SANA, "text_encoder")
    transformer = carried.config(carried.SANA, "transformer")
    SanaPipeline(
        tokenizer=words,
        scheduler=dpm(),
        transformer=SanaTransformer2DModel(**transformer | {"num_layers": 1}),
        vae=AutoencoderDC(**carried.config(carried.SANA, "vae") | one_each),
        text_encoder=Gemma2Model(
            Gemma2Config(**gemma | {"num_hidden_layers": 1, "vocab_size": len(words)})
        ),
    ).to(torch.bfloat16).save_pretrained(model)
    tokenizer.mkdir()
    pieces = save_clip_tokenizer(tokenizer)
    clip = carried.config(PICKSCORE)
    for tower in ("text_config", "vision_config"):
        clip[tower]["num_hidden_layers"] = 1
    clip["text_config"]["vocab_size"] = len(pieces)
    CLIPModel(CLIPConfig(**clip)).save_pretrained(pickscore)


def test_it_trains_with_the_prompts_of_the_package(tmp_path, tmp_path_factory):
    folders = (tmp_path / "model", tmp_path / "pickscore", tmp_path / "tokenizer")
    model, pickscore, tokenizer = folders
    save_networks(model, pickscore, tokenizer)
    with one_run_at_a_time(tmp_path_factory.getbasetemp()):
        process = train(
            tmp_path,
            *SMALL,
            "train.iterations=1",
            "rollout.candidates=4",
            "rollout.kept=2",
            f"model.path={model}",
            f"model.height={SIDE}",
            f"model.width={SIDE}",
            f"reward.paths={{pickscore: {pickscore}, pickscore/tokenizer: {tokenizer}}}",
            "run.dir=run",
            HF_HUB_OFFLINE="1",
        )
    assert process.returncode == 0, process.stderr
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["run"]
    run = tmp_path / "empty" / "run"
    settings = yaml.safe_load((run / "config.yaml").read_text())["prompts"]
    assert (settings["train"], settings["test"]) == (
        "embedded:general-train",
        "embedded:general-test",
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if "loss" in row)
    assert np.isfinite(row["loss"])
    assert 0 < row["grad_norm"] < np.inf
