"""Registry of readers: each reads one kind of your own records, for training and for predictions.

A reader is a function of a :class:`~dpmac_cli.data.dataset.Declaration`, registered by
:func:`register_reader`. The checks of the records, their split and their facts are those of all
readers: :func:`~dpmac_cli.data.arrays.dataset_of_arrays`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.config.facts import NONE_LEFT_OUT, LeftOut
from dpmac_cli.config.records import Numbers
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.texts import read_arrays
from dpmac_cli.errors import DpmacError, InputError, raise_errors
from dpmac_cli.tasks.task import is_labelled

#: Lists that name new records.
NAMES = ("name", "id")
#: Records and what is declared of them, by name; decoded images are Rows of a file.
ArrayDict = dict[str, Any]


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Return an array; a list with texts becomes one of objects, so that no item changes another.

    Args:
        values: an array, or anything that numpy can convert to one, such as a list or a tensor,
            whose gradient is left out.
        name: name of the array in the message.

    Raises:
        InputError: numpy cannot convert it; or it is a list of images of several types, because
            one of floats would make numbers of all; or it has masked values, because an array has
            what is under the mask.

    Example:
        >>> as_array([1, 2], "y").dtype.kind, as_array(["1", 2], "y").dtype.kind
        ('i', 'O')
    """
    if np.ma.is_masked(values):
        raise InputError(
            f"{name} has masked values, and an array has what is under the mask. Leave these "
            "records out."
        )
    items = values if isinstance(values, list | tuple) else ()
    has_texts = any(isinstance(item, str) for item in items)
    try:
        if _are_images_of_several_types(items):
            raise TypeError("images of several types")
        if has_texts:
            return np.array(values, object)
        return np.asarray(values.detach() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as failure:
        raise InputError(
            f"numpy cannot convert {name} to an array ({type(failure).__name__}). All records need "
            "one shape and type."
        ) from failure


def _are_images_of_several_types(items: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether items are images, of numpy or of Pillow, and have more than one type."""
    # Pillow's images have a mode in place of a type.
    types = set()
    are_images = False
    for item in items:
        kind = getattr(item, "dtype", getattr(item, "mode", None))
        types.add(kind)
        is_of_pillow = isinstance(kind, str)
        are_images |= is_of_pillow or getattr(item, "ndim", 0) > 1
    return are_images and len(types) > 1


@dataclass(frozen=True)
class Reading:
    """Records as a reader returns them.

    Attributes:
        arrays: arrays by the names of an .npz: ``x``, and ``y`` with labels; ``x_test`` and
            ``y_test``, ``unit``, ``classes``, ``low`` and ``high``, and others. ``key`` names each
            record, and decides its side of a split. Without labels, ``x``, and perhaps ``name`` and
            ``id``, lists that name each record in the predictions.
        left_out: records that cannot be used, with ``skip_bad``.
        classes: names of classes that were found, if none are declared; () otherwise.
        converted: whether images have the channels and the size that settings declare.
        numbers: what numbers are, given their shape and their lowest and highest values; None for
            plain ones, and for texts, of which ``x`` is a list, one for each record.
        remarks: private notes on the records, each a sentence without its full stop.
    """

    arrays: ArrayDict
    left_out: LeftOut = field(default=NONE_LEFT_OUT)
    classes: tuple[str, ...] = ()
    converted: bool = False
    numbers: Callable[..., Numbers] | None = None
    remarks: tuple[str, ...] = ()


Reads = Callable[[Declaration], Reading]
#: Readers, and which datasets each of them reads, by name.
READERS: dict[str, tuple[Callable[[Declaration], bool], Reads]] = {}


def register_reader(
    name: str,
    fits: Callable[[Declaration], bool],
) -> Callable[[Reads], Reads]:
    """Register a function that reads a kind of records.

    A reader must read each record by itself, so that no record changes how another one is read, and
    take what is public, such as ``classes`` and ``low``, from declarations.

    ::

        @register_reader("sounds", fits=lambda declared: declared.path.name.endswith("-sounds"))
        def read_sounds(declared: Declaration) -> Reading:
            ...
            return Reading({"x": x, "y": y, "low": -1, "high": 1})

    Args:
        name: name of the kind. An earlier reader of the name is replaced.
        fits: returns whether a dataset is of this kind, such as by its path. Readers that were
            registered later are asked first.
    """

    def register(read: Reads) -> Reads:
        READERS.pop(name, None)
        READERS[name] = fits, read
        return read

    return register


def kind_of(declared: Declaration) -> str:
    """Return the name of the reader of a dataset, such as "tables"; "" if no reader fits.

    Readers that were registered later are asked first.

    Args:
        declared: the dataset.
    """
    for name, (fits, _) in reversed(READERS.items()):
        if fits(declared):
            return name
    return ""


def reading_of(declared: Declaration) -> Reading:
    """Read a dataset with the reader of its kind, and convert its records to arrays.

    Texts become the numbers of their tokens.

    Args:
        declared: the dataset, or new records without labels.

    Raises:
        InputError: with every fault that the reader found, or there is no reader of this kind.
    """
    kind = kind_of(declared)
    if not kind:
        raise _without_reader(declared)
    _, read = READERS[kind]
    is_built_in = read.__module__.startswith(f"{__package__}.")
    reading = read(declared) if is_built_in else _read_by(kind, read, declared)
    arrays: ArrayDict = {}
    for name, values in reading.arrays.items():
        is_converted = isinstance(values, Rows) or name in NAMES
        arrays[name] = values if is_converted else as_array(values, name)
    place, is_new = str(declared.path), not declared.labels
    numbers = reading.numbers or read_arrays(arrays, declared.texts, place, new=is_new)
    return replace(reading, arrays=arrays, numbers=numbers)


def _without_reader(declared: Declaration) -> InputError:
    """Return the error of a dataset that no reader fits."""
    if not declared.path.is_file():
        return InputError(f"{{dataset=}}{declared.path}: no such file or folder.")
    return InputError(
        f"{{dataset=}}{declared.path} must be a folder with one folder of images per class, an "
        ".npz, or a table (.csv, .tsv, .parquet). Other kinds need a program with their reader: "
        "register_reader."
    )


@contextmanager
def code_of_program(code: str, declared: Declaration) -> Iterator[None]:
    """Convert a failure of a program's code on records to an InputError; a context manager.

    The message of the failure is left out, because it may quote a record.

    Args:
        code: names the code, as the subject of a message.
        declared: the dataset.
    """
    try:
        yield
    except (DpmacError, MemoryError):
        raise
    except Exception as failure:
        raise InputError(
            f"{code} failed on {declared.path}: {type(failure).__name__}. Its message may contain "
            "private records, so it is not repeated: it is the __cause__ of this error."
        ) from failure


def _read_by(kind: str, read: Reads, declared: Declaration) -> Reading:
    """Read a dataset with a reader of a program, and check what it returns.

    Args:
        kind: name of the reader.
        read: the reader.
        declared: the dataset.

    Raises:
        InputError: the reader failed, or what it returned is incomplete.
    """
    with code_of_program(f"The reader '{kind}'", declared):
        reading = read(declared)
    if not isinstance(reading, Reading):
        raise InputError(
            f"The reader '{kind}' returned {type(reading).__name__}: it must return a Reading."
        )
    arrays = dict(reading.arrays)
    labelled = declared.labels and is_labelled(declared.settings.task)
    needed = ("x", "y") if labelled else ("x",)
    faults = list[str]()
    for name in needed:
        if name not in arrays:
            faults.append(f"The reader '{kind}' returned no array {name}.")
    raise_errors(faults)
    for name in (*NAMES, "key"):
        if name in arrays and len(arrays[name]) != len(arrays["x"]):
            faults.append(
                f"The reader '{kind}' returned {name} of {len(arrays[name])} records, and x of "
                f"{len(arrays['x'])}."
            )
    raise_errors(faults)
    if "key" in arrays:
        arrays["key"] = np.array(list(map(str, arrays["key"])), object)
    return replace(reading, arrays=arrays)
