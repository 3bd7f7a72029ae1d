"""Figures that pages quote are those of their data files."""

import json
import runpy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from PIL import Image

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


def test_numbers_to_predict() -> None:
    found = grouped(lines("predicted_numbers.jsonl"), "set", "method", "epsilon")
    methods = (
        ("dpmac", 1.0),
        ("AdaSSP", 1.0),
        ("dpmac, no noise", None),
        ("ridge, no noise", None),
    )
    rows = {row[0].partition(":")[0].strip("`"): row[1:] for row in tables("own-numbers.md")}
    for name in ("meps", "wage_panel", "wage", "401ksubs", "injury"):
        runs = [found[name, method, epsilon] for method, epsilon in methods]
        assert rows[name] == [
            f"{mean(100 * r['mae'] for r in each):.2f} ({mean(r['r2'] for r in each):.2f})"
            for each in runs
        ]


def test_searches() -> None:
    found = grouped(lines("tuning.jsonl"), "set", "epsilon", "way")
    rows = [row[1:5] for row in tables("tuning.md") if row[1] in ("1", "3")]
    assert rows == [
        [
            f"{epsilon:g}",
            *(
                f"{mean(100 * r['accuracy'] for r in found[name, epsilon, way]):.2f}"
                for way in ("defaults", "tuned", "composed")
            ),
        ]
        for name in ("penguins", "digits")
        for epsilon in (3.0, 1.0)
    ]


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
