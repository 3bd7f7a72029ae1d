"""dpmac account, as typed and as seen."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from dpmac_cli import resume
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.accounting.risk import percent
from dpmac_cli.accounting.statements import SEED_GIVEN, format_epsilon
from tests.digits_runs import (
    RATE,
    after,
    contents,
    digits_config,
    report_of,
    train_digits,
    train_events,
)
from tests.typed import dpmac, shell

DELTA = 1e-5
#: Few records and much noise: cheap to price.
SMALL = "--dataset-size 40 --batch-size 8 --sigma 6 --epochs 2"


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


def test_words_say_what_the_json_says() -> None:
    (row,) = answered(SMALL)
    facts = told(SMALL)
    assert facts["epsilon"] == format_epsilon(row["epsilon"])
    assert float(facts["delta"]) == row["delta"]
    assert float(facts["sigma"]) == row["noise_multiplier"]
    assert facts["batch"] == "8 of 40"
    assert float(facts["sampling rate"]) == row["sampling_rate"]
    assert (facts["steps"], facts["epochs"]) == ("10", "2")
    assert (facts["sampler"], facts["adjacency"]) == (row["sampler"], row["adjacency"])
    assert facts["accountant"].startswith("pld (Connect-the-Dots, dp-accounting ")
    assert facts["compositions"] == "10"
    assert account(SMALL).stdout.splitlines()[-1] == row["statement"]


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_a_data_set_fills_in_sizes_and_epochs(name: str) -> None:
    (row,) = answered(f"--dataset {name} --sigma 6 --accountant rdp")
    rate, steps = {"digits": (RATE, 240), "cifar10": (512 / 50_000, 490)}[name]
    assert (row["sampling_rate"], row["steps"]) == (rate, steps)


@pytest.mark.promise("price")
def test_a_question_covers_steps_with_more_records_than_places() -> None:
    """As the run that it is asked for."""
    (row,) = answered("--dataset-size 60000 --batch-size 6 --sigma 1 --steps 1000000 --delta 1e-17")
    plain = TrainingEvent(1e-4, 1.0, 1_000_000)
    assert row["epsilon"] == total_epsilon((plain,), 1e-17 * (1 - 1e-7))


# The other way round


#: What is left out of a question for a target, the rest of it, and the flag of the answer.
INVERSES = [
    ("sigma", "--batch-size 8 --steps 3", "noise_multiplier"),
    ("steps", "--batch-size 8 --sigma 6", "steps"),
]


@pytest.mark.promise("price")
@pytest.mark.parametrize("method", ["poisson", "random-allocation --accountant rdp"])
@pytest.mark.parametrize(("solved", "rest", "key"), INVERSES)
def test_an_answer_that_is_copied_stays_within_the_target(
    solved: str, rest: str, key: str, method: str
) -> None:
    line = f"--dataset-size 40 --sampler {method} {rest}"
    question = f"{line} --epsilon 0.7"
    (row,) = answered(question)
    assert row["epsilon"] <= 0.7
    assert row["solved"] == solved
    shown = told(question)[solved].split()[0].replace(",", "")
    for answer in (repr(row[key]), shown):
        (again,) = answered(f"{line} --{solved} {answer}")
        assert again["epsilon"] <= 0.7


@pytest.mark.promise("risk")
@pytest.mark.parametrize("epsilon", [1, 8])
def test_the_page_on_assessments_states_bounds_on_attacks(epsilon: int) -> None:
    page = (Path(__file__).parents[2] / "docs" / "assessment.md").read_text()
    (row,) = answered(f"--epsilon {epsilon} --risk")
    attack = row["risk"]["attacks"][0]
    assert attack["false_positive_rate"] == 0.001
    found = min(1.0, math.exp(epsilon) * 0.001 + row["delta"])  # by (epsilon, delta) alone
    for share in (attack["posteriors"][-1], found / (found + 0.001)):
        assert f" {percent(share)}" in page
    assert f"`dpmac account --epsilon {epsilon} --risk`" in page


# A run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: finished, interrupted, twice resumed elsewhere, and one without privacy."""
    folder = tmp_path_factory.mktemp("runs")
    train_digits(out=str(folder / "finished"))
    train_events(digits_config(out=str(folder / "interrupted"), steps=9), after(5))
    child, grandchild = str(folder / "longer"), str(folder / "longest")
    resume(folder / "finished", {"steps": "7", "sigma": "8", "out": child})
    resume(child, {"steps": "12", "out": grandchild})
    train_digits(out=str(folder / "open"), no_dp=True)
    return folder


