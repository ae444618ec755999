"""`QwenImageTransformer2DModel` against diffusers, in float32, to 1e-5."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel as TorchQwenImage
from flax import nnx
from pretrain.networks import to_torch

from solrl_jax.models.loading.weights import parameter_table
from solrl_jax.models.qwen_image.transformer import (
    QwenImageConfig,
    QwenImageTransformer2DModel,
    rotary_table,
)
from tests import carried
from tests.cases import first_is_quick
from tests.parity import from_torch, parameter_count, relative

BASE = dict(
    in_channels=16,
    out_channels=4,
    num_layers=3,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=24,
    axes_dims_rope=(4, 6, 6),
)
CASES = {  # overrides, and the size of the latent
    "odd numbers of tokens": ({}, (6, 10)),
    "other axes and channels": (
        dict(axes_dims_rope=(2, 10, 4), out_channels=6, in_channels=8),
        (4, 2),
    ),
    "one layer, narrow heads": (
        dict(num_layers=1, attention_head_dim=8, num_attention_heads=6, axes_dims_rope=(2, 2, 4)),
        (2, 14),
    ),
}
TOLERANCE = 1e-5  # largest difference over largest value
LENGTHS = (7, 3)
RELEASED = carried.config(carried.QWEN_IMAGE, "transformer")


def reference_model(overrides: dict, seed: int = 0) -> TorchQwenImage:
    """A PyTorch network with weights strong enough that every input matters."""
    torch.manual_seed(seed)
    theirs = TorchQwenImage(**(BASE | overrides)).eval().requires_grad_(False)
    for p in theirs.parameters():
        p.copy_(torch.randn_like(p) * (0.5 if p.ndim < 2 else p[0].numel() ** -0.5))
    return theirs


def port(theirs: TorchQwenImage, overrides: dict):
    """Ours with the weights of `theirs`: (graphdef, abstract state, params)."""
    config = QwenImageConfig.from_dict(BASE | overrides)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: QwenImageTransformer2DModel(config, rngs=nnx.Rngs(0)))
    )
    tensors = {k: v.numpy() for k, v in theirs.state_dict().items()}
    return graphdef, state, from_torch(state, tensors)


def inputs(overrides: dict, height: int, width: int, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    fields = BASE | overrides

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return dict(
        latent=normal(2, height, width, fields["in_channels"] // 4),
        text=normal(2, max(LENGTHS), fields["joint_attention_dim"]),
        mask=np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None],
        timestep=np.array([900.0, 130.0], np.float32),
    )


def pack(x: torch.Tensor) -> torch.Tensor:
    """Squares of 2 x 2 latent pixels as tokens, as in the pipeline."""
    b, c, h, w = x.shape
    squares = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(b, h // 2 * (w // 2), 4 * c)


def run_torch(theirs: TorchQwenImage, x: dict, cotangent: np.ndarray | None = None) -> np.ndarray:
    """The velocity, or with a `cotangent` the gradient of the latent."""
    _, height, width, _ = x["latent"].shape
    rows = height // 2
    columns = width // 2
    latent = torch.from_numpy(x["latent"].transpose(0, 3, 1, 2).copy())
    latent.requires_grad_(cotangent is not None)
    with torch.set_grad_enabled(cotangent is not None):
        out = theirs(
            pack(latent),
            torch.from_numpy(x["text"]),
            torch.from_numpy(x["mask"]),
            torch.from_numpy(x["timestep"]) / 1000,
            img_shapes=[[(1, rows, columns)]] * 2,
            return_dict=False,
        )[0]
        channels = out.shape[-1] // 4
        out = out.reshape(2, rows, columns, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
        out = out.reshape(2, channels, height, width)
    if cotangent is None:
        return out.numpy().transpose(0, 2, 3, 1)
    out.backward(torch.from_numpy(cotangent.transpose(0, 3, 1, 2).copy()))
    return latent.grad.numpy().transpose(0, 2, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", first_is_quick(CASES))
def test_forward_and_input_gradient_equal_diffusers(case):
    overrides, size = CASES[case]
    theirs = reference_model(overrides)
    x = inputs(overrides, *size)
    graphdef, state, params = port(theirs, overrides)
    want = run_torch(theirs, x)
    cotangent = np.random.default_rng(2).standard_normal(want.shape).astype(np.float32)
    want_gradient = run_torch(theirs, x, cotangent)

    @jax.jit
    def run(params, latent, text, mask, timestep):
        def velocity(latent):
            return nnx.merge(graphdef, params)(latent, text, mask, timestep)

        out, back = jax.vjp(velocity, latent)
        return out, *back(cotangent)

    got, gradient = run(params, **x)
    forward = relative(got, want)
    backward = relative(gradient, want_gradient)
    print(f"{case}: forward {forward:.1e}, gradient {backward:.1e}")
    assert got.dtype == jnp.float32
    assert forward < TOLERANCE
    assert backward < TOLERANCE
    # the comparison sees every input
    moved = {name: np.roll(x[name], 1, axis=0) for name in ("text", "mask")}
    moved |= {"latent": x["latent"] + 0.01, "timestep": x["timestep"] + 5}
    for name, value in moved.items():
        assert relative(run(params, **x | {name: value})[0], want) > 20 * TOLERANCE, name
    # masked text is not seen
    hidden = np.where(x["mask"][..., None], x["text"], 7).astype(np.float32)
    np.testing.assert_array_equal(run(params, **x | {"text": hidden})[0], got)
    back = to_torch(state, params)
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(back[name], tensor.numpy(), err_msg=name)


@pytest.mark.parametrize(("rows", "columns", "length"), [(3, 5, 4), (4, 2, 7), (1, 1, 2)])
def test_positions_are_those_of_diffusers(rows, columns, length):
    theirs = TorchQwenImage(**BASE | dict(num_layers=1)).pos_embed
    image, text = theirs([(1, rows, columns)], max_txt_seq_len=length, device="cpu")
    want = torch.cat([image, text]).numpy()
    cos, sin = rotary_table(rows, columns, length, BASE["axes_dims_rope"])
    assert cos.shape == sin.shape == (1, *want.shape)
    np.testing.assert_allclose(cos[0] + 1j * sin[0], want, atol=1e-6)


def test_the_released_network_has_the_released_names_and_parameter_count():
    with torch.device("meta"):
        reference = TorchQwenImage.from_config(RELEASED)  # it ignores pooled_projection_dim
    config = QwenImageConfig.from_dict(RELEASED)
    assert config == QwenImageConfig() == QwenImageConfig.from_dict(dict(reference.config))
    _, state = nnx.split(
        nnx.eval_shape(lambda: QwenImageTransformer2DModel(config, rngs=nnx.Rngs(0)))
    )
    theirs = {name: tuple(t.shape) for name, t in reference.state_dict().items()}
    assert {name: e.torch_shape for e in parameter_table(state) for name in e.names} == theirs
    assert parameter_count(state) == 20_430_401_088


@pytest.mark.parametrize(("height", "width"), [(5, 4), (4, 7)])
def test_an_odd_size_is_refused(height, width):
    graphdef, _, params = port(reference_model({}), {})
    with pytest.raises(ValueError, match=f"latents of {height} x {width}; accepted: even sizes"):
        jax.eval_shape(lambda x: nnx.merge(graphdef, params)(**x), inputs({}, height, width))


def test_a_size_without_positions_is_refused():
    graphdef, state, _ = port(reference_model({}), {})
    with pytest.raises(ValueError, match=r"latents of 2 x 16376 with 7 text tokens; accepted: .*"):
        jax.eval_shape(lambda p, x: nnx.merge(graphdef, p)(**x), state, inputs({}, 2, 16376))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "unknown config field(s) ['num_heads']"),
        ({"patch_size": 1}, "patch_size=1; accepted: 2"),
        ({"in_channels": 6}, "in_channels=6; accepted: a positive multiple of 4"),
        ({"guidance_embeds": True}, "guidance_embeds=True; accepted: False"),
        ({"zero_cond_t": True}, "zero_cond_t=True; accepted: False"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope=True; accepted: False"),
        ({"axes_dims_rope": [4, 4, 4]}, "axes_dims_rope=(4, 4, 4); accepted: three positive even"),
    ],
)
def test_a_config_this_port_cannot_honour_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(f"QwenImageTransformer2DModel: {message}")):
        QwenImageConfig.from_dict(BASE | fields)
