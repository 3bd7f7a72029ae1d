"""Figures that pages quote are those of their data files."""

import json
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import beside_paper

DOCS = Path(__file__).parents[1] / "docs"


def lines(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of measurements."""
    return [json.loads(line) for line in (DOCS / "data" / name).read_text("utf-8").splitlines()]


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> Mapping[Any, Sequence[Any]]:
    """Return rows by the values of some keys."""
    found = defaultdict[Any, list[Any]](list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def tables(page: str) -> list[list[str]]:
    """Return the rows of all tables of a page, without bold."""
    text = (DOCS / page).read_text("utf-8").replace("**", "")
    shown = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]


def test_accuracies_of_the_readme() -> None:
    shown = [row[2:] for row in tables("../README.md") if row[1].startswith("linear on ")]
    found = grouped(lines("texts.jsonl"), "set", "features", "epsilon", "epochs")
    expected = [
        [
            f"{mean(r['accuracy'] for r in found[name, 'minilm', e, 20]):.1f}"
            for e in (1.0, 3.0, None)
        ]
        for name in ("sms", "banking77")
    ]
    rows = json.loads((DOCS / "data" / "backbone-lite2.json").read_text())["rows"]
    images = {round(row["epsilon"], 3): f"{100 * row['mean']:.1f}" for row in rows}
    assert shown == [*expected, [images[1.0], f"{images[2.435]} (at 2.435)", ""]]


def test_the_papers_tables() -> None:
    """Means by sigma, as of the runs, beside the paper's."""
    measured: list[list[str]] = []
    for name in ("table1", "table1-estimates", "table2"):
        by_kind = defaultdict[str, list[str]](list)
        for row in beside_paper.rows_of(DOCS / "data" / f"{name}.jsonl.xz"):
            by_kind[" ".join(row["labels"])].append(f"{100 * row['mean']:.2f}")
        measured += by_kind.values()
    shown = [row[1:] for row in tables("reproduction.md") if "[" in row[1]]
    assert len(shown) == 8 + 7
    for line in shown:
        assert [re.split(" [±[]", cell)[0] for cell in line] in measured, line


def test_the_best_batch_and_rate_of_each_optimizer() -> None:
    rows = [row for row in lines("batches.jsonl") if row["seed"] < 5 and row["epsilon"] == 0.785]
    found = grouped(rows, "optimizer", "batch_size", "lr")
    shown = {row[0].strip("`"): row[1:] for row in tables("reproduction.md") if len(row) == 4}
    for (name, batch, rate), runs in found.items():
        scores = [each["accuracy"] for each in runs]
        accuracy = f"{mean(scores):.2f} ± {stdev(scores):.2f}"
        assert shown[name] == [f"{batch:,}", f"{rate:g}", accuracy]


def test_units() -> None:
    found = grouped(lines("units.jsonl"), "row", "target")
    rows = {row[0]: row[1:] for row in tables("units.md")}
    for name in {name for name, _ in found}:
        scores = [[100 * r["accuracy"] for r in found[name, e]] for e in (1.0, 3.0, 8.0)]
        assert rows[name] == [f"{mean(each):.2f} ± {stdev(each):.2f}" for each in scores]


def test_processes() -> None:
    measured = json.loads((DOCS / "data" / "scaling.json").read_text())["rows"]
    found = grouped(measured, "model", "batch", "optimizer")
    rows = [row for row in tables("clusters.md") if row[1].isdigit()]
    assert rows == [
        [
            *map(str, key),
            *(f"{row['step_ms']:.1f}" for row in runs[:2]),
            f"{runs[1]['speed_up']:.2f}",
        ]
        for key, runs in found.items()
    ]


def test_the_picture_of_accuracies_is_of_the_data() -> None:
    drawn = runpy.run_path(str(DOCS / "accuracy_picture.py"))
    with Image.open(drawn["PICTURE"]) as picture:
        told = picture.info["Source"]
    assert told == drawn["source"](), "run python docs/accuracy_picture.py"
