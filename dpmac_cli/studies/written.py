"""Files of a comparison: tables, values for programs, remarks, figures and a web page.

Every form has the remarks that the figures need: what the runs cost together, whether a difference
can be told from chance, and that named seeds protect from nobody who knows them.
"""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from dpmac_cli.accounting.statements import cost_in_words, format_epsilon
from dpmac_cli.config.records import AnyNumber
from dpmac_cli.errors import InputError, first_fault
from dpmac_cli.files import finite_or_none, to_csv, to_json, write_atomically
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.card import web_page
from dpmac_cli.release.plots import Point, curves, means
from dpmac_cli.runs import folder
from dpmac_cli.runs.headers import Number, Part
from dpmac_cli.studies.grid import Grid, Labels, Run, row_name
from dpmac_cli.studies.results import LEVEL, Cell, Comparison, finished_report
from dpmac_cli.tasks.task import METRICS, EvaluationMetric, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 4
#: Files of a study.
COMPARE_JSON, COMPARE_MD, COMPARE_CSV = "compare.json", "compare.md", "compare.csv"
MISSING = "–"
TEST = (
    "Bold (**): significantly better than all others in its column (paired two-sided t-test over "
    f"seeds, {LEVEL:.0%} per column with Holm's method). Otherwise ~: not significantly worse than "
    "the best mean. With more seeds it may be."
)
DIFFERENCES = (
    "Differences from the best mean of the column, over the same seeds, with the 95% interval of "
    "each by itself:"
)
#: What a test of one pair needs to be significant, in standard deviations of the difference.
SEEDS_NEEDED = (
    "Five seeds show only a difference of 1.2 times its standard deviation over the seeds, ten 0.7 "
    "times. Use --seeds 5 or more."
)
NO_TEST = (
    "Nothing is marked as best: with fewer than five finished runs per row, a difference cannot be "
    f"told from chance. {SEEDS_NEEDED}"
)
PART_TEST = f"Rows with fewer than five finished runs are not tested. {SEEDS_NEEDED}"
SEEDS = (
    "Seeds are given, so epsilons hold only against attackers who do not know the seeds: train a "
    "model that you publish without one."
)
ONE_SEED = (
    " The total is for runs drawn independently: those of one seed share batches and noise, which "
    "can be subtracted from two of their models. Publish at most one of them."
)
OTHERS = " Other runs on the same records add to the cost, also those deleted or replaced."


#: Largest number of characters of a label, of which figures are drawn.
LONGEST = 500
Seed = Annotated[str, Field(pattern="^[0-9]+$")]
Seconds = Annotated[float, Field(ge=0)]


