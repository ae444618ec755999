"""A unit test of rank preservation: NVFP4 exploration finds the best and the worst candidates.

python -m pytest examples/rank_preservation_test.py
"""

import numpy as np

import solrl_jax as solrl

PROMPTS = 2
CANDIDATES = 16
KEPT = 8


def test_exploration_finds_both_ends() -> None:
    experiment = solrl.load(
        "tiny",
        f"rollout.candidates={CANDIDATES}",
        f"rollout.kept={KEPT}",
        "rollout.per_device_batch_size=32",
    )
    state = solrl.fresh_state(experiment)
    (figures,) = solrl.rank(experiment, state.ema, prompts=PROMPTS)
    # On average the KEPT / 2 best candidates by proxy are in the better half of the true order, and
    # the KEPT / 2 worst in the other half.
    assert figures["true_rank_best"] < CANDIDATES / 2 < figures["true_rank_worst"]


def test_a_proxy_with_small_errors_keeps_the_order() -> None:
    true = np.linspace(0, 1, PROMPTS * CANDIDATES).reshape(PROMPTS, CANDIDATES)
    proxy = true + 0.01 * np.random.default_rng(0).standard_normal(true.shape)
    solrl.assert_ranking_preserved(proxy, true, spearman=0.95, top_k=2, within=KEPT // 2)
    solrl.assert_selection_range(proxy, true, kept=KEPT, delta=0.05)
