"""Results of a study: mean and spread over seeds, by setting and noise level."""

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import cost_in_words, format_epsilon
from dpmac_cli.config.records import AnyNumber
from dpmac_cli.errors import InputError, first_fault
from dpmac_cli.files import finite_or_none, to_csv, to_json, write_atomically
from dpmac_cli.libraries import special
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.release.card import web_page
from dpmac_cli.release.plots import Point, curves, means
from dpmac_cli.release.report import events_of
from dpmac_cli.runs import folder
from dpmac_cli.runs.headers import Number, Part
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.studies.grid import Grid, Labels, Run, row_name
from dpmac_cli.tasks.task import METRICS, EvaluationMetric, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Smaller differences are treated as rounding errors; equal ones leave a t-test without spread.
LEAST_SPREAD = 1e-9
#: Probability of a false positive in a whole column, and of an interval that misses a difference.
LEVEL = 0.05
#: Fewer seeds are not tested: with two, a difference must be nine times its standard deviation.
FEWEST = 5


#: Place of a cell in the table: labels of its row, and value of its column.
Place: TypeAlias = tuple[Labels, float]


class Difference(NamedTuple):
    """Mean of paired differences, the ends of its 95% interval, and the p-value of a mean of 0."""

    mean: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs that differ only by their seed.

    Attributes:
        labels, column: labels of the row, and value of the column.
        epsilon: epsilon of one run; ``inf`` without privacy.
        values: test metric (nan if undefined) of finished runs, by seed.
        seconds: mean training time of the finished runs; nan if there are none.
        failures: reasons why other runs did not finish, by seed.
        standing: "best" if significantly so, "tied" if not significantly worse than the best mean,
            "" if so, or not tested.
    """

    labels: Labels
    column: float
    sigma: float
    epsilon: float
    values: Mapping[int, float]
    seconds: float
    failures: Mapping[int, str]
    standing: str = ""

    @property
    def name(self) -> str:
        """Return the name of the row, such as "dp-macadam kappa paper"."""
        return row_name(self.labels)

    @property
    def mean(self) -> float:
        """Return the mean metric; nan if no run finished, or it is not defined."""
        return fmean(self.values.values()) if self.values else math.nan

    @property
    def std(self) -> float | None:
        """Return the sample standard deviation of the metric; None for fewer than two values."""
        defined = len(self.values) > 1 and math.isfinite(self.mean)
        return stdev(self.values.values()) if defined else None

    @property
    def tested(self) -> bool:
        """Return whether it has enough values for a test."""
        return self.std is not None and len(self.values) >= FEWEST


@dataclass(frozen=True)
class Comparison:
    """Results of a study, row by row. :mod:`~dpmac_cli.studies.results` renders them.

    Attributes:
        epsilon: epsilon of all runs of the grid, and what they replaced; 0 if none is private.
        differences: difference of a cell's metric from the best mean of its column, by the cell's
            labels and column; without the best itself and those that are not tested.
    """

    grid: Grid
    cells: tuple[Cell, ...]
    epsilon: float
    differences: Mapping[Place, Difference] = field(default_factory=dict)


def collect(grid: Grid, failures: Mapping[int, str]) -> Comparison:
    """Read the results of a grid's runs; ``failures`` maps numbers of runs to reasons."""
    groups = itertools.groupby(enumerate(grid.runs), lambda pair: (pair[1].labels, pair[1].column))
    cells = [_cell(list(runs), failures) for _, runs in groups]
    metric = METRICS[grid.plan.settings.metric]
    judgements = {
        column: judge([cell for cell in cells if cell.column == column], metric)
        for column in {cell.column for cell in cells}
    }
    judged = (
        replace(cell, standing=judgements[cell.column][0].get(cell.labels, "")) for cell in cells
    )
    differences = {
        (labels, column): difference
        for column, (_, apart) in judgements.items()
        for labels, difference in apart.items()
    }
    events = tuple(_events(grid.runs))
    epsilon = total_epsilon(events, grid.plan.settings.delta)
    return Comparison(grid, tuple(judged), epsilon, differences)


def _cell(runs: Sequence[tuple[int, Run]], failures: Mapping[int, str]) -> Cell:
    values, seconds, failed = {}, [], {}
    first = runs[0][1]
    plan, event, delta = first.plan, first.plan.event, first.plan.settings.delta
    epsilon = total_epsilon((event,), delta) if plan.private else math.inf
    key = METRICS[plan.settings.metric].key
    for place, run in runs:
        report = finished_report(run)
        if report is None:
            failed[run.seed] = failures.get(place, "not finished")
            continue
        if plan.private and (did := events_of(run.folder)) != (event,):
            epsilon = max(epsilon, total_epsilon(did, delta))
        seconds.append(float(report["environment"]["seconds"]))
        value = score_in(report, key)
        values[run.seed] = math.nan if value is None else float(value)
    return Cell(
        labels=first.labels,
        column=first.column,
        sigma=event.noise_multiplier,
        epsilon=epsilon,
        values=values,
        seconds=fmean(seconds) if seconds else math.nan,
        failures=failed,
    )


