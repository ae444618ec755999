"""Which candidates are kept (docs/method.md, section 2): a stable choice by the rewards of one prompt alone."""

import numpy as np
from jaxtyping import Bool, Float, Int

Rewards = Float[np.ndarray, "p n"]


def rank(rewards: Rewards) -> Int[np.ndarray, "p n"]:
    """Each candidate's rank within its prompt, 0 the best. Equal rewards are ordered by index; non-finite ones come last."""
    order = np.argsort(np.where(np.isfinite(rewards), -rewards, np.inf), axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(rewards.shape[1])[None], axis=1)
    return places


def best_and_worst(rewards: Rewards) -> tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"]]:
    """Pairs of a prompt's samples: the best with the worst, the second best with the second worst, and so on.

    Returns rows of the flattened rewards, the better of each pair and the worse. A non-finite reward counts as the worst.
    """
    count = rewards.shape[1]
    order = np.argsort(rank(rewards), axis=1) + count * np.arange(len(rewards))[:, None]
    return order[:, : count // 2].reshape(-1), order[:, ::-1][:, : count // 2].reshape(-1)


def select(
    rewards: Rewards, kept: int, mode: str, seed: tuple[int, ...] = (0,)
) -> tuple[Int[np.ndarray, "p k"], Bool[np.ndarray, " p"]]:
    """Indices of the kept candidates of each prompt, ascending, and whether the prompt had enough finite rewards.

    mode: `best_worst` keeps the kept/2 best and the kept/2 worst; `best` the best; `random` a draw from `seed`; `best_random`
    the kept/2 best and a draw from the others. A non-finite reward is never selected. A prompt with fewer than `kept` finite
    rewards is not usable, and its indices are padding. Raises ValueError for another mode.
    """
    n = rewards.shape[-1]
    if (
        rewards.ndim != 2
        or kept not in range(1, n + 1)
        or (kept % 2 and mode in ("best_worst", "best_random"))
    ):
        what = f"rewards {list(rewards.shape)}, kept={kept}"
        raise ValueError(
            f"{what}; accepted: [prompts, candidates], kept from 1 to {n}, even for two halves"
        )
    finite = np.isfinite(rewards)
    usable = finite.sum(1) >= kept
    places = rank(rewards)
    last = finite.sum(1, keepdims=True)  # places from here on are non-finite
    match mode:
        case "best_worst":
            chosen = (places < kept // 2) | ((places >= last - kept // 2) & (places < last))
        case "best":
            chosen = places < kept
        case "random" | "best_random":
            first = finite & (places < (kept // 2 if mode == "best_random" else 0))
            draw = np.where(finite, np.random.default_rng(seed).random(rewards.shape), np.inf)
            chosen = rank(-np.where(first, -1.0, draw)) < kept
        case _:
            raise ValueError(
                f"rollout.selection={mode!r}: accepted are 'best_worst', 'best', 'random', 'best_random'"
            )
    chosen[~usable] = np.arange(n) < kept
    return np.nonzero(chosen)[1].reshape(len(rewards), kept), usable
