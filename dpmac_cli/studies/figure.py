"""Figures of a study: accuracy by epsilon and by step."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.plots import MOST_LINES, line_style, new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dpmac_cli.studies.results import Cell, Comparison

#: Letters in a line of the legend.
LETTERS = 150


def draw_comparison(comparison: "Comparison", path: Path) -> bool:
    """Draw accuracy by epsilon and by step, with standard deviations; one line per row.

    Returns:
        Whether there was anything to draw.

    Raises:
        OSError: the file cannot be written.
    """
    scored = [(name, [c for c in cells if c and c.scores]) for name, cells in comparison.rows]
    rows = [(name, cells) for name, cells in scored if cells]
    if not rows or len(rows) > MOST_LINES:
        return False
    figure, (by_epsilon, by_step) = new_figure(2)
    alone = len(comparison.columns) == 1  # its points are drawn beside one another
    for number, (name, cells) in enumerate(rows):
        style = line_style(number)
        private = [cell for cell in cells if alone or math.isfinite(cell.epsilon)]
        places = [number] * len(private) if alone else [cell.epsilon for cell in private]
        means = [100 * cell.mean for cell in private]
        spreads = [100 * (cell.std or 0.0) for cell in private]
        look = {"marker": "o", "markersize": 3.5, "capsize": 3, "elinewidth": 1, **style}
        by_epsilon.errorbar(places, means, spreads, **look)
        # One column is enough to see how they learn: the one with the least noise.
        steps, means, spreads = _curve(min(cells, key=lambda cell: cell.sigma))
        by_step.plot(steps, means, label=name, **style)
        low, high = np.subtract(means, spreads), np.add(means, spreads)
        by_step.fill_between(steps, low, high, color=style["color"], alpha=0.15, lw=0)
    config, label = comparison.grid.config, f"epsilon at delta {comparison.grid.config.delta:g}"
    if alone:
        epsilon = comparison.epsilon_of(comparison.columns[0])
        label = f"at epsilon {format_epsilon(epsilon)}, delta {config.delta:g}"
        by_epsilon.set_xticks([])
        by_epsilon.margins(x=0.5 / len(rows))
        label = label if math.isfinite(epsilon) else "no privacy"
    by_epsilon.set(xlabel=label, ylabel="test accuracy, %")
    least = min(cell.sigma for cell in comparison.cells)
    by_step.set(xlabel=f"step, at sigma {least:.4g}", ylabel="test accuracy, %")
    _add_legend(figure, by_step)
    seeds = len(comparison.grid.seeds)
    title = f"{config.dataset}, mean and standard deviation of {seeds} seeds"
    figure.suptitle(title, fontsize="medium")
    write_figure(figure, path)
    return True


def _add_legend(figure: "Figure", axes: "Axes") -> None:
    """Add a legend of a panel's lines below all panels, with room of its own."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), LETTERS // (max(map(len, labels)) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        frameon=False,
    )


def _curve(cell: "Cell") -> tuple[Sequence[int], list[float], list[float]]:
    """Return steps at which every run was scored, and mean and spread of accuracy in percent."""
    histories = [score.history for score in cell.scores]
    steps = sorted(set(histories[0]).intersection(*histories[1:]))
    values = [[100 * history[step] for history in histories] for step in steps]
    spreads = [stdev(some) if len(some) > 1 else 0.0 for some in values]
    return steps, [fmean(some) for some in values], spreads
