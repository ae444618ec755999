"""Draws docs/monitor.png from benchmarks/monitor.json: rank fidelity with and without a floor.

python scripts/draw_monitor.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
COLORS = {"without": "#D55E00", "with": "#0072B2"}


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
            color=COLORS[name],
            label=f"{name} the floor",
        )
        below.step(iterations, run["level"], where="mid", color=COLORS[name])
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
