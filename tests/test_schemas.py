"""Every key of report.json and compare.json is described, and every report is as described."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.digits_runs import train_digits

DOCS = Path(__file__).parent.parent / "docs"


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCS / name).read_text())
    return loaded


REPORT, COMPARE = load("report.schema.json"), load("compare.schema.json")


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


def test_a_report_is_as_described(tmp_path: Path) -> None:
    report = json.loads((train_digits(out=tmp_path / "run").folder / "report.json").read_text())
    assert [fault.message for fault in Draft202012Validator(REPORT).iter_errors(report)] == []
