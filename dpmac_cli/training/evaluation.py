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
        counts: by true class and predicted class, int64, shape (classes, classes + 1); the last
            column is of samples whose output holds NaN, which is wrong.
    """

    loss: float
    counts: Tensor

    @property
    def confusion(self) -> Tensor:
        """Counts by true and predicted class, shape (classes, classes)."""
        return self.counts[:, :-1]

    @property
    def unanswered(self) -> Tensor:
        """Counts by true class of samples for which no class is predicted, shape (classes,)."""
        return self.counts[:, -1]

    @property
    def samples(self) -> int:
        """Number of samples scored."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Fraction classified correctly, 0 to 1."""
        return int(self.counts.diagonal().sum()) / self.samples

    @property
    def per_class(self) -> list[float]:
        """Accuracy within each true class, 0 to 1; nan for a class without samples."""
        right: list[float] = (self.counts.diagonal().double() / self.counts.sum(1)).tolist()
        return right


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
    loss, counts = 0.0, torch.zeros(())
    for logits, labels in _logits(model, data, split):
        loss += cross_entropy(logits, labels, reduction="sum").item()
        classes = logits.shape[1]
        guesses = logits.argmax(1).masked_fill_(logits.isnan().any(1), classes)
        cells = (classes + 1) * labels + guesses
        found = torch.bincount(cells, minlength=classes * (classes + 1))
        counts = counts.to(found) + found.view(classes, classes + 1)
    return Evaluation(loss / len(split), counts.cpu())
