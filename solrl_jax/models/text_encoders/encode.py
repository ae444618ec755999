"""`TextEncoders`: from prompts to conditioning, through a cache of encodings on disk."""

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

PROMPTS_PER_DEVICE = 8  # encoded at once
# Part of every cache key. It is raised with every change of `models/` that changes a bit of an
# encoding.
REVISION = 1


class TextEncoders:
    """The text encoders of a pipeline with a cache of their results.

    The parameters are loaded when a prompt is not in the cache, and stay loaded until `release`.
    Every device always encodes 8 prompts at once (`PROMPTS_PER_DEVICE`); missing ones are filled up
    with copies. So there is only one compiled program per number of tokens, and an encoding has the
    same bits whatever the other prompts and the mesh are, and whether it was computed or read from
    the cache.

    The cache key of an encoding is a hash of the weight files, the configurations, the dtype and
    the tokens. The tokens stand for prompt, tokenizer, maximum length and instruction. The device
    and the version of XLA are not part of the key: a cache from one machine can be used on another,
    where the same computation may round differently.

    Args:
        pipeline: the model, whose tokenizers and text encoders are used.
        mesh: devices that encode, in a mesh whose axis `tensor` has the size 1, so that prompts are
            split over all devices.
        dtype: dtype in which the text encoders compute.
        cache: folder of encodings on disk; None: every prompt is computed in every call.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, dtype: jnp.dtype, cache: Cache | None):
        self.pipeline = pipeline
        self.mesh = mesh
        self.dtype = dtype
        self.cache = cache
        self._params: dict[str, Params] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the parameters are in memory."""
        return self._params is not None

    @property
    def chunk(self) -> int:
        """Number of prompts that all devices together encode at once: 8 (`PROMPTS_PER_DEVICE`) per
        device.
        """
        return PROMPTS_PER_DEVICE * self.mesh.size

    def params(self) -> dict[str, Params]:
        """Returns the parameters of each text encoder.

        They are loaded if they are not in memory, and stay there until `release`. With a cache, its
        folder is created before, and checked to be writable.

        Returns:
            A dictionary from the name of a text encoder's folder, such as "text_encoder_2", to its
            parameters: a nested dictionary of arrays in `self.dtype`, sharded over the mesh.

        Raises:
            InputError: the cache cannot be written; a file is missing or cannot be read; or tensors
                in it are missing, unexpected, or of another shape or dtype than the network's.
        """
        if self._params is None:
            if self.cache is not None:
                self.cache.check_writable()  # before loading, which takes minutes
            place = sharding.placement(self.mesh)
            with in_one_line():
                self._params = {
                    name: component.load(self.dtype, place)
                    for name, component in self.pipeline.text_encoders.items()
                }
        return self._params

    def release(self) -> None:
        """Drops the parameters, which frees their device memory unless the caller holds them.

        They are loaded again when a prompt is not in the cache. Without loaded parameters, nothing
        happens.
        """
        self._params = None

    def check_instruction(self, instruction: str | None) -> None:
        """Checks that the model accepts an instruction.

        Args:
            instruction: text before each prompt; None, which every model accepts: no instruction.

        Raises:
            InputError: there is an instruction, but the model accepts none.
        """
        if instruction is not None and not self.pipeline.accepts_instruction:
            raise InputError(
                f"model.instruction: not supported by {self.pipeline.kind}; accepted: null"
            )

    def encode(
        self, prompts: Sequence[str], max_tokens: int, instruction: str | None = None
    ) -> tuple[Encoding, int]:
        """Encodes prompts. Those that the cache lacks are computed, and written to the cache.

        The parameters are loaded only if a prompt is missing. In a run of several processes, all
        must call this with the same prompts, and each computes the prompts that any process lacks.
        Without a cache, every prompt is computed. Damaged entries of the cache are replaced.

        Args:
            prompts: one or more prompts.
            max_tokens: number of tokens to which each prompt is padded or cut, up to 4096 or, for
                some models, fewer.
            instruction: text before each prompt, for models that accept one; other models ignore
                it. None: no instruction.

        Returns:
            The encodings by name in host memory, one row per prompt in the order of `prompts`: for
            example "text" [prompts, tokens, features]. Then the number of prompts that were
            computed because this process or another one lacked them.

        Raises:
            InputError: the tokenizer fails; `max_tokens` is not possible for the model; a file of a
                text encoder is missing, or its tensors are not those of the network by name, shape
                or dtype; or the folder of the cache cannot be created or written, which is checked
                before the text encoders load.
            RunError: an encoding cannot be written to the cache, or another process of the run
                gives no answer for 30 minutes.
            PermissionError: a folder of the cache may not be searched.
        """
        tokens = self.pipeline.tokenize(prompts, max_tokens, instruction)
        rows: list[Encoding | None] = [None] * len(prompts)
        if self.cache is not None:
            keys = self._keys(tokens)
            rows = [self.cache.read(key) for key in keys]
        # All hosts must compute the same prompts: those that are missing on any host.
        is_missing = hosts.anywhere([row is None for row in rows])
        missing = [i for i, flag in enumerate(is_missing) if flag]
        computed = self._compute({name: x[missing] for name, x in tokens.items()})
        for i, row in zip(missing, computed, strict=True):
            rows[i] = row
            if self.cache is not None:
                self.cache.write(keys[i], row)
        complete = [row for row in rows if row is not None]
        encoding = {name: np.stack([row[name] for row in complete]) for name in complete[0]}
        return encoding, len(missing)

    def encode_ahead(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        instruction: str | None,
        progress: Callable[[int, int], None],
    ) -> int:
        """Encodes the prompts that the cache lacks into it, then frees the parameters.

        Nothing happens without a cache; with one, the parameters are freed even if no prompt is
        missing. Entries that are damaged do not count as missing. In a run of several processes,
        all must call this with the same prompts.

        Args:
            prompts: all prompts that will be needed, one or more.
            max_tokens: number of tokens to which each prompt is padded or cut, up to 4096 or, for
                some models, fewer.
            instruction: text before each prompt, for models that accept one; other models ignore
                it. None: no instruction.
            progress: called before each chunk of `chunk` prompts with the total number of missing
                prompts, and the number of prompts encoded since the last call: 0 at first. It is
                not called after the last chunk.

        Returns:
            The number of prompts that the cache lacked, in any process; 0 without a cache. A prompt
            that is listed twice counts twice.

        Raises:
            InputError: the tokenizer fails; `max_tokens` is not possible for the model; a file of a
                text encoder is missing, or its tensors are not those of the network by name, shape
                or dtype; or the folder of the cache cannot be created or written, which is checked
                before the text encoders load.
            RunError: an encoding cannot be written to the cache, or another process of the run
                gives no answer for 30 minutes.
            PermissionError: a folder of the cache may not be searched.
        """
        if self.cache is None:
            return 0
        keys = self._keys(self.pipeline.tokenize(prompts, max_tokens, instruction))
        is_missing = hosts.anywhere([not self.cache.has(key) for key in keys])
        missing = [prompt for prompt, flag in zip(prompts, is_missing, strict=True) if flag]
        for start in range(0, len(missing), self.chunk):
            progress(len(missing), min(start, self.chunk))
            self.encode(missing[start : start + self.chunk], max_tokens, instruction)
        self.release()
        return len(missing)

    def _keys(self, tokens: Tokens) -> list[str]:
        """Returns the cache key of each prompt, in the order of the prompts. Needs a cache.

        Reads every weight file of the text encoders whose hash is not in the cache, and stores the
        hash there.

        Args:
            tokens: the tokens of one or more prompts, arrays by name with one row per prompt.

        Returns:
            One key per prompt, 64 hexadecimal digits (`key_of`).

        Raises:
            InputError: a file of a text encoder is missing or cannot be read.
        """
        count = len(next(iter(tokens.values())))
        return [
            key_of(self.identity, {name: x[i] for name, x in tokens.items()}) for i in range(count)
        ]

    @functools.cached_property
    def identity(self) -> str:
        """A hash of everything but the tokens that an encoding depends on, 64 hexadecimal digits.

        It covers `REVISION`, the kind of the pipeline, the dtype, and the names and contents of the
        configuration and weight files of each text encoder. Weight files that the cache does not
        know are read, and their hashes are stored in the cache. Computed once per instance.

        Raises:
            InputError: a file is missing or cannot be read.
            AssertionError: there is no cache.
        """
        assert self.cache is not None
        digests: dict[str, Any] = {}
        with in_one_line():
            for name, component in self.pipeline.text_encoders.items():
                files = [component.source / "config.json", *weight_files(component.source)]
                digests[name] = [(file.name, self.cache.digest(file)) for file in files]
        facts = [REVISION, self.pipeline.kind, jnp.dtype(self.dtype).name, digests]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _compute(self, tokens: Tokens) -> Iterator[Encoding]:
        """Encodes prompts in chunks of `chunk` prompts, and yields their encodings one by one.

        The parameters are loaded before the first chunk, if they are not in memory. The last chunk
        is filled up with copies of its first prompt, whose encodings are dropped.

        Args:
            tokens: tokens by name, with one row per prompt. With no rows, nothing is loaded or
                yielded.

        Yields:
            The encoding of each prompt: arrays by name in host memory, without the axis of prompts.

        Raises:
            InputError: a file of a text encoder is missing, or its tensors are not those of the
                network by name, shape or dtype; or the folder of the cache cannot be created or
                written.
        """
        count = len(next(iter(tokens.values())))
        for start in range(0, count, self.chunk):
            placed = {}
            for name, x in tokens.items():
                padded = sharding.pad_rows(x[start : start + self.chunk], self.chunk)
                placed[name] = hosts.put(padded, sharding.rows(self.mesh))
            with jax.set_mesh(self.mesh):
                encoded = hosts.fetch(encode_chunk(self, self.params(), placed))
            for i in range(min(self.chunk, count - start)):
                yield {name: x[i] for name, x in encoded.items()}


@functools.partial(sharding.jit, static_argnums=0)
def encode_chunk(
    encoders: TextEncoders, params: dict[str, Params], tokens: TracedTokens
) -> Conditioning:
    """Encodes one chunk of prompts, split over the mesh that is set. Compiled by jit.

    Args:
        encoders: the text encoders, a static argument. Their pipeline encodes; the parameters that
            they hold are not used.
        params: the parameters of each text encoder, by the name of its folder. They are gathered
            here.
        tokens: tokens of `encoders.chunk` prompts by name, one row per prompt.

    Returns:
        The arguments `conditioning` of the transformer by name, one row per prompt, with rows split
        over the devices.
    """
    components = encoders.pipeline.text_encoders
    gathered = {name: components[name].gather(value) for name, value in params.items()}
    conditioning = encoders.pipeline.encode_text(gathered, tokens)
    return jax.tree.map(sharding.split_rows, conditioning)
