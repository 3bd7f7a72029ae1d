"""Remarks on declared ranges and categories that do not fit the records, or were taken from them.

They depend on private records, so they are private notes.
"""

from collections.abc import Iterable, Iterator, Mapping
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
        x: numbers, shape (records, columns, ...). arrays: targets, and the ends of the columns.
        declared: the dataset, whose schema names its columns. number: to predict.
    """
    names = [f"x[:, {place}]" for place in range(x.shape[1])]
    columns, first = (() if declared.schema is None else declared.schema.columns), 0
    unused, dates, in_ranges = list[str](), dict[str, str](), np.ones(len(names), np.bool_)
    for column in columns:
        if column.type == "date" and column.range is not None:
            dates[column.name] = "{} to {}".format(*column.range)
        names[first : first + column.inputs] = [column.name] * column.inputs
        in_ranges[first : first + column.inputs] = not column.open
        unused += [
            f"{name} of {column.name}"
            for place, name in enumerate(column.categories, first)
            if column.type == "category" and not x[:, place].any()
        ]
        first += column.inputs
    if unused:
        yield f"No record has the category {first_of(unused)}: check the spelling"
    low, high = arrays["low"], arrays["high"]
    if not in_ranges.all():
        low, high = low[in_ranges], high[in_ranges]
    declared_names = [name for name, inside in zip(names, in_ranges, strict=True) if inside]
    yield from _of_each(declared_names, np.moveaxis(x, 1, 0)[in_ranges], low, high, dates)
    if number is not None and not number.open:
        low, high = np.array(number.low), np.array(number.high)
        yield from _of_each([number.name], arrays["y"].T, low, high, {})


def _of_each(
    names: Iterable[str],
    columns: NDArray[Any],
    low: NDArray[Any],
    high: NDArray[Any],
    dates: Mapping[str, str],
) -> Iterator[str]:
    """Yield remarks on the ranges of columns, shape (columns, records, ...).

    ``dates`` are the ranges of columns of dates, as they are declared.
    """
    if low.size == high.size == 1:  # one range for all
        columns, names = columns.reshape(1, -1), ["x"] if len(columns) > 1 else names
    outside, some_outside, taken = list[str](), list[str](), list[str]()
    lows, highs = (np.broadcast_to(end.ravel(), len(columns)) for end in (low, high))
    for name, values, least, most in zip(names, columns, lows, highs, strict=True):
        beyond = (values < least) | (values > most)
        declared = dates.get(name, f"{least:g} to {most:g}")
        if beyond.mean() >= NEARLY_ALL:
            outside.append(f"{name} ({declared})")
        elif beyond.mean() > FEW:
            found = f"{np.count_nonzero(beyond):,} of {beyond.size:,}"
            some_outside.append(f"{name} ({found}; {declared})")
        times = np.count_nonzero(values == least), np.count_nonzero(values == most)
        # Values such as 0 and 255, at which many records are, are no sign of that.
        if not beyond.any() and min(times) == 1:
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
