"""A transformer with parameters trained in full as diffusers' directory: names, shards, dtypes,
what is refused.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import SanaTransformer2DModel
from pretrain.networks import to_torch

from solrl_jax.errors import InputError
from solrl_jax.models.backbone import load_backbone
from solrl_jax.parallel.sharding import make_mesh
from solrl_jax.rl.trainable.lora_files import export_diffusers, import_lora
from solrl_jax.rl.trainable.lora_settings import LoraSettings
from solrl_jax.rl.trainable.trainable import flatten, init_adapters, replace
from solrl_jax.rl.trainable.transformer_files import (
    divide,
    export_transformer,
    refuse_component,
)

SETTINGS = LoraSettings(4, 8.0)
Q = "transformer_blocks/attn1/to_q/kernel"
WHOLE = (
    "transformer_blocks/ff/conv_depth/kernel",
    "transformer_blocks/scale_shift_table",
    "proj_out/bias",
    "proj_out/kernel",
)


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("embedded:tiny-sana", "bf16", make_mesh(1, 1))


@pytest.fixture(scope="module")
def trained(backbone):
    flat = flatten(backbone.transformer)
    rng = np.random.default_rng(0)

    def draw(x):
        return jnp.asarray(rng.standard_normal(x.shape), jnp.float32)

    adapter = jax.tree.map(draw, init_adapters(jax.random.key(0), backbone.transformer, [Q], 4))
    return adapter | {path: draw(flat[path]) for path in WHOLE}


def expected_tensors(backbone, trained, dtype):
    """What the files must hold, by the table that the embedded pipelines were written with."""
    params = replace(backbone.transformer, {path: trained[path] for path in WHOLE})
    params = jax.tree.map(lambda x: np.asarray(x.astype(dtype), np.float32), params)
    return to_torch(backbone.pipeline.transformer.state, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "dtype"),
    [(10**12, "float32"), (10**6, "float32"), (10**6, "bfloat16"), (1, "float32")],
)
def test_diffusers_loads_the_directory_with_every_parameter_in_its_place(
    backbone, trained, tmp_path, most, dtype
):
    out = tmp_path / "out"
    export_transformer(out, backbone, trained, SETTINGS, dtype=dtype, most=most)
    network = SanaTransformer2DModel.from_pretrained(out)
    got = {name: tensor.detach().float().numpy() for name, tensor in network.state_dict().items()}
    want = expected_tensors(backbone, trained, dtype)
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    files = sorted(out.glob("diffusion_pytorch_model*.safetensors"))
    assert (len(files) > 1) == (most < 10**12)
    if most == 10**6:
        assert max(file.stat().st_size for file in files) < 1.1 * most
    index = out / "diffusion_pytorch_model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        assert json.loads(index.read_text())["metadata"]["total_size"] == sum(
            v.size * np.dtype(jnp.dtype(dtype)).itemsize for v in want.values()
        )
    adapters, settings = import_lora(
        out / "pytorch_lora_weights.safetensors", backbone.parameter_table()
    )
    assert (settings, adapters.keys()) == (SETTINGS, {Q})
    if dtype == "float32":
        jax.tree.map(np.testing.assert_array_equal, adapters[Q], trained[Q])


def test_a_policy_without_adapters_has_no_lora_and_replaces_an_earlier_export(
    backbone, trained, tmp_path
):
    out = tmp_path / "out"
    export_transformer(out, backbone, trained, SETTINGS, most=10**6)
    export_transformer(out, backbone, {path: trained[path] for path in WHOLE}, SETTINGS)
    assert sorted(f.name for f in out.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own():
    def name(i, n):
        return f"diffusion_pytorch_model-{i:05d}-of-{n:05d}.safetensors"

    assert divide({"a": 3, "b": 4}, 7) == {"diffusion_pytorch_model.safetensors": ["a", "b"]}
    assert divide({"a": 3, "b": 5, "c": 2, "d": 9}, 7) == {
        name(1, 3): ["a"],
        name(2, 3): ["b", "c"],
        name(3, 3): ["d"],
    }


def test_the_base_model_is_never_replaced(tmp_path):
    transformer = tmp_path / "base" / "transformer"
    transformer.mkdir(parents=True)
    (tmp_path / "base" / "model_index.json").write_text(
        '{"_class_name": "SanaPipeline", "transformer": ["diffusers", "X"], "vae": ["x", "Y"]}'
    )
    (tmp_path / "link").symlink_to(tmp_path / "base")
    (tmp_path / "shared").mkdir()
    (tmp_path / "base" / "vae").symlink_to(tmp_path / "shared")
    (transformer / "x.safetensors").symlink_to(tmp_path / "blob")  # as in a cache of the Hub
    shared = (tmp_path / "base" / "vae", tmp_path / "shared")
    for folder in (transformer, tmp_path / "link" / "transformer", *shared):
        for path in (folder, folder / "x.safetensors"):
            with pytest.raises(InputError, match=rf"^{path}: belongs to the base model; name an"):
                refuse_component(path, tmp_path / "base")
    for path in ("lora.safetensors", "transformer-2", "export/transformer"):
        refuse_component(tmp_path / "base" / path, tmp_path / "link")


def test_what_cannot_be_written_is_refused_in_one_line(backbone, trained, tmp_path):
    def refused(message, *arguments, **options):
        with pytest.raises(InputError, match=message) as error:
            export_transformer(*arguments, SETTINGS, **options)
        assert "\n" not in str(error.value)

    inside = backbone.pipeline.folder / "transformer" / "new"
    refused("new: belongs to the base model", inside, backbone, trained)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    refused(
        "full: holds thesis.tex, which an export would remove", tmp_path / "full", backbone, trained
    )
    refused(
        "x.safetensors: .* is a directory; name one", tmp_path / "x.safetensors", backbone, trained
    )
    endless = trained | {"proj_out/bias": trained["proj_out/bias"].at[3].set(np.inf)}
    refused("proj_out.bias is not finite in float32", tmp_path / "out", backbone, endless)
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        InputError,
        match=re.escape("a LoRA cannot hold parameters that are trained in full; 4 are, first "),
    ):
        export_diffusers(tmp_path / "x.safetensors", trained, SETTINGS, backbone.parameter_table())
