"""Model directories: JSON files of the wrong form, safetensors that lie, tokenizers that bring
code.
"""

import io
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from solrl_jax.models.locate import EMBEDDED_FOLDER
from tests.hostile.harness import (
    ABSENT,
    Case,
    Maker,
    folder,
    link,
    nothing,
    one_quick,
    pipe,
    sparse,
)

OPEN = "layers tiny model.path={model}"
LOAD = "generate {model} --prompts {dir}/p.txt --num-steps 1 --out {dir}/out"
P = {"{dir}/p.txt": "a red circle\n"}
JSON = (
    "model_index.json",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
)
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}
CLS = {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]}
CONTENTS = {
    "absent": nothing,
    "empty": b"",
    "binary": bytes(range(256)),
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a list": "[1]",
    "null": "null",
    "deep": 100_000 * '{"a":' + "1" + 100_000 * "}",
    "a pipe": pipe,
    "a directory": folder,
    "/dev/zero": link("/dev/zero"),
    "1 GB of zeros": sparse(10**9),
    "a number of 5000 digits": '{"num_layers": ' + 5000 * "9" + "}",
}
WRONG = {
    "text": "x",
    "null": None,
    "zero": 0,
    "negative": -3,
    "a fraction": 1.5,
    "a truth": True,
    "a list": [1],
    "an object": {"a": 1},
}
FIELDS = {
    "transformer/config.json": (
        "num_layers",
        "in_channels",
        "patch_size",
        "num_attention_heads",
        "attention_head_dim",
        "sample_size",
    ),
    "vae/config.json": (
        "latent_channels",
        "scaling_factor",
        "attention_head_dim",
        "encoder_block_out_channels",
        "decoder_layers_per_block",
    ),
    "text_encoder/config.json": (
        "hidden_size",
        "num_hidden_layers",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "num_key_value_heads",
    ),
    "scheduler/scheduler_config.json": ("shift", "_class_name", "num_train_timesteps"),
    "model_index.json": ("_class_name",),
}
# values that are right for these fields, or that nobody reads
RIGHT = {
    ("scaling_factor", "a fraction"),
    ("scaling_factor", "negative"),
    ("rms_norm_eps", "a fraction"),
    ("rms_norm_eps", "zero"),
    ("rms_norm_eps", "negative"),
    ("shift", "a fraction"),
    ("encoder_block_out_channels", "a list"),
}


def header(tensors: dict[str, Any], data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file with this header; size: what it says of the header's length."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def tensor(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}


def of_zeros(start: bytes, size: int) -> Maker:
    """A file of `size` bytes that begins with `start`. The zeros after it take no room on the
    disk.
    """

    def make(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return make


def latents(*shape: int) -> Maker:
    """A .npy file of zeros, float32."""
    start = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        start, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return of_zeros(start.getvalue(), len(start.getvalue()) + 4 * math.prod(shape))


def lora(rank: int, dtype: str = "F32", **configuration: Any) -> Maker:
    """A LoRA of one linear of tiny-sana, zeros. configuration: fields of its `LoraConfig`."""
    name = "transformer.transformer_blocks.0.attn1.to_q"
    n = 128 * rank * (1 if dtype == "I8" else 4)
    shapes = {f"{name}.lora_A.weight": [rank, 128], f"{name}.lora_B.weight": [128, rank]}
    fields = {
        key: tensor(dtype, shape, n * i, n * (i + 1))["x"]
        for i, (key, shape) in enumerate(shapes.items())
    }
    if configuration:
        named = {
            f"transformer.{key}": value
            for key, value in ({"r": rank, "lora_alpha": rank} | configuration).items()
        }
        fields["__metadata__"] = {"lora_adapter_metadata": json.dumps(named)}
    return of_zeros(start := header(fields), len(start) + 2 * n)


def not_finite(path: Path) -> None:
    """The weights of tiny-sana's transformer, one array of them NaN."""
    data = bytearray((EMBEDDED_FOLDER / "tiny-sana" / "transformer" / path.name).read_bytes())
    size = 8 + int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8:size])["proj_out.weight"]["data_offsets"]
    data[size + start : size + end] = (end - start) // 2 * b"\xc0\x7f"  # BF16
    path.write_bytes(data)


