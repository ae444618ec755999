"""Selection of the candidates that are kept, by their rewards (docs/method.md, section 2).

The choice for a prompt does not depend on the rewards of other prompts, and equal rewards are
ordered by the index of the candidate.
"""

import numpy as np
from jaxtyping import Bool, Int, Real

Rewards = Real[np.ndarray, "p n"]


def rank_candidates(rewards: Rewards) -> Int[np.ndarray, "p n"]:
    """Returns the rank of each candidate within its prompt; 0 is the best.

    Args:
        rewards: One row of n rewards per prompt, a larger reward being better. Equal rewards are
            ranked by the index of the candidate, the lower index first. Rewards that are NaN or
            infinite (also +inf) rank last, by index too.

    Returns:
        The rank of each reward, an integer array in the shape of `rewards`. Every row holds 0 to n
        - 1 once each.
    """
    rewards = np.asarray(rewards, float)  # unsigned integers have no negatives
    order = np.argsort(np.where(np.isfinite(rewards), -rewards, np.inf), axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(rewards.shape[1])[None], axis=1)
    return places


def best_and_worst(rewards: Rewards) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"]]:
    """Pairs the samples of each prompt by reward: the best with the worst, the second best with the
    second worst, and so on.

    Samples without a finite reward are left out. If an odd number of samples remains, the middle
    one is left out too. Every prompt has n / 2 pairs, rounded down; missing pairs are replaced by
    padding, in which the better and the worse sample are the same sample of the prompt, whose
    reward need not be finite.

    Args:
        rewards: One row of n rewards per prompt. If rewards are equal, the lower index counts as
            the better one.

    Returns:
        Two arrays of indices into the flattened rewards, with one entry per pair: the better sample
        of the pair, and the worse one. The pairs come prompt by prompt. Within a prompt, the most
        extreme pair comes first and padding last.
    """
    count = rewards.shape[1]
    order = np.argsort(rank_candidates(rewards), axis=1)  # non-finite rewards come last
    num_finite = np.isfinite(rewards).sum(1, keepdims=True)
    best = np.arange(count // 2)[None]
    worst = np.where(best < num_finite // 2, num_finite - 1 - best, best)
    first = count * np.arange(len(rewards))[:, None]

    def flat(places: np.ndarray) -> np.ndarray:
        places = np.broadcast_to(places, worst.shape)
        return (np.take_along_axis(order, places, axis=1) + first).reshape(-1)

    return flat(best), flat(worst)


def select(
    rewards: Rewards, kept: int, mode: str, seed: tuple[int, ...] = (0,)
) -> tuple[Int[np.ndarray, "p k"], Bool[np.ndarray, " p"]]:
    """Selects the candidates of each prompt that are kept. Rewards that are NaN or infinite are
    never selected.

    Args:
        rewards: One row per prompt. Equal rewards are ranked by the index of the candidate, the
            lower index as the better one.
        kept: How many candidates are kept per prompt, from 1 to their number. It must be even for
            "best_worst".
        mode: "best_worst" keeps the kept/2 best and the kept/2 worst, "best" the best, and "random"
            a random choice. "best_random" keeps the kept/2 best (rounded down) and fills up the
            rest with a random choice of the remaining candidates.
        seed: Non-negative integers that seed NumPy's generator for the random choices, which also
            depend on the row of the prompt. The other modes do not read it.

    Returns:
        For each prompt, the indices of its kept candidates, ascending and counted from 0 within the
        prompt, and whether the prompt is usable. A prompt with fewer than `kept` finite rewards is
        not usable; its indices are the padding 0 to kept - 1.

    Raises:
        ValueError: If `mode` is none of these, `rewards` does not have two axes, or `kept` is out
            of range or odd where it must be even.
    """
    n = rewards.shape[-1]
    if rewards.ndim != 2 or kept not in range(1, n + 1) or (kept % 2 and mode == "best_worst"):
        raise ValueError(
            f"rewards {list(rewards.shape)}, kept={kept}: the shape must be [prompts, candidates], "
            f"and kept must be from 1 to {n}, and even for two halves"
        )
    finite = np.isfinite(rewards)
    usable = finite.sum(1) >= kept
    ranks = rank_candidates(rewards)
    num_finite = finite.sum(1, keepdims=True)  # non-finite rewards rank from here on
    match mode:
        case "best_worst":
            chosen = (ranks < kept // 2) | (
                (ranks >= num_finite - kept // 2) & (ranks < num_finite)
            )
        case "best":
            chosen = ranks < kept
        case "random" | "best_random":
            first = finite & (ranks < (kept // 2 if mode == "best_random" else 0))
            draw = np.where(finite, np.random.default_rng(seed).random(rewards.shape), np.inf)
            chosen = rank_candidates(-np.where(first, -1.0, draw)) < kept
        case _:
            raise ValueError(
                f"rollout.selection={mode!r}: must be one of "
                "'best_worst', 'best', 'random', 'best_random'"
            )
    chosen[~usable] = np.arange(n) < kept
    return np.nonzero(chosen)[1].reshape(len(rewards), kept), usable
