"""--metric: what training shows and records, and what a comparison ranks by."""

import json
from pathlib import Path

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