@pytest.mark.promise("price")
@pytest.mark.parametrize("name", ["finished", "interrupted", "longest"])
def test_a_run_is_priced_again_from_its_report(name: str, runs: Path) -> None:
    report = report_of(runs / name)
    before = contents(runs)
    for path in (runs / name, runs / name / "report.json"):
        (row,) = answered(str(path))
        assert row["epsilon"] == pytest.approx(report["epsilon"], rel=1e-9)
        assert row["delta"] == report["delta"]
        assert row["steps"] == sum(event["steps"] for event in report["events"])
        noises = {event["noise_multiplier"] for event in report["events"]}
        assert row["noise_multiplier"] == (noises.pop() if len(noises) == 1 else None)
        assert report["sentences"]["adjacency"].startswith(row["adjacency"])
        assert row["statement"] == report["sentences"]["guarantee"]
    assert len(report["events"]) == {"finished": 1, "interrupted": 1, "longest": 3}[name]
    shown = format_epsilon(report["epsilon"])
    result = account(str(runs / name))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"epsilon {shown} at delta 1e-05\n")
    assert f"the report's epsilon, {shown} at delta 1e-05, is correct" in result.stderr
    other_delta = account(f"{runs / name} --delta 1e-6")
    assert f"the report's epsilon, {shown} at delta 1e-05, is correct" in other_delta.stderr
    assert contents(runs) == before


@pytest.mark.promise("said")
def test_the_seed_of_a_run_is_said_beside_its_guarantee(tmp_path: Path) -> None:
    seeded, later = tmp_path / "seeded", tmp_path / "later"
    train_digits(out=str(seeded), seed=0)
    resume(seeded, {"steps": "5", "out": str(later)})
    for run in (seeded, later):
        (row,) = answered(str(run))
        assert row["seeded"]
        assert row["statement"] == report_of(run)["sentences"]["guarantee"]
        assert row["statement"].startswith(SEED_GIVEN)
        for flags in ("", "--accountant all", "--risk"):
            assert SEED_GIVEN in account(f"{run} {flags}").stdout.replace("\n", " ")


def test_a_run_without_privacy_has_none(runs: Path) -> None:
    result = account(str(runs / "open"))
    assert result.exit_code == 0
    assert "epsilon infinite" in result.stdout
    assert "No privacy" in result.stdout
    (row,) = answered(str(runs / "open"))
    assert (row["epsilon"], row["noise_multiplier"], row["seeded"]) == (None, 0, False)


def test_another_delta_and_accountant_may_be_asked_of_a_run(runs: Path) -> None:
    path = runs / "finished"
    event = TrainingEvent(RATE, 6.0, 3, overflow=overflow_of(DELTA))
    (row,) = answered(f"{path} --delta 1e-6")
    assert (row["delta"], row["epsilon"]) == (1e-6, total_epsilon((event,), 1e-6))
    by = {row["accountant"]: row["epsilon"] for row in answered(f"{path} --accountant all")}
    assert by == {name: total_epsilon((event,), DELTA, name) for name in ("pld", "rdp")}
    # The report is judged by its own delta and accountant all the same.
    assert "is correct" in account(f"{path} --delta 1e-6 --accountant rdp").stderr


Change = Callable[[dict[str, Any]], object]


def altered(folder: Path, change: Change) -> Path:
    """A copy of a run whose report's account of its privacy was changed."""
    copy = Path("altered")
    shutil.copytree(folder, copy)
    report = report_of(copy)
    change(report)
    (copy / "report.json").write_text(json.dumps(report))
    return copy


@pytest.mark.promise("price")
@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 2.0])
@pytest.mark.parametrize("name", ["finished", "interrupted", "longest"])
def test_a_wrong_figure_is_exit_code_2_with_the_right_one(
    name: str, factor: float, runs: Path
) -> None:
    true = report_of(runs / name)["epsilon"]
    copy = altered(runs / name, lambda privacy: privacy.update(epsilon=true * factor))
    result = account(f"{copy} --json")
    assert result.exit_code == 2
    (row,) = json.loads(result.stdout)["rows"]
    assert row["epsilon"] == pytest.approx(true, rel=1e-9)
    for figure in (true, true * factor):
        assert f" {format_epsilon(figure)}" in result.stderr
    assert "is wrong" in result.stderr


def test_every_key_of_json_is_documented_and_read_as_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "choosing-epsilon.md").read_text()
    table = page.partition("| key of a row | value |")[2].partition("\n\n")[0]
    known = {name for line in table.splitlines() for name in re.findall("`(\\w+)`", line[:60])}
    command = ("account", "--sigma", "1", "--epochs", "5", "--json", "--risk")
    printed = json.loads(dpmac(*command).stdout)
    assert printed.keys() == {"rows"}
    [row] = printed["rows"]
    assert row.keys() <= known
    assert known - row.keys() == {"search"}
    [line] = re.findall(r"^\$ (dpmac account .*--json \| python3 .*)$", page, re.MULTILINE)
    assert shell(line).stdout.strip() == f"{row['epsilon']:.3f}"


def test_a_plot_replaces_a_figure_and_no_other_picture() -> None:
    for name in ("curve.png", "curve.svg", "curve.pdf"):
        figure = Path(name)
        for _ in range(2):
            assert account(f"{SMALL} --risk --plot {name}").exit_code == 0
        figure.write_bytes(b"a photo")
        result = account(f"{SMALL} --risk --plot {name}")
        assert (result.exit_code, figure.read_bytes()) == (2, b"a photo")
        said = f"error: --plot {name} already exists, and is no figure of dpmac. Use another file."
        assert result.stderr.strip() == said
