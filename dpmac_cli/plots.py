"""Pictures for print: readable without colour, on white, as PNG, SVG or PDF. Loads matplotlib."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpmac_cli.accounting.risk import trade_off
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dpmac_cli.accounting.pricing import Row

#: Colours that most colour-blind readers can tell apart (Okabe and Ito 2008), darkest first, and
#: dashes for those who see none.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
KINDS = (".png", ".svg", ".pdf")


def faults_of_picture(path: Path | None) -> Iterator[str]:
    """Yield why a picture cannot be written where --plot says."""
    if path and (path.suffix.lower() not in KINDS or not path.parent.is_dir()):
        yield (
            f"--plot {path} must be a file in a folder that exists, ending in one of "
            f"{', '.join(KINDS)}."
        )


def new_figure(panels: int) -> tuple["Figure", list["Axes"]]:
    """Return a figure with some panels side by side. In each, the first 28 lines all differ."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (a second to load)

    figure = Figure(figsize=(5.2 * panels, 3.8), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel in axes:
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_prop_cycle(color=COLOURS * len(DASHES), linestyle=DASHES * len(COLOURS))
    return figure, list(axes)


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a picture atomically; the same picture is the same bytes. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415  (a second to load)

    picture = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    with rc_context({"svg.hashsalt": "dpmac"}):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(picture, dpi=200, format=kind, metadata=metadata)
    write_atomically(path, picture.getvalue())


def draw_trade_offs(rows: Sequence["Row"], path: Path) -> None:
    """Draw what attackers can reach: type I and II errors, beside a ROC curve on log scales.

    One line per row. Raises OSError if the file cannot be written.
    """
    import numpy as np  # noqa: PLC0415  (mistakes are answered without it)

    figure, (errors, roc) = new_figure(2)
    alphas = np.geomspace(1e-5, 1, 500)
    for panel, guessing in ((errors, 1 - alphas), (roc, alphas)):
        panel.plot(alphas, guessing, "-", color="#bbbbbb", linewidth=1, label="guessing")
    for row in rows:
        betas = trade_off(row.events, alphas)
        name = f"epsilon {format_epsilon(row.epsilon)} at delta {format_epsilon(row.delta)}"
        errors.plot(alphas, betas, label=name)
        roc.plot(alphas, 1 - betas)
    errors.set(xlabel="false positive rate", ylabel="least false negative rate")
    roc.set(xlabel="false positive rate", ylabel="highest true positive rate")
    roc.set(xscale="log", yscale="log")
    errors.legend(fontsize="small")
    write_figure(figure, path)
