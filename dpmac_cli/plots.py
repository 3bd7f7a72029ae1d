"""Pictures for print: readable without colour, on white, as PNG, SVG or PDF. Loads matplotlib."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Colours that most colour-blind readers can tell apart (Okabe and Ito 2008), darkest first, and
#: dashes for those who see none.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MOST_LINES = len(COLOURS) * len(DASHES)


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


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a picture atomically; the same picture is the same bytes. Raises OSError."""
    from matplotlib import rc_context  # noqa: PLC0415  (a second to load)

    picture = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    with rc_context({"svg.hashsalt": "dpmac"}):
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(picture, dpi=200, format=kind, metadata=metadata)
    write_atomically(path, picture.getvalue())
