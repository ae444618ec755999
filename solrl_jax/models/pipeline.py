"""A text-to-image pipeline as pure functions, read from a diffusers directory (`model_index.json` and a folder a component).

A `Pipeline` holds no numbers: graphs, shapes and functions on parameters. The parameters are loaded beside it, where and in
which dtype the caller says.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from solrl_jax.models.layers import gather
from solrl_jax.models.weights import (
    Params,
    Placement,
    abstract_tensors,
    check_component,
    entries,
    load_component,
    parameter_count,
)  # fmt: skip

Conditioning = dict[str, Array]  # what the network is told of a prompt; every leaf has a leading axis of prompts
Tokens = dict[str, np.ndarray]  # what the text encoder is given; likewise


@runtime_checkable
class VelocityFn(Protocol):
    """(transformer parameters, latents [b, h, w, c], conditioning of b prompts, timestep [b] in 0..1000, guidance []) -> v."""

    def __call__(
        self, params: Params, latent: Array, conditioning: Conditioning, timestep: Array, guidance: Array
    ) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Component:
    """One network of a pipeline: its static graph, the abstract state that names its parameters, its folder."""

    graphdef: nnx.GraphDef
    state: nnx.State
    folder: Path

    @classmethod
    def of(cls, folder: Path, make: Callable[[dict[str, Any]], Callable[[nnx.Rngs], nnx.Module]]) -> "Component":
        """make: from the component's config.json to a function that builds the network."""
        build = make(read_json(folder / "config.json"))
        return cls(*nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0)))), folder)

    def __call__(self, params: Params) -> Any:
        """The network with these parameters."""
        return nnx.merge(self.graphdef, params)

    def check(self) -> None:
        """Raises what `load` would raise for tensors that do not fit; reads no more than the headers of the files."""
        check_component(self.folder, self.state)

    def load(self, dtype: jnp.dtype, place: Placement | None = None) -> Params:
        """The parameters in `dtype`; place: from a parameter's path and shape to where it lies on a mesh."""
        return load_component(self.folder, self.state, dtype, place)

    def abstract(self, dtype: jnp.dtype, place: Placement) -> Params:
        """What `load` would return, without its numbers."""
        return abstract_tensors(entries(self.state), dtype, place)

    def shapes(self, dtype: jnp.dtype) -> Params:
        """The parameters' shapes as a tree of ShapeDtypeStruct."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), nnx.to_pure_dict(self.state))

    @property
    def size(self) -> int:
        return parameter_count(self.state)

    @functools.cached_property
    def stacked(self) -> frozenset[tuple[str, ...]]:
        """The paths under which all parameters are layers of a stack (`models.layers.stack`), at the top or further down."""
        below: dict[tuple[str, ...], bool] = {}
        for path, variable in nnx.to_flat_state(self.state):
            for depth in range(1, len(path) + 1):
                above = tuple(map(str, path[:depth]))
                below[above] = below.get(above, True) and variable.get_metadata()["below_stack"]
        return frozenset(path for path, all_below in below.items() if all_below)

    def gathered(self, params: Params, path: tuple[str, ...] = ()) -> Params:
        """Whole arrays on every device for everything but the stacked blocks, which are gathered a layer at a time.

        path: where `params` lies in the network.
        """
        out = {}
        for name, value in params.items():
            here = (*path, str(name))
            if here in self.stacked:
                out[name] = value
            elif isinstance(value, dict) and any(other[: len(here)] == here for other in self.stacked):
                out[name] = self.gathered(value, here)
            else:
                out |= gather({name: value})
        return out


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: static in compiled programs
class Pipeline:
    """What `solrl_jax` knows of a model."""

    kind: str  # the class name in model_index.json
    folder: Path
    transformer: Component
    text_encoders: dict[str, Component]  # by folder
    vae: Component
    scheduler: dict[str, Any]  # scheduler_config.json
    velocity: VelocityFn
    encode_text: Callable[[dict[str, Params], Tokens], Conditioning]  # parameters by folder
    unscale: Callable[[Float[Array, "b h w c"]], Float[Array, "b h w c"]]  # from latents to what the autoencoder decodes
    tokenize: Callable[[Sequence[str], int], Tokens]  # prompts, most tokens a prompt
    latent_shape: Callable[[int, int], tuple[int, int, int]]  # from the image's height and width; ValueError if they do not fit
    image_tokens: Callable[[int, int], int]
    default_max_tokens: int
    default_size: tuple[int, int]  # height and width the model was made for
    vae_dtype: jnp.dtype | None = None  # the one dtype that decoding works in, where there is one
    embedded_guidance: bool = False  # the network is told the guidance scale; there is no second evaluation without the prompt
    instruct: Callable[[Sequence[str], int, str], Tokens] | None = None  # as tokenize, for prompts after an instruction
    own_sigmas: bool = False  # the pipeline gives its scheduler `linspace(1, 1/n, n)` instead of taking the default grid

    @property
    def compression(self) -> int:
        """Pixels that a latent stands for in either direction."""
        return self.default_size[0] // self.latent_shape(*self.default_size)[0]

    def decode(self, params: Params, latent: Float[Array, "b h w c"]) -> Float[Array, "b H W 3"]:
        """Images in [0, 1], float32. params: the autoencoder's."""
        return to_unit_range(self.vae(params).decode(self.unscale(latent)))


