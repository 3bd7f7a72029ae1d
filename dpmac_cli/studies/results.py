"""Results of a study: mean and spread over seeds, by setting and noise level."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError
from dpmac_cli.libraries import special
from dpmac_cli.release.report import events_of
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.studies.grid import Grid, Labels, Run, row_name
from dpmac_cli.tasks.task import METRICS, EvaluationMetric

if TYPE_CHECKING:
    pass

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
    """Results of a study, row by row. :mod:`~dpmac_cli.studies.written` renders them.

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
