"""Finished runs by hand: the records and ledgers that a study compares, of numbers that one can
work out on paper.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from solrl_jax.config.serialization import to_yaml
from solrl_jax.runs import ledger
from solrl_jax.study.plan import Plan, Quick, Run, runs_of

# of every iteration
PROMPTS = 2
N = 4
KEPT = 2
STEPS = 10
EVERY = 2  # iterations from evaluation to evaluation
COMMON = (
    f"train.num_prompts={PROMPTS}",
    f"rollout.candidates={N}",
    f"rollout.kept={KEPT}",
    f"eval.every={EVERY}",
    "algorithm.timestep_fraction=0.5",
)


def plan_of(arms: dict[str, tuple[str, ...]], compared=(), sweeps=None, seeds=(0, 1)) -> Plan:
    quick = Quick(seeds=(0,), overrides=("train.iterations=1",))
    return Plan(
        what="By hand.",
        preset="tiny",
        overrides=COMMON,
        arms=arms,
        seeds=seeds,
        compared=compared,
        sweeps=sweeps or {},
        quick=quick,
    )


def write_run(
    run: Run, rewards: Sequence[float], spearman: float = 0.5, swapped: bool = False
) -> None:
    """A finished run whose held-out reward was `rewards`, evaluation by evaluation.

    swapped: whether the proxy ranks the kept candidates the wrong way round.
    """
    config = run.config
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(to_yaml(config))
    facts = {
        "devices": "1 x cpu",
        "packages": {"jax": "1"},
        "python": "3",
        "evaluation": "2 prompts x 3 pictures",
    }
    (run.folder / "run.json").write_text(json.dumps(facts))
    rows = []
    for i in range(config.train.iterations + 1):
        row = {"iteration": i} | ({"fidelity/spearman": spearman} if i else {})
        if i % EVERY == 0:
            reward = rewards[i // EVERY]
            scores = {"reward": reward, "shapes": reward, "shapes/strict": reward / 2}
            row |= {f"eval/{name}": value for name, value in scores.items()}
            row |= {f"eval/{name}/standard_error": 0.1 for name in scores}
        rows.append(row)
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i in range(1, config.train.iterations + 1):
        ledger.write(run.folder / "ledger", i, columns(run, swapped))


def columns(run: Run, swapped: bool) -> dict:
    """Of each prompt the first candidate is the best by proxy and the last the worst; both are
    kept.
    """
    rows = PROMPTS * N
    explore = run.config.rollout.explore
    kept = np.tile([True, *[False] * (N - 2), True], PROMPTS)
    true = np.tile(np.arange(N, 0, -1.0) * (-1 if swapped else 1), PROMPTS)
    return {
        "prompt": [f"prompt {row // N}" for row in range(rows)],
        "prompt_uid": np.arange(rows, dtype=np.uint32) // N,
        "candidate": np.tile(np.arange(N, dtype=np.int32), PROMPTS),
        "seed": np.arange(rows, dtype=np.uint64),
        "precision": explore.precision,
        "steps": explore.num_steps,
        "proxy_reward": np.tile(np.arange(N, 0, -1.0), PROMPTS),
        "rank": np.tile(np.arange(N, dtype=np.int32), PROMPTS),
        "kept": kept,
        "regenerated_reward": np.ma.masked_array(true, ~kept)
        if run.config.rollout.regenerate
        else None,
        "advantage": np.ma.masked_array(np.zeros(rows), ~kept),
        "policy_revision": 1,
    }


def make_runs(
    plan: Plan, out: Path, rewards: dict[str, Sequence[Sequence[float]]], **others
) -> list[Run]:
    """rewards: of each arm, of each seed, evaluation by evaluation; the runs of an arm that is not
    named are not there.
    """
    runs = runs_of(plan, out, False, ())
    for run in runs:
        if run.arm in rewards:
            write_run(run, rewards[run.arm][run.config.seed], **others.get(run.arm, {}))
    return runs
