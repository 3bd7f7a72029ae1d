"""Targets: numbers if a range is declared for them, and otherwise classes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import NAMED, check_name, refuse
from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.tasks.classification import Classification
from dpmac_cli.tasks.language_model import LanguageModel
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import TASKS, Task, is_labelled

#: Arrays that declare a number to predict.
DECLARED = ("target_low", "target_high", "target_transform", "target_name")
#: Array of class names.
CLASSES = "classes"
NO_LABEL = -1
Arrays = Mapping[str, NDArray[Any]]


def number_in(arrays: Arrays, dataset: Declaration) -> Regression | None:
    """Return the number to predict, as declared; None for classes. Raises InputError."""
    labelled = is_labelled(dataset.settings.task)
    if not labelled or not any(name in arrays for name in DECLARED):
        return None
    declared = _declared(arrays, dataset)
    check_name(declared.name)
    if dataset.settings.task is not None:
        raise InputError(
            f"{{task=}}{dataset.settings.task} is for classes, but {dataset.path} declares a range "
            "of numbers to predict. Leave out one of them."
        )
    return declared


def _declared(arrays: Arrays, dataset: Declaration) -> Regression:
    """Return the number to predict that arrays declare."""
    given = {"target_name": np.array("y"), "target_transform": np.array("none")}
    given |= {name: arrays[name] for name in DECLARED if name in arrays}
    ends = [given.get(name, np.array([])) for name in DECLARED[:2]]
    faults = list[str]()
    if CLASSES in arrays:
        faults.append(
            "classes and target_low contradict: the first is for classes, the second for "
            "numbers to predict. Leave one of them out"
        )
    single = all(of.size == 1 for of in (*given.values(), *ends))
    if not single or any(end.dtype.kind not in "fiu" for end in ends):
        faults.append(
            "target_low and target_high must be one number each: a public range. Base it on what "
            "the numbers to predict mean, not on these records, which are private"
        )
    else:
        name, low, high, transform = (given[of].item() for of in ("target_name", *DECLARED[:3]))
        target = Regression((str(name),), float(low), float(high), transform)
        faults += [f"{name}: {why}" for why in faults_of_range(target.low, target.high, transform)]
    raise_errors(f"{dataset.path}: {fault}." for fault in faults)
    return target


def without_targets(arrays: Arrays) -> dict[str, Any]:
    """Return arrays whose records have no target of their own: y is 0, and nothing is declared."""
    kept = {name: array for name, array in arrays.items() if name not in (*DECLARED, CLASSES)}
    sides = [side for side in ("", "_test") if f"x{side}" in arrays]
    return kept | {f"y{side}": np.zeros(len(arrays[f"x{side}"]), np.int64) for side in sides}


def targets_in(y: NDArray[Any], arrays: Arrays, *, numbers: bool) -> NDArray[Any]:
    """Return targets; unchanged if they are neither labels nor numbers.

    ``numbers`` become float64, shape (records, 1). Labels are integers, and :data:`NO_LABEL` for
    a name of no class and a number that is not whole.
    """
    if numbers:
        numeric = y.dtype.kind in "biuf" and y.ndim in (1, 2)
        return y.reshape(len(y), -1).astype(np.float64) if numeric else y
    if y.dtype.kind == "f":
        whole = (y == np.floor(y)) & (abs(y) < 2.0**63)
        return np.where(whole, y, NO_LABEL).astype(np.int64)
    if y.dtype.kind in "OU" and CLASSES in arrays and y.ndim == 1:
        places = {str(name): place for place, name in enumerate(arrays[CLASSES].ravel().tolist())}
        return np.array([_label_of(label, places) for label in y.tolist()], np.int64)
    return y


def _label_of(value: Any, places: Mapping[str, int]) -> int:
    """Return a label: a text is the name of a class, and a whole number is its place.

    It depends on the value alone. If names among other labels made those names, too, one record
    would change the classes of all.
    """
    if isinstance(value, str):
        return places.get(value, NO_LABEL)
    is_number = isinstance(value, int | float | np.integer | np.floating)
    return int(value) if is_number and abs(value) < 2**63 and value == int(value) else NO_LABEL


def faults_of_array(arrays: Arrays, side: str, *, numbers: bool) -> Iterator[str]:
    """Yield faults of the type, shape and values of ``y{side}``."""
    y, most = arrays[f"y{side}"], len(arrays.get(CLASSES, ()))
    of = f"not {y.dtype} of shape {y.shape}"
    if numbers:
        if y.dtype.kind != "f" or y.shape[1:] != (1,):
            yield f"y{side} must have one number per record, such as y[:, 0], {of}"
        elif not np.isfinite(y).all():
            yield f"y{side} has a target that is NaN or infinite"
    elif y.dtype.kind in "OU":
        names = sorted(set(map(str, y.ravel().tolist())))
        some = ",".join([*names[:NAMED], "..."] if len(names) > NAMED else names)
        yield f"y{side} contains names. Declare them as class names: {{classes=}}{some}"
    elif y.ndim != 1 or y.dtype.kind not in "iu":
        yield (
            f"y{side} must have one integer per record, such as y.ravel(), {of}. For several "
            "labels, train one model for each, such as y[:, 0]. For numbers to predict, declare "
            "target_low and target_high"
        )
    elif y.min(initial=0) < 0:
        yield (
            f"y{side} contains a label that is no whole number from 0, and no name of {{classes}} "
            "(numbers to predict need a range: target_low and target_high)"
        )
    elif most and y.max(initial=0) >= most:
        why = f"there are {most} classes, 0 to {most - 1}"
        yield f"y{side} contains the label {y.max()} ({why})"


def faults_together(arrays: Arrays) -> Iterator[str]:
    """Yield faults of all labels together, where no classes are declared."""
    labels, tested = (set(arrays.get(name, arrays["y"]).tolist()) for name in ("y", "y_test"))
    if missing := set(range(len(labels))) - labels:
        yield (
            f"y contains the label {max(labels)}, but no {min(missing)}. Number the classes 0, "
            "1, 2 and so on, or list all of them in an array classes, even those without a "
            "record"
        )
    elif tested - labels:
        yield f"y_test contains the label {min(tested - labels)}, which is not in y"


def task_in(
    arrays: Arrays, dataset: Declaration, number: Regression | None, found: Sequence[str]
) -> Task:
    """Return the task; names that were found are used if no classes are declared."""
    if not is_labelled(dataset.settings.task):
        return LanguageModel()
    if number is not None:
        return number
    numbered = [*map(str, range(1 + int(arrays["y"].max())))]
    names = tuple(map(str, arrays.get(CLASSES, found or numbered)))
    check_classes(names, dataset)
    asked = dataset.settings.task
    return Classification(names) if asked is None else TASKS[asked](names)


def check_classes(classes: Sequence[str], dataset: Declaration) -> None:
    """Reject classes that no classifier can be trained on."""
    if len(classes) < 2:
        raise InputError(
            f"{dataset.path} has only one class, {classes[0]}. A classifier needs at least two."
        )
    check_name(*classes)
    twice = [f"{n} classes {name}" for name, n in Counter(classes).items() if n > 1]
    refuse([f"{dataset.path} has {which}" for which in twice], " Class names must be unique.")
