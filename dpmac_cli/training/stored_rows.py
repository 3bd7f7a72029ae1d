"""Batches of records that are rows of tensors or arrays: they are indexed, not read one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dpmac_cli.randomness.sampling import Indices


@dataclass(frozen=True)
class Stored:
    """Records that are rows of tensors or arrays, which can be indexed instead of read one by one.

    Attributes:
        tables: tensors or arrays of equal length, as in a ``TensorDataset``; several tables for
            a ``ConcatDataset``.
        table: table of each record, shape (records,).
        row: row of each record in it, shape (records,).
    """

    tables: tuple[tuple[Any, ...], ...]
    table: NDArray[np.int64]
    row: NDArray[np.int64]

    @staticmethod
    def of(columns: Sequence[Any]) -> "Stored":
        """Return the records of one table.

        Args:
            columns: tensors or arrays of equal length, at least one, of which a record has a row
                each.
        """
        size = len(columns[0])
        return Stored((tuple(columns),), np.zeros(size, np.int64), np.arange(size))

    def at(self, numbers: Indices) -> list[Tensor]:
        """Return copies of the rows of some records, one tensor per column, in their order.

        Args:
            numbers: indices of the records, shape (records,). One may be there several times.
        """
        table, row = self.table[numbers], self.row[numbers]
        if len(self.tables) == 1:
            return _rows_of(self.tables[0], row)
        parts = list[list[Tensor]]()
        for number, columns in enumerate(self.tables):
            parts.append(_rows_of(columns, row[table == number]))
        order = torch.from_numpy(np.argsort(np.argsort(table, kind="stable"), kind="stable"))
        return [torch.cat(column)[order] for column in zip(*parts, strict=True)]


def _rows_of(columns: Sequence[Any], rows: Indices) -> list[Tensor]:
    """Return copies of some rows of tensors or arrays."""
    copies = list[Tensor]()
    for column in columns:
        if isinstance(column, Tensor):
            copies.append(column.detach()[torch.from_numpy(rows)])
        else:
            copies.append(torch.from_numpy(column[rows]))
    return copies


def stored_in(dataset: Any) -> Stored | None:
    """Return the rows of a ``TensorDataset``, a tensor or an array, or None for another dataset.

    Any nesting of ``Subset`` and ``ConcatDataset`` is followed. A subclass may read its records in
    another way, so it is another dataset.

    Args:
        dataset: map-style dataset, of which nothing is read.

    >>> stored_in(Subset(TensorDataset(torch.arange(4)), [3, 0])).at(np.array([0, 1]))
    [tensor([3, 0])]
    """
    kind = type(dataset)
    if kind is Subset:
        return _chosen(stored_in(dataset.dataset), np.asarray(dataset.indices))
    if kind is ConcatDataset:
        return _concatenated(list(map(stored_in, dataset.datasets)))
    columns = dataset.tensors if kind is TensorDataset else (dataset,)
    return Stored.of(columns) if all(map(_has_rows, columns)) else None


def _has_rows(column: Any) -> bool:
    """Return whether a column is a tensor or an array that can be indexed by row."""
    if type(column) not in (Tensor, np.ndarray) or column.ndim == 0:
        return False
    return not isinstance(column, Tensor) or column.layout is torch.strided


def _chosen(whole: Stored | None, indices: NDArray[Any]) -> Stored | None:
    """Return some records of a dataset, or None if there are no such records."""
    if whole is None or indices.dtype.kind != "i" or indices.ndim != 1:
        return None
    try:
        return Stored(whole.tables, whole.table[indices], whole.row[indices])
    except IndexError:
        return None


def _concatenated(datasets: list[Stored | None]) -> Stored | None:
    """Return the records of several datasets, or None if their rows differ in shape or type."""
    tables, table, row = list[tuple[Any, ...]](), list[Indices](), list[Indices]()
    for part in datasets:
        if part is None:
            return None
        table.append(part.table + len(tables))
        row.append(part.row)
        tables.extend(part.tables)
    if len(set(map(_form_of, tables))) > 1:
        return None
    return Stored(tuple(tables), np.concatenate(table), np.concatenate(row))


def _form_of(columns: Sequence[Any]) -> tuple[Any, ...]:
    """Return the class, type and shape of a row of each column of a table."""
    return tuple((type(column), column.dtype, column.shape[1:]) for column in columns)
