"""Predict the classes of new, unlabelled records with a published model."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.config.keywords import SettingName
from dpmac_cli.data.array_file import channels_first, inputs_of, read_npz
from dpmac_cli.data.class_folders import is_hidden
from dpmac_cli.data.complaints import refuse
from dpmac_cli.data.dataset import standardisation
from dpmac_cli.data.decoding import decode, looked_at, size_of, usable_cores
from dpmac_cli.data.image_folder import GREY, SUFFIXES
from dpmac_cli.data.schema import TABLES
from dpmac_cli.data.stacking import one_by_one
from dpmac_cli.data.table_schema import TableSchema
from dpmac_cli.data.text_folder import SUFFIX, read_new_files
from dpmac_cli.data.texts import read_new
from dpmac_cli.data.wordpiece import TextReader
from dpmac_cli.errors import InputError
from dpmac_cli.models.build import Network
from dpmac_cli.release.model_file import load_model, read_facts, text_reader
from dpmac_cli.release.report_file import Facts
from dpmac_cli.runs import folder
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.storage.files import PRIVATE_MODE, to_csv, write_atomically
from dpmac_cli.storage.progress import LISTENER, Computing
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import outputs, places

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a model for new records.

    Attributes:
        answers: what the network's outputs mean, float32, shape (records, outputs): probabilities
            of classes. NaN if an output contains NaN.
        task: what is predicted.
        records: names of records: file names relative to the folder of images, or rows from 0.
        ids: values of a table's column ``id``; None without one.
    """

    answers: NDArray[np.float32]
    task: Task
    records: Sequence[str] | range
    ids: Sequence[str] | None = None

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Probabilities of the classes, float32, shape (records, classes)."""
        return self.answers

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the columns."""
        return self.task.names

    @property
    def unanswered(self) -> int:
        """Number of records for which the network's output contains NaN."""
        return int(np.isnan(self.answers).any(1).sum())

    @property
    def predicted(self) -> Sequence[Any]:
        """Names of the most probable classes; "" if the output contains NaN.

        With several labels per record, all labels above one half, joined by ";".
        """
        return self.task.columns(self.answers)["predicted"]

    def write(self, path: Path) -> None:
        """Write a .csv that only its owner can read. Raises OSError."""
        columns: dict[str, Sequence[Any]] = {} if self.ids is None else {"id": self.ids}
        columns |= self.task.columns(self.answers)
        if isinstance(self.records, range):
            columns = {"row": self.records, **columns}
        else:  # names that are not UTF-8 are escaped
            names = [os.fsencode(n).decode(errors="backslashreplace") for n in self.records]
            columns = {"file": names, **columns}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        known = ({n: v for n, v in row.items() if v == v} for row in rows)  # noqa: PLR0124  (NaN)
        write_atomically(path, to_csv([*columns], known).encode(), PRIVATE_MODE)


#: Names of records, a function that reads some of them as inputs before standardisation, and
#: their ids.
_Records = tuple[Sequence[str] | range, Callable[[slice], NDArray[Any]], Sequence[str] | None]


def predict(
    run: Path | str,
    data: Path | str | NDArray[Any] | Sequence[str],
    device: str = "auto",
    factory: str | None = None,
    network: Network | None = None,
) -> Predictions:
    """Predict the classes of new records.

    Args:
        run: a run folder or a model file.
        data: a folder of images or texts, an .npz with an array x, or a table, like the model's
            training data; or the array x itself, or a list of texts.
        device: see ``--device``.
        factory: ``FILE.py:FACTORY`` of a user-supplied model.
        network: instead, a network of the program: see :func:`load_model`.

    Raises:
        InputError: a file is missing or damaged, or records do not match the training data.
        ModelError: the model cannot be built.
    """
    where, faults, found = choose_device(device), list[str](), list[Tensor]()
    file, facts = read_facts(Path(run))
    released = load_model(file, device=where, factory=factory, network=network)
    reader = text_reader(file, facts)
    names, at, ids = _records(data, file, facts, reader, faults)
    if not len(names):
        raise InputError(f"{data} contains no records.")
    gain, offset = standardisation(facts.levels, facts.mean, facts.std, where)
    batches = (torch.from_numpy(at(some)).to(where) for some in places(len(names), facts.shape))
    inputs = (torch.addcmul(offset, batch.to(gain.dtype), gain) for batch in batches)
    formed = (each.reshape(len(each), *facts.form) for each in inputs)
    for logits in outputs(released.model, formed):
        found.append(facts.task.answers(logits).cpu())
        done = sum(map(len, found))
        LISTENER.get()(Computing(done, len(names), file, what="predictions"))
    refuse(faults, " Correct or remove them.")
    return Predictions(torch.cat(found).numpy(), facts.task, names, ids)


