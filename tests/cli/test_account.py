"""dpmac account, as typed and as seen."""

import io
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from typer.testing import Result

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.release import run
from dpmac_cli.release.run import finish
from tests.digits_runs import (
    RATE,
    after,
    contents,
    digits_config,
    train_digits,
    train_events,
)
from tests.tiers import rest_long
from tests.typed import dpmac, hooked, loading, shell

DELTA = 1e-5
#: Few records and much noise: cheap to price.
SMALL = "--dataset-size 40 --batch-size 8 --sigma 6 --epochs 2"
UNSOLVED = "--dataset-size 40 --batch-size 8"
#: In a row of JSON, whatever else is.
KEYS = {
    *("epsilon", "delta", "noise_multiplier", "sampling_rate", "steps", "epochs"),
    *("sampler", "accountant", "adjacency", "compositions", "statement"),
}


def account(line: str) -> Result:
    """Type a line after ``dpmac account``, in this process."""
    return dpmac("account", *shlex.split(line))


def answered(line: str) -> list[dict[str, Any]]:
    """The rows of the JSON that a line prints."""
    result = account(f"{line} --json")
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return rows


def told(line: str) -> dict[str, str]:
    """What a line prints in words: the facts below the price, by name."""
    result = account(line)
    assert result.exit_code == 0, result.output
    first, *rest = result.stdout.splitlines()
    facts = re.fullmatch(r"epsilon (?P<epsilon>\S+) at delta (?P<delta>\S+)", first)
    assert facts is not None, first
    below = (re.fullmatch(r"  ([a-z ]+?)  +(\S.*)", line) for line in rest)
    return {**facts.groupdict(), **{found[1]: found[2] for found in below if found}}


# Prices


@pytest.mark.privacy
def test_the_line_of_the_issue() -> None:
    result = account("--sigma 1.0 --epochs 5")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith("epsilon 0.785 at delta 1e-05\n")
    assert "\x1b" not in result.stdout
    (row,) = answered("--sigma 1.0 --epochs 5")
    assert row["epsilon"] == pytest.approx(0.7850, abs=1e-3)


PAPER = {0.5: 7.4793, 0.6: 3.9886, 0.7: 2.3158, 0.8: 1.4470, 0.9: 1.0122, 1.0: 0.7850}


@pytest.mark.privacy
@pytest.mark.long
def test_the_row_of_the_paper_in_one_table() -> None:
    line = f"--sigma {','.join(map(str, PAPER))}"
    rows = answered(line)
    assert [row["noise_multiplier"] for row in rows] == list(PAPER)
    for row in rows:
        assert row["epsilon"] == pytest.approx(PAPER[row["noise_multiplier"]], abs=1e-3)
        assert (row["steps"], row["sampling_rate"]) == (1175, 256 / 60_000)
    table = account(line).stdout.splitlines()
    assert table[0].split() == ["epsilon", "sigma"]
    shown = [tuple(map(float, line.split())) for line in table[1:7]]
    assert [sigma for _, sigma in shown] == list(PAPER)
    # Never shown smaller than it is.
    for (epsilon, _), row in zip(shown, rows, strict=True):
        assert row["epsilon"] * (1 - 1e-9) <= epsilon <= row["epsilon"] * 1.001
    assert "delta 1e-05, batch 256, epochs 5, steps 1,175, accountant pld" in table[7]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_way_of_sampling_is_told_with_its_adjacency(sampler: str) -> None:
    line = f"{SMALL} --sampler {sampler} --accountant all"
    rows = answered(line)
    assert [row["accountant"] for row in rows] == ["pld", "rdp"]
    for row in rows:
        assert row.keys() >= KEYS
        event = TrainingEvent(0.2, 6.0, 10, sampler, 5)
        assert row["epsilon"] == total_epsilon((event,), DELTA, row["accountant"]) > 0
        assert (row["delta"], row["noise_multiplier"], row["sampling_rate"]) == (DELTA, 6, 0.2)
        assert (row["steps"], row["epochs"]) == (10, 2)
        assert row["compositions"] == (2 if SAMPLERS[sampler].once_an_epoch else 10)
        assert (row["sampler"], row["adjacency"]) == (sampler, "add-or-remove-one")
        assert f"under {row['adjacency']} adjacency" in row["statement"]
        assert format_epsilon(row["epsilon"]) in row["statement"]
    words = account(line).stdout
    assert all(format_epsilon(row["epsilon"]) in words for row in rows)
    assert "under add-or-remove-one adjacency" in words


