"""Results of a study: means over seeds by setting and noise, and which differences are significant.

A comparison reads the reports of its runs. It does not know who trained them, or when.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.errors import InputError
from dpmac_cli.libraries import special
from dpmac_cli.release.report import events_of
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import begun_events
from dpmac_cli.studies.grid import Grid, Labels, Run, row_name
from dpmac_cli.tasks.metrics import EvaluationMetric
from dpmac_cli.tasks.task import METRICS

#: Smaller differences are treated as rounding errors; equal ones leave a t-test without spread.
LEAST_SPREAD = 1e-9
#: Probability of a false positive in a whole column, and of an interval that misses a difference.
LEVEL = 0.05
#: Fewer seeds are not tested: with two, a difference must be nine times its standard deviation.
FEWEST = 5


class Difference(NamedTuple):
    """Mean difference of two cells over the same seeds.

    Attributes:
        mean: mean of the paired differences.
        low, high: ends of its 95% interval.
        p_value: p-value of a mean of 0, by a two-sided t-test.
    """

    mean: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs that differ only by their seed.

    Attributes:
        labels, column: labels of the row, and value of the column.
        sigma: noise multiplier; 0 without privacy.
        epsilon: epsilon of one run; ``inf`` without privacy.
        values: test metric of each run that finished, by seed; nan if undefined.
        failures: why each of the other runs did not finish, by seed.
        seconds: mean training time of the finished runs; nan if there are none.
        standing: "best" if significantly so, "tied" if not significantly worse than the best mean,
            "" if so, or not tested.
        difference: difference from the best mean of the column; None for the best itself, and if
            not tested.
    """

    labels: Labels
    column: float
    sigma: float
    epsilon: float
    values: Mapping[int, float]
    failures: Mapping[int, str]
    seconds: float
    standing: str = ""
    difference: Difference | None = None

    @property
    def name(self) -> str:
        """Return the name of the row, such as "dp-macadam kappa paper"."""
        return row_name(self.labels)

    @property
    def mean(self) -> float:
        """Return the mean metric; nan if no run finished, or it is not defined."""
        values = self.values.values()
        return fmean(values) if values else math.nan

    @property
    def std(self) -> float | None:
        """Return the sample standard deviation of the metric; None for fewer than two values."""
        values = self.values.values()
        defined = len(values) > 1 and math.isfinite(self.mean)
        return stdev(values) if defined else None

    @property
    def tested(self) -> bool:
        """Return whether it has enough values for a test."""
        return self.std is not None and len(self.values) >= FEWEST


@dataclass(frozen=True)
class Comparison:
    """Results of a study, row by row, as :func:`collect` returns them.

    :mod:`~dpmac_cli.studies.written` renders them.

    Attributes:
        grid: the study.
        cells: one cell for each row and column of the table, in the order of the grid.
        epsilon: epsilon of all runs of the grid, and what they replaced; 0 if none is private.
    """

    grid: Grid
    cells: tuple[Cell, ...]
    epsilon: float


def collect(grid: Grid, failures: Mapping[Run, str]) -> Comparison:
    """Read the results of the runs of a study.

    A run that has not finished counts with all its planned steps in the epsilon of the study.

    Args:
        grid: the study.
        failures: why runs failed. Other runs without a report are "not finished".

    Raises:
        InputError: an older version of dpmac wrote a report, or one cannot be read.
    """
    cells = dict[tuple[Labels, float], Cell]()
    rivals = defaultdict[float, list[Cell]](list)
    for runs in grid.by_cell():
        cell = _cell(runs, failures)
        cells[cell.labels, cell.column] = cell
        rivals[cell.column].append(cell)
    for of_column in rivals.values():
        for cell in judge(of_column, METRICS[grid.plan.settings.metric]):
            cells[cell.labels, cell.column] = cell  # in its place
    events = tuple(_events(grid.runs))
    epsilon = total_epsilon(events, grid.plan.settings.delta)
    return Comparison(grid, tuple(cells.values()), epsilon)


def _cell(runs: Sequence[Run], failures: Mapping[Run, str]) -> Cell:
    """Return the cell of some runs.

    Its epsilon is that of its most expensive run: one that was killed and resumed may have taken
    more steps than planned.

    Args:
        runs: runs that differ only by their seed.
        failures: why runs failed.
    """
    values = dict[int, float]()
    unfinished = dict[int, str]()
    seconds = list[float]()
    first = runs[0]
    plan, event, delta = first.plan, first.plan.event, first.plan.settings.delta
    epsilon = total_epsilon((event,), delta) if plan.private else math.inf
    key = METRICS[plan.settings.metric].key
    for run in runs:
        report = finished_report(run)
        if report is None:
            unfinished[run.seed] = failures.get(run, "not finished")
            continue
        if plan.private:
            events = events_of(run.folder)
            if events != (event,):
                epsilon = max(epsilon, total_epsilon(events, delta))
        seconds.append(float(report["environment"]["seconds"]))
        score = score_in(report, key)
        values[run.seed] = math.nan if score is None else float(score)
    return Cell(
        labels=first.labels,
        column=first.column,
        sigma=event.noise_multiplier,
        epsilon=epsilon,
        values=values,
        failures=unfinished,
        seconds=fmean(seconds) if seconds else math.nan,
    )


