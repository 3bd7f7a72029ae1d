"""Datasets of Hugging Face's library ``datasets``, which need not be installed to be recognised.

One column of texts, images or vectors is read, and one of labels, whose names are the classes. The
names of a ``ClassLabel`` are declared by whoever made the dataset, so they are public; other labels
are numbers, whose classes are read from the records. With a schema, a dataset is a table, and all
its columns may be used: see ``table.py``.

Values are decoded one by one as objects of Python. The dataset's own transforms and formats are not
applied. Streamed datasets have no length, and are not supported.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpmac_cli.config.facts import complaints, refuse
from dpmac_cli.data.class_folders import TESTS, TRAIN
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.image_folder import Header, header_of, look_of, looked_at, shape_of_all
from dpmac_cli.data.layout import SIDES
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.reader import ArrayDict, Reading, as_array, register_reader
from dpmac_cli.data.targets import CLASSES
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.tasks.task import is_labelled

#: Names of columns of labels that do not name their classes.
LABELS = ("label", "labels")
TEXTS = ("string", "large_string")
#: Floats that merge whole numbers which floats of Python, as values are decoded, tell apart.
NARROW = ("float16", "float32")
LEAVE_OUT = "Leave them out with dataset.select([...])."
SELECT = "Keep one with dataset.select_columns([...])"


def _is_dataset(declared: Declaration) -> bool:
    """Return whether records are a dataset of Hugging Face, or a dictionary of its splits."""
    memory = declared.in_memory
    return memory is not None and declared.schema is None and is_hugging_face(memory.frame)


def is_hugging_face(value: object) -> bool:
    """Return whether a value is like a ``datasets.Dataset`` or a ``datasets.DatasetDict``.

    It is recognised by its class, so the library need not be installed.
    """
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    kind = type(value)
    return all(hasattr(kind, name) for name in ("features", "column_names", "with_format"))


@register_reader("Hugging Face", _is_dataset)
def read_hugging_face(declared: Declaration) -> Reading:
    """Return the records of a dataset.

    Args:
        declared: a ``datasets.Dataset``, or a dictionary of splits, of which ``train`` and the
            first of ``test``, ``validation`` and ``val`` are read.

    Raises:
        InputError: with every fault found. It quotes no record.
    """
    assert declared.in_memory is not None  # noqa: S101  (the reader fits only such data)
    splits = _splits(declared.in_memory.frame, str(declared.path))
    features = splits[0].features
    label = _label_of(features, declared)
    unit = declared.settings.unit if declared.labels else None
    column = _column_of(features, (label, unit), str(declared.path))
    used = [name for name in (column, label, unit) if name is not None]
    absent = set[str]()
    for split in splits:
        absent |= set(used) - set(split.features)
    refuse(
        [f"There is no column {name}" for name in sorted(absent)],
        f" The splits of {declared.path} need one set of columns, and that of {{unit}}.",
    )
    has_images = type(features[column]).__name__ == "Image"
    shape = _shape_of(splits, column, declared) if has_images else ()
    arrays: ArrayDict = {}
    for split, side in zip(splits, SIDES, strict=False):
        values = _values(split, column)
        if has_images:
            of_all = (len(split), *shape)
            arrays[f"x{side}"] = _decoded(values, of_all, declared, f"x{side}")
        else:
            arrays[f"x{side}"] = _array(values)
        if label is not None:
            arrays[f"y{side}"] = as_array(list(_values(split, label)), label)
        if unit is not None:
            arrays[f"unit{side}"] = _units_of(split, unit)
    if label is not None and getattr(features[label], "names", None):
        arrays[CLASSES] = np.array(features[label].names)
    return Reading(arrays, converted=has_images)


def _units_of(split: Any, column: str) -> NDArray[np.object_]:
    """Return the unit of each record, shape (records,).

    Args:
        split: records of one split.
        column: name of the column of units.
    """
    values = _values(split, column)
    kind = getattr(split.features[column], "dtype", None)
    if kind in NARROW:
        values = map(np.dtype(kind).type, values)
    return np.fromiter(values, object, len(split))


def _splits(dataset: Any, name: str) -> list[Any]:
    """Return the training records, and test records if there are any, as objects of Python.

    Args:
        dataset: a dataset, or a dictionary of its splits.
        name: its name in messages.

    Raises:
        InputError: no split is for training, or the dataset is streamed.
    """
    if not isinstance(dataset, Mapping):
        parts = [dataset]
    elif TRAIN not in dataset:
        raise InputError(f"{name} has the splits {', '.join(dataset)}, but none is {TRAIN}.")
    else:
        tests = [dataset[test] for test in TESTS if test in dataset]
        parts = [dataset[TRAIN], *tests[:1]]
    if not all(hasattr(part, "__len__") for part in parts):
        raise InputError(f"{name} is streamed, so it has no length. Load it with streaming=False.")
    return [part.with_format(None) for part in parts]


def _label_of(
    features: Mapping[str, Any],
    declared: Declaration,
) -> str | None:
    """Return the column of labels: the one whose classes have names, or the one of the name.

    Args:
        features: types of the columns by their names.
        declared: the dataset. New records, and those of a language model, have no labels.

    Raises:
        InputError: there is no such column.
    """
    if not declared.labels or not is_labelled(declared.settings.task):
        return None
    with_names = []
    for name, feature in features.items():
        if getattr(feature, "names", None):
            with_names.append(name)
    if len(with_names) == 1:
        return with_names[0]
    for name in LABELS:
        if name in features:
            return name
    raise InputError(
        f"{declared.path} has no column of classes: none is a ClassLabel, or has the name "
        "label. Rename it with dataset.rename_column(NAME, 'label'). Numbers to predict need "
        "a range: ArrayData(dataset[...], dataset[...], target_low=..., target_high=...)."
    )


def _column_of(
    features: Mapping[str, Any],
    others: Sequence[str | None],
    dataset: str,
) -> str:
    """Return the only column of texts, images or vectors.

    Args:
        features: types of the columns by their names.
        others: columns of labels and units.
        dataset: name of the dataset in messages.

    Raises:
        InputError: there are several, or none.
    """
    columns = []
    for name, feature in features.items():
        if name not in others and _is_record(feature):
            columns.append(name)
    if len(columns) == 1:
        return columns[0]
    names = f"the columns {', '.join(columns)}" if columns else "no column"
    raise InputError(
        f"{dataset} has {names} of texts, images or vectors, and one is needed. {SELECT}, or "
        "declare all columns in a schema, as for a table: {schema=}schema.yaml."
    )


def _is_record(feature: Any) -> bool:
    """Return whether a column may hold records: texts, images, or vectors of one length."""
    if getattr(feature, "dtype", None) in TEXTS:
        return True
    is_class_label = hasattr(feature, "names")
    return type(feature).__name__ != "Value" and not is_class_label


def _values(split: Any, column: str) -> Iterator[Any]:
    """Yield the values of a column, decoded one by one.

    Args:
        split: records of one split.
        column: name of the column.

    Raises:
        InputError: a value cannot be decoded. It quotes none.
    """
    count = 0
    try:
        for value in split[column]:
            yield value
            count += 1
    except Exception as failure:  # decoders raise whatever a record leads to
        raise InputError(
            f"Record {count} of the column {column} cannot be read ({type(failure).__name__}). "
            "Leave it out with dataset.select([...])."
        ) from failure


def _array(values: Iterable[Any]) -> NDArray[Any]:
    """Return texts, each by itself, or vectors.

    Args:
        values: one for each record; None for a text that is missing.

    Returns:
        texts, shape (records,); or vectors, shape (records, ...).

    Raises:
        InputError: vectors have several shapes.
    """
    items = list(values)
    if all(item is None or isinstance(item, str) for item in items):
        return np.array(items, object)
    try:
        return np.array(items)
    except ValueError as failure:
        raise InputError("All vectors of a dataset need one shape.") from failure


def _shape_of(
    splits: Sequence[Any],
    column: str,
    declared: Declaration,
) -> tuple[int, int, int]:
    """Return channels, height and width of images.

    Args:
        splits: training and, if there are any, test records.
        column: name of the column of images.
        declared: the dataset. New records have the shape that the model needs.

    Raises:
        InputError: images have several sizes.
    """
    if not declared.labels:
        channels, height, width = declared.shape
        return channels, height, width
    headers = dict[str, Header]()
    for split, side in zip(splits, SIDES, strict=False):
        for row, image in enumerate(_values(split, column)):
            if isinstance(image, Image.Image):
                headers[f"{row} of x{side}"] = header_of(image)
    faults = list[str]()
    shape = shape_of_all(declared, headers, faults)
    raise_errors(faults)
    return shape


def _decoded(
    images: Iterable[Any],
    shape: tuple[int, ...],
    declared: Declaration,
    name: str,
) -> NDArray[np.uint8]:
    """Return images in one array.

    Args:
        images: what the column has for each record: images of Pillow, or None.
        shape: shape of the array, (images, channels, height, width).
        declared: the dataset.
        name: name of the array in messages.

    Raises:
        InputError: images do not fit into memory, or some cannot be used.
    """
    try:
        check_memory(int(np.prod(shape)), f"{shape[0]:,} images")
    except ValueError as failure:
        raise InputError(f"{declared.path}: {failure}. Use {{image_size=}}N.") from failure
    look = look_of(declared, shape[1:])
    decoded = np.zeros(shape, np.uint8)
    faults = list[str]()
    for row, image in enumerate(images):
        if image is None:
            result: NDArray[np.uint8] | str = "is missing"
        elif not isinstance(image, Image.Image):
            result = "is not decoded: use dataset.cast_column(NAME, datasets.Image())"
        else:
            result = looked_at(image, look)
        if isinstance(result, str):
            faults.append(f"Record {row} of {name} {result}")
        else:
            decoded[row] = result
    raise_errors(complaints(faults, f" {LEAVE_OUT}"))
    return decoded
