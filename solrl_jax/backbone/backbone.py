"""The model on the mesh. Beside `text_encoders.py` and rewards that are networks, the only file here that opens `models/`.

A `Backbone` is a pipeline's pure functions with the loaded, placed parameters beside them. What a parameter tree looks like
inside is not known to anyone else in this package: LoRA targets and quantised linears are chosen by path patterns.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from solrl_jax.conditioning.cache import open_cache
from solrl_jax.conditioning.text_encoders import TextEncoders
from solrl_jax.models.autoencoders import with_autoencoder
from solrl_jax.models.layers import gather
from solrl_jax.models.pipeline import Conditioning as Conditioning
from solrl_jax.models.pipeline import Pipeline as Pipeline
from solrl_jax.models.pipeline import open_pipeline
from solrl_jax.models.tensor_files import without_variants
from solrl_jax.models.tiling import decode_tiled
from solrl_jax.models.weights import Entry, entries
from solrl_jax.models.weights import Params as Params
from solrl_jax.parallel import hosts, sharding
from solrl_jax.storage import hub
from solrl_jax.storage.files import InputError, in_one_line

EMBEDDED = "embedded:"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "pipelines"
DTYPES = {"bf16": jnp.bfloat16, "fp32": jnp.float32}


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A pipeline with its parameters, on a mesh."""

    pipeline: Pipeline
    mesh: Mesh  # of the transformer; text encoders and autoencoder lie on its `sharding.rows_only`
    dtype: jnp.dtype  # the networks compute in it
    transformer: Params  # the frozen base, split over fsdp
    text_encoders: TextEncoders
    vae: Params
    instruction: str | None = None  # before every prompt but negative ones, for a model that knows such a thing
    tile: int | None = None  # pixels a side of what is decoded at once; None: the whole image

    def velocity(
        self, params: Params, latent: Float[Array, " b *latent"], conditioning: Conditioning, time: Array, guidance: Array
    ) -> Float[Array, " b *latent"]:
        """The policy's prediction in `dtype`; latents come in float32. params: the base with any of its leaves replaced.

        time: [] or [b], in 0..1000.
        """
        time = jnp.broadcast_to(time, latent.shape[:1])
        return self.pipeline.velocity(
            self.pipeline.transformer.gathered(params), latent.astype(self.dtype), conditioning, time, guidance
        )

    def encode(self, prompts: Sequence[str], max_tokens: int, *, negative: bool = False) -> Conditioning:
        """What the network is told of each prompt, on every device. negative: what guidance leads away from."""
        encoding, _ = self.text_encoders.encode(prompts, max_tokens, None if negative else self.instruction)
        return hosts.put(encoding, sharding.replicated(self.mesh))

    def decode(self, params: Params, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Images in [0, 1] float32 from latents; params: `vae`."""
        decode = partial(self.pipeline.decode, gather(params))
        latent = latent.astype(self.pipeline.vae_dtype or self.dtype)
        if self.tile is None:
            return decode(latent)
        tile = self.tile // self.pipeline.compression
        return decode_tiled(decode, latent, tile, tile // 4, self.pipeline.compression)

    def parameter_table(self) -> list[Entry]:
        """How the transformer's parameters are named and ordered in released files."""
        return entries(self.pipeline.transformer.state)

    def __hash__(self) -> int:  # a static argument of jit: one backbone, one identity
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


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
    if hub.is_name(path):
        return hub.snapshot(path, lambda: _listed(path), f"model.path={path!r}:")
    raise InputError(f"model.path={path!r}: no such directory (and not of the form OWNER/NAME of a hub)")


def _listed(name: str) -> list[str]:
    """The files of a hub repository that a pipeline is read from."""
    from huggingface_hub import HfApi

    try:
        return pipeline_files(HfApi().list_repo_files(name))
    except Exception:  # no network, or none is wanted: what the cache has, be it whole or not, which loading will tell
        return pipeline_files(["model_index.json"])


def pipeline_files(files: Sequence[str]) -> list[str]:
    """Of all files of a repository those that a pipeline is read from: its components' configs, tokenizers and weights.

    Others lie beside them: the same weights in another precision or as pickles, or in the layout of another program, at the
    top level or in a folder that has no config.
    """
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    wanted = ["model_index.json"]
    for folder, names in folders.items():
        if "/" in folder or not folder or not any(name.endswith("config.json") for name in names):
            continue
        weights = without_variants(names)
        rest = [n for n in names if folder.startswith("tokenizer") or (n.endswith(".json") and ".index." not in n)]
        wanted += [f"{folder}/{name}" for name in {*weights, *rest}]
    return sorted(wanted)


def open_model(path: str, remat: str = "none") -> Pipeline:
    """The pipeline that `path` names, without its weights. Raises InputError for one that is absent or of an unknown kind."""
    folder = find_model(path)
    with in_one_line():
        return open_pipeline(folder, remat)


def load_backbone(
    model: str | Pipeline,
    precision: str,
    mesh: Mesh,
    *,
    cache: str | None = None,
    instruction: str | None = None,
    tile: int | None = None,
) -> Backbone:
    """Loads a pipeline, open already or named by its path, onto `mesh`; the networks run in `precision` (`bf16` or `fp32`).

    cache, instruction (its text) and tile: as in `config.Model`.
    Raises InputError in one line for a model that is absent, incomplete, of an unknown kind or one that cannot have these.
    """
    pipeline = open_model(model) if isinstance(model, str) else model
    if tile is not None and tile % pipeline.compression:
        raise InputError(f"model.tile={tile}: must be a multiple of {pipeline.compression}, the pixels of a latent, or null")
    dtype, rows = DTYPES[precision], sharding.rows_only(mesh)
    text_encoders = open_text_encoders(pipeline, precision, rows, cache)
    text_encoders.check_instruction(instruction)
    with in_one_line():
        for component in (pipeline.transformer, pipeline.vae):
            component.check()  # of all of them, before minutes go by with the first one
        transformer = pipeline.transformer.load(dtype, sharding.placement(mesh))
        vae = _load_vae(pipeline, dtype, rows)
    return Backbone(pipeline, mesh, dtype, transformer, text_encoders, vae, instruction, tile)


def open_drafts(pipeline: Pipeline, path: str | None, *, weights: bool = True) -> Pipeline:
    """The pipeline decoding with the autoencoder that `rollout.explore.vae` names; itself where it names none.

    weights: they are there, and fit. Raises InputError in one line for one that is absent, incomplete, or made for other
    latents; loads nothing.
    """
    if path is None:
        return pipeline
    folder = find_autoencoder(path, weights=weights)
    with in_one_line(lambda line: f"rollout.explore.vae={path!r}: {line}"):
        drafts = with_autoencoder(pipeline, folder)
        if weights:
            drafts.vae.check()
    return drafts


def decoding_with(backbone: Backbone, pipeline: Pipeline) -> Backbone:
    """The backbone with the autoencoder of `pipeline`, loaded; everything else is held once."""
    if pipeline is backbone.pipeline:
        return backbone
    with in_one_line():
        vae = _load_vae(pipeline, backbone.dtype, sharding.rows_only(backbone.mesh))
    return dataclasses.replace(backbone, pipeline=pipeline, vae=vae)


def find_autoencoder(path: str, *, weights: bool = True) -> Path:
    """The folder that `rollout.explore.vae` names: an autoencoder's own, or `vae` of a pipeline; here, embedded or of the hub.

    weights: wanted, too, of the hub. Raises InputError that says what was tried.
    """
    what = f"rollout.explore.vae={path!r}:"
    if path.startswith(EMBEDDED):
        folder = EMBEDDED_FOLDER / path.removeprefix(EMBEDDED)
    elif Path(path).is_dir() or not hub.is_name(path):
        folder = Path(path)
    else:
        files = ("config.json", *(("diffusion_pytorch_model*.safetensors*",) if weights else ()))
        folder = hub.snapshot(path, lambda: [*files, *(f"vae/{file}" for file in files)], what)
    for found in (folder, folder / "vae"):
        if (found / "config.json").is_file():
            return found
    raise InputError(f"{what} no config.json in it or in its folder vae; expected an autoencoder's directory, or a pipeline's")


def _load_vae(pipeline: Pipeline, dtype: jnp.dtype, rows: Mesh) -> Params:
    return pipeline.vae.load(pipeline.vae_dtype or dtype, sharding.placement(rows))


def open_text_encoders(pipeline: Pipeline, precision: str, mesh: Mesh, cache: str | None) -> TextEncoders:
    """The text encoders, checked but not loaded. Raises InputError in one line for weights that do not fit."""
    with in_one_line():
        for component in pipeline.text_encoders.values():
            component.check()
    return TextEncoders(pipeline, mesh, DTYPES[precision], open_cache(cache))
