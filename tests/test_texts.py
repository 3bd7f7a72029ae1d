"""Texts, from a column of notes to predictions for new ones."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dpmac_cli import load_model
from tests.tiny_bert import WIDTH, notes, write_encoder
from tests.typed import dpmac

SCHEMA = """
label: {column: outcome, classes: [home, ward]}
columns:
  note: {text: 16}
  age: {range: [0, 100]}
"""
SHORT = ("--sigma", "4", "--batch-size", "32", "--device", "cpu")


@pytest.fixture(autouse=True)
def encoder() -> Path:
    return write_encoder(Path("encoder"))


def table(path: str = "notes.csv", count: int = 120, seed: int = 0, **more: list[Any]) -> None:
    """Write a table of notes, and its schema."""
    Path("schema.yaml").write_text(SCHEMA)
    with Path(path).open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["note", "age", "outcome", *more])
        for row, (text, kind) in enumerate(notes(count, seed)):
            age, name = 20 + row % 60, ("home", "ward")[kind]
            write.writerow([text, age, name, *(column[row] for column in more.values())])


def trained(*flags: str) -> dict[str, Any]:
    """Train as typed, and return the report."""
    result = dpmac("train", "--backbone", "./encoder", *SHORT, "--out", "run", *flags)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(Path("run/report.json").read_text())
    return report


def test_a_table_of_notes_is_trained_on_and_predicted() -> None:
    table()
    report = trained("--dataset", "notes.csv", "--schema", "schema.yaml", "--epochs", "20")
    assert report["input"]["texts"] == [[0, 16]]
    assert report["dataset"]["schema"]["columns"][0]["text"] == 16
    assert load_model("run").model.head[-1].in_features == WIDTH + 1
    table("new.csv", 10, seed=1)
    result = dpmac("predict", "run", "new.csv")
    assert result.exit_code == 0, result.output
    with Path("predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    result = dpmac("eval", "run")
    assert result.exit_code == 0, result.output