def test_words_say_what_the_json_says() -> None:
    (row,) = answered(SMALL)
    facts = told(SMALL)
    assert facts["epsilon"] == format_epsilon(row["epsilon"])
    assert float(facts["delta"]) == row["delta"]
    assert float(facts["noise multiplier"]) == row["noise_multiplier"]
    assert facts["batch"] == "8 of 40 records"
    assert float(facts["sampling rate"]) == row["sampling_rate"]
    assert facts["training"] == "10 steps (2 epochs)"
    assert (facts["sampler"], facts["adjacency"]) == (row["sampler"], row["adjacency"])
    assert facts["accountant"].startswith("pld (Connect-the-Dots, dp-accounting ")
    assert facts["compositions"] == "10"
    assert account(SMALL).stdout.splitlines()[-1] == row["statement"]


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_a_data_set_fills_in_sizes_and_epochs(name: str) -> None:
    (row,) = answered(f"--dataset {name} --sigma 6 --accountant rdp")
    rate, steps = {"digits": (RATE, 240), "cifar10": (512 / 50_000, 490)}[name]
    assert (row["sampling_rate"], row["steps"]) == (rate, steps)


def test_json_is_all_there_is_on_standard_output() -> None:
    result = account(f"{SMALL} --delta 0.1 --json")
    assert json.loads(result.stdout).keys() == {"rows"}
    assert "note: delta 0.1" in result.stderr


# Edges


def test_no_noise_is_infinite_and_no_privacy() -> None:
    line = SMALL.replace("--sigma 6", "--sigma 0")
    assert told(line)["epsilon"] == "infinite"
    assert "No privacy" in account(line).stdout
    (row,) = answered(line)
    assert row["epsilon"] is None
    assert "No privacy" in row["statement"]


def test_no_privacy_is_said_beside_a_table_too() -> None:
    words = account("--dataset-size 40 --batch-size 8 --epochs 2 --sigma 0,6").stdout
    assert "infinite" in words
    assert re.search("no privacy", words, re.IGNORECASE)


class Edge(NamedTuple):
    """A legal line at the end of what is, and the bounds of its epsilon."""

    line: str
    low: float
    high: float


EDGES = [
    Edge("--sigma 6 --epochs 0", 0, 0),
    Edge("--sigma 0 --steps 0", 0, 0),
    Edge("--sigma 10000 --steps 10", 0, 1e-3),
    Edge("--sigma 0.01 --steps 1", 1e3, 1e5),
    Edge("--sigma 6 --epochs 2 --delta 1e-12", 0.5, 10),
    Edge("--sigma 6 --epochs 2 --delta 1e-100 --accountant rdp", 1, 100),
    Edge("--sigma 6 --epochs 2 --delta 0.999", 0, 0),
    Edge("--sigma 6 --epochs 2 --batch-size 40", 0.1, 10),
    Edge("--sigma 6 --steps 10000", 10, 1e4),
    Edge("--sigma 6 --steps 1", 1e-4, 1),
]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.line)
def test_settings_at_the_ends_have_a_price(edge: Edge) -> None:
    batch = "" if "--batch-size" in edge.line else "--batch-size 8"
    (row,) = answered(f"--dataset-size 40 {batch} {edge.line}")
    assert edge.low <= row["epsilon"] <= edge.high


def test_a_full_batch_and_one_record() -> None:
    (row,) = answered("--dataset-size 1 --batch-size 1 --sigma 6 --epochs 3")
    assert row["sampling_rate"] == 1
    assert row["epsilon"] == total_epsilon((TrainingEvent(1.0, 6.0, 3),), DELTA)


