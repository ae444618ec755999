"""Draws docs/rankings.png from benchmarks/rank-tiny-nvfp4.json and benchmarks/rank-cheaper.json.

    python scripts/draw_rankings.py

Above: how well previews rank, by pipeline, before and after training.  Below: what leaving steps out costs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
MEASURES = {"spearman": "Spearman", "kendall": "Kendall", "top_k_match": "top 4 among the best 12"}
PAPER = {"spearman": 0.927, "kendall": 0.798, "top_k_match": 0.969}  # NVFP4, 6 steps, mean of four large models
KINDS = {
    "BF16, 6 steps": ("bf16", 0, "#009E73"),
    "NVFP4, the first of 6 steps BF16": ("nvfp4_46", 1, "#0072B2"),
    "NVFP4, 6 steps": ("nvfp4_46", 0, "#D55E00"),
}
PIPELINES = {"tiny-sana": "#CC79A7", "tiny-flux": "#E69F00", "tiny-sd3": "#56B4E9"}


def rows(measurement: dict[str, Any], precision: str, exact_steps: int) -> list[dict[str, Any]]:
    found = [r for r in measurement["results"] if (r["precision"], r["exact_steps"]) == (precision, exact_steps)]
    if not found:
        raise SystemExit(f"{measurement['of']}: no results of {precision} with {exact_steps} exact steps")
    return sorted(found, key=lambda row: row["steps"])


def speedup(steps: int, exact: int = 1) -> float:
    """Rollout phase of `naive_scaling`, 96 pictures of 10 BF16 steps, over `sol_rl`'s, where four bits take half the time."""
    return 96 * 10 / (96 * (exact + (steps - exact) / 2) + 24 * 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "rankings.png")
    out = parser.parse_args().out
    six = json.loads((ROOT / "benchmarks" / "rank-tiny-nvfp4.json").read_text())["measurements"]
    fewer = json.loads((ROOT / "benchmarks" / "rank-cheaper.json").read_text())["fewer steps"]

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 3)
    for (key, title), above, below in zip(MEASURES.items(), *axes, strict=True):
        for label, (precision, exact, color) in KINDS.items():
            values = [rows(m, precision, exact)[0][key] for m in six]
            above.plot(values, range(len(six)), "o", color=color, label=label)
        above.axvline(PAPER[key], color="#6e7781", linewidth=1, linestyle=":", label="the paper's NVFP4, large models")
        above.set_yticks(range(len(six)), [m["of"].replace(" 20 iterations", "") for m in six] if above is axes[0, 0] else [])
        above.invert_yaxis()
        above.set_title(title, fontsize=10)
        for measurement in fewer:
            pipeline = measurement["of"].split(",")[0]
            shown = rows(measurement, "nvfp4_46", 1)
            x, y = [speedup(r["steps"]) for r in shown], [r[key] for r in shown]
            below.plot(x, y, "o-", color=PIPELINES[pipeline], label=pipeline)
        below.axhline(PAPER[key], color="#6e7781", linewidth=1, linestyle=":")
        ticks = [r["steps"] for r in rows(fewer[0], "nvfp4_46", 1)]
        below.set_xticks([speedup(n) for n in ticks], [f"{n} steps\n{speedup(n):.2f} x" for n in ticks])
    axes[1, 0].legend(fontsize=8, frameon=False)
    figure.supxlabel(
        "below: fewer steps, the first BF16, after training; speed of the rollout phase by arithmetic, see docs/exploration.md",
        fontsize=9,
    )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
        axis.tick_params(labelsize=8)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
