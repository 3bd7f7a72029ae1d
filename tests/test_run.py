"""One run on digits, from a configuration to the files in its folder."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.data import loaders as data
from dpmac_cli.data.registry import Dataset
from dpmac_cli.errors import BudgetError, InputError, ModelError
from dpmac_cli.models import architectures
from dpmac_cli.release.report import Statement
from dpmac_cli.release.scoring import score
from dpmac_cli.runs import trainer as assembly
from dpmac_cli.runs import trainer as engine
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.training import evaluation
from tests.conftest import OPTIMIZER_NAMES
from tests.digits_runs import (
    RATE,
    SEED,
    SIGMA,
    contents,
    digits_config,
    same_weights,
    train_digits,
    train_events,
    weights,
)

PUBLIC_FILES = {
    "SHA256SUMS",
    "config.yaml",
    "metrics.jsonl",
    "model-card.md",
    "model.safetensors",
    "report.json",
}


def published(where: Path) -> set[str]:
    """What a run leaves, but for what is private."""
    return {path.name for path in where.iterdir()} - {".lock", "checkpoint"}


def metrics(where: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def test_a_run_starts_reports_and_finishes() -> None:
    events, finished = train_events(digits_config(epochs=2))
    started, *updates, _ = events
    assert isinstance(started, Started)
    assert (started.parameters, started.steps) == ((4810, 4810), 24)
    assert all(isinstance(update, Update) for update in updates)
    assert finished.state == "finished"
    assert published(finished.folder) == PUBLIC_FILES
    modes = {(finished.folder / name).stat().st_mode & 0o777 for name in PUBLIC_FILES}
    assert modes == {0o644}
    assert json.loads((finished.folder / "report.json").read_text()) == finished.report


def test_metrics_have_a_line_an_epoch_and_an_epsilon_that_never_falls() -> None:
    finished = train_digits(steps=30)
    lines = metrics(finished.folder)
    assert [line["step"] for line in lines] == [12, 24, 30]
    assert [line["epoch"] for line in lines] == [1, 2, 2.5]
    prices = [line["epsilon"] for line in lines]
    assert prices == sorted(prices)
    assert prices[-1] == finished.report["privacy"]["epsilon"]
    assert lines[-1]["test_accuracy"] == finished.report["test"]["accuracy"]
    for line in lines:
        exact = total_epsilon((TrainingEvent(RATE, SIGMA, line["step"]),), 1e-5)
        assert exact <= line["epsilon"] <= finished.report["privacy"]["epsilon"]


@pytest.mark.long
def test_the_epsilon_of_an_evaluation_is_of_its_own_step() -> None:
    """Even where the schedule of the display has no point: here every second epoch has one."""
    finished = train_digits(epochs=130, batch_size=1200, sigma=30.0)
    for line in metrics(finished.folder)[:4]:
        exact = total_epsilon((TrainingEvent(1200 / 1437, 30.0, line["step"]),), 1e-5)
        assert exact <= line["epsilon"] < exact * 1.01, line["step"]


def test_runs_are_numbered() -> None:
    folders = [train_digits(optimizer="dp-sgd").folder for _ in range(2)]
    assert folders == [Path("runs/digits-dp-sgd-1"), Path("runs/digits-dp-sgd-2")]


# Repeatable, or secret


@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_the_written_config_and_the_seed_repeat_the_run(optimizer: str) -> None:
    first = train_digits(optimizer=optimizer, seed=SEED, lr=1 / 30, physical_batch=50)
    again = train_digits(first.folder / "config.yaml", seed=SEED)
    assert same_weights(first.folder, again.folder)
    for part in ("test", "privacy", "hyperparameters"):
        assert first.report[part] == again.report[part]
    assert not same_weights(first.folder, train_digits(optimizer=optimizer, seed=SEED + 1).folder)


@pytest.mark.privacy
def test_without_a_seed_no_run_repeats_another() -> None:
    folders = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        folders.append(train_digits().folder)
    assert not same_weights(*folders)


@pytest.mark.privacy
def test_the_seed_occurs_in_no_file() -> None:
    finished = train_digits(seed=SEED)
    assert finished.report["privacy"]["seed_policy"]["given"] is True
    for name, content in contents(finished.folder).items():
        if content is None:  # a folder
            continue
        for form in (str(SEED), f"{SEED:,}", f"{SEED:x}"):
            assert form.encode() not in content, name
        for order in ("little", "big"):
            assert SEED.to_bytes(8, order) not in content, name


# What it costs


@pytest.mark.privacy
def test_a_target_is_met_and_nearly_used_up() -> None:
    finished = train_digits(steps=5, epsilon=0.5)
    price = finished.report["privacy"]
    assert 0.99 * 0.5 < price["epsilon"] <= 0.5
    event = TrainingEvent(price["sampling_rate"], price["noise_multiplier"], 5)
    assert total_epsilon((event,), 1e-5) == price["epsilon"]
    # The file holds the noise that was found, so that repeating the run solves nothing again.
    again = digits_config(finished.folder / "config.yaml")
    assert again.privacy.sigma == price["noise_multiplier"]
    assert "epsilon" not in again.recorded


@pytest.mark.privacy
def test_the_noise_found_for_a_target_is_the_noise_added(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanisms = []
    make = assembly.make_trainer

    def watch(*args: Any, **kwargs: Any) -> engine.Trainer:
        trainer = make(*args, **kwargs)
        mechanisms.append(trainer.mechanism)
        return trainer

    monkeypatch.setattr("dpmac_cli.runs.train.make_trainer", watch)
    finished = train_digits(epsilon=0.5, recipe="paper", physical_batch=32)
    (mechanism,) = mechanisms
    assert mechanism.noise_multiplier == finished.report["privacy"]["noise_multiplier"]
    assert mechanism.expected_batch == 128


@pytest.mark.privacy
def test_a_run_stops_before_its_budget_is_passed() -> None:
    events, finished = train_events(digits_config(epochs=2, max_epsilon=0.2))
    price = finished.report["privacy"]
    assert isinstance(events[0], Started)
    assert events[0].steps < events[0].plan.privacy.steps
    assert finished.state == finished.report["state"] == "budget-spent"
    assert price["epsilon"] <= 0.2 < price["epsilon_planned"]
    assert total_epsilon((TrainingEvent(RATE, SIGMA, price["steps"] + 1),), 1e-5) > 0.2
    assert metrics(finished.folder)[-1]["epsilon"] == price["epsilon"]
    assert published(finished.folder) == PUBLIC_FILES
    assert score(finished.folder, None, None, "cpu").result.samples == 360


def test_a_budget_that_is_not_reached_changes_nothing() -> None:
    plain, bounded = train_digits(seed=1), train_digits(seed=1, max_epsilon=50.0)
    assert bounded.state == "finished"
    assert same_weights(plain.folder, bounded.folder)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_epsilon": 0.01}, "allows no further step"),
        ({"epsilon": 1e-6, "steps": 5000}, "No sigma up to"),
    ],
)
def test_a_budget_out_of_reach_writes_nothing(
    tmp_path: Path, flags: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(BudgetError, match=said):
        train_digits(out="run", **flags)
    assert contents(tmp_path) == {}


@pytest.mark.privacy
def test_chunks_change_neither_the_price_nor_the_noise() -> None:
    whole, chunked = (train_digits(seed=1, physical_batch=size) for size in (1024, 13))
    assert whole.report["privacy"] == chunked.report["privacy"]
    one, other = weights(whole.folder), weights(chunked.folder)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.privacy
def test_a_baseline_without_privacy_says_so_everywhere() -> None:
    events, finished = train_events(digits_config(epochs=2, no_dp=True))
    price = finished.report["privacy"]
    assert (price["private"], price["epsilon"], price["epsilon_planned"]) == (False, None, None)
    assert price["noise_multiplier"] == 0
    assert price["statement"].startswith("No privacy")
    assert "no-dp" in finished.folder.name
    assert "no-dp: true" in (finished.folder / "config.yaml").read_text()
    assert [line["epsilon"] for line in metrics(finished.folder)] == [None, None]
    assert all(u.epsilon in (None, np.inf) for u in events if isinstance(u, Update))
    assert finished.report["test"]["accuracy"] > 0.8


# Ended early, or never begun


def test_a_stop_ends_the_run_with_everything_written() -> None:
    asked = iter([False, True])
    _, finished = train_events(digits_config(epochs=5), lambda: next(asked))
    report = finished.report
    assert finished.state == report["state"] == "interrupted"
    # The last line's price is the report's to the bit, wherever the run was stopped.
    assert metrics(finished.folder)[-1]["epsilon"] == report["privacy"]["epsilon"]
    assert (report["privacy"]["steps"], metrics(finished.folder)[-1]["step"]) == (2, 2)
    assert report["privacy"]["epsilon"] == total_epsilon((TrainingEvent(RATE, SIGMA, 2),), 1e-5)
    assert report["privacy"]["epsilon"] < report["privacy"]["epsilon_planned"]
    assert published(finished.folder) == PUBLIC_FILES
    result = score(finished.folder, None, None, "cpu").result
    assert result.accuracy == report["test"]["accuracy"]


def test_a_stop_at_the_last_step_is_no_interruption() -> None:
    _, finished = train_events(digits_config(steps=1), lambda: True)
    assert finished.state == "finished"


def no_data() -> Any:
    raise InputError("no data today")


def batch_norm(dataset: Dataset, *_: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_digits", no_data)


def mixing_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "perceptron", batch_norm)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (no_loader, InputError, "no data today"),
        (mixing_model, ModelError, r"layer 1 is a BatchNorm1d.*GroupNorm"),
    ],
)
@pytest.mark.parametrize("flags", [{}, {"out": "old", "force": True}], ids=["new", "force"])
def test_a_failure_before_the_first_step_leaves_everything_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
    said: str,
    flags: Mapping[str, Any],
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text("{}")
    before = contents(tmp_path)
    spoil(monkeypatch)
    with pytest.raises(error, match=said):
        train_digits(**flags)
    assert contents(tmp_path) == before


def test_a_chosen_folder_is_overwritten_only_by_force() -> None:
    first = train_digits(out="mine", seed=1)
    before = contents(first.folder)
    with pytest.raises(InputError, match=r"already contains a run.*--force"):
        train_digits(out="mine", seed=2)
    assert contents(first.folder) == before
    (first.folder / "notes.txt").write_text("kept")
    second = train_digits(out="mine", seed=2, force=True)
    after = contents(second.folder)
    assert after.keys() == before.keys() | {"notes.txt"}
    assert after["model.safetensors"] != before["model.safetensors"]
    assert len(metrics(second.folder)) == 1


@pytest.mark.parametrize("device", ["cuda:77", "cuda:" + "9" * 30])
def test_a_device_that_is_not_there_is_an_input_error(tmp_path: Path, device: str) -> None:
    with pytest.raises(InputError, match="--device"):
        train_digits(device=device)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("batch", [1, 100, 359, 360, 361])
def test_every_test_sample_is_scored_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    finished = train_digits(steps=1, seed=1)
    whole = score(finished.folder, None, None, "cpu").result
    monkeypatch.setattr(evaluation, "RECORDS", batch)
    result = score(finished.folder, None, None, "cpu").result
    assert result.samples == 360
    assert torch.equal(result.confusion, whole.confusion)
    assert result.loss == pytest.approx(whole.loss, rel=1e-5)


#: Words for what was computed from the training records without noise, and for seeds.
SUSPICIOUS = re.compile(
    r"loss|norm|clip|grad|drawn|batch|sample|empty|finite|count|seed|train|state|mean|std|share"
)
#: What holds such a word and may be published: public, post-noise, or of the test set.
PUBLIC = {
    "dataset.train_size",
    "hyperparameters.batch_size",
    "input.mean",
    "input.std",
    "machine.physical_batch",
    "model.fix_norm",
    "model.independence.statement",
    "privacy.accountant",
    "privacy.sampler",
    "privacy.sampling_rate",
    "privacy.randomness.statement",
    "privacy.risk.statement",
    "privacy.seed_policy.given",
    "privacy.seed_policy.statement",
    "privacy.statement",
    "state",
    "test.loss",
    "recipe.loss",  # its name
    "test.samples",
    "test_loss",
    "test_samples",
    "timings.samples_per_second",
    "timings.training_seconds",
    "versions.dp-accounting",
}


def leaves(value: Any, path: str = "") -> list[str]:
    """The dotted names of all values."""
    if not isinstance(value, dict):
        return [path]
    return [leaf for key, v in value.items() for leaf in leaves(v, f"{path}.{key}".lstrip("."))]


@pytest.mark.privacy
@pytest.mark.parametrize("optimizer", ["dp-macadam", "dp-macadambc"])
def test_nothing_unnoised_has_a_name_in_the_files(optimizer: str) -> None:
    finished = train_digits(optimizer=optimizer, seed=SEED)
    names = {*leaves(finished.report), *leaves(metrics(finished.folder)[0])}
    answers = {f"statement.{name}" for name in Statement.model_fields}
    assert {name for name in names if name.startswith("statement.")} == answers
    names -= answers
    assert {name for name in names if SUSPICIOUS.search(name)} <= PUBLIC


@pytest.mark.privacy
def test_speed_is_told_for_the_expected_batch() -> None:
    timings = train_digits(epochs=1).report["timings"]
    assert timings["samples_per_second"] == pytest.approx(
        128 * timings["steps_per_second"], rel=1e-3
    )
