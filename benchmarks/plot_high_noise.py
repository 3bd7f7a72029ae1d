"""Draw what high_noise.py measured: the share of coordinates on h1 and on h2, step by step.

python benchmarks/plot_high_noise.py docs/data/high_noise.jsonl.xz docs/high-noise.png
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sittings import results

SIGMAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
KAPPAS = ("paper", "exact", "tracked")
H1, H2 = "#0072B2", "#D55E00"  # told apart by most colour-blind readers, and by dashes


def of_sweep(result: dict[str, Any]) -> bool:
    """Return whether a line belongs to the grid `sigma`: whole runs with the paper's bounds."""
    return result["optimizer"] == "dp-macadam" and not {"h1", "steps"} & set(result)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """A panel for each sigma and kappa, a pair of lines for each seed."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(len(KAPPAS), len(SIGMAS), sharex=True, sharey=True)
    for result in filter(of_sweep, runs):
        panel = panels[KAPPAS.index(result["kappa"])][SIGMAS.index(result["sigma"])]
        steps = [point["step"] for point in result["trace"]]
        for name, colour, dash in (("share_h1", H1, "--"), ("share_h2", H2, "-")):
            shares = [100 * point[name] for point in result["trace"]]
            panel.plot(steps, shares, color=colour, linestyle=dash, linewidth=1.1, alpha=0.8)
    for column, sigma in enumerate(SIGMAS):
        panels[0][column].set_title(f"sigma {sigma:g}", fontsize="medium")
        panels[-1][column].set_xlabel("step")
    for row, kappa in enumerate(KAPPAS):
        panels[row][0].set_ylabel(f"{kappa}\n% of coordinates")
    for panel in panels.flat:
        panel.set(ylim=(-3, 103), xlim=(0, 1180))
        panel.spines[["top", "right"]].set_visible(False)
    lines = [panels[0][0].plot([], [], color=c, linestyle=d)[0] for c, d in ((H1, "--"), (H2, "-"))]
    figure.legend(lines, ["on h1", "on h2"], loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


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
    found = results(options.results)
    draw(found, options.folder / "high-noise.png")
    draw_cycle(found, options.folder / "high-noise-cycle.png")


if __name__ == "__main__":
    main()
