"""What a clinic has: rare positives, and several findings per image."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from dpmac_cli import ArrayData
from dpmac_cli.cli.app import app

FINDINGS = ["nodule", "effusion", "fracture"]


def films(count: int = 900) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey images of 8 by 8, and findings that are bright patches, alone or together."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 100, (count, 8, 8), np.uint8)
    y = (rng.random((count, 3)) < (0.5, 0.3, 0.1)).astype(np.int64)
    for place, finding in enumerate(y.T):
        x[finding == 1, 2 * place : 2 * place + 2, 1:7] += 120
    return x, y


@pytest.mark.long
def test_images_with_several_findings_go_all_the_way(tmp_path: Path) -> None:
    x, y = films()
    file, run = tmp_path / "films.npz", tmp_path / "run"
    np.savez(file, x=x, y=y, classes=FINDINGS)
    flags = f"--epsilon 8 --epochs 10 --model linear --lr 0.02 --metric auroc --out {run}"
    done = CliRunner().invoke(app, ["train", "--dataset", str(file), *flags.split()])
    assert done.exit_code == 0, done.output
    assert "test AUROC" in done.output
    report = json.loads((run / "report.json").read_text())
    assert report["recipe"]["loss"] == "bce"
    assert report["dataset"]["multilabel"] is True
    assert report["test"]["auroc"] > 0.95
    assert len(report["test"]["sensitivity"]) == 3
    said = CliRunner().invoke(app, ["eval", str(run), "--json"])
    assert json.loads(said.stdout)["auroc"] == report["test"]["auroc"]
    shown = CliRunner().invoke(app, ["eval", str(run)]).output
    assert "true and false negatives and positives" in shown
    assert "fracture" in shown
    np.savez(tmp_path / "new.npz", x=x[:50])
    out = tmp_path / "said.csv"
    done = CliRunner().invoke(
        app, ["predict", str(run), str(tmp_path / "new.npz"), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(out.read_text().splitlines()))
    found = [{name for name in row["predicted"].split(";") if name} for row in rows]
    true = [{name for name, is_there in zip(FINDINGS, row, strict=True) if is_there} for row in y]
    assert sum(a == b for a, b in zip(found, true, strict=False)) > 35
    assert {f"p_{name}" for name in FINDINGS} < rows[0].keys()


def rare(count: int = 6000) -> ArrayData:
    """Rows of which one in fifty is positive, and overlaps with the others."""
    rng = np.random.default_rng(0)
    y = (rng.random(count) < 0.02).astype(int)
    x = rng.normal(size=(count, 4)) + 1.6 * y[:, None]
    return ArrayData(x, y, low=-5, high=5, classes=["well", "ill"])
