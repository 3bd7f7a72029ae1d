"""Metrics: how well the predictions of a model are beside the targets of test records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpmac_cli.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.libraries import np

Interval = tuple[float, float]
#: Least and largest value of a share, and of an error or a loss.
SHARE: Interval = (0.0, 1.0)
FROM_0: Interval = (0.0, math.inf)


def percent_or_dash(value: float | None) -> str:
    """Return a fraction from 0 to 1 as a percentage, or a dash if it is None or nan.

    >>> percent_or_dash(0.9512), percent_or_dash(None)
    ('95.12%', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{value:.2%}"


def number(value: float | None) -> str:
    """Return a number with four significant digits, or a dash if it is None or not finite.

    >>> number(12345.678), number(0.5), number(None)
    ('12,346', '0.5000', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.3e}" if digits > 7 else f"{value:,.{max(0, digits)}f}"


@dataclass(frozen=True, eq=False)
class Compared:
    """Predictions for test records beside their targets: what metrics are computed from.

    Attributes:
        truth: true classes, or numbers on the scale of the target, shape (records,).
        guess: predictions, like ``truth``; class -1 if the output contains NaN.
        owners: index of each record's unit of privacy, from 0, shape (records,).
        scores: probabilities of classes, float32, shape (records, classes); (records, 0) without
            classes. If a record's output contains NaN, they are worse than all others: below 0 for
            the true class, otherwise above 1.
        weights: how often each record counts, shape (records,); None for once.
    """

    truth: NDArray[Any]
    guess: NDArray[Any]
    owners: NDArray[np.int64]
    scores: NDArray[np.float32]
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class EvaluationMetric:
    """A number that says how well a model predicts.

    Attributes:
        name: name in commands. title: name in sentences.
        of: computes it, by weight; nan if it is not defined.
        right: which records it counts, shape (records,), if it is a plain share of them. Its
            interval is exact then.
        groups: groups of records whose rates it averages, bool, shape (records, sides, rates); None
            for a mean over records.
        covered: whether it can be released with noise.
        lower: whether lower values are better; None if neither are, so that ``--metric`` cannot
            name it.
        ends: least and largest value. A share is from 0 to 1, and shown in percent.
    """

    name: str
    title: str
    of: Callable[[Compared], float]
    right: Callable[[Compared], NDArray[np.bool_]] | None = None
    groups: Callable[[Compared], NDArray[np.bool_]] | None = None
    covered: bool = False
    lower: bool | None = False
    ends: Interval = SHARE

    @property
    def key(self) -> str:
        """Return the name as a key of a report, with ``_`` in place of ``-``."""
        return self.name.replace("-", "_")

    @property
    def logged(self) -> str:
        """Return the key of a line of metrics.jsonl."""
        return f"test_{self.key}"

    @property
    def constant(self) -> str:
        """Return the key of a report of its value for the best constant prediction."""
        return f"constant_{self.key}"

    @property
    def chosen(self) -> bool:
        """Return whether ``--metric`` can name it."""
        return self.lower is not None

    @property
    def share(self) -> bool:
        """Return whether it is a share, from 0 to 1."""
        return self.ends == SHARE

    def value(self, compared: Compared) -> float:
        """Return the metric; nan if it is not defined.

        Args:
            compared: predictions beside targets.

        Raises:
            ModelError: a program's metric returned something that is no number.
        """
        result: Any = self.of(compared)
        if not hasattr(result, "__float__"):
            raise ModelError(
                f"The metric '{self.name}' returned a {type(result).__name__}: it must return one "
                "number."
            )
        return float(result)

    def text(self, value: float | None) -> str:
        """Return a value as a person reads it: a share in percent, others with four digits.

        Args:
            value: the metric; None or nan, which is not defined, becomes a dash.
        """
        return percent_or_dash(value) if self.share else number(value)

    def better(self, value: float) -> float:
        """Return a number that is larger for better values: minus the value if lower is better."""
        return -value if self.lower else value
