"""One run on digits, from a configuration to the files in its folder."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmac_cli import files, load
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.sources import HEADER
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.release.sentences import TOPICS
from dpmac_cli.runs import folder
from dpmac_cli.runs import trainer as assembly
from dpmac_cli.runs import trainer as engine
from dpmac_cli.runs.session import Started
from tests.digits_runs import (
    PUBLIC_FILES,
    RATE,
    SEED,
    SIGMA,
    contents,
    digits_config,
    metrics_of,
    report_of,
    train_digits,
    train_events,
    weights,
)
from tests.helpers import MECHANISM, Spy, make_trainer
from tests.tiers import pairs_short


def published(where: Path) -> set[str]:
    """What a run leaves, but for what is private."""
    return {path.name for path in where.iterdir()} - {".lock", "checkpoint"}


@pytest.mark.promise("price")
def test_metrics_have_a_line_an_epoch_and_an_epsilon_that_never_falls() -> None:
    finished = train_digits(steps=30)
    lines = metrics_of(finished.folder)
    assert [line["step"] for line in lines] == [12, 24, 30]
    assert [line["epoch"] for line in lines] == [1, 2, 2.5]
    prices = [line["epsilon"] for line in lines]
    assert prices == sorted(prices)
    assert prices[-1] == finished.report["epsilon"]
    assert lines[-1]["test_accuracy"] == finished.report["scores"]["accuracy"]["value"]
    for line in lines:
        exact = total_epsilon((TrainingEvent(RATE, SIGMA, line["step"]),), 1e-5)
        assert exact <= line["epsilon"] <= finished.report["epsilon"]


# Repeatable, or secret


# What it costs


@pytest.mark.promise("target")
def test_the_noise_found_for_a_target_is_the_noise_added(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanisms = []
    make = assembly.make_trainer

    def watch(*args: Any, **kwargs: Any) -> engine.Trainer:
        trainer = make(*args, **kwargs)
        mechanisms.append(trainer.mechanism)
        return trainer

    monkeypatch.setattr("dpmac_cli.runs.train.make_trainer", watch)
    finished = train_digits(epsilon=0.1, recipe="paper", physical_batch=32)
    (mechanism,) = mechanisms
    assert mechanism.noise_multiplier == finished.report["events"][0]["noise_multiplier"]
    assert mechanism.expected_batch == 128


@pytest.mark.promise("target")
def test_a_run_stops_before_its_budget_is_passed() -> None:
    events, finished = train_events(digits_config(epochs=2, max_epsilon=0.2))
    price = finished.report
    assert isinstance(events[0], Started)
    assert events[0].steps < events[0].plan.event.steps
    assert finished.state == finished.report["state"] == "budget-spent"
    assert price["epsilon"] <= 0.2
    more = TrainingEvent(RATE, SIGMA, price["events"][0]["steps"] + 1)
    assert total_epsilon((more,), 1e-5) > 0.2
    assert metrics_of(finished.folder)[-1]["epsilon"] == price["epsilon"]
    assert published(finished.folder) == PUBLIC_FILES
    modes = {(finished.folder / name).stat().st_mode & 0o777 for name in PUBLIC_FILES}
    assert modes == {0o644}
    assert report_of(finished.folder) == finished.report
    assert load(finished.folder, device="cpu").score(None, data_dir=None).samples == 360


@pytest.mark.promise("target")
def test_chunks_change_neither_the_price_nor_the_noise() -> None:
    whole, chunked = (train_digits(seed=1, physical_batch=size) for size in (1024, 13))
    for name in ("events", "epsilon", "delta", "risk", "seeded", "secure", "sentences"):
        assert whole.report[name] == chunked.report[name]
    one, other = weights(whole.folder), weights(chunked.folder)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


# Ended early, or never begun


def test_a_stop_ends_the_run_with_everything_written() -> None:
    asked = iter([False, True])
    _, finished = train_events(digits_config(epochs=5), lambda: next(asked))
    report = finished.report
    assert finished.state == report["state"] == "interrupted"
    # The last line's price is the report's to the bit, wherever the run was stopped.
    assert metrics_of(finished.folder)[-1]["epsilon"] == report["epsilon"]
    assert (report["events"][0]["steps"], metrics_of(finished.folder)[-1]["step"]) == (2, 2)
    assert report["epsilon"] == total_epsilon((TrainingEvent(RATE, SIGMA, 2),), 1e-5)
    assert published(finished.folder) == PUBLIC_FILES
    result = load(finished.folder, device="cpu").score(None, data_dir=None)
    assert result.accuracy == report["scores"]["accuracy"]["value"]


#: Words for what was computed from the training records without noise, and for seeds.
SUSPICIOUS = re.compile(
    r"loss|norm|clip|grad|drawn|batch|sample|empty|finite|count|seed|train|state|mean|std|share"
)
#: What holds such a word and may be published: public, post-noise, or of the test set.
PUBLIC = {
    "data.records.mean",
    "data.records.standardised",
    "data.records.std",
    "data.train_size",
    "environment.dp-accounting",
    "network.trained",
    "scores.log_loss.constant",
    "scores.log_loss.value",
    "scores.loss",
    "scores.samples",
    "seeded",
    "settings.batch_size",
    "settings.loss",  # its name
    "settings.physical_batch",
    "settings.sampler",
    "state",
    "test_loss",
    "test_samples",
}


def leaves(value: Any, path: str = "") -> list[str]:
    """The dotted names of all values."""
    if not isinstance(value, dict):
        return [path]
    return [leaf for key, v in value.items() for leaf in leaves(v, f"{path}.{key}".lstrip("."))]


@pytest.mark.promise("published")
@pytest.mark.parametrize("optimizer", ["dp-macadam", "dp-macadambc"])
def test_nothing_unnoised_has_a_name_in_the_files(optimizer: str) -> None:
    finished = train_digits(optimizer=optimizer, seed=SEED)
    names = {*leaves(finished.report), *leaves(metrics_of(finished.folder)[0])}
    names -= {name for name in names if name.startswith("sentences.")}
    assert {name for name in names if SUSPICIOUS.search(name)} <= PUBLIC
    topics = {*TOPICS} | {"guarantee", "risk", "unit", "adjacency"}
    assert finished.report["sentences"].keys() <= topics | {"accountant", "computed_from_records"}


# Files are whole or not there, and nothing is overwritten by surprise.


@pytest.mark.parametrize("failing", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize(
    "error", [OSError("disk full"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
def test_a_crash_in_the_middle_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)):
        files.write_atomically(file, b"new")
    assert contents(tmp_path) == {"report.json": b"old"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "names", [["thesis.tex"], ["config.yaml"], ["thesis.tex", "sub/report.json"]]
)
def test_folders_that_are_not_runs_are_refused_even_with_force(
    tmp_path: Path, names: list[str], force: bool
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="do not belong to a run"):
        folder.check_chosen_folder(tmp_path, force)
    assert contents(tmp_path) == before


def test_force_removes_the_files_of_the_run_and_no_others(tmp_path: Path) -> None:
    ours = (*folder.SEALED, folder.SUMS)
    for name in (*ours, "notes.txt", "plot.png"):
        (tmp_path / name).write_text(HEADER if name == folder.CONFIG else name)
    for name in (f"{folder.CHECKPOINTS}/{folder.STATE}", "branch-of-mine/file"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="add --force"):
        folder.check_chosen_folder(tmp_path, force=False)
    assert contents(tmp_path) == before
    folder.check_chosen_folder(tmp_path, force=True)
    assert contents(tmp_path) == before, "a check changes nothing"
    folder.clear(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes.txt", "plot.png", "branch-of-mine"}


# Checksums


def test_sha256sum_checks_what_was_sealed(tmp_path: Path) -> None:
    for name in (*folder.SEALED, "plot.png"):
        (tmp_path / name).write_text(f"{name} of a run")
    folder.seal(tmp_path)
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", folder.SUMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert checked.stdout.splitlines() == [f"{name}: OK" for name in folder.SEALED]
    assert folder.is_published(tmp_path)
    folder.unpublish(tmp_path)
    assert not folder.is_published(tmp_path)
    kept = {folder.MODEL, folder.METRICS, folder.CONFIG, "plot.png"}
    assert {file.name for file in tmp_path.iterdir()} == kept


# A step that fails is charged, and its noise is never added to another sum.


PHASES = ["_draw", "_clip_and_sum", "_begin", "_release", "_update", "_end"]
FAILURES: dict[str, Callable[[], BaseException]] = {
    "an error": ValueError,
    "Ctrl-C": KeyboardInterrupt,
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
}


def failing(method: Any, when: int, failure: Callable[[], BaseException], after: bool) -> Any:
    """Return a method that fails in one call, before or after it has done its work."""
    calls = 0

    def called(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == when and not after:
            raise failure()
        result = method(*args)
        if calls == when:
            raise failure()
        return result

    return called


@pytest.mark.promise("failed")
@pytest.mark.parametrize(
    ("phase", "how", "after", "optimizer"),
    pairs_short(PHASES, [*FAILURES], [False, True], ["dp-sgd", "dp-macadam"]),
)
def test_a_retry_adds_no_noise_twice_and_is_charged(
    phase: str, how: str, after: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    normal = SeededNormals.standard_normal

    def kept(self: SeededNormals, like: torch.Tensor) -> torch.Tensor:
        drawn = normal(self, like)
        used.append(drawn.clone())
        return drawn

    monkeypatch.setattr(SeededNormals, "standard_normal", kept)
    spy = Spy(MECHANISM.noise_multiplier, MECHANISM.expected_batch)
    trainer: Any = make_trainer(optimizer, spy)
    trainer.step()
    monkeypatch.setattr(
        trainer, phase, failing(getattr(trainer, phase), 1, FAILURES[how], after), raising=True
    )
    with pytest.raises(BaseException):  # noqa: B017, PT011
        trainer.step()
    for _ in range(3):
        trainer.step()
    assert trainer.account.begun == 5  # each attempt
    assert len(spy.released) <= 5
    for n, one in enumerate(used):
        for other in used[:n]:
            assert not torch.equal(one, other)
    assert len(used) == len(spy.released)  # each noise is added to one sum
    trainer.check_network()
