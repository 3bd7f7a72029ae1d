"""Pictures of prices: whole files, curves inside their axes, lines that can be told apart."""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpmac_cli import plots
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row, price
from dpmac_cli.config.question import Question, answer
from dpmac_cli.errors import InputError
from dpmac_cli.plots import MOST_LINES, draw_prices, faults_of_picture, line_style

DELTA = 1e-5
#: 40 records, and noise that is cheap to price.
SMALL = Question(dataset_size=40, batch_size=8, sigmas=(6.0,), lengths=(("steps", 20),))
WITHOUT_NOISE = replace(SMALL, sigmas=(0.0,))


def drawn(rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> tuple[Axes, Axes]:
    """The panels of a picture of some prices, whose file is not written."""
    panels: list[list[Axes]] = []
    fresh = plots.new_figure

    def kept(count: int) -> tuple[Figure, list[Axes]]:
        figure, axes = fresh(count)
        panels.append(axes)
        return figure, axes

    monkeypatch.setattr(plots, "new_figure", kept)
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: None)
    draw_prices(rows, Path("price.png"))
    ((by_steps, by_delta),) = panels
    return by_steps, by_delta


def points(line: Line2D) -> tuple[list[float], list[float]]:
    xs, ys = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    return xs.tolist(), ys.tolist()


def curves(panel: Axes) -> list[Line2D]:
    """The lines of a panel without its single points."""
    return [line for line in panel.get_lines() if len(points(line)[0]) > 1]


def looks(line: Line2D) -> tuple[str, Any]:
    return str(line.get_color()), line.get_linestyle()


# Files


