"""Accuracy of a study by epsilon and by step, drawn for print."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.plots import MOST_LINES, _write, line_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dpmac_cli.studies.results import Cell, Comparison

#: Of a legend's line.
LETTERS = 150


def draw_comparison(comparison: "Comparison", path: Path) -> bool:
    """Accuracy by epsilon with a band of one standard deviation, and by step; a line a row.

    Returns:
        Whether there was anything to draw.

    Raises:
        OSError: the file cannot be written.
    """
    scored = ((name, [c for c in cells if c and c.accuracies]) for name, cells in comparison.rows)
    rows = [(name, cells) for name, cells in scored if cells]
    if not rows or len(rows) > MOST_LINES:
        return False
    figure, (by_epsilon, by_step) = new_figure(2)
    alone = len(comparison.columns) == 1  # its points are drawn beside one another
    for number, (name, cells) in enumerate(rows):
        style = line_style(number)
        priced = [cell for cell in cells if alone or math.isfinite(cell.epsilon)]
        means, spreads = _percent(c.mean for c in priced), _percent(c.std for c in priced)
        if alone:
            look = {"color": style["color"], "marker": "o", "markersize": 3.5, "linewidth": 1}
            by_epsilon.errorbar([number] * len(priced), means, spreads, capsize=3, **look)
        else:
            epsilons = [c.epsilon for c in priced]
            by_epsilon.plot(epsilons, means, marker="o", markersize=3.5, **style)
            _draw_band(by_epsilon, epsilons, means, spreads, style["color"])
        # One column is enough to see how they learn: the one with the least noise.
        steps, means, spreads = _curve(min(cells, key=lambda cell: cell.sigma))
        by_step.plot(steps, means, label=name, **style)
        _draw_band(by_step, steps, means, spreads, style["color"])
    by_epsilon.set(xlabel=f"epsilon at delta {comparison.delta:g}", ylabel="test accuracy, %")
    if alone:
        epsilon = comparison.epsilon_of(comparison.columns[0])
        price = f"at epsilon {format_epsilon(epsilon)}, delta {comparison.delta:g}"
        by_epsilon.set(xlabel=price if math.isfinite(epsilon) else "no privacy")
        by_epsilon.set_xticks([])
        by_epsilon.margins(x=0.5 / len(rows))
    least = min(cell.sigma for cell in comparison.cells)
    by_step.set(xlabel=f"step, at sigma {least:.4g}", ylabel="test accuracy, %")
    _add_legend(figure, by_step)
    seeds = len(comparison.seeds)
    figure.suptitle(
        f"{comparison.dataset}, mean and standard deviation of {seeds} seeds", fontsize="medium"
    )
    _write(figure, path)
    return True


def _percent(shares: Iterable[float | None]) -> list[float]:
    return [100 * (share or 0.0) for share in shares]


def _draw_band(
    axes: "Axes", x: Sequence[float], middle: Sequence[float], half: Sequence[float], colour: str
) -> None:
    """Draw a band around a line."""
    low, high = np.subtract(middle, half), np.add(middle, half)
    axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)


def _add_legend(figure: "Figure", axes: "Axes") -> None:
    """What the lines of a panel are, below all panels, in room of its own."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), LETTERS // (max(map(len, labels)) + 8)))
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        frameon=False,
    )


def _curve(cell: "Cell") -> tuple[list[int], list[float], list[float]]:
    """Steps, mean and spread of the accuracies in percent, where every run was scored."""
    scored = [dict(zip(steps, values, strict=True)) for steps, values in cell.histories]
    steps = sorted(set.intersection(*(set(one) for one in scored)))
    values = [[100 * one[step] for one in scored] for step in steps]
    spreads = [stdev(some) if len(some) > 1 else 0.0 for some in values]
    return steps, [fmean(some) for some in values], spreads
