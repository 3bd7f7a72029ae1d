"""A comparison as JSON values, CSV and Markdown, and the text of its cells."""

import json
import math
from collections import Counter
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.errors import InputError
from dpmac_cli.plots import means
from dpmac_cli.runs import folder
from dpmac_cli.runs.card import web_page
from dpmac_cli.storage.files import shown, to_csv
from dpmac_cli.studies.grid import row_name
from dpmac_cli.studies.results import LEVEL, Cell, Comparison

SCHEMA_VERSION = 3
MISSING = "–"
TEST = (
    "Bold (**): better than every other of its column by a paired t-test over seeds (two-sided, "
    f"{LEVEL:.0%} over the column by Holm's method). Tied with the best otherwise: ~."
)
NO_TEST = (
    "Nothing is marked as best: with fewer than two finished runs a row, there is no telling a "
    "real difference from chance."
)

OTHERS = (
    "Other runs on the same records add to the privacy cost, also those that were deleted, or "
    "replaced by dpmac train --force."
)


def as_values(comparison: Comparison) -> dict[str, Any]:
    """Return the content of compare.json: ``rows`` for programs, and the remarks on them."""
    grid = comparison.grid
    return {
        "schema_version": SCHEMA_VERSION,
        "dataset": grid.plan.dataset,
        "delta": grid.plan.delta,
        "metric": grid.plan.metric,
        "axes": list(grid.axes),
        "column": grid.column,
        "rows": [_row(cell) for cell in comparison.cells],
        "epsilon_of_the_study": shown(comparison.epsilon),
        "remarks": remarks(comparison),
    }


def _row(cell: Cell) -> dict[str, Any]:
    return {
        **dict(cell.labels),
        "sigma": cell.sigma,
        "epsilon": shown(cell.epsilon),
        "mean": shown(cell.mean),
        "std": cell.std,
        "seeds": len(cell.values),
        "values": {str(seed): shown(value) for seed, value in cell.values.items()},
        "failures": {str(seed): why for seed, why in cell.failures.items()},
        "standing": cell.standing,
        "training_seconds": shown(cell.seconds),
    }


def as_csv(comparison: Comparison) -> str:
    """Return one line per cell."""
    rows = [_row(cell) for cell in comparison.cells]
    return to_csv([name for name in rows[0] if name not in ("values", "failures")], rows)


def as_markdown(comparison: Comparison) -> str:
    """Return an aligned table with the epsilons below the columns' titles, and the remarks."""
    epsilons: dict[float, float] = {}  # of one run in each column: the largest of its rows
    for cell in comparison.cells:
        epsilons[cell.column] = max(cell.epsilon, epsilons.get(cell.column, 0))
    worth = ["no privacy" if math.isinf(e) else format_epsilon(e) for e in epsilons.values()]
    rows = [["epsilon", *worth, ""]]
    by_place = {(cell.labels, cell.column): cell for cell in comparison.cells}
    for labels in dict.fromkeys(cell.labels for cell in comparison.cells):
        cells = [by_place.get((labels, column)) for column in epsilons]
        seconds = [cell.seconds for cell in cells if cell and cell.values]
        time = str(timedelta(seconds=round(fmean(seconds)))) if seconds else MISSING
        rows.append([row_name(labels).replace("|", "\\|"), *map(_mean, cells), time])
    head = ["", *(f"{comparison.grid.column} {column:g}" for column in epsilons), "a run takes"]
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    lines = [
        f"| {' | '.join(map(str.ljust, cells, widths))} |"
        for cells in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(remarks(comparison)) + "\n"


def study_page(out: Path) -> str:
    """Return a web page of a study, from what :mod:`dpmac_cli.cli.compare` wrote.

    Raises InputError if its files cannot be read.
    """
    remedy = "Name a folder of dpmac compare."
    _, table = folder.read(out, "compare.md", remedy)
    file, values = folder.read(out, "compare.json", remedy)
    study = json.loads(values)
    if study["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{file} was written by another version of dpmac: compare again.")
    title = f"# Comparison on {study['dataset']}: test {study['metric']}, mean and deviation\n\n"
    picture = means(study, [*OPTIMIZERS])
    return web_page(title + table.decode(), {"The same as a picture": picture})


def _mean(cell: Cell | None) -> str:
    """Return mean and spread in percent, bold if best, with a tilde if tied."""
    if cell is None or math.isnan(cell.mean):
        return MISSING
    spread = "" if cell.std is None else f" ± {100 * cell.std:.2f}"
    text = f"{100 * cell.mean:.2f}{spread}"
    return {"best": f"**{text}**", "tied": f"{text} ~"}.get(cell.standing, text)


def remarks(comparison: Comparison) -> list[str]:
    """Return how rows were told apart, what epsilons cover, and what publishing the best costs."""
    rivals = Counter(cell.column for cell in comparison.cells)
    tested = Counter(cell.column for cell in comparison.cells if len(cell.values) > 1)
    said = []
    if max(tested.values(), default=0) > 1:
        said.append(TEST)
    elif max(rivals.values()) > 1:
        said.append(NO_TEST)
    epsilon, cells = comparison.epsilon, comparison.cells
    if not math.isfinite(epsilon) or epsilon == 0:
        return said
    said.append(
        "Runs are drawn with the seeds named, to be repeatable: their epsilons hold only against "
        "those who do not know the seeds. Train what is to be published without one."
    )
    open_ends = sum(len(cell.failures) for cell in cells)
    runs = open_ends + sum(len(cell.values) for cell in cells)
    counted = f", {open_ends} of them not finished and counted in full," if open_ends else ""
    if runs > 1 or epsilon > cells[0].epsilon:
        said.append(
            "An epsilon above is the privacy cost of one run fixed in advance. "
            f"The {runs} runs{counted} are on the same records: publishing what was learnt from "
            f"all of them, such as which is best, costs epsilon {format_epsilon(epsilon)} at "
            f"delta {comparison.grid.plan.delta:g} in all. That covers attempts at these runs "
            "that were begun again from scratch."
        )
    if len(cells) > 1:
        said.append(
            "That is for runs drawn independently. Runs of the same seed share batches and noise: "
            "from two of their models the noise can be subtracted, so publish no two of them."
        )
    return [*said, OTHERS]