def finished_report(run: Run) -> Mapping[str, Any] | None:
    """Return a run's report if it is published and the run took all its steps; otherwise None.

    A run for an epsilon that was killed ends earlier by the steps that were lost.

    Args:
        run: a run of a study, in training or not.

    Returns:
        The content of report.json as JSON values.

    Raises:
        InputError: an older version of dpmac wrote the report.
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
    plan = run.plan
    taken = report["network"]["steps"]
    complete = taken >= plan.event.steps or plan.settings.epsilon is not None
    return report if complete else None


def score_in(report: Mapping[str, Any], key: str) -> float | None:
    """Return a metric of a report.

    Args:
        report: the content of a report.json.
        key: key of the metric in ``scores``.

    Returns:
        Its value; None if it is not defined for these records, or not in the report.
    """
    value: float | None = (report["scores"] or {}).get(key, {}).get("value")
    return value


def _events(runs: Iterable[Run]) -> Iterator[TrainingEvent]:
    """Yield events of private runs, not merged, as each part begins its own epochs."""
    for run in runs:
        if not run.plan.private:
            continue
        if finished_report(run) is not None:
            yield from events_of(run.folder)
        else:
            yield from begun_events(run.folder, run.plan.all_planned, whole=True)


def judge(cells: Sequence[Cell], metric: EvaluationMetric) -> list[Cell]:
    """Return the cells of a column with their standings and differences from the best mean.

    Each tested cell is compared with the best one by a paired t-test, all together at
    :data:`LEVEL` by Holm's method. No cell is best if another one with results has too few of them
    for the test.

    Args:
        cells: cells of one column, with different labels.
        metric: the metric of their values.
    """
    tested = [cell for cell in cells if cell.tested]
    if len(tested) < 2:
        return list(cells)
    best = max(tested, key=lambda cell: metric.better(cell.mean))
    differences = dict[Labels, Difference]()
    p_values = list[float]()
    for cell in tested:
        difference = None if cell is best else paired(cell.values, best.values)
        if difference is not None:
            differences[cell.labels] = difference
            p_values.append(difference.p_value)
    worse = set(itertools.compress(differences, holm(p_values)))
    rivals = sum(bool(cell.values) for cell in cells) - 1
    judged = list[Cell]()
    for cell in cells:
        standing = "tied" if cell.tested and cell.labels not in worse else ""
        if cell is best and len(worse) == rivals:
            standing = "best"
        judged.append(replace(cell, standing=standing, difference=differences.get(cell.labels)))
    return judged


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Return the mean difference of two cells over the seeds that both have, by a paired t-test.

    Metrics are ratios of counts, so all differences may be equal by chance: then the test cannot
    tell them from 0.

    Args:
        one, other: values by seed.

    Returns:
        The difference one - other; None for fewer than :data:`FEWEST` common seeds.
    """
    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < FEWEST:
        return None
    differences = [one[seed] - other[seed] for seed in seeds]
    mean = fmean(differences)
    spread = stdev(differences)
    freedom = len(seeds) - 1
    if spread < LEAST_SPREAD:
        return Difference(mean, mean, mean, 1.0)
    error = spread / math.sqrt(len(seeds))
    half = float(special.stdtrit(freedom, 1 - LEVEL / 2)) * error
    p_value = 2 * float(special.stdtr(freedom, -abs(mean) / error))
    return Difference(mean, mean - half, mean + half, p_value)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which hypotheses Holm's step-down method (1979) rejects.

    Hypotheses are tested from the smallest p-value on, the k-th of m (from 0) at LEVEL / (m - k),
    until one is not rejected. So a true one is rejected with a probability of at most LEVEL.

    Args:
        p_values: one p-value per hypothesis.

    >>> holm([0.01, 0.04, 0.03, 0.005])
    [True, False, False, True]
    """
    first_not_rejected = math.inf
    for rank, p_value in enumerate(sorted(p_values)):
        if p_value > LEVEL / (len(p_values) - rank):
            first_not_rejected = p_value
            break
    return [p_value < first_not_rejected for p_value in p_values]
