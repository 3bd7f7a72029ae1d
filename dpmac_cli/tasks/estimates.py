"""Results of a network that predicts numbers on test records."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit, xlogy

from dpmac_cli.plots import new_figure, write_figure
from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.tasks.intervals import TAIL, Floats
from dpmac_cli.tasks.task import Interval, Results, Table, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Number of bootstrap resamples, and largest number of their weights in memory at a time.
RESAMPLES, AT_A_TIME = 1000, 4_000_000
#: Multiples of a covered record's share, so that sums of them are exact.
WHOLE = 2**40
#: Smallest predicted mean of a count, as a share of the range, for the deviance.
LEAST = 1e-6
#: Largest number of records in a picture.
DRAWN = 5000
#: Said of a model that has learned nothing.
NOTHING_LEARNED = (
    "{} not below {} of predicting the median of the test records for all. If longer training does "
    "not help, the noise is too large to learn: use a larger --epsilon, more records, a narrower "
    "range of the target, or a smaller network (--model linear)."
)
#: Least and largest value of metrics that are not errors.
LIMITS: Mapping[str, Interval] = {"r2": (-math.inf, 1.0), "at-or-below": (0.0, 1.0)}


class NumberResults(Results):
    """Predicted and true numbers of test records.

    Attributes:
        task: what is predicted.
        unit_of: index of each record's unit of privacy, shape (records,); None if each record is
            one.
    """

    task: Task
    unit_of: NDArray[np.int64] | None

    @property
    @abstractmethod
    def records(self) -> int:
        """Number of records."""

    @abstractmethod
    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of weighted records, each of shape (sets,).

        Args:
            weights: weights of the records, shape (records, sets).
        """

    def metric(self, name: str) -> float:
        """Return a metric by its name; nan if it is not defined."""
        return self.metrics()[name]

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the task by name."""
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> dict[str, float]:
        found = self.weighted(np.ones((self.records, 1)))
        return {metric.name: float(found[metric.name][0]) for metric in self.task.metrics}

    def intervals(self, metrics: Mapping[str, float]) -> dict[str, Interval]:
        """Return the 95% interval of each metric, by bootstrap over units with a fixed seed.

        The distance to both ends is that of Student's distribution with as many degrees of freedom
        as units, less one. nan for fewer than two units.
        """
        owners = np.arange(self.records) if self.unit_of is None else self.unit_of
        units = int(owners.max()) + 1
        if units < 2:
            return dict.fromkeys(metrics, (math.nan, math.nan))
        drawn = self._resampled(owners, units)
        reach = stdtrit(units - 1, 1 - TAIL) * math.sqrt(units / (units - 1))
        return {name: _around(name, value, drawn[name], reach) for name, value in metrics.items()}

    def _resampled(self, owners: NDArray[np.int64], units: int) -> dict[str, Floats]:
        """Return metrics of bootstrap resamples of the units, each of shape (resamples,)."""
        generator = np.random.default_rng(0)
        drawn: list[dict[str, Floats]] = []
        left = RESAMPLES
        while left > 0:
            count = min(left, max(1, AT_A_TIME // len(owners)))
            left -= count
            picked = generator.multinomial(units, np.full(units, 1 / units), size=count)
            drawn.append(self.weighted(picked.T[owners].astype(float)))
        return {name: np.concatenate([part[name] for part in drawn]) for name in drawn[0]}

    def values(self) -> dict[str, Any]:
        """Return all metrics and the interval of the error as JSON values."""
        metrics = self.metrics()
        headline = self.task.headline
        ends = self.intervals({headline.name: metrics[headline.name]})[headline.name]
        found = {metric.key: finite_or_none(metrics[metric.name]) for metric in self.task.metrics}
        return found | {f"{headline.key}_interval": [*map(finite_or_none, ends)]}


def _around(name: str, value: float, resampled: Floats, reach: float) -> Interval:
    """Return the interval within ``reach`` standard deviations of the resampled metric."""
    if not math.isfinite(value):
        return math.nan, math.nan
    half = reach * float(np.std(resampled[np.isfinite(resampled)]))
    low, high = LIMITS.get(name, (0.0, math.inf))
    return max(low, value - half), min(high, value + half)


@dataclass(frozen=True, eq=False)
class Estimates(NumberResults):
    """Predicted and true numbers of test records, in the units of the target.

    Attributes:
        truth, guess: targets and predictions, float64, shape (records,).
        task, unit_of: see :class:`NumberResults`.
        range: lowest and highest number of targets and predictions.
    """

    truth: Floats
    guess: Floats
    task: Task
    range: Interval
    unit_of: NDArray[np.int64] | None = None

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self.truth)

    def details(self) -> dict[str, Any]:
        """Return the range of the targets."""
        return {"target": self.task.facts["target"]}

    def table(self) -> Table | None:
        """Return None: metrics say all."""
        return None

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Return absolute errors as shares of the range, rounded down."""
        assert not by_class, "there are no classes"  # noqa: S101
        return np.floor(self.shares * WHOLE).astype(np.int64)[:, None], WHOLE

    @property
    def shares(self) -> Floats:
        """Absolute errors as shares of the range, 0 to 1, shape (records,)."""
        return (np.abs(self.guess - self.truth) / self.task.width).clip(0, 1)

    def draw(self, path: Path) -> None:
        """Draw predicted against true numbers, and errors against predictions."""
        figure, panels = new_figure(2)
        self.draw_on(*panels)
        write_figure(figure, path)

    def draw_on(self, both: "Axes", errors: "Axes") -> None:
        """Draw predicted against true numbers on the first panel, and errors on the second."""
        some = slice(None, None, -(-len(self.truth) // DRAWN))
        truth, guess = self.truth[some], self.guess[some]
        name = self.task.names[0].replace("$", r"\$")  # it would begin a formula
        ends = list(self.range)
        both.plot(ends, ends, "-", color="#bbbbbb", linewidth=1)
        both.plot(truth, guess, ".", color="#0072B2", markersize=3, alpha=0.5)
        both.set(xlabel=f"{name}, true", ylabel=f"{name}, predicted")
        errors.axhline(0, color="#bbbbbb", linewidth=1)
        errors.plot(guess, guess - truth, ".", color="#0072B2", markersize=3, alpha=0.5)
        errors.set(xlabel=f"{name}, predicted", ylabel="predicted - true")

    @property
    def beats_median(self) -> bool:
        """Return whether the error is below that of predicting the median for all records."""
        middle = float(np.median(self.truth))
        return not np.isfinite(middle) or bool(
            self.metric("mae") < np.abs(self.truth - middle).mean()
        )

    @property
    def remark(self) -> str:
        """Return a note on a model that is no better than one number for all records."""
        if self.beats_median:
            return ""
        error = self.task.headline.text(self.metric("mae"))
        return NOTHING_LEARNED.format(f"the mean absolute error, {error}, is", "that")

    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of weighted records."""
        errors, total = self.guess - self.truth, weights.sum(0)
        centred = self.truth - self.truth.mean()
        squares = np.square(errors) @ weights
        spread = np.square(centred) @ weights - np.square(centred @ weights) / total
        least = 1e-12 * np.square(self.task.width) * total
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > least, 1 - squares / spread, np.nan)
        return {
            "mae": np.abs(errors) @ weights / total,
            "rmse": np.sqrt(squares / total),
            "r2": r2,
            "at-or-below": (self.truth <= self.guess).astype(float) @ weights / total,
        }


class CountEstimates(Estimates):
    """Predicted and true counts of test records, with their Poisson deviance."""

    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of weighted records."""
        rate = np.maximum(self.guess, LEAST * self.range[1])
        deviance = 2 * (xlogy(self.truth, self.truth / rate) - (self.truth - rate))
        return {**super().weighted(weights), "deviance": deviance @ weights / weights.sum(0)}


@dataclass(frozen=True, eq=False)
class SeveralEstimates(NumberResults):
    """Predicted and true numbers of several targets.

    Attributes:
        parts: results of each target. task, unit_of: see :class:`NumberResults`.
    """

    parts: tuple[Estimates, ...]
    task: Task
    unit_of: NDArray[np.int64] | None = None

    @property
    def records(self) -> int:
        """Number of records."""
        return self.parts[0].records

    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of weighted records: means over the targets, of errors per range."""
        found = [part.weighted(weights) for part in self.parts]
        scaled = [
            {"nmae": of["mae"] / part.task.width, "nrmse": of["rmse"] / part.task.width, **of}
            for part, of in zip(self.parts, found, strict=True)
        ]
        return {
            metric.name: np.mean([of[metric.name] for of in scaled], 0)
            for metric in self.task.metrics
        }

    def values(self) -> dict[str, Any]:
        """Return all metrics, the interval of the error, and those of each target."""
        return super().values() | {"by_target": self._by_target()}

    def details(self) -> dict[str, Any]:
        """Return the ranges and the metrics of each target."""
        return {"target": self.task.facts["target"], "by_target": self._by_target()}

    def table(self) -> Table:
        """Return the metrics of each target."""
        shown = [metric for metric in self.parts[0].task.metrics if metric.chosen]
        rows = tuple(
            (name, *(metric.text(part.metric(metric.name)) for metric in shown))
            for name, part in zip(self.task.names, self.parts, strict=True)
        )
        return Table(
            "each target, in its units", ("", *(metric.title for metric in shown)), rows, ("MAE",)
        )

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Return means over the targets of absolute errors as shares of the range."""
        assert not by_class, "there are no classes"  # noqa: S101
        most = WHOLE // len(self.parts)  # of one target, so that all of them are at most WHOLE
        each = [np.floor(part.shares * most).astype(np.int64) for part in self.parts]
        return np.sum(each, 0)[:, None], WHOLE

    def draw(self, path: Path) -> None:
        """Draw predicted against true numbers, and errors, of each target."""
        figure, panels = new_figure(2 * len(self.parts))
        for place, part in enumerate(self.parts):
            part.draw_on(*panels[2 * place : 2 * place + 2])
        write_figure(figure, path)

    @property
    def remark(self) -> str:
        """Return a note on targets for which one number for all records is as good."""
        bad = [part.task.names[0] for part in self.parts if not part.beats_median]
        if not bad:
            return ""
        who = f"the mean absolute errors of {', '.join(bad)} are" if len(bad) > 1 else ""
        return NOTHING_LEARNED.format(
            who or f"the mean absolute error of {bad[0]} is", "those" if len(bad) > 1 else "that"
        )

    def _by_target(self) -> list[dict[str, Any]]:
        """Return the metrics of each target as JSON values, in the order of the targets."""
        return [
            {"name": name}
            | {of.key: finite_or_none(part.metric(of.name)) for of in part.task.metrics}
            for name, part in zip(self.task.names, self.parts, strict=True)
        ]
