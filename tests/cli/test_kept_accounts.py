"""``dpmac account`` reads accounts on disk and the folders of silos."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpmac_cli import Account, TrainingEvent
from dpmac_cli.accounting.calibration import affordable_steps
from dpmac_cli.accounting.events import histogram_event
from dpmac_cli.accounting.risk import assess_risk
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.app import app
from tests.silo.hospital import ROUNDS, STEPS, ask, cost

EVENT = TrainingEvent(0.1, 2.0, 10)


def printed(*words: object) -> str:
    done = CliRunner().invoke(app, ["account", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.promise("said")
def test_an_account_says_what_is_spent_and_left(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    account = Account.create(file, delta=1e-5, epsilon=4)
    assert "epsilon 0 of 4 at delta 1e-05" in printed(file)
    assert "Nothing was released of these records" in printed(file)
    account.begin(EVENT)
    text = " ".join(printed(file).split())
    assert f"epsilon {format_epsilon(account.epsilon)} of 4 at delta 1e-05" in text
    rest = f"difference {4 - account.epsilon:.4g}, enough for another step like the last one"
    assert f"{rest} steps 10 counts or sums 0" in text
    assert account.statement in text
    found: dict[str, Any] = json.loads(printed(file, "--json"))
    assert (found["epsilon"], found["target"], found["steps"]) == (account.epsilon, 4, 10)
    account.begin(histogram_event(20.0))
    found = json.loads(printed(file, "--json"))
    assert (found["steps"], found["counts_or_sums"]) == (10, 1)
    assert "enough for another step like the last one" in printed(file)
    longest = affordable_steps(replace(EVENT, steps=10_000), 1e-5, 4, account.own[1:])
    account.begin(replace(EVENT, steps=longest - 10))
    assert ", too little for another step like the last one" in printed(file)


@pytest.mark.promise("said")
def test_the_folder_of_a_silo_says_which_rounds_were_lost(tmp_path: Path) -> None:
    folder = tmp_path / "silo"
    ask(folder, 1)
    account = Account.open(folder / "account.json")
    account.begin(TrainingEvent(**{**vars(account.own[0]), "steps": STEPS}))
    for given in (folder, folder / "account.json"):
        found = json.loads(printed(given, "--json"))
        assert (found["rounds"], found["lost_rounds"]) == (1, 1)
        assert (found["rounds_left"], found["epsilon"]) == (ROUNDS - 2, cost(2 * STEPS))
    assert f", for {ROUNDS - 2} more rounds" in printed(folder)
    account.begin(TrainingEvent(**{**vars(account.own[0]), "steps": (ROUNDS - 2) * STEPS}))
    assert ": all rounds are taken" in printed(folder)


@pytest.mark.promise("risk")
def test_the_risk_of_an_account_is_that_of_its_events(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    Account.create(file, delta=1e-5, epsilon=4).begin(EVENT)
    expected = assess_risk((EVENT,), 1)
    found = json.loads(printed(file, "--json", "--risk"))["risk"]
    assert found["attacks"] == expected.values()["attacks"]
    assert [delta for delta, _ in found["epsilons"]] == [1e-5, 1e-6]
    text = printed(file, "--risk")
    assert expected.statement in text
    assert "1/n" not in text
    adaptive = tmp_path / "adaptive.json"
    Account.create(adaptive, delta=1e-5, epsilon=4, adaptive=True).begin(EVENT)
    done = CliRunner().invoke(app, ["account", str(adaptive), "--risk"])
    assert done.exit_code == 2
    assert "dpmac account --epsilon 4 --risk" in done.output


def test_several_runs_are_added_up_in_python() -> None:
    done = CliRunner().invoke(app, ["account", "a", "b"])
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert "total_epsilon((*load('a').events, *load('b').events), delta)" in text


def test_a_folder_without_an_account_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    silo, empty = tmp_path / "silo", tmp_path / "empty"
    ask(silo, 1)
    (silo / "account.json").unlink()
    empty.mkdir()
    for place, fault in (
        (silo, "is the folder of a silo whose account.json is missing or cannot be read"),
        (empty, "contains neither the report.json of a run nor the account.json of a silo"),
        (tmp_path / "absent", "does not exist. Use a run folder"),
    ):
        done = CliRunner().invoke(app, ["account", str(place)])
        assert done.exit_code == 2
        assert fault in " ".join(done.output.split())


def test_an_account_takes_no_flags_of_runs(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    Account.create(file, delta=1e-5)
    done = CliRunner().invoke(app, ["account", str(file), "--delta", "1e-6"])
    assert done.exit_code == 2
    assert "--delta is for runs" in done.output
    file.write_text(file.read_text().replace("1e-05", "1e-06"))
    done = CliRunner().invoke(app, ["account", str(file)])
    assert done.exit_code == 2
    assert "is damaged, or not an account" in " ".join(done.output.split())
