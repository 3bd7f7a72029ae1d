"""Evaluation of a model on a test split."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpmac_cli.data.dataset import EVALUATION_BATCH, Data, Split
from dpmac_cli.torch_errors import code_of_network


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores of a model on every sample of a split.

    Attributes:
        loss: mean cross entropy.
        confusion: counts, confusion[true class, predicted class], int64.
        unanswered: counts by true class of samples for which the output holds NaN, int64; no class
            is predicted for these, which is wrong.
    """

    loss: float
    confusion: Tensor
    unanswered: Tensor

    @property
    def samples(self) -> int:
        """Number of samples scored."""
        return int(self.confusion.sum() + self.unanswered.sum())

    @property
    def accuracy(self) -> float:
        """Fraction classified correctly, 0 to 1."""
        return int(self.confusion.diagonal().sum()) / self.samples

    @property
    def per_class(self) -> list[float]:
        """Accuracy within each true class, 0 to 1; nan for a class without samples."""
        right = (
            self.confusion.diagonal().double() / (self.confusion.sum(1) + self.unanswered).double()
        )
        return [float(value) for value in right]


@torch.no_grad()
def _logits(model: nn.Module, data: Data, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and labels of every sample of a split, one batch at a time."""
    training = model.training
    model.eval()
    for begin in range(0, len(split), EVALUATION_BATCH):
        part = slice(begin, begin + EVALUATION_BATCH)
        x = data.standardised(split.images[part])
        with code_of_network(x):
            logits = model(x)
        yield logits, split.labels[part]
    model.train(training)


def evaluate(model: nn.Module, data: Data, split: Split) -> Evaluation:
    """Score every sample of a split."""
    loss, confusion, unanswered = 0.0, None, None
    for logits, labels in _logits(model, data, split):
        loss += cross_entropy(logits, labels, reduction="sum").item()
        classes = logits.shape[1]
        lost = logits.isnan().any(1)
        cells = labels * classes + logits.argmax(1)
        cells = torch.bincount(cells[~lost], minlength=classes**2).view(classes, classes)
        without = torch.bincount(labels[lost], minlength=classes)
        confusion = cells if confusion is None else confusion + cells
        unanswered = without if unanswered is None else unanswered + without
    assert confusion is not None  # noqa: S101  (a split is not empty)
    assert unanswered is not None  # noqa: S101
    return Evaluation(loss / len(split), confusion.cpu(), unanswered.cpu())


def losses_of(model: nn.Module, data: Data, split: Split) -> Tensor:
    """Return the cross entropy of each sample of a split, shape (samples,)."""
    scored = _logits(model, data, split)
    return torch.cat([cross_entropy(*batch, reduction="none") for batch in scored])
