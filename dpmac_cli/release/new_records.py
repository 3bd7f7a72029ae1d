"""New, unlabelled records, read as those that a model was trained on."""

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
from dpmac_cli.data.schema import NONE_LEFT_OUT, TABLES, UTF8, LeftOut
from dpmac_cli.data.stacking import one_by_one
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.text_folder import SUFFIX, read_new_files
from dpmac_cli.data.texts import read_new
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.release.report import Facts
from dpmac_cli.runs import folder

if TYPE_CHECKING:
    from PIL.Image import Image

#: What to do about records that cannot be used, and about files that are no records.
REMEDY = " Correct or remove them, or add --skip-bad to leave them out."
REMOVE = " Remove such files, or add --skip-bad to leave them out."


@dataclass(frozen=True)
class Reading:
    """Choices about how new records are read.

    Attributes:
        skip_bad: leave out unusable records instead of rejecting all.
        named_by: column of a table to keep beside each record; by default ``id``, if there is one.
        encoding: encoding of a CSV; by default that of the training table.
    """

    skip_bad: bool = False
    named_by: str | None = None
    encoding: str | None = None


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
    reading: Reading,
) -> Unlabelled:
    """Return new records for the model in ``file``. Raises InputError."""
    settings: Mapping[str, Any] = {}
    with suppress(*folder.BROKEN):
        settings = folder.settings(file.parent)
    path, kind = _place(data)
    raise_errors(_misfits(path, kind, file, facts, reader, reading.named_by))
    if kind == "folder":
        return _files(path, facts, settings, reader)
    if facts.dataset.table is not None:
        return _table(path, facts, settings, reader, reading)
    given = one_by_one(data) if not isinstance(data, Path | str) else None
    x = read_npz(path, ("x",))["x"] if given is None else given
    faults = dict[int, str]()
    if reader is not None:
        x, faults = read_new(x, reader, str(path))
    elif reading.skip_bad and facts.input.levels == 1 and x.dtype.kind == "f" and x.ndim:
        broken = ~np.isfinite(x).all(tuple(range(1, x.ndim)))
        faults = {int(row): "contains NaN or infinity" for row in np.flatnonzero(broken)}
        x = np.where(broken.reshape(-1, *[1] * (x.ndim - 1)), 0.0, x) if faults else x
    faults = {row: f"record {row} {fault}" for row, fault in faults.items()}
    return Unlabelled(path, range(len(x)), _checked(x, path, facts, settings), faults=faults)


def _place(data: Path | str | NDArray[Any] | Sequence[str]) -> tuple[Path, str | None]:
    """Return the path and the kind of new records; None if there is no such file or folder."""
    if not isinstance(data, Path | str):
        return Path("the array"), ".npz"
    path = Path(data)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # a text instead of a path
        exists = False
    if not exists:
        return path, None
    return path, "folder" if path.is_dir() else path.suffix


def _misfits(
    path: Path,
    kind: str | None,
    file: Path,
    facts: Facts,
    reader: TextReader | None,
    named_by: str | None,
) -> Iterator[str]:
    """Yield why new records cannot be those for the model in ``file``."""
    kinds, wanted = {"folder", ".npz"}, "images: use a folder of images or an .npz"
    if facts.dataset.table is not None:
        kinds, wanted = {*TABLES}, f"a table: use one ({', '.join(TABLES)})"
    elif reader is not None:
        wanted = f"texts: use a folder of texts ({SUFFIX}), or an .npz of texts"
    elif facts.input.levels == 1:
        kinds, wanted = {".npz"}, "rows of numbers: use an .npz"
    if kind is None and reader is not None:
        # It may be a text, which no message shows.
        yield "There is no such file or folder. Pass texts as a list, such as [text]."
    elif kind is None:
        yield f"{path} does not exist."
    elif kind not in kinds:
        yield f"{path} does not fit {file}, which was trained on {wanted}."
    if named_by is not None and facts.dataset.table is None:
        yield f"--id {named_by} names a column, but {file} was not trained on a table."


def _table(
    path: Path,
    facts: Facts,
    settings: Mapping[str, Any],
    reader: TextReader | None,
    reading: Reading,
) -> Unlabelled:
    from dpmac_cli.data.table import read_inputs  # noqa: PLC0415  (loads pyarrow)

    schema = schema_of(facts.dataset.table or {}, f"{path}: the schema of the model")
    encoding = reading.encoding or settings.get("encoding", UTF8)
    found = read_inputs(path, schema, reader, reading.named_by, reading.skip_bad, encoding)
    at = _checked(found.inputs, path, facts, settings)
    return Unlabelled(path, found.rows, at, found.ids, skipped=found.skipped)


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
        at = _checked(x, root, facts, settings)
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


def _checked(
    x: NDArray[Any], path: Path, facts: Facts, settings: Mapping[str, Any]
) -> Callable[[slice], NDArray[Any]]:
    """Return a function that reads arrays. Raises InputError if they do not fit the model."""
    try:
        return _arrays(x, facts, settings)
    except ValueError as fault:
        raise InputError(f"{path}: {fault}, not {x.dtype} of shape {x.shape}.") from fault


def _arrays(
    x: NDArray[Any], facts: Facts, settings: Mapping[str, Any]
) -> Callable[[slice], NDArray[Any]]:
    """Return a function that reads images or rows of numbers. Raises ValueError if they misfit."""
    images = facts.input.levels > 1
    shape = channels_first(x[:1]).shape[1:] if x.ndim in ((3, 4) if images else (2, 3, 4)) else ()
    sides = "channels: {}, height: {}, width: {}".format(*facts.input.shape)
    middle, half = np.array([facts.input.mean, facts.input.std])
    ends = None if images else np.stack([middle - half, middle + half])
    if images:
        resizes = "image_size" in settings and shape[:1] == facts.input.shape[:1]
        if x.dtype != np.uint8 or not (resizes or shape == facts.input.shape):
            raise ValueError(f"x must be images as uint8, with {sides}")
    elif shape != facts.input.shape or x.dtype.kind not in ("fiu" if x.ndim == 2 else "f"):
        table = facts.input.shape[1:] == (1, 1)
        wanted = f"rows of {facts.input.shape[0]} numbers" if table else f"floats, {sides}"
        raise ValueError(f"x must be {wanted}")
    elif not np.isfinite(x).all():
        raise ValueError("x must be finite")
    size = None if shape == facts.input.shape else facts.input.shape[1]
    return lambda some: inputs_of(x[some], ends, size)
