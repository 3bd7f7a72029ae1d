"""A name -> tensors on the device. Images stay uint8 there and are standardised when used."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.catalog import DATASETS, Dataset
from dpmac_cli.errors import InputError


@dataclass(frozen=True)
class Split:
    """Images and labels on the device.

    Attributes:
        images: uint8, shape (records, channels, height, width).
        labels: int64, shape (records,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """A data set on the device.

    Attributes:
        train: the private records.
        test: records the guarantee does not cover.
        gain, offset: standardisation as one multiply-add, shape (channels, 1, 1).
    """

    train: Split
    test: Split
    gain: Tensor
    offset: Tensor

    def standardised(self, images: Tensor) -> Tensor:
        """(images / levels - mean) / std in float32; shape as given."""
        return torch.addcmul(self.offset, images.to(self.gain.dtype), self.gain)


#: Given the folder and whether it may download, loads training and test split.
Loader = Callable[[Path, bool], tuple[Split, Split]]


def load_data(name: str, data_dir: Path, device: torch.device, *, download: bool = True) -> Data:
    """Load a named data set onto a device.

    Args:
        name: a key of :data:`dpmac_cli.catalog.DATASETS`.
        data_dir: where files lie, or are downloaded to.
        device: where the tensors go.
        download: whether missing files may be downloaded.

    Raises:
        InputError: the files are missing and cannot be downloaded, damaged, or of another kind.
    """
    facts = DATASETS[name]
    train, test = LOADERS[name](data_dir, download)
    _check(name, train, test, data_dir)
    return Data(
        Split(train.images.to(device), train.labels.to(device)),
        Split(test.images.to(device), test.labels.to(device)),
        *_standardisation(facts, device),
    )


def _check(name: str, train: Split, test: Split, data_dir: Path) -> None:
    """Refuse files that are not the published data set."""
    facts = DATASETS[name]
    shapes = [tuple(part.images.shape) for part in (train, test)]
    wanted = [(size, *facts.shape) for size in (facts.train_size, facts.test_size)]
    found = fingerprint(train, test)
    if shapes != wanted or (facts.sha256 is not None and found != facts.sha256):
        raise InputError(
            f"The files of {name} in {data_dir} are not the published data set (images {shapes}, "
            f"expected {wanted}; SHA-256 of their contents {found[:16]}...). Remove them, or name "
            "another folder with --data-dir."
        )


def fingerprint(*splits: Split) -> str:
    """SHA-256 over shapes and contents of images and labels. Recorded for public data only."""
    digest = hashlib.sha256()
    for split in splits:
        for tensor in (split.images, split.labels):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _standardisation(facts: Dataset, device: torch.device) -> tuple[Tensor, Tensor]:
    mean = torch.tensor(facts.mean, dtype=torch.float64).view(-1, 1, 1)
    std = torch.tensor(facts.std, dtype=torch.float64).view(-1, 1, 1)
    gain, offset = 1 / (facts.levels * std), -mean / std
    return gain.to(device, torch.float32), offset.to(device, torch.float32)


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


def _like_mnist(kind: str) -> Loader:
    """MNIST, FashionMNIST and KMNIST: four files in a folder of the class's name."""

    def load(data_dir: Path, download: bool) -> tuple[Split, Split]:
        from torchvision import datasets  # noqa: PLC0415  (seconds to import)

        dataset = getattr(datasets, kind)
        folder = data_dir / kind / "raw"
        files = [folder / Path(archive).stem for archive, _ in dataset.resources]

        def part(train: bool, may_download: bool) -> Split:
            loaded = dataset(data_dir, train=train, download=may_download)
            return Split(loaded.data.unsqueeze(1), loaded.targets.long())

        return _from_torchvision(files, part, download)

    return load


def _like_cifar(kind: str) -> Loader:
    """CIFAR10 and CIFAR100: torchvision checks every file's md5 before it reads them."""

    def load(data_dir: Path, download: bool) -> tuple[Split, Split]:
        from torchvision import datasets  # noqa: PLC0415

        dataset = getattr(datasets, kind)
        folder = data_dir / dataset.base_folder
        files = [folder / name for name, _ in (*dataset.train_list, *dataset.test_list)]

        def part(train: bool, may_download: bool) -> Split:
            loaded = dataset(data_dir, train=train, download=may_download)
            images = torch.from_numpy(loaded.data).permute(0, 3, 1, 2).contiguous()
            return Split(images, torch.tensor(loaded.targets))

        return _from_torchvision(files, part, download)

    return load


def _svhn(data_dir: Path, download: bool) -> tuple[Split, Split]:
    from torchvision.datasets import SVHN  # noqa: PLC0415

    def part(train: bool, may_download: bool) -> Split:
        loaded = SVHN(data_dir, split="train" if train else "test", download=may_download)
        return Split(torch.from_numpy(loaded.data), torch.from_numpy(loaded.labels).long())

    return _from_torchvision(
        [data_dir / SVHN.split_list[name][1] for name in ("train", "test")], part, download
    )


# What torchvision raises for files that are missing, cut short or of another kind.
UNREADABLE = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    AssertionError,
    KeyError,
    TypeError,
    IndexError,
)


def _from_torchvision(
    files: Sequence[Path], part: Callable[[bool, bool], Split], download: bool
) -> tuple[Split, Split]:
    """Load from disk, or download what is not there; explain what fails.

    Args:
        files: that must be there.
        part: loads a split, given whether it is the training split and whether it may download.
        download: whether it may.
    """
    missing = [file.name for file in files if not file.exists()]
    folder = files[0].parent
    try:
        may_download = bool(missing) and download
        return part(True, may_download), part(False, may_download)
    except UNREADABLE as failure:
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".:,")
        what = (
            f"The data set is not in {folder} and could not be downloaded ({reason}). "
            f"Put these files there: {', '.join(missing)};"
            if missing
            else f"The files in {folder} are damaged ({reason}). Remove them;"
        )
        raise InputError(
            f"{what} or name another folder with --data-dir or the environment variable "
            "DPMAC_DATA_DIR; or use --dataset digits, which needs no files."
        ) from failure


LOADERS: Mapping[str, Loader] = {
    "digits": _digits,
    "mnist": _like_mnist("MNIST"),
    "fashion-mnist": _like_mnist("FashionMNIST"),
    "kmnist": _like_mnist("KMNIST"),
    "cifar10": _like_cifar("CIFAR10"),
    "cifar100": _like_cifar("CIFAR100"),
    "svhn": _svhn,
}
