"""The outcome of a study: a row a setting, a column a noise level, mean and spread over seeds."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import yaml

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.budget import training_event
from dpmac_cli.config.resolve import to_yaml
from dpmac_cli.errors import InputError
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import attempts
from dpmac_cli.runs.listing import Entry, find_runs
from dpmac_cli.runs.recount import events_of
from dpmac_cli.storage import files
from dpmac_cli.studies.grid import Grid, Run

#: Settings that tell no run from another.
ASIDE = ("device", "secure", "dataset")
#: Differences nearer to one another than rounding is are equal, and leave a t-test without spread.
LEAST_SPREAD = 1e-9
#: The chance of calling a difference real that is not, over a whole column.
LEVEL = 0.05
TEST = (
    "Bold: better than every other of its column by a paired t-test over seeds (two-sided, "
    f"{LEVEL:.0%} over the column by Holm's method). Tied with the best otherwise: ~."
)
NO_TEST = (
    "Nothing is marked as best: with fewer than two finished runs a row, there is no telling a "
    "real difference from chance."
)


@dataclass(frozen=True)
class Cell:
    """The runs that differ by their seed alone.

    Attributes:
        labels: of the row. column: value of the column.
        sigma: noise multiplier. epsilon: of one run; ``inf`` without privacy.
        accuracies: test accuracy by seed, of the runs that finished.
        failures: why others did not, by seed.
        seconds: of training, mean; nan if none finished.
        standing: "best" if really so, "tied" if not told apart from it, "" otherwise.
        histories: (steps, accuracies) of each finished run.
    """

    labels: tuple[tuple[str, str], ...]
    column: float
    sigma: float
    epsilon: float
    accuracies: Mapping[int, float]
    failures: Mapping[int, str]
    seconds: float
    standing: str
    histories: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]

    @property
    def mean(self) -> float:
        """Of the accuracies, 0 to 1; nan if there is none."""
        return fmean(self.accuracies.values()) if self.accuracies else math.nan

    @property
    def std(self) -> float | None:
        """Their sample standard deviation; None of fewer than two."""
        return stdev(self.accuracies.values()) if len(self.accuracies) > 1 else None

    @property
    def name(self) -> str:
        """The row in a few words."""
        return " ".join(
            value if key == "optimizer" else f"{key} {value}" for key, value in self.labels if value
        )


@dataclass(frozen=True)
class Comparison:
    """A whole table.

    Attributes:
        column: "sigma" or "epsilon". axes: settings that tell rows apart.
        cells: row by row.
        seeds: asked for.
        bill: epsilon of all runs of the study together, at ``delta``.
        remarks: what must be said beside it.
        study: its name, the same wherever it lies.
        beside: other runs on the same data in the folder of its runs.
        bill_beside: epsilon of all runs of the study and of those; ``inf`` where what they did
            cannot be read, or has no price together.
        beside_plain: how many of them had no privacy, for which no epsilon holds.
    """

    column: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    dataset: str
    delta: float
    bill: float
    remarks: tuple[str, ...]
    study: str
    beside: int
    bill_beside: float
    beside_plain: int = 0

    @property
    def rows(self) -> list[tuple[str, list[Cell | None]]]:
        """Names and cells, a cell for each of :attr:`columns`."""
        first: dict[tuple[tuple[str, str], ...], Cell] = {}
        for cell in self.cells:
            first.setdefault(cell.labels, cell)
        by_place = {(cell.labels, cell.column): cell for cell in self.cells}
        return [
            (cell.name, [by_place.get((cell.labels, column)) for column in self.columns])
            for cell in first.values()
        ]

    @property
    def columns(self) -> list[float]:
        """Values of the column setting, in the order given."""
        return list(dict.fromkeys(cell.column for cell in self.cells))

    def epsilon_of(self, column: float) -> float:
        """What a run in a column costs: the most, where its rows differ."""
        return max(cell.epsilon for cell in self.cells if cell.column == column)


def collect(grid: Grid, failures: Mapping[int, str]) -> Comparison:
    """Read what the runs of a grid have left.

    Args:
        grid: the study.
        failures: why runs failed, by their number in the grid.
    """
    groups = itertools.groupby(enumerate(grid.runs), lambda pair: (pair[1].labels, pair[1].column))
    cells = [_cell(labels, column, list(runs), failures) for (labels, column), runs in groups]
    first = grid.runs[0].config
    events = tuple(_events(grid.runs))
    bill = total_epsilon(events, first.delta)
    beside = list(_beside(grid))
    others = [entry for entry in beside if entry.private is not False]
    return Comparison(
        grid.column,
        grid.axes,
        tuple(_judged(cells)),
        grid.seeds,
        first.dataset,
        first.delta,
        bill,
        tuple(_about_the_test(cells)),
        grid.name,
        len(beside),
        _together(events, others, first.delta) if others else bill,
        len(beside) - len(others),
    )


def _about_the_test(cells: Sequence[Cell]) -> Iterator[str]:
    """How rows were told apart, where there are several in a column."""
    rivals = Counter(cell.column for cell in cells)
    tested = Counter(cell.column for cell in cells if len(cell.accuracies) > 1)
    if max(tested.values(), default=0) > 1:
        yield TEST
    elif max(rivals.values()) > 1:
        yield NO_TEST


def _cell(
    labels: tuple[tuple[str, str], ...],
    column: float,
    runs: Sequence[tuple[int, Run]],
    failures: Mapping[int, str],
) -> Cell:
    accuracies, seconds, histories, failed = {}, [], [], {}
    config = runs[0][1].config
    event = training_event(config, config.total_steps)
    epsilon = math.inf if config.no_dp else total_epsilon((event,), config.delta)
    for number, run in runs:
        report = finished_report(run)
        if report is None:
            failed[run.seed] = failures.get(number, "not finished")
            continue
        if not config.no_dp and (did := events_of(run.folder)) != (event,):
            epsilon = max(epsilon, total_epsilon(did, config.delta))
        accuracies[run.seed] = float(report["test"]["accuracy"])
        seconds.append(float(report["timings"]["training_seconds"]))
        lines = files.read_lines(run.folder / folder.METRICS)
        steps = tuple(int(line["step"]) for line in lines)
        histories.append((steps, tuple(float(line["test_accuracy"]) for line in lines)))
    mean, sigma = fmean(seconds) if seconds else math.nan, config.sigma or 0.0
    told = (accuracies, failed, mean, "", tuple(histories))
    return Cell(labels, column, sigma, epsilon, *told)


def finished_report(run: Run) -> dict[str, Any] | None:
    """A run's report, if it and the metrics are whole and the run took all of its steps."""
    if not folder.vouched(run.folder, folder.METRICS):
        return None
    if folder.reported_steps(run.folder) < run.config.total_steps:
        return None
    report: dict[str, Any] = json.loads((run.folder / folder.REPORT).read_bytes())
    return report if report.get("state") == "finished" else None