class Row(Part):
    """Runs that differ only in their seed. There is an additional key for each axis: the value that
    the row has of it, as typed.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[str, Field(max_length=LONGEST)]]

    sigma: Number
    """Noise multiplier; 0 without privacy."""
    epsilon: Number | None
    """Epsilon of one run at delta. Null without privacy."""
    mean: AnyNumber | None
    """Mean of the metric. Null if no run finished, or if it is not defined."""
    std: Number | None
    """Sample standard deviation over seeds. Null for fewer than two."""
    seeds: Annotated[int, Field(ge=0)]
    """Number of runs that finished."""
    values: dict[Seed, AnyNumber | None]
    """The metric of each run that finished, by seed. Null where it is not defined."""
    failures: dict[Seed, str]
    """Errors of the other runs, by seed."""
    standing: Literal["best", "tied", ""]
    """best: better than every other in its column by the test; tied: not distinguishable from the
    best; empty otherwise."""
    difference: AnyNumber | None
    """Mean difference from the best mean of the column, over the seeds that both have. Null for the
    best itself, and with fewer than five such seeds."""
    difference_interval: tuple[AnyNumber, AnyNumber] | None
    """95% interval of that difference, by itself, of a paired t-test: low, high. Null as for
    difference."""
    training_seconds: Seconds | None
    """Mean seconds of training of a run. Null if no run finished."""


class _Versioned(Part):
    """A compare.json of any version."""

    schema_version: int


class Study(Part):
    """Means and standard deviations over seeds. Seeds are named, so every epsilon holds only
    against people who do not know them.
    """

    schema_version: Annotated[int, Field(json_schema_extra={"const": SCHEMA_VERSION})]
    """Increases when a key is removed or changes its meaning."""
    dataset: str
    """What was trained on, as typed."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Delta of every epsilon here."""
    metric: Literal[tuple(METRICS)]  # type: ignore[valid-type]
    """Metric on the test records that is compared."""
    axes: Annotated[tuple[str, ...], Field(min_length=1, max_length=100)]
    """Settings that distinguish rows, by the names of their flags."""
    column: Literal["sigma", "epsilon"]
    """Setting that the columns of the table are."""
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    """One object for each row and column of the table."""
    epsilon_of_the_study: Number | None
    """Epsilon of all runs together: what publishing the winner costs at most. Null if it is not
    finite."""
    remarks: tuple[str, ...]
    """Notes that must accompany the table."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for row in self.rows:
            if not all(isinstance(getattr(row, axis, None), str) for axis in self.axes):
                raise ValueError("a row has no label of an axis")
            if getattr(row, self.column) is None:
                raise ValueError(f"a row has no {self.column}")
        return self


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the content of compare.json: a :class:`Study` as JSON values.

    Numbers that are not finite are None.

    Args:
        comparison: the results of a study.
    """
    grid = comparison.grid
    study = {
        "schema_version": SCHEMA_VERSION,
        "dataset": grid.plan.facts.typed,
        "delta": grid.plan.settings.delta,
        "metric": grid.plan.settings.metric,
        "axes": grid.axes,
        "column": grid.column,
        "rows": [_row(cell) for cell in comparison.cells],
        "epsilon_of_the_study": finite_or_none(comparison.epsilon),
        "remarks": remarks(comparison),
    }
    return Study.model_validate(study).model_dump(mode="json")


def _row(cell: Cell) -> Row:
    """Return a cell as a row; numbers that are not finite become None."""
    difference = cell.difference
    values = {
        **dict(cell.labels),
        "sigma": cell.sigma,
        "epsilon": finite_or_none(cell.epsilon),
        "mean": finite_or_none(cell.mean),
        "std": cell.std,
        "seeds": len(cell.values),
        "values": {str(seed): finite_or_none(value) for seed, value in cell.values.items()},
        "failures": {str(seed): reason for seed, reason in cell.failures.items()},
        "standing": cell.standing,
        "difference": None if difference is None else difference.mean,
        "difference_interval": None if difference is None else (difference.low, difference.high),
        "training_seconds": finite_or_none(cell.seconds),
    }
    return Row.model_validate(values)


def as_csv(comparison: Comparison) -> str:
    """Return the content of compare.csv: a line of titles, and one line per cell.

    Columns are the axes and the numbers of a :class:`Row`, without those of single seeds.

    Args:
        comparison: the results of a study.
    """
    rows = list[dict[str, Any]]()
    for cell in comparison.cells:
        row = _row(cell).model_dump(mode="json")
        low, high = row.pop("difference_interval") or (None, None)
        rows.append({**dict(cell.labels), **row, "difference_low": low, "difference_high": high})
    columns = [name for name in rows[0] if name not in ("values", "failures")]
    return to_csv(columns, rows)


