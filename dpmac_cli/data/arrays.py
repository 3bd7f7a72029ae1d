"""From the arrays that a reader returns to a dataset: checks, split, inputs, facts and notes."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpmac_cli.config.facts import (
    NAMED,
    NONE_LEFT_OUT,
    STANDARDS,
    DataFacts,
    LeftOut,
    PrivateNotes,
    check_name,
    dataset_of,
    refuse,
)
from dpmac_cli.config.records import Images, Numbers, Records
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.copies import are_expected, copies_among, sides_of
from dpmac_cli.data.crafted import Candidates, crafted_records
from dpmac_cli.data.dataset import Dataset, Declaration, Split
from dpmac_cli.data.ranges import remarks_on_ranges
from dpmac_cli.data.reader import ArrayDict, Reading, code_of_program
from dpmac_cli.data.targets import (
    CLASSES,
    faults_of_array,
    faults_together,
    number_in,
    targets_in,
    task_in,
    without_targets,
)
from dpmac_cli.data.units import units_in
from dpmac_cli.errors import InputError, counted, escaped, raise_errors
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.task import FARTHEST, Task, is_labelled

#: Smallest distance between the limits of a range.
NARROWEST = 1e-30
#: What the names of arrays end with: of training records, and of test records.
SIDES = ("", "_test")
#: Dimensions of an array of images, which a network gets with channels first.
OF_IMAGES = 4


def dataset_of_arrays(declared: Declaration, reading: Reading) -> Dataset:
    """Return the dataset of the arrays that a reader returned.

    Raises:
        InputError: for every fault of the arrays; or a unit has training and test records.
    """
    check_name(declared.path.name)
    arrays = _with_declared(declared, reading.arrays)
    number = number_in(arrays, declared)
    _check(arrays, declared, numbers=number is not None)
    left_out = reading.left_out + _without_tested_units(arrays, declared)
    task = task_in(arrays, declared, number, reading.classes)
    # Classes that are not declared were read from the records.
    named = CLASSES in arrays or not isinstance(task, Classification)
    crafted = _crafted(declared, reading, arrays, task)
    sides, contents = _sides(arrays, None if named else task.names, declared, crafted)
    facts = _facts_of(declared, reading, arrays, task, sides, crafted)
    if not named:
        facts = replace(facts, inferred=(*facts.inferred, "classes"))
    x = arrays["x"]
    is_numbers = _is_numbers(x)
    copies, tested = copies_among(contents)
    remarks = reading.remarks
    if is_numbers:
        remarks += tuple(remarks_on_ranges(_by_column(x), arrays, declared, number))
    with code_of_program(f"The task '{task.kind}'", declared):
        targets = [task.encoded(y) for _, y, _ in sides]
        untested = task.untested(sides[1].y) if len(sides) > 1 else ()
    notes = PrivateNotes(
        LeftOut(*(tuple(map(escaped, said)) for said in (left_out.records, left_out.reasons))),
        untested=untested,
        copies=0 if facts.unit else copies,
        tested=tested,
        remarks=remarks,
        expected=copies > 0 and is_numbers and _are_expected(arrays, declared),
    )
    train, *tests = (
        Split(inputs_of(side.x, facts.records), y, side.unit)
        for side, y in zip(sides, targets, strict=True)
    )
    made = None
    if crafted is not None:
        made = crafted.encoded(inputs_of(crafted.x, facts.records), task.encoded(crafted.y))
    return Dataset(train, tests[0] if tests else None, facts, notes, made)


def _crafted(
    declared: Declaration, reading: Reading, arrays: ArrayDict, task: Task
) -> Candidates | None:
    """Return the records that an audit makes up; None without one."""
    settings = declared.settings
    if settings.canaries is None:
        return None
    records = _records_of(declared, reading, arrays)
    like = Split(arrays["x"], arrays["y"])
    return crafted_records(records, task, settings.canaries, like, settings.seed)


def _with_declared(declared: Declaration, arrays: ArrayDict) -> ArrayDict:
    """Return arrays with what settings declare of them."""
    arrays = dict(arrays) if is_labelled(declared.settings.task) else without_targets(arrays)
    if declared.classes is not None:
        arrays[CLASSES] = np.array(declared.classes)
    if declared.ends is not None:
        arrays["low"], arrays["high"] = map(np.array, declared.ends)
    return arrays


def _facts_of(
    declared: Declaration,
    reading: Reading,
    arrays: ArrayDict,
    task: Task,
    sides: Sequence[Split],
    crafted: Candidates | None,
) -> DataFacts:
    """Return the facts of a dataset, but for classes that were inferred. Raises InputError.

    Crafted records are not counted: whoever reads the facts must not learn how many are in.
    """
    settings = declared.settings
    train, *tests = (len(y if unit is None else np.unique(unit)) for _, y, unit in sides)
    train -= 0 if crafted is None else int(crafted.coins.sum())
    known = dataset_of((train, sum(tests)), _records_of(declared, reading, arrays), task)
    sizes = {"channels": settings.channels, "image size": settings.image_size}
    return DataFacts(
        **vars(known),
        name=declared.path.resolve().stem.strip("<>"),
        typed=str(declared.path),
        own=True,
        schema=declared.schema,
        held_out=bool(tests) and "x_test" not in arrays,
        unit=settings.unit or "unit" if "unit" in arrays else "",
        inferred=(
            *(n for n, size in sizes.items() if reading.converted and size is None),
            *(() if declared.in_memory is None else declared.in_memory.inferred),
            *(() if declared.schema is None else declared.schema.inferred),
        ),
    )


def _records_of(declared: Declaration, reading: Reading, arrays: ArrayDict) -> Images | Numbers:
    """Return what the records are. Raises InputError."""
    x, settings = arrays["x"], declared.settings
    sizes = {"{channels}": settings.channels, "{image_size}": settings.image_size}
    given = [flag for flag, value in sizes.items() if value is not None]
    if given and not reading.converted:
        raise InputError(f"{given[0]} is for folders of images: arrays are not converted.")
    shape = channels_first(x[:1]).shape[1:]
    if _is_numbers(x):
        low, high = _ends(arrays).tolist()
        numbers = reading.numbers or Numbers
        return numbers(shape=shape, low=tuple(low), high=tuple(high))
    mean, std = _constants(declared, shape[0])
    return Images(shape=(shape[0], shape[1], shape[2]), mean=mean, std=std)


def _constants(declared: Declaration, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the chosen mean and standard deviation per channel of images. Raises InputError."""
    chosen = declared.settings.standardise
    mean, std = STANDARDS[chosen]
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise InputError(
            f"{{standardise=}}{chosen} is for {len(mean)} channels, but the images of "
            f"{declared.path} have {channels}. Use {{standardise=}}half."
        )
    return mean, std


