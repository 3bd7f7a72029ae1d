"""The live display, as a terminal shows it."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from dpmac_cli.cli.console import Expendable
from dpmac_cli.cli.display import LiveBar
from dpmac_cli.engine import Progress
from dpmac_cli.run import Started, Update
from tests.digits_runs import digits_config

STEPS = 58_800


def bar(width: int) -> tuple[LiveBar, Console]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    display = LiveBar(console)
    config = digits_config(steps=STEPS)
    display.started(Started(config, Path("runs/some-run"), 582_346, 0, STEPS, cut_short=False))
    return display, console


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_keeps_to_one_line(width: int) -> None:
    display, console = bar(width)
    for step in (1, 999, 9_999, STEPS - 1):
        display.update(Update(Progress(step, step * 0.001), epsilon=10.38, planned=10.39))
        (line,) = console.render_lines(display._bar.get_renderable())
        shown = "".join(segment.text for segment in line)
        assert f"{step}/{STEPS}" in shown
        assert "ε ≤ 10.38 of 10.39" in shown
        assert ("samples/s" in shown) == (width == 120)
    display.close()


def test_the_price_is_dots_until_it_is_known() -> None:
    display, console = bar(80)
    display.update(Update(Progress(7, 0.1), epsilon=None, planned=None))
    (line,) = console.render_lines(display._bar.get_renderable())
    assert "ε ≤ ... of ..." in "".join(segment.text for segment in line)
    display.close()


def test_a_request_to_stop_is_answered_above_the_bar() -> None:
    display, console = bar(80)
    display.stopping()
    display.close()
    assert isinstance(console.file, io.StringIO)
    assert re.search("stopping after this step; once more to stop at once", console.file.getvalue())


def test_a_lost_stream_takes_everything_and_says_why() -> None:
    with Path("/dev/full").open("w") as full:
        screen = Expendable(full)
        seen = [screen.lost]
        assert screen.write("words") == 5
        screen.flush()
        seen.append(screen.lost)
        screen.write("more" * 10_000)
        screen.flush()
    assert seen[0] is None
    assert isinstance(seen[1], OSError)
