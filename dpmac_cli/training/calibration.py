"""Calibration of a trained model: one noisy histogram of the training records under its weights."""

import numpy as np
from torch import nn

from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.dp.histogram import NoisyHistogram
from dpmac_cli.models.dataset import Data
from dpmac_cli.randomness.noise import SeededNormals
from dpmac_cli.training.evaluation import on_cpu, outputs_of


def training_histogram(
    model: nn.Module, data: Data, event: TrainingEvent, noise: SeededNormals
) -> NoisyHistogram:
    """Count training records in the cells of their task, with noise.

    No record rounds the outputs for another, so none moves another to another cell.

    Args:
        model: the network with the weights that are published.
        data: records, of which those for training are read.
        event: event of the histogram, which has begun.
        noise: fresh random numbers, used only here.
    """
    split, task = data.train, data.task
    cells = [
        task.cells(on_cpu(logits).numpy(), split.labels[some].cpu().numpy())
        for some, logits in outputs_of(model, data, split, covered=True)
    ]
    owners = None if split.units is None else split.units.owners
    together = np.concatenate(cells)[:, None]
    return NoisyHistogram.release(together, (task.cell_count,), event, noise, owners)
