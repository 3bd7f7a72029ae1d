"""Records on the device. Images are stored as uint8 and scaled when they are used.

Records that do not fit into memory stay in a file, of which the rows of a batch are read.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.config.records import Records
from dpmac_cli.data import dataset as data
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Crafted, TrainAndTest
from dpmac_cli.data.published import hashed_parts
from dpmac_cli.data.units import Units, units_of
from dpmac_cli.errors import InputError
from dpmac_cli.features.texts import example_of
from dpmac_cli.tasks.task import Task

Places = slice | NDArray[np.int64]
#: Bytes of records to keep in memory on a CPU, and fraction of a GPU's memory that they may use.
IN_MEMORY, GPU_SHARE = 1e9, 0.25


@dataclass(frozen=True)
class Split:
    """Records of one split and their labels, on the device that trains on them.

    Attributes:
        images: shape (records, *shape): images, uint8, or numbers, float32. On the device "meta" if
            they are read from a file.
        labels: targets of the task: int64, shape (records,); or for numbers to predict
            float32, (records, 1).
        units: units of privacy; None if each record is one.
        file: rows of the file that the images come from; None for others.
    """

    images: Tensor
    labels: Tensor
    units: Units | None = None
    file: Rows | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """Return the number of units of privacy, that of records if each record is one."""
        return len(self if self.units is None else self.units)

    @property
    def owners(self) -> NDArray[np.int64] | None:
        """Return the index of each record's unit, shape (records,); None if each record is one."""
        return None if self.units is None else self.units.owners

    @property
    def sha256(self) -> str:
        """Return a checksum of the images, if the file that they come from has one; or ""."""
        return "" if self.file is None else self.file.sha256()

    @property
    def stored(self) -> Rows | None:
        """Return the rows of the file that :meth:`at` reads; None for records in memory."""
        return self.file if self.images.is_meta else None

    def at(self, places: Places) -> tuple[Tensor, Tensor]:
        """Return some records and their labels, on the device; those in a file are read from it.

        Args:
            places: a slice, or numbers of records, int64, shape (rows,).

        Returns:
            Images, shape (rows, *shape), and labels, with one row for each place, in order. With a
            slice of records in memory, both are views.
        """
        device = self.labels.device
        rows: slice | Tensor
        if isinstance(places, slice):
            rows = places
        else:
            rows = torch.from_numpy(places).to(device, non_blocking=True)
        labels = self.labels[rows]
        stored = self.stored
        if stored is None:
            return self.images[rows], labels
        images = torch.from_numpy(stored.read(places)).to(device)
        return images, labels

    def taken(self, places: NDArray[np.int64]) -> "Split":
        """Return a split of some of the records, without units of privacy and checksum.

        Args:
            places: numbers of records, int64, shape (rows,). The result has their order.
        """
        labels = self.labels[torch.from_numpy(places).to(self.labels.device)]
        stored = self.stored
        if stored is None:
            return Split(self.at(places)[0], labels)
        return Split(self.images, labels, file=stored[places])

    def read_from(self, rows: Rows, device: torch.device) -> "Split":
        """Return a split with features of the same records, from a file, and the same labels.

        Args:
            rows: rows of the file, one for each record, in their order.
            device: device to train on.
        """
        return split_of(rows, self.labels, self.units, device)

    def to(self, device: torch.device) -> "Split":
        """Return the same records on a device; those in a file stay there.

        Args:
            device: device to train on.
        """
        images = self.images.to(device) if self.stored is None else self.images
        return replace(self, images=images, labels=self.labels.to(device))


