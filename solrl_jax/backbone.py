"""The model on the mesh: the only file here that opens `models/`.

A `Backbone` is a pipeline's pure functions with the loaded, placed parameters beside them. What a parameter tree looks like
inside is not known to anyone else in this package: LoRA targets and quantised linears are chosen by path patterns.
"""

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from models.layers import gather
from models.pipeline import Conditioning as Conditioning
from models.pipeline import Pipeline, open_pipeline
from models.weights import Params as Params
from solrl_jax import sharding
from solrl_jax.files import InputError

EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parent / "pipelines"
DTYPES = {"bf16": jnp.bfloat16, "fp32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A pipeline with its parameters, on a mesh."""

    pipeline: Pipeline
    mesh: Mesh
    dtype: jnp.dtype  # the networks compute in it
    transformer: Params  # the frozen base, split over fsdp
    text_encoder: Params
    vae: Params

    def velocity(
        self, params: Params, latent: Float[Array, "b *latent"], conditioning: Conditioning, time: Array, guidance: Array
    ) -> Float[Array, "b *latent"]:
        """The policy's prediction in `dtype`; latents come in float32. params: the base with any of its leaves replaced.

        time: [] or [b], in 0..1000.
        """
        time = jnp.broadcast_to(time, latent.shape[:1])
        return self.pipeline.velocity(gather_small(params), latent.astype(self.dtype), conditioning, time, guidance)

    def encode(self, prompts: Sequence[str], max_tokens: int) -> Conditioning:
        """What the network is told of each prompt, on every device."""
        tokens = self.pipeline.tokenize(prompts, max_tokens)
        return self._encode(self.text_encoder, tokens)

    @partial(jax.jit, static_argnums=0)
    def _encode(self, params: Params, tokens: Any) -> Conditioning:
        return self.pipeline.encode_text(params, tokens)

    def decode(self, params: Params, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Images in [0, 1] float32 from latents; params: `vae`."""
        return self.pipeline.decode(gather(params), latent.astype(self.dtype))

    def __hash__(self) -> int:  # a static argument of jit: one backbone, one identity
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def gather_small(params: Params) -> Params:
    """Whole arrays on every device for everything but the stacked blocks, which are gathered a layer at a time."""
    return {k: v if k == "transformer_blocks" else gather(v) for k, v in params.items()}


def find_model(path: str) -> Path:
    """The directory that `model.path` names: a directory, `embedded:NAME`, or a name in the local hub cache.

    Raises InputError that says what was tried.
    """
    if path.startswith(EMBEDDED):
        name = path.removeprefix(EMBEDDED)
        folder = EMBEDDED_FOLDER / name
        if not (folder / "model_index.json").exists():
            shipped = ", ".join(sorted(p.parent.name for p in EMBEDDED_FOLDER.glob("*/model_index.json")))
            raise InputError(f"model.path={path!r}: no such embedded pipeline; there are {shipped}")
        return folder
    if Path(path).is_dir():
        return Path(path)
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        return _from_hub(path)
    raise InputError(f"model.path={path!r}: no such directory (and not of the form OWNER/NAME of a hub)")


def _from_hub(name: str) -> Path:
    """A snapshot of a hub repository: downloaded unless HF_HUB_OFFLINE is set, then only from the cache."""
    from huggingface_hub import snapshot_download

    patterns = ["model_index.json", "*/*.json", "*/*.safetensors", "tokenizer*/*", "scheduler/*"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated kinds; to the user they are one
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"model.path={name!r}: cannot be had from the hub{offline}: {reason}") from error


def load_backbone(path: str, precision: str, mesh: Mesh) -> Backbone:
    """Opens and loads the pipeline `path` onto `mesh`; the networks run in `precision` (`bf16` or `fp32`).

    Raises InputError in one line for a model that is absent, incomplete or of an unknown kind.
    """
    folder = find_model(path)
    dtype = DTYPES[precision]
    try:
        pipeline = open_pipeline(folder)

        def place(component) -> Params:
            params = component.load(dtype)
            return jax.device_put(params, sharding.parameter_sharding(mesh, params))

        parts = [place(c) for c in (pipeline.transformer, pipeline.text_encoder, pipeline.vae)]
    except (OSError, ValueError) as error:  # transformers raises both kinds, in several lines, for a tokenizer
        raise InputError(" ".join(str(error).split())) from error
    return Backbone(pipeline, mesh, dtype, *parts)


def pad_rows(x: np.ndarray, count: int) -> np.ndarray:
    """`x` with its first row repeated up to `count` rows: every chunk runs the one compiled program."""
    return x if len(x) == count else np.concatenate([x, np.repeat(x[:1], count - len(x), axis=0)])