def as_markdown(comparison: Comparison) -> str:
    """Return the content of compare.md: an aligned table, and the remarks below it.

    Epsilons are below the columns' titles: the largest of one run in each column. A second table
    has the differences from the best mean, if any were tested.

    Args:
        comparison: the results of a study.
    """
    metric = METRICS[comparison.grid.plan.settings.metric]
    epsilons: dict[float, float] = {}  # largest epsilon of one run in each column
    rows_of = dict[Labels, dict[float, Cell]]()  # cells by row and column
    for cell in comparison.cells:
        epsilons[cell.column] = max(cell.epsilon, epsilons.get(cell.column, 0))
        rows_of.setdefault(cell.labels, {})[cell.column] = cell
    costs = [
        "no privacy" if math.isinf(epsilon) else format_epsilon(epsilon)
        for epsilon in epsilons.values()
    ]
    means, apart = [["epsilon", *costs, ""]], list[list[str]]()
    for labels, of_row in rows_of.items():
        cells = [of_row.get(column) for column in epsilons]
        means.append([_as_cell(labels), *(_mean(cell, metric) for cell in cells), _time(cells)])
        if any(cell.difference for cell in of_row.values()):
            apart.append([_as_cell(labels), *(_difference(cell, metric) for cell in cells)])
    columns = [f"{comparison.grid.column} {column:g}" for column in epsilons]
    parts = [_table(["", *columns, "a run takes"], means), *remarks(comparison)]
    if apart:
        parts += [DIFFERENCES, _table(["", *columns], apart)]
    return "\n\n".join(parts) + "\n"


def _time(cells: Iterable[Cell | None]) -> str:
    """Return the mean training time of the finished runs of a row."""
    seconds = [cell.seconds for cell in cells if cell and cell.values]
    if not seconds:
        return MISSING
    mean = fmean(seconds)
    return f"{mean:.1f} s" if mean < 60 else str(timedelta(seconds=round(mean)))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table in Markdown.

    Args:
        head: titles of the columns.
        rows: cells of each row, in which Markdown's signs are escaped.

    >>> print(_table(["", "sigma 1"], [["dp-sgd", "89.77"]]))
    |        | sigma 1 |
    | ------ | ------- |
    | dp-sgd | 89.77   |
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = list[str]()
    for cells in (head, ["-" * width for width in widths], *rows):
        padded = map(str.ljust, cells, widths)
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def _as_cell(labels: Labels) -> str:
    """Return the name of a row as a cell of Markdown, in which no bar ends the cell."""
    return row_name(labels).replace("|", "\\|")


def write_comparison(comparison: Comparison, out: Path) -> dict[str, str]:
    """Write a comparison in all formats, and their checksums last.

    Older files of a table are replaced.

    Args:
        comparison: the results.
        out: folder of the study, which must exist.

    Returns:
        The text of each file, by its name: :data:`COMPARE_JSON`, :data:`COMPARE_CSV` and
        :data:`COMPARE_MD`.

    Raises:
        OSError: a file cannot be written.
    """
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
    """Return a web page of a study as HTML, from the files of :func:`write_comparison`.

    The files may be someone else's, so they are validated, and text in them is escaped.

    Args:
        out: folder of the study.

    Raises:
        InputError: a file is missing, is not one of a comparison, or is of another version.
    """
    remedy = "Use the output folder of dpmac compare."
    _, table = folder.read_run_file(out, COMPARE_MD, remedy)
    file, values = folder.read_run_file(out, COMPARE_JSON, remedy)
    try:
        version = _Versioned.model_validate_json(values, strict=True).schema_version
        if version != SCHEMA_VERSION:
            raise InputError(f"{file} was written by another version of dpmac: compare again.")
        study = Study.model_validate_json(values, strict=True).model_dump()
    except ValueError as failure:
        why = first_fault(failure)
        raise InputError(f"{file} is not a comparison of dpmac ({why}). {remedy}") from failure
    title = f"# Comparison on {study['dataset']}: test {study['metric']}, mean and deviation\n\n"
    picture = means(study, [*OPTIMIZERS], share=METRICS[study["metric"]].share)
    return web_page(title + table.decode(), {"The same as a picture": picture})


