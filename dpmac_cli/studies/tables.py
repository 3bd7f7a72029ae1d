"""Files of a comparison: JSON values, CSV, Markdown, and a web page of them."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.errors import InputError
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.plots import means
from dpmac_cli.release.page import web_page
from dpmac_cli.runs import folder
from dpmac_cli.storage.files import finite_or_none, to_csv, to_json, write_atomically
from dpmac_cli.studies.grid import row_name
from dpmac_cli.studies.results import LEVEL, Cell, Comparison
from dpmac_cli.tasks.known import METRICS
from dpmac_cli.tasks.task import EvaluationMetric, number

SCHEMA_VERSION = 3
#: Files of a study.
COMPARE_JSON, COMPARE_MD, COMPARE_CSV = "compare.json", "compare.md", "compare.csv"
MISSING = "–"
TEST = (
    "Bold (**): significantly better than all others in its column (paired two-sided t-test over "
    f"seeds, {LEVEL:.0%} per column with Holm's method). Otherwise ~: tied with the best."
)
NO_TEST = (
    "Nothing is marked as best: with fewer than two finished runs per row, real differences "
    "cannot be distinguished from chance."
)

SEEDS = (
    "Seeds are given, so epsilons hold only against attackers who do not know the seeds: train a "
    "model that you publish without one."
)
ONE_SEED = (
    " Runs of one seed share batches and noise, which can be subtracted from two of their models. "
    "Publish at most one of them."
)
OTHERS = " Other runs on the same records add to the cost, also those deleted or replaced."


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the content of compare.json: ``rows`` for programs, and remarks."""
    grid = comparison.grid
    return {
        "schema_version": SCHEMA_VERSION,
        "dataset": grid.plan.data.dataset,
        "delta": grid.plan.privacy.delta,
        "metric": grid.plan.settings.metric,
        "axes": list(grid.axes),
        "column": grid.column,
        "rows": [_row(cell) for cell in comparison.cells],
        "epsilon_of_the_study": finite_or_none(comparison.epsilon),
        "remarks": remarks(comparison),
    }


def _row(cell: Cell) -> dict[str, Any]:
    return {
        **dict(cell.labels),
        "sigma": cell.sigma,
        "epsilon": finite_or_none(cell.epsilon),
        "mean": finite_or_none(cell.mean),
        "std": cell.std,
        "seeds": len(cell.values),
        "values": {str(seed): finite_or_none(value) for seed, value in cell.values.items()},
        "failures": {str(seed): why for seed, why in cell.failures.items()},
        "standing": cell.standing,
        "training_seconds": finite_or_none(cell.seconds),
    }


def as_csv(comparison: Comparison) -> str:
    """Return one line per cell."""
    rows = [_row(cell) for cell in comparison.cells]
    return to_csv([name for name in rows[0] if name not in ("values", "failures")], rows)


def as_markdown(comparison: Comparison) -> str:
    """Return an aligned table with the epsilons below the columns' titles, and the remarks."""
    epsilons: dict[float, float] = {}  # largest epsilon of one run in each column
    for cell in comparison.cells:
        epsilons[cell.column] = max(cell.epsilon, epsilons.get(cell.column, 0))
    worth = ["no privacy" if math.isinf(e) else format_epsilon(e) for e in epsilons.values()]
    rows, metric = [["epsilon", *worth, ""]], METRICS[comparison.grid.plan.settings.metric]
    by_place = {(cell.labels, cell.column): cell for cell in comparison.cells}
    for labels in dict.fromkeys(cell.labels for cell in comparison.cells):
        cells = [by_place.get((labels, column)) for column in epsilons]
        seconds = [cell.seconds for cell in cells if cell and cell.values]
        time = str(timedelta(seconds=round(fmean(seconds)))) if seconds else MISSING
        rows.append(
            [row_name(labels).replace("|", "\\|"), *(_mean(cell, metric) for cell in cells), time]
        )
    head = ["", *(f"{comparison.grid.column} {column:g}" for column in epsilons), "a run takes"]
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    lines = [
        f"| {' | '.join(map(str.ljust, cells, widths))} |"
        for cells in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(remarks(comparison)) + "\n"


def write_comparison(comparison: Comparison, out: Path) -> dict[str, str]:
    """Write a comparison in all formats, and their checksums last; return what is in each file."""
    texts = {
        COMPARE_JSON: to_json(as_json(comparison)),
        COMPARE_CSV: as_csv(comparison),
        COMPARE_MD: as_markdown(comparison),
    }
    for name in (folder.SUMS, *texts):  # a kill must not leave files of two tables
        (out / name).unlink(missing_ok=True)
    for name, content in texts.items():
        write_atomically(out / name, content.encode())
    folder.seal(out, texts)
    return texts


def study_page(out: Path) -> str:
    """Return a web page of a study, from the files of :func:`write_comparison`.

    Raises InputError if its files cannot be read.
    """
    remedy = "Use the output folder of dpmac compare."
    _, table = folder.read_run_file(out, COMPARE_MD, remedy)
    file, values = folder.read_run_file(out, COMPARE_JSON, remedy)
    try:
        study: Mapping[str, Any] = json.loads(values)
        known = study["schema_version"] == SCHEMA_VERSION
    except folder.BROKEN as failure:
        raise InputError(f"{file} is not a comparison of dpmac ({failure}). {remedy}") from failure
    if not known:
        raise InputError(f"{file} was written by another version of dpmac: compare again.")
    title = f"# Comparison on {study['dataset']}: test {study['metric']}, mean and deviation\n\n"
    picture = means(study, [*OPTIMIZERS], share=METRICS[study["metric"]].share)
    return web_page(title + table.decode(), {"The same as a picture": picture})


def _mean(cell: Cell | None, metric: EvaluationMetric) -> str:
    """Return mean and spread, of shares in percent; bold if best, with a tilde if tied."""
    if cell is None or math.isnan(cell.mean):
        return MISSING
    show = "{:.2f}".format if metric.share else number
    scale = 100 if metric.share else 1
    spread = "" if cell.std is None else f" ± {show(scale * cell.std)}"
    text = f"{show(scale * cell.mean)}{spread}"
    return {"best": f"**{text}**", "tied": f"{text} ~"}.get(cell.standing, text)


def remarks(comparison: Comparison) -> list[str]:
    """Return remarks on significance, on the cost of all runs, and on seeds and other runs."""
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
    open_ends = sum(len(cell.failures) for cell in cells)
    runs = open_ends + sum(len(cell.values) for cell in cells)
    counted = f", {open_ends} of them not finished and counted in full," if open_ends else ""
    if runs > 1 or epsilon > cells[0].epsilon:
        said.append(
            f"Each epsilon is of one run chosen in advance. The {runs} runs{counted} use the same "
            "records: publishing anything learnt from all of them, such as which is best, costs "
            f"epsilon {format_epsilon(epsilon)} at delta "
            f"{comparison.grid.plan.privacy.delta:g} in total."
        )
    return [*said, SEEDS + (len(cells) > 1) * ONE_SEED + OTHERS]
