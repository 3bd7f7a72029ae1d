"""Every key of report.json and compare.json is described, and every report is as described."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.report import Report
from dpmac_cli.release.run import finish, fork, train
from dpmac_cli.storage.files import to_json
from dpmac_cli.studies.grid import plan
from dpmac_cli.studies.results import collect
from dpmac_cli.studies.search import Dimension
from dpmac_cli.studies.tables import as_json
from tests.digits_runs import after, digits_config, train_digits
from tests.test_search import space_of
from tests.tiny_bert import write_encoder

DOCS = Path(__file__).parent.parent / "docs"


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCS / name).read_text())
    return loaded


REPORT, COMPARE = load("report.schema.json"), load("compare.schema.json")
SCHEMA = """
label: {column: ill, classes: [no, yes]}
columns: {age: {range: [0, 99]}, sex: {categories: [f, m]}}
test: {column: site, values: [b]}
"""
TEXT_SCHEMA = SCHEMA.replace("sex: {categories: [f, m]}", "sex: {text: 8}")
TABLE = "age,sex,ill,site\n" + "30,f,no,a\n40,m,yes,b\n31,m,yes,a\n" * 30
#: The other columns of a schema that predicts the age.
NUMBERS = "columns: {sex: {categories: [f, m]}, ill: {categories: [no, yes]}}\ndrop: [site]"
SEVERAL = """
label: [{column: age, range: [0, 99]}, {column: dose, range: [0, 9]}]
columns: {sex: {categories: [f, m]}}
"""
SEVERAL_TABLE = "age,sex,dose\n" + "30,f,1\n40,m,2\n31,m,3\n" * 30
#: Kinds of run, by what makes them.
RUNS: Mapping[str, dict[str, Any]] = {
    "ordinary": {},
    "seeded": {"seed": 1},
    "secure": {"secure": True},
    "covered scores": {"cover_scores": True, "epsilon": "3", "metric": "balanced-accuracy"},
    "baseline": {"no_dp": True},
    "budget spent": {"max_epsilon": "0.08"},
    "audit": {"canaries": 1000},
    "bins": {"sampler": "random-allocation"},
    "recipe": {"augmentations": 2, "ema": 0.9, "lr_schedule": "cosine", "warmup_steps": 1},
    "features": {"features": "scatter"},
    "tiny delta": {"delta": "1e-300", "steps": 1},
    **{name: {"optimizer": name, "steps": 1} for name in OPTIMIZERS},
}


def faults(schema: Mapping[str, Any], value: Any) -> list[str]:
    return [
        f"{fault.json_path}: {fault.message}"
        for fault in Draft202012Validator(schema).iter_errors(value)
    ]


@pytest.fixture(scope="module")
def plain_reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reports of an ordinary run and of one without privacy."""
    root = tmp_path_factory.mktemp("plain")
    names = ("ordinary", "baseline")
    folders = {name: train_digits(out=root / name, **RUNS[name]).folder for name in names}
    return {name: json.loads((at / "report.json").read_text()) for name, at in folders.items()}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run of each kind, as it lies in its folder."""
    root = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("DPMAC_CACHE_DIR", str(root / "cache"))
        for name, flags in RUNS.items():
            train_digits(out=root / name, **flags)
        half = finish(train(digits_config(out=root / "stopped"), after(2))).folder
        own = root / "own.npz"
        rng = np.random.default_rng(0)
        np.savez(own, x=rng.random((60, 5)), y=np.arange(60) % 3)
        more: dict[str, Any] = {"feature_range": "0,1", "batch_size": 8, "model": "linear"}
        train_digits(dataset=str(own), out=root / "own", **more)
        where = train_digits(model="mlp-small", out=root / "source", no_dp=True).folder
        public = str(where / "model.safetensors")
        (root / "t.csv").write_text(TABLE)
        (root / "schema.yaml").write_text(SCHEMA)
        of_table: dict[str, Any] = {"schema": str(root / "schema.yaml"), "batch_size": 8}
        train_digits(dataset=str(root / "t.csv"), out=root / "table", model="linear", **of_table)
        for kind in ("number", "count"):
            said = f"label: {{column: age, range: [0, 99], kind: {kind}}}"
            file = root / f"{kind}.yaml"
            file.write_text(f"{said}\n{NUMBERS}")
            numbers = {**of_table, "schema": str(file), "model": "linear"}
            train_digits(dataset=str(root / "t.csv"), out=root / kind, **numbers)
        (root / "several.yaml").write_text(SEVERAL)
        (root / "several.csv").write_text(SEVERAL_TABLE)
        several = {**of_table, "schema": str(root / "several.yaml"), "model": "linear"}
        train_digits(dataset=str(root / "several.csv"), out=root / "several", **several)
        of_text = {**of_table, "backbone": str(write_encoder(root / "encoder"))}
        (root / "schema.yaml").write_text(TEXT_SCHEMA)
        train_digits(dataset=str(root / "t.csv"), out=root / "texts", **of_text)
        trial = space_of(Dimension("lr", ("0.1", "1"))).plan_of({"lr": "1"})
        finish(train(trial.placed(root / "search")))
        head: dict[str, Any] = {"pretrained": public, "train": "head", "no_dp": True}
        train_digits(model="mlp-small", out=root / "pretrained", **head)
    found = {path.parent.name: json.loads(path.read_text()) for path in root.glob("*/report.json")}
    finish(fork(half, {"steps": "4", "sigma": "5", "out": str(root / "fork")}))
    return {**found, "fork": json.loads((root / "fork" / "report.json").read_text())}


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


@pytest.mark.long
def test_every_kind_of_run_was_made(reports: dict[str, Any]) -> None:
    assert len(reports) == len(RUNS) + 11
    assert {report["state"] for report in reports.values()} == {
        *("finished", "interrupted", "budget-spent")
    }
    assert reports["seeded"]["privacy"]["seed_policy"]["given"]
    assert reports["secure"]["privacy"]["randomness"]["secure"]
    assert reports["audit"]["audit"]["canaries"] > 0
    assert reports["own"]["dataset"]["held_out"]
    assert len(reports["fork"]["privacy"]["events"]) == 2
    assert reports["fork"]["privacy"]["noise_multiplier"] is None
    assert reports["tiny delta"]["privacy"]["accountant"].startswith("rdp")
    assert reports["features"]["model"]["public_part"]["features"] == "scatter"
    assert reports["pretrained"]["model"]["public_part"]["train"] == "head"


def test_plain_reports_are_as_described(plain_reports: dict[str, Any]) -> None:
    for name, report in plain_reports.items():
        assert faults(REPORT, report) == [], name


@pytest.mark.long
def test_reports_are_as_described(reports: dict[str, Any]) -> None:
    for name, report in reports.items():
        assert faults(REPORT, report) == [], name


@pytest.mark.long
def test_no_key_is_described_that_no_run_has(reports: dict[str, Any]) -> None:
    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from value
        for part in value.values() if isinstance(value, Mapping) else value:
            if isinstance(part, (Mapping, list)):
                yield from keys(part)

    described = {name for part in objects(REPORT) for name in part["properties"]}
    assert described <= {key for report in reports.values() for key in keys(report)}


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        (("privacy", "events", 0), "drawn", 3),
        (("privacy", "events", 0), "sampler", "dice"),
        (("privacy",), "epsilon", "small"),
        (("test",), "accuracy", 61.0),
        (("dataset",), "train_size", None),
    ],
)
def test_another_report_is_not_as_described(
    plain_reports: dict[str, Any], where: tuple[str | int, ...], key: str, value: Any
) -> None:
    changed = copy.deepcopy(plain_reports["ordinary"])
    part = changed
    for name in where:
        part = part[name]
    part[key] = value
    assert faults(REPORT, changed)
    with pytest.raises(ValidationError):
        Report.model_validate_json(json.dumps(changed), strict=True)


def test_a_report_is_written_as_it_was_read(plain_reports: dict[str, Any]) -> None:
    for report in plain_reports.values():
        assert Report.model_validate_json(json.dumps(report), strict=True).values() == report


def test_a_comparison_is_as_described(tmp_path: Path) -> None:
    flags = {"optimizers": "dp-sgd,dp-adam", "sigma": "6,8", "seeds": "1", "steps": "1"}
    grid = plan({"dataset": "digits", "device": "cpu", **flags}, None, tmp_path)
    for run in grid.runs[:-1]:
        finish(train(run.plan))
    study = json.loads(to_json(as_json(collect(grid, {3: "memory ran out"}))))
    assert faults(COMPARE, study) == []
    assert [row["failures"] for row in study["rows"]] == [{}, {}, {}, {"0": "memory ran out"}]
    for row in study["rows"]:
        others = row.keys() - COMPARE["properties"]["rows"]["items"]["properties"].keys()
        assert others == set(study["axes"])
    del study["rows"][0]["std"]
    assert faults(COMPARE, study)
