"""Selection of the candidates that are kept, by their rewards (docs/method.md, section 2).

The choice for a prompt depends on the rewards of that prompt alone, and equal rewards are ordered
by the index of the candidate.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

Rewards = Float[np.ndarray, "p n"]


def rank(rewards: Rewards) -> Int[np.ndarray, "p n"]:
    """The rank of each candidate within its prompt; 0 is the best.

    Args:
        rewards: One row per prompt. Non-finite rewards rank last.
    """
    order = np.argsort(np.where(np.isfinite(rewards), -rewards, np.inf), axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(rewards.shape[1])[None], axis=1)
    return places


def best_and_worst(rewards: Rewards) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"]]:
    """Pairs the samples of each prompt: the best with the worst, the second best with the second
    worst, and so on. Only samples with a finite reward are paired.

    Args:
        rewards: One row per prompt.

    Returns:
        Indices into the flattened rewards: the better sample of each pair, and the worse one. Every
        prompt has half as many pairs as samples. If some of its rewards are not finite, its last
        pairs consist of one sample twice.
    """
    count = rewards.shape[1]
    order = np.argsort(rank(rewards), axis=1)  # non-finite rewards come last
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
    """Selects the candidates of each prompt that are kept. Non-finite rewards are never selected.

    Args:
        rewards: One row per prompt.
        kept: How many candidates are kept per prompt.
        mode: "best_worst" keeps the kept/2 best and the kept/2 worst, "best" the best, "random" a
            random choice, and "best_random" the kept/2 best and a random choice of the others.
        seed: The seed of random choices.

    Returns:
        The indices of the kept candidates of each prompt, ascending, and whether the prompt is
        usable. A prompt with fewer than `kept` finite rewards is not; its indices are padding.

    Raises:
        ValueError: If there is no such mode, or `kept` does not fit the rewards.
    """
    n = rewards.shape[-1]
    if (
        rewards.ndim != 2
        or kept not in range(1, n + 1)
        or (kept % 2 and mode in ("best_worst", "best_random"))
    ):
        raise ValueError(
            f"rewards {list(rewards.shape)}, kept={kept}: the shape must be [prompts, candidates], "
            f"and kept must be from 1 to {n}, and even for two halves"
        )
    finite = np.isfinite(rewards)
    usable = finite.sum(1) >= kept
    ranks = rank(rewards)
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
            chosen = rank(-np.where(first, -1.0, draw)) < kept
        case _:
            raise ValueError(
                f"rollout.selection={mode!r}: must be one of "
                "'best_worst', 'best', 'random', 'best_random'"
            )
    chosen[~usable] = np.arange(n) < kept
    return np.nonzero(chosen)[1].reshape(len(rewards), kept), usable
