"""Evaluation of a model on a test split."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.units import Units
from dpmac_cli.dp.clipping.batch_invariance import LEAST_ROWS, fill_rows
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.torch_errors import code_of_network
from dpmac_cli.training import metrics

#: Number of records to score at a time, and largest number of values in their images.
RECORDS, NUMBERS = 2048, 2048 * 3 * 32 * 32


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Outputs of a model for every sample of a split, and the scores derived from them.

    A sample whose output contains NaN counts as wrong.

    Attributes:
        loss: mean cross-entropy, or mean binary cross-entropy for several labels per sample,
            regardless of the training loss.
        logits: outputs on the CPU, shape (samples, classes).
        labels: int64, shape (samples,); with several labels per sample uint8, (samples, labels).
        units: units of privacy that the samples belong to; None if each sample is one.
    """

    loss: float
    logits: Tensor
    labels: Tensor
    units: Units | None = None

    @property
    def confusion(self) -> Tensor:
        """Return int64 counts by true and predicted class, (classes, classes), or (labels, 2, 2).

        For multi-class problems, samples whose output contains NaN are left out.
        """
        if self.multilabel:
            cells = 2 * self.labels.long() + torch.from_numpy(self.answers.guess)
            return torch.stack([(cells == n).sum(0) for n in range(4)], 1).view(-1, 2, 2)
        classes, kept = self.logits.shape[1], ~self._lost
        cells = classes * self.labels[kept] + self.logits[kept].argmax(1)
        return torch.bincount(cells, minlength=classes**2).view(classes, classes)

    @property
    def unanswered(self) -> int:
        """Number of samples whose output contains NaN."""
        return int(self._lost.sum())

    @property
    def multilabel(self) -> bool:
        """Return whether samples have any number of labels instead of one class."""
        return self.labels.ndim > 1

    @property
    def samples(self) -> int:
        """Number of samples scored."""
        return len(self.labels)

    @cached_property
    def accuracy(self) -> float:
        """Fraction of samples, or of labels, classified correctly, 0 to 1."""
        return self.metric("accuracy")

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class, or in a label's positives, 0 to 1; nan without samples."""
        return metrics.sensitivity_and_specificity(self.answers)[0]

    def metric(self, name: str) -> float:
        """Return a metric by its name, 0 to 1; nan if it is not defined."""
        return metrics.metric(name, self.answers)

    def values(self) -> dict[str, Any]:
        """Return all metrics, the accuracy's interval and per-class rates as JSON values."""
        found = metrics.as_values(self.answers, metrics.all_metrics(self.answers))
        return found | {"accuracy_interval": list(metrics.accuracy_interval(self.answers))}

    @cached_property
    def answers(self) -> metrics.Answers:
        """Labels and predictions of the samples as arrays, for computing metrics."""
        exclusive, lost = not self.multilabel, self._lost[:, None]
        if exclusive:
            classes = self.logits.shape[1]
            truth = one_hot(self.labels, classes).bool()
            guess = one_hot(self.logits.argmax(1), classes).bool() & ~lost
        else:
            truth = self.labels.bool()
            guess = torch.where(lost, ~truth, self.logits > 0)
        scores = probabilities(self.logits, exclusive=exclusive)
        scores = torch.where(lost, 2 - 3 * truth.float(), scores)
        parts = truth.numpy(), guess.numpy(), scores.numpy()
        return metrics.Answers(*parts, exclusive, self.units)

    @property
    def _lost(self) -> Tensor:
        return self.logits.isnan().any(1)


def probabilities(logits: Tensor, *, exclusive: bool = True) -> Tensor:
    """Return probabilities of classes or labels, float32; NaN if an output contains NaN."""
    finite = logits.nan_to_num(0.0)  # infinity becomes the largest number, so softmax is not NaN
    found = finite.softmax(1) if exclusive else finite.sigmoid()
    return found.float().masked_fill_(logits.isnan().any(1, keepdim=True), torch.nan)


def places(records: int, shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of records of a given shape to score at a time."""
    size = max(1, min(RECORDS, NUMBERS // prod(shape)))
    return (slice(begin, begin + size) for begin in range(0, records, size))


@torch.no_grad()
def outputs(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the logits of each batch of standardised images."""
    training = model.training
    model.eval()
    for x in inputs:
        with code_of_network(x):
            logits = model(fill_rows(x, LEAST_ROWS))
        yield logits[: len(x)]
    model.train(training)


def evaluate(model: nn.Module, data: Data, split: Split) -> Evaluation:
    """Score every sample of a split."""
    batches = list(places(len(split), split.images.shape[1:]))
    inputs = (data.standardised(split.at(some)[0]) for some in batches)
    standard = build_loss("bce" if split.labels.ndim > 1 else "cross-entropy")
    loss, found = 0.0, list[Tensor]()
    for some, logits in zip(batches, outputs(model, inputs), strict=True):
        loss += standard(logits, split.labels[some]).sum().item()
        found.append(logits.cpu())
    return Evaluation(loss / len(split), torch.cat(found), split.labels.cpu(), split.units)
