"""Task: what a network predicts for a record, and how its outputs are scored.

Outputs and targets are NumPy arrays on the CPU. Tasks load neither NumPy nor torch: settings, and
so help, know them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from dpmac_cli.libraries import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Outputs = NDArray[np.floating[Any]]

Interval = tuple[float, float]


class TaskFacts(TypedDict):
    """Facts of the task in a model file: names of classes, or the target and its range."""

    classes: Sequence[str]
    target: Mapping[str, Any] | None


def percent_or_dash(value: float | None) -> str:
    """Return a fraction as a percentage, or a dash if it is not defined."""
    return "-" if value is None or math.isnan(value) else f"{value:.2%}"


def number(value: float | None) -> str:
    """Return a number with four significant digits, or a dash if it is not defined."""
    if value is None or not math.isfinite(value):
        return "-"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.3e}" if digits > 7 else f"{value:,.{max(0, digits)}f}"


@dataclass(frozen=True)
class EvaluationMetric:
    """A number that says how well a model predicts.

    Attributes:
        name: name in commands. title: name in sentences.
        chosen: whether ``--metric`` can name it.
        covered: whether it can be released with noise.
        share: whether it is a share of the records, shown in percent.
        lower: whether lower values are better.
    """

    name: str
    title: str
    chosen: bool = True
    covered: bool = False
    share: bool = True
    lower: bool = False

    @property
    def key(self) -> str:
        """Return the name as a key of a report."""
        return self.name.replace("-", "_")

    @property
    def logged(self) -> str:
        """Return the key of a line of metrics.jsonl."""
        return f"test_{self.key}"

    def text(self, value: float | None) -> str:
        """Return a value as a person reads it; a dash if it is not defined."""
        return percent_or_dash(value) if self.share else number(value)

    def better(self, value: float) -> float:
        """Return a number that is larger for better values."""
        return -value if self.lower else value


@dataclass(frozen=True)
class Usage:
    """Words and code of a model card.

    Attributes:
        noun: what the model is.
        row: title of the row with the outputs, and their names.
        range: what the row says after the names.
        function: name of a function that predicts.
        code: Python expression for its result, with ``{}`` for the network's outputs.
        result: sentence on the result.
    """

    noun: str
    row: tuple[str, tuple[str, ...]]
    range: str
    function: str
    code: str
    result: str


@dataclass(frozen=True)
class Table:
    """Cells of text, one row per class, below a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: tuple[str, ...] = ()  # columns to emphasise


@dataclass(frozen=True)
class Remark:
    """Note on a model that is no better than one answer for all records, or little better.

    Attributes:
        said: what was measured, and a remedy that does not depend on the run, in sentences.
        untaught: whether the outputs tell nothing, so that longer training or less noise may help.
    """

    said: str
    untaught: bool = False


