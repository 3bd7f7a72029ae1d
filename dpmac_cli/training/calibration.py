"""Calibration of a trained model: one noisy histogram of the training records under its weights."""

from dataclasses import replace

import numpy as np
from torch import nn

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.data.units import units_of
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.models.dataset import Data, Split
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.training.evaluation import on_cpu, outputs_of


def training_histogram(
    model: nn.Module,
    data: Data,
    event: TrainingEvent,
    noise: SeededNormals,
    key: bytes,
    layers: LayerDraws,
) -> NoisyHistogram:
    """Count training records in the cells of their task, with noise.

    No record rounds the outputs for another, so none moves another to another cell. Call it once
    for an event that has begun in the account: it does not begin it.

    Args:
        model: the network with the weights that are published.
        data: records, of which those for training are read.
        event: event of the histogram, which has begun.
        noise: fresh random numbers, used only here.
        key: secret key that says which records are counted, used only here, if the sampling rate of
            the event is below 1.
        layers: secret random numbers of the network's layers, used only here.

    Returns:
        One noisy count per cell, see :attr:`~dpmac_cli.tasks.task.Task.cell_count`.
    """
    split, task = data.train, data.task
    if event.sampling_rate < 1:
        split = drawn_from(split, event, key)
    cells = [np.empty(0, np.int64)]
    for some, logits in outputs_of(model, data, split, covered=layers):
        labels = split.labels[some].cpu().numpy()
        cells.append(task.cells(on_cpu(logits).numpy(), labels))
    of_records = np.concatenate(cells)[:, None]  # (records, 1)
    return NoisyHistogram.release(of_records, (task.cell_count,), event, noise, split.owners)


def drawn_from(split: Split, event: TrainingEvent, key: bytes) -> Split:
    """Return a Poisson sample of the records of a split, or of its units with all their records.

    The split is not changed. The sample may be empty.

    Args:
        split: records.
        event: event of one step, with the probability that a record or unit is drawn.
        key: secret key, 32 bytes, used only here.
    """
    sampler = KeyedSampler(event, size=split.size, key=key, secure=True)
    drawn = sampler.draw(1)
    if split.units is None:
        return split.taken(drawn)
    owners = split.units.owners
    places = np.flatnonzero(np.isin(owners, drawn))
    return replace(split.taken(places), units=units_of(owners[places]))
