"""Our tables beside the paper's, cell by cell, as Markdown.

    python benchmarks/beside_paper.py runs/table1/compare.json

A cell differs where the means are further apart than two standard deviations of their difference,
the paper's and ours together. One that has no spread of its own, for lack of seeds, borrows its
row's largest.
"""

import argparse
import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Tables I and II of arXiv 2606.05435, in percent.
PAPER = Path(__file__).parent.parent / "docs" / "data" / "paper.csv"


def table(comparison: dict[str, Any]) -> str:
    """Rows of ours with the paper's in brackets; cells that differ in bold."""
    printed = {
        (row["optimizer"], float(row["sigma"])): (float(row["mean"]), float(row["std"]))
        for row in csv.DictReader(PAPER.read_text().splitlines())
        if row["dataset"] == comparison["dataset"]
    }
    rows = comparison["rows"]
    measured = list(dict.fromkeys(row["sigma"] for row in rows))
    lines = [
        f"| | {' | '.join(f'{sigma:g}' for sigma in measured)} |",
        "|---" * (len(measured) + 1) + "|",
    ]
    for labels in dict.fromkeys(_labels(row, comparison["axes"]) for row in rows):
        mine = [row for row in rows if _labels(row, comparison["axes"]) == labels and row["seeds"]]
        spread = max((100 * (row["std"] or 0.0) for row in mine), default=0.0)
        cells = [
            _cell([row for row in mine if row["sigma"] == sigma], printed, spread)
            for sigma in measured
        ]
        lines.append(f"| {' '.join(labels)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _labels(row: dict[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    shown = (axis for axis in axes if row[axis])  # a setting of other optimizers is empty
    return tuple(f"{axis} {row[axis]}" if axis != "optimizer" else row[axis] for axis in shown)


def _cell(
    rows: list[dict[str, Any]],
    printed: Mapping[tuple[str, float], tuple[float, float]],
    spread: float,
) -> str:
    if not rows:
        return "–"
    [row] = rows
    theirs, their_std = printed[row["optimizer"], row["sigma"]]
    mean, std = 100 * row["mean"], row["std"]
    shown = f"{mean:.2f}" if std is None else f"{mean:.2f} ± {100 * std:.2f}"
    own = spread if std is None else 100 * std
    differs = abs(mean - theirs) > 2 * math.hypot(own, their_std)
    text = f"{shown} [{theirs:g} ± {their_std:g}]"
    return f"**{text}**" if differs else text


def main() -> None:
    """Read a compare.json, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    print(table(json.loads(parser.parse_args().file.read_bytes())))


if __name__ == "__main__":
    main()
