"""--metric: what training shows and records, and what a comparison ranks by."""

import json
from pathlib import Path

import pytest
import yaml

from tests.typed import dpmac

SHORT = ("--dataset", "digits", "--sigma", "6", "--device", "cpu")


def test_training_shows_and_records_the_metric() -> None:
    result = dpmac("train", *SHORT, "--epochs", "2", "--metric", "auroc", "--out", "run")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert f"test AUROC {line['test_auroc']:.2%}" in result.stdout
    assert "test accuracy" not in result.stdout
    test = json.loads(Path("run/report.json").read_text())["test"]
    assert test["auroc"] == lines[-1]["test_auroc"]
    assert test["accuracy"] == lines[-1]["test_accuracy"]
    assert yaml.safe_load(Path("run/config.yaml").read_text())["metric"] == "auroc"


def test_accuracy_is_the_default() -> None:
    result = dpmac("train", *SHORT, "--steps", "2", "--out", "run")
    assert result.stdout.count("test accuracy") == 2
    assert yaml.safe_load(Path("run/config.yaml").read_text())["metric"] == "accuracy"


@pytest.mark.parametrize("metric", ["recall", "auroc,f1"])
def test_only_one_known_metric_is_taken(metric: str) -> None:
    result = dpmac("compare", *SHORT, "--metric", metric, "--dry-run")
    assert result.exit_code == 2
    assert "metric" in result.stderr


def test_a_report_is_complete_when_a_run_is_resumed_at_its_end() -> None:
    assert dpmac("train", *SHORT, "--steps", "2", "--out", "run").exit_code == 0
    before = json.loads(Path("run/report.json").read_text())["test"]
    Path("run/report.json").unlink()
    assert dpmac("train", "--resume", "run", "--device", "cpu").exit_code == 0
    assert json.loads(Path("run/report.json").read_text())["test"] == before


@pytest.mark.long
def test_a_comparison_by_another_metric_uses_the_same_runs() -> None:
    study = ("compare", *SHORT, "--steps", "13", "--seeds", "2", "--optimizers", "dp-sgd,dp-adam")
    first = dpmac(*study, "--out", "study", "--json")
    assert first.exit_code == 0, first.output
    reports = list(Path("study/runs").glob("*/report.json"))
    made = {path: path.stat().st_mtime_ns for path in reports}
    second = dpmac(*study, "--out", "study", "--json", "--metric", "auroc")
    assert second.exit_code == 0, second.output
    assert {path: path.stat().st_mtime_ns for path in reports} == made
    documents = [json.loads(result.stdout) for result in (first, second)]
    assert [document["metric"] for document in documents] == ["accuracy", "auroc"]
    tests = [json.loads(path.read_text())["test"] for path in reports]
    for document, name in zip(documents, ("accuracy", "auroc"), strict=True):
        found = sorted(value for row in document["rows"] for value in row["values"].values())
        assert found == sorted(test[name] for test in tests)
