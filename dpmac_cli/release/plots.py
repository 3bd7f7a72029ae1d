"""Figures for print as PNG, SVG or PDF, readable without colour. Imports matplotlib."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmac_cli.accounting.pricing import Row
from dpmac_cli.accounting.risk import trade_off
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.files import write_atomically
from dpmac_cli.libraries import matplotlib, mpl_figure, np
from dpmac_cli.tasks.calibration import Calibration, Reliability
from dpmac_cli.tasks.operating_point import ENDS, MOST_LIKELY, OperatingPoint
from dpmac_cli.tasks.residuals import ENDS as BINS_OF_RESIDUALS
from dpmac_cli.tasks.residuals import LEVEL, Residuals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that most colour-blind readers can distinguish (Okabe and Ito 2008), darkest first, and
#: dashes for printing without colour.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
KINDS = (".png", ".svg", ".pdf")


def new_figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """Return a figure with panels side by side. In each, the first 28 lines have unique styles."""
    figure = mpl_figure.Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel in axes:
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_prop_cycle(color=COLOURS * len(DASHES), linestyle=DASHES * len(COLOURS))
    return figure, list(axes)


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure atomically; equal figures give equal bytes. Raises OSError."""
    write_atomically(path, _rendered(figure, path.suffix.lower().removeprefix(".")))


def as_svg(figure: "Figure") -> str:
    """Return a figure as an element of a web page."""
    picture = _rendered(figure, "svg").decode()
    return picture[picture.index("<svg") :]


def _rendered(figure: "Figure", kind: str) -> bytes:
    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dpmac"}):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(picture, dpi=200, format=kind, metadata=metadata)
    return picture.getvalue()


def trade_offs(rows: Sequence[Row]) -> "Figure":
    """Draw bounds on attacks: type I and II errors, and a ROC curve on log scales.

    One line per row.
    """
    figure, (errors, roc) = new_figure(2)
    alphas = np.geomspace(1e-5, 1, 500)
    for panel, guessing in ((errors, 1 - alphas), (roc, alphas)):
        panel.plot(alphas, guessing, "-", color="#bbbbbb", linewidth=1, label="guessing")
    for row in rows:
        betas = trade_off(row.done, alphas)
        name = f"epsilon {format_epsilon(row.epsilon)} at delta {format_epsilon(row.delta)}"
        errors.plot(alphas, betas, label=name)
        roc.plot(alphas, 1 - betas)
    errors.set(xlabel="false positive rate", ylabel="lowest false negative rate")
    roc.set(xlabel="false positive rate", ylabel="highest true positive rate")
    roc.set(xscale="log", yscale="log")
    errors.legend(fontsize="small")
    return figure


def course(points: Sequence[Mapping[str, Any]], score: str = "test_accuracy") -> "Figure":
    """Draw a test score and epsilon by epoch, from the lines of metrics.jsonl."""
    figure, panels = new_figure(2)
    for panel, name in zip(panels, (score, "epsilon"), strict=True):
        pairs = ((point["epoch"], point.get(name)) for point in points)
        found = [(epoch, value) for epoch, value in pairs if isinstance(value, int | float)]
        panel.plot(*zip(*found, strict=True), marker=".") if found else None
        panel.set_xlim(0, 1.02 * max((1.0, *(epoch for epoch, _ in found))))
        panel.locator_params("x", integer=True)
        panel.set(xlabel="epoch", ylabel=name.replace("_", " "))
    return figure


class Point(NamedTuple):
    """Mean score of the runs of a cell after an epoch, and epsilon of one of them by then.

    ``epsilon`` is None without privacy.
    """

    epoch: float
    epsilon: float | None
    score: float


def curves(cells: Mapping[str, Sequence[Point]], score: str, *, share: bool = True) -> "Figure":
    """Draw scores over epsilon, and over epochs: one line for each cell of a study, by its name.

    A ``share`` is in percent.
    """
    figure, (by_epsilon, by_epoch) = new_figure(2)
    scale = 100 if share else 1
    for name, points in cells.items():
        label = name.replace("$", r"\$")
        private = [point for point in points if point.epsilon is not None]
        spent = [point.epsilon for point in private if point.epsilon is not None]
        by_epsilon.plot(spent, [scale * point.score for point in private], marker=".", label=label)
        epochs = [point.epoch for point in points]
        by_epoch.plot(epochs, [scale * point.score for point in points], marker=".", label=label)
    title = f"test {score}{', percent' * share}"
    by_epsilon.set(xlabel="epsilon of one run", ylabel=title)
    by_epoch.set(xlabel="epoch", ylabel=title)
    by_epoch.locator_params("x", integer=True)
    if cells:
        by_epoch.legend(fontsize="small")
    return figure


