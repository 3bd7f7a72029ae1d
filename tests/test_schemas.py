"""Every key of report.json and compare.json is described, and every report is as described."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.run import finish, fork, train
from dpmac_cli.studies.search import Dimension
from tests.digits_runs import after, digits_config, train_digits
from tests.test_tune import space_of
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
