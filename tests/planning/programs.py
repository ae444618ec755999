"""Small programs for devices that are not here, and what their compilers made of them:
`tests/planning/hlo/NAME.hlo`.

`python -m tests.planning.programs` writes those files anew. It needs the compilers: the extras
`plan-cuda` and `plan-tpu`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from solrl_jax.planning import topology
from solrl_jax.planning.targets import TARGETS

FOLDER = Path(__file__).with_name("hlo")
BF16 = jnp.bfloat16
E4M3 = jnp.float8_e4m3fn


class Program(NamedTuple):
    """A function, the device that it is compiled for, and its arguments: shape, type and axes of a
    mesh (fsdp x tensor).
    """

    device: str
    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], ...]
    devices: int = 1


def nvfp4(x, w):
    """[128, 256] by [64, 256], in blocks of 16."""

    def codes(a):
        blocks = a.reshape(*a.shape[:-1], -1, 16)
        scales = (jnp.abs(blocks).max(-1) / 6).astype(E4M3)
        return (blocks / scales[..., None].astype(a.dtype)).reshape(a.shape).astype(
            jnp.float4_e2m1fn
        )[None], scales[None]

    a, scales = codes(x)
    b, others = codes(w)
    return jax.nn.scaled_matmul(a, b, scales, others, preferred_element_type=BF16)


def fp8(x, ws):
    """[128, 256] by three matrices in turn."""

    def layer(x, w):
        quantized = jnp.clip(x, -448, 448).astype(E4M3)
        product = jax.lax.dot_general(
            quantized, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (product * 0.5).astype(BF16), x

    return jax.lax.scan(layer, x, ws)


def int8(x, w, rows, columns):
    """Codes [512, 256] by [256, 256], summed in INT32 and scaled."""
    sums = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * rows * columns).astype(BF16)


def attend(q, k, v):
    """The gradient of flash attention."""

    def loss(*qkv):
        return jax.nn.dot_product_attention(*qkv, implementation="cudnn").astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def convolve(x, kernel):
    """A 3 x 3 convolution with stride 2, and the gradient to its input."""

    def f(x):
        return jax.lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    out, back = jax.vjp(f, x)
    return out, back(out)


def train(ws, x):
    """The gradient of five layers, whose weights are sharded over two axes."""

    def layer(x, w):
        return (x + jnp.tanh(x @ w), None)

    return jax.grad(lambda ws: (jax.lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2).mean())(ws)


def batched(x, ws):
    """Four batched products in turn."""
    return jax.lax.scan(lambda x, w: (jnp.einsum("bij,bjk->bik", x, w), None), x, ws)[0]


_ATTENDED = ((2, 256, 4, 64), BF16)
_CODES = ((512, 256), jnp.int8), ((256, 256), jnp.int8)
_SCALES = ((512, 1), jnp.float32), ((1, 256), jnp.float32)
_TRAINED = ((5, 512, 512), BF16, (None, "fsdp", "tensor")), ((16, 512), BF16, ("fsdp",))
PROGRAMS = {
    "nvfp4-b200": Program("b200", nvfp4, (((128, 256), BF16), ((64, 256), BF16))),
    "nvfp4-h200": Program("h200", nvfp4, (((128, 256), BF16), ((64, 256), BF16))),
    "fp8-h200": Program("h200", fp8, (((128, 256), BF16), ((3, 256, 256), E4M3))),
    "int8-a100": Program("a100", int8, (*_CODES, *_SCALES)),
    "int8-tpu-v5e": Program("tpu-v5e", int8, (*_CODES, *_SCALES)),
    "attend-b200": Program("b200", attend, (_ATTENDED, _ATTENDED, _ATTENDED)),
    "convolve-h200": Program("h200", convolve, (((2, 32, 32, 16), BF16), ((3, 3, 16, 32), BF16))),
    "train-h200": Program("h200", train, _TRAINED, 8),
    "batched-tpu-v6e": Program(
        "tpu-v6e", batched, (((8, 256, 128), BF16), ((4, 8, 128, 128), BF16))
    ),
}


def compiled(program: Program) -> Any:
    """The program, compiled on one host."""
    target = TARGETS[program.device]
    devices = topology.devices(target, program.devices, 1)
    mesh = Mesh(np.array(devices).reshape(min(program.devices, 2), -1), ("fsdp", "tensor"))

    def place(
        shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ()
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    with jax.set_mesh(mesh):
        return topology.compiled(
            topology.lowered(
                jax.jit(program.function), tuple(place(*a) for a in program.arguments)
            ),
            target,
        )


def text(name: str) -> str:
    """The text of a program as it lies here."""
    return (FOLDER / f"{name}.hlo").read_text()


def shortened(whole: str) -> str:
    """Without what says where in Python an instruction comes from."""
    head, _, body = whole.partition("\n\n")
    body = body[re.search(r"^(?:ENTRY )?%\S+ \(", body, re.MULTILINE).start() :]
    body = re.sub(
        r'metadata=\{(?:[^{}"]|"[^"]*")*?(op_name="[^"]*")?(?:[^{}"]|"[^"]*")*\}', _source, body
    )
    return f"{head.partition(', ')[0]}\n\n{body}"


def _source(match: re.Match[str]) -> str:
    return "metadata={" + (match[1] or "") + "}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, program in PROGRAMS.items():
        topology.prepare(TARGETS[program.device])
        (FOLDER / f"{name}.hlo").write_text(shortened(compiled(program).as_text()))
