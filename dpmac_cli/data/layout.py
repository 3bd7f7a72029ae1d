"""Layout of arrays of records: which are images, where their channels are, and their inputs.

An array with 3 or 4 dimensions holds images if its type is uint8, and series or maps of numbers if
it is a float. Rows with 2 dimensions are numbers. Images may have their channels first, last, or
none; a network gets them first.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.records import Numbers, Records
from dpmac_cli.data.cache import Rows

#: Endings of the names of arrays: of training records, and of test records.
SIDES = ("", "_test")
#: Dimensions of an array of images with channels.
OF_IMAGES = 4
#: Numbers of channels that images have.
CHANNELS = (1, 3)


def is_numbers(x: Any) -> bool:
    """Return whether an array holds numbers, which have a public range, and not images.

    Args:
        x: records, shape (records, ...). :class:`~dpmac_cli.data.cache.Rows` are decoded images.
    """
    if isinstance(x, Rows):
        return False
    if x.ndim == 2:
        return True
    return x.ndim in (3, 4) and x.dtype.kind == "f"


def channels_first(x: Any) -> Any:
    """Return records with channels first: images, and numbers in the shape of images.

    Args:
        x: images, shape (records, height, width), (records, height, width, channels) or
            (records, channels, height, width); or numbers of any shape, of which those with fewer
            than 4 dimensions are returned as they are.

    Returns:
        images of shape (records, channels, height, width). A transposed array is copied, so that
        its values are contiguous.
    """
    if isinstance(x, Rows):
        return x
    if is_numbers(x) and x.ndim < OF_IMAGES:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.shape[3] not in CHANNELS:
        return x
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def by_column(x: Any) -> Any:
    """Return numbers by the columns or channels that have a range each.

    Args:
        x: numbers, shape (records, columns) or (records, channels, ...). Arrays of shape (records,
            height, width) have one range for all values.

    Returns:
        the same numbers, shape (records, columns, values).
    """
    first = channels_first(x[:1])
    columns = 1 if x.ndim == OF_IMAGES - 1 else first.shape[1]
    return channels_first(x).reshape(len(x), columns, -1)


def column_ranges(
    x: Any,
    low: NDArray[Any],
    high: NDArray[Any],
) -> NDArray[np.float64]:
    """Return the range that each column or channel is clipped to, shape (2, columns).

    Args:
        x: numbers, as for :func:`by_column`.
        low: lowest value of all columns, shape (), or of each, shape (columns,).
        high: highest value of all columns, shape (), or of each, shape (columns,).
    """
    columns = by_column(x[:1]).shape[1]
    lows = np.broadcast_to(low, columns)
    highs = np.broadcast_to(high, columns)
    return np.array([lows, highs], np.float64)


def inputs_of(x: Any, records: Records) -> Any:
    """Return a copy of records as a network takes them.

    Images get their channels first. Numbers are clipped to their public range, each by itself, so
    that no record decides how another one is scaled.

    Args:
        x: records as a reader returns them, shape (records, ...). Decoded images in
            :class:`~dpmac_cli.data.cache.Rows` stay in their file and are not copied.
        records: what they are, with the ranges of numbers.

    Returns:
        images, uint8, shape (records, channels, height, width); or numbers, float32, in the shape
        of ``x``.
    """
    inputs = channels_first(x)
    if not isinstance(records, Numbers):
        return inputs if isinstance(x, Rows) else inputs.copy()
    ends = np.array([records.low, records.high])
    after_columns = [1] * (inputs.ndim - 2)
    low, high = ends.reshape(2, -1, *after_columns)
    return np.clip(inputs, low, high).astype(np.float32)