@pytest.mark.long
@pytest.mark.parametrize("size", [10**8, 10**9])
def test_one_record_of_very_many_has_a_price(size: int) -> None:
    line = f"--dataset-size {size} --batch-size 1 --sigma 1 --steps 10 --delta 1e-10"
    (row,) = answered(line)
    assert 0 <= row["epsilon"] < total_epsilon((TrainingEvent(1.0, 1.0, 1),), 1e-10)


def test_the_smallest_delta_has_a_cost() -> None:
    (row,) = answered(f"{SMALL} --delta 1e-300")
    assert 0 < row["epsilon"] < math.inf
    assert "1e-300)-differential privacy" in row["statement"]


@pytest.mark.parametrize("line", [SMALL, "--sigma 6 --dataset-size 40 --batch-size 40 --steps 1"])
def test_a_delta_of_a_record_is_warned_of_with_the_reason(line: str) -> None:
    result = account(f"{line} --delta 0.025")
    assert result.exit_code == 0
    assert "note: delta 0.025 is not below 1/n = 0.025" in result.stderr
    assert "whole record" in result.stderr
    assert account(f"{line} --delta 0.0249").stderr == ""


# The other way round


class Inverse(NamedTuple):
    """A question for a target: what it leaves out, and where the answer is told."""

    solve: str
    line: str
    fact: str
    flag: str


INVERSES = [
    Inverse("sigma", "--batch-size 8 --steps 3", "noise multiplier", "--sigma"),
    Inverse("steps", "--batch-size 8 --sigma 6", "training", "--steps"),
]


@pytest.mark.privacy
@pytest.mark.parametrize("method", ["poisson", "random-allocation --accountant rdp"])
@pytest.mark.parametrize("inverse", INVERSES, ids=lambda inverse: inverse.solve)
def test_an_answer_that_is_copied_stays_within_the_target(inverse: Inverse, method: str) -> None:
    line = f"--dataset-size 40 --sampler {method} {inverse.line}"
    question = f"{line} --epsilon 0.7"
    (row,) = answered(question)
    assert row["epsilon"] <= 0.7
    assert row["solved"] == inverse.solve
    key = {"sigma": "noise_multiplier"}.get(inverse.solve)
    (again,) = answered(f"{line} {inverse.flag} {row[key or inverse.solve]!r}")
    assert again["epsilon"] <= 0.7
    shown = told(question)[inverse.fact].split()[0].replace(",", "")
    (copied,) = answered(f"{line} {inverse.flag} {shown}")
    assert copied["epsilon"] <= 0.7


@pytest.mark.long
def test_what_to_solve_is_what_is_missing() -> None:
    (row,) = answered(f"{UNSOLVED} --steps 3 --epsilon 0.7 --accountant rdp")
    assert row["solved"] == "sigma"
    (row,) = answered(f"{UNSOLVED} --sigma 6 --epsilon 0.7 --accountant rdp")
    assert row["solved"] == "steps"
    (row,) = answered(SMALL)
    assert row["solved"] is None


@pytest.mark.long
def test_several_targets_make_a_table() -> None:
    line = f"{UNSOLVED} --sigma 6,7 --epsilon 1,2 --accountant rdp"
    rows = answered(line)
    assert [row["noise_multiplier"] for row in rows] == [6, 6, 7, 7]
    assert all(row["epsilon"] <= target for row, target in zip(rows, [1, 2, 1, 2], strict=True))
    assert account(line).stdout.splitlines()[0].split() == ["epsilon", "sigma", "epochs", "steps"]


@pytest.mark.long
@pytest.mark.parametrize("target", ["0.001", "100"])
def test_small_and_large_targets_are_met(target: str) -> None:
    (row,) = answered(f"{UNSOLVED} --steps 10 --epsilon {target}")
    assert 0.9 * float(target) < row["epsilon"] <= float(target)


class Unreachable(NamedTuple):
    """A target that cannot be met, and the line that prices the nearest that can."""

    line: str
    nearest: str


