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


def faults_of_picture(path: Path) -> Iterator[str]:
    """Yield why no picture can be written to a file."""
    if path.suffix.lower() not in SUFFIXES:
        yield f"--plot {path} must end in {' or '.join(SUFFIXES)}."
    if path.is_dir():
        yield f"--plot {path} is a folder. Name a file."
    if not path.parent.is_dir():
        yield f"--plot {path}: the folder {path.parent} does not exist. Make it first."


def new_figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """Return a figure with some panels side by side."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (a second to load)

    figure = Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel in axes:
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def line_style(number: int) -> dict[str, Any]:
    """Return colour and dash of the n-th line, no two alike up to :data:`MOST_LINES`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[(number % len(COLOURS) + number // len(COLOURS)) % len(DASHES)],
    }


def draw_prices(rows: Sequence[Row], path: Path) -> None:
    """Draw epsilon by steps, and the (epsilon, delta) curve at the end: one line per row.

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
        look = line_style(number)
        steps, epsilons = zip(*epsilon_by_steps(row), strict=True)
        # By epochs the price is a stair, and a straight line would show it too low.
        stair = "steps-pre" if row.events[-1].sampling.once_an_epoch else "default"
        by_steps.plot(steps, epsilons, label=label, drawstyle=stair, **look)
        deltas, epsilons = zip(*epsilon_by_delta(row, _deltas(row.delta)), strict=True)
        by_delta.plot(epsilons, deltas, label=label, **look)
        by_delta.plot([row.epsilon], [row.delta], marker="o", color=look["color"])
    deltas_shown = " or ".join(dict.fromkeys(format_epsilon(row.delta) for row in shown))
    by_steps.set(xlabel="steps", ylabel=f"epsilon at delta {deltas_shown}")
    by_steps.set(xlim=(0, None), ylim=(0, None))
    by_delta.set(xlabel="epsilon after the last step", ylabel="delta", yscale="log")
    if any(labels):
        by_steps.legend(frameon=False, fontsize="small")
    title = f"{shown[0].sampler} sampling, {shown[0].adjacency} adjacency"
    figure.suptitle(title, fontsize="medium")
    write_figure(figure, path)


def draw_curves(history: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw test accuracy and epsilon by epoch; without a guarantee, the accuracy alone.

    Nothing but ``history``, the lines of metrics.jsonl, is drawn. Raises OSError.
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
        panels[1].set(ylabel=f"epsilon at delta {history[-1]['delta']:g}", ylim=(0, None))
    for panel in panels:
        panel.set(xlabel="epoch", xlim=(0, None))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title if priced else f"{title}, no privacy", fontsize="medium")
    write_figure(figure, path)


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a picture atomically; the same picture is the same bytes. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415  (a second to load)

    picture = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    with rc_context({"svg.hashsalt": "dpmac"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(picture, dpi=200, format=kind, metadata=metadata)
    write_atomically(path, picture.getvalue())


def _deltas(delta: float) -> list[float]:
    """Return deltas around one, a factor of 10 apart at most."""
    exponent = math.log10(delta)
    low, high = min(exponent - 3, -9.0), min(max(exponent + 2, -3.0), -0.3)
    return list(np.logspace(low, high, 25))


def _labels(rows: Sequence[Row]) -> list[str]:
    """Return what the rows differ in, one label per row."""
    facts = (
        [f"sigma {row.noise_multiplier or 0:.10g}" for row in rows],
        [f"batch {row.batch_size}" for row in rows],
        [f"steps {row.steps:,}" for row in rows],
        [f"delta {format_epsilon(row.delta)}" for row in rows],
        [accounting.ACCOUNTANTS[row.accountant].split()[0] for row in rows],
    )
    varying = [values for values in facts if len(set(values)) > 1]
    return [", ".join(values[i] for values in varying) for i in range(len(rows))]