def _are_expected(arrays: ArrayDict, declared: Declaration) -> bool:
    """Return whether equal records are a matter of course: see :func:`are_expected`."""
    x = arrays["x"].reshape(len(arrays["x"]), -1)
    widths = [1] * x.shape[1]
    if declared.schema is not None:
        widths = [column.inputs for column in declared.schema.columns]
    return are_expected(x, arrays["y"], widths)


def _sides(
    arrays: ArrayDict,
    classes: Sequence[str] | None,
    declared: Declaration,
    crafted: Candidates | None = None,
) -> tuple[list[Split], list[list[bytes]]]:
    """Return training and test records, and their contents; some are held out if none are to test.

    Without a part to hold out, there are training records alone.

    Args:
        classes: class names; None if they are declared and need no record to train on.
        crafted: records of an audit, which are trained on or left out.
    """
    sides = [
        Split(arrays[f"x{side}"], arrays[f"y{side}"], arrays.get(f"unit{side}"))
        for side in SIDES
        if f"x{side}" in arrays
    ]
    known = len(sides[0].y)
    if crafted is not None:
        sides[0] = crafted.added_to(sides[0])
    (_, y, units), contents = sides[0], [_contents(part.x, part.y) for part in sides]
    if len(sides) == 1 and declared.settings.test_fraction:
        named_by = arrays.get("key") if units is None else units
        keys = sides_of(contents[0]) if named_by is None else map(os.fsencode, named_by.tolist())
        tests = split(y[:known], islice(keys, known), classes, declared)
        tests = np.pad(tests, (0, len(y) - known))
        sides = [sides[0].at(~tests), sides[0].at(tests)]
        contents = [np.array(contents[0], object)[some].tolist() for some in (~tests, tests)]
    both = set[str]()
    if units is not None and "x_test" in arrays:
        both = set(units.tolist()) & set(arrays["unit_test"].tolist())
    if both:
        raise InputError(
            f"{declared.path}: {counted(len(both), 'unit')}, such as {min(both)}, "
            f"{'has' if len(both) == 1 else 'have'} training and test records: use different units "
            "for testing."
        )
    return sides, contents


def inputs_of(x: Any, records: Records) -> Any:
    """Return a copy of records: images with channels first, and numbers clipped to their range."""
    inputs = channels_first(x)
    if not isinstance(records, Numbers):
        return inputs if isinstance(x, Rows) else inputs.copy()
    ends = np.array([records.low, records.high])
    low, high = ends.reshape(2, -1, *[1] * (inputs.ndim - 2))
    return np.clip(inputs, low, high).astype(np.float32)


def _ends(arrays: ArrayDict) -> NDArray[np.float64]:
    """Return the range that columns or channels are clipped to, shape (2, columns)."""
    columns = _by_column(arrays["x"][:1]).shape[1]
    return np.array([np.broadcast_to(arrays[end], columns) for end in ("low", "high")], np.float64)


