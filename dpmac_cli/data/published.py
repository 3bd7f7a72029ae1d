"""Published datasets: read from torchvision's files, or from an installed package."""

import re
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.facts import Records
from dpmac_cli.data.array_file import channels_first
from dpmac_cli.errors import InputError
from dpmac_cli.libraries import sklearn_datasets, vision_datasets


def read_published(name: str, data_dir: Path, download: bool) -> list[Records]:
    """Return the training and test records of a registered dataset.

    Args:
        name: key of :data:`dpmac_cli.config.datasets.DATASETS`.
        data_dir: folder of its files.
        download: whether to download missing files.

    Raises:
        InputError: files are missing and cannot be downloaded, or are damaged.
    """
    if DATASETS[name].torchvision:
        return _from_torchvision(name, data_dir, download)
    return _digits()


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
            "folder with {data_dir} or the environment variable DPMAC_DATA_DIR; or use "
            "{dataset=}digits, which needs no files."
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
