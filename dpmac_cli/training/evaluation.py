"""Evaluation of a model on a test split."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.data.units import Units
from dpmac_cli.dp.clipping.batch_invariance import (
    LEAST_ROWS,
    fill_rows,
    unaffected,
)
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.dp.torch_errors import code_of_network, code_of_task
from dpmac_cli.files import finite_or_none
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.models.modes import evaluating
from dpmac_cli.models.trial_samples import dtype_of
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.tasks.class_metrics import confusion_of, rates
from dpmac_cli.tasks.intervals import intervals
from dpmac_cli.tasks.metrics import Compared, Interval
from dpmac_cli.tasks.task import Task

#: Largest number of classes whose confusion matrix is in a report.
MOST_COUNTED = 100
#: Number of records to score at a time, and largest number of values in their images.
RECORDS, NUMBERS = 2048, 2048 * 3 * 32 * 32
#: Number of rows in each batch in which no record may round another. It does not depend on the
#: number of records, which a single one changes.
ROWS = 128


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Outputs of a model for every sample of a split, and the scores derived from them.

    :func:`evaluate` makes it. Scores are computed when they are asked for, without noise: of
    private records, they are private. A sample whose output contains NaN counts as wrong.

    Attributes:
        loss: mean of the task's default loss, regardless of the training loss.
        logits: outputs on the CPU, shape (samples, outputs).
        labels: targets on the CPU, as in :class:`~dpmac_cli.models.dataset.Split`.
        task: what the outputs predict.
        units: units of privacy that the samples belong to; None if each sample is one.
    """

    loss: float
    logits: Tensor
    labels: Tensor
    task: Task
    units: Units | None = None

    def __repr__(self) -> str:
        score = self.task.headline
        value = score.text(self.metric(score.name))
        return f"Evaluation({score.title} {value}, loss {self.loss:.4g}, {self.samples:,} samples)"

    @cached_property
    @code_of_task()
    def compared(self) -> Compared:
        """Predictions beside targets, from which all metrics are computed; computed once."""
        owners = np.arange(self.samples) if self.units is None else self.units.owners
        return self.task.compared(self.logits.numpy(), self.labels.numpy(), owners)

    @property
    def confusion(self) -> NDArray[np.int64]:
        """Return int64 counts by true and predicted class, shape (classes, classes).

        Samples whose output contains NaN are left out. It is for classifiers alone.
        """
        return confusion_of(self.compared)

    @property
    def unanswered(self) -> int:
        """Number of samples whose output contains NaN."""
        return int(self.logits.isnan().any(1).sum())

    @property
    def samples(self) -> int:
        """Number of samples scored."""
        return len(self.labels)

    @cached_property
    def accuracy(self) -> float:
        """Fraction of samples classified correctly, 0 to 1.

        Raises:
            KeyError: the task does not classify.
        """
        return self.metric("accuracy")

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class, 0 to 1; nan without samples.

        The order is that of the task's classes.
        """
        sensitivity, _ = rates(self.compared)
        return [float(rate) for rate in sensitivity]

    def metric(self, name: str) -> float:
        """Return a metric of the task by its name; nan if it is not defined.

        Args:
            name: name of one of :attr:`~dpmac_cli.tasks.task.Task.metrics`, such as "accuracy".

        Raises:
            KeyError: the task has no such metric.
        """
        metric = {metric.name: metric for metric in self.task.metrics}[name]
        with code_of_task():
            return metric.value(self.compared)

    @cached_property
    @code_of_task()
    def metrics(self) -> dict[str, float]:
        """All metrics of the task by name; nan if they are not defined."""
        return {metric.name: metric.value(self.compared) for metric in self.task.metrics}

    def intervals(
        self, names: Iterable[str] | None = None, resamples: int | None = None
    ) -> dict[str, Interval]:
        """Return 95% intervals of metrics for records like these, by name.

        Args:
            names: names of the metrics; None for all.
            resamples: see :func:`~dpmac_cli.tasks.intervals.intervals`; None for its default.

        Returns:
            The lower and the upper end by name; nan where the metric is not defined.

        Raises:
            KeyError: the task has no metric of a name.
        """
        values = self.metrics
        if names:
            values = {name: self.metric(name) for name in names}
        with code_of_task():
            return intervals(self.compared, self.task.metrics, values, resamples)

    @code_of_task()
    def details(self) -> dict[str, Any]:
        """Return scores by class, and those of the best constant prediction, as JSON values.

        Keys are those of :meth:`~dpmac_cli.tasks.task.Task.details`, and
        :attr:`~dpmac_cli.tasks.metrics.EvaluationMetric.constant` of each metric that a constant
        prediction has a value of.
        """
        constant = self.task.constant(self.compared)
        baselines = {}
        for metric in self.task.metrics:
            if metric.name in constant:
                baselines[metric.constant] = finite_or_none(constant[metric.name])
        return {**baselines, **self.task.details(self.compared)}

    @code_of_task()
    def remark(self, loss: str) -> tuple[str, bool] | None:
        """Return a remark on a model that learned little; None if there is nothing to remark.

        Args:
            loss: name of the loss that it was trained with.

        Returns:
            The remark, and whether the model learned nothing: see
            :meth:`~dpmac_cli.tasks.task.Task.remark`.
        """
        return self.task.remark(self.compared, loss)

    def values(self) -> dict[str, Any]:
        """Return the scores in a report, as JSON values; null if they are not defined.

        The confusion matrix is left out for more than :data:`MOST_COUNTED` classes.
        """
        headline, details = self.task.headline, self.details()
        if self.task.outputs > MOST_COUNTED:
            details["confusion"] = None
        metrics = dict[str, float | None]()
        for metric in self.task.metrics:
            metrics[metric.key] = finite_or_none(self.metrics[metric.name])
        low, high = self.intervals([headline.name])[headline.name]
        interval = [finite_or_none(low), finite_or_none(high)]
        return {**metrics, **details, f"{headline.key}_interval": interval}


def places(records: int, shape: tuple[int, ...], most: int = RECORDS) -> Iterator[slice]:
    """Yield slices of records to score at a time, until all are done; nothing for no records.

    Args:
        records: number of records.
        shape: shape of a record. Of large ones, fewer are scored at a time.
        most: largest number of records in a slice.

    >>> list(places(5, (3,), most=2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    size = max(1, min(most, NUMBERS // prod(shape)))
    return (slice(begin, begin + size) for begin in range(0, records, size))


@torch.no_grad()
def outputs(
    model: nn.Module,
    inputs: Iterable[Tensor],
    run: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of each batch, shape (rows, outputs), on the device of the model.

    Args:
        model: the network, which is put in evaluation mode meanwhile.
        inputs: batches of standardised records, which are converted to the dtype of the model.
        run: computes the logits of a batch in place of the model; None for the model.

    Raises:
        ModelError: the network fails on a batch.
    """
    dtype = dtype_of(model)
    with evaluating(model):
        for x in inputs:
            with code_of_network(x):
                rows = x.to(torch.promote_types(x.dtype, dtype))
                logits = model(fill_rows(rows, LEAST_ROWS)) if run is None else run(rows)
            yield logits[: len(x)]


def _alone(
    model: nn.Module, data: Data, size: int, layers: LayerDraws
) -> Callable[[Tensor], Tensor]:
    """Return what computes the logits of up to ``size`` records, none of which changes another's.

    The network sees each of them alone. Nor may one round another: it could move it across a kink
    or to another class. Random numbers of the network are drawn in the order of the records, so
    one changes those of the records after it: they are new in each call, and secret.
    """
    like = data.gain.new_empty(data.train.images.shape[1:])
    with evaluating(model), layers.of(0):
        each = unaffected(model, like, size, may_mix=True)
    calls = itertools.count(1)

    def run(rows: Tensor) -> Tensor:
        with layers.of(next(calls)):
            return each(rows)

    return run


def outputs_of(
    model: nn.Module, data: Data, split: Split, *, covered: LayerDraws | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield places in a split, and the logits of the samples there, until all are done.

    Args:
        model: the network, on the device of ``data``.
        data: facts of the records, and how they are standardised.
        split: samples.
        covered: secret random numbers of the network's layers, used only here, if epsilon covers
            what is computed from the logits: then no sample changes the logits of another. This is
            slower. None if it does not.

    Yields:
        a slice of the split, and logits of shape (samples there, outputs).
    """
    shape = split.images.shape[1:]
    most, run = RECORDS, None
    if covered is not None:
        most = next(places(ROWS, shape, ROWS)).stop  # the same for any number of samples
        run = _alone(model, data, most, covered)
    batches = list(places(len(split), shape, most))
    inputs = (data.standardised(split.at(some)[0]) for some in batches)
    return zip(batches, outputs(model, inputs, run), strict=True)


def on_cpu(logits: Tensor) -> Tensor:
    """Return logits on the CPU in a dtype that NumPy has: bfloat16 and float16 become float32.

    Args:
        logits: outputs on any device, of any shape.

    >>> on_cpu(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return logits.to("cpu", torch.promote_types(logits.dtype, torch.float32))


def losses(model: nn.Module, data: Data, split: Split) -> Tensor:
    """Return the task's default loss of every sample of a split, shape (samples,).

    It is float64, on the CPU.

    Args:
        model: the network, on the device of ``data``.
        data: facts of the records, and how they are standardised.
        split: samples.
    """
    standard = build_loss(data.task.losses[0])
    values = torch.empty(len(split), dtype=torch.float64)
    for some, logits in outputs_of(model, data, split):
        loss = standard(data.task.adjusted(logits), split.labels[some])
        values[some] = loss.double().cpu()
    return values


def evaluate(
    model: nn.Module, data: Data, split: Split, *, covered: LayerDraws | None = None
) -> Evaluation:
    """Score every sample of a split.

    Args:
        model: the network, on the device of ``data``, which is put in evaluation mode meanwhile.
        data: facts of the records, and how they are standardised.
        split: samples to score, at least one.
        covered: secret random numbers of the network's layers, used only here, if the score is
            covered by epsilon: then none changes the score of another. Noise is not added here.
    """
    standard = build_loss(data.task.losses[0])
    kind = torch.promote_types(dtype_of(model), torch.float32)
    # Small tensors that stay between large ones that go would keep the memory of all of them.
    outputs, total = torch.empty(len(split), data.task.outputs, dtype=kind), 0.0
    for some, logits in outputs_of(model, data, split, covered=covered):
        total += standard(data.task.adjusted(logits), split.labels[some]).sum().item()
        outputs[some] = logits
    return Evaluation(total / len(split), outputs, split.labels.cpu(), data.task, split.units)
