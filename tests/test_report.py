"""The report: keys that scripts rely on, and what they say."""

import copy
import json
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from jsonschema import Draft202012Validator

from dpmac_cli import resume
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import accountant_name, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.release.described_run import DescribedRun
from dpmac_cli.release.publish import guarantee_of
from dpmac_cli.release.report import read_report
from dpmac_cli.release.run import Run
from dpmac_cli.runs.ledger import done
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import (
    RATE,
    SIGMA,
    after,
    digits_config,
    metrics_of,
    report_of,
    train_digits,
    train_events,
)
from tests.typed import dpmac


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def report(finished: Run) -> dict[str, Any]:
    text = (finished.folder / "report.json").read_text()
    loaded = json.loads(text, parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.promise("price")
def test_the_price_is_the_accountants(report: dict[str, Any]) -> None:
    [event], sentences = report["events"], report["sentences"]
    assert report["epsilon"] == total_epsilon((EVENT,), 1e-5)
    assert (event["noise_multiplier"], report["delta"], event["steps"]) == (SIGMA, 1e-5, 24)
    assert event["sampling_rate"] == RATE
    assert event["sampler"] == "poisson"
    assert sentences["adjacency"].startswith("add-or-remove-one: adding or removing any one")
    assert sentences["accountant"] == accountant_name("pld")
    assert "Connect-the-Dots" in sentences["accountant"]
    assert version("dp-accounting") in sentences["accountant"]
    assert report["environment"]["dp-accounting"] == version("dp-accounting")
    assert "24 Poisson-sampled steps" in sentences["guarantee"]
    assert "were not saved" in sentences["seeds"]
    assert report["seeded"] is False


@pytest.mark.promise("price")
@pytest.mark.usefixtures("uncalibrated", "unvalidated")
@pytest.mark.parametrize("covered", [True, False])
@pytest.mark.parametrize("delta", [1e-8, 1e-3])
def test_every_epsilon_of_a_run_is_at_the_delta_that_was_given(delta: float, covered: bool) -> None:
    flags = ("--dataset", "digits", "--model", "linear", "--sigma", f"{SIGMA}", "--steps", "13")
    more = (*["--cover-scores"] * covered, "--delta", f"{delta}", "--out", "run")
    done = dpmac("train", *flags, "--batch-size", "128", *more)
    trained, tested = TrainingEvent(RATE, SIGMA, 13), TrainingEvent(1.0, 8.0, 1, records="test")
    parts = (trained, tested) if covered else (trained,)
    whole = total_epsilon(parts, delta)
    found = report_of("run")
    assert (found["epsilon"], found["delta"]) == (whole, delta)
    if covered:
        of_training, of_scores = (format_epsilon(total_epsilon((p,), delta)) for p in parts)
        said = f"Training costs epsilon {of_training}, the scores {of_scores}."
        assert said in found["sentences"]["covered_scores"]
    *first, last = metrics_of("run")
    assert (last["epsilon"], last["delta"]) == (whole, delta)
    for line in first:
        least = total_epsilon((replace(trained, steps=12),), delta)
        assert (least <= line["epsilon"] <= whole, line["delta"]) == (True, delta)
    assert len(first) == 1
    shown, again = format_epsilon(whole), dpmac("account", "run").stdout
    assert f"epsilon {shown} at delta {delta:g}" in done.stdout
    for text in (found["sentences"]["guarantee"], Path("run", "model-card.md").read_text(), again):
        assert f"({shown}, {format_epsilon(delta)})-differential privacy" in text


def spent(steps: int, seeded: bool = False) -> Account:
    return done(TrainingEvent(0.1, 1.5, steps), seeded=seeded, secure=False)


@pytest.mark.promise("said")
def test_a_given_seed_is_admitted_and_not_told() -> None:
    config = resolve({"dataset": "digits", "seed": 918273645, "sigma": SIGMA}).plan
    found = guarantee_of(DescribedRun(config, spent(steps=1, seeded=True)))
    assert found["seeded"] is True
    for topic in ("seeds", "guarantee"):
        assert "only against those who do not" in found["sentences"][topic]
    assert "918273645" not in repr(found)
    run = train_digits(seed=918273645).folder
    for name in ("report.json", "config.yaml", "model.safetensors"):
        assert b"918273645" not in (run / name).read_bytes()


@pytest.mark.promise("said")
def test_a_run_that_ended_early_or_was_continued_says_what_a_choice_costs() -> None:
    train_events(digits_config(out="early", steps=9), after(5))
    planned = format_epsilon(total_epsilon((TrainingEvent(RATE, SIGMA, 9),), 1e-5))
    resume("early", out="longer", steps=7, sigma=8)
    train_digits(out="whole")
    for name, ended, continued in (
        ("early", True, False),
        ("longer", False, True),
        ("whole", False, False),
    ):
        card = Path(name, "model-card.md").read_text()
        for text in (report_of(name)["sentences"]["tuning"], card):
            cost = (
                f"the privacy cost is that of all planned steps: epsilon {planned} at delta 1e-05"
            )
            assert (cost in text) is ended
            assert ("their costs compose adaptively" in text) is continued


# Read again.

EVENT = TrainingEvent(RATE, SIGMA, 24, "poisson", 12)


def altered(report: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a report with a change."""
    values = copy.deepcopy(report)
    change(values)
    Path("report.json").write_text(json.dumps(values))
    return Path("report.json")


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "control characters": ("data.name: control", lambda v: v["data"].update(name="\x1b")),
    "epsilon below 0": ("epsilon: ", lambda v: v.update(epsilon=-1.0)),
    "private without delta": ("contradict", lambda v: v.update(delta=None)),
    "private, and not": ("contradict", lambda v: v["settings"].update(no_dp=True)),
    "control characters in a setting": (
        "optimizer has control",
        lambda v: v["settings"].update(optimizer="\x1b[31m"),
    ),
    "an epsilon of a baseline": (
        "an epsilon without noise",
        lambda v: (
            v.update(delta=None),
            v["settings"].update(no_dp=True),
            v["events"][0].update(noise_multiplier=0),
        ),
    ),
    "no events": ("events: ", lambda v: v.update(events=[])),
    "unknown sampler": (
        "sampler: is not one of poisson, random-allocation",
        lambda v: v["events"][0].update(sampler="dice"),
    ),
    "event with another key": (
        "events.0.batch: Unexpected",
        lambda v: v["events"][0].update(batch=3),
    ),
    "newer": (
        "a newer version of dpmac (format 3; this version reads 2). Upgrade dpmac.",
        lambda v: v.update(version=3),
    ),
    "older": (
        "was written by an older version of dpmac. Train again, or read it with that version.",
        lambda v: v.update(version=1),
    ),
    "older, by another key": (
        "was written by an older version of dpmac. Train again, or read it with that version.",
        lambda v: v.update(schema_version=v.pop("version")),
    ),
}


@pytest.mark.promise("said")
@pytest.mark.parametrize(("said", "change"), WRONG.values(), ids=WRONG)
def test_a_report_that_dpmac_does_not_write_is_refused(
    report: dict[str, Any], said: str, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(InputError) as caught:
        read_report(altered(report, change))
    assert str(caught.value).startswith("report.json ")
    assert said in str(caught.value)
    assert "\x1b" not in str(caught.value)


# Every key of report.json and compare.json is described.

DOCS = Path(__file__).parent.parent / "docs"


def schema_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCS / name).read_text())
    return loaded


REPORT, COMPARE = schema_of("report.schema.json"), schema_of("compare.schema.json")


def objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a schema that names its keys."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object":
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


@pytest.mark.parametrize("schema", [REPORT, COMPARE], ids=["report", "compare"])
def test_schemas_are_schemas_that_describe_every_key(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    found = list(objects(schema))
    assert found
    for part in found:
        assert set(part.get("required", ())) <= part["properties"].keys()
        for name, described in part["properties"].items():
            assert "$ref" in described or described["description"].endswith("."), name


def test_a_report_is_as_described(report: dict[str, Any]) -> None:
    assert [fault.message for fault in Draft202012Validator(REPORT).iter_errors(report)] == []


# The page that explains them.


def block(kind: str) -> str:
    """The block of code of a kind on the page of the report."""
    page = str(runpy.run_path(str(DOCS / "generate.py"))["REPORT"])
    return page.split(f"```{kind}\n")[1].split("```", maxsplit=1)[0]


def assert_like(example: Any, value: Any, place: str) -> None:
    """What an example has is in a report, too, with a value of the same type."""
    if isinstance(example, dict):
        for name, part in example.items():
            assert name in value, f"{place}.{name}"
            assert_like(part, value[name], f"{place}.{name}")
    elif isinstance(example, list) and value:
        assert_like(example[0], value[0], f"{place}[]")
    else:
        assert type(example) is type(value), place


def test_the_example_of_the_page_has_the_keys_of_a_report(report: dict[str, Any]) -> None:
    example = json.loads(block("json"))
    assert list(example) == [name for name in report if name in example]
    assert example.keys() == report.keys()
    assert_like(example, report, "")


def test_the_lines_for_jq_on_the_page_say_what_the_report_says(finished: Run) -> None:
    jq = shutil.which("jq")
    if jq is None:
        pytest.skip("jq is not installed")
    report, shown = finished.report, dict[str, str]()
    for line in block("sh").splitlines():
        command, *words = shlex.split(line.partition(" #")[0])
        assert (command, words[-1]) == ("jq", "run/report.json")
        called = [jq, *words[:-1], str(finished.folder / "report.json")]
        shown[words[-2]] = subprocess.check_output(called, text=True).strip()
    accuracy, sentences = report["scores"]["accuracy"], report["sentences"]
    assert float(shown[".epsilon"]) == report["epsilon"]
    assert float(shown[".scores.accuracy.value"]) == accuracy["value"]
    assert json.loads(shown[".scores.accuracy | [.low, .high]"]) == [
        accuracy["low"],
        accuracy["high"],
    ]
    assert shown[".sentences.guarantee"] == sentences["guarantee"]
    assert shown[".sentences.not_covered[]"].splitlines() == list(sentences["not_covered"])
    assert not {"", "null"} & {*shown.values()}
