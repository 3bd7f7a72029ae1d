"""Covering arrays of strength 2: few combinations with every pair of values among them.

Nearly all faults need one or two particular settings at once (Kuhn, Wallace and Gallo, "Software
fault interactions and implications for software testing", 2004).
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

#: A column and the number of its value.
Choice: TypeAlias = tuple[int, int]


def all_pairs(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows such that any two values of two columns are in some row together.

    The rows are the same each time, and the first has the first value of each column. A column
    whose values are tuples may stand for several parameters that must be combined in every way.
    """
    sizes = [len(column) for column in columns]
    rows = [_values(columns, dict.fromkeys(range(len(columns)), 0))]
    missing = _pairs(sizes) - _pairs_of(dict.fromkeys(range(len(columns)), 0))
    while missing:
        row = _row(sizes, missing)
        missing -= _pairs_of(row)
        rows.append(_values(columns, row))
    return rows


def _values(columns: Sequence[Sequence[Any]], row: dict[int, int]) -> tuple[Any, ...]:
    return tuple(column[row[i]] for i, column in enumerate(columns))


def _pairs(sizes: Sequence[int]) -> set[frozenset[Choice]]:
    """Return all pairs of values of different columns."""
    choices = [[(i, number) for number in range(size)] for i, size in enumerate(sizes)]
    return {
        frozenset(pair)
        for one, other in itertools.combinations(choices, 2)
        for pair in itertools.product(one, other)
    }


def _pairs_of(row: dict[int, int]) -> set[frozenset[Choice]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _row(sizes: Sequence[int], missing: set[frozenset[Choice]]) -> dict[int, int]:
    """Return a row with the first missing pair, and with as many more as a greedy choice finds."""
    row = dict(min(sorted(pair) for pair in missing))
    for i in sorted(set(range(len(sizes))) - row.keys(), key=lambda i: -sizes[i]):

        def gained(number: int, i: int = i) -> int:
            return sum(frozenset([(i, number), other]) in missing for other in row.items())

        row[i] = max(range(sizes[i]), key=gained)
    return row
