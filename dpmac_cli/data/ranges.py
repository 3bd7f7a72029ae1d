"""Remarks on declared ranges and categories that do not fit the records, or were taken from them.

Ranges are declared without a look at the records. A wrong one costs accuracy silently: values
outside it become its ends. A right one that was measured on the records is a leak that no epsilon
covers. Both can be seen only in the records, so remarks are private notes for the person who holds
them, and never part of what is published.

Ranges that are found within epsilon are not declared, so there is nothing to remark on.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import first_of
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.tasks.regression import Regression

#: Share of the values of a column that counts as nearly all, and share above which values outside
#: their range are remarked on.
NEARLY_ALL, FEW = 0.9, 0.01


def remarks_on_ranges(
    x: NDArray[Any],
    arrays: Mapping[str, NDArray[Any]],
    declared: Declaration,
    number: Regression | None,
) -> Iterator[str]:
    """Yield remarks on the ranges of columns and of the target, and on categories.

    Args:
        x: numbers, shape (records, columns, ...).
        arrays: targets ``y``, and ``low`` and ``high``, the ends of the columns.
        declared: the dataset, whose schema names its columns.
        number: the number to predict; None for classes.
    """
    columns = () if declared.schema is None else declared.schema.columns
    names = [f"x[:, {place}]" for place in range(x.shape[1])]
    is_ranged = np.ones(len(names), np.bool_)
    dates = dict[str, str]()
    unused = list[str]()
    first = 0
    for column in columns:
        if column.type == "date" and column.range is not None:
            dates[column.name] = "{} to {}".format(*column.range)
        names[first : first + column.inputs] = [column.name] * column.inputs
        is_ranged[first : first + column.inputs] = not column.open
        if column.type == "category":
            for place, category in enumerate(column.categories, first):
                if not x[:, place].any():
                    unused.append(f"{category} of {column.name}")
        first += column.inputs
    if unused:
        yield f"No record has the category {first_of(unused)}: check the spelling"
    low, high = arrays["low"], arrays["high"]
    if not is_ranged.all():
        low, high = low[is_ranged], high[is_ranged]
    ranged_names = list(compress(names, is_ranged))
    by_column = np.moveaxis(x, 1, 0)
    yield from _of_each(ranged_names, by_column[is_ranged], low, high, dates)
    if number is not None and not number.open:
        low = np.array(number.low)
        high = np.array(number.high)
        yield from _of_each([number.name], arrays["y"].T, low, high, {})


def _of_each(
    names: Sequence[str],
    columns: NDArray[Any],
    low: NDArray[Any],
    high: NDArray[Any],
    dates: Mapping[str, str],
) -> Iterator[str]:
    """Yield remarks on the ranges of columns.

    A column is named in one remark on values outside its range: in the first if they are nearly
    all, in the second if they are more than a few. Its range is taken from the records, it seems,
    if both ends are values and each is there once.

    Args:
        names: name of each column.
        columns: their values, shape (columns, records, ...).
        low: lowest value of all columns, or of each.
        high: highest value of all columns, or of each.
        dates: ranges of columns of dates by name, as they are declared.
    """
    if low.size == high.size == 1:  # one range for all
        names = ["x"] if len(columns) > 1 else names
        columns = columns.reshape(1, -1)
    lows = np.broadcast_to(low.ravel(), len(columns))
    highs = np.broadcast_to(high.ravel(), len(columns))
    outside = list[str]()
    some_outside = list[str]()
    taken = list[str]()
    for name, values, least, most in zip(names, columns, lows, highs, strict=True):
        beyond = (values < least) | (values > most)
        declared = dates.get(name, f"{least:g} to {most:g}")
        if beyond.mean() >= NEARLY_ALL:
            outside.append(f"{name} ({declared})")
        elif beyond.mean() > FEW:
            count = f"{np.count_nonzero(beyond):,} of {beyond.size:,}"
            some_outside.append(f"{name} ({count}; {declared})")
        at_least = np.count_nonzero(values == least)
        at_most = np.count_nonzero(values == most)
        # Values such as 0 and 255, at which many records are, are no sign of that.
        if not beyond.any() and min(at_least, at_most) == 1:
            taken.append(name)
    if outside:
        yield (
            f"Nearly all values are outside the range of {first_of(outside)}, so they become its "
            "ends, and little of them is left: declare ranges on the scale of the records"
        )
    if some_outside:
        yield (
            f"Values are outside the range of {first_of(some_outside)}, and become its ends. "
            "Declare words for a missing value (such as missing_words: [-99]), convert all records "
            "to one scale, or declare a wider range"
        )
    if taken:
        yield (
            f"The range of {first_of(taken)} ends at the smallest and the largest value of these "
            "records. Ranges are published and not covered: base them on what the values mean"
        )
