"""Covering arrays: every pair of values, in few rows."""

import itertools

import pytest

from tests.pairwise import all_pairs

COLUMNS = (
    [(0, 1)],
    [(0, 1, 2), (0, 1)],
    [(0, 1), (0, 1), (0, 1), (0, 1)],
    [tuple(range(22)), (0, 1), (0, 1), (0, 1), (0, 1)],
    [(0, 1, 2, 3)] * 6,
)


@pytest.mark.parametrize(
    "columns", COLUMNS, ids=lambda columns: "x".join(map(str, map(len, columns)))
)
def test_every_pair_is_in_some_row(columns: list[tuple[int, ...]]) -> None:
    rows = all_pairs(*columns)
    assert len(set(rows)) == len(rows)
    assert rows[0] == (0,) * len(columns)
    assert set(rows) <= set(itertools.product(*columns))
    for i, j in itertools.combinations(range(len(columns)), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(columns[i], columns[j]))