def reliability(bins: Sequence[Reliability]) -> "Figure":
    """Draw shares of records by noisy counts over the probabilities that are said of them."""
    figure, (panel,) = new_figure(1)
    panel.plot([0, 1], [0, 1], "-", color="#bbbbbb", linewidth=1)
    shares = [of.share for of in bins]
    ends = [[of.share - of.low for of in bins], [of.high - of.share for of in bins]]
    panel.errorbar(
        [of.calibrated for of in bins],
        shares,
        ends,
        linestyle="",
        marker="o",
        capsize=3,
        label="calibrated",
    )
    panel.plot([of.trained for of in bins], shares, "x", color=COLOURS[2], label="as trained")
    panel.set(xlabel="probability", ylabel="share by the noisy histogram")
    panel.legend(fontsize="small")
    return figure


def confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> "Figure":
    """Draw the numbers of test records by true class (rows) and predicted class (columns)."""
    figure, (panel,) = new_figure(1)
    panel.grid(visible=False)
    table = np.array(counts)
    shares = table / table.sum(1, keepdims=True).clip(1)
    panel.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(table):
        colour = "white" if shares[row, column] > 0.5 else "black"
        size = "medium" if len(names) < 6 else "x-small"
        panel.text(column, row, f"{count:,}", ha="center", va="center", color=colour, size=size)
    places, labels = range(len(names)), [name.replace("$", r"\$") for name in names]
    panel.set_xticks(places, labels, rotation=30 if max(map(len, names)) > 3 else 0)
    panel.set_yticks(places, labels)
    panel.set(xlabel="predicted class", ylabel="true class")
    return figure


def rates(calibration: Calibration) -> "Figure":
    """Draw sensitivity over 1 - specificity of two classes, by the noisy histogram of records."""
    figure, (panel,) = new_figure(1)
    panel.plot([0, 1], [0, 1], "-", color="#bbbbbb", linewidth=1, label="guessing")
    places = np.linspace(ENDS[0], ENDS[-1], 200)
    points = [OperatingPoint(MOST_LIKELY, float(odds)).rates(calibration) for odds in places]
    panel.plot([1 - specificity for _, specificity in points], [found for found, _ in points])
    panel.set(xlabel="1 - specificity", ylabel="sensitivity")
    return figure


def residuals(histogram: Residuals, level: float = LEVEL) -> "Figure":
    """Draw the noisy histogram of residuals, and the ends of the interval of a share of them."""
    figure, (panel,) = new_figure(1)
    counts = np.array(histogram.counts).clip(0)
    shares = counts / max(counts.sum(), 1.0)
    panel.stairs(shares, BINS_OF_RESIDUALS, fill=True, color="#bbbbbb")
    for end in histogram.interval(level):
        panel.axvline(end, color=COLOURS[1], linestyle="--")
    wide = max(abs(end) for end in histogram.interval(0.99))
    panel.set_xlim(-1.5 * wide, 1.5 * wide)
    panel.set(
        xlabel="target minus prediction, both scaled to [-1, 1]",
        ylabel="share of the records in a bin",
    )
    return figure


def means(study: Mapping[str, Any], optimizers: Sequence[str], *, share: bool = True) -> "Figure":
    """Draw the means of a study, with standard deviations over seeds, from its compare.json.

    One line per row of its table; a ``share`` is in percent. Each of ``optimizers`` has the same
    color in every picture.
    """
    figure, (panel,) = new_figure(1)
    scale = 100 if share else 1
    lines: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in study["rows"]:
        if row["mean"] is not None:
            lines.setdefault(tuple(row[axis] for axis in study["axes"]), []).append(row)
    for number, (labels, cells) in enumerate(lines.items()):
        x, y, spread = zip(
            *((c[study["column"]], scale * c["mean"], scale * (c["std"] or 0)) for c in cells),
            strict=True,
        )
        known = [optimizers.index(label) for label in labels if label in optimizers]
        panel.errorbar(
            x,
            y,
            spread,
            color=COLOURS[(known or [number])[0] % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            marker="o",
            capsize=3,
            label=" ".join(map(str, labels)).replace("$", r"\$"),
        )
    panel.set_xticks(sorted({row[study["column"]] for row in study["rows"]}))
    panel.set(xlabel=study["column"], ylabel=f"test {study['metric']}{', percent' * share}")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")
    return figure
