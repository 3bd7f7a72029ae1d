"""Files of a comparison: tables, values for programs, remarks, figures and a web page.

Every form has the remarks that the figures need: what the runs cost together, whether a difference
can be told from chance, and that named seeds protect from nobody who knows them.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from dpmac_cli.release.plots import curves, means
from dpmac_cli.release.report import Versioned
from dpmac_cli.runs import folder
from dpmac_cli.runs.headers import Number, Part
from dpmac_cli.studies.grid import Grid, Labels, Run, row_name
from dpmac_cli.studies.results import LEVEL, Cell, Comparison, finished_report
from dpmac_cli.tasks.metrics import EvaluationMetric, number
from dpmac_cli.tasks.task import METRICS

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
#: What publishing all runs costs, filled with the sum of their costs: with one run of each seed,
#: and with several.
TOTAL = "publishing anything learnt from all of them, such as which is best, costs {} in total."
ONE_SEED = (
    "those of one seed share batches and noise, which can be subtracted from two of their models. "
    "So no epsilon bounds anything learnt from all of them, such as which is best. Publish at most "
    "one of them. Drawn independently, all would cost {} in total."
)
EXACT = " Test scores are exact, and not covered by any epsilon."
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
        del row["values"], row["failures"]
        low, high = row.pop("difference_interval") or (None, None)
        rows.append({**dict(cell.labels), **row, "difference_low": low, "difference_high": high})
    return to_csv([*rows[0]], rows)


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
    titles, costs = [""], ["epsilon"]
    for column, epsilon in epsilons.items():
        titles.append(f"{comparison.grid.column} {column:g}")
        costs.append("no privacy" if math.isinf(epsilon) else format_epsilon(epsilon))
    means = [[*costs, ""]]
    differences = list[list[str]]()
    for labels, of_row in rows_of.items():
        of_means = [_as_cell(labels)]
        of_differences = [_as_cell(labels)]
        for column in epsilons:
            of_column = of_row.get(column)
            of_means.append(_mean(of_column, metric))
            of_differences.append(_difference(of_column, metric))
        means.append([*of_means, _time(of_row.values())])
        if set(of_differences[1:]) != {MISSING}:
            differences.append(of_differences)
    parts = [_table([*titles, "a run takes"], means), *remarks(comparison)]
    if differences:
        parts += [DIFFERENCES, _table(titles, differences)]
    return "\n\n".join(parts) + "\n"


def _time(cells: Iterable[Cell]) -> str:
    """Return the mean training time of the finished runs of a row."""
    seconds = [cell.seconds for cell in cells if cell.values]
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
        version = Versioned.model_validate_json(values, strict=True).schema_version
        if version not in (None, SCHEMA_VERSION):
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
    cells = dict[str, list[Mapping[str, Any]]]()
    for runs in grid.by_cell():
        points = list(_course(runs, metric))
        if points:
            name = f"{row_name(runs[0].labels)}, {grid.column} {runs[0].column:g}"
            cells[name] = points
    return curves(cells, metric)


def _course(runs: Iterable[Run], metric: EvaluationMetric) -> Iterator[Mapping[str, Any]]:
    """Yield the mean score of finished runs after each epoch, like lines of metrics.jsonl.

    Args:
        runs: the runs of one cell, which are evaluated after the same epochs.
        metric: the score. Runs that release one score at the end have one line.
    """
    scores = defaultdict[float, list[float]](list)
    spent = dict[float, float | None]()
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
        mean = fmean(scores[epoch])
        yield {"epoch": epoch, "epsilon": spent[epoch], metric.logged: mean}


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
    low = _number(cell.difference.low, metric)
    high = _number(cell.difference.high, metric)
    return f"{_number(cell.difference.mean, metric)} [{low}, {high}]"


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
    epsilon = comparison.epsilon
    cells = comparison.cells
    sentences = list[str]()
    rivals = Counter[float]()
    tested = Counter[float]()
    few, runs, unfinished = False, 0, 0
    for cell in cells:
        rivals[cell.column] += 1
        tested[cell.column] += cell.tested
        few = few or (bool(cell.values) and not cell.tested)
        runs += len(cell.values) + len(cell.failures)
        unfinished += len(cell.failures)
    if max(tested.values()) > 1:
        sentences.append(TEST)
        if few:
            sentences.append(PART_TEST)
    elif max(rivals.values()) > 1:
        sentences.append(NO_TEST)
    if not math.isfinite(epsilon) or epsilon == 0:
        return sentences
    counted = f", {unfinished} of them not finished and counted in full," if unfinished else ""
    if runs > 1 or epsilon > cells[0].epsilon:
        settings = comparison.grid.plan.settings
        together = (ONE_SEED if len(cells) > 1 else TOTAL).format(
            cost_in_words(epsilon, settings.delta)
        )
        sentences.append(
            f"Each epsilon is of one run chosen in advance. The {runs} runs{counted} use the same "
            f"records: {together}" + EXACT * (not settings.cover_scores)
        )
    return [*sentences, SEEDS + OTHERS]
