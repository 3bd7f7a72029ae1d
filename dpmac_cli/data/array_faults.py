"""Checks of the arrays that a reader returns. All faults of a dataset are reported together.

The names of arrays are those of an .npz: ``x``, ``y`` and ``unit`` of training records, and with
``_test`` behind them of test records. Records are

- images: uint8, shape (records, height, width), with 1 or 3 channels last or first; or
- numbers: of any type of numbers, shape (records, columns), or floats in the shape of images, all
  finite, with a public range ``low`` and ``high`` for all columns or for each.

Targets are checked in ``targets.py``. A message says which array is wrong, what was found, and a
line of code that corrects it.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import NAMED, NONE_LEFT_OUT, LeftOut
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.layout import (
    CHANNELS,
    SIDES,
    by_column,
    channels_first,
    column_ranges,
    is_numbers,
)
from dpmac_cli.data.reader import ArrayDict
from dpmac_cli.data.targets import CLASSES, faults_of_array, faults_together, targets_in
from dpmac_cli.data.units import units_in
from dpmac_cli.errors import InputError, counted, escaped, raise_errors
from dpmac_cli.tasks.task import FARTHEST

#: Smallest distance between the limits of a range.
NARROWEST = 1e-30


def check_arrays(arrays: ArrayDict, declared: Declaration, *, numbers: bool) -> None:
    """Check arrays, and convert targets and units in place.

    Faults of all labels together, and of ranges, are looked for only in arrays without other
    faults.

    Args:
        arrays: arrays of a reader, with what settings declare of them, by their names in an .npz.
        declared: the dataset.
        numbers: True if targets are numbers to predict, False for classes.

    Raises:
        InputError: with every fault of the arrays.
    """
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(f"{declared.path}: x_test and y_test must both be given; one is missing.")
    faults = list(_faults_of_units(arrays, declared))
    for side in SIDES:
        if f"x{side}" not in arrays:
            continue
        arrays[f"y{side}"] = targets_in(arrays[f"y{side}"], arrays, numbers=numbers)
        faults += _faults_of_pair(arrays, side)
        faults += faults_of_array(arrays, side, numbers=numbers)
        if f"unit{side}" in arrays and not faults:
            arrays[f"unit{side}"], bad = units_in(arrays[f"unit{side}"])
            for row, why in islice(bad.items(), NAMED):
                faults.append(f"record {row} of x{side} {why}")
    if not faults:
        if not numbers and CLASSES not in arrays:
            faults += faults_together(arrays)
        if is_numbers(arrays["x"]):
            faults += _faults_of_range(arrays, declared)
    raise_errors(f"{declared.path}: {fault}." for fault in faults)


def without_tested_units(arrays: ArrayDict, declared: Declaration) -> LeftOut:
    """With ``skip_bad``, remove training records whose unit has a test record, in place.

    So no record of such a unit can make the run fail.

    Args:
        arrays: arrays of a reader, checked.
        declared: the dataset.

    Returns:
        the records that were removed, and why.

    Raises:
        InputError: no training record is left.
    """
    have_units = {"unit", "unit_test"} <= arrays.keys()
    if not declared.settings.skip_bad or not have_units:
        return NONE_LEFT_OUT
    is_tested = np.isin(arrays["unit"], arrays["unit_test"])
    rows = np.flatnonzero(is_tested)
    names = [f"row {row} of x" for row in rows]
    if "key" in arrays:
        names = arrays["key"][rows].tolist()
    for name in {"x", "y", "unit", "key"} & arrays.keys():
        arrays[name] = arrays[name][~is_tested]
    if not len(arrays["y"]):
        raise InputError(f"{declared.path}: every unit has test records.")
    reasons = list[str]()
    if len(rows):
        reasons.append(f"{counted(len(rows), 'record')} of units that have test records")
    return LeftOut(tuple(map(escaped, names)), tuple(reasons))


def _faults_of_units(arrays: ArrayDict, declared: Declaration) -> Iterator[str]:
    """Yield faults of the arrays with the units that records belong to.

    Args:
        arrays: arrays of a reader. ``unit`` and ``unit_test`` must be of shape (records,).
        declared: the dataset, with the unit that settings ask for.
    """
    if declared.settings.unit is not None and "unit" not in arrays:
        yield (
            f"{{unit=}}{declared.settings.unit} does not apply to arrays: add an array unit with "
            "each unit"
        )
    needs_no_test = "unit_test" in arrays or "x_test" not in arrays
    if "unit" in arrays and not needs_no_test:
        yield "x_test requires an array unit_test with the unit of each test record"
    for side in SIDES:
        x = arrays[f"x{side}" if f"x{side}" in arrays else "x"]
        units = arrays.get(f"unit{side}")
        if units is not None and units.shape != x.shape[:1]:
            yield (
                f"unit{side} must give the unit of each of the {sum(x.shape[:1])} records, as "
                f"integers or text, not {units.dtype} of shape {units.shape}"
            )


def _faults_of_range(arrays: ArrayDict, declared: Declaration) -> Iterator[str]:
    """Yield faults of the public range of numbers, ``low`` and ``high``.

    Args:
        arrays: arrays of a reader, whose x is numbers.
        declared: the dataset, whose settings may declare one range for all columns.
    """
    columns = by_column(arrays["x"][:1]).shape[1]
    if not {"low", "high"} <= arrays.keys():
        yield (
            f"{'rows of ' * (arrays['x'].ndim == 2)}numbers need a public range to be clipped to: "
            "{feature_range=}LOW,HIGH, or arrays low and high with one number per column. Base it "
            "on what the columns mean, not on these records, which are private"
        )
        return
    ends = arrays["low"], arrays["high"]
    is_good = np.zeros(columns, bool)
    are_numbers = all(end.dtype.kind in "fiu" for end in ends)
    have_shape = all(end.shape in ((), (columns,)) for end in ends)
    if not have_shape:
        lengths = " and ".join(f"{end.size:,}" for end in ends)
        yield (
            f"low and high have {lengths} numbers for {columns:,} columns. Give one number for all "
            "columns, or one for each"
        )
        return
    if are_numbers and have_shape:
        is_good = _are_ranges(column_ranges(arrays["x"], *ends))
    if not is_good.all():
        yield (
            f"{'low and high' if declared.ends is None else '{feature_range}'} must be "
            f"numbers between -{FARTHEST:g} and {FARTHEST:g}, one for all columns or one for each, "
            f"with low below high by at least {NARROWEST:g} in single precision. "
            f"{columns - is_good.sum()} of {columns} columns break this rule. Give the real range "
            "of the columns, or scale them"
        )


def _are_ranges(ranges: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which ranges numbers can be scaled by in float32, shape (columns,).

    Inputs, and the constants that standardise them, are float32.

    Args:
        ranges: lowest and highest values, shape (2, columns).
    """
    clipped = np.clip(ranges, -FARTHEST, FARTHEST)
    low, high = clipped.astype(np.float32)
    is_near = np.logical_and.reduce(abs(ranges) <= FARTHEST)
    is_wide = high - low >= NARROWEST
    are_ranges: NDArray[np.bool_] = np.logical_and(is_near, is_wide)
    return are_ranges


