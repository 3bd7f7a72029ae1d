"""Load a dataset onto a device: from torchvision, an installed package, or your own files."""

import re
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpmac_cli.data.array_file import channels_first
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Data, Split, fingerprint, split_of, standardisation
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.data.schema import DataFacts, Records, Source
from dpmac_cli.data.units import units_of
from dpmac_cli.data.user_data import inspect
from dpmac_cli.data.user_data import load as load_own
from dpmac_cli.errors import InputError
from dpmac_cli.libraries import sklearn_datasets, vision_datasets


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
        chosen: a key of :data:`dpmac_cli.data.registry.DATASETS`, or your own dataset.
        data_dir: folder of registered datasets, also for downloads if ``download``.
        found: facts of your own dataset, read when the run was configured.

    Raises:
        InputError: files are missing and cannot be downloaded, are damaged, are not the published
            ones, or do not match ``found``.
    """
    if isinstance(chosen, Source):
        found = found or inspect(chosen)
        facts, records = found.facts, load_own(chosen, found)
    else:
        facts = DATASETS[chosen]
        records = _from_torchvision(chosen, data_dir, download) if facts.torchvision else _digits()
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
        "or use another folder with --data-dir."
    )


def _digits() -> list[Records]:
    """Load scikit-learn's digits; a fixed fifth, drawn with a public seed, is the test set."""
    bunch, held_out = sklearn_datasets.load_digits(), DATASETS["digits"].test_size
    # RandomState's streams are frozen by numpy, so this split never changes.
    order = np.random.RandomState(0).permutation(len(bunch.target))
    records = Records(bunch.images.astype(np.uint8)[:, None], bunch.target)
    return [records.at(order[held_out:]), records.at(order[:held_out])]


def _from_torchvision(name: str, data_dir: Path, download: bool) -> list[Records]:
    """Load from disk, or download missing files, and explain failures."""
    files = [data_dir / file for file in DATASETS[name].files]
    download = download and bool(_missing(files))
    try:
        return [_part(name, data_dir, which, download) for which in ("train", "test")]
    except Exception as failure:  # its parsers raise any exception for a damaged file
        raise InputError(
            f"The dataset {name} {_what_failed(files, download, failure)}; or use another "
            "folder with --data-dir or the environment variable DPMAC_DATA_DIR; or use --dataset "
            "digits, which needs no files."
        ) from failure


def _part(name: str, data_dir: Path, which: str, download: bool) -> Records:
    """Load one split. torchvision checks the MD5 of pickled files before reading them."""
    given = getattr(vision_datasets, DATASETS[name].torchvision)
    # torchvision would read a cache of MNIST in its first format with torch.load.
    kind: Any = type(given.__name__, (given,), {"_check_legacy_exist": lambda self: False})
    by_name = "split" in signature(kind).parameters
    part = {"split": which} if by_name else {"train": which == "train"}
    loaded = kind(data_dir, download=download, **part)
    labels = loaded.labels if hasattr(loaded, "labels") else loaded.targets
    return Records(channels_first(np.asarray(loaded.data)), labels)


def _missing(files: Sequence[Path]) -> list[str]:
    return [file.name for file in files if not file.exists()]


def _what_failed(files: Sequence[Path], tried: bool, failure: Exception) -> str:
    """Return the cause of a failure and its remedy, without torchvision's terms."""
    folder, missing = files[0].parent, _missing(files)
    if missing:
        last = str(failure).strip().rpartition("\n")[2]
        reason = re.sub(r"<urlopen error |\[Errno -?\d+\] |[>.]+$", "", last)
        download = f" and could not be downloaded ({reason})" * tried
        return f"is not in {folder}{download}. Put there: {', '.join(missing)}"
    reason = getattr(failure, "strerror", None) or "a file is damaged, or of another kind"
    return f"in {folder} cannot be read ({reason}). Remove its files to download them again"
