"""Pictures for print: readable without colour, on white, as PNG or SVG. Loads matplotlib."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpmac_cli.accounting import accountants as accounting
from dpmac_cli.accounting.pricing import Row, epsilon_by_delta, epsilon_by_steps
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SUFFIXES = (".png", ".svg")
#: Colours that most colour-blind readers can tell apart (Okabe and Ito 2008), darkest first, and
#: dashes for those who see none.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MOST_LINES = len(COLOURS) * len(DASHES)
#: Of a confusion matrix: classes with counts in the cells, with each name beside its row, and
#: letters of a name.
MOST_COUNTS, MOST_NAMES, LONGEST = 20, 150, 28
#: The share from which on a cell is dark.
DARK = 0.25


def faults_of_picture(path: Path) -> Iterator[str]:
    """Why no picture can be written to a file, to be known before anything is worked out."""
    if path.suffix.lower() not in SUFFIXES:
        yield f"--plot {path} must end in {' or '.join(SUFFIXES)}."
    if path.is_dir():
        yield f"--plot {path} is a folder. Name a file."
    if not path.parent.is_dir():
        yield f"--plot {path}: the folder {path.parent} does not exist. Make it first."


def new_figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """A figure with some panels side by side."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (a second to load)

    figure = Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel in axes:
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def line_style(number: int) -> dict[str, Any]:
    """Colour and dash of the n-th line, no two alike up to :data:`MOST_LINES`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[(number % len(COLOURS) + number // len(COLOURS)) % len(DASHES)],
    }


def draw_prices(rows: Sequence[Row], path: Path) -> None:
    """Epsilon by steps, and the (epsilon, delta) curve at the end: a line a row.

    Raises:
        InputError: no row has a finite price, or there are too many to tell apart.
        OSError: the file cannot be written.
    """
    single = (row for row in rows if row.selection == "none" and row.noise_multiplier != 0)
    shown = [row for row in single if math.isfinite(row.epsilon) and row.steps > 0]
    if not shown:
        raise InputError("--plot: no row has a finite epsilon and a step to draw.")
    if len(shown) > MOST_LINES:
        raise InputError(f"--plot draws at most {MOST_LINES} rows, and these are {len(shown)}.")
    figure, (by_steps, by_delta) = new_figure(2)
    labels = _labels(shown)
    for number, (row, label) in enumerate(zip(shown, labels, strict=True)):
        steps, epsilons = zip(*epsilon_by_steps(row), strict=True)
        # By epochs the price is a stair, and a straight line would show it too low.
        stair = "steps-pre" if row.events[-1].sampling.once_an_epoch else "default"
        by_steps.plot(steps, epsilons, label=label, drawstyle=stair, **line_style(number))
        deltas, epsilons = zip(*epsilon_by_delta(row, _deltas(row.delta)), strict=True)
        by_delta.plot(epsilons, deltas, label=label, **line_style(number))
        by_delta.plot([row.epsilon], [row.delta], marker="o", color=line_style(number)["color"])
    deltas_shown = " or ".join(dict.fromkeys(format_epsilon(row.delta) for row in shown))
    by_steps.set(xlabel="steps", ylabel=f"epsilon at delta {deltas_shown}")
    by_steps.set_xlim(left=0)
    by_steps.set_ylim(bottom=0)
    by_delta.set(xlabel="epsilon after the last step", ylabel="delta", yscale="log")
    if len(shown) > 1:
        by_steps.legend(frameon=False, fontsize="small")
    figure.suptitle(
        f"{shown[0].sampler} sampling, {shown[0].adjacency} adjacency", fontsize="medium"
    )
    write_figure(figure, path)


def draw_curves(history: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Test accuracy and epsilon by epoch; without a guarantee, the accuracy alone.

    Args:
        history: lines of metrics.jsonl; nothing else is drawn.
        title: of the run. path: of the picture.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  (a second to load)

    epochs = [line["epoch"] for line in history]
    priced = all(line["epsilon"] is not None for line in history)
    figure, panels = new_figure(2 if priced else 1)
    look = {"marker": "o", "markersize": 3.5, **line_style(0)}
    panels[0].plot(epochs, [100 * line["test_accuracy"] for line in history], **look)
    panels[0].set(ylabel="test accuracy, %")
    if priced:
        # What an epoch's steps cost before it was scored is not known here: at most its price.
        epsilons = [line["epsilon"] for line in history]
        panels[1].plot(epochs, epsilons, drawstyle="steps-pre", **look)
        panels[1].set(ylabel=f"epsilon at delta {history[-1]['delta']:g}")
        panels[1].set_ylim(bottom=0)
    for panel in panels:
        panel.set(xlabel="epoch")
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title if priced else f"{title}, no privacy", fontsize="medium")
    write_figure(figure, path)


def draw_confusion(
    counts: Sequence[Sequence[int]], classes: Sequence[str], title: str, path: Path
) -> None:
    """Which classes are taken for which: the darker, the larger the share of the true class.

    Args:
        counts: a row for each true class, a column for each predicted one.
        classes: their names. title: of the picture. path: of it.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.colors import PowerNorm  # noqa: PLC0415  (a second to load)
    from matplotlib.figure import Figure  # noqa: PLC0415  (a second to load)

    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    many = len(classes) > MOST_COUNTS
    inches = min(max(4.8, 2.0 + len(classes) * (0.14 if many else 0.42)), 24.0)
    figure = Figure(figsize=(inches + 1.0, inches), layout="constrained")
    axes = figure.subplots()
    # By the root of the share, or the few percent that are taken for another class look white.
    picture = axes.imshow(shares, cmap="Greys", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    step = -(-len(classes) // MOST_NAMES)
    ticks = range(0, len(classes), step)
    names = [_shortened(classes[number]) for number in ticks]
    size = 5 if many else 9
    upright = many or max(map(len, names)) > 3
    axes.set_xticks(ticks, names, rotation=90 if upright else 0, fontsize=size)
    axes.set_yticks(ticks, names, fontsize=size)
    axes.set(xlabel="predicted class", ylabel="true class")
    if not many:
        for i, row in enumerate(counts):
            for j, count in enumerate(row):
                ink = "white" if shares[i][j] > DARK else "black"
                axes.text(j, i, f"{count:,}", ha="center", va="center", color=ink, fontsize=8)
    figure.colorbar(picture, ax=axes, shrink=0.8, label="share of the true class")
    figure.suptitle(title, fontsize="medium")
    write_figure(figure, path)


def _shortened(name: str) -> str:
    """A class's name, cut where it would leave no room for the picture."""
    # A dollar sign would begin a formula.
    return (name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…").replace("$", r"\$")


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a picture whole, or leave what was there. Raises OSError.

    The same picture is the same bytes: without a date, and with names that are not drawn by chance.
    """
    from matplotlib import rc_context  # noqa: PLC0415  (a second to load)

    picture = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    with rc_context({"svg.hashsalt": "dpmac"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(picture, dpi=200, format=kind, metadata=metadata)
    write_atomically(path, picture.getvalue())


def _deltas(delta: float) -> list[float]:
    """Around a delta, a factor of 10 apart at most."""
    exponent = math.log10(delta)
    low, high = min(exponent - 3, -9.0), min(max(exponent + 2, -3.0), -0.3)
    return list(np.logspace(low, high, 25))


def _labels(rows: Sequence[Row]) -> list[str]:
    """What tells the rows apart."""
    facts = {
        "sigma": [f"{row.noise_multiplier or 0:.10g}" for row in rows],
        "batch": [str(row.batch_size) for row in rows],
        "steps": [f"{row.steps:,}" for row in rows],
        "delta": [format_epsilon(row.delta) for row in rows],
        "": [accounting.ACCOUNTANTS[row.accountant].split()[0] for row in rows],
    }
    varying = {name: values for name, values in facts.items() if len(set(values)) > 1}
    names = [
        ", ".join(f"{name} {values[i]}".strip() for name, values in varying.items())
        for i in range(len(rows))
    ]
    return [name if names.count(name) == 1 else f"row {i + 1}" for i, name in enumerate(names)]
