"""Makes a vision-language model (LLaVA) with random weights that answers with digits from 1 to 9.

python -m tests.rewards.tiny_vlm DIRECTORY
"""

import sys
from pathlib import Path

DIGITS = [str(digit) for digit in range(1, 10)]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
SIDE = 16  # pixels
PATCH = 8
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def save(folder: Path) -> None:
    """Writes the model with its processor, so that `transformers serve` can read it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    words = [*SPECIAL, *DIGITS]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=SPECIAL.index("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # larger than usual, so that the image decides the answer
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight[: len(SPECIAL)] = 0
        model.lm_head.weight[len(SPECIAL) :] *= 8
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    processor = LlavaProcessor(
        _image_processor(),
        fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)


def _image_processor():
    """The processor of CLIP that needs no torchvision."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