UNREACHABLE = [
    Unreachable("--batch-size 8 --steps 10", "--batch-size 8 --steps 10 --sigma 10000"),
    Unreachable("--batch-size 8 --sigma 1", "--batch-size 8 --sigma 1 --steps 1"),
]


@pytest.mark.long
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("case", UNREACHABLE, ids=lambda case: case.line)
def test_a_target_out_of_reach_is_exit_code_3_with_the_nearest(
    case: Unreachable, accountant: str
) -> None:
    shared = f"--dataset-size 40 --accountant {accountant}"
    result = account(f"{shared} {case.line} --epsilon 1e-6")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (row,) = answered(f"{shared} {case.nearest}")
    assert row["epsilon"] > 1e-6
    assert format_epsilon(row["epsilon"]) in result.stderr


@pytest.mark.long
def test_targets_out_of_reach_do_not_hide_those_within() -> None:
    result = account("--dataset-size 40 --batch-size 8 --steps 10 --epsilon 1e-6,0.2,0.3 --json")
    assert result.exit_code == 3
    rows = json.loads(result.stdout)["rows"]
    assert [round(row["epsilon"], 1) for row in rows] == [0.2, 0.3]
    assert "1e-06" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.privacy
@pytest.mark.parametrize("delta", rest_long(["1e-15", "1e-30"]))
@pytest.mark.parametrize("solve", ["sigma", "steps"])
def test_where_privacy_losses_end_rdp_goes_on_and_is_named(solve: str, delta: str) -> None:
    sigma = "" if solve == "sigma" else "--sigma 4"
    line = f"--dataset digits --recipe paper --epsilon 3 {sigma} --delta {delta}"
    result = account(line)
    assert result.exit_code == 0, result.output
    assert f"delta {delta} is too small for privacy loss distributions" in result.stderr
    assert "accountant        rdp" in result.stdout
    [row], [by_rdp] = answered(line), answered(f"{line} --accountant rdp")
    assert row["accountant"] == "rdp"
    assert 2.5 < row["epsilon"] <= 3
    # The answers may differ by a grid's width where both accountants are near.
    assert row["epsilon"] == pytest.approx(by_rdp["epsilon"], rel=1e-3)
    assert not account(f"{line} --accountant rdp").stderr


@pytest.mark.privacy
def test_no_noise_leaves_nothing_to_solve_for() -> None:
    result = account("--sigma 0 --epsilon 3")
    assert result.exit_code == 2
    assert "--sigma 0 adds no noise" in result.stderr


# What is typed wrongly


class Bad(NamedTuple):
    """A line that must fail with exit code 2, and what is said."""

    line: str
    said: Sequence[str]


BAD = [
    Bad("", ["--sigma", "--epsilon"]),
    Bad("--sgima 1", ["--sgima", "--sigma"]),
    Bad("--sigma", ["--sigma"]),
    Bad("--sigma 1 --dataset-size 40", ["Add --batch-size", "--epochs or --steps"]),
    Bad(
        "--sigma 1 --epsilon 3 --epochs 5",
        ["--sigma", "--epsilon", "--epochs"],
    ),
    Bad("--sigma 1 --epochs 1 --steps 1", ["--epochs and --steps contradict"]),
    Bad("--sigma 1 --dataset mnist --dataset-size 4", ["--dataset and --dataset-size contradict"]),
    Bad("--sigma 1 --dataset mnits", ["Did you mean mnist"]),
    Bad("--sigma 1 --sampler posson", ["Did you mean poisson"]),
    Bad("--sigma x,-1 --delta 2", ["'x' is not a number", "not -1", "--delta must be"]),
    Bad("--sigma 1e-9", ["at least 0.01"]),
    Bad("--sigma 1 --batch-size 60001", ["--batch-size (60001)", "60000"]),
    Bad(f"--sigma 1 --steps {'9' * 400}", ["--steps"]),
    Bad("nowhere", ["nowhere does not exist"]),
    Bad(".", [". is not a run folder: it contains no report.json."]),
    Bad("killed", ["killed has not written its report.json", "dpmac train --resume killed"]),
    Bad("text.json", ["text.json is not a valid report of dpmac"]),
    Bad("model.safetensors", ["model.safetensors does not exist"]),
    Bad("folder", ["folder/report.json"]),
    Bad("text.json/report.json", ["text.json/report.json"]),
    Bad("a" * 300, ["a" * 300]),
    Bad("text.json --sigma 1 --epochs 2", ["--sigma contradicts", "--epochs contradicts"]),
    Bad("text.json --delta 7 --dataset mnist", ["--dataset contradicts", "--delta must be"]),
    Bad("--solve steps", ["What is left out of --sigma, --epochs and --epsilon is solved for"]),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.line[:70] or "nothing")
