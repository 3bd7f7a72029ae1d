"""Evaluation of a model on a test split."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.data.dataset import Data, Split
from dpmac_cli.data.units import Units
from dpmac_cli.dp.clipping.batch_invariance import (
    LEAST_ROWS,
    TRIED,
    Manner,
    fill_rows,
    find_manner,
)
from dpmac_cli.dp.clipping.per_sample import each_alone
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.models.trial import dtype_of
from dpmac_cli.tasks.task import Results, Task
from dpmac_cli.torch_errors import code_of_network

#: Number of records to score at a time, and largest number of values in their images.
RECORDS, NUMBERS = 2048, 2048 * 3 * 32 * 32
#: Number of rows in each batch in which no record may round another. It does not depend on the
#: number of records, which a single one changes.
ROWS = 128


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Outputs of a model for every sample of a split, and the scores derived from them.

    A sample whose output contains NaN counts as wrong.

    Attributes:
        loss: mean of the task's default loss, regardless of the training loss.
        logits: outputs on the CPU, shape (samples, outputs).
        labels: targets on the CPU, as in :class:`~dpmac_cli.data.dataset.Split`.
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
    def results(self) -> Results:
        """Outputs compared with targets."""
        owners = None if self.units is None else self.units.owners
        return self.task.results(self.logits, self.labels, owners)

    @property
    def confusion(self) -> Tensor:
        """Return int64 counts by true and predicted class, (classes, classes), or (labels, 2, 2).

        For multi-class problems, samples whose output contains NaN are left out.
        """
        return self.results.confusion

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
        """Fraction of samples, or of labels, classified correctly, 0 to 1."""
        return self.metric("accuracy")

    @property
    def per_class(self) -> list[float]:
        """Accuracy in each true class, or in a label's positives, 0 to 1; nan without samples."""
        return self.results.per_class

    def metric(self, name: str) -> float:
        """Return a metric by its name; nan if it is not defined."""
        return self.results.metric(name)

    def values(self) -> dict[str, Any]:
        """Return the scores in a report, as JSON values."""
        return self.results.values()


@dataclass(frozen=True)
class Batching:
    """Batches of at most ``most`` records, filled to ``least`` rows, and how the network runs.

    ``run`` maps standardised images to logits; None for the network itself.
    """

    most: int = RECORDS
    least: int = LEAST_ROWS
    manner: Manner = field(default_factory=Manner)
    run: Callable[[Tensor], Tensor] | None = None


def places(records: int, shape: tuple[int, ...], most: int = RECORDS) -> Iterator[slice]:
    """Yield slices of at most ``most`` records of a given shape to score at a time."""
    size = max(1, min(most, NUMBERS // prod(shape)))
    return (slice(begin, begin + size) for begin in range(0, records, size))


@torch.no_grad()
def outputs(
    model: nn.Module,
    inputs: Iterable[Tensor],
    least: int = LEAST_ROWS,
    run: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of each batch of standardised images, filled up to ``least`` rows.

    They are converted to the dtype of the model. ``run`` is called instead of it if it is given.
    """
    training, dtype = model.training, dtype_of(model)
    model.eval()
    for x in inputs:
        with code_of_network(x):
            logits = (run or model)(fill_rows(x.to(torch.promote_types(x.dtype, dtype)), least))
        yield logits[: len(x)]
    model.train(training)


def invariant_batching(model: nn.Module, data: Data) -> Batching:
    """Return how to score test records so that none changes what is computed of another.

    The network sees each of them alone. Nor may one round another: it could move it across a kink
    or to another class. All batches have the same number of rows, and the network runs in a way in
    which their places do not matter, as a trial on this machine shows. If there is none, records
    are scored one by one.
    """
    shape, generator = data.test.images.shape[1:], torch.Generator().manual_seed(0)
    (rows, *_) = places(ROWS, shape, ROWS)
    base = torch.randn(TRIED, *shape, generator=generator).to(data.gain)

    training = model.training
    alone = each_alone(model.eval(), base)
    model.train(training)

    def run(x: Tensor) -> Tensor:
        (logits,) = outputs(model, [x], least=1, run=alone)
        return logits

    manner = find_manner(run, base, rows.stop, fixed=True)
    if manner is None:
        return Batching(most=1, least=1)
    least = manner.rows(rows.stop, rows.stop)
    return Batching(most=least, least=least, manner=manner, run=alone)


def evaluate(
    model: nn.Module, data: Data, split: Split, batching: Batching | None = None
) -> Evaluation:
    """Score every sample of a split; in any batches, unless ``batching`` is given."""
    how = batching or Batching()
    batches = list(places(len(split), split.images.shape[1:], how.most))
    inputs = (data.standardised(split.at(some)[0]) for some in batches)
    standard = build_loss(data.task.losses[0])
    loss, found = 0.0, list[Tensor]()
    with how.manner.running():
        for some, logits in zip(batches, outputs(model, inputs, how.least, how.run), strict=True):
            loss += standard(logits, split.labels[some]).sum().item()
            found.append(logits.cpu())
    logits, labels = torch.cat(found), split.labels.cpu()
    return Evaluation(loss / len(split), logits, labels, data.task, split.units)