class Results(ABC):
    """Outputs of a model compared with the targets of test records."""

    def metric(self, name: str) -> float:
        """Return a metric by its name; nan if it is not defined."""
        return self.metrics()[name]

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return all metrics of the task by name."""

    @abstractmethod
    def intervals(self, metrics: Mapping[str, float]) -> dict[str, Interval]:
        """Return 95% intervals of metrics, see :mod:`~dpmac_cli.tasks.intervals`."""

    @abstractmethod
    def values(self) -> dict[str, Any]:
        """Return the scores in a report, as JSON values; null if they are not defined."""

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Return what ``dpmac eval --json`` prints besides metrics, as JSON values."""

    @abstractmethod
    def table(self) -> Table | None:
        """Return what ``dpmac eval`` prints besides metrics."""

    @abstractmethod
    def counted(self) -> tuple[NDArray[np.int64], int]:
        """Return what each record adds to a covered score, and the most that it can add.

        Integers from 0 to the second value, shape (records,).
        """

    def remark(self, loss: str) -> Remark | None:
        """Return a note on a model that was trained with a loss and learned little, or None."""
        return None

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class; empty without classes."""
        return []

    @property
    def confusion(self) -> NDArray[np.int64]:
        """Counts of records by true and predicted class; empty without classes."""
        return np.zeros((0, 0), np.int64)


@dataclass(frozen=True)
class Task(ABC):
    """Prediction task: what the outputs of a network are for a record.

    Attributes:
        names: names of the outputs, in their order.
        kind: name of the task in a report.
        of_record: what a record has, in words.
        unknown: what a record has whose output contains NaN, in words.
        losses: losses that fit, the default first; it is also the test loss.
        metrics: metrics of the task, the default first.
        reported: keys of scores in a report besides the default metric and the loss.
        target: dtype of the targets, as in numpy.
        public: what is declared of the targets, in words.
        weighted: whether classes can have weights, and their labels be smoothed.
        start: output of an untrained built-in network for all records; None for random outputs.
        network: name of the built-in network that the task needs; None for any network.
    """

    names: tuple[str, ...]

    kind: ClassVar[str]
    of_record: ClassVar[str]
    unknown: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[EvaluationMetric, ...]]
    reported: ClassVar[tuple[str, ...]]
    target: ClassVar[str]
    public: ClassVar[str] = "classes"
    weighted: ClassVar[bool] = True
    start: ClassVar[float | None] = None
    network: ClassVar[str | None] = None

    @property
    def outputs(self) -> int:
        """Number of outputs per record."""
        return len(self.names)

    @property
    def headline(self) -> EvaluationMetric:
        """EvaluationMetric that is shown unless another is chosen."""
        return self.metrics[0]

    @property
    def covered(self) -> tuple[str, ...]:
        """Names of the metrics that can be released with noise."""
        return tuple(metric.name for metric in self.metrics if metric.covered)

    @classmethod
    @abstractmethod
    def of_facts(cls, facts: TaskFacts) -> Task:
        """Return the task with these :attr:`facts`, which are of its kind."""

    @property
    @abstractmethod
    def described(self) -> str:
        """Return the outputs in words, such as "10 classes"."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Return the outputs by name, such as "the classes cat, dog"."""

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """Return how a model card names and uses the model."""

    @property
    @abstractmethod
    def facts(self) -> TaskFacts:
        """Return the facts of the task in a model file, as JSON values."""

    @property
    def width(self) -> float:
        """Largest value of the covered metric: of a record that is wrong in everything."""
        return 1.0

    @classmethod
    def fits(cls, loss: str) -> bool:
        """Return whether a loss fits; its parameter follows a colon."""
        return loss.partition(":")[0] in {name.partition(":")[0] for name in cls.losses}

    def encoded(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets as a network learns them, of the dtype :attr:`target`."""
        return targets.astype(self.target)

    def untested(self, targets: NDArray[Any]) -> tuple[str, ...]:
        """Return names of the outputs that the targets of test records say nothing about."""
        return ()

    def examples(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Return made-up outputs, shape (records, outputs), and their targets."""
        shape = max(4, 2 * self.outputs), self.outputs
        outputs = np.random.RandomState(0).standard_normal(shape).astype(np.float32)
        if self.target == "int64":
            return outputs, np.arange(len(outputs)) % self.outputs
        return outputs, np.linspace(-1, 1, outputs.size, dtype=np.float32).reshape(shape)

    @abstractmethod
    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return what outputs mean, in their shape; NaN if one contains NaN.

        ``outputs`` are those of a network, float32 or float64, shape (records, outputs).
        """

    @abstractmethod
    def columns(self, answers: NDArray[np.float32]) -> dict[str, Sequence[Any]]:
        """Return the columns that ``dpmac predict`` writes for :meth:`answers`.

        One of them is "predicted".
        """

    @abstractmethod
    def results(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64] | None = None
    ) -> Results:
        """Compare outputs, shape (records, outputs), with targets.

        ``owners`` is the index of each record's unit of privacy; None if each record is one.
        """