def _check(arrays: ArrayDict, declared: Declaration, *, numbers: bool) -> None:
    """Convert targets and units in place. Raises InputError with every fault of the arrays.

    ``numbers``: whether targets are numbers to predict.
    """
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(f"{declared.path}: x_test and y_test must both be given; one is missing.")
    faults = list(_faults_of_units(arrays, declared))
    for side in (side for side in SIDES if f"x{side}" in arrays):
        arrays[f"y{side}"] = targets_in(arrays[f"y{side}"], arrays, numbers=numbers)
        faults += _faults_of_pair(arrays, side)
        faults += faults_of_array(arrays, side, numbers=numbers)
        if f"unit{side}" in arrays and not faults:
            arrays[f"unit{side}"], bad = units_in(arrays[f"unit{side}"])
            faults += [f"record {row} of x{side} {why}" for row, why in bad.items()][:NAMED]
    if not faults:
        faults += () if numbers or CLASSES in arrays else faults_together(arrays)
        if _is_numbers(arrays["x"]):
            faults += _faults_of_range(arrays, declared)
    raise_errors(f"{declared.path}: {fault}." for fault in faults)


def _without_tested_units(arrays: ArrayDict, declared: Declaration) -> LeftOut:
    """With --skip-bad, remove training records whose unit has a test record, in place.

    So no record of such a unit can make the run fail.
    """
    if not declared.settings.skip_bad or not {"unit", "unit_test"} <= arrays.keys():
        return NONE_LEFT_OUT
    bad = np.isin(arrays["unit"], arrays["unit_test"])
    rows, names = np.flatnonzero(bad), arrays.get("key")
    named = [f"row {row} of x" for row in rows] if names is None else names[rows].tolist()
    for name in {"x", "y", "unit", "key"} & arrays.keys():
        arrays[name] = arrays[name][~bad]
    if not len(arrays["y"]):
        raise InputError(f"{declared.path}: every unit has test records.")
    why = (f"{counted(len(rows), 'record')} of units that have test records",) * bool(len(rows))
    return LeftOut(tuple(map(escaped, named)), why)


def _faults_of_units(arrays: ArrayDict, declared: Declaration) -> Iterator[str]:
    """Yield faults of the arrays with the units that records belong to."""
    if declared.settings.unit is not None and "unit" not in arrays:
        yield (
            f"{{unit=}}{declared.settings.unit} does not apply to arrays: add an array unit with "
            "each unit"
        )
    if ("unit" in arrays) > ("unit_test" in arrays or "x_test" not in arrays):
        yield "x_test requires an array unit_test with the unit of each test record"
    for side in SIDES:
        units, x = arrays.get(f"unit{side}"), arrays[f"x{side}" if f"x{side}" in arrays else "x"]
        if units is not None and units.shape != x.shape[:1]:
            yield (
                f"unit{side} must give the unit of each of the {sum(x.shape[:1])} records, as "
                f"integers or text, not {units.dtype} of shape {units.shape}"
            )


def _faults_of_range(arrays: ArrayDict, declared: Declaration) -> Iterator[str]:
    columns = _by_column(arrays["x"][:1]).shape[1]
    if not {"low", "high"} <= arrays.keys():
        yield (
            f"{'rows of ' * (arrays['x'].ndim == 2)}numbers need a public range to be clipped to: "
            "{feature_range=}LOW,HIGH, or arrays low and high with one number per column. Base it "
            "on what the columns mean, not on these records, which are private"
        )
        return
    good, given = np.zeros(columns, bool), (arrays["low"], arrays["high"])
    if all(end.shape in ((), (columns,)) and end.dtype.kind in "fiu" for end in given):
        ends = _ends(arrays)
        # Inputs, and the constants that standardise them, are float32.
        low, high = np.clip(ends, -FARTHEST, FARTHEST).astype(np.float32)
        good = (abs(ends) <= FARTHEST).all(0) & (high - low >= NARROWEST)
    if not good.all():
        yield (
            f"{'low and high' if declared.ends is None else '{feature_range}'} must be "
            f"numbers between -{FARTHEST:g} and {FARTHEST:g}, one for all columns or one for each, "
            f"with low below high by at least {NARROWEST:g} in single precision. "
            f"{columns - good.sum()} of {columns} columns break this rule. Give the real range of "
            "the columns, or scale them"
        )


