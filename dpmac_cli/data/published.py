"""Published datasets: read from torchvision's files, or from an installed package.

The records are public, so their sizes and, where the registry has it, their SHA-256 are verified:
published constants and sizes, on which privacy costs rely, are true of these records alone.

Pickled files are read by torchvision only after it has compared their MD5. Failures are explained
with the folder and the files that are missing.
"""

import hashlib
import re
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.layout import channels_first
from dpmac_cli.errors import InputError
from dpmac_cli.libraries import sklearn_datasets, vision_datasets


def read_published(name: str, data_dir: Path) -> list[Split]:
    """Return the training and test records of a registered dataset.

    Args:
        name: key of :data:`dpmac_cli.config.datasets.DATASETS`.
        data_dir: folder of its files; missing ones are downloaded.

    Raises:
        InputError: files are missing and cannot be downloaded, are damaged, or are not the
            published ones.
    """
    splits = _from_torchvision(name, data_dir) if DATASETS[name].torchvision else _digits()
    _check(name, splits, data_dir)
    return splits


def _check(
    name: str,
    splits: Sequence[Split],
    data_dir: Path,
) -> None:
    """Reject files that differ from the published dataset.

    Args:
        name: name of the dataset.
        splits: its training and test records.
        data_dir: folder of its files.

    Raises:
        InputError: the sizes or the contents are others than those of the registry.
    """
    facts = DATASETS[name]
    shape = facts.records.shape
    expected = [(facts.train_size, *shape), (facts.test_size, *shape)]
    shapes = [part.x.shape for part in splits]
    if shapes != expected:
        fault = (
            f"its training and test images have the shapes {_joined(shapes)} instead of "
            f"{_joined(expected)}"
        )
    elif facts.sha256 is not None and fingerprint(*splits) != facts.sha256:
        sha256 = fingerprint(*splits)
        fault = f"its contents differ (SHA-256 {sha256[:16]}... instead of {facts.sha256[:16]}...)"
    else:
        return
    raise InputError(
        f"The dataset {name} in {data_dir} is not the published one: {fault}. Remove its files, "
        "or use another folder with {data_dir}."
    )


def _joined(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return shapes as a phrase: "(2, 1) and (1, 1)"."""
    return " and ".join(map(str, shapes))


def fingerprint(*splits: Split) -> str:
    """Return the SHA-256 of records and labels and their shapes, of public data, in hexadecimal."""
    digest = hashlib.sha256()
    for split in splits:
        for array in (split.x, split.y):
            for part in hashed_parts(array):
                digest.update(part)
    return digest.hexdigest()


def hashed_parts(array: NDArray[Any]) -> tuple[bytes, memoryview]:
    """Return the parts of an array that a fingerprint is of: type and shape as text, and values.

    Args:
        array: records or targets, shape (records, ...).

    Example:
        >>> hashed_parts(np.zeros((2, 3), np.uint8))[0]
        b'torch.uint8(2, 3)'
    """
    return f"torch.{array.dtype}{array.shape}".encode(), np.ascontiguousarray(array).data


def _digits() -> list[Split]:
    """Load scikit-learn's digits; a fixed fifth, drawn with a public seed, is the test set."""
    bunch = sklearn_datasets.load_digits()
    test_size = DATASETS["digits"].test_size
    # RandomState's streams are frozen by numpy, so this split never changes.
    order = np.random.RandomState(0).permutation(len(bunch.target))
    images = bunch.images.astype(np.uint8)[:, None]
    records = Split(images, bunch.target)
    train = records.at(order[test_size:])
    test = records.at(order[:test_size])
    return [train, test]


def _from_torchvision(name: str, data_dir: Path) -> list[Split]:
    """Load from disk, or download missing files, and explain failures.

    Args:
        name: name of the dataset.
        data_dir: folder of its files.

    Raises:
        InputError: its files are missing or damaged.
    """
    files = list(map(data_dir.joinpath, DATASETS[name].files))
    download = bool(_missing(files))
    try:
        train = _part(name, data_dir, "train", download)
        test = _part(name, data_dir, "test", download)
        return [train, test]
    except Exception as failure:  # its parsers raise any exception for a damaged file
        raise InputError(
            f"The dataset {name} {_what_failed(files, download, failure)}; or use another "
            "folder with {data_dir} or the environment variable DPMAC_DATA_DIR; or use "
            "{dataset=}digits, which needs no files."
        ) from failure


def _part(
    name: str,
    data_dir: Path,
    which: str,
    download: bool,
) -> Split:
    """Load one split. torchvision checks the MD5 of pickled files before reading them.

    Args:
        name: name of the dataset.
        data_dir: folder of its files.
        which: "train" or "test".
        download: whether to download missing files.
    """
    reader = getattr(vision_datasets, DATASETS[name].torchvision)
    # torchvision would read a cache of MNIST in its first format with torch.load.
    kind: Any = type(reader.__name__, (reader,), {"_check_legacy_exist": lambda self: False})
    if "split" in signature(kind).parameters:
        loaded = kind(data_dir, download=download, split=which)
    else:
        loaded = kind(data_dir, download=download, train=which == "train")
    labels = loaded.labels if hasattr(loaded, "labels") else loaded.targets
    images = channels_first(np.asarray(loaded.data))
    return Split(images, np.asarray(labels, np.int64))


def _missing(files: Sequence[Path]) -> list[str]:
    return [file.name for file in files if not file.exists()]


def _what_failed(
    files: Sequence[Path],
    tried: bool,
    failure: Exception,
) -> str:
    """Return the cause of a failure and its remedy, without torchvision's terms.

    Args:
        files: files that the dataset needs.
        tried: whether missing ones were to be downloaded.
        failure: what torchvision raised.
    """
    folder, missing = files[0].parent, _missing(files)
    if missing:
        last = str(failure).strip().rpartition("\n")[2]
        reason = re.sub(r"<urlopen error |\[Errno -?\d+\] |[>.]+$", "", last)
        download = f" and could not be downloaded ({reason})" if tried else ""
        return f"is not in {folder}{download}. Put there: {', '.join(missing)}"
    reason = getattr(failure, "strerror", None) or "a file is damaged, or of another kind"
    return f"in {folder} cannot be read ({reason}). Remove its files to download them again"
