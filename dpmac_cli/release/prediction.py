"""Predict the targets of new, unlabelled records by a published model."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.config.facts import NONE_LEFT_OUT, TABLES, LeftOut
from dpmac_cli.config.records import Records
from dpmac_cli.config.settings import THRESHOLD, Settings
from dpmac_cli.data.cache import Rows
from dpmac_cli.data.dataset import Declaration
from dpmac_cli.data.in_memory import as_new
from dpmac_cli.data.layout import channels_first, inputs_of
from dpmac_cli.data.read import read_new
from dpmac_cli.data.reader import kind_of
from dpmac_cli.data.table_schema import schema_of
from dpmac_cli.data.text_folder import SUFFIX
from dpmac_cli.dp.torch_errors import code_of_task
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.files import PRIVATE_MODE, to_csv, write_atomically
from dpmac_cli.models.dataset import scaling_of
from dpmac_cli.models.trial_samples import dtype_of
from dpmac_cli.progress import report
from dpmac_cli.release.model_file import Released
from dpmac_cli.tasks.regression import Regression
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import outputs, places

#: Names of the readers of the package. Readers of programs may read what any model takes.
KINDS = ("images", "texts", "tables", "array files", "arrays")
ARRAYS = ("array files", "arrays")


def _declared(
    data: object, released: Released, *, skip_bad: bool, id_column: str | None
) -> Declaration:
    """Return new records for a model as they are declared: like those that it was trained on.

    Args:
        data: a path, or records in memory.
        released: the model, whose facts say the kind of records and the schema of a table.
        skip_bad: whether to leave out unusable records instead of rejecting all.
        id_column: column of a table to keep beside each record; None for ``id``, if there is one.
    """
    facts, settings = released.facts, released.facts.settings
    names = ("image_size", "channels", "levels")
    known = {name: getattr(settings, name) for name in names}
    dataset: Any = str(data) if isinstance(data, Path | str) else as_new(data)
    table = facts.data.table
    return Declaration(
        Settings.model_validate(known).replace(dataset=dataset, skip_bad=skip_bad),
        None if table is None else schema_of(table, f"{dataset}: the schema of the model"),
        released.reader,
        labels=False,
        shape=facts.data.records.shape,
        id_column=id_column,
    )


def _misfits(declared: Declaration, released: Released) -> Iterator[str]:
    """Yield why new records cannot be those for a model, one reason each; nothing if they fit."""
    file, facts, reader = released.path, released.facts, released.reader
    path = declared.path
    kinds: tuple[str, ...] = ("images", *ARRAYS)
    wanted = "images: use a folder of images or an .npz"
    if facts.data.table is not None:
        kinds, wanted = ("tables",), f"a table: use one ({', '.join(TABLES)})"
    elif reader is not None:
        kinds = ("texts", *ARRAYS)
        wanted = f"texts: use a folder of texts ({SUFFIX}), or an .npz of texts"
    elif facts.data.records.kind == "numbers":
        kinds, wanted = ARRAYS, "rows of numbers: use an .npz"
    if declared.in_memory is None and not os.path.exists(path):
        # It may be a text, which no message shows.
        texts = "There is no such file or folder. Pass texts as a list, such as [text]."
        yield f"{path} does not exist." if reader is None else texts
    elif kind_of(declared) in {"", *KINDS} - {*kinds}:
        yield f"{path} does not fit {file}, which was trained on {wanted}."
    if declared.id_column is not None and facts.data.table is None:
        yield f"{{id=}}{declared.id_column} names a column, but {file} was not trained on a table."


def _check_new(x: Any, path: Path, records: Records) -> None:
    """Raise InputError if new records are not of the kind and shape that a model takes.

    Args:
        x: the records, shape (records, ...); images may have their channels last, or none.
        path: where they are from, for the message.
        records: kind, shape and scaling of the records that the model was trained on.
    """
    if isinstance(x, Rows):
        return  # decoded as the model needs them
    is_image = records.kind == "images"
    rank = len(records.shape)
    ranks = (3, 4) if is_image else (rank + 1,)
    in_shape = x.ndim in ranks and channels_first(x[:1]).shape[1:] == records.shape
    names = ("channels", "height", "width")[-rank:]
    sides = ", ".join(f"{name}: {side}" for name, side in zip(names, records.shape, strict=False))
    if is_image:
        wanted, of_type = f"images as uint8, with {sides}", x.dtype == np.uint8
    elif rank == 1:
        wanted, of_type = f"rows of {records.size} numbers", x.dtype.kind in "fiu"
    else:
        wanted, of_type = f"floats, {sides}", x.dtype.kind == "f"
    fits = in_shape and of_type
    if fits and not is_image and not np.isfinite(x).all():
        wanted, fits = "finite", False
    if not fits:
        raise InputError(f"{path}: x must be {wanted}, not {x.dtype} of shape {x.shape}.")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a model for new records.

    Attributes:
        outputs: outputs of the network, float32 or float64, shape (records, outputs).
        task: what is predicted.
        records: names of records: file names relative to the folder of images, or rows from 0.
        ids: values of a table's column ``id``, or of another that was named; None without one.
        skipped: records that are left out, and why; empty unless ``skip_bad`` was set.
        texts: how a language model continues each record; None for other models.
        remarks: notes on cells that count as missing, each a sentence without its full stop; facts
            of the records, which are private. () without any.
    """

    outputs: NDArray[Any]
    task: Task
    records: Sequence[str] | Sequence[int]
    ids: Sequence[str] | None = None
    skipped: LeftOut = NONE_LEFT_OUT
    texts: Sequence[str] | None = None
    remarks: tuple[str, ...] = ()

    @cached_property
    def answers(self) -> NDArray[np.float32]:
        """Meaning of the outputs, float32, shape (records, outputs); NaN in rows that contain NaN.

        Probabilities of classes, calibrated if the model is, each row with sum 1; or numbers on the
        scale of their targets.
        """
        with code_of_task():
            return self.task.answers(self.outputs)

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Answers, by a name that fits classes: float32, shape (records, classes)."""
        return self.answers

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or of the target, in the order of the columns of :attr:`answers`."""
        return self.task.names

    @property
    def unanswered(self) -> int:
        """Number of records for which the network's output contains NaN."""
        return int(np.isnan(self.outputs).any(1).sum())

    @property
    def predicted(self) -> Sequence[Any]:
        """Prediction for each record, as ``dpmac predict`` writes it.

        For a classifier the name of the class that is decided on, "" if the output contains NaN.
        For numbers a number, NaN if the output is. For a language model how a text continues.
        """
        return self.columns["predicted"]

    @property
    def columns(self) -> dict[str, Sequence[Any]]:
        """Values of the records by the columns of the task, as ``dpmac predict`` writes them.

        They are "predicted", and probabilities of classes ("p_NAME"), or "low" and "high" of the
        interval of a number, if the model has intervals.
        """
        texts = {} if self.texts is None else {"predicted": self.texts}
        with code_of_task():
            return texts | self.task.columns(self.outputs)

    def write(self, path: Path) -> None:
        """Write a .csv with one row per record, which only its owner can read.

        Its columns are ``row`` or ``file``, ``id`` if there are ids, and those of the task; see
        :meth:`dpmac_cli.tasks.task.Task.columns`.

        Args:
            path: the file. An existing one is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        columns: dict[str, Sequence[Any]] = {} if self.ids is None else {"id": self.ids}
        columns |= self.columns
        if isinstance(self.records[0], int):
            columns = {"row": self.records, **columns}
        else:
            columns = {"file": [_in_utf8(str(name)) for name in self.records], **columns}
        rows = (_known(columns, row) for row in zip(*columns.values(), strict=True))
        write_atomically(path, to_csv([*columns], rows).encode(), PRIVATE_MODE)


def _in_utf8(name: str) -> str:
    """Return the name of a file, in which bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _known(columns: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    """Return the values of a row by their columns, without those that are NaN.

    Args:
        columns: names of the columns.
        values: the values of the row, in the same order.
    """
    row = dict(zip(columns, values, strict=True))
    return {name: value for name, value in row.items() if value == value}  # noqa: PLR0124


def predict(
    released: Released,
    data: Any,
    *,
    skip_bad: bool = False,
    id_column: str | None = None,
    length: int | None = None,
    temperature: float | None = None,
    threshold: str | float | None = None,
    level: float | None = None,
) -> Predictions:
    """Predict for new records; see :meth:`dpmac_cli.Run.predict` for arguments and errors.

    ``released`` is the model. Records that were left out because of ``skip_bad`` have no row in the
    result, and are listed in ``skipped``.
    """
    task = _at_level(_at(released, threshold), level, released.path)
    declared = _declared(data, released, skip_bad=skip_bad, id_column=id_column)
    raise_errors(_misfits(declared, released))
    reading = read_new(declared)
    x = reading.arrays["x"]
    names = reading.arrays["name"]
    ids = reading.arrays.get("id")
    _check_new(x, declared.path, released.facts.data.records)
    inputs = partial(_inputs, x, released.facts.data.records, released.device)
    logits = _outputs(released, inputs(), len(x))
    texts = _continued(released, inputs(), length, temperature)
    return Predictions(logits, task, names, ids, reading.left_out, texts, reading.remarks)


def _at(released: Released, threshold: str | float | None) -> Task:
    """Return the task of a model, at another operating point if there is one.

    Args:
        released: the model.
        threshold: "balanced", "sensitivity=0.9", a probability or "most-likely"; None for the
            model's own.

    Raises:
        InputError: the model has no such point.
    """
    task = released.facts.task
    if threshold is None:
        return task
    asked = str(threshold)
    try:
        THRESHOLD.check(asked)
        return task.at(asked)
    except ValueError as failure:
        raise InputError(
            f"{{threshold=}}{asked} does not fit {released.path}: {failure}."
        ) from failure


def _at_level(task: Task, level: float | None, path: Path) -> Task:
    """Return a task with intervals of another level if there is one.

    Args:
        task: task of the model.
        level: share of the targets that an interval has; None for the task's own.
        path: the model file, for the message.

    Raises:
        InputError: the model has no intervals, or the level is not between 0 and 1.
    """
    if level is None:
        return task
    has_intervals = isinstance(task, Regression) and task.residuals is not None
    if not isinstance(task, Regression) or not has_intervals or not 0 < level < 1:
        raise InputError(
            f"{{level=}}{level} is a share between 0 and 1 for the intervals of numbers, of which "
            f"{path} has {'some' if has_intervals else 'none'}."
        )
    return replace(task, level=level)


#: Tokens that a language model adds to a text by default.
LENGTH = 50


def _continued(
    released: Released, batches: Iterator[Tensor], length: int | None, temperature: float | None
) -> list[str] | None:
    """Return how a language model continues texts; None for other models.

    Args:
        released: the model.
        batches: tokens of the texts, each of shape (texts, tokens).
        length: number of tokens to add; None for :data:`LENGTH`.
        temperature: of the draws; 0 for the most probable tokens, None for 1.

    Raises:
        InputError: it is no language model, but a length or a temperature is set.
    """
    if released.reader is None or released.facts.task.network is None:
        if (length, temperature) != (None, None):
            raise InputError(
                "{length} and {temperature} are for language models, but "
                f"{released.path} predicts {released.facts.task.described}. Leave them out."
            )
        return None
    model: Any = released.model.get_submodule("frozen")
    if temperature is None:
        temperature = 1.0
    texts = list[str]()
    for batch in batches:
        for tokens in model.continued(batch, length or LENGTH, temperature):
            texts.append(released.reader.tokenizer.decode(tokens))
    return texts


def _inputs(x: Any, records: Records, device: torch.device) -> Iterator[Tensor]:
    """Yield some records after the other as the network takes them.

    Args:
        x: all records, shape (records, ...), or decoded images on disk.
        records: kind of the records, with the public constants that scale them.
        device: device of the network.
    """
    gain, offset = scaling_of(records, device)
    for rows in places(len(x), records.shape):
        some = x[rows]
        values = some.read() if isinstance(some, Rows) else inputs_of(some, records)
        batch = torch.from_numpy(values).to(device)
        if isinstance(some, Rows):  # convolutions are faster
            batch = batch.contiguous(memory_format=torch.channels_last)
        yield torch.addcmul(offset, batch.to(gain.dtype), gain)


def _outputs(
    released: Released, batches: Iterator[Tensor], count: int
) -> NDArray[np.floating[Any]]:
    """Return the model's outputs for all records, shape (records, outputs), and report progress.

    Args:
        released: the model.
        batches: records as the network takes them, some after the other.
        count: number of all records, for the progress.
    """
    done = 0
    kind = torch.promote_types(dtype_of(released.model), torch.float32)
    # Small arrays that stay between large batches that go would keep the memory of all of them.
    all_logits = torch.empty(count, released.facts.task.outputs, dtype=kind)
    for logits in outputs(released.model, batches):
        all_logits[done : done + len(logits)] = logits
        done += len(logits)
        report(done, count, released.path, "predictions")
    return all_logits.numpy()
