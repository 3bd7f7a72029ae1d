"""Our tables beside the paper's, cell by cell, as Markdown.

    python benchmarks/beside_paper.py docs/data/table1.jsonl.xz docs/data/table1-estimates.jsonl.xz
    python benchmarks/beside_paper.py runs/table1/compare.json

A file is a comparison, or has the reports of runs as JSON lines. A cell differs where the means are
further apart than two standard deviations of their difference, the paper's and ours together. One
that has no spread, for lack of seeds, gets the largest of its row.
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import parser_of, read_lines

AXES = ("optimizer", "kappa", "phi", "gamma_prime")
#: Tables I and II of arXiv 2606.05435, in percent.
PAPER = Path(__file__).parent.parent / "docs" / "data" / "paper.csv"


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield rows: dataset, labels, sigma, mean and deviation of the accuracies."""
    if file.suffix == ".json":
        found = json.loads(file.read_bytes())
        for row in found["rows"]:
            yield {"dataset": found["dataset"], "labels": labels(row, found["axes"]), **row}
        return
    scores = defaultdict[tuple[Any, ...], list[float]](list)
    for line in read_lines(file):
        dataset, settings, sigma, accuracy = facts(json.loads(line["files"]["report.json"]))
        scores[dataset, labels(settings, AXES), sigma].append(accuracy)
    for (dataset, kind, sigma), each in sorted(scores.items(), key=lambda item: item[0][2]):
        row = {"dataset": dataset, "labels": kind, "optimizer": kind[0], "sigma": sigma}
        spread = stdev(each) if len(each) > 1 else None
        yield {**row, "mean": mean(each), "std": spread, "seeds": len(each)}


def facts(report: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], float, float]:
    """Return the dataset, the settings, sigma and the accuracy of a report.

    Those of the recorded runs are of format 1, which dpmac itself no longer reads.
    """
    if "schema_version" in report:
        settings = {**report["hyperparameters"], "optimizer": report["optimizer"]}
        sigma, accuracy = report["privacy"]["noise_multiplier"], report["test"]["accuracy"]
        return report["dataset"]["name"], settings, sigma, accuracy
    steps = [event for event in report["events"] if not event["histogram"]]
    steps = [event for event in steps if event["records"] == "training"]
    accuracy = report["scores"]["accuracy"]["value"]
    return report["data"]["name"], report["settings"], steps[-1]["noise_multiplier"], accuracy


def labels(row: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    """Return what a row is called; a setting of other optimizers is empty."""
    shown = (axis for axis in axes if row.get(axis))
    return tuple(str(row[axis]) if axis == "optimizer" else f"{axis} {row[axis]}" for axis in shown)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return ours with the paper's in brackets; cells that differ in bold."""
    printed = {
        (row["dataset"], row["optimizer"], float(row["sigma"])): (
            float(row["mean"]),
            float(row["std"]),
        )
        for row in csv.DictReader(PAPER.read_text().splitlines())
    }
    measured = sorted({row["sigma"] for row in rows})
    lines = [
        f"| | {' | '.join(f'{sigma:g}' for sigma in measured)} |",
        "|---" * (len(measured) + 1) + "|",
    ]
    for kind in dict.fromkeys(row["labels"] for row in rows):
        mine = {row["sigma"]: row for row in rows if row["labels"] == kind and row["seeds"]}
        spread = max((100 * (row["std"] or 0.0) for row in mine.values()), default=0.0)
        cells = [
            _cell(mine[sigma], printed, spread) if sigma in mine else "–" for sigma in measured
        ]
        lines.append(f"| {' '.join(kind)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(
    row: Mapping[str, Any],
    printed: Mapping[tuple[str, str, float], tuple[float, float]],
    spread: float,
) -> str:
    theirs, their_std = printed[row["dataset"], row["optimizer"], row["sigma"]]
    middle, std = 100 * row["mean"], row["std"]
    shown = f"{middle:.2f}" if std is None else f"{middle:.2f} ± {100 * std:.2f}"
    own = spread if std is None else 100 * std
    text = f"{shown} [{theirs:g} ± {their_std:g}]"
    return f"**{text}**" if abs(middle - theirs) > 2 * math.hypot(own, their_std) else text


def main() -> None:
    """Read comparisons or runs, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    print(table([row for file in parser.parse_args().files for row in rows_of(file)]))


if __name__ == "__main__":
    main()
