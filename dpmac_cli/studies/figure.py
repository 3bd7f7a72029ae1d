"""Figures of a study: accuracy by epsilon and by step."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from dpmac_cli.plots import MOST_LINES, line_style, new_figure, write_figure

if TYPE_CHECKING:
    from dpmac_cli.studies.results import Cell, Comparison


def draw_comparison(comparison: "Comparison", path: Path) -> bool:
    """Draw accuracy by step and, if there are several epsilons, by epsilon; one line per row.

    Returns:
        Whether there was anything to draw.

    Raises:
        OSError: the file cannot be written.
    """
    scored = [(name, [c for c in cells if c and c.scores]) for name, cells in comparison.rows]
    rows = [(name, cells) for name, cells in scored if cells]
    if not rows or len(rows) > MOST_LINES:
        return False
    finite = [value for value in comparison.columns if math.isfinite(comparison.epsilon_of(value))]
    figure, axes = new_figure(2 if len(finite) > 1 else 1)
    by_step = axes[-1]
    for number, (name, cells) in enumerate(rows):
        style = line_style(number)
        # One column is enough to see how they learn: the one with the least noise.
        steps, means, spreads = _curve(min(cells, key=lambda cell: cell.sigma))
        by_step.plot(steps, means, label=name, **style)
        low, high = np.subtract(means, spreads), np.add(means, spreads)
        by_step.fill_between(steps, low, high, color=style["color"], alpha=0.15, lw=0)
        if len(axes) > 1:
            private = [cell for cell in cells if math.isfinite(cell.epsilon)]
            means = [100 * cell.mean for cell in private]
            spreads = [100 * (cell.std or 0.0) for cell in private]
            look = {"marker": "o", "markersize": 3.5, "capsize": 3, "elinewidth": 1, **style}
            axes[0].errorbar([cell.epsilon for cell in private], means, spreads, **look)
    plan, seeds = comparison.grid.plan, len(comparison.grid.seeds)
    axes[0].set_xlabel(f"epsilon at delta {plan.delta:g}")
    least = min(cell.sigma for cell in comparison.cells)
    by_step.set_xlabel(f"step, at sigma {least:.4g}")
    for panel in axes:
        panel.set_ylabel("test accuracy, %")
    figure.set_figheight(figure.get_figheight() + 0.1 * len(rows))  # room for the legend
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    title = f"{plan.dataset}, mean and standard deviation of {seeds} seeds"
    figure.suptitle(title, fontsize="medium")
    write_figure(figure, path)
    return True


def _curve(cell: "Cell") -> tuple[Sequence[int], list[float], list[float]]:
    """Return steps at which every run was scored, and mean and spread of accuracy in percent."""
    histories = [score.history for score in cell.scores]
    steps = sorted(set(histories[0]).intersection(*histories[1:]))
    values = [[100 * history[step] for history in histories] for step in steps]
    spreads = [stdev(some) if len(some) > 1 else 0.0 for some in values]
    return steps, [fmean(some) for some in values], spreads
