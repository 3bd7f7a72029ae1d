"""Targets: numbers if a range is declared for them, and otherwise classes.

A target is converted by itself and by what is declared, so no record changes the class or the
number of another one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import NAMED, check_name, refuse
from dpmac_cli.data.column_schema import faults_of_range
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.layout import SIDES
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
    """Return the number to predict, as arrays declare it; None for classes.

    Args:
        arrays: arrays of a reader, with one of :data:`DECLARED` for a number.
        dataset: the dataset, with the task of its settings.

    Raises:
        InputError: the declaration is invalid, or contradicts the task.
    """
    labelled = is_labelled(dataset.settings.task)
    if not labelled or arrays.keys().isdisjoint(DECLARED):
        return None
    task = dataset.settings.task
    kind = _kind_of_numbers(task)
    number = _declared(arrays, dataset, kind or Regression)
    check_name(number.name)
    if kind is None:
        raise InputError(
            f"{{task=}}{task} is for classes, but {dataset.path} declares a range of numbers to "
            "predict. Leave out one of them."
        )
    if task is not None and number.open:
        raise InputError(
            f"{{task=}}{task} needs a public range of {number.name}, but {dataset.path} declares "
            "only that it is a number. Declare the range in its schema, such as range: [0, 100]."
        )
    return number


def _kind_of_numbers(task: str | None) -> type[Regression] | None:
    """Return the class of a task that predicts numbers, by default Regression; None for others."""
    kind = Regression if task is None else TASKS[task]
    return kind if issubclass(kind, Regression) else None


def _declared(arrays: Arrays, dataset: Declaration, kind: type[Regression]) -> Regression:
    """Return the number to predict that arrays declare, by default y without a transform.

    Args:
        arrays: arrays of a reader. Those that declare a number have one value each.
        dataset: the dataset, for messages.
        kind: class of the number.

    Raises:
        InputError: with every fault of the declaration.
    """
    values = {"target_name": np.array("y"), "target_transform": np.array("none")}
    for name in DECLARED:
        if name in arrays:
            values[name] = arrays[name]
    none = np.array([])
    ends = [values.get("target_low", none), values.get("target_high", none)]
    faults = list[str]()
    if CLASSES in arrays:
        faults.append(
            "classes and target_low contradict: the first is for classes, the second for "
            "numbers to predict. Leave one of them out"
        )
    are_single = all(value.size == 1 for value in (*values.values(), *ends))
    are_numbers = all(end.dtype.kind in "fiu" for end in ends)
    if not are_single or not are_numbers:
        faults.append(
            "target_low and target_high must be one number each: a public range. Base it on what "
            "the numbers to predict mean, not on these records, which are private"
        )
    else:
        name = str(values["target_name"].item())
        low = float(ends[0].item())
        high = float(ends[1].item())
        transform = values["target_transform"].item()
        number = kind((name,), low, high, transform)
        for fault in faults_of_range(low, high, transform):
            faults.append(f"{name}: {fault}")
    raise_errors(f"{dataset.path}: {fault}." for fault in faults)
    return number


def without_targets(arrays: Arrays) -> dict[str, Any]:
    """Return arrays whose records have no target of their own: y is 0, and nothing is declared.

    Args:
        arrays: arrays of a reader, with or without targets.
    """
    declared = (*DECLARED, CLASSES)
    result: dict[str, Any] = {}
    for name, array in arrays.items():
        if name not in declared:
            result[name] = array
    for side in SIDES:
        if f"x{side}" in arrays:
            result[f"y{side}"] = np.zeros(len(arrays[f"x{side}"]), np.int64)
    return result


def targets_in(
    y: NDArray[Any],
    arrays: Arrays,
    *,
    numbers: bool,
) -> NDArray[Any]:
    """Return targets; unchanged if they are neither labels nor numbers.

    Args:
        y: targets as a reader returns them, shape (records,) or, for numbers, (records, 1).
        arrays: arrays with the names of classes, if they are declared.
        numbers: whether targets are numbers to predict.

    Returns:
        numbers, float64, shape (records, 1); or labels, integers, and :data:`NO_LABEL` for a name
        of no class and a number that is not whole.
    """
    if numbers:
        if y.dtype.kind not in "biuf" or y.ndim not in (1, 2):
            return y
        return y.reshape(len(y), -1).astype(np.float64)
    if y.dtype.kind == "f":
        whole = (y == np.floor(y)) & (abs(y) < 2.0**63)
        labels_or_none = np.where(whole, y, NO_LABEL)
        return labels_or_none.astype(np.int64)
    if y.dtype.kind in "OU" and CLASSES in arrays and y.ndim == 1:
        classes = arrays[CLASSES].ravel().tolist()
        places = {str(name): place for place, name in enumerate(classes)}
        labels = [_label_of(label, places) for label in y.tolist()]
        return np.array(labels, np.int64)
    return y


def _label_of(value: Any, places: Mapping[str, int]) -> int:
    """Return a label: a text is the name of a class, and a whole number is its place.

    It depends on the value alone. If names among other labels made those names, too, one record
    would change the classes of all.

    Args:
        value: a label as a record has it.
        places: labels by the names of their classes.
    """
    if isinstance(value, str):
        return places.get(value, NO_LABEL)
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if is_number and abs(value) < 2**63 and value == int(value):
        return int(value)
    return NO_LABEL


def faults_of_array(
    arrays: Arrays,
    side: str,
    *,
    numbers: bool,
) -> Iterator[str]:
    """Yield faults of the type, shape and values of the targets of one side.

    Args:
        arrays: arrays of a reader, with targets of :func:`targets_in`.
        side: one of :data:`~dpmac_cli.data.layout.SIDES`.
        numbers: whether targets are numbers to predict.
    """
    name = f"y{side}"
    y = arrays[name]
    if numbers:
        if y.dtype.kind != "f" or y.shape[1:] != (1,):
            yield (
                f"{name} must have one number per record, such as y[:, 0], not {y.dtype} of shape "
                f"{y.shape}"
            )
        elif not np.isfinite(y).all():
            yield f"{name} has a target that is NaN or infinite"
    else:
        yield from _faults_of_labels(y, name, len(arrays.get(CLASSES, ())))


def _faults_of_labels(
    y: NDArray[Any],
    name: str,
    classes: int,
) -> Iterator[str]:
    """Yield faults of labels.

    Args:
        y: labels, which must be integers from 0, shape (records,).
        name: name of the array.
        classes: number of declared classes; 0 if none are declared.
    """
    if y.dtype.kind in "OU":
        different = set(map(str, y.ravel().tolist()))
        names = sorted(different)
        shown = names if len(names) <= NAMED else [*names[:NAMED], "..."]
        yield f"{name} contains names. Declare them as class names: {{classes=}}{','.join(shown)}"
    elif y.ndim == 1 and y.dtype.kind == "b":
        yield f"{name} has truth values. Make labels of them: {name}.astype(int)"
    elif y.ndim != 1 or y.dtype.kind not in "iu":
        yield (
            f"{name} must have one integer per record, such as y.ravel(), not {y.dtype} of shape "
            f"{y.shape}. For several labels, train one model for each, such as y[:, 0]. For "
            "numbers to predict, declare target_low and target_high"
        )
    elif y.min(initial=0) < 0:
        yield (
            f"{name} contains a label that is no whole number from 0, and no name of {{classes}} "
            "(numbers to predict need a range: target_low and target_high)"
        )
    elif classes and y.max(initial=0) >= classes:
        yield (
            f"{name} contains the label {y.max()} (there are {classes} classes, 0 to {classes - 1})"
        )


def faults_together(arrays: Arrays) -> Iterator[str]:
    """Yield faults of all labels together, where no classes are declared.

    Every number from 0 to the largest label needs a record to train on, and so does every label
    that is tested on.

    Args:
        arrays: arrays with labels of :func:`targets_in`, without faults of their own.
    """
    labels = set(arrays["y"].tolist())
    tested = set(arrays.get("y_test", arrays["y"]).tolist())
    missing = set(range(len(labels))) - labels
    if missing:
        yield (
            f"y contains the label {max(labels)}, but no {min(missing)}. Number the classes 0, "
            "1, 2 and so on, or list all of them in an array classes, even those without a "
            "record"
        )
    elif tested - labels:
        yield f"y_test contains the label {min(tested - labels)}, which is not in y"


def task_in(
    arrays: Arrays, dataset: Declaration, number: Regression | None, folders: Sequence[str]
) -> Task:
    """Return the task: a language model, a number to predict, or classes.

    Args:
        arrays: arrays with labels, and with class names if they are declared.
        dataset: the dataset, whose settings may name a task.
        number: the number to predict; None for classes.
        folders: class names that a reader found, used if none are declared. Without them, classes
            have the names of their numbers.

    Raises:
        InputError: no classifier can be trained on the classes, or the task is for numbers.
    """
    task = dataset.settings.task
    if not is_labelled(task):
        return LanguageModel()
    if number is not None:
        return number
    if task is not None and _kind_of_numbers(task) is not None:
        raise InputError(
            f"{{task=}}{task} is for numbers, but {dataset.path} declares no range of them. "
            "Declare target_low and target_high, or in a schema the range of the label."
        )
    if CLASSES in arrays:
        names = tuple(map(str, arrays[CLASSES]))
    elif folders:
        names = tuple(folders)
    else:
        labels = range(1 + int(arrays["y"].max()))
        names = tuple(map(str, labels))
    check_classes(names, dataset)
    return Classification(names) if task is None else TASKS[task](names)


def check_classes(classes: Sequence[str], dataset: Declaration) -> None:
    """Reject classes that no classifier can be trained on.

    Args:
        classes: class names.
        dataset: the dataset, for messages.

    Raises:
        InputError: there is only one class, or a name is there twice or cannot be displayed.
    """
    if len(classes) < 2:
        raise InputError(
            f"{dataset.path} has only one class, {classes[0]}. A classifier needs at least two."
        )
    check_name(*classes)
    faults = []
    for name, count in Counter(classes).items():
        if count > 1:
            source = str(dataset.path) if dataset.classes is None else "{classes}"
            faults.append(f"{source} has {count} classes {name}")
    refuse(faults, " Class names must be unique.")
