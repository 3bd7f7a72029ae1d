"""A name -> tensors on the device. Images stay uint8 there and are standardised when used."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpmac_cli.data.dataset import Data, Split, _standardisation, fingerprint
from dpmac_cli.data.own import inspect
from dpmac_cli.data.own import load as load_own
from dpmac_cli.data.registry import DATASETS, Dataset
from dpmac_cli.data.schema import Source
from dpmac_cli.errors import InputError


def load_data(
    chosen: str | Source,
    data_dir: Path,
    device: torch.device,
    *,
    download: bool = True,
    facts: Dataset | None = None,
) -> Data:
    """Load a dataset onto a device.

    Args:
        chosen: a key of :data:`dpmac_cli.data.registry.DATASETS`, or your own dataset.
        data_dir: where the catalogue's files lie, or are downloaded to.
        device: where the tensors go.
        download: whether missing files may be downloaded.
        facts: of your own dataset, as they were read when the run was configured.

    Raises:
        InputError: the files are missing and cannot be downloaded, damaged, of another kind, or no
            longer those that ``facts`` describes.
    """
    if isinstance(chosen, Source):
        facts = facts or inspect(chosen).facts
        own = load_own(chosen, facts)
        train, test = (Split(torch.from_numpy(x), torch.from_numpy(y)) for x, y in own)
    else:
        facts = DATASETS[chosen]
        train, test = LOADERS[chosen](data_dir, download)
        _check(chosen, train, test, data_dir)
    return Data(
        Split(train.images.to(device), train.labels.to(device)),
        Split(test.images.to(device), test.labels.to(device)),
        *_standardisation(facts.levels, facts.mean, facts.std, device),
    )


def _check(name: str, train: Split, test: Split, data_dir: Path) -> None:
    """Refuse files that are not the published data set."""
    facts = DATASETS[name]
    shapes = [tuple(part.images.shape) for part in (train, test)]
    wanted = [(size, *facts.shape) for size in (facts.train_size, facts.test_size)]
    if shapes != wanted:
        fault = (
            f"its training and test images have the shapes {shapes[0]} and {shapes[1]} instead of "
            f"{wanted[0]} and {wanted[1]}"
        )
    elif facts.sha256 is not None and (found := fingerprint(train, test)) != facts.sha256:
        fault = f"its contents differ (SHA-256 {found[:16]}... instead of {facts.sha256[:16]}...)"
    else:
        return
    raise InputError(
        f"The data set {name} in {data_dir} is not the published one: {fault}. Remove its files, "
        "or name another folder with --data-dir."
    )


def _digits(data_dir: Path, download: bool) -> tuple[Split, Split]:
    """Scikit-learn's digits; a fixed fifth, drawn with a public seed, is the test set."""
    del data_dir, download
    from sklearn.datasets import load_digits  # noqa: PLC0415  (a second to import)

    bunch = load_digits()
    # RandomState's streams are frozen by numpy, so this split never changes.
    order = np.random.RandomState(0).permutation(len(bunch.target))
    held_out = DATASETS["digits"].test_size

    def split(rows: NDArray[np.int64]) -> Split:
        images = torch.from_numpy(bunch.images[rows].astype(np.uint8)).unsqueeze(1)
        return Split(images, torch.from_numpy(bunch.target[rows].astype(np.int64)))

    return split(order[held_out:]), split(order[:held_out])


def _mnist_files(dataset: Any, data_dir: Path) -> list[Path]:
    raw = data_dir / dataset.__name__ / "raw"
    return [raw / Path(archive).stem for archive, _ in dataset.resources]


def _cifar_files(dataset: Any, data_dir: Path) -> list[Path]:
    listed = [file for file, _ in (*dataset.train_list, *dataset.test_list)]
    return [data_dir / dataset.base_folder / file for file in (*listed, dataset.meta["filename"])]


def _svhn_files(dataset: Any, data_dir: Path) -> list[Path]:
    return [data_dir / dataset.split_list[split][1] for split in ("train", "test")]


