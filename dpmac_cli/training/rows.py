"""Batches of records that are read: records that are stacked, and rows that are joined.

In each way, a record's row depends on that record alone, and has the shape and type of the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import default_collate

from dpmac_cli.dp.clipping.batches import Batch, Structure, map_rows, parts_by_name, tensors_in

#: Types whose numbers Python represents exactly.
EXACT = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool)


class Fault(NamedTuple):
    """Reason why a record cannot be used. Workers return it: raising would quote the record.

    Attributes:
        why: the reason, in sentences that do not quote the record.
    """

    why: str


@dataclass(frozen=True)
class Form:
    """Form of records that torch's ``default_collate`` stacks, by which they are written to rows.

    Attributes:
        nesting: a record with None in place of numbers.
        kinds: type of each number, array or tensor.
        structure: structure of a row.
    """

    nesting: Any
    kinds: tuple[type, ...]
    structure: Structure

    @staticmethod
    def of(record: Any, structure: Structure) -> "Form | None":
        """Return the form of a record, or None if it has other parts than numbers and arrays.

        Args:
            record: the first record of a dataset.
            structure: structure of its row after ``default_collate``.
        """
        nesting = tree_map(lambda part: None, record)
        parts = _parts_of(record, nesting)
        if parts is None or not all(map(_is_stackable, parts)):
            return None
        if len(parts) != len(tensors_in(structure.template)):
            return None
        return Form(nesting, tuple(map(type, parts)), structure)

    def batch_of(self, records: Iterator[Any], count: int) -> Batch | Fault:
        """Return records as a batch, or the fault of one of them, after which no other is read.

        Each is written to its row before the next one is read.

        Args:
            records: the records, which are read one by one.
            count: their number, which is that of the rows.
        """
        names = parts_by_name(self.structure.template)
        _, spec = tree_flatten(self.structure.template)
        columns = list[Column]()
        for (name, like), kind in zip(names.items(), self.kinds, strict=True):
            columns.append(column_of(name, like, kind, count))
        puts, parted = [column.put for column in columns], self._parted
        with torch.no_grad():
            for place, record in enumerate(records):
                is_parted = type(record) is parted and len(record) == len(puts)
                parts = record if is_parted else _parts_of(record, self.nesting)
                if parts is None:
                    return Fault(_other_parts(record, self.structure))
                for put, part in zip(puts, parts, strict=True):
                    if not put(place, part):
                        return Fault(columns[puts.index(put)].fault(part))
            rows = [column.rows() for column in columns]
        return tree_unflatten(rows, spec)

    def stacked(self, records: Sequence[Any]) -> Batch | None:
        """Return records that were read one after the other as a batch, by one copy for each part.

        Args:
            records: the records, all of which are in memory.

        Returns:
            The batch; None for no record, if one has other parts, classes or types than the first
            one, or if two are in the same memory or one object: :meth:`batch_of` must then read
            them again.
        """
        if not self.stacks or not records:
            return None
        parted, parts = self._parted, len(self.kinds)
        if parted is None:
            columns: Sequence[Sequence[Any]] = [records]
        elif len(set(map(id, records))) < len(records):  # a list that is filled again
            return None
        elif set(map(type, records)) == {parted} and set(map(len, records)) == {parts}:
            columns = [*zip(*records, strict=True)]
        else:
            return None
        template, spec = tree_flatten(self.structure.template)
        stacks: list[Tensor] = []
        for column, kind, like in zip(columns, self.kinds, template, strict=True):
            stack = _stacked_part(column, kind, like)
            if stack is None:
                return None
            stacks.append(stack)
        return tree_unflatten(stacks, spec)

    @property
    def stacks(self) -> bool:
        """Return whether records are a tensor, or lists or tuples of tensors and whole numbers."""
        is_flat = self.nesting is None or self._parted is not None
        return is_flat and all(kind in (Tensor, int) for kind in self.kinds)

    @property
    def _parted(self) -> Any:
        """Return the type of a record that is a list or a tuple of its parts; None for others."""
        is_flat = isinstance(self.nesting, list | tuple) and not any(self.nesting)
        return type(self.nesting) if is_flat else None


def _stacked_part(column: Sequence[Any], kind: type, like: Tensor) -> Tensor | None:
    """Return a part of some records as rows, or None; see :meth:`Form.stacked`.

    Args:
        column: the part of each record.
        kind: type of all of them.
        like: a batch with the shape and type of the rows.
    """
    if set(map(type, column)) != {kind}:
        return None
    if kind is int:
        return torch.tensor(column, dtype=like.dtype)
    first, alike = column[0], set(map(attrgetter("dtype"), column)) == {like.dtype}
    alike = alike and first.shape == like.shape[1:] and first.is_cpu
    if not alike or not all(map(Tensor.is_contiguous, column)):
        return None
    places = np.fromiter(map(Tensor.data_ptr, column), np.int64, len(column))
    places.sort()
    is_shared = (np.diff(places) < first.nbytes).any()
    try:
        return None if is_shared else torch.stack(tuple(column)).detach()
    except RuntimeError:  # a shape is another one
        return None


def _parts_of(record: Any, nesting: Any) -> Sequence[Any] | None:
    """Return the parts of a record, or None if it is not nested in the same way."""
    if nesting is None:
        return (record,)
    is_nested = type(record) is type(nesting) and isinstance(record, dict | list | tuple)
    if not is_nested or len(record) != len(nesting):
        return None
    if isinstance(record, dict):
        if record.keys() != nesting.keys():
            return None
        record, nesting = [record[name] for name in nesting], list(nesting.values())
    if not any(nesting):  # None for each, so there is nothing inside
        return list(record)
    parts = list[Any]()
    for part, nesting_of_part in zip(record, nesting, strict=True):
        inside = _parts_of(part, nesting_of_part)
        if inside is None:
            return None
        parts.extend(inside)
    return parts


def _is_stackable(part: Any) -> bool:
    """Return whether ``default_collate`` makes a row of a part that depends on it alone."""
    if isinstance(part, Tensor):
        return part.device.type == "cpu" and part.layout is torch.strided
    return isinstance(part, np.ndarray | np.number | np.bool_) or type(part) in (int, float, bool)


class Column(ABC):
    """Rows of one part of the records of a batch.

    :func:`column_of` chooses the subclass. Each row is written once by :meth:`put`, in order.

    Args:
        name: place of the part in the batch.
        like: a batch with the shape and type of the rows.
        kind: type of the part in the first record.
        count: number of records.

    Attributes:
        made: the rows, shape (count, ...), which are not defined until they are written.
    """

    def __init__(self, name: str, like: Tensor, kind: type, count: int) -> None:
        self.name, self.like = name, like
        self.kind: Any = kind
        self.made = like.new_empty((count, *like.shape[1:]))

    @abstractmethod
    def put(self, place: int, value: Any) -> bool:
        """Write the part of a record.

        Args:
            place: row of the record.
            value: the part.

        Returns:
            Whether it has the shape and type of the rows. If not, its row is not defined.
        """

    def rows(self) -> Tensor:
        """Return the rows, shape (records, ...), once all are written."""
        return self.made

    def put_alone(self, place: int, value: Any) -> bool:
        """Write a part of another class, such as an int64 of NumPy among ints of Python.

        It is collated alone. Arguments and result are those of :meth:`put`.
        """
        row = default_collate([value])
        fits = isinstance(row, Tensor) and row.dtype == self.made.dtype
        if not fits or row.shape != self.like.shape:
            return False
        self.made[place] = row[0]
        return True

    def fault(self, value: Any) -> str:
        """Return why a part cannot be used, in sentences that do not quote it.

        Args:
            value: the part that :meth:`put` refused.
        """
        return _other_rows(self.name, default_collate([value]), self.like)


class TensorColumn(Column):
    """Rows of tensors, each of which is copied to its row."""

    def __init__(self, name: str, like: Tensor, kind: type, count: int) -> None:
        super().__init__(name, like, kind, count)
        self._shape, self._dtype, self._places = like.shape[1:], like.dtype, self.made.unbind()

    def put(self, place: int, value: Any) -> bool:
        """Copy a tensor to its row; see :meth:`Column.put`."""
        if type(value) is not self.kind:
            return self.put_alone(place, value)
        if value.dtype is not self._dtype or value.shape != self._shape:
            return False
        self._places[place].copy_(value)
        return True


class ScalarColumn(Column):
    """Rows of tensors without a dimension, such as labels. A number takes less time than a copy."""

    def __init__(self, name: str, like: Tensor, kind: type, count: int) -> None:
        super().__init__(name, like, kind, count)
        self._dtype, self._numbers = like.dtype, list[Any]()

    def put(self, place: int, value: Any) -> bool:
        """Note the number of a tensor, whose place is that of the call; see :meth:`Column.put`."""
        if type(value) is not self.kind:
            row = default_collate([value])
            if not isinstance(row, Tensor):
                return False
            value = row[0]
        if value.dtype is not self._dtype or value.ndim:
            return False
        self._numbers.append(value.item())
        return True

    def rows(self) -> Tensor:
        """Return the numbers, shape (records,)."""
        return torch.tensor(self._numbers, dtype=self._dtype)


class NumberColumn(Column):
    """Rows of numbers of Python or NumPy, or of arrays."""

    def __init__(self, name: str, like: Tensor, kind: type, count: int) -> None:
        super().__init__(name, like, kind, count)
        self._places: Any = self.made.numpy()
        self._shape, self._array = like.shape[1:], kind is np.ndarray

    def put(self, place: int, value: Any) -> bool:
        """Write a number, or an array of the shape and type of the rows; see :meth:`Column.put`."""
        if type(value) is not self.kind:
            return self.put_alone(place, value)
        if self._array and (value.shape != self._shape or value.dtype != self._places.dtype):
            return False
        self._places[place] = value
        return True


def column_of(name: str, like: Tensor, kind: type, count: int) -> Column:
    """Return the column for a part of records.

    Args:
        name: place of the part in the batch, for messages.
        like: a batch with the shape and type of the rows.
        kind: type of the part in the first record.
        count: number of records.
    """
    if not issubclass(kind, Tensor):
        return NumberColumn(name, like, kind, count)
    scalar = kind is Tensor and like.ndim == 1 and like.dtype in EXACT
    return (ScalarColumn if scalar else TensorColumn)(name, like, kind, count)


def as_row(collated: Any) -> Any:
    """Return a collated record as dicts, lists and tuples of tensors of one row, or its fault.

    The tensors are copies, because a dataset may write every record to the same memory.

    Args:
        collated: what a ``collate_fn`` returned for a list of one record.

    >>> as_row({"x": torch.zeros(1, 2)})
    {'x': tensor([[0., 0.]])}
    >>> as_row(torch.zeros(2)).why.startswith("collate_fn returns 2 rows for one record")
    True
    """
    if isinstance(collated, Mapping) and not isinstance(collated, dict):
        collated = dict(collated)
    for name, part in parts_by_name(collated).items():
        if not isinstance(part, Tensor):
            return Fault(
                f"collate_fn returns a {type(part).__name__} as {name}, not a tensor. Return "
                "dicts, lists or tuples of tensors; leave out what is none."
            )
        if part.ndim == 0 or len(part) != 1:
            rows = "no dimension" if part.ndim == 0 else f"{len(part)} rows"
            return Fault(
                f"collate_fn returns {rows} for one record as {name}. A record must be exactly one "
                "row: epsilon covers one gradient for each record that was drawn."
            )
    if not tensors_in(collated):
        return Fault("collate_fn returns no tensor.")
    # A dataset may write every record to the same memory.
    return map_rows(lambda t: t.detach().clone(), collated)


def joined(structure: Structure, rows: Iterator[Any]) -> Batch | Fault:
    """Return rows as one batch, or the fault of one of them, after which no other is read.

    Args:
        structure: structure that every row must have.
        rows: batches of one row each, or faults, which are read one by one.

    >>> row = Structure.of(torch.zeros(1, 2))
    >>> joined(row, iter([torch.ones(1, 2), torch.ones(1, 2)])).shape
    torch.Size([2, 2])
    >>> joined(row, iter([torch.ones(1, 3)])).why.startswith("batch of a record has shape (3,)")
    True
    """
    template, spec = tree_flatten(structure.template)
    names = list(parts_by_name(structure.template))
    columns: list[list[Tensor]] = [[] for _ in template]
    for row in rows:
        if isinstance(row, Fault):
            return row
        parts, nesting = tree_flatten(row)
        if nesting != spec:
            return Fault(_other_parts(row, structure))
        for column, part, like, name in zip(columns, parts, template, names, strict=True):
            if part.shape[1:] != like.shape[1:] or part.dtype != like.dtype:
                return Fault(_other_rows(name, part, like))
            column.append(part)
    parts = []
    for column, like in zip(columns, template, strict=True):
        parts.append(torch.cat(column) if column else like.new_empty((0, *like.shape[1:])))
    return tree_unflatten(parts, spec)


def shapes_differ(row: Batch, structure: Structure) -> bool:
    """Return whether a row has other parts, shapes or types than the structure.

    Args:
        row: a batch of one row.
        structure: structure of rows.
    """
    return isinstance(joined(structure, iter([row])), Fault)


def _other_parts(record: Any, structure: Structure) -> str:
    """Return why a record with other parts than the first one cannot be used."""
    names, first = ", ".join(parts_by_name(record)), ", ".join(parts_by_name(structure.template))
    return (
        f"Records have other parts after collate_fn ({names}) than the first one ({first}). Return "
        "the same for every record."
    )


def _other_rows(name: str, row: Any, like: Tensor) -> str:
    """Return why a record whose part has another shape or type cannot be used."""
    if not isinstance(row, Tensor):
        return f"{name} of a record is no number, array or tensor, unlike that of the first one."
    return (
        f"{name} of a record has shape {tuple(row.shape[1:])} and {row.dtype}, but that of the "
        f"first one {tuple(like.shape[1:])} and {like.dtype}. All need the same, public shape: "
        "padding to the longest record of a batch would let one record change the others. Pad to "
        "a fixed length (padding='max_length')."
    )
