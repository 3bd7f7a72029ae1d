"""New, unlabelled records, read as those that a model was trained on."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpmac_cli.data.array_file import channels_first, inputs_of, read_npz
from dpmac_cli.data.class_folders import is_hidden
from dpmac_cli.data.complaints import left_out
from dpmac_cli.data.decoding import decode, looked_at, size_of, usable_cores
from dpmac_cli.data.image_folder import GREY, SUFFIXES
from dpmac_cli.data.in_memory import as_array
from dpmac_cli.data.schema import NONE_LEFT_OUT, TABLES, LeftOut
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.text_folder import SUFFIX, read_new_files
from dpmac_cli.data.texts import read_arrays
from dpmac_cli.data.tokens import TextReader
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.release.report import Facts
from dpmac_cli.runs import folder

if TYPE_CHECKING:
    from PIL.Image import Image

#: What to do about records that cannot be used, and about files that are no records.
REMEDY = " Correct or remove them, or add --skip-bad to leave them out."
REMOVE = " Remove such files, or add --skip-bad to leave them out."


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Records without labels.

    Attributes:
        path: where they are; for records in memory "the array", which messages name instead.
        names: file names relative to their folder, or rows from 0.
        at: reads some of them as inputs before standardisation. Those that cannot be read are
            zeros, and ``faults`` then says why.
        ids: what names the records in a table; None without it.
        faults: why records cannot be used, by their place in ``names``.
        skipped: records and files that are not among ``names``.
    """

    path: Path
    names: Sequence[str] | Sequence[int]
    at: Callable[[slice], NDArray[Any]]
    ids: Sequence[str] | None = None
    faults: dict[int, str] = field(default_factory=dict)
    skipped: LeftOut = NONE_LEFT_OUT


def read_unlabelled(
    data: Path | str | NDArray[Any] | Sequence[str],
    file: Path,
    facts: Facts,
    reader: TextReader | None,
    *,
    skip_bad: bool,
    id_column: str | None,
) -> Unlabelled:
    """Return new records for the model in ``file``. Raises InputError.

    ``skip_bad`` leaves out unusable records. ``id_column`` is the column of a table to keep beside
    each record; by default ``id``, if there is one.
    """
    path, kind = Path("the array"), ".npz"
    if isinstance(data, Path | str):
        path = Path(data)
        kind = path.suffix if os.path.exists(path) else ""  # of a text, Path.exists may raise
        kind = "folder" if os.path.isdir(path) else kind
    raise_errors(_misfits(path, kind, file, facts, reader, id_column))
    if facts.dataset.table is not None:
        from dpmac_cli.data.table import read_inputs  # noqa: PLC0415  (loads pyarrow)

        schema = schema_of(facts.dataset.table, f"{path}: the schema of the model")
        found = read_inputs(path, schema, reader, id_column, skip_bad)
        at = _arrays(found.inputs, path, facts)
        return Unlabelled(path, found.rows, at, found.ids, skipped=found.skipped)
    settings: Mapping[str, Any] = {}
    with suppress(*folder.BROKEN):
        settings = folder.settings(file.parent)
    if kind == "folder":
        return _files(path, facts, settings, reader)
    given = {
        "x": read_npz(path, ("x",))["x"] if isinstance(data, Path | str) else as_array(data, "x")
    }
    read_arrays(given, reader, str(path))
    at = _arrays(given["x"], path, facts)
    return Unlabelled(path, range(len(given["x"])), at)


