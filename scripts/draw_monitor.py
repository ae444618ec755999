"""Draws docs/monitor.png from benchmarks/monitor.json: a run with a floor under its rank fidelity, and the same run without it.

python scripts/draw_monitor.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"without": "#D55E00", "with": "#0072B2"}
WINDOW = 3  # iterations whose median the monitor compares with the floor


def main() -> None:
    record = json.loads((ROOT / "benchmarks" / "monitor.json").read_text())
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for name, run in record["runs"].items():
        iterations = range(1, len(run["spearman"]) + 1)
        above.plot(
            iterations,
            run["spearman"],
            "o-",
            ms=3,
            lw=1,
            color=COLOURS[name],
            label=f"{name} the floor",
        )
        below.step(iterations, run["level"], where="mid", color=COLOURS[name])
    above.axhline(
        record["floor"], color="#555555", lw=1, ls="--", label=f"floor {record['floor']:g}"
    )
    above.set_ylabel("Spearman, kept samples")
    above.legend(loc="lower right", fontsize=8)
    below.set_yticks(range(len(record["levels"])), record["levels"], fontsize=7)
    below.set_xlabel("iteration")
    figure.savefig(ROOT / "docs" / "monitor.png", dpi=130)


if __name__ == "__main__":
    main()
