"""Task: what a network predicts for a record, and how its outputs are scored.

Outputs and targets are NumPy arrays on the CPU. Tasks load neither NumPy nor torch: settings, and
so help, know them. A task is registered by :func:`register_task`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from dpmac_cli.libraries import np
from dpmac_cli.tasks.metrics import Compared, EvaluationMetric

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Outputs = NDArray[np.floating[Any]]

#: Largest absolute value of numbers; others are clipped to it.
FARTHEST = 1e30


@dataclass(frozen=True)
class Task(ABC):
    """Prediction task: what the outputs of a network are for a record.

    Attributes:
        names: names of the outputs, in their order.
        kind: name of the task in ``--task`` and in reports; :func:`register_task` sets it.
        of_record: what a record has, in words.
        listed, result: the title of the names of its outputs, and a sentence on what the function
            ``predict`` returns, in a model card.
        losses: losses that fit, the default first; it is also the test loss.
        functions: losses that :func:`~dpmac_cli.dp.losses.build_loss` does not know, by name. Each
            takes outputs and targets, torch tensors with one row per sample, and returns one loss
            per sample.
        metrics: metrics of the task, the default first.
        reported: keys of further scores in a report, besides metrics and their constants.
        target: dtype of the targets, as in numpy.
        public: what is declared of the targets, in words.
        weighted: whether classes can have weights, and their labels be smoothed.
        labelled: whether records have labels or numbers to predict.
        asked: whether the task must be asked for by ``--task``.
        start: output of an untrained built-in network for all records; None for random outputs.
        network: name of the built-in network that the task needs; None for any network.
    """

    names: tuple[str, ...]

    kind: ClassVar[str]
    of_record: ClassVar[str]
    listed: ClassVar[str]
    result: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]
    functions: ClassVar[Mapping[str, Callable[[Any, Any], Any]]] = {}
    metrics: ClassVar[tuple[EvaluationMetric, ...]]
    reported: ClassVar[tuple[str, ...]] = ()
    target: ClassVar[str]
    public: ClassVar[str] = "classes"
    weighted: ClassVar[bool] = True
    labelled: ClassVar[bool] = True
    asked: ClassVar[bool] = True
    start: ClassVar[float | None] = None
    network: ClassVar[str | None] = None

    @property
    def outputs(self) -> int:
        """Number of outputs per record."""
        return len(self.names)

    @property
    def open(self) -> bool:
        """Return whether the range of the targets is still to be found by noisy counts."""
        return False

    @property
    def calibrates(self) -> bool:
        """Return whether a noisy histogram of training records calibrates the task."""
        return False

    @property
    def counted_facts(self) -> Mapping[str, Any]:
        """Attributes that follow from noisy counts of the training records, by their names.

        A report has them among the facts of its network, so their names are keys of it. None stands
        for what was not counted.
        """
        return {}

    @property
    def headline(self) -> EvaluationMetric:
        """EvaluationMetric that is shown unless another is chosen: the first of :attr:`metrics`."""
        return self.metrics[0]

    @property
    def covered(self) -> tuple[str, ...]:
        """Names of the metrics that can be released with noise; () if none can."""
        return tuple(metric.name for metric in self.metrics if metric.covered)

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the task with these facts, which are of its kind; the inverse of :attr:`facts`.

        Args:
            facts: "classes" and "target", as JSON values.
        """
        return cls(tuple(facts["classes"]))

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the task in a model file: "classes" and "target", as JSON values."""
        return {"classes": list(self.names), "target": {"kind": self.kind}}

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
    def code(self) -> str:
        """Python expression for what is predicted, with ``{}`` for the network's outputs.

        It is in the model card, and uses methods of a torch tensor of shape (records, outputs).
        """

    @property
    def probabilities_code(self) -> str:
        """Python expression for calibrated probabilities of ``outputs``; "" if there are none."""
        return ""

    @property
    def width(self) -> float:
        """Largest value of the covered metric: of a record that is wrong in everything."""
        return 1.0

    @classmethod
    def fits(cls, loss: str) -> bool:
        """Return whether a loss is one of the task.

        Args:
            loss: name of a loss, whose parameter follows a colon, as in "quantile:0.9". The
                parameter is not checked.
        """
        return loss.partition(":")[0] in {name.partition(":")[0] for name in cls.losses}

    def encoded(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return targets as a network learns them, of the dtype :attr:`target`.

        Args:
            targets: targets as the records have them: numbers of classes, or numbers to predict,
                shape (records,).
        """
        return targets.astype(self.target)

    def recoded(self, targets: NDArray[Any], before: Task) -> NDArray[Any]:
        """Return targets that an earlier task encoded, in the range of this one or beyond it.

        Args:
            targets: targets as ``before`` encoded them, shape (records, ...).
            before: the earlier task, of another range.
        """
        return targets

    def limited(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return encoded targets as a network learns them: those beyond the range at its ends.

        Args:
            targets: see :meth:`recoded`.
        """
        return targets

    def untested(self, targets: NDArray[Any]) -> tuple[str, ...]:
        """Return names of the outputs that the targets of test records say nothing about.

        Args:
            targets: encoded targets of all test records.

        Returns:
            Such as the classes that no test record has; () without any.
        """
        return ()

    def examples(self) -> tuple[NDArray[np.float32], NDArray[Any]]:
        """Return made-up outputs and encoded targets, to try losses and metrics on.

        Returns:
            Outputs, float32, shape (records, outputs), and targets of as many records; always the
            same.
        """
        shape = max(4, 2 * self.outputs), self.outputs
        outputs = np.random.RandomState(0).standard_normal(shape).astype(np.float32)
        if self.target == "int64":
            return outputs, np.arange(len(outputs)) % self.outputs
        return outputs, np.linspace(-1, 1, outputs.size, dtype=np.float32).reshape(shape)

    def cells(self, outputs: Outputs, targets: NDArray[Any]) -> NDArray[np.int64]:
        """Return the cell of each record in the histogram of a calibration.

        Args:
            outputs: outputs of the network, shape (records, outputs).
            targets: encoded targets of the same records.

        Returns:
            Cells from 0, int64, shape (records,); -1 for a record that is in none. A cell depends
            on no other record.

        Raises:
            ValueError: the task has no calibration.
        """
        raise ValueError(f"{self.kind} has no calibration")

    @property
    def cell_count(self) -> int:
        """Number of cells of the histogram of a calibration; 0 if the task has none."""
        return 0

    def calibrated(self, counts: NDArray[np.float64], noise: float, records: float) -> Self:
        """Return a copy of the task with a calibration, which is post-processing of noisy counts.

        Args:
            counts: noisy counts of cells, shape (cells,).
            noise: standard deviation of the noise in each.
            records: public number of records or units that were counted, about.

        Raises:
            ValueError: the task has no calibration.
        """
        raise ValueError(f"{self.kind} has no calibration")

    def at(self, threshold: str) -> Self:
        """Return a copy of the task with an operating point.

        Args:
            threshold: text of ``--threshold``: "balanced", "sensitivity=0.9", "0.3" or
                "most-likely".

        Raises:
            ValueError: the task has no operating points, or not this one.
        """
        raise ValueError(f"{self.kind} has no operating points")

    def adjusted(self, outputs: Any) -> Any:
        """Return outputs as the default loss takes them: calibrated, if the task has a calibration.

        Args:
            outputs: an array or a tensor, shape (records, outputs), which stays as it is.
        """
        return outputs

    @abstractmethod
    def answers(self, outputs: Outputs) -> NDArray[np.float32]:
        """Return what outputs mean, such as probabilities, in their shape; NaN if one contains NaN.

        Args:
            outputs: outputs of the network, float32 or float64, shape (records, outputs).
        """

    @abstractmethod
    def columns(self, outputs: Outputs) -> dict[str, Sequence[Any]]:
        """Return the columns that ``dpmac predict`` writes for outputs of a network.

        Args:
            outputs: outputs of the network, shape (records, outputs).

        Returns:
            Values by the name of the column, one per record. One column is "predicted", except of
            language models.
        """

    @abstractmethod
    def compared(
        self, outputs: Outputs, targets: NDArray[Any], owners: NDArray[np.int64]
    ) -> Compared:
        """Return predictions beside targets, from which metrics are computed.

        Args:
            outputs: outputs of the network for test records, shape (records, outputs).
            targets: their encoded targets.
            owners: index of each record's unit of privacy, shape (records,).
        """

    def counted(self, of: Compared) -> tuple[NDArray[np.int64], int]:
        """Return what each record adds to a covered score, and the most that it can add.

        Args:
            of: predictions beside targets.

        Returns:
            Integers from 0 to the second value, int64, shape (records,); and that value.

        Raises:
            ValueError: no metric of the task can be released with noise.
        """
        raise ValueError(f"{self.kind} has no covered score")

    def constant(self, of: Compared) -> dict[str, float]:
        """Return what some metrics are for the best constant prediction, by name; {} for none.

        Args:
            of: predictions for test records beside their targets.
        """
        return {}

    def details(self, of: Compared) -> dict[str, Any]:
        """Return further scores of a report and of ``dpmac eval --json``, as JSON values by key.

        Keys are among :attr:`reported`; {} without any.

        Args:
            of: predictions for test records beside their targets.
        """
        return {}

    def remark(self, of: Compared, loss: str) -> tuple[str, bool] | None:
        """Return a note on a model that is no better than a constant prediction.

        Args:
            of: predictions for test records beside their targets.
            loss: name of the loss that the model was trained with.

        Returns:
            What was measured, in one or more sentences, each with its full stop; and whether the
            outputs tell nothing, so that longer training or less noise may help. None if there is
            nothing to note.
        """
        return None


#: Tasks by name.
TASKS: dict[str, type[Task]] = {}
#: Names of the tasks that must be asked for.
ASKED: list[str] = []
#: Metrics of all tasks by name, and those that can be chosen.
METRICS: dict[str, EvaluationMetric] = {}
CHOSEN: dict[str, EvaluationMetric] = {}
#: Losses of all tasks without a parameter: see :func:`~dpmac_cli.dp.losses.build_loss`.
LOSSES: list[str] = []
#: Losses that a task computes itself: see :attr:`Task.functions`.
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {}

Registered = TypeVar("Registered", bound=type[Task])


def register_task(name: str) -> Callable[[Registered], Registered]:
    """Return a decorator that registers a class of tasks with its losses and metrics.

        @register_task("ordinal")
        class Ordinal(Task): ...

    An earlier task of the name is replaced. A metric or loss of the name of an earlier one must be
    the same.

    Args:
        name: name of the task in commands, such as ``--task``, and in reports.
    """

    def register(kind: Registered) -> Registered:
        kind.kind = name
        TASKS[name] = kind
        FUNCTIONS.update(kind.functions)
        for metric in kind.metrics:
            METRICS[metric.name] = metric
            if metric.chosen:
                CHOSEN[metric.name] = metric
        for loss in kind.losses:
            if ":" not in loss and loss not in LOSSES:
                LOSSES.append(loss)
        if kind.asked and name not in ASKED:
            ASKED.append(name)
        return kind

    return register


def is_loss_of_a_task(loss: str) -> bool:
    """Return whether a loss is one of a registered task, and not a user-supplied function.

    Args:
        loss: name of the loss, with its parameter after a colon, if it has one.
    """
    return any(task.fits(loss) for task in TASKS.values())


def is_labelled(task: str | None) -> bool:
    """Return whether the records of a task have labels or numbers to predict.

    Args:
        task: name of a registered task; None if none was asked for, whose records have labels.
    """
    return task is None or TASKS[task].labelled


def headline_in(line: Mapping[str, Any]) -> EvaluationMetric:
    """Return the metric that a line of metrics.jsonl is about.

    Args:
        line: the line as JSON values.

    Returns:
        The first headline metric of a task that the line has; without any, that of the first task.
    """
    headlines = [task.metrics[0] for task in TASKS.values()]
    return next((metric for metric in headlines if metric.logged in line), headlines[0])


def task_of(facts: Mapping[str, Any]) -> Task:
    """Return the task that :attr:`Task.facts` describe: of classification without a target.

    Args:
        facts: "classes" and "target", as JSON values.

    Raises:
        KeyError: the task is not registered in this process.
    """
    kind = (facts["target"] or {"kind": next(iter(TASKS))})["kind"]
    return TASKS[kind].of_facts(facts)
