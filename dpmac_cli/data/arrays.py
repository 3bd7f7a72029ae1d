"""From the arrays that a reader returns to a dataset: checks, split, inputs, facts and notes.

What is public of a dataset, such as its classes and ranges, comes from declarations. What one
record may change is in private notes, or is named as read from the records. Sizes count units of
privacy.

The same steps serve every reader, those of programs included, so a reader cannot skip a check.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpmac_cli.config.facts import (
    STANDARDS,
    DataFacts,
    LeftOut,
    PrivateNotes,
    check_name,
    dataset_of,
)
from dpmac_cli.config.records import Images, Numbers
from dpmac_cli.data.array_faults import check_arrays, without_tested_units
from dpmac_cli.data.crafted import crafted_records
from dpmac_cli.data.dataset import Crafted, Dataset, Declaration, Split
from dpmac_cli.data.held_out import are_expected, copies_among, train_and_test
from dpmac_cli.data.layout import by_column, channels_first, column_ranges, inputs_of, is_numbers
from dpmac_cli.data.ranges import remarks_on_ranges
from dpmac_cli.data.reader import ArrayDict, Reading, code_of_program
from dpmac_cli.data.targets import CLASSES, number_in, task_in, without_targets
from dpmac_cli.errors import InputError, escaped
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task, is_labelled


def dataset_of_arrays(declared: Declaration, reading: Reading) -> Dataset:
    """Return the dataset of the arrays that a reader returned.

    Records are checked before any is used, and all faults are reported together. Targets are
    encoded by the task, inputs are clipped to public ranges, and crafted records of an audit are
    treated as all others.

    Args:
        declared: the dataset as settings and its schema declare it.
        reading: its records. Its arrays are not changed.

    Returns:
        Training and test records as a network takes them, with public facts and private notes.
        There
        are no test records if none are held out.

    Raises:
        InputError: for every fault of the arrays; or a unit has training and test records.
    """
    check_name(declared.path.name)
    arrays = _with_declared(declared, reading.arrays)
    reading = replace(reading, arrays=arrays)
    number = number_in(arrays, declared)
    check_arrays(arrays, declared, numbers=number is not None)
    left_out = reading.left_out + without_tested_units(arrays, declared)
    task = task_in(arrays, declared, number, reading.classes)
    # Classes that are not declared were read from the records.
    named = CLASSES in arrays or not isinstance(task, Classification)
    crafted = _crafted(declared, reading, task)
    sides, contents = train_and_test(arrays, None if named else task.names, declared, crafted)
    facts = _facts_of(declared, reading, task, sides, crafted)
    if not named:
        facts = replace(facts, inferred=(*facts.inferred, "classes"))
    with code_of_program(f"The task '{task.kind}'", declared):
        targets = [task.encoded(side.y) for side in sides]
        untested = task.untested(sides[1].y) if len(sides) > 1 else ()
    copies, tested = copies_among(contents)
    names = tuple(map(escaped, left_out.records))
    reasons = tuple(map(escaped, left_out.reasons))
    notes = PrivateNotes(
        LeftOut(names, reasons),
        untested=untested,
        copies=0 if facts.unit else copies,
        tested=tested,
        remarks=_remarks(declared, reading, number),
        expected=copies > 0 and _are_copies_expected(declared, reading),
    )
    splits = []
    for side, y in zip(sides, targets, strict=True):
        splits.append(side._replace(x=inputs_of(side.x, facts.records), y=y))
    train, *tests = splits
    if crafted is not None:
        records = crafted.records
        x, y = inputs_of(records.x, facts.records), task.encoded(records.y)
        crafted = replace(crafted, records=records._replace(x=x, y=y))
    return Dataset(train, tests[0] if tests else None, facts, notes, crafted=crafted)


def _crafted(declared: Declaration, reading: Reading, task: Task) -> Crafted[Split] | None:
    """Return the records that an audit makes up, as a reader returns them; None without an audit.

    Args:
        declared: the dataset, with the number of these records and the seed.
        reading: records of the dataset, of which kind and shapes alone are used.
        task: what is predicted.
    """
    settings = declared.settings
    if settings.canaries is None:
        return None
    records = _records_of(declared, reading)
    like = Split(reading.arrays["x"], reading.arrays["y"])
    return crafted_records(records, task, settings.canaries, like, settings.seed)


def _with_declared(declared: Declaration, arrays: ArrayDict) -> ArrayDict:
    """Return a copy of arrays, with what settings declare of them: classes and a range."""
    arrays = dict(arrays)
    if not is_labelled(declared.settings.task):
        arrays = without_targets(arrays)
    if declared.classes is not None:
        arrays[CLASSES] = np.array(declared.classes)
    if declared.ends is not None:
        low, high = declared.ends
        arrays["low"] = np.array(low)
        arrays["high"] = np.array(high)
    return arrays


def _facts_of(
    declared: Declaration,
    reading: Reading,
    task: Task,
    sides: Sequence[Split],
    crafted: Crafted[Split] | None,
) -> DataFacts:
    """Return the public facts of a dataset, but for classes that were inferred.

    Args:
        declared: the dataset.
        reading: its records, checked.
        task: what is predicted.
        sides: training and, if there are any, test records, with crafted ones.
        crafted: records of an audit. They are not counted: whoever reads the facts must not learn
            how many are in.

    Raises:
        InputError: settings do not fit the kind of the records.
    """
    settings, arrays = declared.settings, reading.arrays
    train, *tests = sides
    train_size = train.size
    if crafted is not None:
        train_size -= int(crafted.coins.sum())
    test_size = tests[0].size if tests else 0
    records = _records_of(declared, reading)
    known = dataset_of((train_size, test_size), records, task)
    inferred = list[str]()
    if reading.converted and settings.channels is None:
        inferred.append("channels")
    if reading.converted and settings.image_size is None:
        inferred.append("image size")
    if declared.in_memory is not None:
        inferred += declared.in_memory.inferred
    if declared.schema is not None:
        inferred += declared.schema.inferred
    return DataFacts(
        **vars(known),
        name=declared.path.resolve().stem.strip("<>"),
        typed=str(declared.path),
        user_supplied=True,
        schema=declared.schema,
        held_out=bool(tests) and "x_test" not in arrays,
        unit=settings.unit or "unit" if "unit" in arrays else "",
        inferred=tuple(dict.fromkeys(inferred)),
    )


def _records_of(declared: Declaration, reading: Reading) -> Images | Numbers:
    """Return what the records are: their kind, shape, and public constants.

    Args:
        declared: the dataset.
        reading: its records, checked.

    Raises:
        InputError: settings are for another kind of records.
    """
    settings, arrays = declared.settings, reading.arrays
    x = arrays["x"]
    if not reading.converted:
        sizes = {"{channels}": settings.channels, "{image_size}": settings.image_size}
        for setting, size in sizes.items():
            if size is not None:
                raise InputError(f"{setting} is for folders of images: arrays are not converted.")
    shape = channels_first(x[:1]).shape[1:]
    if is_numbers(x):
        ends = column_ranges(x, arrays["low"], arrays["high"])
        low, high = ends.tolist()
        kind = reading.numbers or Numbers
        return kind(shape=shape, low=tuple(low), high=tuple(high))
    channels, height, width = shape
    mean, std = _constants(declared, channels)
    return Images(shape=(channels, height, width), mean=mean, std=std)


def _constants(
    declared: Declaration,
    channels: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the chosen mean and standard deviation of each channel of images.

    Args:
        declared: the dataset, whose settings name public constants.
        channels: number of channels.

    Raises:
        InputError: the constants are for another number of channels.
    """
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


def _remarks(declared: Declaration, reading: Reading, number: Regression | None) -> tuple[str, ...]:
    """Return private remarks on records: those of their reader, and on ranges of numbers.

    Args:
        declared: the dataset.
        reading: its records, checked.
        number: the number to predict; None for classes.
    """
    x = reading.arrays["x"]
    if not is_numbers(x):
        return reading.remarks
    on_ranges = remarks_on_ranges(by_column(x), reading.arrays, declared, number)
    return (*reading.remarks, *on_ranges)


def _are_copies_expected(declared: Declaration, reading: Reading) -> bool:
    """Return whether equal records are a matter of course; of images they never are.

    See :func:`~dpmac_cli.data.held_out.are_expected`.
    """
    arrays = reading.arrays
    if not is_numbers(arrays["x"]):
        return False
    x = arrays["x"].reshape(len(arrays["x"]), -1)
    widths = [1] * x.shape[1]
    if declared.schema is not None:
        widths = [column.inputs for column in declared.schema.columns]
    return are_expected(x, arrays["y"], widths)
