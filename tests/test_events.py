"""What TensorBoard is shown is what metrics.jsonl holds, read back by its own reader."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli.errors import DivergedError
from dpmac_cli.runs import folder
from dpmac_cli.runs import tensorboard as events
from dpmac_cli.runs import train as run
from dpmac_cli.runs.session import Update
from dpmac_cli.runs.train import finish
from dpmac_cli.storage import files
from dpmac_cli.training.loop import Evaluated
from dpmac_cli.training.trainer import Trainer
from tests import secret_search as search
from tests.digits_runs import SEED, after, digits_config, train_digits
from tests.typed import dpmac

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
EPOCH = 12


def lines_of(where: Path) -> list[dict[str, Any]]:
    return files.read_lines(where / folder.METRICS)


def read(where: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Step, time and value of every scalar, as TensorBoard reads a run's folder."""
    read = reader.EventAccumulator(str(where / folder.EVENTS))
    read.Reload()
    tags = read.Tags()
    assert [kind for kind, found in tags.items() if found] == ["scalars"]
    return {
        tag: [(event.step, event.wall_time, event.value) for event in read.Scalars(tag)]
        for tag in tags["scalars"]
    }


def written(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """The same of lines of metrics, but for the rounding of epsilon."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "seconds", "delta", "test_samples") and value is not None:
                point = (line["step"], line["seconds"], float(np.float32(value)))
                found.setdefault(name, []).append(point)
    return found


def assert_same(where: Path) -> None:
    shown, lines = read(where), lines_of(where)
    prices = shown.pop("epsilon", [])
    wanted = written(lines)
    wanted.pop("epsilon", None)
    assert shown == wanted
    stored = [line["epsilon"] for line in lines if line["epsilon"] is not None]
    for (_, _, price), epsilon in zip(prices, stored, strict=True):
        assert epsilon <= price <= epsilon * (1 + 1e-6)


@pytest.mark.privacy
def test_every_value_is_that_of_the_metrics_and_there_is_no_other() -> None:
    where = train_digits(steps=2 * EPOCH, tensorboard=True).folder
    shown = read(where)
    assert {"test_accuracy", "test_loss", "epsilon", "epoch"} < set(shown)
    assert all(len(points) == 2 for points in shown.values())
    assert_same(where)


def test_without_privacy_there_is_no_epsilon() -> None:
    where = train_digits(tensorboard=True, no_dp=True).folder
    assert "epsilon" not in read(where)
    assert_same(where)


def test_without_the_flag_there_are_none() -> None:
    where = train_digits().folder
    assert not (where / folder.EVENTS).exists()
    assert "tensorboard" not in (where / folder.CONFIG).read_text()


@pytest.mark.privacy
@pytest.mark.parametrize("epsilon", [0.1, 0.7, 0.9, 2.0, 1e-30, 123.4561])
def test_a_price_is_never_shown_smaller_than_it_is(epsilon: float) -> None:
    shown = events._as_float("epsilon", epsilon)
    assert epsilon <= shown == float(np.float32(shown))
    assert math.isclose(epsilon, shown, rel_tol=1e-6)


@pytest.mark.privacy
def test_no_secret_is_in_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = search.record(monkeypatch, tmp_path, SEED)
    config = digits_config(seed=SEED, steps=4, out=tmp_path / "run", tensorboard=True)
    where = finish(run.train(config)).folder
    (file,) = (where / folder.EVENTS).iterdir()
    assert file.name == events.FILE  # torch's own writer puts host and process into the name
    assert file in set(search.published(where))
    assert secrets.found(where) == []


def test_a_run_that_was_stopped_goes_on_with_them() -> None:
    config = digits_config(steps=3 * EPOCH, tensorboard=True)
    stopped = finish(run.train(config, after(EPOCH + 3))).folder
    # As a kill leaves it: a line that was shown after the last checkpoint.
    with (stopped / folder.EVENTS / events.FILE).open("ab") as file:
        file.write(b"half a record")
    assert len(finish(run.resume(stopped, {})).report["privacy"]["events"]) == 1, "not exactly"
    assert [step for step, _, _ in read(stopped)["epoch"]] == [EPOCH, 15, 2 * EPOCH, 3 * EPOCH]
    assert_same(stopped)


def test_they_can_be_asked_for_later_and_the_run_stays_exact() -> None:
    stopped = finish(run.train(digits_config(steps=2 * EPOCH), after(EPOCH + 3))).folder
    ended = finish(run.resume(stopped, {"tensorboard": True}))
    assert len(ended.report["privacy"]["events"]) == 1, "not exactly"
    assert_same(stopped)


def test_a_fork_has_its_own_and_the_old_ones_are_kept() -> None:
    where = train_digits(steps=EPOCH + 1, tensorboard=True).folder
    assert [step for step, _, _ in read(where)["test_loss"]] == [EPOCH, EPOCH + 1]
    forked = finish(run.fork(where, {"steps": str(2 * EPOCH), "out": "forked"})).folder
    assert_same(where)
    assert_same(forked)
    assert [step for step, _, _ in read(where)["test_loss"]] == [EPOCH, EPOCH + 1]
    assert read(forked)["test_loss"][-1][0] == 2 * EPOCH


def test_force_leaves_none_of_the_run_before() -> None:
    where = train_digits(out="run", tensorboard=True).folder
    train_digits(out="run", force=True)
    assert not (where / folder.EVENTS).exists()


def test_they_come_while_the_run_goes_on() -> None:
    going = run.train(digits_config(out="run", steps=5 * EPOCH, tensorboard=True))
    updates = (event for event in going if isinstance(event, Update))
    next(update for update in updates if isinstance(update.event, Evaluated))
    assert read(Path("run"))["test_accuracy"]
    going.close()  # type: ignore[attr-defined]


def test_a_run_that_diverged_shows_the_epochs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(trainer: Trainer) -> None:
        if trainer.state.step > EPOCH:
            raise DivergedError(trainer.state.step)

    monkeypatch.setattr(Trainer, "check_finite", diverge)
    with pytest.raises(DivergedError):
        train_digits(out="run", steps=2 * EPOCH, tensorboard=True)
    assert lines_of(Path("run"))[-1]["diverged"] is True
    assert len(read(Path("run"))["test_accuracy"]) == len(lines_of(Path("run"))) - 1


def test_a_missing_package_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "tensorboard" else find(name),
    )
    result = dpmac("train", "--dataset", "digits", "--tensorboard", "--sigma", "-1")
    assert result.exit_code == 2
    assert "--tensorboard needs tensorboard, which is not installed" in result.stderr
    assert "pip install 'dpmac[tensorboard]'" in result.stderr
    assert "--sigma" in result.stderr, "all errors together"
    assert not Path("runs").exists()


def test_the_person_is_told_where_they_are() -> None:
    args = ("--dataset", "digits", "--sigma", "6", "--steps", "3", "--out", "run")
    result = dpmac("train", *args, "--tensorboard")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "its curves: tensorboard --logdir run" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("tensorboard/")
