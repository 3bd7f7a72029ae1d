"""The live display, as a terminal shows it."""

import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import one_hot

from dpmac_cli.cli import compare
from dpmac_cli.cli.console import Expendable, check_kept
from dpmac_cli.cli.display import RunDisplay
from dpmac_cli.errors import InputError
from dpmac_cli.runs.loop import Progress
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.studies.executor import Ended, Moved
from dpmac_cli.studies.grid import plan
from dpmac_cli.training.evaluation import Evaluation
from tests.digits_runs import digits_config
from tests.helpers import class_task

STEPS = 58_800


def bar(width: int) -> tuple[RunDisplay, Console]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    display = RunDisplay(console)
    config = digits_config(steps=STEPS)
    display.show(
        Started(
            plan=config,
            folder=Path("runs/some-run"),
            parameters=(582_346, 582_346),
            done=0,
            steps=STEPS,
        )
    )
    return display, console


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_keeps_to_one_line(width: int) -> None:
    display, console = bar(width)
    for step in (1, 999, 9_999, STEPS - 1):
        display.show(Update(event=Progress(step, step * 0.001), epsilon=10.38, planned=10.39))
        (line,) = console.render_lines(display._bar.get_renderable())
        shown = "".join(segment.text for segment in line)
        assert f"{step}/{STEPS}" in shown
        assert "ε ≤ 10.38 of 10.39" in shown
    display.close()


def test_the_price_is_dots_until_it_is_known() -> None:
    display, console = bar(80)
    display.show(Update(event=Progress(7, 0.1), epsilon=None, planned=None))
    (line,) = console.render_lines(display._bar.get_renderable())
    assert "ε ≤ ... of ..." in "".join(segment.text for segment in line)
    display.close()


@pytest.mark.parametrize(
    ("planned", "times"), [(10.01, 1), (10.0, 0), (math.inf, 0), (None, 0)], ids=str
)
def test_a_weak_guarantee_is_remarked_on_once(planned: float | None, times: int) -> None:
    display, console = bar(80)
    for step in (1, 2):
        display.show(Update(event=Progress(step, 0.1), epsilon=planned, planned=planned))
    display.close()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("note: epsilon will be 10.01. Above 10") == times


@pytest.mark.parametrize(("pace", "times"), [(1.0, 1), (0.01, 0)])
def test_a_slow_run_says_once_how_long_it_takes_and_what_is_faster(pace: float, times: int) -> None:
    display, console = bar(80)
    for step in range(1, 3000, 100):
        display.show(Update(event=Progress(step, 5 + pace * step), epsilon=1.0, planned=1.0))
    display.close()
    assert isinstance(console.file, io.StringIO)
    said = " ".join(console.file.getvalue().split())
    assert said.count("at this pace, training takes 16.3 hours more. Faster: fewer") == times
    assert said.count("--backbone") == times


@pytest.mark.parametrize(
    ("counts", "remarks"),
    [
        ([[0, 4], [0, 6]], 1),  # one class is answered, the most frequent
        ([[4, 0], [4, 2]], 1),
        ([[1, 3], [0, 6]], 0),
        ([[0, 0], [0, 6]], 0),  # there is no other class to tell it from
    ],
)
def test_a_model_that_has_learned_nothing_is_remarked_on(
    counts: list[list[int]], remarks: int
) -> None:
    labels, guesses = (
        torch.tensor(counts)
        .nonzero()
        .repeat_interleave(torch.tensor([n for row in counts for n in row if n]), 0)
        .T
    )
    logits = one_hot(guesses, 2).float()
    found = Evaluation(1.0, logits, labels, class_task(2)).results.remark
    assert ("frequent class alone has 6" in found) == remarks


def test_a_request_to_stop_is_answered_above_the_bar() -> None:
    display, console = bar(80)
    display.stopping()
    display.close()
    assert isinstance(console.file, io.StringIO)
    assert re.search("after this step; repeat to stop immediately", console.file.getvalue())


def test_a_lost_stream_takes_everything_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmac_cli.cli.console._failures", [])
    with Path("/dev/full").open("w") as full, monkeypatch.context() as shell:
        shell.setattr("sys.stdout", full)
        screen = Expendable(full)
        assert screen.write("words") == 5
        check_kept()
        screen.flush()
        screen.write("more" * 10_000)
        screen.flush()
    with pytest.raises(InputError, match="No space left"):
        check_kept()


@pytest.mark.parametrize("terminal", [True, False])
def test_why_a_run_failed_is_shown_whole(terminal: bool) -> None:
    grid = plan({"dataset": "digits", "sigma": "1"}, None, Path("runs"))
    console = Console(width=60, file=io.StringIO(), force_terminal=terminal, color_system=None)
    why = " ".join(f"word{i}" for i in range(60))
    display = compare.StudyDisplay(console, grid, range(len(grid.runs)))
    with display.bar:
        display.show(Ended(0, why))
    assert isinstance(console.file, io.StringIO)
    assert f"failed: {why}" in " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_of_a_study_keeps_to_one_line(width: int) -> None:
    flags = {"dataset": "digits", "optimizers": "all", "kappa": "paper,tracked", "sigma": "1,2"}
    grid = plan(flags, None, Path("runs"))
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    display = compare.StudyDisplay(console, grid, range(len(grid.runs)))
    with display.bar:
        for number in (0, 5, 30):
            display.show(Moved(number, 58_799, 0.98765))
        lines = console.render_lines(display.bar.get_renderable())
        (shown,) = ["".join(segment.text for segment in line) for line in lines]
    assert len(shown) <= width
    assert f"0/{len(grid.runs)} runs" in shown
