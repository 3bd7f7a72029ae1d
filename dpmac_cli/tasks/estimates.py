"""Results of a network that predicts numbers on test records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit, xlogy

from dpmac_cli.plots import new_figure, write_figure
from dpmac_cli.storage.files import finite_or_none
from dpmac_cli.tasks.intervals import TAIL, Floats
from dpmac_cli.tasks.task import Interval, Results, Table, Task

#: Number of bootstrap resamples, and largest number of their weights in memory at a time.
RESAMPLES, AT_A_TIME = 1000, 4_000_000
#: Multiples of a covered record's share, so that sums of them are exact.
WHOLE = 2**40
#: Smallest predicted mean of a count, as a share of the range, for the deviance.
LEAST = 1e-6
#: Largest number of records in a picture.
DRAWN = 5000


@dataclass(frozen=True, eq=False)
class Estimates(Results):
    """Predicted and true numbers of test records, in the units of the target.

    Attributes:
        truth, guess: targets and predictions, float64, shape (records,).
        task: what is predicted. range: lowest and highest number of both.
        unit_of: index of each record's unit of privacy, shape (records,); None if each record is
            one.
    """

    truth: Floats
    guess: Floats
    task: Task
    range: Interval
    unit_of: NDArray[np.int64] | None = None

    def metric(self, name: str) -> float:
        """Return a metric by its name; nan if it is not defined."""
        return self.metrics()[name]

    def metrics(self) -> dict[str, float]:
        """Return mean absolute error, root mean squared error, R2 and others by name."""
        return dict(self._metrics)

    @cached_property
    def _metrics(self) -> dict[str, float]:
        found = self._weighted(np.ones((len(self.truth), 1)))
        return {metric.name: float(found[metric.name][0]) for metric in self.task.metrics}

    def intervals(self, metrics: Mapping[str, float]) -> dict[str, Interval]:
        """Return the 95% interval of each metric, by bootstrap over units with a fixed seed.

        The distance to both ends is that of Student's distribution with as many degrees of freedom
        as units, less one. nan for fewer than two units.
        """
        owners = np.arange(len(self.truth)) if self.unit_of is None else self.unit_of
        units, generator = int(owners.max()) + 1, np.random.default_rng(0)
        if units < 2:
            return dict.fromkeys(metrics, (math.nan, math.nan))
        drawn, left = list[dict[str, Floats]](), RESAMPLES
        while left > 0:
            count = min(left, max(1, AT_A_TIME // len(owners)))
            left -= count
            picked = generator.multinomial(units, np.full(units, 1 / units), size=count)
            drawn.append(self._weighted(picked.T[owners].astype(float)))
        reach = stdtrit(units - 1, 1 - TAIL) * math.sqrt(units / (units - 1))
        found = {}
        for name, value in metrics.items():
            some = np.concatenate([part[name] for part in drawn])
            half = (
                reach * float(np.std(some[np.isfinite(some)])) if np.isfinite(value) else math.nan
            )
            low, high = LIMITS.get(name, (0.0, math.inf))
            ends = max(low, value - half), min(high, value + half)
            found[name] = ends if math.isfinite(value) else (math.nan, math.nan)
        return found

    def values(self) -> dict[str, Any]:
        """Return all metrics and the interval of the error as JSON values."""
        metrics = self.metrics()
        headline = self.task.headline
        ends = self.intervals({headline.name: metrics[headline.name]})[headline.name]
        found = {metric.key: finite_or_none(metrics[metric.name]) for metric in self.task.metrics}
        return found | {f"{headline.key}_interval": [*map(finite_or_none, ends)]}

    def details(self) -> dict[str, Any]:
        """Return the range of the targets."""
        return {"target": self.task.facts["target"]}

    def table(self) -> Table | None:
        """Return None: metrics say all."""
        return None

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Return absolute errors as shares of the range, rounded down."""
        assert not by_class, "there are no classes"  # noqa: S101
        shares = (np.abs(self.guess - self.truth) / self.task.width).clip(0, 1)
        return np.floor(shares * WHOLE).astype(np.int64)[:, None], WHOLE

    def draw(self, path: Path) -> None:
        """Draw predicted against true numbers, and errors against predictions."""
        figure, (both, errors) = new_figure(2)
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
        write_figure(figure, path)

    @property
    def remark(self) -> str:
        """Return a note on a model that is no better than one number for all records."""
        middle = float(np.median(self.truth))
        if not np.isfinite(middle) or self.metric("mae") < np.abs(self.truth - middle).mean():
            return ""
        return (
            f"the mean absolute error, {self.task.headline.text(self.metric('mae'))}, is not below "
            "that of predicting the median of the test records for all. If longer training does "
            "not help, the noise is too large to learn: use a larger --epsilon, more records, a "
            "narrower range of the target, or a smaller network (--model linear)."
        )

    def _weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of weighted records, each of shape (sets,).

        Args:
            weights: weights of the records, shape (records, sets).
        """
        errors, total = self.guess - self.truth, weights.sum(0)
        centred = self.truth - self.truth.mean()
        squares = np.square(errors) @ weights
        spread = np.square(centred) @ weights - np.square(centred @ weights) / total
        least = 1e-12 * np.square(self.task.width) * total
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > least, 1 - squares / spread, np.nan)
        rate = np.maximum(self.guess, LEAST * self.range[1])
        deviance = 2 * (xlogy(self.truth, self.truth / rate) - (self.truth - rate))
        return {
            "mae": np.abs(errors) @ weights / total,
            "rmse": np.sqrt(squares / total),
            "r2": r2,
            "at-or-below": (self.truth <= self.guess).astype(float) @ weights / total,
            "deviance": deviance @ weights / total,
        }


#: Least and largest value of metrics that are not errors.
LIMITS: Mapping[str, Interval] = {"r2": (-math.inf, 1.0), "at-or-below": (0.0, 1.0)}
