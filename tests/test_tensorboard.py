"""Scores for TensorBoard: what it reads back is what metrics.jsonl says."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from dpmac_cli.release.run import RunEvent, resume, train
from dpmac_cli.release.tensorboard import NOT_CURVES, TensorBoard
from dpmac_cli.runs import folder
from dpmac_cli.storage import files
from tests.digits_runs import SEED, after, digits_config
from tests.typed import dpmac

DIGITS = ("train", "--dataset", "digits", "--sigma", "6", "--steps", "13")


def written(events: Iterable[RunEvent]) -> Path:
    """The folder of a run whose events a writer saw."""
    writer = TensorBoard()
    for event in events:
        writer.show(event)
    assert writer._writer is not None
    writer._writer.close()
    return Path(writer._writer.log_dir)


def read_back(run: Path) -> list[dict[str, Any]]:
    """The scores as TensorBoard reads them, a dictionary per step."""
    (file,) = run.glob(folder.TENSORBOARD)
    found: dict[int, dict[str, Any]] = {}
    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            line = found.setdefault(event.step, {"step": event.step})
            assert value.tag not in line, "a score is written twice"
            line[value.tag] = value.simple_value
    return [*found.values()]


def curves(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what is no curve."""
    lines = files.read_lines(run / folder.METRICS)
    kept = {*lines[0]} - {*NOT_CURVES} | {"step"}
    return [{name: line[name] for name in kept if line[name] is not None} for line in lines]


def test_tensorboard_reads_what_the_metrics_say() -> None:
    run = written(train(digits_config(steps=36, out="run")))
    found, expected = read_back(run), curves(run)
    assert len(found) == len(expected) == 3
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-6)
        assert line.keys() >= {"step", "epsilon", "test_accuracy"}


@pytest.mark.privacy
def test_epsilon_is_never_understated() -> None:
    run = written(train(digits_config(steps=36, out="run")))
    pairs = zip(read_back(run), files.read_lines(run / folder.METRICS), strict=True)
    assert all(shown["epsilon"] >= line["epsilon"] for shown, line in pairs)


def test_a_resumed_run_has_every_score_once() -> None:
    config = digits_config(steps=36, out="run", seed=SEED)
    written(train(config, after(20)))
    run = written(resume("run"))
    assert [line["step"] for line in read_back(run)] == [line["step"] for line in curves(run)]
    assert read_back(run)[-1]["step"] == 36


def test_the_command_writes_them() -> None:
    result = dpmac(*DIGITS, "--out", "run", "--quiet", "--tensorboard")
    assert (result.exit_code, result.output) == (0, "")
    assert read_back(Path("run")) != []
    assert "tensorboard" not in (Path("run") / folder.CONFIG).read_text()


def test_without_tensorboard_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = dpmac(*DIGITS, "--out", "run", "--tensorboard")
    assert result.exit_code == 2
    assert "pip install 'dpmac[tensorboard]'" in result.stderr
    assert not Path("run").exists()
