"""A name -> tensors on the device. Images stay uint8 there and are standardised when used."""

import hashlib
from collections.abc import Callable, Mapping
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
    fingerprint = _fingerprint(train, test)
    if fingerprint != facts.sha256:
        raise InputError(
            f"The files of {name} in {data_dir} are not the published data set (SHA-256 of their "
            f"contents {fingerprint[:16]}..., expected {facts.sha256[:16]}...). Remove them, or "
            "name another folder with --data-dir."
        )
    return Data(
        Split(train.images.to(device), train.labels.to(device)),
        Split(test.images.to(device), test.labels.to(device)),
        *_standardisation(facts, device),
    )


def _fingerprint(*splits: Split) -> str:
    """SHA-256 over shapes and contents of images and labels."""
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


def _mnist(data_dir: Path, download: bool) -> tuple[Split, Split]:
    from torchvision.datasets import MNIST  # noqa: PLC0415  (seconds to import)

    def load(may_download: bool) -> tuple[Split, Split]:
        parts = [MNIST(data_dir, train=train, download=may_download) for train in (True, False)]
        train, test = (Split(part.data.unsqueeze(1), part.targets.long()) for part in parts)
        return train, test

    wanted = [Path(archive).stem for archive, _ in MNIST.resources]
    return _from_torchvision("mnist", data_dir / "MNIST" / "raw", wanted, load, download)


def _from_torchvision(
    name: str,
    folder: Path,
    wanted: list[str],
    load: Callable[[bool], tuple[Split, Split]],
    download: bool,
) -> tuple[Split, Split]:
    """Load from disk, or download what is not there; explain what fails.

    Args:
        name: of the data set.
        folder: where its files lie.
        wanted: the files' names.
        load: given whether it may download, loads both splits.
        download: whether it may.
    """
    missing = [file for file in wanted if not (folder / file).exists()]
    try:
        return load(bool(missing) and download)
    except (OSError, RuntimeError, ValueError, EOFError, AssertionError) as failure:
        reason = str(failure).strip().splitlines() or [type(failure).__name__]
        what = (
            f"{name} is not in {folder} and could not be downloaded ({reason[0]}). "
            f"Put these files there: {', '.join(missing)};"
            if missing
            else f"The files of {name} in {folder} are damaged ({reason[0]}). Remove them;"
        )
        raise InputError(
            f"{what} or name another folder with --data-dir or the environment variable "
            "DPMAC_DATA_DIR; or use --dataset digits, which needs no files."
        ) from failure


LOADERS: Mapping[str, Callable[[Path, bool], tuple[Split, Split]]] = {
    "digits": _digits,
    "mnist": _mnist,
}
