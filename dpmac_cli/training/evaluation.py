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
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.torch_errors import code_of_network
from dpmac_cli.training import metrics

#: Records that are scored at a time, and most numbers in their images.
RECORDS, NUMBERS = 2048, 2048 * 3 * 32 * 32


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Outputs of a model for every sample of a split, and the scores derived from them.

    A sample whose output holds NaN is wrong.

    Attributes:
        loss: mean cross entropy, of several labels that of each, whatever was trained by.
        logits: outputs on the CPU, shape (samples, classes).
        labels: int64, shape (samples,); or with several labels a sample uint8, shape (samples,
            labels), and one logit per label.
    """

    loss: float
    logits: Tensor
    labels: Tensor

    @property
    def confusion(self) -> Tensor:
        """Counts by true and predicted class, (classes, classes); of each label, (labels, 2, 2).

        They are int64. Samples of several classes whose output holds NaN are left out.
        """
        if self.multilabel:
            cells = 2 * self.labels.long() + torch.from_numpy(self.answers.guess)
            return torch.stack([(cells == n).sum(0) for n in range(4)], 1).view(-1, 2, 2)
        classes, kept = self.logits.shape[1], ~self._lost
        cells = classes * self.labels[kept] + self.logits[kept].argmax(1)
        return torch.bincount(cells, minlength=classes**2).view(classes, classes)

    @property
    def unanswered(self) -> int:
        """Number of samples whose output holds NaN."""
        return int(self._lost.sum())

    @property
    def multilabel(self) -> bool:
        """Whether a sample has any number of labels, in place of one class."""
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
        """Accuracy within each true class, or positives of a label, 0 to 1; nan without samples."""
        return metrics.sensitivity_and_specificity(self.answers)[0]

    def metric(self, name: str) -> float:
        """Return a metric by its name, 0 to 1; nan where it is not defined."""
        return metrics.metric(name, self.answers)

    def values(self) -> dict[str, Any]:
        """Return all metrics and the rates of each class, as JSON values."""
        return metrics.as_values(self.answers, metrics.all_metrics(self.answers))

    @cached_property
    def answers(self) -> metrics.Answers:
        """Labels and predictions of the samples as arrays, for metrics."""
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
        return metrics.Answers(truth.numpy(), guess.numpy(), scores.numpy(), exclusive)

    @property
    def _lost(self) -> Tensor:
        return self.logits.isnan().any(1)


def probabilities(logits: Tensor, *, exclusive: bool = True) -> Tensor:
    """Return probabilities of classes, or of labels, float32; NaN where an output holds NaN."""
    finite = logits.nan_to_num(0.0)  # of infinity the largest number, whose softmax is no NaN
    found = finite.softmax(1) if exclusive else finite.sigmoid()
    return found.float().masked_fill_(logits.isnan().any(1, keepdim=True), torch.nan)


def places(records: int, shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield the places of records of some shape that are scored at a time."""
    size = max(1, min(RECORDS, NUMBERS // prod(shape)))
    return (slice(begin, begin + size) for begin in range(0, records, size))


@torch.no_grad()
def outputs(model: nn.Module, inputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the logits of each batch of standardised images."""
    training = model.training
    model.eval()
    for x in inputs:
        with code_of_network(x):
            logits = model(x)
        yield logits
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
    return Evaluation(loss / len(split), torch.cat(found), split.labels.cpu())
