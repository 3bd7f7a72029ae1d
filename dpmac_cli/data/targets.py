"""Targets in arrays: which task they are for, and which of them cannot be used."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.complaints import NAMED
from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import check_classes, check_name
from dpmac_cli.tasks.classification import Classification, SeveralLabels
from dpmac_cli.tasks.regression import Counts, Regression
from dpmac_cli.tasks.several_numbers import SeveralNumbers
from dpmac_cli.tasks.task import Task

#: Arrays that declare numbers to predict, and values of the last two, the default first.
DECLARED = ("target_low", "target_high", "target_kind", "target_transform", "target_name")
KINDS, TRANSFORMS = ("number", "count"), ("none", "log1p")
#: Said of a row of numbers where one is declared.
SEVERAL = " (for several, declare a range for each: target_low=[0, 0], target_high=[10, 500])"
#: Array of class names.
CLASSES = "classes"
Arrays = Mapping[str, NDArray[Any]]
RecordMask = NDArray[np.bool_]


class Targets(ABC):
    """Rules for the arrays y and y_test of one task, and for what is declared of them."""

    @abstractmethod
    def faults_of_array(self, arrays: Arrays, side: str) -> Iterator[str]:
        """Yield faults of the type and shape of ``y{side}`` itself."""

    @abstractmethod
    def bad_records(self, arrays: Arrays, side: str) -> Iterator[tuple[str, RecordMask]]:
        """Yield reasons why targets cannot be used, and a mask of the records, (records,)."""

    def faults_together(self, arrays: Arrays) -> Iterator[str]:
        """Yield faults of all targets together."""
        yield from ()

    @abstractmethod
    def task(self, arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
        """Return the task. Raises InputError if no network can be trained for it.

        ``found`` are names of classes, which are used if none are declared.
        """

    def inferred(self, arrays: Arrays) -> tuple[str, ...]:
        """Return what of the task was read from the records."""
        return ()


class ClassTargets(Targets):
    """Integers from 0, one per record; names of classes are declared, or are these numbers."""

    def faults_of_array(self, arrays: Arrays, side: str) -> Iterator[str]:
        """Yield faults of an array of classes."""
        y = arrays[f"y{side}"]
        if y.ndim == 1 and y.dtype.kind == "U":
            names = sorted(set(y.tolist()))
            some = ",".join([*names[:NAMED], "..."] if len(names) > NAMED else names)
            yield f"y{side} contains names. Declare them as class names: --classes {some}"
        elif y.ndim != 1 or y.dtype.kind not in "iu":
            yield _neither(y, side)

    def bad_records(self, arrays: Arrays, side: str) -> Iterator[tuple[str, RecordMask]]:
        """Yield records whose class is not declared."""
        y = arrays[f"y{side}"]
        why = "labels start at 0, and class names must be listed in --classes"
        yield f"y{side} contains the label {y.min(initial=0)} ({why})", y < 0
        if CLASSES in arrays:
            classes = len(arrays[CLASSES])
            why = f"there are {classes} classes, 0 to {classes - 1}"
            yield f"y{side} contains the label {y.max(initial=0)} ({why})", y >= classes

    def faults_together(self, arrays: Arrays) -> Iterator[str]:
        """Yield faults of labels whose classes are not declared."""
        if CLASSES in arrays:
            return
        labels = set(arrays["y"].tolist())
        if missing := set(range(len(labels))) - labels:
            yield (
                f"y contains the label {max(labels)}, but no {min(missing)}. Number the classes 0, "
                "1, 2 and so on, or list all of them in an array classes, even those without a "
                "record"
            )
        elif only := set(arrays.get("y_test", arrays["y"]).tolist()) - labels:
            yield f"y_test contains the label {min(only)}, which is not in y"

    def task(self, arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
        """Return classification."""
        names = found or range(1 + int(arrays["y"].max()))
        return Classification(_names(arrays, names, source))

    def inferred(self, arrays: Arrays) -> tuple[str, ...]:
        """Return that the classes were read from the records if they are not declared."""
        return () if CLASSES in arrays else ("classes",)


class LabelTargets(Targets):
    """Rows of 0 and 1, one column per label."""

    def faults_of_array(self, arrays: Arrays, side: str) -> Iterator[str]:
        """Yield faults of an array of labels."""
        y = arrays[f"y{side}"]
        if y.ndim != 2 or y.dtype.kind not in "biu":
            yield _neither(y, side)
        elif y.shape[1] == 1:
            yield (
                f"y{side} has one column, shape {y.shape}: give one class per record, shape "
                f"({len(y)},), such as y.ravel(), or 0 or 1 for each of several labels"
            )

    def bad_records(self, arrays: Arrays, side: str) -> Iterator[tuple[str, RecordMask]]:
        """Yield records with labels other than 0 and 1."""
        y = arrays[f"y{side}"]
        bad = ((y != 0) & (y != 1)).any(1)
        yield f"y{side} contains labels that are neither 0 nor 1", bad

    def faults_together(self, arrays: Arrays) -> Iterator[str]:
        """Yield a fault of the number of names."""
        labels, classes = arrays["y"].shape[1], arrays.get(CLASSES)
        if classes is not None and len(classes) != labels:
            yield f"y has {labels} labels per record, but classes has {len(classes)} names"

    def task(self, arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
        """Return the task of several labels per record."""
        return SeveralLabels(_names(arrays, range(arrays["y"].shape[1]), source))


class NumberTargets(Targets):
    """Numbers with declared ranges: one per record, or a row of them.

    Each end of the range is a number, or an array with one for each target.
    """

    def faults_of_array(self, arrays: Arrays, side: str) -> Iterator[str]:
        """Yield faults of an array of numbers."""
        y, targets = arrays[f"y{side}"], number_of_targets(arrays)
        form, what = ((), "one number") if targets is None else ((targets,), f"{targets} numbers")
        if y.shape[1:] != form or not y.ndim or y.dtype.kind != "f":
            several = " (one for each of target_low)" if targets else SEVERAL * (y.ndim == 2)
            yield (
                f"y{side} must have {what} per record{several}, not {y.dtype} of shape {y.shape}"
            )

    def bad_records(self, arrays: Arrays, side: str) -> Iterator[tuple[str, RecordMask]]:
        """Yield nothing: a number that cannot be read has been found before."""
        yield from ()

    def faults_together(self, arrays: Arrays) -> Iterator[str]:
        """Yield faults of what is declared."""
        if CLASSES in arrays:
            yield (
                "classes and target_low contradict: the first is for classes, the second for "
                "numbers to predict. Leave one of them out"
            )
        missing = [name for name in ("target_low", "target_high") if name not in arrays]
        if missing:
            yield (
                f"{missing[0]} is missing: numbers to predict need a public range, target_low and "
                "target_high. Base it on what they mean, not on these records, which are private"
            )
            return
        ends = [arrays[name] for name in ("target_low", "target_high")]
        if any(end.ndim > 1 or not end.size or end.dtype.kind not in "fiu" for end in ends):
            yield "target_low and target_high must be one number each, or one for each target"
            return
        yield from _faults_of_each(arrays, number_of_targets(arrays))

    def task(self, arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
        """Return regression, with one or several targets, or the task of counts."""
        declared = _declared(arrays)
        check_name(source.path.name, *(target.name for target in declared))
        if number_of_targets(arrays) is None:
            return _of_one(declared[0])
        return SeveralNumbers.of([_regression(target) for target in declared])


class Declaration(NamedTuple):
    """Declaration of a target: its name, range, kind and transform."""

    name: str
    low: float
    high: float
    kind: str
    transform: Any


def number_of_targets(arrays: Arrays) -> int | None:
    """Return the number of targets; None for one number per record, not in a row."""
    sizes = [arrays[name].size for name in ("target_low", "target_high") if name in arrays]
    return most if (most := max(sizes, default=1)) > 1 else None


def _faults_of_each(arrays: Arrays, targets: int | None) -> Iterator[str]:
    """Yield faults of what is declared of each target; ``targets`` is None for a single one."""
    count = targets or 1
    for name in DECLARED:
        if name in arrays and (size := arrays[name].size) not in (1, count):
            yield (
                f"{name} has {size} values, but there are {count} targets, one for each number of "
                "target_low"
            )
            return
    declared = _declared(arrays)
    if len({target.name for target in declared}) < count:
        yield "target_name must give each target a name of its own"
    for target in declared:
        of = f"{target.name}: " * (targets is not None)
        faults = faults_of_range(target.low, target.high, target.transform, target.kind)
        yield from (f"{of}{fault}" for fault in faults)
        if targets is not None and target.kind == "count":
            yield f"{of}several targets must be numbers, not counts: leave out target_kind"


def _declared(arrays: Arrays) -> list[Declaration]:
    """Return what is declared of each target; one value is for all of them."""
    count = number_of_targets(arrays)
    names = ["y"] if count is None else [f"y{place}" for place in range(1, count + 1)]
    defaults = {"target_name": names, "target_kind": KINDS[0], "target_transform": TRANSFORMS[0]}
    given = {**{name: np.array(value) for name, value in defaults.items()}, **arrays}
    order = ("target_name", "target_low", "target_high", "target_kind", "target_transform")
    each = (np.broadcast_to(given[name].ravel(), (count or 1,)).tolist() for name in order)
    return [
        Declaration(str(name), float(low), float(high), str(kind), str(transform))
        for name, low, high, kind, transform in zip(*each, strict=True)
    ]


def _of_one(target: Declaration) -> Task:
    if target.kind == "count":
        return Counts((target.name,), target.low, target.high)
    return _regression(target)


def _regression(target: Declaration) -> Regression:
    return Regression((target.name,), target.low, target.high, target.transform)


def are_numbers(arrays: Arrays) -> bool:
    """Return whether the targets are declared as numbers to predict."""
    return any(name in arrays for name in DECLARED)


def targets_in(arrays: Arrays, side: str = "") -> Targets:
    """Return the rules that fit the array ``y{side}``: of numbers if declared, or by its shape."""
    if are_numbers(arrays):
        return NumberTargets()
    return LabelTargets() if arrays[f"y{side}"].ndim == 2 else ClassTargets()


def _neither(y: NDArray[Any], side: str) -> str:
    return (
        f"y{side} must have one integer per record, or for several labels one row of 0 and 1 "
        f"per record, not {y.dtype} of shape {y.shape}"
    )


def _names(arrays: Arrays, found: Iterable[object], source: Source) -> tuple[str, ...]:
    names = tuple(map(str, arrays.get(CLASSES, found)))
    check_classes(names, source)
    return names
