"""Results of a network that predicts numbers on test records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dpmac_cli.files import finite_or_none
from dpmac_cli.libraries import np, special
from dpmac_cli.tasks.intervals import TAIL, resampled
from dpmac_cli.tasks.task import Interval, Remark, Results, Table, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.intervals import Floats

#: Number of bootstrap resamples.
RESAMPLES = 1000
#: Multiples of a covered record's share, so that sums of them are exact.
WHOLE = 2**40
#: Least and largest value of metrics that are not errors.
LIMITS: Mapping[str, Interval] = {"r2": (-math.inf, 1.0), "at-or-below": (0.0, 1.0)}


@dataclass(frozen=True, eq=False)
class Estimates(Results):
    """Predicted and true numbers of test records, on the scale of the target.

    Attributes:
        truth, guess: targets and predictions, float64, shape (records,).
        task: what is predicted.
        unit_of: index of each record's unit of privacy, shape (records,); None if each record is
            one.
    """

    truth: Floats
    guess: Floats
    task: Task
    unit_of: NDArray[np.int64] | None = None

    @property
    def shares(self) -> Floats:
        """Absolute errors as shares of the range, 0 to 1, shape (records,)."""
        return (np.abs(self.guess - self.truth) / self.task.width).clip(0, 1)

    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return metrics for weighted records, each of shape (sets,).

        Args:
            weights: weights of the records, shape (records, sets).
        """
        truth, errors, total = self.truth, self.guess - self.truth, weights.sum(0)
        width, centred = self.task.width, truth - truth.mean()
        squares = np.square(errors) @ weights
        spread = np.square(centred) @ weights - np.square(centred @ weights) / total
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = np.where(spread > 1e-12 * width**2 * total, 1 - squares / spread, np.nan)
        mae, rmse = np.abs(errors) @ weights / total, np.sqrt(squares / total)
        below = (truth <= self.guess).astype(float) @ weights / total
        return {"mae": mae, "rmse": rmse, "r2": r2, "at-or-below": below}

    @cached_property
    def _found(self) -> dict[str, float]:
        found = self.weighted(np.ones((len(self.truth), 1)))
        return {metric.name: float(found[metric.name][0]) for metric in self.task.metrics}

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the task by name."""
        return dict(self._found)

    def intervals(self, metrics: Mapping[str, float]) -> dict[str, Interval]:
        """Return the 95% interval of each metric, by bootstrap over units with a fixed seed.

        The distance to both ends is that of Student's distribution with as many degrees of freedom
        as units, less one. nan for fewer than two units.
        """
        owners = np.arange(len(self.truth)) if self.unit_of is None else self.unit_of
        units = int(owners.max()) + 1
        if units < 2:
            return dict.fromkeys(metrics, (math.nan, math.nan))
        drawn = resampled(self.weighted, owners, RESAMPLES)
        reach = special.stdtrit(units - 1, 1 - TAIL) * math.sqrt(units / (units - 1))
        return {name: _around(name, value, drawn[name], reach) for name, value in metrics.items()}

    def values(self) -> dict[str, Any]:
        """Return all metrics, and the interval of the error."""
        metrics, headline = self.metrics(), self.task.headline
        ends = self.intervals({headline.name: metrics[headline.name]})[headline.name]
        found = {metric.key: finite_or_none(metrics[metric.name]) for metric in self.task.metrics}
        shown = {f"{headline.key}_interval": [*map(finite_or_none, ends)]}
        return found | shown

    def details(self) -> dict[str, Any]:
        """Return the range of the target."""
        return {"target": self.task.facts["target"]}

    def table(self) -> Table | None:
        """Return nothing: the metrics say all of it."""
        return None

    def counted(self) -> tuple[NDArray[np.int64], int]:
        """Return absolute errors as shares of the range, rounded down."""
        return np.floor(self.shares * WHOLE).astype(np.int64), WHOLE

    def remark(self, loss: str) -> Remark | None:
        """Return a note on predictions for which one number for all records is as good.

        As the loss counts: squared errors beside the mean, a quantile's beside that quantile, and
        absolute errors beside the median for any other loss.
        """
        kind, _, parameter = loss.partition(":")
        level = float(parameter) if kind == "quantile" else 0.5
        number = {"mse": "mean", "quantile": f"{level:g}-quantile"}.get(kind, "median")
        truth, guess = self.task.encoded(self.truth), self.task.encoded(self.guess)
        one = truth.mean() if kind == "mse" else np.quantile(truth, level)
        errors, of_one = truth - guess, truth - one
        if kind == "mse":
            bad = np.square(errors).mean() >= np.square(of_one).mean()
        else:
            bad = _pinball(errors, level) >= _pinball(of_one, level)
        if not bad:
            return None
        return Remark(
            f"the predictions of {self.task.names[0]} are not better than the {number} of the test "
            "records for all.",
            untaught=True,
        )


def _pinball(errors: Floats, level: float) -> float:
    """Return the mean loss of a quantile; half the mean absolute error for 0.5."""
    return float(np.maximum(level * errors, (level - 1) * errors).mean())


class Perplexity(Estimates):
    """Losses of texts in nats, in ``guess``, of which each is a mean over the text's tokens."""

    def weighted(self, weights: Floats) -> dict[str, Floats]:
        """Return the perplexity of weighted records, shape (sets,): of their mean loss."""
        return {"perplexity": np.exp(self.guess @ weights / weights.sum(0))}

    def remark(self, loss: str) -> Remark | None:
        """Return nothing: what a perplexity is worth depends on the texts."""
        return None


def _around(name: str, value: float, resampled: Floats, reach: float) -> Interval:
    """Return the interval within ``reach`` standard deviations of the resampled metric."""
    if not math.isfinite(value):
        return math.nan, math.nan
    half = reach * float(np.std(resampled[np.isfinite(resampled)]))
    low, high = LIMITS.get(name, (0.0, math.inf))
    return max(low, value - half), min(high, value + half)
