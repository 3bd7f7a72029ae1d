"""Targets in arrays: which task they are for, and which of them cannot be used."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.complaints import NAMED
from dpmac_cli.data.schema import Source
from dpmac_cli.data.splits import check_classes, check_name
from dpmac_cli.tasks.classification import Classification, SeveralLabels
from dpmac_cli.tasks.regression import Counts, Regression
from dpmac_cli.tasks.task import Task

#: Arrays that declare numbers to predict, and values of the last two, the default first.
DECLARED = ("target_low", "target_high", "target_kind", "target_transform", "target_name")
KINDS, TRANSFORMS = ("number", "count"), ("none", "log1p")
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
    """Numbers, one per record, with a declared range."""

    def faults_of_array(self, arrays: Arrays, side: str) -> Iterator[str]:
        """Yield faults of an array of numbers."""
        y = arrays[f"y{side}"]
        if y.ndim != 1 or y.dtype.kind != "f":
            yield f"y{side} must have one number per record, not {y.dtype} of shape {y.shape}"

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
        if any(end.shape != () or end.dtype.kind not in "fiu" for end in ends):
            yield "target_low and target_high must be one number each"
            return
        kind, transform = (
            str(arrays.get(name, known[0]))
            for name, known in (("target_kind", KINDS), ("target_transform", TRANSFORMS))
        )
        yield from faults_of_range(float(ends[0]), float(ends[1]), transform, kind)

    def task(self, arrays: Arrays, source: Source, found: Sequence[str] = ()) -> Task:
        """Return regression, or the task of counts."""
        check_name(source.path.name)
        name = str(arrays.get("target_name", "y"))
        low, high = (float(arrays[end]) for end in ("target_low", "target_high"))
        if str(arrays.get("target_kind", KINDS[0])) == "count":
            return Counts((name,), low, high)
        transform: Any = str(arrays.get("target_transform", TRANSFORMS[0]))
        return Regression((name,), low, high, transform)


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
