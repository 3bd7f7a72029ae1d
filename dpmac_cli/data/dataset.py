"""Records on the device. Images stay uint8 there and are standardised when used."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.data.units import Units
from dpmac_cli.storage.rows import Rows

Places = slice | NDArray[np.int64]
#: Bytes of records that a CPU keeps in memory, and share of a GPU's memory that they may take.
IN_MEMORY, GPU_SHARE = 1e9, 0.25


class StoredRecords:
    """Records that are read from a file when they are used.

    Args:
        rows: of the file. device: that they are used on.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows, self._device = rows, device
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[Places, Future[Tensor]] | None = None

    def __reduce__(self) -> tuple[type["StoredRecords"], tuple[Rows, torch.device]]:
        return StoredRecords, (self.rows, self._device)

    def nothing(self) -> Tensor:
        """Return a tensor of the records' shape and dtype, without contents."""
        none = torch.from_numpy(np.empty((0, *self.rows.file.shape), self.rows.file.dtype))
        return none.new_empty((len(self.rows), *none.shape[1:]), device="meta")

    def at(self, places: Places) -> Tensor:
        """Return some records on the device. Raises DamagedError."""
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and np.array_equal(np.asarray(ahead[0]), np.asarray(places))
        found = ahead[1].result() if ahead is not None and known else self._read(places)
        return found.to(self._device, non_blocking=True)

    def read_ahead(self, places: Places) -> None:
        """Begin to read records that will be asked for next."""
        self._ahead = places, self._reader.submit(self._read, places)

    def _read(self, places: Places) -> Tensor:
        found = torch.from_numpy(self.rows.read(places))
        return found.pin_memory() if self._device.type == "cuda" else found


@dataclass(frozen=True)
class Split:
    """Images and labels on the device. Rows of numbers are float32, (records, columns, 1, 1).

    Attributes:
        images: uint8, shape (records, channels, height, width); on the device "meta", without
            contents, where they are ``stored``.
        labels: int64, shape (records,); or with several labels per record uint8, (records, labels).
        sha256: of the images, where the file that they are from has it.
        stored: reads the images when they are used; None where they are in memory.
    """

    images: Tensor
    labels: Tensor
    sha256: str = ""
    stored: StoredRecords | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **({"images": None} if self.stored else {})}  # "meta" has no pickle

    def __setstate__(self, state: dict[str, Any]) -> None:
        images = state["stored"].nothing() if state["stored"] else state["images"]
        vars(self).update(state, images=images)

    def at(self, places: Places) -> tuple[Tensor, Tensor]:
        """Return some images and their labels, on the device. Raises DamagedError."""
        rows: slice | Tensor = places if isinstance(places, slice) else torch.from_numpy(places)
        if isinstance(rows, Tensor):
            rows = rows.to(self.labels.device, non_blocking=True)
        images = self.images[rows] if self.stored is None else self.stored.at(places)
        return images, self.labels[rows]

    def read_ahead(self, places: Places) -> None:
        """Begin to read images that will be asked for next."""
        if self.stored is not None:
            self.stored.read_ahead(places)

    def to(self, device: torch.device) -> "Split":
        """Return the same records on a device."""
        labels = self.labels.to(device)
        if self.stored is not None:
            return replace(self, labels=labels, stored=StoredRecords(self.stored.rows, device))
        return replace(self, images=self.images.to(device), labels=labels)


def split_of(rows: Rows, labels: Tensor, device: torch.device) -> Split:
    """Return records of a file, in memory unless the file is too large. Raises DamagedError."""
    most, sha256 = IN_MEMORY, rows.sha256()
    if device.type == "cuda":
        most = max(most, GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    if rows.file.nbytes <= most:
        return Split(torch.from_numpy(rows.read()), labels, sha256).to(device)
    stored = StoredRecords(rows, device)
    return Split(stored.nothing(), labels.to(device), sha256, stored)


@dataclass(frozen=True)
class Data:
    """A data set on the device."""

    train: Split  # the private records
    test: Split  # records the guarantee does not cover
    gain: Tensor  # standardisation as one multiply-add, shape (channels, 1, 1)
    offset: Tensor
    units: Units | None = None  # of privacy; None where each training record is one
    test_units: Units | None = None  # likewise of the test records

    @property
    def size(self) -> int:
        """Number of units of privacy to train on."""
        return len(self.train if self.units is None else self.units)

    def to(self, device: torch.device) -> "Data":
        """Return the same records on a device."""
        moved = {n: getattr(self, n).to(device) for n in ("train", "test", "gain", "offset")}
        return replace(self, **moved)

    def prepared_by(self, given: Mapping[str, Any]) -> "Data":
        """Return the same records, standardised by ``levels``, ``mean`` and ``std`` of a model."""
        mean, std = (list(map(float, given[name])) for name in ("mean", "std"))
        gain, offset = standardisation(float(given["levels"]), mean, std, self.gain.device)
        return replace(self, gain=gain, offset=offset)

    def standardised(self, images: Tensor) -> Tensor:
        """(images / levels - mean) / std in float32; shape as given."""
        return torch.addcmul(self.offset, images.to(self.gain.dtype), self.gain)


def fingerprint(*splits: Split) -> str:
    """SHA-256 over shapes and contents of images and labels. Published for public data only."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.sha256.encode())
        for tensor in (split.labels,) if split.sha256 else (split.images, split.labels):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def standardisation(
    levels: float, mean: Sequence[float], std: Sequence[float], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return gain and offset of (images / levels - mean) / std, shape (channels, 1, 1) each."""
    means, stds = torch.tensor([mean, std], dtype=torch.float64).view(2, -1, 1, 1)
    gain, offset = 1 / (levels * stds), -means / stds
    return gain.to(device, torch.float32), offset.to(device, torch.float32)