def test_a_wrong_line_is_explained_and_nothing_is_written(bad: Bad, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("nothing of ours")
    (tmp_path / "folder" / "report.json").mkdir(parents=True)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.yaml").write_text("dataset: digits\n")
    before = contents(tmp_path)
    result = account(bad.line)
    assert result.exit_code == 2, result.output
    for part in bad.said:
        assert part in result.stderr
    assert "Traceback" not in result.output
    assert contents(tmp_path) == before


def test_no_noise_or_no_steps_for_a_target_is_no_bug() -> None:
    for line in ("--steps 0", "--sigma 0", "--sigma 0 --steps 3"):
        result = account(f"--dataset-size 40 --batch-size 8 --epsilon 1 {line}")
        assert result.exit_code in (0, 2, 3), result.output


# A run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: finished, interrupted, forked twice, and one without privacy."""
    folder = tmp_path_factory.mktemp("runs")
    train_digits(out=str(folder / "finished"))
    train_events(digits_config(out=str(folder / "interrupted"), steps=9), after(5))
    child, grandchild = str(folder / "fork"), str(folder / "forked")
    finish(run.fork(folder / "finished", {"steps": "7", "sigma": "8", "out": child}))
    finish(run.fork(child, {"steps": "12", "out": grandchild}))
    train_digits(out=str(folder / "open"), no_dp=True)
    return folder


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["finished", "interrupted", "forked"])
def test_a_run_is_priced_again_from_its_report(name: str, runs: Path) -> None:
    privacy = report_of(runs / name)["privacy"]
    before = contents(runs)
    for path in (runs / name, runs / name / "report.json"):
        (row,) = answered(str(path))
        assert row["epsilon"] == pytest.approx(privacy["epsilon"], rel=1e-9)
        assert row["delta"] == privacy["delta"]
        assert row["steps"] == privacy["steps"]
        assert row["noise_multiplier"] == privacy["noise_multiplier"]
        assert row["adjacency"] == privacy["adjacency"]
        assert row["statement"] == privacy["statement"]
    assert len(privacy["events"]) == {"finished": 1, "interrupted": 1, "forked": 3}[name]
    shown = format_epsilon(privacy["epsilon"])
    result = account(str(runs / name))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"epsilon {shown} at delta 1e-05\n")
    assert f"the report's epsilon, {shown}, is correct" in result.stderr
    assert contents(runs) == before


def test_a_run_without_privacy_has_none(runs: Path) -> None:
    result = account(str(runs / "open"))
    assert result.exit_code == 0
    assert "epsilon infinite" in result.stdout
    assert "No privacy" in result.stdout
    (row,) = answered(str(runs / "open"))
    assert (row["epsilon"], row["noise_multiplier"]) == (None, 0)


def test_another_delta_and_accountant_may_be_asked_of_a_run(runs: Path) -> None:
    path = runs / "finished"
    event = TrainingEvent(RATE, 6.0, 3)
    (row,) = answered(f"{path} --delta 1e-6")
    assert (row["delta"], row["epsilon"]) == (1e-6, total_epsilon((event,), 1e-6))
    by = {row["accountant"]: row["epsilon"] for row in answered(f"{path} --accountant all")}
    assert by == {name: total_epsilon((event,), DELTA, name) for name in ("pld", "rdp")}
    # The report is judged by its own delta and accountant all the same.
    assert "is correct" in account(f"{path} --delta 1e-6 --accountant rdp").stderr