def split_of(rows: Rows, labels: Tensor, units: Units | None, device: torch.device) -> Split:
    """Return a split of the records in a file: in memory, unless the file is too large for it.

    In memory are at most :data:`IN_MEMORY` bytes, or :data:`GPU_SHARE` of a GPU's memory.

    Args:
        rows: rows of the file, one for each record.
        labels: targets, one for each record.
        units: units of privacy; None if each record is one.
        device: device to train on.
    """
    most = IN_MEMORY
    if device.type == "cuda":
        most = max(most, GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    if rows.file.values.nbytes <= most:
        images = torch.from_numpy(rows.read())
        return Split(images, labels, units, rows).to(device)
    dtype = torch.from_numpy(np.empty(0, rows.file.dtype)).dtype
    images = torch.empty(rows.shape, dtype=dtype, device="meta")
    return Split(images, labels, units, rows).to(device)


@dataclass(frozen=True)
class Data(TrainAndTest[Split]):
    """Training and test records on the device.

    Attributes:
        gain, offset: scaling as one multiply-add, in the shape of a record with sides of 1.
        task: what the targets are.
        example: made-up rows to try a network on; None for any numbers.
    """

    gain: Tensor
    offset: Tensor
    task: Task
    example: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of units of privacy to train on and to test on, 0 for no test set."""
        return self.train.size, 0 if self.test is None else self.test.size

    @property
    def tested(self) -> Split:
        """Return the test records.

        Raises:
            InputError: there are none.
        """
        if self.test is None:
            raise InputError(
                "With {test_fraction=}0 all records are trained on, so there are none to test on. "
                "Use a dataset with a test set, or another {test_fraction}."
            )
        return self.test

    def split_into(self, splits: Iterable[Split]) -> "Data":
        """Return the data with other splits; everything else stays the same.

        Args:
            splits: training records, then the test records if there are any, as :attr:`splits`.
        """
        train, *tests = splits
        return replace(self, train=train, test=tests[0] if tests else None)

    def to(self, device: torch.device) -> "Data":
        """Return the same data on a device, with the constants of scaling; files stay files.

        Args:
            device: device to train on.
        """
        crafted = self.crafted
        if crafted is not None:
            crafted = replace(crafted, records=crafted.records.to(device))
        gain, offset = self.gain.to(device), self.offset.to(device)
        moved = replace(self, gain=gain, offset=offset, crafted=crafted)
        return moved.split_into(split.to(device) for split in self.splits)

    def predicting(self, task: Task) -> "Data":
        """Return the same records with their targets as a task scales them, perhaps otherwise.

        Targets of training records are limited to its range. Those of test records are not, so
        that scores are those of the true numbers.

        Args:
            task: the task, such as one with the range that noisy counts found.
        """
        crafted = self.crafted
        if crafted is not None:
            recoded = _with_targets(crafted.records, task, self.task)
            crafted = replace(crafted, records=_limited(recoded, task))
        train, *test = (_with_targets(split, task, self.task) for split in self.splits)
        limited = replace(self, task=task, crafted=crafted)
        return limited.split_into([_limited(train, task), *test])

    def replaced_by(self, splits: Iterable[Split]) -> "Data":
        """Return the data with features instead of the records, which :meth:`standardised` keeps.

        Args:
            splits: features and labels of the training records, then of the test records if there
                are any, as :attr:`splits`.
        """
        one = torch.ones(1, device=self.gain.device)
        unscaled = replace(self, gain=one, offset=torch.zeros_like(one), example=None)
        return unscaled.split_into(splits)

    def computed_in(self, dtype: torch.dtype) -> "Data":
        """Return the same data for a network of another dtype, to which records are scaled.

        Args:
            dtype: dtype of the network's inputs. Records are stored as before.
        """
        gain, offset = self.gain.to(dtype), self.offset.to(dtype)
        return replace(self, gain=gain, offset=offset)

    def standardised(self, images: Tensor) -> Tensor:
        """Return records as a network takes them: x gain + offset, in the network's dtype.

        Args:
            images: records x as a split stores them, shape (rows, *shape), of any dtype.
        """
        return torch.addcmul(self.offset, images.to(self.gain.dtype), self.gain)

    def scaled_as(self, records: Records) -> "Data":
        """Return the same data with the scaling of other records of the same shape.

        Args:
            records: facts of the others, such as those that a published network was trained on,
                which have their scaling.
        """
        gain, offset = scaling_of(records, self.gain.device)
        return replace(self, gain=gain, offset=offset)


def fingerprint(*splits: Split) -> str:
    """Return the SHA-256 of records, labels, their dtypes and shapes: 64 hexadecimal digits.

    It depends on every record, so it is published for public data only.

    Args:
        splits: training records, then the test records if there are any. Images of a file with a
            checksum are not read again: that takes their place.
    """
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.sha256.encode())
        tensors = [split.labels] if split.file is not None else [split.images, split.labels]
        for tensor in tensors:
            for part in hashed_parts(tensor.cpu().numpy()):
                digest.update(part)
    return digest.hexdigest()


def scaling_of(records: Records, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the public constants that scale records, as :meth:`Data.standardised` uses them.

    Args:
        records: facts of the records, which have one pair of constants per channel.
        device: device of the result.

    Returns:
        Factors and summands, float32, in the shape of a record with all sides but the channels 1:
        (3, 1, 1) each for images of shape (3, 32, 32).
    """
    other_sides = (1,) * (len(records.shape) - 1)
    shape = (records.channels, *other_sides)
    gain, offset = torch.tensor(records.scaling, dtype=torch.float64, device=device)
    return gain.view(shape).float(), offset.view(shape).float()


def on_device(dataset: data.Dataset, device: torch.device, records: Records | None = None) -> Data:
    """Return the records of a dataset, read before, on a device to train on.

    Args:
        dataset: splits of arrays in memory, or of rows of a file; with its facts.
        device: device to train on.
        records: how they are scaled; None for the dataset's facts.
    """
    known = records or dataset.facts.records
    train = _on_device(dataset.train, device)
    test = None if dataset.test is None else _on_device(dataset.test, device)
    gain, offset = scaling_of(known, device)
    crafted: Crafted[Split] | None = None
    if dataset.crafted is not None:
        records_in = _on_device(dataset.crafted.records, device)
        crafted = Crafted(records_in, dataset.crafted.coins)
    moved = Data(
        train,
        test,
        gain,
        offset,
        task=dataset.facts.task,
        example=example_of(known),
        crafted=crafted,
    )
    return moved.to(device)


def _with_targets(split: Split, task: Task, before: Task) -> Split:
    """Return records with their targets as a task has them, not as another one ``before``."""
    targets = torch.from_numpy(task.recoded(split.labels.cpu().numpy(), before))
    return replace(split, labels=targets.to(split.labels.device))


def _limited(split: Split, task: Task) -> Split:
    """Return records with the targets that a network learns: see :meth:`.Task.limited`."""
    targets = torch.from_numpy(task.limited(split.labels.cpu().numpy()))
    return replace(split, labels=targets.to(split.labels.device))


def _on_device(records: data.Split, device: torch.device) -> Split:
    """Return the records of a split: tensors in memory, or rows of a file."""
    labels = torch.as_tensor(records.y)
    units = None if records.unit is None else units_of(records.unit)
    if isinstance(records.x, Rows):
        return split_of(records.x, labels, units, device)
    return Split(torch.as_tensor(records.x), labels, units=units)