def finished_report(run: Run) -> Mapping[str, Any] | None:
    """Return a run's report if it is published and the run took all its steps.

    A run for an epsilon that was killed ends earlier by the steps that were lost. Raises InputError
    if an older version wrote the report.
    """
    if not folder.is_published(run.folder):
        return None
    report: dict[str, Any] = json.loads((run.folder / folder.REPORT).read_bytes())
    if "schema_version" in report:  # its name before the second format
        raise InputError(
            f"{run.folder} was written by an older version of dpmac. Compare again with another "
            "{out}."
        )
    if report["state"] != "finished":
        return None
    plan, taken = run.plan, report["network"]["steps"]
    whole = taken >= plan.event.steps or plan.settings.epsilon is not None
    return report if whole else None


def score_in(report: Mapping[str, Any], key: str) -> float | None:
    """Return a metric of a report; None if it is not defined, or not in it."""
    value: float | None = (report["scores"] or {}).get(key, {}).get("value")
    return value


def _events(runs: Iterable[Run]) -> Iterator[TrainingEvent]:
    """Yield events of private runs, not merged, as each part begins its own epochs."""
    for run in runs:
        if run.plan.private and finished_report(run) is not None:
            yield from events_of(run.folder)
        elif run.plan.private:
            yield from begun_events(run.folder, run.plan.all_planned, whole=True)


def judge(
    cells: Sequence[Cell], metric: EvaluationMetric
) -> tuple[dict[Labels, str], dict[Labels, Difference]]:
    """Return standings of the cells of a column, and their differences from the best mean.

    Both are by the labels of a cell, without those that are not tested, and the second without the
    best. None is best if another one with results has too few of them for the test.
    """
    known = [cell for cell in cells if cell.tested]
    if len(known) < 2:
        return {}, {}
    best = max(known, key=lambda cell: metric.better(cell.mean))
    differences = {
        cell.labels: difference
        for cell in known
        if cell is not best and (difference := paired(cell.values, best.values)) is not None
    }
    worse = holm([difference.p_value for difference in differences.values()])
    lost = {labels for labels, rejected in zip(differences, worse, strict=True) if rejected}
    standings = {cell.labels: "" if cell.labels in lost else "tied" for cell in known}
    if len(lost) == sum(bool(cell.values) for cell in cells) - 1:
        standings[best.labels] = "best"
    return standings, differences


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Return the mean difference of two cells over the seeds that both have, by a paired t-test.

    None for fewer than :data:`FEWEST` such seeds. Metrics are ratios of counts, so all differences
    may be equal by chance: then the test cannot tell them from 0.
    """
    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < FEWEST:
        return None
    differences = [one[seed] - other[seed] for seed in seeds]
    mean, spread, free = fmean(differences), stdev(differences), len(seeds) - 1
    if spread < LEAST_SPREAD:
        return Difference(mean, mean, mean, 1.0)
    error = spread / math.sqrt(len(seeds))
    half = float(special.stdtrit(free, 1 - LEVEL / 2)) * error
    p_value = 2 * float(special.stdtr(free, -abs(mean) / error))
    return Difference(mean, mean - half, mean + half, p_value)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return which hypotheses Holm's step-down method (1979) rejects."""
    ordered = list(enumerate(sorted(p_values)))
    kept = [p for rank, p in ordered if p > level / (len(p_values) - rank)]
    return [p < min(kept, default=math.inf) for p in p_values]


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


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the content of compare.json: ``rows`` for programs, and remarks."""
    grid = comparison.grid
    return {
        "schema_version": SCHEMA_VERSION,
        "dataset": grid.plan.facts.typed,
        "delta": grid.plan.settings.delta,
        "metric": grid.plan.settings.metric,
        "axes": list(grid.axes),
        "column": grid.column,
        "rows": list(_rows(comparison)),
        "epsilon_of_the_study": finite_or_none(comparison.epsilon),
        "remarks": remarks(comparison),
    }


def _rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the cells of a comparison as JSON values."""
    for cell in comparison.cells:
        yield _row(cell, comparison.differences.get((cell.labels, cell.column)))


def _row(cell: Cell, difference: Difference | None) -> dict[str, Any]:
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
        "difference": None if difference is None else difference.mean,
        "difference_interval": None if difference is None else [difference.low, difference.high],
        "training_seconds": finite_or_none(cell.seconds),
    }


