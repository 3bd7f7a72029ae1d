"""Records on the device. Images stay uint8 there and are standardised when used."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Records that are scored, or run through a frozen part, at a time.
EVALUATION_BATCH = 2048


@dataclass(frozen=True)
class Split:
    """Images and labels on the device. Rows of numbers are float32, (records, columns, 1, 1)."""

    images: Tensor  # uint8, shape (records, channels, height, width)
    labels: Tensor  # int64, shape (records,)

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        """Return the same records on a device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Data:
    """A data set on the device."""

    train: Split  # the private records
    test: Split  # records the guarantee does not cover
    gain: Tensor  # standardisation as one multiply-add, shape (channels, 1, 1)
    offset: Tensor

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
        for tensor in (split.images, split.labels):
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
