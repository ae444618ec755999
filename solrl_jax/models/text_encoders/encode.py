"""From prompts to conditioning: tokens, the cache of encodings, and the text encoders when the cache lacks a prompt."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from solrl_jax.errors import InputError, in_one_line
from solrl_jax.models.loading.tensor_files import weight_files
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens
from solrl_jax.models.text_encoders.cache import Cache, Encoding, key_of
from solrl_jax.parallel import hosts, sharding

ENCODED_ROWS = 8  # prompts that a device encodes at once
REVISION = (
    1  # part of every key: raised with every change of `models/` that changes a bit of an encoding
)


class TextEncoders:
    """The text encoders of a pipeline and the cache of their results. This object has state: the loaded parameters.

    The parameters are loaded when a prompt is not in the cache, and stay until `release`. Every device always encodes
    `ENCODED_ROWS` prompts at once. So there is one compiled program, and an encoding depends neither on the other prompts nor
    on the mesh: computed or read from the cache, it has the same bits.

    The key of an encoding is a hash of the weight files, the configurations, the dtype and the tokens. The tokens stand for
    prompt, tokenizer, maximum length and instruction. The device and the version of XLA are not part of the key: a cache from
    one machine can be used on another, where the same computation may round differently.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, dtype: jnp.dtype, cache: Cache | None):
        self.pipeline = pipeline
        self.mesh = mesh
        self.dtype = dtype
        self.cache = cache
        self._params: dict[str, Params] | None = None

    @property
    def loaded(self) -> bool:
        return self._params is not None

    @property
    def chunk(self) -> int:
        """How many prompts are encoded at once, on all devices together."""
        return ENCODED_ROWS * self.mesh.size

    def params(self) -> dict[str, Params]:
        """The parameters by folder, loaded if need be."""
        if self._params is None:
            if self.cache is not None:
                self.cache.check_writable()  # first, because loading takes minutes
            encoders = self.pipeline.text_encoders
            place = sharding.placement(self.mesh)
            with in_one_line():
                self._params = {
                    name: part.load(self.dtype, place) for name, part in encoders.items()
                }
        return self._params

    def check_instruction(self, instruction: str | None) -> None:
        """Raises InputError for an instruction to a model that takes none."""
        if instruction is not None and not self.pipeline.accepts_instruction:
            raise InputError(
                f"model.instruction: a {self.pipeline.kind} takes none; accepted: null"
            )

    def release(self) -> None:
        """Frees the parameters. They are loaded again when a prompt is not in the cache."""
        self._params = None

    def encode(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> tuple[Encoding, int]:
        """Encodings on the host, a row for each of one or more prompts, and how many were not in the cache."""
        tokens = self.pipeline.tokenize(prompts, max_tokens, instruction)
        rows: list[Encoding | None] = [None] * len(prompts)
        if self.cache is not None:
            keys = self._keys(tokens)
            rows = [self.cache.read(key) for key in keys]
        # hosts compute together or not at all
        missing = [
            i for i, absent in enumerate(hosts.anywhere([row is None for row in rows])) if absent
        ]
        for i, row in zip(
            missing, self._compute({name: x[missing] for name, x in tokens.items()}), strict=True
        ):
            rows[i] = row
            if self.cache is not None:
                self.cache.write(keys[i], row)
        whole = [row for row in rows if row is not None]
        return {name: np.stack([row[name] for row in whole]) for name in whole[0]}, len(missing)

    def encode_ahead(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        instruction: str | None,
        progress: Callable[[int, int], None],
    ) -> int:
        """Encodes the prompts that the cache lacks, frees the parameters, and returns how many there were; 0 without a cache.

        progress: is called with how many prompts the cache lacks, and how many more are done.
        """
        if self.cache is None:
            return 0
        keys = self._keys(self.pipeline.tokenize(prompts, max_tokens, instruction))
        absent = hosts.anywhere([not self.cache.has(key) for key in keys])
        missing = [prompt for prompt, is_absent in zip(prompts, absent, strict=True) if is_absent]
        for start in range(0, len(missing), self.chunk):
            progress(len(missing), min(start, self.chunk))
            self.encode(missing[start : start + self.chunk], max_tokens, instruction)
        self.release()
        return len(missing)

    def _keys(self, tokens: Tokens) -> list[str]:
        """The key of each prompt's entry in the cache."""
        count = len(next(iter(tokens.values())))
        return [
            key_of(self.identity, {name: x[i] for name, x in tokens.items()}) for i in range(count)
        ]

    @functools.cached_property
    def identity(self) -> str:
        """A hash of what the encoders compute: weight files, configurations, dtype, kind of pipeline."""
        assert self.cache is not None
        parts: dict[str, Any] = {}
        with in_one_line():
            for name, component in self.pipeline.text_encoders.items():
                files = [component.source / "config.json", *weight_files(component.source)]
                parts[name] = [(file.name, self.cache.digest(file)) for file in files]
        facts = [REVISION, self.pipeline.kind, jnp.dtype(self.dtype).name, parts]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _compute(self, tokens: Tokens) -> Iterator[Encoding]:
        """Encodes prompts in chunks and yields their encodings one by one."""
        length = len(next(iter(tokens.values())))
        count = self.chunk
        for start in range(0, length, count):
            part = {name: x[start : start + count] for name, x in tokens.items()}
            placed = {
                name: hosts.put(sharding.pad_rows(x, count), sharding.rows(self.mesh))
                for name, x in part.items()
            }
            with jax.set_mesh(self.mesh):
                out = hosts.fetch(encode_chunk(self, self.params(), placed))
            yield from (
                {name: x[i] for name, x in out.items()} for i in range(min(count, length - start))
            )


@functools.partial(sharding.jit, static_argnums=0)
def encode_chunk(
    encoders: TextEncoders, params: dict[str, Params], tokens: TracedTokens
) -> Conditioning:
    """The conditioning of a chunk of prompts, split over the mesh."""
    parts = encoders.pipeline.text_encoders
    out = encoders.pipeline.encode_text(
        {name: parts[name].gather(p) for name, p in params.items()}, tokens
    )
    return jax.tree.map(sharding.split_rows, out)