def _faults_of_pair(arrays: ArrayDict, side: str) -> Iterator[str]:
    """Yield faults of the shapes and types of the arrays of training or test records."""
    x, y = arrays[f"x{side}"], arrays[f"y{side}"]
    if isinstance(x, Rows):
        return  # images that were decoded
    pixels = x.ndim in (3, 4) and x.dtype == np.uint8
    if x.dtype.kind not in "fiu":
        yield f"x{side} must be images or numbers, not {x.dtype}"
    elif not _is_numbers(x) and not (pixels and channels_first(x[:1]).shape[1] in (1, 3)):
        scale = ". Scale them by public constants, such as (x / 257).astype('uint8') for 16 bits"
        yield (
            f"x{side} must be images (uint8, of shape (records, height, width), with 1 or 3 "
            f"channels last or first) or numbers in rows or channels, not {x.dtype} of shape "
            f"{x.shape}" + (scale if x.ndim in (3, 4) and not pixels else "")
        )
    if x.shape[1:] != arrays["x"].shape[1:]:
        yield f"x{side} has records of shape {x.shape[1:]}, but x has {arrays['x'].shape[1:]}"
    if x.ndim and len(x) and x.dtype.kind == "f" and not np.isfinite(x).all():
        broken = np.flatnonzero(~np.isfinite(x).all(tuple(range(1, x.ndim))))
        yield (
            f"x{side} contains NaN or infinity in {counted(len(broken), 'record')}, such as "
            f"{broken[0]}. Leave them out, as in x[np.isfinite(x).all(1)]"
        )
    if x.shape[:1] == y.shape[:1] == (0,):
        yield f"there are no {'test ' if side else ''}records"
    elif not x.size or x.shape[:1] != y.shape[:1]:
        sizes = [
            counted(len(of) if of.ndim else 0, what) for of, what in ((x, "record"), (y, "label"))
        ]
        yield "x{0} has {1}, and y{0} has {2}".format(side, *sizes)


def _contents(x: Any, y: NDArray[Any]) -> list[Any]:
    """Return a hash of the values of each record and its label."""
    numbers = _is_numbers(x)
    records = (x.file.values[row] for row in x.rows) if isinstance(x, Rows) else x
    return [
        hashlib.blake2b(key_of(row, label, numbers), digest_size=16).digest()
        for row, label in zip(records, y, strict=True)
    ]


def key_of(record: NDArray[Any], label: ArrayLike, numbers: bool) -> bytes:
    """Return bytes that depend on the values of a record, and not on the types they have."""
    with np.errstate(over="ignore"):  # of wider floats
        # Adding 0 turns -0 into 0.
        values = record.astype("<f8") + 0.0 if numbers else np.asarray(record, np.uint8)
    target = np.asarray(label)
    exact = target.astype("<f8") + 0.0 if target.dtype.kind == "f" else target.astype("<i8")
    return values.tobytes() + exact.tobytes()


def split(
    y: NDArray[Any], keys: Iterable[bytes], classes: Sequence[str] | None, declared: Declaration
) -> NDArray[np.bool_]:
    """Return which records are held out. Raises InputError if too many are, or too few.

    Args:
        y: targets.
        keys: one key per record that decides its side of the split: its name, its contents, or
            its unit.
        classes: class names; None if they are declared and need no record to train on.
    """
    settings = declared.settings
    seed, most = settings.split_seed.to_bytes(8, "big"), settings.test_fraction * 2**64
    # Adding or removing a record or unit must not change the split of the others.
    words = (hashlib.blake2b(key, digest_size=8, key=seed).digest() for key in keys)
    held_out = np.array([int.from_bytes(word, "big") < most for word in words])
    if held_out.all() or not held_out.any():
        raise InputError(
            f"{{test_fraction=}}{settings.test_fraction:g} of {counted(len(held_out), 'record')} "
            "leaves no training or no test records. Add records, or use another {test_fraction} or "
            "{split_seed}."
        )
    if classes is not None:
        only = sorted({*y[held_out].tolist()} - {*y[~held_out].tolist()})
        refuse(
            [f"All records of the class {classes[label]} are held out" for label in only],
            " Use a smaller {test_fraction} or another {split_seed}, add records, or declare "
            "the classes with {classes}.",
        )
    return held_out


def _is_numbers(x: Any) -> bool:
    """Return whether an array holds numbers, which have a public range, and not images."""
    if isinstance(x, Rows):
        return False
    return x.ndim == 2 or (x.ndim in (3, 4) and x.dtype.kind == "f")


def _by_column(x: Any) -> Any:
    """Return numbers by the columns or channels that have a range: (records, columns, values)."""
    columns = 1 if x.ndim == OF_IMAGES - 1 else channels_first(x[:1]).shape[1]
    return channels_first(x).reshape(len(x), columns, -1)


def channels_first(x: Any) -> Any:
    """Return records as inputs: images, and numbers in their shape, with channels first."""
    if isinstance(x, Rows) or (_is_numbers(x) and x.ndim < OF_IMAGES):
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.shape[3] not in (1, 3):
        return x
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