def _records(
    data: Path | str | NDArray[Any] | Sequence[str],
    file: Path,
    facts: Facts,
    reader: TextReader | None,
    faults: list[str],
) -> _Records:
    """Return new records; faults of images are added to ``faults`` on decoding."""
    settings: Mapping[SettingName, Any] = {}
    with suppress(*folder.BROKEN):
        settings = folder.settings(file.parent)
    if not isinstance(data, Path | str):
        data, path, kind = one_by_one(data), Path("the array"), ".npz"
    else:
        path = Path(data)
        kind = "folder" if path.is_dir() else path.suffix
        if not path.exists():
            raise InputError(f"{path} does not exist.")
    kinds, wanted = {"folder", ".npz"}, "images: use a folder of images or an .npz"
    if facts.table is not None:
        kinds, wanted = {*TABLES}, f"a table: use one ({', '.join(TABLES)})"
    elif reader is not None:
        wanted = f"texts: use a folder of texts ({SUFFIX}), or an .npz of texts"
    elif facts.levels == 1:
        kinds, wanted = {".npz"}, "rows of numbers: use an .npz"
    if kind not in kinds:
        raise InputError(f"{path} does not fit {file}, which was trained on {wanted}.")
    if kind == "folder" and reader is None:
        return _images(path, facts, settings, faults)
    names: Sequence[str] | range | None = None
    ids = None
    if facts.table is not None:
        from dpmac_cli.data.table_file import read_inputs  # noqa: PLC0415  (loads an extra)

        x, ids = read_inputs(path, TableSchema.model_validate(facts.table).columns, reader)
    elif kind == "folder" and reader is not None:
        x, names = read_new_files(path, reader)
    else:
        x = data if isinstance(data, np.ndarray) else read_npz(path, ("x",))["x"]
        x = x if reader is None else read_new(x, reader, str(path))
    try:
        at = _arrays(x, facts, settings)
    except ValueError as fault:
        raise InputError(f"{path}: {fault}, not {x.dtype} of shape {x.shape}.") from fault
    return range(len(x)) if names is None else names, at, ids


def _images(
    root: Path, facts: Facts, settings: Mapping[SettingName, Any], faults: list[str]
) -> _Records:
    below = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    names = sorted(str(name) for name in below if not any(map(is_hidden, name.parts)))
    strange = [name for name in names if not name.lower().endswith(SUFFIXES)]
    refuse([f"{root / name} is not an image" for name in strange], " Remove such files.")
    channels, height, width = facts.shape

    def look(opened: "Image") -> NDArray[np.uint8] | str:
        wide, high = size_of(opened)
        if "image_size" not in settings and (wide, high) != (width, height):
            found = f"{high}x{wide}"
            return f"has {found} pixels, but the model needs {height}x{width}"
        grey = opened.mode.partition(";")[0] in GREY
        if channels == 1 and not grey and "channels" not in settings:
            return "has colours, but the model needs grey images"
        return decode(opened, facts.shape, settings.get("levels"))

    def at(some: slice) -> NDArray[np.uint8]:
        with ThreadPoolExecutor(usable_cores()) as pool:
            seen = list(pool.map(lambda name: looked_at(str(root / name), look), names[some]))
        pairs = zip(names[some], seen, strict=True)
        faults.extend(f"{root / name} {fault}" for name, fault in pairs if isinstance(fault, str))
        blank = np.zeros(facts.shape, np.uint8)
        return np.stack([blank if isinstance(image, str) else image for image in seen])

    return names, at, None


def _arrays(
    x: NDArray[Any], facts: Facts, settings: Mapping[SettingName, Any]
) -> Callable[[slice], NDArray[Any]]:
    """Return a function that reads images or rows of numbers. Raises ValueError if they misfit."""
    images = facts.levels > 1
    shape = channels_first(x[:1]).shape[1:] if x.ndim in ((3, 4) if images else (2, 3, 4)) else ()
    sides = "channels: {}, height: {}, width: {}".format(*facts.shape)
    middle, half = np.array([facts.mean, facts.std])
    ends = None if images else np.stack([middle - half, middle + half])
    if images:
        resizes = "image_size" in settings and shape[:1] == facts.shape[:1]
        if x.dtype != np.uint8 or not (resizes or shape == facts.shape):
            raise ValueError(f"x must be images as uint8, with {sides}")
    elif shape != facts.shape or x.dtype.kind not in ("fiu" if x.ndim == 2 else "f"):
        table = facts.shape[1:] == (1, 1)
        wanted = f"rows of {facts.shape[0]} numbers" if table else f"floats, {sides}"
        raise ValueError(f"x must be {wanted}")
    elif not np.isfinite(x).all():
        raise ValueError("x must be finite")
    size = None if shape == facts.shape else facts.shape[1]
    return lambda some: inputs_of(x[some], ends, size)
