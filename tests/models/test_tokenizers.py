"""Tokenizers: those of released models are not mistaken for ones that could hang."""

import json

from solrl_jax.models.loading.tensor_files import read_json
from solrl_jax.models.text_encoders import tokenizers

SPLIT = {"type": "Split", "behavior": "MergedWithPrevious", "invert": False}


def test_only_parts_that_work_on_text_can_hang():
    """Gemma 2's vocabulary has the word Regex, and its pre-tokenizer a plain string."""
    model = {"type": "BPE", "vocab": {"Regex": 0, "Precompiled": 1}, "merges": []}
    assert (
        tokenizers._unbounded(
            {"model": model, "pre_tokenizer": SPLIT | {"pattern": {"String": " "}}}
        )
        == ""
    )
    asked = tokenizers._unbounded(
        {"model": model, "pre_tokenizer": SPLIT | {"pattern": {"Regex": " +"}}}
    )
    assert json.loads(asked)["pre_tokenizer"]["pattern"] == {"Regex": " +"}
    assert len(asked) < 300  # nothing of the vocabulary


def test_a_vocabulary_as_large_as_gemmas_is_read(tmp_path):
    """2**18 tokens and 580,000 merges, 34 MB."""
    vocabulary = {f"{i:076x}": i for i in range(2**18)}
    merges = [[f"{i:04x}", f"{i:04x}"] for i in range(580_000)]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}))
    assert file.stat().st_size > 2**25
    assert len(read_json(file)["model"]["merges"]) == 580_000
