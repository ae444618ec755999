"""Trains the embedded pipeline from Python, without the records and checkpoints of `solrl train`.

python examples/train_tiny.py [KEY=VALUE]...
"""

import sys

import solrl_jax as solrl


def main(*overrides: str) -> None:
    experiment = solrl.load("tiny", *overrides)
    state = solrl.fresh_state(experiment)
    before = solrl.evaluate(experiment, state.ema)
    for i in range(1, experiment.config.train.iterations + 1):
        state, outcome = solrl.iterate(experiment, state, i)
        row = outcome.metrics
        pool = row["pool/reward"]
        kept = row["kept/reward"]
        print(f"{i:3}: pool {pool:.3f}, kept {kept:.3f}, rank {row['fidelity/spearman']:.2f}")
    after = solrl.evaluate(experiment, state.ema)
    rewards = [result.means["reward"] for result in (before, after)]
    print("held-out reward: {:.3f} before, {:.3f} after".format(*rewards))
    solrl.export_lora(experiment, state.ema, "tiny-lora.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
