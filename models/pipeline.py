"""A text-to-image pipeline as pure functions, read from a diffusers directory (`model_index.json` and a folder a component).

A `Pipeline` holds no numbers: graphs, shapes and functions on parameters. The parameters are loaded beside it, where and in
which dtype the caller says.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.weights import Params, load_component, parameter_count

Conditioning = dict[str, Array]  # what the network is told of a prompt; every leaf has a leading axis of prompts
Tokens = dict[str, np.ndarray]  # what the text encoder is given; likewise


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

    def load(self, dtype: jnp.dtype) -> Params:
        return load_component(self.folder, self.state, dtype)

    def shapes(self, dtype: jnp.dtype) -> Params:
        """The parameters' shapes as a tree of ShapeDtypeStruct."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), nnx.to_pure_dict(self.state))

    @property
    def size(self) -> int:
        return parameter_count(self.state)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What `solrl_jax` knows of a model."""

    kind: str  # the class name in model_index.json
    folder: Path
    transformer: Component
    text_encoder: Component
    vae: Component
    scheduler: dict[str, Any]  # scheduler_config.json
    velocity: VelocityFn
    encode_text: Callable[[Params, Tokens], Conditioning]
    decode: Callable[[Params, Float[Array, "b h w c"]], Float[Array, "b H W 3"]]  # images in [0, 1], float32
    tokenize: Callable[[Sequence[str], int], Tokens]  # prompts, most tokens a prompt
    latent_shape: Callable[[int, int], tuple[int, int, int]]  # from the image's height and width; ValueError if they do not fit
    image_tokens: Callable[[int, int], int]
    default_max_tokens: int
    default_size: tuple[int, int]  # height and width the model was made for


def open_pipeline(folder: Path) -> Pipeline:
    """Reads the directory of a pipeline; no weight is loaded yet.

    Raises FileNotFoundError or ValueError, in one line, for what is missing or of a kind that is not ported.
    """
    # imported here because each of them imports this file
    from models.sana_pipeline import open_sana

    known = {"SanaPipeline": open_sana}
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model directory")
    kind = read_json(folder / "model_index.json").get("_class_name")
    if kind not in known:
        raise ValueError(f"{folder / 'model_index.json'}: _class_name={kind!r}; accepted: {', '.join(known)}")
    return known[kind](folder)


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
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such tokenizer directory")
    # a directory without the config of its model cannot be told apart by AutoTokenizer; its own config names the class
    named = read_json(folder / "tokenizer_config.json").get("tokenizer_class", "")
    plain = named in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(str(folder), local_files_only=True)
