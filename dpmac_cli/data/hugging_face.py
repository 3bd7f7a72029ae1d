"""Datasets of Hugging Face's library ``datasets``, which need not be installed to be recognised.

One column of texts, images or vectors is read, and one of labels, whose names are the classes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpmac_cli.config.facts import complaints, refuse
from dpmac_cli.data.arrays import SIDES
from dpmac_cli.data.class_folders import TESTS, TRAIN
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.image_folder import (
    Look,
    decode,
    decode_new,
    seen_in,
    shape_of_all,
    size_of,
    unreadable,
)
from dpmac_cli.data.memory import check_memory
from dpmac_cli.data.reader import ArrayDict, Reading, as_array, register_reader
from dpmac_cli.data.targets import CLASSES
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.tasks.task import is_labelled

#: Names of columns of labels that do not name their classes.
LABELS = ("label", "labels")
TEXTS = ("string", "large_string")
LEAVE_OUT = "Leave them out with dataset.select([...])."
SELECT = "Keep one with dataset.select_columns([...])"


def _is_dataset(declared: Declaration) -> bool:
    """Return whether records are a dataset of Hugging Face, or a dictionary of its splits."""
    memory = declared.in_memory
    return memory is not None and declared.schema is None and is_hugging_face(memory.frame)


def is_hugging_face(value: object) -> bool:
    """Return whether a value is like a ``datasets.Dataset`` or a ``datasets.DatasetDict``."""
    kind = type(next(iter(value.values()), None) if isinstance(value, Mapping) else value)
    return all(hasattr(kind, name) for name in ("features", "column_names", "with_format"))


@register_reader("Hugging Face", _is_dataset)
def read_hugging_face(declared: Declaration) -> Reading:
    """Return the records of a dataset. Raises InputError with every fault found."""
    assert declared.in_memory is not None  # noqa: S101  (the reader fits only such data)
    splits = _splits(declared.in_memory.frame, str(declared.path))
    features = splits[0].features
    label = _label_of(features) if declared.labels and is_labelled(declared.settings.task) else None
    if label is None and declared.labels and is_labelled(declared.settings.task):
        raise InputError(
            f"{declared.path} has no column of classes: none is a ClassLabel, or has the name "
            "label. Rename it with dataset.rename_column(NAME, 'label'). Numbers to predict need "
            "a range: ArrayData(dataset[...], dataset[...], target_low=..., target_high=...)."
        )
    unit = declared.settings.unit if declared.labels else None
    column = _column_of(features, (label, unit), str(declared.path))
    used = [name for name in (column, label, unit) if name is not None]
    absent = {name for name in used for split in splits if name not in split.features}
    refuse(
        [f"There is no column {name}" for name in sorted(absent)],
        f" The splits of {declared.path} need one set of columns, and that of {{unit}}.",
    )
    images = type(features[column]).__name__ == "Image"
    arrays: ArrayDict = {}
    shape = _shape_of(splits, column, declared) if images else ()
    for split, side in zip(splits, SIDES, strict=False):
        values = _values(split, column)
        arrays[f"x{side}"] = (
            _decoded(values, (len(split), *shape), declared, f"x{side}")
            if images
            else _array(values)
        )
        if label is not None:
            arrays[f"y{side}"] = as_array([*_values(split, label)], label)
        if unit is not None:
            arrays[f"unit{side}"] = np.fromiter(_values(split, unit), object, len(split))
    if label is not None and getattr(features[label], "names", None):
        arrays[CLASSES] = np.array(features[label].names)
    return Reading(arrays, converted=images)


def _splits(dataset: Any, name: str) -> list[Any]:
    """Return the training records, and test records if there are any, as objects of Python."""
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


def _label_of(features: Mapping[str, Any]) -> str | None:
    """Return the column of labels: the one whose classes have names, or the one of the name."""
    named = [name for name, of in features.items() if getattr(of, "names", None)]
    usual = [name for name in LABELS if name in features]
    return named[0] if len(named) == 1 else next(iter(usual), None)


def _column_of(features: Mapping[str, Any], others: Sequence[str | None], dataset: str) -> str:
    """Return the only column of texts, images or vectors. Raises InputError."""
    columns = [n for n, of in features.items() if n not in others and _is_record(of)]
    if len(columns) == 1:
        return columns[0]
    found = f"the columns {', '.join(columns)}" if columns else "no column"
    raise InputError(
        f"{dataset} has {found} of texts, images or vectors, and one is needed. {SELECT}, or "
        "declare all columns in a schema, as for a table: {schema=}schema.yaml."
    )


def _is_record(feature: Any) -> bool:
    """Return whether a column may hold records: texts, images, or vectors of one length."""
    kind = getattr(feature, "dtype", None)
    return kind in TEXTS or (type(feature).__name__ != "Value" and not hasattr(feature, "names"))


def _values(split: Any, column: str) -> Iterator[Any]:
    """Yield the values of a column, decoded one by one. Raises InputError, which quotes none."""
    read = 0
    try:
        for value in split[column]:
            yield value
            read += 1
    except Exception as failure:  # decoders raise whatever a record leads to
        raise InputError(
            f"Record {read} of the column {column} cannot be read ({type(failure).__name__}). "
            "Leave it out with dataset.select([...])."
        ) from failure


def _array(values: Iterable[Any]) -> NDArray[Any]:
    """Return texts, each by itself, or vectors. Raises InputError if these have several shapes."""
    items = list(values)
    if all(item is None or isinstance(item, str) for item in items):
        return np.array(items, object)
    try:
        return np.array(items)
    except ValueError as failure:
        raise InputError("All vectors of a dataset need one shape.") from failure


def _shape_of(splits: Sequence[Any], column: str, declared: Declaration) -> tuple[int, int, int]:
    """Return channels, height and width of images. Raises InputError if they have several sizes."""
    if not declared.labels:
        channels, height, width = declared.shape
        return channels, height, width
    headers = {
        f"{row} of x{side}": (image.mode, *size_of(image))
        for split, side in zip(splits, SIDES, strict=False)
        for row, image in enumerate(_values(split, column))
        if isinstance(image, Image.Image)
    }
    faults = list[str]()
    shape = shape_of_all(declared, headers, faults)
    raise_errors(faults)
    return shape


def _decoded(
    images: Iterable[Any], shape: tuple[int, ...], declared: Declaration, name: str
) -> NDArray[np.uint8]:
    """Return images, shape (images, channels, height, width). Raises InputError for bad ones."""
    try:
        check_memory(int(np.prod(shape)), f"{shape[0]:,} images")
    except ValueError as failure:
        raise InputError(f"{declared.path}: {failure}. Use {{image_size=}}N.") from failure
    look: Look = partial(decode, shape=shape[1:], levels=declared.settings.levels)
    if not declared.labels:
        look = partial(decode_new, declared=declared)
    decoded, faults = np.zeros(shape, np.uint8), list[str]()
    for row, image in enumerate(images):
        found = _seen_in(image, look)
        if isinstance(found, str):
            faults.append(f"Record {row} of {name} {found}")
        else:
            decoded[row] = found
    raise_errors(complaints(faults, f" {LEAVE_OUT}"))
    return decoded


def _seen_in(image: Any, look: Look) -> NDArray[np.uint8] | str:
    """Return a decoded image, or why it cannot be used."""
    if image is None:
        return "is missing"
    if not isinstance(image, Image.Image):
        return "is not decoded: use dataset.cast_column(NAME, datasets.Image())"
    try:
        return seen_in(image, look)
    except Exception as failure:  # noqa: BLE001  (Pillow raises whatever a damaged file leads to)
        return unreadable(failure)