def test_a_delta_of_a_record_is_warned_of_beside_a_run_too(runs: Path) -> None:
    assert "1/n" in account(f"{runs / 'finished'} --delta 0.001").stderr


Change = Callable[[dict[str, Any]], object]


def altered(folder: Path, change: Change) -> Path:
    """A copy of a run whose report's account of its privacy was changed."""
    copy = Path("altered")
    shutil.copytree(folder, copy)
    report = report_of(copy)
    change(report["privacy"])
    (copy / "report.json").write_text(json.dumps(report))
    return copy


@pytest.mark.privacy
@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 2.0])
@pytest.mark.parametrize("name", ["finished", "interrupted", "forked"])
def test_a_wrong_figure_is_exit_code_2_with_the_right_one(
    name: str, factor: float, runs: Path
) -> None:
    true = report_of(runs / name)["privacy"]["epsilon"]
    copy = altered(runs / name, lambda privacy: privacy.update(epsilon=true * factor))
    result = account(f"{copy} --json")
    assert result.exit_code == 2
    (row,) = json.loads(result.stdout)["rows"]
    assert row["epsilon"] == pytest.approx(true, rel=1e-9)
    for figure in (true, true * factor):
        assert f" {format_epsilon(figure)}" in result.stderr
    assert "is wrong" in result.stderr


WRONG: Mapping[str, Change] = {
    "more steps": lambda privacy: privacy["events"][0].update(steps=30),
    "fewer steps": lambda privacy: privacy["events"][-1].update(steps=1),
    "more noise": lambda privacy: privacy["events"][0].update(noise_multiplier=60.0),
    "no noise": lambda privacy: privacy["events"][0].update(noise_multiplier=0),
    "smaller batches": lambda privacy: privacy["events"][0].update(sampling_rate=0.01),
    "another sampler": lambda privacy: privacy["events"][0].update(sampler="random-allocation"),
    "a branch less": lambda privacy: privacy["events"].pop(),
    "another delta": lambda privacy: privacy.update(delta=1e-9),
    "no figure": lambda privacy: privacy.update(epsilon=None),
    "nothing": lambda privacy: privacy.update(epsilon=0),
    "steps of truth": lambda privacy: privacy["events"][0].update(steps=True),
    "less than nothing": lambda privacy: privacy.update(epsilon=-1),
}


@pytest.mark.privacy
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_report_that_does_not_add_up_is_exit_code_2(change: Change, runs: Path) -> None:
    result = account(str(altered(runs / "forked", change)))
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "report" in result.stderr


@pytest.mark.privacy
def test_a_run_without_privacy_cannot_claim_some(runs: Path) -> None:
    result = account(str(altered(runs / "open", lambda privacy: privacy.update(epsilon=1.0))))
    assert result.exit_code == 2
    assert "an epsilon without noise" in result.stderr


