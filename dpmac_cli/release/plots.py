"""Figures for print as PNG, SVG or PDF, readable without colour. Imports matplotlib."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.accounting.pricing import Row
from dpmac_cli.accounting.risk import trade_off
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.files import write_atomically
from dpmac_cli.libraries import matplotlib, mpl_figure, np
from dpmac_cli.tasks.calibration import Calibration, Reliability
from dpmac_cli.tasks.intervals import clopper_pearson
from dpmac_cli.tasks.metrics import EvaluationMetric
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
#: Marks of points, so that lines are told apart where they cross or run on each other.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")
#: Number of points of a line that have a mark.
MARKED = 5
KINDS = (".png", ".svg", ".pdf")


def new_figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """Return an empty figure with panels side by side, and its panels from left to right.

    In each panel, the first 28 lines have styles of their own: a colour with a kind of dash.

    Args:
        panels: number of panels, at least 1.
    """
    figure = mpl_figure.Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for panel in axes:
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_prop_cycle(color=COLOURS * len(DASHES), linestyle=DASHES * len(COLOURS))
    return figure, axes


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure atomically, in the format of the file's suffix: .png, .svg or .pdf.

    Equal figures give equal bytes.

    Args:
        figure: the figure.
        path: the file. An existing one is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    write_atomically(path, _rendered(figure, kind))


def as_svg(figure: "Figure") -> str:
    """Return a figure as an element of a web page: text that begins with ``<svg``.

    Equal figures give equal texts, which do not tell when they were drawn.
    """
    picture = _rendered(figure, "svg").decode()
    return picture[picture.index("<svg") :]


def _rendered(figure: "Figure", kind: str) -> bytes:
    """Return a figure as a file of some kind, without the time at which it was drawn."""
    picture = io.BytesIO()
    without_time = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "dpmac"}):
        figure.savefig(picture, dpi=200, format=kind, metadata=without_time.get(kind))
    return picture.getvalue()


def _draw_guessing(panel: "Axes", x: Any, y: Any) -> None:
    """Draw the thin grey line of an attack or a model that guesses.

    Args:
        panel: the panel to draw in.
        x, y: places of the line, as matplotlib's ``plot`` takes them.
    """
    panel.plot(x, y, "-", color="#bbbbbb", linewidth=1, label="guessing")


def trade_offs(rows: Sequence[Row]) -> "Figure":
    """Draw bounds on attacks: type I and II errors, and a ROC curve on log scales.

    Args:
        rows: privacy costs, each of which is a line in both panels, named by epsilon and delta.
    """
    figure, (errors, roc) = new_figure(2)
    alphas = np.geomspace(1e-5, 1, 500)
    _draw_guessing(errors, alphas, 1 - alphas)
    _draw_guessing(roc, alphas, alphas)
    for row in rows:
        betas = trade_off(row.done, alphas)
        label = f"epsilon {format_epsilon(row.epsilon)} at delta {format_epsilon(row.delta)}"
        errors.plot(alphas, betas, label=label)
        roc.plot(alphas, 1 - betas)
    errors.set(xlabel="false positive rate", ylabel="lowest false negative rate")
    roc.set(xlabel="false positive rate", ylabel="highest true positive rate")
    roc.set(xscale="log", yscale="log")
    errors.legend(fontsize="small")
    return figure


def course(points: Sequence[Mapping[str, Any]], score: str = "test_accuracy") -> "Figure":
    """Draw a test score in one panel and epsilon in the other, by epoch.

    Args:
        points: lines of metrics.jsonl as JSON values. One without a value is left out.
        score: key of the score in a line, such as "test_accuracy" or "test_mae".
    """
    figure, panels = new_figure(2)
    for panel, name in zip(panels, (score, "epsilon"), strict=True):
        epochs = list[float]()
        values = list[float]()
        for point in points:
            value = point.get(name)
            if isinstance(value, int | float):
                epochs.append(point["epoch"])
                values.append(value)
        if epochs:
            panel.plot(epochs, values, marker=".")
        panel.set_xlim(0, 1.02 * max([1.0, *epochs]))
        panel.locator_params("x", integer=True)
        panel.set(xlabel="epoch", ylabel=name.replace("_", " "))
    return figure


def curves(cells: Mapping[str, Sequence[Mapping[str, Any]]], metric: EvaluationMetric) -> "Figure":
    """Draw scores over epsilon in one panel, and over epochs in the other.

    Each of the first 28 lines has a colour with a kind of dash of its own, and neighbours in the
    legend have different marks, at different points: lines on each other are seen as several.

    Args:
        cells: mean scores of the runs of each cell of a study, by its name; each is a line. A point
            has the keys of a line of metrics.jsonl: "epoch", which need not be whole, "epsilon" of
            one of the runs by then, None without privacy, and the score.
        metric: the score. A share is shown in percent.
    """
    figure, (by_epsilon, by_epoch) = new_figure(2)
    scale = 100 if metric.share else 1
    for number, (name, points) in enumerate(cells.items()):
        epochs = list[float]()
        scores = list[float]()
        spent = list[float]()
        scores_of_spent = list[float]()
        for point in points:
            score = scale * point[metric.logged]
            epochs.append(point["epoch"])
            scores.append(score)
            if point["epsilon"] is not None:
                spent.append(point["epsilon"])
                scores_of_spent.append(score)
        apart = max(1, len(points) // MARKED)
        look: dict[str, Any] = {
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 5,
            "markevery": (number % apart, apart),
            "label": _as_text(name),
        }
        by_epsilon.plot(spent, scores_of_spent, **look)
        by_epoch.plot(epochs, scores, **look)
    title = f"test {metric.title}, percent" if metric.share else f"test {metric.title}"
    by_epsilon.set(xlabel="epsilon of one run", ylabel=title)
    by_epoch.set(xlabel="epoch", ylabel=title)
    by_epoch.locator_params("x", integer=True)
    if cells:
        handles, labels = by_epoch.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _as_text(name: str) -> str:
    """Return a name that matplotlib shows as it is, and not as a formula."""
    return name.replace("$", r"\$")


def reliability(bins: Sequence[Reliability]) -> "Figure":
    """Draw the shares of a class by noisy counts over the probabilities that are said of them.

    Args:
        bins: bins of the noisy histogram, at least one. Each is a point with the interval of its
            share, and a cross where the probability was before calibration.
    """
    figure, (panel,) = new_figure(1)
    panel.plot([0, 1], [0, 1], "-", color="#bbbbbb", linewidth=1)
    calibrated = list[float]()
    trained = list[float]()
    shares = list[float]()
    below = list[float]()
    above = list[float]()
    for each in bins:
        calibrated.append(each.calibrated)
        trained.append(each.trained)
        shares.append(each.share)
        below.append(each.share - each.low)
        above.append(each.high - each.share)
    panel.errorbar(
        calibrated,
        shares,
        [below, above],
        linestyle="",
        marker="o",
        capsize=3,
        label="calibrated",
    )
    panel.plot(trained, shares, "x", color=COLOURS[2], label="as trained")
    panel.set(xlabel="probability", ylabel="share by the noisy histogram")
    panel.legend(fontsize="small")
    return figure


def confusion(counts: Sequence[Sequence[int]], names: Sequence[str]) -> "Figure":
    """Draw the numbers of test records by true class (rows) and predicted class (columns).

    Args:
        counts: numbers of records, shape (classes, classes).
        names: names of the classes in the order of rows and columns.
    """
    figure, (panel,) = new_figure(1)
    _draw_counts(panel, counts)
    labels = [_as_text(name) for name in names]
    long = max(map(len, names)) > 3
    panel.set_xticks(range(len(labels)), labels, rotation=30 if long else 0)
    panel.set_yticks(range(len(labels)), labels)
    panel.set(xlabel="predicted class", ylabel="true class")
    return figure


def _draw_counts(panel: "Axes", counts: Sequence[Sequence[int]], zero: str = "0") -> None:
    """Draw a table of numbers of records, darker where more of a row are.

    Args:
        panel: the panel to draw in.
        counts: numbers of records, a list of rows of the same length.
        zero: text in a cell with no record.
    """
    panel.grid(visible=False)
    table = np.array(counts)
    shares = table / table.sum(1, keepdims=True).clip(1)
    panel.imshow(shares, cmap="Greys", vmin=0, vmax=1)
    small = len(table) < 6
    size = "medium" if small else "x-small"
    for (row, column), count in np.ndenumerate(table):
        colour = "white" if shares[row, column] > 0.5 else "black"
        text = f"{count:,}" if count else zero
        panel.text(column, row, text, color=colour, size=size, ha="center", va="center")


def predicted_numbers(
    counts: Sequence[Sequence[int]],
    coverage: Sequence[float | None] | None,
    ends: Sequence[float],
) -> "Figure":
    """Draw test records by true and predicted number, and the coverage of their intervals.

    Args:
        counts: numbers of records by bin of the true (rows) and of the predicted number (columns).
        coverage: share of the targets of each predicted bin that are in their intervals, None
            where no record is; None for a model without intervals, which has no such panel.
        ends: ends of the bins on the scale of the target, one more than there are bins.
    """
    figure, (panel, *others) = new_figure(1 if coverage is None else 2)
    _draw_counts(panel, counts, zero="")
    panel.invert_yaxis()
    diagonal = [-0.5, len(counts) - 0.5]
    panel.plot(diagonal, diagonal, "-", color=COLOURS[1], linewidth=1, alpha=0.6)
    places = np.arange(len(ends)) - 0.5
    labels = [_rounded(end) for end in ends]
    panel.set_yticks(places, labels)
    panel.set(ylabel="true number")
    for each in (panel, *others):
        each.set_xticks(places, labels, rotation=45, ha="right", rotation_mode="anchor")
        each.set(xlabel="predicted number")
    if coverage is not None:
        sizes = np.sum(counts, 0).tolist()
        _draw_coverage(others[0], sizes, coverage)
    return figure


def _rounded(value: float) -> str:
    """Return a number as text with three significant digits, such as 12,000 or 0.25."""
    return f"{float(f'{value:.3g}'):,g}"


def _draw_coverage(panel: "Axes", sizes: Sequence[int], coverage: Sequence[float | None]) -> None:
    """Draw the share of targets in their intervals by bin, with 95% intervals of the share.

    Args:
        panel: the panel to draw in.
        sizes: numbers of records in the bins.
        coverage: share of each bin, from 0 to 1; None for a bin that has no record. The intended
            share is drawn as a line.
    """
    panel.axhline(LEVEL, color=COLOURS[1], linestyle="--")
    for place, (size, share) in enumerate(zip(sizes, coverage, strict=True)):
        if share is not None:
            low, high = clopper_pearson(share, size)
            ends = [[share - low], [high - share]]
            panel.errorbar([place], [share], ends, color="black", marker="o", capsize=3)
    panel.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(0, 1.02))
    panel.set(ylabel=f"share in its interval of {LEVEL:.0%}")


def rates(calibration: Calibration) -> "Figure":
    """Draw sensitivity over 1 - specificity of two classes, by the noisy histogram of records.

    The curve goes over 200 thresholds on the log odds; it has no further privacy cost.

    Args:
        calibration: calibration of two classes, with its noisy counts.
    """
    figure, (panel,) = new_figure(1)
    _draw_guessing(panel, [0, 1], [0, 1])
    false_positives = list[float]()
    sensitivities = list[float]()
    for log_odds in np.linspace(ENDS[0], ENDS[-1], 200).tolist():
        sensitivity, specificity = OperatingPoint(MOST_LIKELY, log_odds).rates(calibration)
        false_positives.append(1 - specificity)
        sensitivities.append(sensitivity)
    panel.plot(false_positives, sensitivities)
    panel.set(xlabel="1 - specificity", ylabel="sensitivity")
    return figure


def residuals(histogram: Residuals) -> "Figure":
    """Draw the noisy histogram of residuals, and the ends of the interval of 90% of them.

    Args:
        histogram: noisy counts of targets minus predictions, both scaled to [-1, 1]. Negative
            counts, which the noise makes, are drawn as 0.
    """
    figure, (panel,) = new_figure(1)
    counts = np.array(histogram.counts).clip(0)
    shares = counts / max(counts.sum(), 1.0)
    panel.stairs(shares, BINS_OF_RESIDUALS, fill=True, color="#bbbbbb")
    for end in histogram.interval(LEVEL):
        panel.axvline(end, color=COLOURS[1], linestyle="--")
    low, high = histogram.interval(0.99)
    widest = 1.5 * max(abs(low), abs(high))
    panel.set_xlim(-widest, widest)
    panel.set(
        xlabel="target minus prediction, both scaled to [-1, 1]",
        ylabel="share of the records in a bin",
    )
    return figure


def means(study: Mapping[str, Any], optimizers: Sequence[str], *, share: bool = True) -> "Figure":
    """Draw the means of a study with standard deviations over seeds, one line per row of its table.

    Args:
        study: content of compare.json, as JSON values.
        optimizers: names of optimizers, each of which has the same colour in every picture.
        share: True for a metric from 0 to 1, which is shown in percent; False for other numbers.
    """
    figure, (panel,) = new_figure(1)
    scale = 100 if share else 1
    lines: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in study["rows"]:
        if row["mean"] is not None:
            labels = tuple(row[axis] for axis in study["axes"])
            lines.setdefault(labels, []).append(row)
    for number, (labels, cells) in enumerate(lines.items()):
        columns = list[float]()
        scores = list[float]()
        spreads = list[float]()
        for cell in cells:
            columns.append(cell[study["column"]])
            scores.append(scale * cell["mean"])
            spreads.append(scale * (cell["std"] or 0))
        colour = number
        for label in labels:
            if label in optimizers:
                colour = optimizers.index(label)
                break
        panel.errorbar(
            columns,
            scores,
            spreads,
            color=COLOURS[colour % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            marker="o",
            capsize=3,
            label=_as_text(" ".join(map(str, labels))),
        )
    panel.set_xticks(sorted({row[study["column"]] for row in study["rows"]}))
    title = f"test {study['metric']}"
    panel.set(xlabel=study["column"], ylabel=f"{title}, percent" if share else title)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")
    return figure