def _misfits(
    path: Path,
    kind: str,
    file: Path,
    facts: Facts,
    reader: TextReader | None,
    id_column: str | None,
) -> Iterator[str]:
    """Yield why new records cannot be those for the model in ``file``."""
    kinds, wanted = {"folder", ".npz"}, "images: use a folder of images or an .npz"
    if facts.dataset.table is not None:
        kinds, wanted = {*TABLES}, f"a table: use one ({', '.join(TABLES)})"
    elif reader is not None:
        wanted = f"texts: use a folder of texts ({SUFFIX}), or an .npz of texts"
    elif facts.input.levels == 1:
        kinds, wanted = {".npz"}, "rows of numbers: use an .npz"
    if not os.path.exists(path) and kind != ".npz":
        # It may be a text, which no message shows.
        texts = "There is no such file or folder. Pass texts as a list, such as [text]."
        yield f"{path} does not exist." if reader is None else texts
    elif kind not in kinds:
        yield f"{path} does not fit {file}, which was trained on {wanted}."
    if id_column is not None and facts.dataset.table is None:
        yield f"--id {id_column} names a column, but {file} was not trained on a table."


def _files(
    root: Path,
    facts: Facts,
    settings: Mapping[str, Any],
    reader: TextReader | None,
) -> Unlabelled:
    """Return the images or texts in a folder and below it."""
    suffixes, what = (SUFFIXES, "an image") if reader is None else ((SUFFIX,), "a file of text")
    below = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    names = sorted(str(name) for name in below if not any(map(is_hidden, name.parts)))
    strange = [name for name in names if not name.lower().endswith(suffixes)]
    skipped = [f"{root / name} is not {what}" for name in strange]
    names = [name for name in names if name.lower().endswith(suffixes)]
    if reader is None:
        at, faults = _images(root, names, facts, settings)
    else:
        x, faults = read_new_files(root, names, reader)
        at = _arrays(x, root, facts)
    return Unlabelled(root, names, at, faults=faults, skipped=left_out(skipped))


def _images(
    root: Path, names: Sequence[str], facts: Facts, settings: Mapping[str, Any]
) -> tuple[Callable[[slice], NDArray[np.uint8]], dict[int, str]]:
    """Return a function that decodes images, and faults that it fills."""
    (channels, height, width), faults = facts.input.shape, dict[int, str]()

    def look(opened: "Image") -> NDArray[np.uint8] | str:
        wide, high = size_of(opened)
        if "image_size" not in settings and (wide, high) != (width, height):
            found = f"{high}x{wide}"
            return f"has {found} pixels, but the model needs {height}x{width}"
        grey = opened.mode.partition(";")[0] in GREY
        if channels == 1 and not grey and "channels" not in settings:
            return "has colours, but the model needs grey images"
        return decode(opened, facts.input.shape, settings.get("levels"))

    def at(some: slice) -> NDArray[np.uint8]:
        with ThreadPoolExecutor(usable_cores()) as pool:
            seen = list(pool.map(lambda name: looked_at(str(root / name), look), names[some]))
        for row, fault in enumerate(seen, some.start or 0):
            if isinstance(fault, str):
                faults[row] = f"{root / names[row]} {fault}"
        blank = np.zeros(facts.input.shape, np.uint8)
        return np.stack([blank if isinstance(image, str) else image for image in seen])

    return at, faults


def _arrays(x: NDArray[Any], path: Path, facts: Facts) -> Callable[[slice], NDArray[Any]]:
    """Return a function that reads images or rows of numbers.

    Raises InputError if they do not fit the model.
    """
    known = facts.input
    images, table = known.levels > 1, known.shape[1:] == (1, 1)
    shape = channels_first(x[:1]).shape[1:] if x.ndim in ((3, 4) if images else (2, 3, 4)) else ()
    sides = "channels: {}, height: {}, width: {}".format(*known.shape)
    if images:
        wanted = f"images as uint8, with {sides}"
        fits = shape == known.shape and x.dtype == np.uint8
    else:
        wanted = f"rows of {known.shape[0]} numbers" if table else f"floats, {sides}"
        fits = shape == known.shape and x.dtype.kind in ("fiu" if x.ndim == 2 else "f")
        if fits and not np.isfinite(x).all():
            wanted, fits = "finite", False
    if not fits:
        raise InputError(f"{path}: x must be {wanted}, not {x.dtype} of shape {x.shape}.")
    middle, half = np.array([known.mean, known.std])
    ends = None if images else np.stack([middle - half, middle + half])
    return lambda some: inputs_of(x[some], ends)
