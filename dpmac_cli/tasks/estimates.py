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
#: Least and largest value of metrics that are not errors.
LIMITS: Mapping[str, Interval] = {"r2": (-math.inf, 1.0), "at-or-below": (0.0, 1.0)}


@dataclass(frozen=True, eq=False)
class Estimates(Results):
    """Predicted and true numbers of test records, in the units of the targets.

    Attributes:
        truth, guess: targets and predictions, float64, shape (records, targets).
        task: what is predicted. parts: the task of each target.
        unit_of: index of each record's unit of privacy, shape (records,); None if each record is
            one.
    """

    truth: Floats
    guess: Floats
    task: Task
    parts: tuple[Task, ...]
    unit_of: NDArray[np.int64] | None = None

    @property
    def widths(self) -> Floats:
        """Width of the range of each target, shape (targets,)."""
        return np.array([part.width for part in self.parts])

    @property
    def shares(self) -> Floats:
        """Absolute errors as shares of the ranges, 0 to 1, shape (records, targets)."""
        return (np.abs(self.guess - self.truth) / self.widths).clip(0, 1)

    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics of each target for weighted records, each of shape (targets, sets).

        Args:
            weights: weights of the records, shape (records, sets).
        """
        truth, errors, total = self.truth, self.guess - self.truth, weights.sum(0)
        width, centred = self.widths[:, None], truth - truth.mean(0)
        squares = np.square(errors).T @ weights
        spread = np.square(centred).T @ weights - np.square(centred.T @ weights) / total
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 1e-12 * width**2 * total, 1 - squares / spread, np.nan)
        mae, rmse = np.abs(errors).T @ weights / total, np.sqrt(squares / total)
        below = (truth <= self.guess).T.astype(float) @ weights / total
        found = {"mae": mae, "rmse": rmse, "r2": r2, "at-or-below": below}
        found |= {"nmae": mae / width, "nrmse": rmse / width}
        if self.task.kind == "counts":
            rate = np.maximum(self.guess, LEAST * self.widths)
            deviance = 2 * (xlogy(truth, truth / rate) - (truth - rate))
            found["deviance"] = deviance.T @ weights / total
        return found

    @cached_property
    def _of_targets(self) -> dict[str, list[float]]:
        found = self.weighted(np.ones((len(self.truth), 1)))
        return {name: values[:, 0].tolist() for name, values in found.items()}

    def metric(self, name: str) -> float:
        """Return a metric by its name; nan if it is not defined."""
        return self.metrics()[name]

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the task by name: means over the targets."""
        return {of.name: float(np.mean(self._of_targets[of.name])) for of in self.task.metrics}

    def intervals(self, metrics: Mapping[str, float]) -> dict[str, Interval]:
        """Return the 95% interval of each metric, by bootstrap over units with a fixed seed.

        The distance to both ends is that of Student's distribution with as many degrees of freedom
        as units, less one. nan for fewer than two units.
        """
        owners = np.arange(len(self.truth)) if self.unit_of is None else self.unit_of
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
        return {
            name: np.concatenate([part[name] for part in drawn], 1).mean(0) for name in drawn[0]
        }

    def values(self) -> dict[str, Any]:
        """Return all metrics, the interval of the error, and the metrics of several targets."""
        metrics, headline = self.metrics(), self.task.headline
        ends = self.intervals({headline.name: metrics[headline.name]})[headline.name]
        found = {metric.key: finite_or_none(metrics[metric.name]) for metric in self.task.metrics}
        shown = {f"{headline.key}_interval": [*map(finite_or_none, ends)]}
        return found | shown | self._by_target()

    def _by_target(self) -> dict[str, Any]:
        """Return the metrics of several targets as JSON values, in their order."""
        parts = [
            {"name": part.names[0]}
            | {of.key: finite_or_none(self._of_targets[of.name][k]) for of in part.metrics}
            for k, part in enumerate(self.parts)
        ]
        return {"by_target": parts} if len(parts) > 1 else {}

    def details(self) -> dict[str, Any]:
        """Return the ranges, and the metrics of several targets."""
        return {"target": self.task.facts["target"]} | self._by_target()

    def table(self) -> Table | None:
        """Return the metrics of several targets."""
        if len(self.parts) == 1:
            return None
        shown = [metric for metric in self.parts[0].metrics if metric.chosen]
        rows = tuple(
            (name, *(metric.text(self._of_targets[metric.name][k]) for metric in shown))
            for k, name in enumerate(self.task.names)
        )
        titles = ("", *(metric.title for metric in shown))
        return Table("each target, in its units", titles, rows, ("MAE",))

    def cells(self, *, by_class: bool) -> tuple[NDArray[np.int64], int]:
        """Return means over the targets of absolute errors as shares, rounded down."""
        assert not by_class, "there are no classes"  # noqa: S101
        most = WHOLE // len(self.task.names)  # of one target, so that all are at most WHOLE
        return np.floor(self.shares * most).astype(np.int64).sum(1, keepdims=True), WHOLE

    def draw(self, path: Path) -> None:
        """Draw predicted against true numbers, and errors against predictions, of each target."""
        figure, panels = new_figure(2 * len(self.task.names))
        some = slice(None, None, -(-len(self.truth) // DRAWN))
        for k, part in enumerate(self.parts):
            truth, guess = self.truth[some, k], self.guess[some, k]
            name = part.names[0].replace("$", r"\$")  # it would begin a formula
            both, errors = panels[2 * k : 2 * k + 2]
            both.axline((truth[0], truth[0]), slope=1, color="#bbbbbb", linewidth=1)
            errors.axhline(0, color="#bbbbbb", linewidth=1)
            for panel, x, y in ((both, truth, guess), (errors, guess, guess - truth)):
                panel.plot(x, y, ".", color="#0072B2", markersize=3, alpha=0.5)
            both.set(xlabel=f"{name}, true", ylabel=f"{name}, predicted")
            errors.set(xlabel=f"{name}, predicted", ylabel="predicted - true")
        write_figure(figure, path)

    @property
    def remark(self) -> str:
        """Return a note on targets for which one number for all records is as good."""
        of_median = np.abs(self.truth - np.median(self.truth, 0)).mean(0)
        bad = of_median <= self._of_targets["mae"]
        names = ", ".join(name for name, low in zip(self.task.names, bad, strict=True) if low)
        if not names:
            return ""
        return (
            f"the mean absolute error of {names} is not below that of predicting the median of the "
            "test records for all. If longer training does not help, the noise is too large to "
            "learn: use a larger --epsilon, more records, a narrower range of the target, or a "
            "smaller network (--model linear)."
        )


def _around(name: str, value: float, resampled: Floats, reach: float) -> Interval:
    """Return the interval within ``reach`` standard deviations of the resampled metric."""
    if not math.isfinite(value):
        return math.nan, math.nan
    half = reach * float(np.std(resampled[np.isfinite(resampled)]))
    low, high = LIMITS.get(name, (0.0, math.inf))
    return max(low, value - half), min(high, value + half)
