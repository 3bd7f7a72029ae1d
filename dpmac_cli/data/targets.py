"""Targets in arrays: numbers if ranges are declared for them, and otherwise classes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.complaints import NAMED
from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import check_classes, check_name
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.regression import Regression, SeveralNumbers
from dpmac_cli.tasks.task import Task

#: Arrays that declare numbers to predict.
DECLARED = ("target_low", "target_high", "target_transform", "target_name")
#: Array of class names.
CLASSES = "classes"
NO_LABEL = -1
Arrays = Mapping[str, NDArray[Any]]


def are_numbers(arrays: Arrays) -> bool:
    """Return whether the targets are declared as numbers to predict."""
    return any(name in arrays for name in DECLARED)


def number_of_targets(arrays: Arrays) -> int | None:
    """Return the number of targets; None for one number per record, not in a row."""
    sizes = [arrays[name].size for name in ("target_low", "target_high") if name in arrays]
    return most if (most := max(sizes, default=1)) > 1 else None


def targets_in(y: NDArray[Any], arrays: Arrays) -> NDArray[Any]:
    """Return numbers as float64, and labels as integers; unchanged if they are neither.

    A name of no class, or a number that is not whole, is :data:`NO_LABEL`.
    """
    if are_numbers(arrays):
        if number_of_targets(arrays) is None and y.ndim == 2 and y.shape[1] == 1:  # a column
            y = y[:, 0]
        return y.astype(np.float64) if y.dtype.kind in "biuf" else y
    if y.dtype.kind == "f":
        whole = (y == np.floor(y)) & (abs(y) < 2.0**63)
        return np.where(whole, y, NO_LABEL).astype(np.int64)
    if y.dtype.kind in "OU" and CLASSES in arrays and y.ndim == 1:
        places = {str(name): place for place, name in enumerate(arrays[CLASSES].ravel().tolist())}
        return np.array([places.get(str(label), NO_LABEL) for label in y.tolist()])
    return y


def faults_of_array(arrays: Arrays, side: str) -> Iterator[str]:
    """Yield faults of the type, shape and values of ``y{side}``."""
    y, count = arrays[f"y{side}"], number_of_targets(arrays)
    of = f"not {y.dtype} of shape {y.shape}"
    if are_numbers(arrays):
        if y.dtype.kind != "f" or y.shape[1:] != (() if count is None else (count,)):
            what = f"{count or 'one'} number{'s' * (count is not None)} per record"
            yield f"y{side} must have {what}, one for each range of target_low, {of}"
        elif not np.isfinite(y).all():
            yield f"y{side} has a target that is NaN or infinite"
    elif y.dtype.kind in "OU":
        names = sorted(set(map(str, y.ravel().tolist())))
        some = ",".join([*names[:NAMED], "..."] if len(names) > NAMED else names)
        yield f"y{side} contains names. Declare them as class names: --classes {some}"
    elif y.ndim != 1 or y.dtype.kind not in "iu":
        yield (
            f"y{side} must have one integer per record, such as y.ravel(), {of}. For numbers "
            "to predict, and for several labels as numbers from 0 to 1, declare target_low and "
            "target_high"
        )
    elif (most := len(arrays.get(CLASSES, ()))) and y.max(initial=0) >= most:
        why = f"there are {most} classes, 0 to {most - 1}"
        yield f"y{side} contains the label {y.max()} ({why})"
    if not are_numbers(arrays) and y.dtype.kind in "iu" and y.min(initial=0) < 0:
        yield (
            f"y{side} contains a label that is no whole number from 0, and no name of --classes "
            "(numbers to predict need a range: target_low and target_high)"
        )


def faults_together(arrays: Arrays) -> Iterator[str]:
    """Yield faults of all targets together, and of what is declared of them."""
    if are_numbers(arrays):
        yield from _faults_of_numbers(arrays)
    elif CLASSES not in arrays:
        labels, tested = (set(arrays.get(n, arrays["y"]).tolist()) for n in ("y", "y_test"))
        if missing := set(range(len(labels))) - labels:
            yield (
                f"y contains the label {max(labels)}, but no {min(missing)}. Number the classes 0, "
                "1, 2 and so on, or list all of them in an array classes, even those without a "
                "record"
            )
        elif tested - labels:
            yield f"y_test contains the label {min(tested - labels)}, which is not in y"


def _faults_of_numbers(arrays: Arrays) -> Iterator[str]:
    """Yield faults of what is declared of numbers to predict."""
    if CLASSES in arrays:
        yield (
            "classes and target_low contradict: the first is for classes, the second for "
            "numbers to predict. Leave one of them out"
        )
    ends = [arrays.get(name, np.array("")) for name in ("target_low", "target_high")]
    count = number_of_targets(arrays) or 1
    if any(end.ndim > 1 or not end.size or end.dtype.kind not in "fiu" for end in ends):
        yield (
            "target_low and target_high must be one number each, or one for each target: a public "
            "range. Base it on what they mean, not on these records, which are private"
        )
        return
    sizes = {name: arrays[name].size for name in DECLARED if name in arrays}
    if wrong := [f"{name} has {size}" for name, size in sizes.items() if size not in (1, count)]:
        yield f"{wrong[0]} values, but there are {count} targets, one for each number of target_low"
        return
    declared = _declared(arrays)
    if len({name for name, *_ in declared}) < len(declared):
        yield "target_name must give each target a name of its own"
    for name, *form in declared:
        yield from (f"{name}: {fault}" for fault in faults_of_range(*form))


def _declared(arrays: Arrays) -> list[tuple[str, float, float, Any]]:
    """Return name, ends of the range and transform of each target; one value is for all."""
    count = number_of_targets(arrays)
    names = ["y"] if count is None else [f"y{place}" for place in range(1, count + 1)]
    given = {"target_name": names, "target_transform": "none"} | {**arrays}
    order = ("target_name", "target_low", "target_high", "target_transform")
    each = (np.broadcast_to(np.ravel(given[name]), (count or 1,)).tolist() for name in order)
    return [
        (str(n), float(low), float(high), str(t)) for n, low, high, t in zip(*each, strict=True)
    ]


def task_in(arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
    """Return the task. Raises InputError if no network can be trained for it.

    ``found`` are names of classes, which are used if none are declared.
    """
    if not are_numbers(arrays):
        numbered = [*map(str, range(1 + int(arrays["y"].max())))]
        names = tuple(map(str, arrays.get(CLASSES, found or numbered)))
        check_classes(names, source)
        return Classification(names)
    declared = _declared(arrays)
    check_name(source.path.name, *(name for name, *_ in declared))
    parts = [Regression((name,), low, high, transform) for name, low, high, transform in declared]
    return SeveralNumbers.of(parts) if number_of_targets(arrays) else parts[0]
