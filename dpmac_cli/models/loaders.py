"""Move the records of a dataset onto a device."""

import torch

from dpmac_cli.config.datasets import Dataset as PublicFacts
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.data.dataset import Split as Records
from dpmac_cli.data.units import units_of
from dpmac_cli.models.dataset import Data, Split, split_of, standardisation


def on_device(dataset: Dataset, device: torch.device, facts: PublicFacts | None = None) -> Data:
    """Return the records of a dataset on a device.

    ``facts`` say how they are standardised; None for the dataset's.
    """
    known = facts or dataset.facts
    train, test = (_split(part, device) for part in (dataset.train, dataset.test))
    gain, offset = standardisation(*known.constants, device)
    return Data(train, test, gain, offset, known.task).to(device)


def _split(records: Records, device: torch.device) -> Split:
    labels = torch.as_tensor(records.y)
    units = None if records.unit is None else units_of(records.unit)
    if isinstance(records.x, Rows):
        return split_of(records.x, labels, units, device)
    return Split(torch.as_tensor(records.x), labels, units=units)