#: By name: the class of torchvision, and its files in a folder of datasets.
TORCHVISION: Mapping[str, tuple[str, Callable[[Any, Path], list[Path]]]] = {
    "mnist": ("MNIST", _mnist_files),
    "fashion-mnist": ("FashionMNIST", _mnist_files),
    "kmnist": ("KMNIST", _mnist_files),
    "cifar10": ("CIFAR10", _cifar_files),
    "cifar100": ("CIFAR100", _cifar_files),
    "svhn": ("SVHN", _svhn_files),
}


def files_of(name: str, data_dir: Path) -> list[Path]:
    """Return the files of a dataset of the catalogue; none for those of installed packages."""
    if name not in TORCHVISION:
        return []
    kind, files = TORCHVISION[name]
    return files(_torchvision(kind), data_dir)


def _torchvision(kind: str) -> Any:
    from torchvision import datasets  # noqa: PLC0415  (seconds to import)

    return getattr(datasets, kind)


def _part(kind: str, data_dir: Path, train: bool, download: bool) -> Split:
    """Load one split; torchvision checks the md5 of pickles before it reads them."""
    # Where torchvision finds a cache of MNIST's first versions, it would read that by torch.load.
    dataset: Any = type(kind, (_torchvision(kind),), {"_check_legacy_exist": lambda self: False})
    if kind == "SVHN":
        loaded = dataset(data_dir, split="train" if train else "test", download=download)
        return Split(torch.from_numpy(loaded.data), torch.from_numpy(loaded.labels).long())
    loaded = dataset(data_dir, train=train, download=download)
    images = torch.as_tensor(loaded.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return Split(images, torch.as_tensor(loaded.targets).long())


def _from_torchvision(name: str, data_dir: Path, download: bool) -> tuple[Split, Split]:
    """Load from disk, or download what is not there; explain what fails."""
    files = files_of(name, data_dir)
    may_download = download and bool(_missing(files))
    try:
        train, test = (
            _part(TORCHVISION[name][0], data_dir, train, may_download) for train in (True, False)
        )
    except Exception as failure:  # its parsers raise whatever a damaged file leads them to
        raise InputError(
            f"The data set {name} {_what_failed(files, may_download, failure)}; or name another "
            "folder with --data-dir or the environment variable DPMAC_DATA_DIR; or use --dataset "
            "digits, which needs no files."
        ) from failure
    return train, test


def _missing(files: Sequence[Path]) -> list[str]:
    return [file.name for file in files if not file.exists()]


def _what_failed(files: Sequence[Path], tried: bool, failure: Exception) -> str:
    """What is wrong with the files, and what to do, in words that need no torchvision."""
    folder, missing = files[0].parent, _missing(files)
    if missing:
        which = "is not" if len(missing) == len(files) else "is not whole"
        download = f" and could not be downloaded{_in_short(failure)}" if tried else ""
        these = "these files" if len(missing) > 1 else "this file"
        return f"{which} in {folder}{download}. Put {these} there: {', '.join(missing)}"
    if isinstance(failure, OSError):
        return f"in {folder} cannot be read ({failure.strerror or failure}). Make it readable"
    return (
        f"in {folder} is damaged: a file is cut short, altered or of another kind. Remove its "
        "files to have them downloaded again"
    )


def _in_short(failure: Exception) -> str:
    """Why a download failed, in brackets; nothing where torchvision has only its own advice."""
    last = str(failure).strip().rpartition("\n")[2]
    reason = re.sub(r"<urlopen error |\[Errno -?\d+\] |[>.]+$", "", last)
    return "" if not reason or "download=True" in reason else f" ({reason})"


#: Given the folder and whether they may download, they load training and test split.
LOADERS: Mapping[str, Callable[[Path, bool], tuple[Split, Split]]] = {
    "digits": _digits,
    **{name: partial(_from_torchvision, name) for name in TORCHVISION},
}


def missing_files(name: str, data_dir: Path) -> tuple[int, int]:
    """Return how many files of a dataset of the catalogue are missing, and how many it has."""
    files = files_of(name, data_dir)
    return len(_missing(files)), len(files)
