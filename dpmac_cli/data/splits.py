"""Splits and facts of user-supplied datasets."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.complaints import escaped, refuse
from dpmac_cli.data.registry import EPOCHS, STEPS_PER_EPOCH, Dataset, Defaults
from dpmac_cli.data.schema import NONE_LEFT_OUT, STANDARDS, DataFacts, LeftOut, Source
from dpmac_cli.errors import InputError, counted
from dpmac_cli.tasks.task import Task

#: Smallest height and width that the convolutional network can halve twice.
LEAST_CNN = 8
#: Height and width from which fewer images are processed at a time, to save memory.
LARGE = 128


class Records(NamedTuple):
    """Records, their labels, and their units; None if each is a unit."""

    x: Any  # an array, or Rows of a file
    y: NDArray[Any]  # targets
    units: NDArray[Any] | None = None

    def at(self, rows: NDArray[Any]) -> "Records":
        """Return some records of an array, by their numbers or a mask."""
        return Records(self.x[rows], self.y[rows], None if self.units is None else self.units[rows])


def check_classes(classes: Sequence[str], source: Source) -> None:
    """Reject classes that no classifier can be trained on."""
    if len(classes) < 2:
        raise InputError(
            f"{source.path} has only one class, {classes[0]}. A classifier needs at least two."
        )
    check_name(source.path.name, *classes)
    twice = [f"{n} classes {name}" for name, n in Counter(classes).items() if n > 1]
    refuse([f"{source.path} has {which}" for which in twice], " Class names must be unique.")


def check_name(*names: str) -> None:
    """Reject names with characters that a terminal may take for commands."""
    unclear = [name for name in names if not name.isprintable()]
    refuse(
        [f"The name {name!a} contains characters that cannot be displayed" for name in unclear],
        " A terminal may interpret them as commands. Choose another name.",
    )


def split(
    records: Records, keys: Iterable[bytes], classes: Sequence[str] | None, source: Source
) -> list[Records]:
    """Return the records to train on and those held out, each in order.

    Args:
        keys: one key per record that decides its side of the split: its name, its contents, or
            its unit.
        classes: class names; None if they are declared and need no record to train on.
    """
    seed, most = source.split_seed.to_bytes(8, "big"), source.test_fraction * 2**64
    # Adding or removing a record or unit must not change the split of the others.
    words = (hashlib.blake2b(key, digest_size=8, key=seed).digest() for key in keys)
    held_out = np.array([int.from_bytes(word, "big") < most for word in words])
    train, test = records.at(~held_out), records.at(held_out)
    if not (len(train.y) and len(test.y)):
        raise InputError(
            f"--test-fraction {source.test_fraction:g} of {counted(len(held_out), 'record')} "
            "leaves no training or no test records. Add records, or use another --test-fraction or "
            "--split-seed."
        )
    if classes is not None:
        only = sorted(set(test.y.tolist()) - set(train.y.tolist()))
        refuse(
            [f"All records of the class {classes[label]} are held out" for label in only],
            " Use a smaller --test-fraction or another --split-seed, add records, or declare "
            "the classes with --classes.",
        )
    return [train, test]


def copies_among(sides: Sequence[Sequence[Hashable]]) -> tuple[int, tuple[int, ...]]:
    """Return how many records equal others, and the numbers of test records that were trained on.

    Args:
        sides: contents of training and test records.
    """
    train, test = map(set, sides)
    both = tuple(row for row, record in enumerate(sides[1]) if record in train)
    return sum(map(len, sides)) - len(train | test), both


def data_facts(
    source: Source,
    sides: Sequence[Records],
    shape: tuple[int, int, int],
    task: Task,
    ends: NDArray[np.float64] | None = None,
    left_out: LeftOut = NONE_LEFT_OUT,
    own: tuple[int, ...] = (),
    **rest: Any,
) -> DataFacts:
    """Return facts like those of the registry, with conservative defaults.

    Args:
        sides: training and test records. shape, task: shape and task of all of them.
        ends: limits of the range of numbers, shape (2, columns); None for images.
        left_out: records that are left out.
        own: shape of numbers in their array; () for images.
        rest: see :class:`DataFacts`.

    Raises:
        InputError: a unit has records of both kinds, or the chosen constants do not fit the number
            of channels.
    """
    owners = [set(units.tolist()) for _, _, units in sides if units is not None]
    if len(owners) == 2 and (both := set.intersection(*owners)):
        raise InputError(
            f"{source.path}: {counted(len(both), 'unit')}, such as {min(both)}, "
            f"{'has' if len(both) == 1 else 'have'} training and test records: use different units "
            "for testing."
        )
    train, test = (len(y if units is None else np.unique(units)) for _, y, units in sides)
    constants = _constants(source, shape[0]) if ends is None else _middle_and_half(ends)
    facts = Dataset(
        *(train, test, shape, task, *constants, _defaults(train, shape), "your own"),
        levels=255 if ends is None else 1,
        texts=source.layout,
        own=own,
    )
    untested = task.untested(sides[1].y)
    unit = "" if sides[0].units is None else source.unit or "unit"
    name = source.path.resolve().stem.strip("<>")
    skipped, why = (tuple(map(escaped, some)) for some in (left_out.records, left_out.reasons))
    return DataFacts(facts, name, unit=unit, untested=untested, skipped=skipped, why=why, **rest)


def _defaults(train: int, shape: tuple[int, int, int]) -> Defaults:
    """Return the default settings for ``train`` units with records of a shape."""
    batch = -(-train // STEPS_PER_EPOCH)
    if min(shape[1:]) < LEAST_CNN:
        return Defaults("mlp", batch, epochs=EPOCHS, h1=1e-9, h2=1e-6)
    physical = max(1, min(32, 32 * LARGE**2 // (shape[1] * shape[2])))
    return Defaults("cnn", batch, epochs=EPOCHS, physical_batch=physical)


def _middle_and_half(ends: NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the constants that scale numbers of a range to [-1, 1], one per column."""
    low, high = ends
    return tuple(((low + high) / 2).tolist()), tuple(((high - low) / 2).tolist())


def _constants(source: Source, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the chosen mean and standard deviation per channel. Raises InputError."""
    mean, std = STANDARDS[source.standardise]
    if len(mean) == 1:
        return mean * channels, std * channels
    if len(mean) != channels:
        raise InputError(
            f"--standardise {source.standardise} is for {len(mean)} channels, but the images of "
            f"{source.path} have {channels}. Use --standardise half."
        )
    return mean, std