HUGE = 10**400
SPOILT: Mapping[str, Change] = {
    "no events": lambda privacy: privacy.update(events=[]),
    "events of text": lambda privacy: privacy.update(events="poisson"),
    "a number for events": lambda privacy: privacy.update(events=3),
    "an event of text": lambda privacy: privacy.update(events=["poisson"]),
    "an unknown key": lambda privacy: privacy["events"][0].update(batch=3),
    "a missing key": lambda privacy: privacy["events"][0].pop("steps"),
    "no key for epsilon": lambda privacy: privacy.pop("epsilon"),
    "no key for delta": lambda privacy: privacy.pop("delta"),
    "negative steps": lambda privacy: privacy["events"][0].update(steps=-3),
    "half a step": lambda privacy: privacy["events"][0].update(steps=2.5),
    "steps of text": lambda privacy: privacy["events"][0].update(steps="3"),
    "steps of no number": lambda privacy: privacy["events"][0].update(steps=None),
    "huge steps": lambda privacy: privacy["events"][0].update(steps=HUGE),
    "no steps an epoch": lambda privacy: privacy["events"][0].update(steps_per_epoch=0),
    "negative noise": lambda privacy: privacy["events"][0].update(noise_multiplier=-1),
    "too little noise": lambda privacy: privacy["events"][0].update(noise_multiplier=1e-9),
    "huge noise": lambda privacy: privacy["events"][0].update(noise_multiplier=HUGE),
    "noise of no number": lambda privacy: privacy["events"][0].update(
        noise_multiplier=float("nan")
    ),
    "noise of text": lambda privacy: privacy["events"][0].update(noise_multiplier="6"),
    "rate of nothing": lambda privacy: privacy["events"][0].update(sampling_rate=0),
    "rate of next to nothing": lambda privacy: privacy["events"][0].update(sampling_rate=1e-320),
    "rate above 1": lambda privacy: privacy["events"][0].update(sampling_rate=1.5),
    "unknown sampler": lambda privacy: privacy["events"][0].update(sampler="dice"),
    "sampler of a list": lambda privacy: privacy["events"][0].update(sampler=[]),
    "delta of 1": lambda privacy: privacy.update(delta=1),
    "delta of nothing": lambda privacy: privacy.update(delta=0),
    "no delta for noise": lambda privacy: privacy.update(delta=None),
    "delta of text": lambda privacy: privacy.update(delta="small"),
    "delta of a list": lambda privacy: privacy.update(delta=[]),
    "huge delta": lambda privacy: privacy.update(delta=HUGE),
    "epsilon of text": lambda privacy: privacy.update(epsilon="small"),
    "epsilon of a list": lambda privacy: privacy.update(epsilon=[1]),
    "huge epsilon": lambda privacy: privacy.update(epsilon=HUGE),
}


@pytest.mark.parametrize("change", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_report_is_one_error_and_no_price(change: Change, runs: Path) -> None:
    result = account(str(altered(runs / "finished", change)))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr


FOREIGN = {
    "empty": b"",
    "text": b"accuracy 0.95",
    "binary": bytes(range(256)),
    "cut": b'{"privacy": {"epsilon": 1.0, "events": [{"ste',
    "deep": b"[" * 100_000,
    "deep in place": b'{"privacy": ' + b'{"events": ' * 50_000,
    "list": b"[1, 2, 3]",
    "number": b"7",
    "null": b"null",
    "of another tool": b'{"results": {"epsilon": 1.0, "delta": 1e-05}}',
    "privacy of another tool": b'{"privacy": {"epsilon": 1.0, "delta": 1e-05}}',
    "privacy of text": b'{"privacy": "epsilon 1"}',
    "long number": b'{"privacy": {"epsilon": ' + b"9" * 10_000 + b"}}",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_report_is_named_in_one_error(content: bytes) -> None:
    Path("report.json").write_bytes(content)
    result = account("report.json")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: report.json is not a valid report of dpmac")
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr


def test_a_report_that_may_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("report.json").write_text("{}")

    def refuse(*args: object, **kwargs: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        result = account(".")
    assert result.exit_code == 2
    assert "report.json cannot be read (Permission denied)" in result.stderr


# Terminals and pictures


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 80 columns is shown, colours left out."""
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, width=80, color_system=None, highlight=False)
    monkeypatch.setattr(console, "stdout", lambda: screen)
    return shown


@pytest.mark.parametrize("name", ["finished", "interrupted", "forked", "open"])
def test_a_run_is_shown_on_a_terminal(name: str, runs: Path, terminal: io.StringIO) -> None:
    result = account(str(runs / name))
    assert result.exit_code == 0, result.output
    assert report_of(runs / name)["privacy"]["statement"].split()[0] in terminal.getvalue()


# Processes of their own


@pytest.mark.long
def test_prices_load_no_torch() -> None:
    heavy = ("torch", "torchvision", "sklearn", "matplotlib")
    done = hooked(loading(*heavy), "account", *SMALL.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epsilon ")
    assert Path("loaded").read_text() == ""


@pytest.mark.long
def test_whoever_has_seen_enough_is_no_error() -> None:
    done = shell(f"dpmac account {SMALL} | head -1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("epsilon")


@pytest.mark.long
def test_a_result_that_is_lost_is_a_failure() -> None:
    done = shell(f"dpmac account {SMALL} --json > /dev/full")
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
