"""dpmac runs, as typed and as seen."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli.runs import UNKNOWN, _print
from dpmac_cli.errors import DivergedError
from dpmac_cli.release.train import finish, resume_folder, train_plan
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import read_ledger
from dpmac_cli.runs.session import Update
from dpmac_cli.runs.trainer import Trainer
from tests.digits_runs import SEED, after, digits_config, report_of, train_digits
from tests.typed import dpmac


def diverge(trainer: Trainer) -> None:
    if trainer.state.step:
        raise DivergedError(trainer.state.step)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that ended in different ways, some of them in a folder below."""
    root = tmp_path_factory.mktemp("study") / "runs"
    train_digits(out=root / "run-2", optimizer="dp-sgd", lr=0.5)
    train_digits(out=root / "run-10", seed=SEED)
    train_digits(out=root / "sub" / "runs" / "baseline", no_dp=True)
    train_digits(out=root / "spent", max_epsilon=0.06)
    finish(train_plan(digits_config(out=root / "stopped", steps=20), after(2)))
    cut = train_plan(digits_config(out=root / "killed", steps=30))
    next(event for event in cut if isinstance(event, Update) and event.step > 12)
    cut.close()  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "check_finite", diverge)
        with pytest.raises(DivergedError):
            train_digits(out=root / "diverged", optimizer="dp-sgd")
    return root


def listed(*args: str | Path) -> list[dict[str, Any]]:
    """What --json prints."""
    result = dpmac("runs", *args, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)["runs"]
    assert isinstance(found, list)
    return found


def shown(entries: list[dict[str, Any]], width: int) -> str:
    """What a terminal so wide shows."""
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    _print(out, entries)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_every_run_is_listed_as_it_ended(study: Path) -> None:
    found = {Path(entry["folder"]).name: entry for entry in listed(study)}
    assert {name: entry["state"] for name, entry in found.items()} == {
        "run-2": "finished",
        "run-10": "finished",
        "baseline": "finished",
        "spent": "budget-spent",
        "stopped": "interrupted",
        "killed": "cut-off",
        "diverged": "cut-off",
    }
    for name in ("run-2", "run-10", "spent", "stopped"):
        report = report_of(study / name)
        assert found[name]["epsilon"] == report["epsilon"]
        assert found[name]["score"] == report["scores"][found[name]["metric"]]["value"]
        assert found[name]["optimizer"] == report["settings"]["optimizer"]
        assert (found[name]["delta"]) == 1e-5
        assert found[name]["seeded"] is (name == "run-10")
    ledger = read_ledger(study / "killed")
    assert ledger is not None
    assert found["killed"]["epsilon"] == total_epsilon(ledger.events, 1e-5)
    assert (found["killed"]["delta"], found["killed"]["seeded"]) == (1e-5, False)
    assert found["killed"]["score"] is None
    baseline = found["baseline"]
    assert (baseline["private"], baseline["epsilon"], baseline["delta"]) == (False, None, None)
    assert all(entry["dataset"] == "digits" for entry in found.values())
    assert all(entry["changed"].endswith("+00:00") for entry in found.values())


@pytest.mark.promise("price")
def test_a_killed_run_says_what_it_has_spent(study: Path) -> None:
    (entry,) = listed(study / "killed")
    cost = f"epsilon {format_epsilon(entry['epsilon'])} at delta 1e-05"
    shown = dpmac("account", study / "killed")
    assert shown.exit_code == 2
    text = " ".join(shown.stderr.split())
    assert f"By its ledger it has spent {cost} so far." in text
    assert "dpmac train --resume" in text


@pytest.mark.promise("price")
def test_an_epsilon_is_rounded_up() -> None:
    entry = {**UNKNOWN, "folder": "run", "state": "finished", "private": True, "epsilon": 1.00011}
    entry |= {"dataset": "digits", "optimizer": "dp-sgd", "delta": 1e-5, "seeded": False}
    entry["changed"] = "2026-11-27T00:00:00+00:00"
    assert " 1.001 " in shown([entry], 80)
    assert " infinite " in shown([{**entry, "epsilon": None}], 80)  # as in a report
    assert " - " in shown([{**entry, "epsilon": None, "seeded": None}], 80)


def test_a_narrow_terminal_cuts_nothing() -> None:
    """The folder of a run is what the next command needs."""
    entry = {**UNKNOWN, "folder": f"runs/{'long' * 12}", "state": "finished", "private": True}
    entry |= {"epsilon": 1.5, "dataset": "digits", "optimizer": "dp-sgd", "delta": 1e-5}
    entry |= {"seeded": False, "changed": "2026-11-27T00:00:00+00:00"}
    for width in (80, 120):
        lines = shown([entry], width).splitlines()
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        assert f"{entry['folder']} digits dp-sgd 1.5 at 1e-05 - finished 2026-11-27" in text


def test_a_report_from_before_a_run_went_on_is_not_its_last_word() -> None:
    where = finish(train_plan(digits_config(steps=40), after(3))).folder
    assert [entry["state"] for entry in listed()] == ["interrupted"]
    going = resume_folder(where, {})
    next(event for event in going if isinstance(event, Update) and event.step > 24)
    (entry,) = listed()
    assert entry["state"] == "running"
    going.close()  # type: ignore[attr-defined]
    (entry,) = listed()
    assert entry["state"] == "cut-off"
    assert entry["epsilon"] > total_epsilon(read_ledger(where).before, 1e-5)  # type: ignore[union-attr]


@pytest.mark.promise("price")
def test_a_report_that_cannot_be_read_is_not_overlooked(study: Path) -> None:
    report = report_of(study / "run-2")
    Path("runs/newer").mkdir(parents=True)
    Path("runs/newer", folder.REPORT).write_text(json.dumps({**report, "version": 99}))
    assert [entry["state"] for entry in listed()] == ["damaged"]


def test_a_report_of_another_epsilon_than_its_model_is_damaged(tmp_path: Path) -> None:
    run = train_digits(out=tmp_path / "run").folder
    text = (run / folder.REPORT).read_text()
    report = json.loads(text)
    assert listed(run)[0]["state"] == "finished"
    (run / folder.REPORT).write_text(json.dumps(report | {"epsilon": 0.001}))
    [entry] = listed(run)
    assert (entry["state"], entry["epsilon"]) == ("damaged", None)
    (run / folder.REPORT).write_text(text)
    for crafted in (b"", b"\xff" * 20, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]"):
        (run / folder.MODEL).write_bytes(crafted)
        assert listed(run)[0]["state"] == "damaged"
    (run / folder.MODEL).unlink()  # of a report alone, nothing else is known
    assert listed(run)[0]["state"] == "finished"