def study_figure(grid: Grid) -> "Figure":
    """Draw the mean score of each cell over epsilon, and over epochs.

    Args:
        grid: the study, of which the runs that are finished count.

    Returns:
        A figure with one line per cell in each of two panels.
    """
    metric = METRICS[grid.plan.settings.metric]
    cells = dict[str, list[Point]]()
    groups = itertools.groupby(grid.runs, lambda run: (run.labels, run.column))
    for (labels, column), runs in groups:
        points = list(_course(runs, metric))
        if points:
            cells[f"{row_name(labels)}, {grid.column} {column:g}"] = points
    return curves(cells, metric.title, share=metric.share)


def _course(runs: Iterable[Run], metric: EvaluationMetric) -> Iterator[Point]:
    """Yield the mean score of finished runs after each epoch, from their metrics.jsonl.

    Args:
        runs: the runs of one cell, which are evaluated after the same epochs.
        metric: the score. Runs that release one score at the end have one point.
    """
    scores, spent = defaultdict[float, list[float]](list), dict[float, float | None]()
    for run in runs:
        if finished_report(run) is None:
            continue
        for text in (run.folder / folder.METRICS).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            score = line.get(metric.logged)
            if score is not None:
                scores[line["epoch"]].append(score)
                spent[line["epoch"]] = line["epsilon"]
    for epoch in sorted(scores):
        yield Point(epoch, spent[epoch], fmean(scores[epoch]))


def _number(value: float, metric: EvaluationMetric) -> str:
    """Return a value of a metric; a share is in percent, with two digits.

    >>> _number(0.91385, METRICS["accuracy"])
    '91.39'
    """
    return f"{100 * value:.2f}" if metric.share else number(value)


def _difference(cell: Cell | None, metric: EvaluationMetric) -> str:
    """Return the difference of a cell from the best mean, with its interval."""
    if cell is None or cell.difference is None:
        return MISSING
    mean, low, high = (_number(value, metric) for value in cell.difference[:3])
    return f"{mean} [{low}, {high}]"


def _mean(cell: Cell | None, metric: EvaluationMetric) -> str:
    """Return mean and spread, of shares in percent; bold if best, with a tilde if tied."""
    if cell is None or math.isnan(cell.mean):
        return MISSING
    spread = "" if cell.std is None else f" ± {_number(cell.std, metric)}"
    text = f"{_number(cell.mean, metric)}{spread}"
    return {"best": f"**{text}**", "tied": f"{text} ~"}.get(cell.standing, text)


def remarks(comparison: Comparison) -> list[str]:
    """Return the sentences below the table, which must go with it wherever it is shown.

    They say which differences are significant or why none is marked, what publishing anything
    learnt from all runs costs, and whom named seeds protect from.

    Args:
        comparison: the results.
    """
    rivals = Counter(cell.column for cell in comparison.cells)
    tested = Counter(cell.column for cell in comparison.cells if cell.tested)
    sentences = list[str]()
    if max(tested.values(), default=0) > 1:
        sentences.append(TEST)
        if any(cell.values and not cell.tested for cell in comparison.cells):
            sentences.append(PART_TEST)
    elif max(rivals.values()) > 1:
        sentences.append(NO_TEST)
    epsilon, cells = comparison.epsilon, comparison.cells
    if not math.isfinite(epsilon) or epsilon == 0:
        return sentences
    unfinished = sum(len(cell.failures) for cell in cells)
    runs = unfinished + sum(len(cell.values) for cell in cells)
    counted = f", {unfinished} of them not finished and counted in full," if unfinished else ""
    if runs > 1 or epsilon > cells[0].epsilon:
        sentences.append(
            f"Each epsilon is of one run chosen in advance. The {runs} runs{counted} use the same "
            "records: publishing anything learnt from all of them, such as which is best, costs "
            f"{cost_in_words(epsilon, comparison.grid.plan.settings.delta)} in total."
        )
    of_seeds = SEEDS
    if len(cells) > 1:
        of_seeds += ONE_SEED
    return [*sentences, of_seeds + OTHERS]
