"""Reports as dpmac reads them back: whole, in range, or refused with the key that is wrong."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError
from dpmac_cli.release.report import events_of, read_report
from dpmac_cli.runs import folder
from tests.digits_runs import RATE, SIGMA, train_digits

EVENT = TrainingEvent(RATE, SIGMA, 3, "poisson", 12)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_digits(out=tmp_path_factory.mktemp("report") / "run").folder


def altered(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a report with a change."""
    values = copy.deepcopy(json.loads((run / folder.REPORT).read_bytes()))
    change(values)
    Path("report.json").write_text(json.dumps(values))
    return Path("report.json")


@pytest.mark.parametrize("name", [".", folder.REPORT])
def test_a_run_and_its_report_are_read_alike(run: Path, name: str) -> None:
    found, written = read_report(run / name), json.loads((run / folder.REPORT).read_bytes())
    privacy = found.privacy
    assert privacy.training_events() == (EVENT,)
    assert (found.dataset.name, found.dataset.train_size) == ("digits", 1437)
    assert (privacy.epsilon, privacy.delta) == (written["privacy"]["epsilon"], 1e-5)
    assert privacy.private


def test_keys_that_are_not_known_do_no_harm(run: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["more"] = values["privacy"]["more"] = 1

    assert read_report(altered(run, change)) == read_report(run)


@pytest.mark.privacy
def test_attempts_that_an_older_version_replaced_count_in_a_study(run: Path) -> None:
    before = {**vars(EVENT), "steps": 2}
    file = altered(run, lambda v: v["privacy"].update(abandoned=[before]))
    assert [event.steps for event in events_of(file.parent)] == [2, 3]
    assert [event.steps for event in read_report(file).privacy.training_events()] == [3]


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "control characters": ("dataset.name: control", lambda v: v["dataset"].update(name="\x1b")),
    "no dataset": ("dataset: Field required", lambda v: v.pop("dataset")),
    "epsilon below 0": ("privacy.epsilon: ", lambda v: v["privacy"].update(epsilon=-1.0)),
    "delta of 1": ("privacy.delta: ", lambda v: v["privacy"].update(delta=1)),
    "private without delta": ("contradict", lambda v: v["privacy"].update(delta=None)),
    "private without noise": (
        "contradict",
        lambda v: v["privacy"]["events"][0].update(noise_multiplier=0),
    ),
    "an epsilon of a baseline": (
        "an epsilon without noise",
        lambda v: (
            v["privacy"].update(private=False, delta=None),
            v["privacy"]["events"][0].update(noise_multiplier=0),
        ),
    ),
    "no events": ("privacy.events: ", lambda v: v["privacy"].update(events=[])),
    "steps of truth": (
        "privacy.events.0.steps: ",
        lambda v: v["privacy"]["events"][0].update(steps=True),
    ),
    "unknown sampler": (
        "sampler: is not one of poisson, random-allocation, cyclic",
        lambda v: v["privacy"]["events"][0].update(sampler="dice"),
    ),
    "event with another key": (
        "privacy.events.0.batch: Extra",
        lambda v: v["privacy"]["events"][0].update(batch=3),
    ),
    "newer": (
        "newer dpmac (format 2; this version supports 1)",
        lambda v: v.update(schema_version=2),
    ),
}


@pytest.mark.privacy
@pytest.mark.parametrize(("said", "change"), WRONG.values(), ids=WRONG)
def test_a_report_that_dpmac_does_not_write_is_refused(
    run: Path, said: str, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(InputError) as caught:
        read_report(altered(run, change))
    assert str(caught.value).startswith("report.json ")
    assert said in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_what_is_no_report_says_what_to_name() -> None:
    with pytest.raises(
        InputError, match=r"not a run folder: it contains no report\.json\. Use a run"
    ):
        read_report(Path())
    Path("config.yaml").write_text("")
    with pytest.raises(InputError, match=r"not written its report\.json.* To resume it: dpmac"):
        read_report(Path())
    Path("report.json").write_text("[" * 99_999)
    with pytest.raises(InputError, match=r"not a valid report .*\(Invalid JSON: .* Use a run"):
        read_report(Path())
