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
    """Images and labels on the device.

    Attributes:
        images: uint8, shape (records, channels, height, width); rows of numbers are float32, of
            shape (records, columns, 1, 1).
        labels: int64, shape (records,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Split":
        """Return the same records on a device."""
        return Split(self.images.to(device), self.labels.to(device))


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

    def prepared_by(self, given: Mapping[str, Any]) -> "Data":
        """The same records, standardised as the facts of a model say.

        Args:
            given: ``levels``, and ``mean`` and ``std`` with an entry for each channel.
        """
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
    means = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    stds = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    gain, offset = 1 / (levels * stds), -means / stds
    return gain.to(device, torch.float32), offset.to(device, torch.float32)