def png_chunks(data: bytes) -> list[bytes]:
    """The names of the chunks of a PNG, each checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    names, at = [], 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        body = data[at + 4 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(body),)
        names.append(body[:4])
        at += 12 + length
    return names


@pytest.mark.parametrize("name", ["price.png", "price.PNG"])
def test_a_png_is_whole(name: str) -> None:
    draw_prices(list(answer(SMALL)), Path(name))
    chunks = png_chunks(Path(name).read_bytes())
    assert (chunks[0], chunks[-1]) == (b"IHDR", b"IEND")
    assert b"IDAT" in chunks


def test_an_svg_is_whole() -> None:
    draw_prices(list(answer(SMALL)), Path("price.svg"))
    root = ElementTree.parse("price.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10


@pytest.mark.parametrize("name", ["price.pdf", "price", "price.png.txt", "", "no/price.png", "no/"])
def test_a_file_that_cannot_be_a_picture_is_refused(name: str) -> None:
    faults = list(faults_of_picture(Path(name)))
    assert faults
    assert all(fault.startswith("--plot") for fault in faults)


def test_a_file_that_can_be_one_is_not() -> None:
    for name in ("price.png", "PRICE.SVG", "./price.svg"):
        assert not list(faults_of_picture(Path(name)))


def test_a_folder_is_no_picture() -> None:
    Path("price.png").mkdir()
    [fault] = faults_of_picture(Path("price.png"))
    assert "price.png is a folder" in fault


def test_a_file_that_cannot_be_written_is_an_os_error() -> None:
    Path("price.png").mkdir()
    with pytest.raises(OSError, match=r"price\.png"):
        draw_prices(list(answer(SMALL)), Path("price.png"))


@pytest.mark.parametrize("name", ["price.svg", "price.png"])
def test_the_same_picture_is_the_same_bytes(name: str) -> None:
    written = []
    for _ in range(2):
        draw_prices(list(answer(SMALL)), Path(name))
        written.append(Path(name).read_bytes())
    assert written[0] == written[1]
    assert b"<dc:date>" not in written[0]


# What is drawn

GRIDS = [
    SMALL,
    replace(SMALL, lengths=(("steps", 1),)),
    replace(SMALL, sigmas=(6.0, 8.0), lengths=(("steps", 5), ("epochs", 4))),
    replace(SMALL, sampler="shuffle", lengths=(("steps", 13),)),
    replace(SMALL, accountants=("pld", "rdp")),
    replace(SMALL, delta=1e-12),
    replace(SMALL, delta=1e-14),
    replace(SMALL, delta=0.01),
    replace(SMALL, sigmas=(1e4,)),
]


@pytest.mark.parametrize(
    "question",
    GRIDS,
    ids=["one", "step", "grid", "shuffle", "all", "tiny", "tinier", "large", "free"],
)
def test_curves_lie_inside_their_axes(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(answer(question))
    by_steps, by_delta = drawn(rows, monkeypatch)
    for panel in (by_steps, by_delta):
        left, right = panel.get_xlim()
        bottom, top = panel.get_ylim()
        assert panel.get_lines()
        for line in panel.get_lines():
            xs, ys = points(line)
            shown = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x)]
            assert shown
            assert all(left <= x <= right and bottom <= y <= top for x, y in shown)
        assert panel.get_xlabel()
        assert panel.get_ylabel()
    assert by_steps.get_ylim()[0] == 0
    assert f"delta {question.delta:g}" in by_steps.get_ylabel()
    assert by_delta.get_yscale() == "log"


def test_curves_say_what_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(answer(replace(SMALL, sigmas=(6.0, 8.0))))
    by_steps, by_delta = drawn(rows, monkeypatch)
    for row, line in zip(rows, by_steps.get_lines(), strict=True):
        steps, prices = points(line)
        assert (steps[-1], prices[-1]) == (row.steps, row.epsilon)
        assert prices == sorted(prices)
    for row, line in zip(rows, curves(by_delta), strict=True):
        prices, deltas = points(line)
        assert deltas == sorted(deltas)
        assert prices == sorted(prices, reverse=True)
        assert deltas[0] < row.delta < deltas[-1]
        assert prices[0] > row.epsilon > prices[-1]
    marks = [points(line) for line in by_delta.get_lines() if len(points(line)[0]) == 1]
    assert marks == [([row.epsilon], [row.delta]) for row in rows]


def height(line: Line2D, x: float) -> float:
    """What a line shows at a place between its points."""
    xs, ys = points(line)
    style = line.get_drawstyle()
    if style == "default":
        return float(np.interp(x, xs, ys))
    after = next(number for number, point in enumerate(xs) if point >= x)
    return ys[after if style in ("steps", "steps-pre") else after - 1]


@pytest.mark.privacy
@pytest.mark.parametrize("sampler", ["shuffle", "balls-in-bins"])
def test_no_step_is_shown_cheaper_than_it_is(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An epoch is paid for whole with its first step: the price is a stair.
    (row,) = answer(replace(SMALL, sampler=sampler, lengths=(("steps", 13),)))
    by_steps, _ = drawn([row], monkeypatch)
    (line,) = by_steps.get_lines()
    for step in (2, 6, 8, 11, 12):
        cost = total_epsilon((replace(row.events[0], steps=step),), DELTA)
        assert height(line, step) >= cost * (1 - 1e-9)


def test_a_branched_run_is_drawn_to_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    event = TrainingEvent(0.2, 6.0, 10, "poisson", 5)
    row = price((event, replace(event, noise_multiplier=8.0, steps=5)), DELTA)
    by_steps, by_delta = drawn([row], monkeypatch)
    (line,) = by_steps.get_lines()
    steps, prices = points(line)
    assert prices[-1] == row.epsilon
    # 10 steps of the first branch and 5 of the last: no axis of mere "steps" may end at 5.
    assert steps[-1] == 15 or "branch" in by_steps.get_xlabel()
    assert by_delta.get_lines()


def test_rows_without_a_price_or_a_step_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    question = replace(SMALL, sigmas=(0.0, 6.0), lengths=(("steps", 0), ("steps", 3)), runs=2)
    by_steps, by_delta = drawn(list(answer(question)), monkeypatch)
    assert len(by_steps.get_lines()) == 1
    assert len(curves(by_delta)) == 1


@pytest.mark.parametrize(
    "question",
    [
        WITHOUT_NOISE,
        replace(SMALL, lengths=(("steps", 0),)),
        replace(SMALL, delta=1e-300),
        replace(WITHOUT_NOISE, delta=0.0, epsilons=(3.0,), solve="delta"),
    ],
    ids=["no-noise", "no-step", "no-delta", "no-noise-solved"],
)
def test_nothing_to_draw_is_refused_and_no_file_is_written(question: Question) -> None:
    with pytest.raises(InputError, match="--plot"):
        draw_prices(list(answer(question)), Path("price.png"))
    assert not Path("price.png").exists()


# Which line is which


def test_no_two_lines_look_alike() -> None:
    styles = [line_style(number) for number in range(MOST_LINES)]
    assert len({(style["color"], style["linestyle"]) for style in styles}) == MOST_LINES
    # The first few differ in both, for those who see no colour.
    assert len({style["linestyle"] for style in styles[:4]}) == 4
    assert len({style["color"] for style in styles[:7]}) == 7


def test_more_rows_than_looks_are_refused() -> None:
    (row,) = answer(SMALL)
    with pytest.raises(InputError, match=f"at most {MOST_LINES} rows, and these are"):
        draw_prices([row] * (MOST_LINES + 1), Path("price.png"))
    assert not Path("price.png").exists()


SEVERAL = [
    replace(SMALL, sigmas=(6.0, 8.0)),
    replace(SMALL, lengths=(("steps", 5), ("steps", 20))),
    replace(SMALL, accountants=("pld", "rdp")),
    replace(SMALL, sigmas=(12.34561, 12.34562)),
    replace(SMALL, delta=0.0, epsilons=(0.3, 0.5), solve="delta"),
]


@pytest.mark.parametrize(
    "question", SEVERAL, ids=["sigma", "steps", "accountant", "close", "delta"]
)
def test_several_rows_can_be_told_apart(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(answer(question))
    by_steps, by_delta = drawn(rows, monkeypatch)
    lines = by_steps.get_lines()
    assert len({looks(line) for line in lines}) == len(rows)
    assert [looks(line) for line in curves(by_delta)] == [looks(line) for line in lines]
    legend = by_steps.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(set(labels)) == len(rows)


def test_rows_that_are_alike_are_drawn_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    by_steps, _ = drawn(list(answer(replace(SMALL, sigmas=(6.0, 6.0)))), monkeypatch)
    assert len(by_steps.get_lines()) == 2


def test_one_row_needs_no_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    by_steps, _ = drawn(list(answer(SMALL)), monkeypatch)
    assert by_steps.get_legend() is None
    figure = by_steps.get_figure()
    assert isinstance(figure, Figure)
    assert figure.get_suptitle() == "poisson sampling, add-or-remove-one adjacency"


@pytest.mark.parametrize("delta", [1e-300, 1e-15, 1e-5, 0.5, 0.999999])
def test_the_deltas_of_a_curve_are_deltas(delta: float) -> None:
    deltas = plots._deltas(delta)
    assert deltas == sorted(set(deltas))
    assert all(0 < value < 1 for value in deltas)
    assert deltas[0] < delta
