"""Records to train on and records held out for testing, each decided by the record itself.

A record's side follows from a hash of its key: its name, its unit, or its contents. So adding or
removing a record changes the side of no other one. Equal records stay on one side, up to
:data:`MOST_COPIES` of them.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpmac_cli.config.facts import refuse
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Crafted, Declaration, Split
from dpmac_cli.data.layout import SIDES, is_numbers
from dpmac_cli.data.reader import ArrayDict
from dpmac_cli.errors import InputError, counted

#: Most equal records that are kept on one side of a split, as copies of one. More are a matter of
#: course, as in a table of few columns: kept together, too few kinds of records would be tested.
MOST_COPIES = 4
#: Bytes of a hash of a record's contents.
BYTES = 16


def train_and_test(
    arrays: ArrayDict,
    classes: Sequence[str] | None,
    declared: Declaration,
    crafted: Crafted[Split] | None = None,
) -> tuple[list[Split], list[list[bytes]]]:
    """Return training and test records, and a hash of the contents of each.

    Some records are held out if there are none to test on. Without a part to hold out, there are
    training records alone.

    Args:
        arrays: arrays of a reader, checked.
        classes: class names; None if they are declared and need no record to train on.
        declared: the dataset, with its part to hold out and the seed of the split.
        crafted: records of an audit, which are trained on or left out, and never held out.

    Raises:
        InputError: the split is impossible, or a unit has training and test records.
    """
    sides = []
    for side in SIDES:
        if f"x{side}" in arrays:
            x, y = arrays[f"x{side}"], arrays[f"y{side}"]
            sides.append(Split(x, y, arrays.get(f"unit{side}")))
    known = len(sides[0].y)
    if crafted is not None:
        sides[0] = crafted.added_to(sides[0])
    train = sides[0]
    contents = list(map(_contents, sides))
    if len(sides) == 1 and declared.settings.test_fraction:
        names = arrays.get("key") if train.unit is None else train.unit
        keys = copy_keys(contents[0]) if names is None else map(os.fsencode, names.tolist())
        tests = split(train.y[:known], islice(keys, known), classes, declared)
        tests = np.pad(tests, (0, len(train.y) - known))
        sides = [train.at(~tests), train.at(tests)]
        hashes = np.array(contents[0], object)
        contents = [hashes[~tests].tolist(), hashes[tests].tolist()]
    if train.unit is not None and "x_test" in arrays:
        _check_units_differ(train.unit, arrays["unit_test"], declared)
    return sides, contents


def _check_units_differ(
    train: NDArray[Any],
    test: NDArray[Any],
    declared: Declaration,
) -> None:
    """Raise InputError if a unit has training and test records.

    Args:
        train: unit of each training record.
        test: unit of each test record.
        declared: the dataset, for the message.
    """
    on_both_sides = set(train.tolist()) & set(test.tolist())
    if on_both_sides:
        count = len(on_both_sides)
        raise InputError(
            f"{declared.path}: {counted(count, 'unit')}, such as {min(on_both_sides)}, "
            f"{'has' if count == 1 else 'have'} training and test records: use different units "
            "for testing."
        )


def _contents(side: Split) -> list[bytes]:
    """Return a hash of the values of each record and its target; those in a file are read in turn.

    Args:
        side: records and their targets.
    """
    x = side.x
    numbers = is_numbers(x)
    records = (x.file.values[row] for row in x.rows) if isinstance(x, Rows) else x
    hashes = []
    for record, target in zip(records, side.y, strict=True):
        values = key_of(record, target, numbers)
        hashes.append(hash_of(values))
    return hashes


def hash_of(content: bytes) -> bytes:
    """Return a hash of the content of a record, of :data:`BYTES` bytes.

    Args:
        content: the same bytes for equal records.
    """
    return hashlib.blake2b(content, digest_size=BYTES).digest()


def key_of(
    record: NDArray[Any],
    label: ArrayLike,
    numbers: bool,
) -> bytes:
    """Return bytes that depend on the values of a record, and not on the types they have.

    Args:
        record: values of one record.
        label: its target.
        numbers: whether its values are numbers, and not pixels.
    """
    with np.errstate(over="ignore"):  # of wider floats
        # Adding 0 turns -0 into 0.
        values = record.astype("<f8") + 0.0 if numbers else np.asarray(record, np.uint8)
    target = np.asarray(label)
    exact = target.astype("<f8") + 0.0 if target.dtype.kind == "f" else target.astype("<i8")
    return values.tobytes() + exact.tobytes()


def split(
    y: NDArray[Any],
    keys: Iterable[bytes],
    classes: Sequence[str] | None,
    declared: Declaration,
) -> NDArray[np.bool_]:
    """Return which records are held out, shape (records,).

    Args:
        y: targets, shape (records, ...).
        keys: one key per record that decides its side of the split: its name, its contents, or
            its unit.
        classes: class names; None if they are declared and need no record to train on.
        declared: the dataset, with its part to hold out and the seed of the split.

    Raises:
        InputError: all records of a class are held out, or no record is left on a side.
    """
    settings = declared.settings
    seed = settings.split_seed.to_bytes(8, "big")
    most = settings.test_fraction * 2**64
    # Adding or removing a record or unit must not change the split of the others.
    sides = list[bool]()
    for key in keys:
        word = hashlib.blake2b(key, digest_size=8, key=seed).digest()
        sides.append(int.from_bytes(word, "big") < most)
    held_out = np.array(sides)
    if held_out.all() or not held_out.any():
        raise InputError(
            f"{{test_fraction=}}{settings.test_fraction:g} of {counted(len(held_out), 'record')} "
            "leaves no training or no test records. Add records, or use another {test_fraction} or "
            "{split_seed}."
        )
    if classes is not None:
        tested = set(y[held_out].tolist())
        trained = set(y[~held_out].tolist())
        faults = []
        for label in sorted(tested - trained):
            faults.append(f"All records of the class {classes[label]} are held out")
        refuse(
            faults,
            " Use a smaller {test_fraction} or another {split_seed}, add records, or declare "
            "the classes with {classes}.",
        )
    return held_out


def copy_keys(
    contents: Iterable[bytes],
    forms: Iterable[bytes] | None = None,
) -> Iterator[bytes]:
    """Yield the key of each record that decides its side of a split, given its contents.

    It is of the contents alone for the first :data:`MOST_COPIES` equal records, and for others
    also of how many are before them. So adding or removing a record changes the side of no other,
    nor those of its copies. The number of a record in its file would.

    Args:
        contents: content of each record, in a form in which those that mean the same are equal.
        forms: content as it stands, if several forms mean the same: 1 and 1.0. Copies are counted
            among records of one form, so that a record moves no record of another form.

    Example:
        >>> [key[-1] for key in copy_keys([b"a", b"b", *[b"a"] * 4])]
        [0, 0, 0, 0, 0, 1]
    """
    seen: Counter[bytes] = Counter()
    contents = list(contents)
    if forms is None:
        forms = contents
    for content, form in zip(contents, forms, strict=True):
        seen[form] += 1
        copy = max(0, seen[form] - MOST_COPIES)
        yield content + copy.to_bytes(8, "big")


def copies_among(sides: Sequence[Sequence[Hashable]]) -> tuple[int, tuple[int, ...]]:
    """Return how many records equal others, and the numbers of test records that were trained on.

    Args:
        sides: contents of training and, if there are any, of test records.

    Example:
        >>> copies_among([["a", "b", "a"], ["c", "b"]])
        (2, (1,))
    """
    train = set(sides[0])
    different = train.union(*sides[1:])
    trained_on = list[int]()
    for side in sides[1:]:
        trained_on += [row for row, content in enumerate(side) if content in train]
    records = sum(map(len, sides))
    return records - len(different), tuple(trained_on)


def are_expected(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    widths: Sequence[int],
) -> bool:
    """Return whether a record equals another one by chance, as in a table of few columns.

    That is so if at least one is expected to do so where columns are independent: the others times
    the sum of squares of the shares of each value, of all columns multiplied.

    Args:
        x: numbers, shape (records, inputs).
        y: targets, shape (records, ...).
        widths: number of inputs of each column.
    """
    expected = float(len(x) - 1)
    targets = y.reshape(len(y), -1)
    ends = np.cumsum(widths)
    inputs = np.split(x, ends[:-1], axis=1)
    for column in (targets, *inputs):
        if expected < 1:
            return False
        _, counts = np.unique(column, axis=0, return_counts=True)
        shares = counts / len(x)
        expected *= float(np.square(shares).sum())
    return expected >= 1
