"""Your own dataset as it is declared, and a dataset as it is read: records in NumPy arrays."""

import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import DataFacts, InMemoryData, PrivateNotes
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.tokens import TextReader
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.table_schema import TableSchema


class Split(NamedTuple):
    """Records, their targets, and what tells their units of privacy.

    Attributes:
        x: images, uint8, shape (records, channels, height, width), as
            :class:`~dpmac_cli.data.cache.Rows` of a file if they were decoded; numbers, float32,
            in the shape of their array; texts, a row of numbers of tokens each, exact in float32.
        y: classes, int64, shape (records,); or numbers to predict, float32, shape (records, 1).
        unit: name of each record's unit; None if each is one.
    """

    x: Any
    y: NDArray[Any]
    unit: NDArray[Any] | None = None

    @property
    def size(self) -> int:
        """Return the number of units of privacy, that of records if each record is one."""
        return len(self.y if self.unit is None else np.unique(self.unit))

    def at(self, rows: NDArray[Any]) -> "Split":
        """Return some records with their targets and units.

        Args:
            rows: numbers of the records, shape (K,), or a mask, bool, shape (records,).
        """
        unit = None if self.unit is None else self.unit[rows]
        return Split(self.x[rows], self.y[rows], unit)


#: Records of one side of a dataset: in arrays, or on a device.
Side = TypeVar("Side")


@dataclass(frozen=True)
class Crafted(Generic[Side]):
    """Records that an audit made up, all of them, and whether each is among the training records.

    Attributes:
        records: K records and their targets, of no unit: as a reader returns them, and in
            :class:`TrainAndTest` as a network takes them.
        coins: which records are trained on, bool, shape (K,). They are secret while training.
    """

    records: Side
    coins: NDArray[np.bool_]

    def added_to(self: "Crafted[Split]", train: Split) -> Split:
        """Return training records with the crafted ones that are in, each a unit of its own.

        Args:
            train: training records, as their reader returns them.
        """
        chosen = self.records.at(self.coins)
        values = train.x.read() if isinstance(train.x, Rows) else train.x
        x = np.concatenate([values, chosen.x.astype(values.dtype)])
        targets = chosen.y.astype(train.y.dtype)
        y = np.concatenate([train.y, targets])
        unit = train.unit
        if unit is not None:
            names = [f"crafted {secrets.token_hex(8)}" for _ in chosen.y]
            new_units = np.array(names, np.str_)
            unit = np.concatenate([unit.astype(np.str_), new_units])
        return Split(x, y, unit)


@dataclass(frozen=True)
class TrainAndTest(Generic[Side]):
    """Records of a dataset, all in one form: in arrays (:class:`Dataset`), or on a device.

    Attributes:
        train: private records to train on.
        test: records to test on, which the guarantee does not cover; None if there are none.
        crafted: records of an audit; None without one.
    """

    train: Side
    test: Side | None
    crafted: Crafted[Side] | None = field(default=None, repr=False, kw_only=True)

    @property
    def splits(self) -> tuple[Side, ...]:
        """Return the training records, and the test records if there are any."""
        if self.test is None:
            return (self.train,)
        return self.train, self.test


@dataclass(frozen=True)
class Dataset(TrainAndTest[Split]):
    """Records of a dataset in arrays, their public facts, and private notes on them.

    Attributes:
        facts: what is public.
        notes: findings about records, for the person who holds them.
    """

    facts: DataFacts
    notes: PrivateNotes = field(default=PrivateNotes(), repr=False)


@dataclass(frozen=True)
class Declaration:
    """Your own dataset as it is declared: settings, and what they name. All of it is public.

    Declared values are never taken from the records, so no record can change them. Channels, image
    size and classes that are not declared are None and are read from the records.

    Attributes:
        settings: settings of the run, of which those of the dataset are read.
        schema: schema of a table.
        texts: how texts are read; None for images and numbers.
        labels: whether records have labels: False for new ones, whose predictions are asked for.
        shape: shape of new records, as the model needs them.
        id_column: column of a table of new records that names them; None for ``id``.
    """

    settings: Settings
    schema: TableSchema | None = None
    texts: TextReader | None = None
    labels: bool = True
    shape: tuple[int, ...] = ()
    id_column: str | None = None

    @property
    def in_memory(self) -> InMemoryData | None:
        """Return the records in memory; None for files."""
        dataset = self.settings.dataset
        return dataset if isinstance(dataset, InMemoryData) else None

    @property
    def path(self) -> Path:
        """Return a folder, an .npz, or a table; for records in memory their name in brackets."""
        return Path(str(self.settings.dataset))

    @property
    def channels(self) -> int | None:
        """Return the number of channels that images are converted to; None to keep theirs."""
        channels = self.settings.channels
        return None if channels is None else int(channels)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Return class names, in the order of the labels; None if settings declare none."""
        if not self.settings.classes:
            return None
        return tuple(map(str.strip, self.settings.classes.split(",")))

    @property
    def ends(self) -> tuple[float, float] | None:
        """Return the range that all columns are clipped to; None if settings declare none."""
        if not self.settings.feature_range:
            return None
        low, _, high = self.settings.feature_range.partition(",")
        return float(low), float(high)
