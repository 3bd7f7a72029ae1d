"""Results of a study: mean and spread over seeds, by setting and noise level."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.release.report import events_of
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.studies.grid import Grid, Labels, Run, row_name
from dpmac_cli.tasks.known import METRICS
from dpmac_cli.tasks.task import EvaluationMetric

#: Smaller differences are treated as rounding errors; equal ones leave a t-test without spread.
LEAST_SPREAD = 1e-9
#: Probability of a false positive in a whole column.
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs that differ only by their seed.

    Attributes:
        labels, column: labels of the row, and value of the column.
        epsilon: epsilon of one run; ``inf`` without privacy.
        values: test metric (nan if undefined) of finished runs, by seed.
        seconds: mean training time of the finished runs; nan if there are none.
        failures: reasons why other runs did not finish, by seed.
        standing: "best" if significantly so, "tied" if not significantly worse, "" otherwise.
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
        """Name of the row."""
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


@dataclass(frozen=True)
class Comparison:
    """Results of a study, row by row. :mod:`~dpmac_cli.studies.tables` renders them.

    ``epsilon`` covers all runs of the grid, and what they replaced; it is 0 if none is private.
    """

    grid: Grid
    cells: tuple[Cell, ...]
    epsilon: float


def collect(grid: Grid, failures: Mapping[int, str]) -> Comparison:
    """Read the results of a grid's runs; ``failures`` maps numbers of runs to reasons."""
    groups = itertools.groupby(enumerate(grid.runs), lambda pair: (pair[1].labels, pair[1].column))
    cells = [_cell(list(runs), failures) for _, runs in groups]
    metric = METRICS[grid.plan.settings.metric]
    standings = {
        column: iter(standing_of([cell for cell in cells if cell.column == column], metric))
        for column in {cell.column for cell in cells}
    }
    judged = tuple(replace(cell, standing=next(standings[cell.column])) for cell in cells)
    events = tuple(_events(grid.runs))
    return Comparison(grid, judged, total_epsilon(events, grid.plan.privacy.delta))


def _cell(runs: Sequence[tuple[int, Run]], failures: Mapping[int, str]) -> Cell:
    values, seconds, failed = {}, [], {}
    first = runs[0][1]
    privacy, event = first.plan.privacy, first.plan.privacy.event
    epsilon = total_epsilon((event,), privacy.delta) if privacy.private else math.inf
    key = METRICS[first.plan.settings.metric].key
    for number, run in runs:
        report = finished_report(run)
        if report is None:
            failed[run.seed] = failures.get(number, "not finished")
            continue
        if privacy.private and (did := events_of(run.folder)) != (event,):
            epsilon = max(epsilon, total_epsilon(did, privacy.delta))
        seconds.append(float(report["timings"]["training_seconds"]))
        value = report["test"].get(key)
        values[run.seed] = math.nan if value is None else float(value)
    return Cell(
        labels=first.labels,
        column=first.column,
        sigma=privacy.sigma,
        epsilon=epsilon,
        values=values,
        seconds=fmean(seconds) if seconds else math.nan,
        failures=failed,
    )


def finished_report(run: Run) -> Mapping[str, Any] | None:
    """Return a run's report if it is published and the run took all its steps.

    A run for an epsilon that was killed ends earlier by the steps that were lost.
    """
    if not folder.is_published(run.folder):
        return None
    report: dict[str, Any] = json.loads((run.folder / folder.REPORT).read_bytes())
    privacy, taken = run.plan.privacy, report["hyperparameters"]["steps"]
    whole = taken >= privacy.steps or privacy.target is not None
    return report if whole and report["state"] == "finished" else None


def _events(runs: Iterable[Run]) -> Iterator[TrainingEvent]:
    """Yield events of private runs, not merged, as each part begins its own epochs."""
    for run in runs:
        if run.plan.privacy.private and finished_report(run) is not None:
            yield from events_of(run.folder)
        elif run.plan.privacy.private:
            yield from begun_events(run.folder, run.plan.privacy.event, whole=True)


def standing_of(cells: Sequence[Cell], metric: EvaluationMetric) -> list[str]:
    """Return "best", "tied" or "" for each cell of a column."""
    known = [cell for cell in cells if cell.std is not None]
    if len(known) < 2:
        return ["" for _ in cells]
    best = max(known, key=lambda cell: metric.better(cell.mean))
    others = [cell for cell in known if cell is not best]
    worse = holm([paired_p_value(best.values, cell.values) for cell in others])
    tied = [cell for cell, rejected in zip(others, worse, strict=True) if not rejected]
    return [
        ("tied" if tied else "best") if cell is best else "tied" if cell in tied else ""
        for cell in cells
    ]


def paired_p_value(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the p-value of a paired t-test over common seeds; 1 if there are fewer than two."""
    from scipy.stats import ttest_1samp  # noqa: PLC0415  (a second to import)

    seeds = sorted(one.keys() & other.keys())
    differences = [one[seed] - other[seed] for seed in seeds]
    # Metrics are ratios of counts, so all differences may be equal by chance.
    if len(seeds) < 2 or stdev(differences) < LEAST_SPREAD:
        return 1.0
    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Return which hypotheses Holm's step-down method (1979) rejects."""
    ordered = list(enumerate(sorted(p_values)))
    kept = [p for rank, p in ordered if p > level / (len(p_values) - rank)]
    return [p < min(kept, default=math.inf) for p in p_values]
