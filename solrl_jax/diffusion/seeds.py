"""Random numbers that depend on what they are used for, never on the order in which they are drawn.

Every random draw has its own key, derived by `fold_in`. Each use has a stream of its own
(`STREAMS`). A run draws from `run_key(run_seed, name)`. A candidate has a seed, and draws from the
streams of that seed (`normal`, `permutations`). The seed of a candidate is derived from (run seed,
stream, iteration, prompt, index of the candidate). It does not depend on the batch, the chunk, the
number of devices or the mesh (docs/method.md, section 2). The same seed gives the same noise again,
which is how a candidate is regenerated.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32, UInt64

# The number that identifies each stream. A new use takes a new number, so that the random numbers
# of old runs do not change.
STREAMS = {
    # Streams of a run: the seeds of candidates by what they are sampled for, and the initial LoRA
    # weights.
    "candidate": 0, "evaluation": 6, "ranking": 7, "calibration seeds": 8, "adapters": 9,
    # A stream of a run: the order of the image sizes that iterations train on.
    "sizes": 10,
    # Streams of a candidate.
    "initial": 1, "solver": 2, "sigmas": 3, "training": 4, "calibration": 5, "reference": 11,
    "query": 12,
}  # fmt: skip

Seeds = UInt32[Array | np.ndarray, "b 2"]  # one threefry key, which is two words, per row


def prompt_uid(prompt: str) -> int:
    """Returns an identifier of a prompt, the same wherever the prompt stands in a file.

    Args:
        prompt: The text of the prompt.

    Returns:
        The first four bytes of the SHA-256 hash of the text as a little-endian integer, from 0 to
        2**32 - 1.

    Raises:
        UnicodeEncodeError: If UTF-8 cannot encode the text.
    """
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "little")


def stream(key: Array, name: str) -> Array:
    """Derives the key of a stream: the random numbers that a run or a candidate has for one use.

    Args:
        key: The key of a run or of a candidate, a typed key of `jax.random`.
        name: The name of the stream, a key of `STREAMS` such as "candidate" or "solver".

    Returns:
        `key` with the number of the stream folded in, a typed key.

    Raises:
        KeyError: If there is no stream of that name.
    """
    return jax.random.fold_in(key, STREAMS[name])


def run_key(run_seed: int | Int[Array, ""], name: str) -> Array:
    """Returns the key from which a run draws the random numbers for one use (stream).

    Args:
        run_seed: The seed in the configuration of the run, from 0 to 2**31 - 1. It may be traced.
        name: The name of the stream, a key of `STREAMS` such as "candidate" or "adapters".

    Returns:
        A typed key of `jax.random`.

    Raises:
        KeyError: If there is no stream of that name.
    """
    return stream(jax.random.key(run_seed), name)


@partial(jax.jit, static_argnums=1)
def candidate_seeds(
    run_seed: int | Int[Array, ""],
    name: str,
    iteration: int | Int[Array, ""],
    prompt_uids: UInt32[Array, " p"],
    candidates: Int[Array, " n"],
) -> UInt32[Array, "p n 2"]:
    """Derives the seed of each candidate of each prompt.

    A seed is `run_key(run_seed, name)` with the iteration, the prompt's uid and the candidate's
    index folded in, in this order.

    Args:
        run_seed: The root of the seeds, e.g. `seed` or `eval.seed` of the configuration, from 0 to
            2**31 - 1.
        name: What the candidates are for, which gives other seeds for each use: "candidate"
            (training), "evaluation", "ranking" or "calibration seeds". Static.
        iteration: The number of the iteration, from 1; 0 for uses outside the iterations.
        prompt_uids: The hash of the text of each of the p prompts (`prompt_uid`).
        candidates: The indices of the n candidates within each prompt, from 0.

    Returns:
        One seed per prompt and candidate, the two words of a threefry key. A seed depends on the
        hash of its prompt, not on the position of the hash among `prompt_uids`.

    Raises:
        KeyError: If there is no stream of that name.
        OverflowError: If the seed or the iteration is an integer beyond the range of an int32.
    """
    root = jax.random.fold_in(run_key(run_seed, name), iteration)

    def seed(uid: Array, index: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(root, uid), index))

    return jax.vmap(jax.vmap(seed, (None, 0)), (0, None))(prompt_uids, candidates)


def prompt_seeds(
    run_seed: int, name: str, prompts: Sequence[str], candidates: int, iteration: int = 0
) -> UInt32[np.ndarray, "p n 2"]:
    """Returns the seeds of the first candidates of each prompt, as a host array that JAX computed
    on the default device.

    Args:
        run_seed: The root of the seeds, e.g. `seed` or `eval.seed` of the configuration, from 0 to
            2**31 - 1.
        name: What the candidates are for: "candidate" (training), "evaluation", "ranking" or
            "calibration seeds". Each has random numbers of its own. Other names in `STREAMS` are
            not refused.
        prompts: The texts of the p prompts. Equal ones get equal seeds.
        candidates: n, the number of candidates of each prompt.
        iteration: The number of the iteration, from 1; 0 for uses outside the iterations.

    Returns:
        For each prompt and candidate, the two words of a threefry key. They do not depend on the
        other prompts, nor on the number of candidates.

    Raises:
        KeyError: If `STREAMS` has no such name.
        OverflowError: If the seed or the iteration is beyond the range of an int32.
        UnicodeEncodeError: If UTF-8 cannot encode a prompt.
    """
    uids = np.array([prompt_uid(prompt) for prompt in prompts], np.uint32)
    return np.asarray(candidate_seeds(run_seed, name, iteration, uids, np.arange(candidates)))


def normal(
    seeds: Seeds,
    name: str,
    shape: tuple[int, ...],
    draw: int | Int[Array, ""] | Int[Array | np.ndarray, " b"] | None = None,
) -> Float[Array, "b ..."]:
    """Draws standard normal numbers for one use (stream) of each seed.

    Args:
        seeds: The b seeds, the two words of a threefry key per row.
        name: The use: "initial" (latents to start from), "solver" (stochastic steps), "training"
            (noise of the update), "calibration" (noise for measurements of exploration options) or
            "reference" (numbers whose order chooses the terms of an update at which the reference
            policy is evaluated). The streams "sigmas" and "query" are for `permutations` and
            `draw_steps`, but no name in `STREAMS` is refused.
        shape: The shape of the numbers of one seed.
        draw: The number of the draw, for a stream that is drawn from several times: one number for
            all seeds, or one per seed; other numbers give other results. None for a stream that is
            drawn from once (it is not the same as 0).

    Returns:
        An array of float32 with shape [b, *shape]. A row depends on its own seed alone.

    Raises:
        KeyError: If there is no stream of that name.
    """

    def draw_one(seed: Any, number: Any) -> Array:
        draw_key = stream(jax.random.wrap_key_data(seed), name)
        if number is not None:
            draw_key = jax.random.fold_in(draw_key, number)
        # A flat draw has the same bits, and XLA compiles it several times faster for CPUs.
        return jax.random.normal(draw_key, (math.prod(shape),), jnp.float32).reshape(shape)

    per_seed = draw is not None and np.ndim(draw) > 0
    return jax.vmap(draw_one, (0, 0 if per_seed else None))(seeds, draw)


def permutations(seeds: Seeds, name: str, count: int) -> Int[Array, "b {count}"]:
    """Draws a random permutation of 0 to `count` - 1 for one use (stream) of each seed.

    Args:
        seeds: The b seeds, the two words of a threefry key per row.
        name: The use, usually "sigmas" (the steps that a sample is trained at); or another stream
            of a seed ("initial", "solver", "training", "calibration" or "reference").
        count: The length of the permutation.

    Returns:
        One permutation per seed, int32.

    Raises:
        KeyError: If there is no stream of that name.
    """

    def permutation(seed: Any) -> Array:
        return jax.random.permutation(stream(jax.random.wrap_key_data(seed), name), count)

    return jax.vmap(permutation)(seeds)


def draw_steps(seeds: Seeds, first: int | Int[Array, ""], count: int) -> Int[Array, " b"]:
    """Draws one of several consecutive steps for each seed, all with the same probability.

    Args:
        seeds: The b seeds, the two words of a threefry key per row. Their stream "query" is used.
        first: The index of the first of these steps.
        count: The number of these steps, at least 1. With 1, nothing is random.

    Returns:
        The index of one step per seed, int32, from `first` to `first + count - 1`. An index depends
        on its own seed, `first` and `count` alone.
    """

    def draw(seed: Any) -> Array:
        return jax.random.randint(stream(jax.random.wrap_key_data(seed), "query"), (), 0, count)

    return first + jax.vmap(draw)(seeds)


def seed_numbers(seeds: UInt32[np.ndarray, "*shape 2"]) -> UInt64[np.ndarray, "*shape"]:
    """Packs the two words of each seed into one uint64, the first word in the high bits. The ledger
    of a run (`runs.ledger`) records these numbers.

    Args:
        seeds: Seeds in an array of any shape, with the two words on the last axis.

    Returns:
        One number per seed, with the shape of `seeds` without the last axis.
    """
    words = np.asarray(seeds).astype(np.uint64)
    return (words[..., 0] << np.uint64(32)) | words[..., 1]
