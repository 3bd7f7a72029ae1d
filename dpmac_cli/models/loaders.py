"""Move the records of a dataset onto a device."""

import torch

from dpmac_cli.config import records as kinds
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Dataset
from dpmac_cli.data.dataset import Split as Records
from dpmac_cli.data.units import units_of
from dpmac_cli.features.texts import example_of
from dpmac_cli.models.dataset import Data, Split, scaling_of, split_of


def on_device(dataset: Dataset, device: torch.device, records: kinds.Records | None = None) -> Data:
    """Return the records of a dataset on a device.

    ``records`` say how they are scaled; None for the dataset's.
    """
    known = records or dataset.facts.records
    train, test = (_split(part, device) for part in (dataset.train, dataset.test))
    scaling = scaling_of(known, device)
    return Data(train, test, *scaling, dataset.facts.task, example_of(known)).to(device)


def _split(records: Records, device: torch.device) -> Split:
    labels = torch.as_tensor(records.y)
    units = None if records.unit is None else units_of(records.unit)
    if isinstance(records.x, Rows):
        return split_of(records.x, labels, units, device)
    return Split(torch.as_tensor(records.x), labels, units=units)
