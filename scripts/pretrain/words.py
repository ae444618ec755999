"""Word tokenizers for the captions, with the special tokens of Gemma, CLIP and T5."""

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pretrain import clips, drawing
from pretrain.recipe import MAX_TOKENS, MOTION_TOKENS, SHORT

VOCAB_SIZE = 32  # rows of every token embedding; a few are unused


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """A beginning-of-text token, then one token per word. Like Gemma's, it adds no end."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *drawing.VOCABULARY]
    return _tokenizer(words, "<bos> $A", ("<bos>", "<eos>"), MAX_TOKENS)


def clip_tokenizer(length: int = SHORT) -> PreTrainedTokenizerFast:
    """Like CLIP's: the beginning and the end of the text have the two highest ids.

    CLIP pools at the end of the text, which attends to all tokens.
    """
    return _tokenizer(
        ["<pad>", "<unk>", *drawing.VOCABULARY, "<bos>", "<eos>"],
        "<bos> $A <eos>",
        ("<bos>", "<eos>"),
        length,
    )


CLIP_END = 2 + len(drawing.VOCABULARY) + 1  # id of the end of text in `clip_tokenizer`


def t5_tokenizer(
    vocabulary: tuple[str, ...] = drawing.VOCABULARY, length: int = SHORT
) -> PreTrainedTokenizerFast:
    """Like T5's: an end but no beginning. Padding is 0, the end 1, an unknown word 2."""
    return _tokenizer(["<pad>", "<eos>", "<unk>", *vocabulary], "$A <eos>", ("<eos>",), length)


def motion_tokenizer() -> PreTrainedTokenizerFast:
    """`t5_tokenizer` for the captions of clips."""
    return t5_tokenizer(clips.VOCABULARY, MOTION_TOKENS)


def _tokenizer(
    words: list[str], template: str, added: tuple[str, ...], length: int
) -> PreTrainedTokenizerFast:
    """Builds a tokenizer.

    Args:
        words: The vocabulary, in the order of the ids.
        template: The form of an encoded text.
        added: The special tokens that `template` adds.
        length: The longest text in tokens.
    """
    assert len(words) <= VOCAB_SIZE
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, ids[token]) for token in added]
    )
    special = {
        f"{token[1:-1]}_token": token
        for token in ("<pad>", "<bos>", "<eos>", "<unk>")
        if token in ids
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="right", model_max_length=length, **special
    )
