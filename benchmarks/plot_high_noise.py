"""Draw what high_noise.py measured: the share of coordinates on h1 and on h2, step by step.

python benchmarks/plot_high_noise.py docs/data/high_noise.jsonl.xz docs
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sittings import results

KAPPAS = ("paper", "exact", "tracked")
H1, H2 = "#0072B2", "#D55E00"  # told apart by most colour-blind readers, and by dashes


def draw_cycle(runs: list[dict[str, Any]], path: Path) -> None:
    """Every step of a short run, a panel a kappa: dots, for lines would hide the alternation."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, len(KAPPAS), sharex=True, sharey=True)
    for result in (result for result in runs if "steps" in result):
        panel = panels[KAPPAS.index(result["kappa"])]
        steps = [point["step"] for point in result["trace"]]
        for name, colour, mark in (("share_h1", H1, "."), ("share_h2", H2, "x")):
            shares = [100 * point[name] for point in result["trace"]]
            panel.plot(steps, shares, mark, color=colour, markersize=3, label=f"on {name[-2:]}")
        panel.set(title=f"{result['kappa']}, sigma {result['sigma']:g}", xlabel="step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% of coordinates")
    panels[-1].legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    draw_cycle(results(options.results), options.folder / "high-noise-cycle.png")


if __name__ == "__main__":
    main()
