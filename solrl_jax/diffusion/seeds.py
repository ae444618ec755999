"""Random numbers by address: a number depends on what it is used for, not on the order of the draws.

Each use has a stream of its own (`STREAMS`). A run draws from `key(run_seed, name)`. A candidate has a seed, and draws from the
streams of that seed (`normal`, `permutations`). A candidate's seed depends on the run's seed, the stream, the iteration, the
prompt and the candidate's index, and not on the batch, the chunk, the number of devices or the mesh (`docs/method.md`,
section 2). The same seed gives the same noise again: that is how a candidate is regenerated.
"""

import hashlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32, UInt64

# One number for each use. A new use takes a new number, so that the numbers of old runs do not change.
STREAMS = {
    # of a run: the seeds of candidates, by what they are sampled for, and the adapters at the start
    "candidate": 0, "evaluation": 6, "ranking": 7, "calibration seeds": 8, "adapters": 9,
    # of a run: the order of the sizes of pictures
    "sizes": 10,
    # of a candidate
    "initial": 1, "solver": 2, "sigmas": 3, "training": 4, "calibration": 5,
}  # fmt: skip

Seeds = UInt32[Array | np.ndarray, "b 2"]  # the two words of a threefry key, one key a row


def prompt_uid(prompt: str) -> int:
    """A number for a prompt: 32 bits of a hash of its text. The prompt's place in a file does not matter."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "little")


def stream(key: Array, name: str) -> Array:
    """The key of the stream `name` under `key`. Raises KeyError for a name that is not in `STREAMS`."""
    return jax.random.fold_in(key, STREAMS[name])


def key(run_seed: int | Int[Array, ""], name: str) -> Array:
    """The root key of the stream `name` of a run."""
    return stream(jax.random.key(run_seed), name)


@partial(jax.jit, static_argnums=1)
def candidate_seeds(
    run_seed: Int[Array, ""],
    name: str,
    iteration: Int[Array, ""],
    prompt_uids: UInt32[Array, " p"],
    candidates: Int[Array, " n"],
) -> UInt32[Array, "p n 2"]:
    """The seed of each candidate of each prompt. name: the stream; candidates: indices within a prompt."""
    root = jax.random.fold_in(key(run_seed, name), iteration)

    def one(uid, index):
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(root, uid), index))

    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(prompt_uids, candidates)


def normal(
    seeds: Seeds,
    name: str,
    shape: tuple[int, ...],
    fold: int | Int[Array, ""] | Int[Array | np.ndarray, " b"] | None = None,
) -> Float[Array, "b ..."]:
    """Standard normal numbers, float32 [b, *shape], from the stream `name` of each seed.

    fold: for a stream that is drawn from several times, the number of the draw: one for all seeds, or one for each.
    """

    def draw(seed, number):
        return jax.random.normal(_folded(seed, name, number), shape, jnp.float32)

    return jax.vmap(draw, (0, 0 if fold is not None and np.ndim(fold) else None))(seeds, fold)


def permutations(seeds: Seeds, name: str, count: int) -> Int[Array, "b {count}"]:
    """A random order of 0 to `count` - 1 from the stream `name` of each seed."""
    return jax.vmap(lambda seed: jax.random.permutation(_folded(seed, name, None), count))(seeds)


def _folded(seed: UInt32[Array, " 2"], name: str, number: Any) -> Array:
    root = stream(jax.random.wrap_key_data(seed), name)
    return root if number is None else jax.random.fold_in(root, number)


def seed_numbers(seeds: UInt32[np.ndarray, "*shape 2"]) -> UInt64[np.ndarray, "*shape"]:
    """Seeds as single uint64 numbers, for the ledger."""
    words = np.asarray(seeds).astype(np.uint64)
    return (words[..., 0] << np.uint64(32)) | words[..., 1]
