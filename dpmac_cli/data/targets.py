"""Targets in arrays: which task they are for, and which of them cannot be used.

They are numbers if ranges are declared for them, labels if records have a row of them, and
otherwise classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.complaints import NAMED
from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import check_classes, check_name
from dpmac_cli.tasks.classification import Classification, SeveralLabels
from dpmac_cli.tasks.regression import Counts, Regression, SeveralNumbers
from dpmac_cli.tasks.task import Task

#: Arrays that declare numbers to predict.
DECLARED = ("target_low", "target_high", "target_kind", "target_transform", "target_name")
#: Array of class names.
CLASSES = "classes"
Arrays = Mapping[str, NDArray[Any]]
RecordMask = NDArray[np.bool_]


def are_numbers(arrays: Arrays) -> bool:
    """Return whether the targets are declared as numbers to predict."""
    return any(name in arrays for name in DECLARED)


def number_of_targets(arrays: Arrays) -> int | None:
    """Return the number of targets; None for one number per record, not in a row."""
    sizes = [arrays[name].size for name in ("target_low", "target_high") if name in arrays]
    return most if (most := max(sizes, default=1)) > 1 else None


def faults_of_array(arrays: Arrays, side: str) -> Iterator[str]:
    """Yield faults of the type and shape of ``y{side}`` itself."""
    y = arrays[f"y{side}"]
    if are_numbers(arrays):
        targets = number_of_targets(arrays)
        form, what = ((), "one number") if targets is None else ((targets,), f"{targets} numbers")
        if y.shape[1:] != form or not y.ndim or y.dtype.kind != "f":
            several = "" if targets is None else " (one for each of target_low)"
            if targets is None and y.ndim == 2:
                several = (
                    " (for several, declare a range for each: target_low=[0, 0], "
                    "target_high=[10, 500])"
                )
            yield (
                f"y{side} must have {what} per record{several}, not {y.dtype} of shape {y.shape}"
            )
    elif y.ndim == 1 and y.dtype.kind == "U":
        names = sorted(set(y.tolist()))
        some = ",".join([*names[:NAMED], "..."] if len(names) > NAMED else names)
        yield f"y{side} contains names. Declare them as class names: --classes {some}"
    elif y.ndim not in (1, 2) or y.dtype.kind not in ("iu" if y.ndim == 1 else "biu"):
        yield (
            f"y{side} must have one integer per record, or for several labels one row of 0 and 1 "
            f"per record, not {y.dtype} of shape {y.shape}"
        )
    elif y.shape[1:] == (1,):
        yield (
            f"y{side} has one column, shape {y.shape}: give one class per record, shape "
            f"({len(y)},), such as y.ravel(), or 0 or 1 for each of several labels"
        )


def bad_targets(arrays: Arrays, side: str) -> Iterator[tuple[str, RecordMask]]:
    """Yield reasons why classes or labels cannot be used, and a mask of the records, (records,)."""
    y = arrays[f"y{side}"]
    if are_numbers(arrays):
        return
    if y.ndim == 2:
        bad = ((y != 0) & (y != 1)).any(1)
        yield f"y{side} contains labels that are neither 0 nor 1", bad
        return
    why = "labels start at 0, and class names must be listed in --classes"
    yield f"y{side} contains the label {y.min(initial=0)} ({why})", y < 0
    if CLASSES in arrays:
        classes = len(arrays[CLASSES])
        why = f"there are {classes} classes, 0 to {classes - 1}"
        yield f"y{side} contains the label {y.max(initial=0)} ({why})", y >= classes


def faults_together(arrays: Arrays) -> Iterator[str]:
    """Yield faults of all targets together, and of what is declared of them."""
    y, classes = arrays["y"], arrays.get(CLASSES)
    if are_numbers(arrays):
        yield from _faults_of_numbers(arrays)
    elif y.ndim == 2:
        if classes is not None and len(classes) != y.shape[1]:
            yield f"y has {y.shape[1]} labels per record, but classes has {len(classes)} names"
    elif classes is None:
        labels = set(y.tolist())
        if missing := set(range(len(labels))) - labels:
            yield (
                f"y contains the label {max(labels)}, but no {min(missing)}. Number the classes 0, "
                "1, 2 and so on, or list all of them in an array classes, even those without a "
                "record"
            )
        elif only := set(arrays.get("y_test", y).tolist()) - labels:
            yield f"y_test contains the label {min(only)}, which is not in y"


def _faults_of_numbers(arrays: Arrays) -> Iterator[str]:
    """Yield faults of what is declared of numbers to predict."""
    if CLASSES in arrays:
        yield (
            "classes and target_low contradict: the first is for classes, the second for "
            "numbers to predict. Leave one of them out"
        )
    ends = [arrays.get(name) for name in ("target_low", "target_high")]
    if any(end is None for end in ends):
        yield (
            f"{DECLARED[ends[0] is not None]} is missing: numbers to predict need a public range, "
            "target_low and target_high. Base it on what they mean, not on these records, which "
            "are private"
        )
        return
    if any(e.ndim > 1 or not e.size or e.dtype.kind not in "fiu" for e in ends if e is not None):
        yield "target_low and target_high must be one number each, or one for each target"
        return
    targets = number_of_targets(arrays)
    for name in DECLARED:
        if name in arrays and (size := arrays[name].size) not in (1, targets or 1):
            yield (
                f"{name} has {size} values, but there are {targets or 1} targets, one for each "
                "number of target_low"
            )
            return
    declared = _declared(arrays)
    if len({name for name, *_ in declared}) < len(declared):
        yield "target_name must give each target a name of its own"
    for name, low, high, kind, transform in declared:
        of = f"{name}: " * (targets is not None)
        yield from (f"{of}{fault}" for fault in faults_of_range(low, high, transform, kind))
        if targets is not None and kind == "count":
            yield f"{of}several targets must be numbers, not counts: leave out target_kind"


def _declared(arrays: Arrays) -> list[tuple[str, float, float, str, Any]]:
    """Return name, ends of the range, kind and transform of each target; one value is for all."""
    count = number_of_targets(arrays)
    names = ["y"] if count is None else [f"y{place}" for place in range(1, count + 1)]
    given = {"target_name": names, "target_kind": "number", "target_transform": "none"} | {**arrays}
    order = ("target_name", "target_low", "target_high", "target_kind", "target_transform")
    each = (np.broadcast_to(np.ravel(given[name]), (count or 1,)).tolist() for name in order)
    return [
        (str(name), float(low), float(high), str(kind), str(transform))
        for name, low, high, kind, transform in zip(*each, strict=True)
    ]


def task_in(arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
    """Return the task. Raises InputError if no network can be trained for it.

    ``found`` are names of classes, which are used if none are declared.
    """
    y = arrays["y"]
    if not are_numbers(arrays):
        numbered: Iterable[object] = range(y.shape[1] if y.ndim == 2 else 1 + int(y.max()))
        names = tuple(map(str, arrays.get(CLASSES, found or numbered)))
        check_classes(names, source)
        return SeveralLabels(names) if y.ndim == 2 else Classification(names)
    declared = _declared(arrays)
    check_name(source.path.name, *(name for name, *_ in declared))
    parts = [
        Counts((name,), low, high) if kind == "count" else Regression((name,), low, high, transform)
        for name, low, high, kind, transform in declared
    ]
    return SeveralNumbers.of(parts) if number_of_targets(arrays) else parts[0]