def was_changed(run: Run) -> bool:
    """Whether what lies in a run's folder has settings of its own, by ``--resume`` for example."""
    try:
        kept = yaml.safe_load((run.folder / folder.CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # there is none, or it is damaged, which is looked after elsewhere
    if not isinstance(kept, dict):
        return False
    asked = yaml.safe_load(to_yaml(run.config))
    both = (kept.keys() & asked.keys()) - set(ASIDE)  # a version of before has fewer
    longer = folder.reported_steps(run.folder) > run.config.total_steps
    return longer or any(kept[name] != asked[name] for name in both)


def _events(runs: Iterable[Run]) -> Iterator[TrainingEvent]:
    """Yield events of all attempts at private runs, not added up: each begins its own epochs."""
    for run in runs:
        if run.config.no_dp:
            continue
        if finished_report(run) is not None:
            yield from events_of(run.folder, attempts=True)
        else:
            yield from attempts(run.folder, training_event(run.config), whole=True)


def _beside(grid: Grid) -> Iterator[Entry]:
    """Yield other runs in the study's folder on data of the same name; damaged ones count."""
    first = grid.runs[0]
    own = {run.folder.resolve() for run in grid.runs}
    for entry in find_runs([first.folder.parent]):
        same = entry.dataset in (None, first.config.dataset_name)
        if same and entry.folder.resolve() not in own:
            yield entry


def _together(events: tuple[TrainingEvent, ...], others: Iterable[Entry], delta: float) -> float:
    """Epsilon of a study and of other runs; ``inf`` where that cannot be read, or has no price."""
    try:
        for entry in others:
            if entry.dataset is None:
                return math.inf
            events = (*events, *events_of(entry.folder, attempts=True))
        return total_epsilon(events, delta)
    except InputError:  # one cannot be read, or some were sampled under another adjacency
        return math.inf


def _judged(cells: Sequence[Cell]) -> list[Cell]:
    """Give each cell its standing within its column."""
    columns: dict[float, list[Cell]] = {}
    for cell in cells:
        columns.setdefault(cell.column, []).append(cell)
    standings = {column: iter(standing_of(rivals)) for column, rivals in columns.items()}
    return [replace(cell, standing=next(standings[cell.column])) for cell in cells]


def standing_of(cells: Sequence[Cell]) -> list[str]:
    """ "best", "tied" or "" for the cells of a column."""
    known = [cell for cell in cells if len(cell.accuracies) > 1]
    if len(known) < 2:
        return ["" for _ in cells]
    best = max(known, key=lambda cell: cell.mean)
    others = [cell for cell in known if cell is not best]
    worse = holm([paired_p_value(best.accuracies, cell.accuracies) for cell in others])
    tied = [cell for cell, rejected in zip(others, worse, strict=True) if not rejected]
    return [
        ("tied" if tied else "best") if cell is best else "tied" if cell in tied else ""
        for cell in cells
    ]


def paired_p_value(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Of the difference over the seeds that both have; 1 where there are fewer than two."""
    from scipy.stats import ttest_rel  # noqa: PLC0415  (a second to import)

    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < 2:
        return 1.0
    differences = [one[seed] - other[seed] for seed in seeds]
    if stdev(differences) < LEAST_SPREAD:  # accuracies are counts: equal differences are a chance
        return 1.0
    result = ttest_rel([one[seed] for seed in seeds], [other[seed] for seed in seeds])
    return float(result.pvalue)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which hypotheses are rejected by Holm's step-down method (1979)."""
    ordered = list(enumerate(sorted(p_values)))
    kept = [p for rank, p in ordered if p > level / (len(p_values) - rank)]
    return [p < min(kept, default=math.inf) for p in p_values]
