"""Measures how long the released transformers take to compile, from shapes alone.

    python scripts/bench_compile.py
    python scripts/bench_compile.py --model flux1 --out benchmarks/compile-cpu.json

The networks are FLUX.1-dev, SD3.5 Large and SANA 1.6B. Two programs are compiled ahead of time, for
a batch of one at the recipe's resolution in BF16: the velocity, and its gradient with respect to
LoRA adapters on the recipe's targets. The result has the seconds to trace and to compile, and their
share of the limit of 10 s. For comparison, the same run compiles a scan over as many plain
transformer blocks (attention and MLP, no modulation) of the same width.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench.timing import finish
from flax import nnx

from solrl_jax.config.presets import resolve
from solrl_jax.models.flux.transformer import FluxConfig, FluxTransformer2DModel
from solrl_jax.models.layers.attention import attention
from solrl_jax.models.layers.linear import Linear
from solrl_jax.models.layers.norm import LayerNorm
from solrl_jax.models.layers.stack import scan_blocks, stack
from solrl_jax.models.sana.transformer import SanaConfig, SanaTransformer2DModel
from solrl_jax.models.sd3.transformer import SD3Config, SD3Transformer2DModel
from solrl_jax.rl.trainable.trainable import attach, init_adapters, match_kernels

LIMIT = 10.0  # seconds per program
BF16 = jnp.bfloat16
CHECKPOINTING = "blocks"  # gradient checkpointing as in the recipes


def shaped(*shape, dtype=BF16):
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


TIME = shaped(1, dtype=jnp.float32)
LARGE = SD3Config(
    num_layers=38,
    num_attention_heads=38,
    caption_projection_dim=2432,
    pos_embed_max_size=192,
    qk_norm="rms_norm",
)
# By the model's name in presets: the network, a batch of inputs at the recipe's resolution, the
# number of blocks, their width, and the number of image and text tokens.
MODELS = {
    "flux1": (
        lambda r: FluxTransformer2DModel(
            FluxConfig(guidance_embeds=True), gradient_checkpointing=CHECKPOINTING, rngs=r
        ),
        (shaped(1, 64, 64, 16), shaped(1, 128, 4096), shaped(1, 768), TIME, TIME),
        57,
        3072,
        1024 + 128,
    ),
    "sd3": (
        lambda r: SD3Transformer2DModel(LARGE, gradient_checkpointing=CHECKPOINTING, rngs=r),
        (shaped(1, 128, 128, 16), shaped(1, 205, 4096), shaped(1, 2048), TIME),
        38,
        2432,
        4096 + 205,
    ),
    "sana": (
        lambda r: SanaTransformer2DModel(
            SanaConfig(), gradient_checkpointing=CHECKPOINTING, rngs=r
        ),
        (shaped(1, 32, 32, 32), shaped(1, 300, 2304), shaped(1, 300, dtype=bool), TIME),
        20,
        2240,
        1024,
    ),
}


class PlainBlock(nnx.Module):
    """A transformer block without modulation: attention, then an MLP."""

    def __init__(self, d: int, head: int, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (LayerNorm(d, eps=1e-6, affine=False) for _ in range(2))
        self.to_q, self.to_k, self.to_v, self.to_out = (Linear(d, d, rngs=rngs) for _ in range(4))
        self.up = Linear(d, 4 * d, rngs=rngs)
        self.down = Linear(4 * d, d, rngs=rngs)
        self.head = head

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)

        def heads(y):
            return y.reshape(*y.shape[:2], -1, self.head)

        x = x + self.to_out(
            attention(heads(self.to_q(h)), heads(self.to_k(h)), heads(self.to_v(h))).reshape(
                x.shape
            )
        )
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


def abstract(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[nnx.GraphDef, dict]:
    """Returns the graph of a network, and its parameters as abstract BF16 arrays."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return graphdef, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, BF16), nnx.to_pure_dict(state)
    )


def seconds_to_compile(function: Callable, *arguments: Any) -> dict[str, float]:
    """Compiles a function ahead of time.

    Args:
        function: The function. It is not run.
        arguments: Its abstract arguments.

    Returns:
        The seconds to trace, to compile, and in total.
    """
    started = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    traced = time.perf_counter()
    lowered.compile()
    done = time.perf_counter()
    return {
        "trace": round(traced - started, 2),
        "compile": round(done - traced, 2),
        "total": round(done - started, 2),
    }


def measure(name: str) -> dict[str, dict[str, float]]:
    """Measures one model of `MODELS`. Returns the seconds of each program by its name."""
    make, inputs, blocks, width, tokens = MODELS[name]
    graphdef, params = abstract(make)
    lora = resolve(f"{name}_sol_rl_pickscore").lora
    targets = match_kernels(params, lora.target_modules, "lora.target_modules")
    adapters = jax.eval_shape(
        lambda key: init_adapters(key, params, targets, lora.rank), jax.random.key(0)
    )

    def velocity(params, *inputs):
        return nnx.merge(graphdef, params)(*inputs)

    def loss(adapters, params, *inputs):
        return (
            velocity(attach(params, adapters, lora.alpha / lora.rank), *inputs).astype(jnp.float32)
            ** 2
        ).mean()

    head = next(h for h in (128, 64, 32) if width % h == 0)
    plain_graph, plain = abstract(
        lambda r: stack(blocks, lambda r: PlainBlock(width, head, rngs=r), r)
    )

    def plain_forward(p, x):
        return scan_blocks(nnx.merge(plain_graph, p), lambda block, x: block(x), x)

    result = {
        "forward": seconds_to_compile(velocity, params, *inputs),
        "lora_gradient": seconds_to_compile(jax.grad(loss), adapters, params, *inputs),
        "plain_blocks": seconds_to_compile(plain_forward, plain, shaped(1, tokens, width)),
    }
    for program in ("forward", "lora_gradient"):
        result[program]["share_of_limit"] = round(result[program]["total"] / LIMIT, 3)
        result[program]["times_plain_blocks"] = round(
            result[program]["total"] / result["plain_blocks"]["total"], 1
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=[*MODELS], action="append", help="may be repeated (default: all)"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the result, which is also printed")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    finish(
        {"limit_seconds": LIMIT, "models": {name: measure(name) for name in args.model or MODELS}},
        args.out,
    )


if __name__ == "__main__":
    main()