SAFETENSORS = {
    "empty": b"",
    "a byte": b"\0",
    "zeros": bytes(1000),
    "noise": bytes(range(256)) * 10,
    "a header of an exabyte": header({}, size=2**60),
    "a header longer than the file": header({}, size=1000),
    "a header that is a list": struct.pack("<Q", 3) + b"[1]",
    "a header that is a number": struct.pack("<Q", 1) + b"1",
    "a deep header": struct.pack("<Q", 200_000) + 100_000 * b"[" + 100_000 * b"]",
    "no tensor": header({}),
    "a tensor beyond the end": header(tensor("F32", [10**9], 0, 4 * 10**9)),
    "a shape of another length": header(tensor("F32", [3], 0, 4), bytes(4)),
    "a shape that overflows": header(tensor("F32", [2**32, 2**32, 2**32], 0, 4), bytes(4)),
    "a negative shape": header(tensor("F32", [-1], 0, 4), bytes(4)),
    "a shape of text": header(tensor("F32", ["a"], 0, 4), bytes(4)),
    "offsets the wrong way round": header(tensor("F32", [1], 4, 0), bytes(4)),
    "offsets with a hole": header(tensor("F32", [1], 4, 8), bytes(8)),
    "one offset": header(tensor("F32", [1], 0), bytes(4)),
    "an unknown dtype": header(tensor("F99", [1], 0, 4), bytes(4)),
    "dtype F4": header(tensor("F4", [2], 0, 1), bytes(1)),
    "dtype F8": header(tensor("F8_E4M3", [4], 0, 4), bytes(4)),
    "integers": header(tensor("I64", [1], 0, 8), bytes(8)),
    "no dtype": header({"x": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "an entry that is a number": header({"x": 3}, bytes(4)),
    "a pipe": pipe,
    "a directory": folder,
    "absent": nothing,
    "/dev/zero": link("/dev/zero"),
    "10 GB of zeros": sparse(10**10),
    "a tensor of 3.2 GB": of_zeros(
        large := header(tensor("F32", [800_000_000], 0, 3_200_000_000)), len(large) + 3_200_000_000
    ),
}
WEIGHTS = "{model}/transformer/diffusion_pytorch_model.safetensors"
TOKENIZER = {
    "a class of its own": {
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
        "tokenizer_class": "Evil",
    },
    "a class that is no tokenizer": {"tokenizer_class": "GPT2Model"},
    "a class that is a number": {"tokenizer_class": 3},
    "added tokens of numbers": {"added_tokens_decoder": {"a": 3}},
    "a special token that is a number": {"pad_token": 3},
    "a padding side": {"padding_side": "up"},
    "no vocabulary": {"tokenizer_class": "NoVocabulary"},
}
LORA = (
    "generate embedded:tiny-sana --prompts {dir}/p.txt --num-steps 1 --out {dir}/out "
    "--lora {dir}/x.safetensors"
)

CASES = [
    *(
        Case(
            f"{file}: {name}",
            OPEN,
            file.split("/")[-1] if name != "absent" else "",
            files={f"{{model}}/{file}": content},
            seconds=30,
        )
        for file in JSON
        for name, content in CONTENTS.items()
        if (name == "absent" and file != "model_index.json") or file == "transformer/config.json"
    ),
    *(
        Case(
            f"{file}: {field} is {name}",
            LOAD if file.startswith("scheduler") else OPEN,
            field,
            files=P | {f"{{model}}/{file}": {field: value}},
            seconds=30,
            repeats=name != "text",
        )
        for file, fields in FIELDS.items()
        for field in fields
        for name, value in WRONG.items()
        if (name == "text" or field in ("num_layers", "scaling_factor", "rms_norm_eps"))
        and (field, name) not in RIGHT
    ),
    *(
        Case(
            f"{file}: {field} is absent",
            LOAD,
            field,
            files=P | {f"{{model}}/{file}": {field: ABSENT}},
            seconds=30,
        )
        for file, field in (
            ("model_index.json", "_class_name"),
            ("scheduler/scheduler_config.json", "_class_name"),
        )
    ),
    *(
        Case(f"weights: {name}", LOAD, "transformer", files=P | {WEIGHTS: content})
        for name, content in SAFETENSORS.items()
    ),
    *one_quick(
        Case(f"a LoRA: {name}", LORA, "x.safetensors", files=P | {"{dir}/x.safetensors": content})
        for name, content in SAFETENSORS.items()
    ),
    *(
        Case(
            f"a tokenizer: {name}",
            LOAD,
            "tokenizer",
            files=P
            | {
                "{model}/tokenizer/tokenizer_config.json": fields,
                "{model}/tokenizer/evil.py": "open('{dir}/touched', 'w')\nclass Tokenizer: pass\n",
            },
            seconds=60,
        )
        for name, fields in TOKENIZER.items()
    ),
    *(
        Case(
            f"tokenizer.json: {name}",
            LOAD,
            "tokenizer",
            files=P | {"{model}/tokenizer/tokenizer.json": CONTENTS[name]},
        )
        for name in ("empty", "binary", "a list", "a directory")
    ),
    *(
        Case(
            f"tokenizer.json: {name}",
            LOAD,
            message,
            files=P | {"{model}/tokenizer/tokenizer.json": fields},
        )
        for name, message, fields in (
            (
                "no token for an unknown word",
                "tokenizer",
                {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}},
            ),
            (
                "tokens that its encoder does not know",
                "accepted: below 32",
                {
                    "model": {
                        "type": "WordLevel",
                        "vocab": {"a": 32, "<unk>": 3},
                        "unk_token": "<unk>",
                    }
                },
            ),
            (
                "more special tokens than a text may have",
                "adds 5000 tokens to a text of up to 24",
                {
                    "post_processor": TEMPLATE
                    | {"single": 5000 * [TEMPLATE["single"][0]], "special_tokens": {"[CLS]": CLS}}
                },
            ),
        )
    ),
    Case(
        "vae/config.json: no stage",
        OPEN,
        "one or more stages",
        files={"{model}/vae/config.json": {"encoder_block_out_channels": []}},
    ),
    Case(
        "vae/config.json: even kernels",
        OPEN,
        "odd kernel sizes",
        files={"{model}/vae/config.json": {"decoder_qkv_multiscales": 3 * [[4]]}},
    ),
    Case(
        "a LoRA of rank 4 million",
        LORA,
        "rank from 1 to ",
        files=P | {"{dir}/x.safetensors": lora(4_000_000)},
    ),
    *(
        Case(
            f"latents: {name}",
            f"{LOAD} --latents {{dir}}/x.npy",
            message,
            files=P | {"{dir}/x.npy": latents(*shape)},
        )
        for name, message, shape in (
            ("of 3 GB and another model", "have 32 channels", (1, 32, 4000, 4000)),
            ("of 3 GB", "at most 16384 pixels", (1, 8, 10_000, 10_000)),
        )
    ),
    Case("many tokens", f"{LOAD} --max-sequence-length 16384", "--max-sequence-length", files=P),
    Case(
        "many tokens to train on",
        "train tiny model.max_sequence_length=16384 run.dir={dir}/r",
        "model.max_sequence_length",
    ),
    Case(
        "an instruction of 10,000 tokens",
        f"{LOAD} --instruction {{dir}}/i.txt",
        "10023 tokens; accepted: up to 4096",
        files=P | {"{dir}/i.txt": 5000 * "a b "},
    ),
    Case(
        "weights that are not finite",
        LOAD,
        "1 of 1 images are not finite",
        1,
        files=P | {WEIGHTS: not_finite},
        seconds=60,
    ),
    *(
        Case(
            f"{file}: of {name}",
            OPEN,
            "_class_name",
            files={f"{{model}}/{file}": {"_class_name": name}},
        )
        for file, name in (
            ("transformer/config.json", "FluxTransformer2DModel"),
            ("vae/config.json", "AutoencoderKL"),
        )
    ),
    *(
        Case(
            f"a scheduler: {field} is {value}",
            LOAD,
            field,
            files=P | {"{model}/scheduler/scheduler_config.json": {field: value}},
        )
        for field, value in (("shift", 1e-300), ("prediction_type", "epsilon"))
    ),
    Case(
        "a LoRA of integers",
        LORA,
        "lora_A.weight is I8",
        files=P | {"{dir}/x.safetensors": lora(4, "I8")},
    ),
    *(
        Case(
            f"a LoRA: {field} is {name}",
            LORA,
            field,
            files=P | {"{dir}/x.safetensors": lora(4, **{field: value})},
        )
        for field, name, value in (
            ("lora_alpha", "10^400", 10**400),
            ("lora_alpha", "a truth", True),
            ("alpha_pattern", "a number", 3),
            ("init_lora_weights", "one that changes the base", "pissa_niter_4"),
        )
    ),
    Case(
        "an index that is none",
        LOAD,
        "index",
        files=P | {WEIGHTS: nothing, WEIGHTS + ".index.json": "[]"},
    ),
    Case(
        "an index of numbers",
        LOAD,
        "index",
        files=P | {WEIGHTS: nothing, WEIGHTS + ".index.json": '{"weight_map": {"a": 3}}'},
    ),
    Case(
        "an index of other directories",
        LOAD,
        "index",
        files=P
        | {
            WEIGHTS: nothing,
            WEIGHTS + ".index.json": '{"weight_map": {"a": "../../../etc/passwd"}}',
        },
    ),
    Case(
        "an index that is deep",
        LOAD,
        "index",
        files=P | {WEIGHTS: nothing, WEIGHTS + ".index.json": 100_000 * "["},
    ),
]
