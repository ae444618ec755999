"""Tokenizers of released folders beside the files that they are loaded from."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
from tokenizers.models import Unigram

from solrl_jax.models.text_encoders.tokenizers import load_tokenizer

PIECES = [("▁", -3.0), ("a", -4.0), ("b", -4.0), ("▁a", -3.5), ("▁b", -3.5), ("ab", -4.0)]
TEXTS = ["a b", "ab 中 b", "中国", "", "b 🫨", "<s> a"]


@pytest.mark.parametrize(
    ("special", "byte_fallback"),
    [
        (["<pad>", "</s>", "<unk>"], False),  # T5
        (["<pad>", "</s>", "<s>", "<unk>"], False),  # UMT5
        (["<pad>", "</s>", "<s>", "<unk>"], True),
    ],
)
def test_a_vocabulary_of_t5s_class_is_read_as_it_is_stored(special, byte_fallback, tmp_path):
    """transformers takes <unk> for 2 in every vocabulary of this class, and drops bytes."""
    pieces = [(f"<0x{i:02X}>", -20.0) for i in range(256)] if byte_fallback else []
    vocabulary = [*((name, 0.0) for name in special), *pieces, *PIECES]
    unknown = special.index("<unk>")
    stored = Tokenizer(Unigram(vocabulary, unk_id=unknown, byte_fallback=byte_fallback))
    stored.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    stored.add_special_tokens([AddedToken(name, special=True) for name in special])
    stored.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", special.index("</s>"))]
    )
    stored.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5Tokenizer",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 512,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(TEXTS)["input_ids"] == [stored.encode(text).ids for text in TEXTS]
    assert tokenizer.unk_token_id == unknown
    padded = tokenizer(["a"], padding="max_length", max_length=6)
    assert padded["input_ids"] == [[*stored.encode("a").ids, 0, 0, 0, 0]]
