"""Equal records: how many there are, and whether as many are to be expected."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

#: Most equal records that are kept on one side of a split, as copies of one. More are a matter of
#: course, as in a table of few columns: kept together, too few kinds of records would be tested.
MOST_COPIES = 4


def sides_of(contents: Iterable[bytes], forms: Iterable[bytes] | None = None) -> Iterator[bytes]:
    """Yield the key of each record that decides its side of a split, given its contents.

    It is of the contents alone for the first MOST_COPIES equal records, and for others also of how
    many are before them. So adding or removing a record changes the side of no other, nor those of
    its copies. The number of a record in its file would.

    Args:
        contents: content of each record, in a form in which those that mean the same are equal.
        forms: content as it stands, if several forms mean the same: 1 and 1.0. Copies are counted
            among records of one form, so that a record moves no record of another form.
    """
    seen: Counter[bytes] = Counter()
    contents = list(contents)
    for content, form in zip(contents, contents if forms is None else forms, strict=True):
        seen[form] += 1
        yield content + max(0, seen[form] - MOST_COPIES).to_bytes(8, "big")


def copies_among(sides: Sequence[Sequence[Hashable]]) -> tuple[int, tuple[int, ...]]:
    """Return how many records equal others, and the numbers of test records that were trained on.

    Args:
        sides: contents of training and, if there are any, of test records.
    """
    train, *tests = map(set, sides)
    both = tuple(row for side in sides[1:] for row, of in enumerate(side) if of in train)
    return sum(map(len, sides)) - len(train.union(*tests)), both


def are_expected(x: NDArray[np.float64], y: NDArray[np.float64], widths: Sequence[int]) -> bool:
    """Return whether a record equals another one by chance, as in a table of few columns.

    That is so if at least one is expected to do so where columns are independent.

    Args:
        x: numbers, shape (records, inputs).
        y: targets, shape (records, ...).
        widths: number of inputs of each column.
    """
    others = float(len(x) - 1)
    columns = [y.reshape(len(y), -1), *np.split(x, np.cumsum(widths)[:-1], axis=1)]
    for column in columns:
        if others < 1:
            return False
        counts = np.unique(column, axis=0, return_counts=True)[1]
        others *= float(np.square(counts / len(x)).sum())
    return others >= 1