def as_csv(comparison: Comparison) -> str:
    """Return one line per cell."""
    rows = list[dict[str, Any]]()
    for row in _rows(comparison):
        low, high = row.pop("difference_interval") or (None, None)
        rows.append({**row, "difference_low": low, "difference_high": high})
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
        rows.append([_as_cell(labels), *(_mean(cell, metric) for cell in cells), time])
    columns = [f"{comparison.grid.column} {column:g}" for column in epsilons]
    parts = [_table(["", *columns, "a run takes"], rows), *remarks(comparison)]
    compared = comparison.differences
    apart = [
        [_as_cell(labels), *(_difference(compared.get((labels, c)), metric) for c in epsilons)]
        for labels in dict.fromkeys(labels for labels, _ in compared)
    ]
    if apart:
        parts += [DIFFERENCES, _table(["", *columns], apart)]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table in Markdown."""
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    return "\n".join(
        f"| {' | '.join(map(str.ljust, cells, widths))} |"
        for cells in (head, ["-" * width for width in widths], *rows)
    )


def _as_cell(labels: Labels) -> str:
    return row_name(labels).replace("|", "\\|")


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


#: Largest number of characters of a label in a figure.
LONGEST = 500


class _Row(Part):
    """A row of compare.json. Its other keys are labels, by the names of the axes."""

    model_config = ConfigDict(extra="allow")

    sigma: Number
    epsilon: Number | None
    mean: AnyNumber | None
    std: Number | None


class _Study(Part):
    """Values of compare.json that a web page shows."""

    schema_version: int
    dataset: str
    metric: Literal[tuple(METRICS)]  # type: ignore[valid-type]
    axes: Annotated[tuple[str, ...], Field(min_length=1, max_length=100)]
    column: Literal["sigma", "epsilon"]
    rows: Annotated[tuple[_Row, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for row in self.rows:
            labels = [getattr(row, axis, None) for axis in self.axes]
            if not all(isinstance(label, str) and len(label) <= LONGEST for label in labels):
                raise ValueError("a row has no label of an axis, or one that is too long")
            if getattr(row, self.column) is None:
                raise ValueError(f"a row has no {self.column}")
        return self


def study_page(out: Path) -> str:
    """Return a web page of a study, from the files of :func:`write_comparison`.

    Raises InputError if its files cannot be read.
    """
    remedy = "Use the output folder of dpmac compare."
    _, table = folder.read_run_file(out, COMPARE_MD, remedy)
    file, values = folder.read_run_file(out, COMPARE_JSON, remedy)
    try:
        study = _Study.model_validate_json(values, strict=True).model_dump()
    except ValueError as failure:
        why = first_fault(failure)
        raise InputError(f"{file} is not a comparison of dpmac ({why}). {remedy}") from failure
    if study["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{file} was written by another version of dpmac: compare again.")
    title = f"# Comparison on {study['dataset']}: test {study['metric']}, mean and deviation\n\n"
    picture = means(study, [*OPTIMIZERS], share=METRICS[study["metric"]].share)
    return web_page(title + table.decode(), {"The same as a picture": picture})


def study_figure(grid: Grid) -> "Figure":
    """Draw the mean score of each cell over epsilon, and over epochs, from its finished runs."""
    metric = METRICS[grid.plan.settings.metric]
    cells = dict[str, list[Point]]()
    groups = itertools.groupby(grid.runs, lambda run: (run.labels, run.column))
    for (labels, column), runs in groups:
        points = [*_course(runs, metric)]
        if points:
            cells[f"{row_name(labels)}, {grid.column} {column:g}"] = points
    return curves(cells, metric.title, share=metric.share)


def _course(runs: Iterable[Run], metric: EvaluationMetric) -> Iterator[Point]:
    """Yield the mean score of finished runs after each epoch, from their metrics.jsonl."""
    scores, spent = defaultdict[float, list[float]](list), dict[float, float | None]()
    for run in runs:
        if finished_report(run) is None:
            continue
        for text in (run.folder / folder.METRICS).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if (score := line.get(metric.logged)) is not None:
                scores[line["epoch"]].append(score)
                spent[line["epoch"]] = line["epsilon"]
    for epoch in sorted(scores):
        yield Point(epoch, spent[epoch], fmean(scores[epoch]))


def _shown(value: float, metric: EvaluationMetric) -> str:
    """Return a value of a metric, of a share in percent."""
    return f"{100 * value:.2f}" if metric.share else number(value)


def _difference(difference: Difference | None, metric: EvaluationMetric) -> str:
    """Return the difference of a cell from the best mean, with its interval."""
    if difference is None:
        return MISSING
    mean, low, high, _ = difference
    return f"{_shown(mean, metric)} [{_shown(low, metric)}, {_shown(high, metric)}]"


def _mean(cell: Cell | None, metric: EvaluationMetric) -> str:
    """Return mean and spread, of shares in percent; bold if best, with a tilde if tied."""
    if cell is None or math.isnan(cell.mean):
        return MISSING
    spread = "" if cell.std is None else f" ± {_shown(cell.std, metric)}"
    text = f"{_shown(cell.mean, metric)}{spread}"
    return {"best": f"**{text}**", "tied": f"{text} ~"}.get(cell.standing, text)


def remarks(comparison: Comparison) -> list[str]:
    """Return remarks on significance, on the cost of all runs, and on seeds and other runs."""
    rivals = Counter(cell.column for cell in comparison.cells)
    tested = Counter(cell.column for cell in comparison.cells if cell.tested)
    said = []
    if max(tested.values(), default=0) > 1:
        said.append(TEST)
        if any(cell.values and not cell.tested for cell in comparison.cells):
            said.append(PART_TEST)
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
            f"{cost_in_words(epsilon, comparison.grid.plan.settings.delta)} in total."
        )
    return [*said, SEEDS + (len(cells) > 1) * ONE_SEED + OTHERS]
