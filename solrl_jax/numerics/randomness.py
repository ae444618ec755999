"""Randomness by address: every random number is a function of what it is for, never of the order in which it was asked for.

A candidate's key depends on (run seed, iteration, prompt, candidate index) and on nothing else (spec, section 2): not on the
batch, the chunk, the device count or the mesh. Regenerating a candidate is drawing from its key again.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

# One number a purpose; a new purpose takes a new number, so that old runs keep theirs.
STREAMS = {"candidate": 0, "initial": 1, "solver": 2, "sigmas": 3, "training": 4, "calibration": 5}


def prompt_uid(prompt: str) -> int:
    """A prompt's name in random addresses: 32 bits of a hash of its text, so that its place in a file does not matter."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "little")


def stream(key: Array, name: str) -> Array:
    """The sub-key for one purpose of `STREAMS`."""
    return jax.random.fold_in(key, STREAMS[name])


@jax.jit
def candidate_seeds(
    run_seed: Int[Array, ""], iteration: Int[Array, ""], prompt_uids: UInt32[Array, " p"], candidates: Int[Array, " n"]
) -> UInt32[Array, "p n 2"]:
    """The seed of every candidate: the two words of its threefry key."""
    root = jax.random.fold_in(stream(jax.random.key(run_seed), "candidate"), iteration)
    one = lambda uid, index: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(root, uid), index))
    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(prompt_uids, candidates)


def initial_noise(seeds: UInt32[Array, "b 2"], shape: tuple[int, ...]) -> Float[Array, "b ..."]:
    """The standard normal latent that each seed stands for; `shape` is of one latent; float32."""
    draw = lambda seed: jax.random.normal(stream(jax.random.wrap_key_data(seed), "initial"), shape, jnp.float32)
    return jax.vmap(draw)(seeds)


def seed_numbers(seeds: UInt32[np.ndarray, "... 2"]) -> np.ndarray:
    """Seeds as single uint64 numbers, for the ledger."""
    words = np.asarray(seeds).astype(np.uint64)
    return (words[..., 0] << np.uint64(32)) | words[..., 1]