def _faults_of_pair(arrays: ArrayDict, side: str) -> Iterator[str]:
    """Yield faults of the shapes and types of the arrays of training or test records.

    Args:
        arrays: arrays of a reader. Decoded images have no such faults.
        side: one of :data:`~dpmac_cli.data.layout.SIDES`.
    """
    x, y = arrays[f"x{side}"], arrays[f"y{side}"]
    if isinstance(x, Rows):
        return
    if x.dtype.kind not in "fiu":
        yield f"x{side} must be images or numbers, not {x.dtype}"
    elif not is_numbers(x):
        yield from _faults_of_images(x, f"x{side}")
    if x.shape[1:] != arrays["x"].shape[1:]:
        yield f"x{side} has records of shape {x.shape[1:]}, but x has {arrays['x'].shape[1:]}"
    if x.ndim and len(x) and x.dtype.kind == "f":
        of_record = tuple(range(1, x.ndim))
        is_finite = np.isfinite(x).all(of_record)
        broken = np.flatnonzero(~is_finite)
        if len(broken):
            yield (
                f"x{side} contains NaN or infinity in {counted(len(broken), 'record')}, such as "
                f"{broken[0]}. Leave them out, as in x[np.isfinite(x).all(1)]"
            )
    if x.shape[:1] == y.shape[:1] == (0,):
        yield f"there are no {'test ' if side else ''}records"
    elif not x.size or x.shape[:1] != y.shape[:1]:
        records = counted(len(x) if x.ndim else 0, "record")
        labels = counted(len(y) if y.ndim else 0, "label")
        yield f"x{side} has {records}, and y{side} has {labels}"


def _faults_of_images(x: NDArray[Any], name: str) -> Iterator[str]:
    """Yield the fault of an array that holds neither numbers nor images.

    Args:
        x: an array of numbers of any shape.
        name: its name in the message.
    """
    has_sides = x.ndim in (3, 4)
    are_pixels = has_sides and x.dtype == np.uint8
    if are_pixels and channels_first(x[:1]).shape[1] in CHANNELS:
        return
    advice = ""
    if has_sides and not are_pixels:
        advice = ". Scale them by public constants, such as (x / 257).astype('uint8') for 16 bits"
    yield (
        f"{name} must be images (uint8, of shape (records, height, width), with 1 or 3 "
        f"channels last or first) or numbers in rows or channels, not {x.dtype} of shape "
        f"{x.shape}{advice}"
    )
