"""The curves of a run: what its metrics say, and nothing else."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpmac_cli import plots
from dpmac_cli.plots import draw_curves
from dpmac_cli.runs import folder
from dpmac_cli.runs import train as run
from dpmac_cli.runs.train import finish
from dpmac_cli.storage import files
from tests import secret_search as search
from tests.digits_runs import SEED, after, digits_config, train_digits
from tests.typed import dpmac

EPOCH = 12
LINES: list[dict[str, float | None]] = [
    {"step": 12, "epoch": 1.0, "test_accuracy": 0.4, "epsilon": 0.5, "delta": 1e-6},
    {"step": 24, "epoch": 2.0, "test_accuracy": 0.7, "epsilon": 0.6, "delta": 1e-6},
    {"step": 30, "epoch": 2.5, "test_accuracy": 0.6, "epsilon": 0.65, "delta": 1e-6},
]


def drawn(lines: list[dict[str, float | None]], monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of a picture whose file is not written."""
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "write_figure", lambda figure, path: figures.append(figure))
    draw_curves(lines, "digits, dp-adam", Path("curves.svg"))
    return list(figures[0].axes)


def points(panel: Axes) -> list[list[float]]:
    (line,) = panel.get_lines()
    return [[float(x), float(y)] for x, y in np.asarray(line.get_xydata())]


def redrawn(where: Path) -> bytes:
    """The curves of a run's metrics."""
    report = json.loads((where / folder.REPORT).read_text())
    title = f"{report['dataset']['name']}, {report['optimizer']}"
    draw_curves(files.read_lines(where / folder.METRICS), title, Path("again.svg"))
    return Path("again.svg").read_bytes()


def test_curves_say_what_the_metrics_say(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy, epsilon = drawn(LINES, monkeypatch)
    assert points(accuracy) == [[1.0, 40.0], [2.0, 70.0], [2.5, 60.0]]
    assert points(epsilon) == [[1.0, 0.5], [2.0, 0.6], [2.5, 0.65]]
    assert (accuracy.get_xlabel(), accuracy.get_ylabel()) == ("epoch", "test accuracy, %")
    assert (epsilon.get_xlabel(), epsilon.get_ylabel()) == ("epoch", "epsilon at delta 1e-06")
    figure = accuracy.get_figure()
    assert isinstance(figure, Figure)
    assert figure.get_suptitle() == "digits, dp-adam"
    for panel in (accuracy, epsilon):
        assert panel.get_xlim()[0] == 0
        assert all(float(tick).is_integer() for tick in panel.get_xticks())


@pytest.mark.privacy
def test_between_epochs_no_price_is_drawn_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    _, epsilon = drawn(LINES, monkeypatch)
    (line,) = epsilon.get_lines()
    assert line.get_drawstyle() == "steps-pre"
    assert epsilon.get_ylim()[0] == 0


def test_without_privacy_there_is_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{**line, "epsilon": None, "delta": None} for line in LINES]
    (accuracy,) = drawn(lines, monkeypatch)
    figure = accuracy.get_figure()
    assert isinstance(figure, Figure)
    assert figure.get_suptitle() == "digits, dp-adam, no privacy"


@pytest.mark.privacy
def test_a_run_draws_its_metrics_and_nothing_else() -> None:
    args = ("--dataset", "digits", "--sigma", "6", "--steps", "14", "--out", "run")
    result = dpmac("train", *args, "--plot")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].endswith("SHA256SUMS, curves.svg")
    where = Path("run")
    assert (where / folder.CURVES).read_bytes() == redrawn(where)
    assert folder.vouched(where, folder.CURVES) is True
    root = ElementTree.parse(where / folder.CURVES).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.privacy
def test_no_secret_is_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = search.record(monkeypatch, tmp_path, SEED)
    config = digits_config(seed=SEED, steps=4, out=tmp_path / "run", plot=True)
    where = finish(run.train(config)).folder
    assert where / folder.CURVES in set(search.published(where))
    assert secrets.found(where) == []


def test_without_the_flag_none_are_drawn() -> None:
    where = train_digits().folder
    assert not (where / folder.CURVES).exists()
    assert "plot" not in (where / folder.CONFIG).read_text()


def test_a_run_that_goes_on_draws_all_of_it_anew() -> None:
    where = finish(run.train(digits_config(steps=2 * EPOCH, plot=True), after(4))).folder
    before = (where / folder.CURVES).read_bytes()
    assert before == redrawn(where)
    ended = finish(run.resume(where, {}))
    assert len(ended.report["privacy"]["events"]) == 1
    assert before != (where / folder.CURVES).read_bytes() == redrawn(where)


def test_a_fork_draws_its_own_and_leaves_that_of_its_parent() -> None:
    where = train_digits(steps=EPOCH, plot=True).folder
    before = (where / folder.CURVES).read_bytes()
    forked = finish(run.fork(where, {"steps": str(2 * EPOCH), "out": "forked"})).folder
    assert (where / folder.CURVES).read_bytes() == before
    assert before != (forked / folder.CURVES).read_bytes() == redrawn(forked)
    assert folder.vouched(where, folder.CURVES) is folder.vouched(forked, folder.CURVES) is True
