"""Training on all records: nothing is held out, and nothing is scored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpmac_cli import ArrayData, load, resume
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.data.published import read_published
from dpmac_cli.errors import InputError
from dpmac_cli.release import scoring
from dpmac_cli.release.card import run_page
from dpmac_cli.release.report import read_report
from dpmac_cli.release.run import Run
from dpmac_cli.release.train import finish, train_plan
from dpmac_cli.runs import folder
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.runs.session import Update
from tests.typed import dpmac

RECORDS = 300
#: Words that a run without test records must not have.
SCORES = ("test accuracy", "test_accuracy", "balanced accuracy", "largest class", "held out")


def rows(**declared: Any) -> ArrayData:
    """Some of the digits as rows of numbers."""
    train, _ = read_published("digits", Path())
    x = train.x[:RECORDS].reshape(RECORDS, -1).astype(np.float32)
    return ArrayData(x, train.y[:RECORDS], low=0, high=16, classes=[*"0123456789"], **declared)


def trained(out: Path, **settings: Any) -> tuple[list[Any], Run]:
    """Train on all of the rows for two epochs; return what happened."""
    given = {"dataset": rows(), "test_fraction": 0, "sigma": 6, "epochs": 2, "device": "cpu"}
    events = [*train_plan(resolve(**{**given, **settings}, out=out))]
    return events, finish(events)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Run]:
    """A run on all records."""
    return trained(tmp_path_factory.mktemp("all") / "run")


def test_all_records_are_trained_on_and_none_is_scored(run: tuple[list[Any], Run]) -> None:
    events, last = run
    assert last.report["data"]["train_size"] == RECORDS
    assert last.report["data"]["test_size"] == 0
    assert not last.report["data"]["held_out"]
    assert last.report["scores"] is None
    shown = [event for event in events if isinstance(event, Update) and event.evaluated]
    assert [event.result for event in shown] == [None, None]
    assert read_report(last.folder).score[1].value is None
    settled = last.report["sentences"]["computed_from_records"]
    assert not any("test records" in what for what in settled)


def test_no_file_of_it_has_a_score_or_mentions_test_records(
    run: tuple[list[Any], Run],
) -> None:
    where = run[1].folder
    for name in (folder.CARD, folder.METRICS):
        text = (where / name).read_text()
        assert not [word for word in SCORES if word in text.lower()], name
    assert "| network |" in (where / folder.CARD).read_text()
    for line in (where / folder.METRICS).read_text().splitlines():
        assert {*json.loads(line)} == {"step", "epoch", "epsilon", "delta", "seconds"}
    page = run_page(where)
    assert "Test accuracy" not in page
    assert "What any membership attack can reach" in page


def test_it_predicts_and_its_test_records_are_those_that_are_named(
    run: tuple[list[Any], Run],
) -> None:
    where = run[1].folder
    x = np.zeros((3, 64), np.float32)
    assert load(where).predict(x).probabilities.shape == (3, 10)
    with pytest.raises(InputError, match="none to test on"):
        scoring.score(load(where).released, rows())


def test_it_is_resumed_without_test_records(tmp_path: Path) -> None:
    asked = iter(range(100))
    given: dict[str, Any] = {"dataset": rows(), "test_fraction": 0, "device": "cpu"}
    given |= {"sigma": 6, "epochs": 2}
    stopped = finish(
        train_plan(resolve(**given, out=tmp_path / "run"), stop=lambda: next(asked) >= 2)
    )
    assert stopped.state == "interrupted"
    ended = resume(stopped.folder, dataset=rows())
    assert (ended.state, ended.report["scores"]) == ("finished", None)


def test_scores_that_need_test_records_are_refused() -> None:
    given: dict[str, Any] = {"dataset": rows(), "test_fraction": 0, "device": "cpu"}
    with pytest.raises(InputError, match="releases a score of test records"):
        resolve(**given, sigma=6, epochs=1, cover_scores=True)


def test_the_command_trains_on_all_records(tmp_path: Path) -> None:
    data, out = tmp_path / "rows.npz", tmp_path / "run"
    train_records, _ = read_published("digits", Path())
    x = train_records.x[:RECORDS].reshape(RECORDS, -1)
    np.savez(data, x=x, y=train_records.y[:RECORDS], low=0, high=16)
    settings = ("--test-fraction", "0", "--sigma", "6", "--epochs", "1", "--device", "cpu")
    done = dpmac("train", "--dataset", data, *settings, "--out", out)
    assert done.exit_code == 0, done.output
    assert "no test records: nothing was scored" in done.stdout
    assert "test accuracy" not in done.stdout
    assert dpmac("eval", out).exit_code == 2
    compared = dpmac("compare", "--dataset", data, *settings[:4], "--out", tmp_path / "study")
    assert compared.exit_code == 2
    assert "leaves no test records" in compared.stderr


def test_a_registered_dataset_keeps_its_test_records() -> None:
    plan = resolve(dataset="digits", test_fraction=0, sigma=6, steps=1).plan
    assert plan.facts.test_size == DATASETS["digits"].test_size
