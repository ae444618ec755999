"""`TextEncoders`: from prompts to conditioning, through a cache of encodings on disk."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from solrl_jax.errors import InputError, as_input_error
from solrl_jax.models.loading.tensor_files import weight_files
from solrl_jax.models.loading.weights import Params
from solrl_jax.models.pipeline import Conditioning, Pipeline, Tokens, TracedTokens
from solrl_jax.models.text_encoders.cache import Cache, Encoding, key_of
from solrl_jax.parallel import hosts, sharding

PROMPTS_PER_DEVICE = 8  # encoded at once
# Part of every cache key. It is raised with every change of `models/` that changes a bit of an
# encoding.
REVISION = 1

T = TypeVar("T")


class TextEncoders:
    """Encodes prompts by the text encoders of a pipeline, with a cache of the results on disk.

    The parameters are loaded only when a prompt is not in the cache (without a cache: at the first
    prompt), and stay loaded until `release`. With a cache, the first look-up hashes the weight
    files, which reads them whole unless the cache remembers their hashes.

    The bits of an encoding do not depend on the other prompts that are encoded with it, because a
    device always encodes 8 prompts at once (a shorter chunk is filled up with copies of its first
    prompt).

    An encoding is found in the cache if weights, configurations, dtype and tokens are the same. The
    device and the version of XLA may differ.

    Args:
        pipeline: the model, whose tokenizers and text encoders are used.
        mesh: devices that encode, each its own prompts. The sizes of its axes `sequence` and
            `tensor` must be 1, which is not checked.
        dtype: dtype in which the text encoders compute.
        cache: the cache; None: no cache.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh, dtype: jnp.dtype, cache: Cache | None):
        self.pipeline = pipeline
        self.mesh = mesh
        self.dtype = dtype
        self.cache = cache
        self._params: dict[str, Params] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the parameters of the text encoders are in memory."""
        return self._params is not None

    @property
    def prompts_per_chunk(self) -> int:
        """Number of prompts that are encoded at once: 8 per device of `mesh`, in all processes of
        the run together.
        """
        return PROMPTS_PER_DEVICE * self.mesh.size

    def load_params(self) -> dict[str, Params]:
        """Returns the parameters of the text encoders, and loads them if they are not in memory.

        They stay in memory until `release`. Every process of a run must call it. Before loading,
        the cache, if there is one, is checked to be writable.

        Returns:
            From the name of a text encoder's folder, such as "text_encoder_2", to its parameters:
            nested dictionaries of arrays in `self.dtype`, sharded over the mesh.

        Raises:
            InputError: the cache cannot be written, or a file is missing, cannot be read or has
                other tensors than the network.
        """
        if self._params is None:
            if self.cache is not None:
                hosts.run_on_every(self.cache.check_writable)  # loading takes minutes
            place = sharding.parameter_placement(self.mesh)
            with as_input_error():
                self._params = {
                    name: component.load(self.dtype, place)
                    for name, component in self.pipeline.text_encoders.items()
                }
        return self._params

    def release(self) -> None:
        """Drops the parameters, which frees their device memory unless the caller holds them. They
        are loaded again when they are needed. Without loaded parameters, nothing happens.
        """
        self._params = None

    def check_instruction(self, instruction: str | None) -> None:
        """Checks that the model accepts an instruction, if there is one.

        Args:
            instruction: text before each prompt; "" counts as one. None: no instruction, which
                every model accepts.

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
        """Encodes prompts, or reads their encodings from the cache.

        Prompts that the cache lacks or holds damaged (all, if there is no cache) are computed and
        written to it. For this the parameters are loaded, and stay in memory until `release`. In a
        run of several processes, all must call this with the same prompts; a prompt that the cache
        of any process lacks is computed by all together, and written by each to its cache.

        Args:
            prompts: one or more prompts.
            max_tokens: number of tokens to which each prompt is padded or cut. The limits are those
                of the pipeline's `tokenize`: at most 4096, for some models less.
            instruction: text before each prompt. Models that accept none ignore it. None: no
                instruction.

        Returns:
            (encodings, number of prompts that were computed; a prompt that comes twice counts
            twice). The encodings are arrays by name in host memory, with one row per prompt in the
            order of `prompts`: for example "text" [prompts, tokens, features], in the dtype of the
            text encoders, and "mask" [prompts, tokens], bool.

        Raises:
            InputError: `max_tokens` is not possible for the model, the tokenizer fails, a file of a
                text encoder is missing or cannot be used, or the cache cannot be written.
            PermissionError: a folder of the cache may not be searched.
            RunError: writing an encoding fails, or another process of the run does not answer for
                30 minutes.
        """
        tokens = self.pipeline.tokenize(prompts, max_tokens, instruction)
        cache = self.cache
        rows: list[Encoding | None] = [None] * len(prompts)
        if cache is not None:
            rows = self._look_up(tokens, cache.read)
        # All hosts must compute the same prompts: those that are missing on any host.
        is_missing = hosts.any_flags([row is None for row in rows])
        missing = [i for i, flag in enumerate(is_missing) if flag]
        computed = list(self._compute({name: x[missing] for name, x in tokens.items()}))
        for i, row in zip(missing, computed, strict=True):
            rows[i] = row
        if cache is not None and missing:
            keys = self._keys(tokens)

            def store() -> None:
                for i, row in zip(missing, computed, strict=True):
                    cache.write(keys[i], row)

            hosts.run_on_every(store)
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
        """Encodes all prompts that the cache lacks into the cache, then releases the parameters.

        Without a cache, nothing happens: loaded parameters stay. With one, they are also released
        if encoding fails or no prompt is missing. A damaged file in the cache counts as an
        encoding, which `encode` later computes again. In a run of several processes, all must call
        this with the same prompts.

        Args:
            prompts: all prompts that will be needed, one or more.
            max_tokens: number of tokens to which each prompt is padded or cut. The limits are those
                of the pipeline's `tokenize`: at most 4096, for some models less.
            instruction: text before each prompt. Models that accept none ignore it. None: no
                instruction.
            progress: a function `(total, increment)` that is called before each chunk of
                `prompts_per_chunk` prompts: with the number of prompts to encode, and the number
                encoded since the last call (0 at first, then `prompts_per_chunk`). It is not called
                after the last chunk, nor if there is nothing to encode. Its errors pass unchanged.

        Returns:
            The number of prompts that the cache lacked, in any process (a prompt that comes twice
            counts twice); 0 without a cache.

        Raises:
            InputError: `max_tokens` is not possible for the model, the tokenizer fails, a file of a
                text encoder is missing or cannot be used, or the cache cannot be written.
            PermissionError: a folder of the cache may not be searched.
            RunError: writing an encoding fails, or another process of the run does not answer for
                30 minutes.
        """
        if self.cache is None:
            return 0
        try:
            tokens = self.pipeline.tokenize(prompts, max_tokens, instruction)
            is_cached = self._look_up(tokens, self.cache.has)
            is_missing = hosts.any_flags([not flag for flag in is_cached])
            missing = [prompt for prompt, flag in zip(prompts, is_missing, strict=True) if flag]
            for start in range(0, len(missing), self.prompts_per_chunk):
                progress(len(missing), min(start, self.prompts_per_chunk))
                self.encode(
                    missing[start : start + self.prompts_per_chunk], max_tokens, instruction
                )
        finally:
            self.release()
        return len(missing)

    def _look_up(self, tokens: Tokens, find: Callable[[str], T]) -> list[T]:
        """Asks the cache about prompts, in every process. Needs a cache.

        A process whose cache cannot be read ends the run in all processes, which would wait for it
        otherwise.

        Args:
            tokens: the tokens of one or more prompts: arrays by name with one row per prompt.
            find: a function of a prompt's key, such as `self.cache.read`.

        Returns:
            The result of `find` for each prompt, in this process.

        Raises:
            InputError: a file of a text encoder is missing or cannot be read, in any process.
            PermissionError: `find` raised it in this process.
            RunError: `find` failed in another process, or one does not answer for 30 minutes.
        """
        results: list[T] = []
        hosts.run_on_every(lambda: results.extend(map(find, self._keys(tokens))))
        return results

    def _keys(self, tokens: Tokens) -> list[str]:
        """Returns the keys under which the cache stores the encodings of prompts.

        If the hashes of the weight files are not in the cache yet, the files are read and the
        hashes stored there.

        Args:
            tokens: the tokens of one or more prompts: arrays by name with one row per prompt.

        Returns:
            One key of 64 hexadecimal digits per prompt.

        Raises:
            InputError: a file of a text encoder is missing or cannot be read.
            AssertionError: there is no cache.
        """
        count = len(next(iter(tokens.values())))
        return [
            key_of(self.identity, {name: x[i] for name, x in tokens.items()}) for i in range(count)
        ]

    @functools.cached_property
    def identity(self) -> str:
        """A hash of everything except the tokens that determines an encoding, 64 hexadecimal
        digits.

        It covers the revision of the encoding code (`REVISION`), the name of the pipeline class
        (`Pipeline.kind`), the dtype, and the configuration and weight files of each text encoder.
        It is computed once, at the first use, which reads files whose hashes are not in the cache
        yet and stores the hashes there.

        Raises:
            InputError: a file is missing or cannot be read.
            AssertionError: there is no cache.
        """
        assert self.cache is not None
        digests: dict[str, Any] = {}
        with as_input_error():
            for name, component in self.pipeline.text_encoders.items():
                files = [component.source / "config.json", *weight_files(component.source)]
                digests[name] = [(file.name, self.cache.file_sha256(file)) for file in files]
        facts = [REVISION, self.pipeline.kind, jnp.dtype(self.dtype).name, digests]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _compute(self, tokens: Tokens) -> Iterator[Encoding]:
        """Encodes prompts, `prompts_per_chunk` at a time, and yields their encodings one by one.

        Loads the parameters if there is a prompt and they are not in memory. Every process must
        consume it to the end, with the same tokens.

        Args:
            tokens: tokens of the prompts: arrays by name with one row per prompt. There may be no
                rows.

        Yields:
            The encoding of each prompt: arrays by name in host memory, without an axis of prompts.

        Raises:
            InputError: a text encoder cannot be loaded, or the cache cannot be written, which is
                checked before loading.
        """
        count = len(next(iter(tokens.values())))
        for start in range(0, count, self.prompts_per_chunk):
            placed = {}
            for name, x in tokens.items():
                padded = sharding.pad_rows(
                    x[start : start + self.prompts_per_chunk], self.prompts_per_chunk
                )
                placed[name] = hosts.put(padded, sharding.rows(self.mesh))
            with jax.set_mesh(self.mesh):
                encoded = hosts.fetch(encode_chunk(self, self.load_params(), placed))
            for i in range(min(self.prompts_per_chunk, count - start)):
                yield {name: x[i] for name, x in encoded.items()}


@functools.partial(sharding.jit, static_argnums=0)
def encode_chunk(
    encoders: TextEncoders, params: dict[str, Params], tokens: TracedTokens
) -> Conditioning:
    """Encodes one chunk of prompts. Jitted by `sharding.jit`: `jax.jit` with options under which
    results do not depend on the mesh. XLA partitions the program by rows over the mesh of
    `jax.set_mesh`, which must be that of `encoders`.

    Args:
        encoders: the text encoders, whose pipeline encodes. A static argument under jit.
        params: the parameters of each text encoder, by the name of its folder. Sharded ones are
            gathered on every device, those of stacked layers one layer at a time.
        tokens: tokens of `encoders.prompts_per_chunk` prompts: arrays by name with one row per
            prompt.

    Returns:
        The encodings: arrays by name with one row per prompt, for the argument `conditioning` of
        the transformer. Rows are split over the devices.
    """
    components = encoders.pipeline.text_encoders
    gathered = {name: components[name].gather(value) for name, value in params.items()}
    conditioning = encoders.pipeline.encode_text(gathered, tokens)
    return jax.tree.map(sharding.split_rows, conditioning)
