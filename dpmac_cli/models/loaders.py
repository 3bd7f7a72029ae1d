"""Load a dataset onto a device: from torchvision, an installed package, or your own files."""

from pathlib import Path

import torch

from dpmac_cli.config.datasets import DATASETS, Dataset
from dpmac_cli.config.facts import DataFacts, Records, Source
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.published import read_published
from dpmac_cli.data.units import units_of
from dpmac_cli.data.user_data import inspect
from dpmac_cli.data.user_data import load as load_own
from dpmac_cli.errors import InputError
from dpmac_cli.models.dataset import Data, Split, fingerprint, split_of, standardisation


def load_data(
    chosen: str | Source,
    data_dir: Path,
    device: torch.device,
    *,
    download: bool = True,
    found: DataFacts | None = None,
) -> Data:
    """Load a dataset onto a device.

    Args:
        chosen: a key of :data:`dpmac_cli.config.datasets.DATASETS`, or your own dataset.
        data_dir: folder of registered datasets, also for downloads if ``download``.
        found: facts of your own dataset, read when the run was configured.

    Raises:
        InputError: files are missing and cannot be downloaded, are damaged, are not the published
            ones, or do not match ``found``.
    """
    if isinstance(chosen, Source):
        found = found or inspect(chosen)
        facts: Dataset = found
        records = load_own(chosen, found)
    else:
        facts = DATASETS[chosen]
        records = read_published(chosen, data_dir, download)
    train, test = (_split(part, device) for part in records)
    if not isinstance(chosen, Source):
        _check(chosen, train, test, data_dir)
    gain, offset = standardisation(*facts.constants, device)
    return Data(train, test, gain, offset, facts.task).to(device)


def _split(records: Records, device: torch.device) -> Split:
    x, labels = records.x, torch.as_tensor(records.y)
    units = None if records.units is None else units_of(records.units)
    if isinstance(x, Rows):
        return split_of(x, labels, units, device)
    return Split(torch.as_tensor(x), labels, units=units)


def _check(name: str, train: Split, test: Split, data_dir: Path) -> None:
    """Reject files that differ from the published dataset."""
    facts = DATASETS[name]
    shapes = " and ".join(str(tuple(part.images.shape)) for part in (train, test))
    wanted = " and ".join(str((n, *facts.shape)) for n in (facts.train_size, facts.test_size))
    if shapes != wanted:
        fault = f"its training and test images have the shapes {shapes} instead of {wanted}"
    elif facts.sha256 is not None and (found := fingerprint(train, test)) != facts.sha256:
        fault = f"its contents differ (SHA-256 {found[:16]}... instead of {facts.sha256[:16]}...)"
    else:
        return
    raise InputError(
        f"The dataset {name} in {data_dir} is not the published one: {fault}. Remove its files, "
        "or use another folder with {data_dir}."
    )