def open_pipeline(folder: Path, remat: str = "none") -> Pipeline:
    """Reads the directory of a pipeline; no weight is loaded yet. remat: of the transformer (`models.layers.REMAT`).

    Raises FileNotFoundError or ValueError, in one line, for what is missing or of a kind that is not ported.
    """
    # imported here because each of them imports this file
    from solrl_jax.models.flux_pipeline import open_flux
    from solrl_jax.models.sana_pipeline import open_sana
    from solrl_jax.models.sd3_pipeline import open_sd3

    known = {"SanaPipeline": open_sana, "FluxPipeline": open_flux, "StableDiffusion3Pipeline": open_sd3}
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    kind = read_json(folder / "model_index.json").get("_class_name")
    if kind not in known:
        raise ValueError(f"{folder / 'model_index.json'}: _class_name={kind!r}; accepted: {', '.join(known)}")
    return known[kind](folder, remat)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FileNotFoundError or ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:  # of JSON or of UTF-8
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


@functools.cache
def load_tokenizer(folder: Path):
    """The tokenizer of a pipeline, as transformers loads it (no PyTorch needed)."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such tokenizer directory")
    # a directory without the config of its model cannot be told apart by AutoTokenizer; its own config names the class
    config = read_json(folder / "tokenizer_config.json")
    named = config.get("tokenizer_class", "")
    if named == "NoVocabulary":
        return NoVocabulary(config["model_max_length"])
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # which takes seconds

    plain = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(str(folder), local_files_only=True)


@dataclasses.dataclass(frozen=True)
class NoVocabulary:
    """In the place of a tokenizer where there is none, only its limit: every text is zeros, of the right shape. For plans."""

    model_max_length: int
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __call__(self, texts: Sequence[str], max_length: int = 1, **_: Any) -> dict[str, np.ndarray]:
        ids = np.zeros((len(texts), max_length), np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text) // 3)  # letters a token, or more

    def add_tokens(self, tokens: Sequence[str], **_: Any) -> None:
        """Nothing to add to."""


def tokenize_padded(folder: Path, prompts: Sequence[str], length: int) -> np.ndarray:
    """Token ids [prompts, length] int32, padded and truncated to `length` as the tokenizer in `folder` does it."""
    encoded = load_tokenizer(folder)(
        list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="np"
    )
    return encoded["input_ids"].astype("int32")


def clip_length(folder: Path, *positions: int) -> int:
    """The length of texts for CLIP: its tokenizer's. Raises ValueError if a tower has fewer `positions` than that."""
    length = load_tokenizer(folder).model_max_length
    if length > min(positions):
        raise ValueError(f"{folder}: model_max_length={length}; accepted: up to {min(positions)}, the positions of its encoder")
    return length


def to_unit_range(image: Float[Array, "b H W 3"]) -> Float[Array, "b H W 3"]:
    """From [-1, 1], overshoots included, to [0, 1] float32."""
    return jnp.clip(image.astype(jnp.float32) / 2 + 0.5, 0.0, 1.0)


def fitting_latent(height: int, width: int, compression: int, patch: int) -> tuple[int, int]:
    """Height and width of the latent of an image. Raises ValueError for an image that is no whole number of patches."""
    unit = compression * patch
    if height % unit or width % unit or height <= 0 or width <= 0:
        raise ValueError(f"size {height}x{width}: this model takes multiples of {unit} pixels in both directions")
    return height // compression, width // compression


def check_fit(folder: Path, *facts: tuple[str, int | None, int | None]) -> None:
    """The components were made for each other: (name, value, what the others want). Raises ValueError for the first misfit."""
    for name, value, wanted in facts:
        if value != wanted:
            raise ValueError(f"{folder}: {name}={value} does not fit the other components, which want {wanted}")
