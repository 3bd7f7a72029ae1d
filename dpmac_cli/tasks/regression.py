"""Regression: a number per record, in a public range. Metrics are those of scikit-learn.

A target y is clipped to the range [low, high], transformed, and scaled to t in [-1, 1]. The output
z of a network predicts t. See :mod:`dpmac_cli.tasks.task`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from dpmac_cli.libraries import np, sklearn_metrics
from dpmac_cli.tasks.metrics import FROM_0, Compared, EvaluationMetric, Interval
from dpmac_cli.tasks.residuals import EDGES, LEVEL, Residuals, cells
from dpmac_cli.tasks.task import FARTHEST, Task, register_task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs

    Floats = NDArray[np.floating[Any]]

#: Transforms of a target, with their inverses; see :class:`Regression`.
Transform = Literal["none", "log1p"]
#: Number of equal parts of the range, after the transform, that test records are counted in.
BINS = 10
#: Multiples of a covered record's share, so that sums of them are exact.
WHOLE = 2**40


def mae(of: Compared) -> float:
    """Return the mean absolute error, on the scale of the target.

    Args:
        of: predictions for test records beside their targets.
    """
    return _scored(sklearn_metrics.mean_absolute_error, of)


def rmse(of: Compared) -> float:
    """Return the root of the mean squared error, on the scale of the target.

    Args:
        of: predictions for test records beside their targets.
    """
    return _scored(sklearn_metrics.root_mean_squared_error, of)


def r2(of: Compared) -> float:
    """Return the share of the variance that is explained; nan if the targets do not vary.

    Args:
        of: predictions for test records beside their targets.
    """
    mean = np.average(of.truth, weights=of.weights)
    spread = np.average(np.square(of.truth - mean), weights=of.weights)
    if spread <= 1e-24 * mean**2:
        return math.nan
    return _scored(sklearn_metrics.r2_score, of)


def below(of: Compared) -> NDArray[np.bool_]:
    """Return which targets are at or below the prediction, shape (records,).

    Args:
        of: predictions for test records beside their targets.
    """
    is_below: NDArray[np.bool_] = of.truth <= of.guess
    return is_below


def coverage(of: Compared) -> float:
    """Return the share of targets at or below the prediction: a quantile covers its level.

    Args:
        of: predictions for test records beside their targets.
    """
    return float(np.average(below(of), weights=of.weights))


def _scored(metric: Callable[..., Any], of: Compared) -> float:
    return float(metric(of.truth, of.guess, sample_weight=of.weights))


@register_task("regression")
@dataclass(frozen=True)
class Regression(Task):
    """A number per record. Targets are scaled to [-1, 1], shape (records, 1).

    Attributes:
        low, high: public range that targets are clipped to; low < high.
        transform: "log1p" predicts log(1 + y), for targets above -1 of very different sizes.
        residuals: noisy histogram that intervals follow from; None for no intervals.
        level: share of the targets that an interval has.

    Equality of tasks does not see the last two.
    """

    low: float
    high: float
    transform: Transform = "none"
    residuals: Residuals | None = field(default=None, compare=False)
    level: float = field(default=LEVEL, compare=False)

    of_record: ClassVar[str] = "one number"
    listed: ClassVar[str] = "target"
    result: ClassVar[str] = "The result is the predicted number, on the scale of the target."
    losses: ClassVar[tuple[str, ...]] = ("mse", "huber", "quantile:Q")
    metrics: ClassVar[tuple[EvaluationMetric, ...]] = (
        EvaluationMetric("mae", "MAE", mae, covered=True, lower=True, ends=FROM_0),
        EvaluationMetric("rmse", "RMSE", rmse, lower=True, ends=FROM_0),
        EvaluationMetric("r2", "R2", r2, ends=(-math.inf, 1.0)),
        EvaluationMetric(
            "at-or-below", "targets at or below the prediction", coverage, below, lower=None
        ),
    )
    reported: ClassVar[tuple[str, ...]] = (
        *("by_bin", "interval_coverage", "interval_coverage_by_bin"),
    )
    target: ClassVar[str] = "float32"
    public: ClassVar[str] = "range of the target"
    weighted: ClassVar[bool] = False
    asked: ClassVar[bool] = False
    #: The middle of the range: noise leaves no steps to unlearn random outputs.
    start: ClassVar[float | None] = 0.0

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the task with these :attr:`facts`."""
        target = facts["target"]
        return cls((target["name"],), target["low"], target["high"], target["transform"])

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the task in a model file, as JSON values: no class, one target."""
        return {
            "classes": [],
            "target": {
                "kind": self.kind,
                "name": self.name,
                "low": self.low,
                "high": self.high,
                "transform": self.transform,
            },
        }

    @property
    def open(self) -> bool:
        """Return whether the range is still to be found: it is that of all numbers."""
        return (self.low, self.high) == (-FARTHEST, FARTHEST)

    @property
    def calibrates(self) -> bool:
        """Return whether its targets are counted: not those of a task of a program, a subclass."""
        return type(self) is Regression

    @property
    def counted_facts(self) -> Mapping[str, Any]:
        """Histogram that intervals follow from, by its name."""
        return {"residuals": self.residuals}

    @property
    def cell_count(self) -> int:
        """Number of cells of the histogram of residuals."""
        return len(EDGES) + 1

    def cells(self, outputs: Outputs, targets: NDArray[Any]) -> NDArray[np.int64]:
        """Return the bin of each record's residual, int64, shape (records,).

        It is -1 if the output is NaN.

        Args:
            outputs: outputs of the network, shape (records, 1).
            targets: encoded targets, shape (records, 1).
        """
        return cells(outputs, targets)

    def calibrated(self, counts: NDArray[np.float64], noise: float, records: float) -> Self:
        """Return a copy of the task with intervals, which follow from noisy counts of residuals.

        Args:
            counts: noisy counts of the bins, shape (cells,).
            noise: standard deviation of the noise in each.
            records: not used; see :meth:`Task.calibrated`.
        """
        return replace(self, residuals=Residuals(tuple(counts.tolist()), noise))

    def between(self, scaled: Outputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the low and the high end of each output's interval, on the scale of the target.

        Args:
            scaled: outputs, shape (records, 1). Each of the two results has the same shape.

        Raises:
            ValueError: the task has no residuals, so no intervals.
        """
        if self.residuals is None:
            raise ValueError("there are no intervals")
        known = scaled.astype(np.float64).clip(-1, 1)
        low, high = self.residuals.interval(self.level)
        return self.decoded(known + low), self.decoded(known + high)

    @property
    def name(self) -> str:
        """Name of the number to predict."""
        return self.names[0]

    @property
    def described(self) -> str:
        """Return the output in words, such as "one number from 0 to 100"."""
        return f"one number from {self.range}"

    @property
    def summary(self) -> str:
        """Return the output by name, such as "the target age from 0 to 100"."""
        return f"the target {self.name} from {self.range}"

    @property
    def range(self) -> str:
        """Return the range and the transform in words, such as "0 to 100 (log1p)"."""
        return f"{self.low:g} to {self.high:g}" + " (log1p)" * (self.transform == "log1p")

    @property
    def width(self) -> float:
        """Largest error of a prediction, on the scale of the target."""
        return self.high - self.low

    @property
    def ends(self) -> Interval:
        """Ends of the range, after the transform: those of log(1 + y) for "log1p"."""
        if self.transform == "log1p":
            return math.log1p(self.low), math.log1p(self.high)
        return self.low, self.high

    @property
    def code(self) -> str:
        """Python expression for the predicted numbers, with ``{}`` for the network's outputs."""
        low, high = self.ends
        code = f"{low!r} + ({{}}[:, 0].clamp(-1, 1) + 1) / 2 * {high - low!r}"
        return f"({code}).expm1()" if self.transform == "log1p" else code

    def encoded(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets as a network learns them, float32, shape (records, 1), from -1 to 1.

        Args:
            targets: numbers on the scale of the target, as many as records. Those beyond the range
                are clipped to it. If no range is declared, they stay as they are, in float64.

        >>> Regression(("age",), 0.0, 100.0).encoded(np.array([25.0, 120.0])).tolist()
        [[-0.5], [1.0]]
        """
        if self.open:
            return targets.reshape(-1, 1).astype(np.float64)
        clipped = np.clip(targets.reshape(-1, 1).astype(np.float64), self.low, self.high)
        return self._scaled(clipped).clip(-1, 1)

    def recoded(self, targets: NDArray[Any], before: Task) -> NDArray[Any]:
        """Return targets that were encoded in another range, encoded in this one.

        Args:
            targets: encoded by ``before``, shape (records, 1).
            before: the earlier task. Targets of the same task, of another kind, or of a task
                of a program stay as they are.

        Returns:
            Shape (records, 1); targets beyond this range are outside [-1, 1].
        """
        if self == before or not self.calibrates or not isinstance(before, Regression):
            return targets
        return self._scaled(before.decoded(targets))

    def limited(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return encoded targets, limited to [-1, 1]; as they are if the range is to be found."""
        return targets.clip(-1, 1) if self.calibrates and not self.open else targets

    def _scaled(self, numbers: Floats) -> NDArray[np.float32]:
        """Return numbers on the scale of the target on that of outputs: the range is [-1, 1]."""
        low, high = self.ends
        moved = np.log1p(numbers) if self.transform == "log1p" else numbers
        scaled: NDArray[np.float32] = (2 * (moved - low) / (high - low) - 1).astype(np.float32)
        return scaled

    def unscaled(self, scaled: Outputs) -> NDArray[np.float64]:
        """Return encoded targets on the scale of :attr:`ends`: after the transform, not scaled.

        Args:
            scaled: encoded targets or outputs, shape (records, 1).
        """
        if self.open:
            return scaled.astype(np.float64)
        low, high = self.ends
        unscaled: NDArray[np.float64] = low + (scaled.astype(np.float64) + 1) / 2 * (high - low)
        return unscaled

    def within(self, low: float, high: float) -> Self:
        """Return the task in a part of its range; the same task if they have nothing in common.

        Args:
            low, high: ends of that part, on the scale of :attr:`ends`; low < high.
        """
        least, most = self.ends
        low = max(low, least)
        high = min(high, most)
        if low >= high:
            return self
        if self.transform == "log1p":
            low = math.expm1(low)
            high = math.expm1(high)
        return replace(self, low=max(low, self.low), high=min(high, self.high))

    def covers(self, other: Task) -> bool:
        """Return whether the range of another task is in this one; False for other kinds."""
        return isinstance(other, Regression) and self.low <= other.low and other.high <= self.high

    def decoded(self, scaled: Outputs) -> NDArray[np.float64]:
        """Return numbers on the scale of the target, clipped to its range; NaN stays NaN.

        Args:
            scaled: outputs or encoded targets, shape (records, 1).

        Returns:
            float64, of the same shape.

        >>> Regression(("age",), 0.0, 100.0).decoded(np.array([[-0.5], [3.0]])).tolist()
        [[25.0], [100.0]]
        """
        return self._untransformed(scaled).clip(self.low, self.high)

    def _untransformed(self, scaled: Outputs) -> NDArray[np.float64]:
        """Return numbers on the scale of the target, also those that are beyond its range."""
        with np.errstate(over="ignore"):  # an output may be far beyond the range
            unscaled = self.unscaled(scaled)
            return np.expm1(unscaled) if self.transform == "log1p" else unscaled

    def _true(self, targets: NDArray[Any]) -> NDArray[np.float64]:
        """Return true numbers of test records, shape (records,).

        Those beyond a range that counts found are as they were, so that scores are not better than
        predictions are.
        """
        numbers = self.decoded(targets)
        if self.calibrates:
            beyond = np.abs(targets) > 1
            numbers = np.where(beyond, self._untransformed(targets), numbers)
        return numbers[:, 0]

    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return predicted numbers, on the scale of the target, float32, shape (records, 1).

        Args:
            outputs: outputs of the network, shape (records, 1).
        """
        return self.decoded(outputs).astype(np.float32)

    def columns(self, outputs: Outputs) -> dict[str, Sequence[Any]]:
        """Return the columns "predicted", and "low" and "high" of an interval, if there are any.

        Numbers have seven significant digits; NaN if an output is.

        Args:
            outputs: outputs of the network, shape (records, 1).
        """
        numbers: dict[str, Floats] = {"predicted": self.answers(outputs)}
        if self.residuals is not None:
            numbers["low"], numbers["high"] = self.between(outputs)
        columns = dict[str, Sequence[Any]]()
        for name, values in numbers.items():
            columns[name] = [float(f"{number:.7g}") for number in values[:, 0].tolist()]
        return columns

    def compared(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64]
    ) -> Compared:
        """Compare predicted numbers with targets, both on the scale of the target.

        A prediction that is NaN is as wrong as possible: the end of the range that is farther away.

        Args:
            outputs: outputs of the network, shape (records, 1).
            targets: encoded targets, shape (records, 1).
            owners: index of each record's unit of privacy, shape (records,).
        """
        truth = self._true(targets)
        guess = self.decoded(outputs)[:, 0]
        low, high = self.low, self.high
        worst = np.where(truth - low > high - truth, low, high)
        guess = np.where(np.isnan(guess), worst, guess)
        return Compared(truth, guess, owners, np.zeros((len(truth), 0), np.float32))

    def shares(self, of: Compared) -> Floats:
        """Return absolute errors as shares of the range, 0 to 1, shape (records,).

        Args:
            of: predictions for test records beside their targets.
        """
        shares: Floats = (np.abs(of.guess - of.truth) / self.width).clip(0, 1)
        return shares

    def counted(self, of: Compared) -> tuple[NDArray[np.int64], int]:
        """Return absolute errors as whole parts of the range, rounded down, and their most.

        An error as wide as the range has all WHOLE parts; see :meth:`Task.counted`.
        """
        return np.floor(self.shares(of) * WHOLE).astype(np.int64), WHOLE

    def constant(self, of: Compared) -> dict[str, float]:
        """Return the MAE of the median of the test records, and the RMSE of their mean.

        Args:
            of: predictions for test records beside their targets.
        """
        errors = np.abs(of.truth - np.median(of.truth))
        return {"mae": float(errors.mean()), "rmse": float(of.truth.std())}

    def details(self, of: Compared) -> dict[str, Any]:
        """Return the numbers of records by true and predicted bin, and the coverage of intervals.

        A bin is one of :data:`BINS` equal parts of the range. Coverage is the share of the targets
        that are in their intervals: of all, and by predicted bin, None where none is predicted.

        Args:
            of: predictions for test records beside their targets.
        """
        true = self._bins(of.truth)
        predicted = self._bins(of.guess)
        counts = np.zeros((BINS, BINS), np.int64)
        np.add.at(counts, (true, predicted), 1)
        details: dict[str, Any] = {"by_bin": counts.tolist()}
        if self.residuals is None:
            return details
        low, high = self.between(self.encoded(of.guess))
        inside = (low[:, 0] <= of.truth) & (of.truth <= high[:, 0])
        covered = np.bincount(predicted, inside, minlength=BINS)
        by_bin = zip(covered.tolist(), counts.sum(0).tolist(), strict=True)
        return details | {
            "interval_coverage": float(inside.mean()),
            "interval_coverage_by_bin": [part / total if total else None for part, total in by_bin],
        }

    def _bins(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Return the bin of each number on the scale of the target, from 0, shape (records,)."""
        encoded = self.encoded(numbers)[:, 0].astype(np.float64)
        places: Floats = (encoded.clip(-1, 1) + 1) / 2
        return (places * BINS).astype(np.int64).clip(0, BINS - 1)

    @property
    def bin_ends(self) -> tuple[float, ...]:
        """Ends of the bins, on the scale of the target."""
        places = np.linspace(-1, 1, BINS + 1)
        return tuple(self.decoded(places.reshape(-1, 1))[:, 0].tolist())

    def remark(self, of: Compared, loss: str) -> tuple[str, bool] | None:
        """Return a note on predictions for which one number for all records is as good.

        As the loss counts: squared errors beside the mean, a quantile's beside that quantile, and
        absolute errors beside the median for any other loss.

        Args:
            of: predictions for test records beside their targets.
            loss: name of the loss of the training, such as "mse" or "quantile:0.9".

        Returns:
            The note, a sentence, and True; None if the predictions are better.
        """
        kind, _, parameter = loss.partition(":")
        level = float(parameter) if kind == "quantile" else 0.5
        named = {"mse": "mean", "quantile": f"{level:g}-quantile"}.get(kind, "median")
        truth = self.encoded(of.truth)
        guess = self.encoded(of.guess)
        one = truth.mean() if kind == "mse" else np.quantile(truth, level)
        errors = truth - guess
        of_one = truth - one
        if kind == "mse":
            bad = np.square(errors).mean() >= np.square(of_one).mean()
        else:
            bad = _pinball(errors, level) >= _pinball(of_one, level)
        if not bad:
            return None
        return (
            f"the predictions of {self.name} are not better than the {named} of the test records "
            "for all.",
            True,
        )


def _pinball(errors: Floats, level: float) -> float:
    """Return the mean loss of a quantile; half the mean absolute error for 0.5."""
    return float(np.maximum(level * errors, (level - 1) * errors).mean())
