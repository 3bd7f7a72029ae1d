"""A run is timed on generated records, and its epochs are made to fit."""

import json
from pathlib import Path

import pytest

from dpmac_cli.config.resolve import resolve
from dpmac_cli.runs import timing
from dpmac_cli.runs.timing import Duration, duration
from tests.digits_runs import dpmac


def test_epochs_fit_between_one_and_those_of_the_recipe() -> None:
    found = Duration(before=30, epoch=2)
    assert found.epochs_within(1, 80) == 15
    assert found.epochs_within(10, 80) == 80
    assert found.epochs_within(0.1, 80) == 1


@pytest.mark.privacy
@pytest.mark.parametrize(
    "flags",
    [{"model": "mlp-small"}, {"features": "scatter"}, {"augmentations": 2, "model": "linear"}],
    ids=str,
)
def test_no_record_is_read_to_time_a_run(flags: dict[str, str], tmp_path: Path) -> None:
    plan = resolve({"dataset": "mnist", "sigma": 2, "data_dir": tmp_path, "device": "cpu", **flags})
    found = duration(plan.plan)
    assert 0 < found.epoch < 1000
    assert (found.before > timing.AROUND) == ("features" in flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_minutes_set_the_epochs_before_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "duration", lambda _: Duration(before=6, epoch=3))
    flags = ("--dataset", "digits", "--model", "mlp-small", "--epsilon", "3", "--out", "run")
    result = dpmac("train", *flags, "--minutes", "0.25")
    assert result.exit_code == 0
    assert "--minutes 0.25: 3 of" in result.stderr
    privacy = json.loads(Path("run/report.json").read_text())["privacy"]
    assert privacy["steps"] % 3 == 0
    assert 2.9 < privacy["epsilon"] <= 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--minutes", "1", "--epochs", "3"), "leave out --epochs and --steps"),
        (("--minutes", "1", "--steps", "3"), "leave out --epochs and --steps"),
        (("--minutes", "0"), "--minutes must be above 0"),
        (("--minutes", "1", "--resume", "run"), "leave out --minutes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_minutes_go_with_a_new_run_of_open_length(flags: tuple[str, ...], said: str) -> None:
    result = dpmac("train", "--dataset", "digits", "--sigma", "9", *flags)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
