"""The report: keys that scripts rely on, and what they say."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from jsonschema import Draft202012Validator

from dpmac_cli.accounting.account import Account, done
from dpmac_cli.accounting.accountants import accountant_name, total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.release.publish import Finished, privacy
from dpmac_cli.release.report import read_report
from dpmac_cli.release.sentences import DescribedRun
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import RATE, SIGMA, metrics_of, report_of
from tests.typed import dpmac


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


@pytest.fixture(scope="module")
def report(finished: Finished) -> dict[str, Any]:
    text = (finished.folder / "report.json").read_text()
    loaded = json.loads(text, parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.promise("price")
def test_the_price_is_the_accountants(report: dict[str, Any]) -> None:
    price = report["privacy"]
    event = EVENT
    assert price["private"] is True
    assert price["epsilon"] == price["epsilon_planned"] == total_epsilon((event,), 1e-5)
    assert (price["noise_multiplier"], price["delta"], price["steps"]) == (SIGMA, 1e-5, 24)
    assert price["sampling_rate"] == RATE
    assert (price["sampler"], price["adjacency"]) == ("poisson", "add-or-remove-one")
    assert price["accountant"] == accountant_name("pld")
    assert "Connect-the-Dots" in price["accountant"]
    assert version("dp-accounting") in price["accountant"]
    assert "24 Poisson-sampled steps" in price["statement"]
    assert "were not saved" in price["seed_policy"]["statement"]


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
    found = report_of("run")["privacy"]
    assert (found["epsilon"], found["epsilon_planned"], found["delta"]) == (whole, whole, delta)
    if covered:
        of = [found["covered_scores"][name] for name in ("epsilon_of_training", "epsilon")]
        assert of == [total_epsilon((part,), delta) for part in parts]
    *first, last = metrics_of("run")
    assert (last["epsilon"], last["delta"]) == (whole, delta)
    for line in first:
        least = total_epsilon((replace(trained, steps=12),), delta)
        assert (least <= line["epsilon"] <= whole, line["delta"]) == (True, delta)
    assert len(first) == 1
    shown, again = format_epsilon(whole), dpmac("account", "run").stdout
    assert f"epsilon {shown} at delta {delta:g}" in done.stdout
    for text in (found["statement"], Path("run", "model-card.md").read_text(), again):
        assert f"({shown}, {format_epsilon(delta)})-differential privacy" in text


def spent(steps: int, seeded: bool = False) -> Account:
    return done(TrainingEvent(0.1, 1.5, steps), seeded=seeded, secure=False)


@pytest.mark.promise("said")
def test_a_given_seed_is_admitted_and_not_told() -> None:
    config = resolve({"dataset": "digits", "seed": 918273645, "sigma": SIGMA}).plan
    found = privacy(DescribedRun(config, spent(steps=1, seeded=True)))
    assert found.seed_policy.given is True
    for text in (found.seed_policy.statement, found.statement):
        assert "only against those who do not" in text
    assert "918273645" not in found.model_dump_json()


# Read again.

EVENT = TrainingEvent(RATE, SIGMA, 24, "poisson", 12)


def altered(report: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a report with a change."""
    values = copy.deepcopy(report)
    change(values)
    Path("report.json").write_text(json.dumps(values))
    return Path("report.json")


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "control characters": ("dataset.name: control", lambda v: v["dataset"].update(name="\x1b")),
    "epsilon below 0": ("privacy.epsilon: ", lambda v: v["privacy"].update(epsilon=-1.0)),
    "private without delta": ("contradict", lambda v: v["privacy"].update(delta=None)),
    "an epsilon of a baseline": (
        "an epsilon without noise",
        lambda v: (
            v["privacy"].update(private=False, delta=None),
            v["privacy"]["events"][0].update(noise_multiplier=0),
        ),
    ),
    "no events": ("privacy.events: ", lambda v: v["privacy"].update(events=[])),
    "unknown sampler": (
        "sampler: is not one of poisson, random-allocation",
        lambda v: v["privacy"]["events"][0].update(sampler="dice"),
    ),
    "event with another key": (
        "privacy.events.0.batch: Unexpected",
        lambda v: v["privacy"]["events"][0].update(batch=3),
    ),
    "newer": (
        "another version of dpmac (format 3; this version reads 2). Upgrade dpmac.",
        lambda v: v.update(schema_version=3),
    ),
    "older": (
        "another version of dpmac (format 1; this version reads 2). Train again, or read it with",
        lambda v: v.update(schema_version=1),
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
        assert set(part["required"]) <= part["properties"].keys()
        for name, described in part["properties"].items():
            assert "$ref" in described or described["description"].endswith("."), name


def test_a_report_is_as_described(report: dict[str, Any]) -> None:
    assert [fault.message for fault in Draft202012Validator(REPORT).iter_errors(report)] == []
