"""Predict the targets of new, unlabelled records with a published model."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.data.complaints import complaints, left_out, refuse
from dpmac_cli.data.dataset import standardisation
from dpmac_cli.data.schema import NONE_LEFT_OUT, LeftOut
from dpmac_cli.errors import raise_errors
from dpmac_cli.models.build import Network
from dpmac_cli.release.model_file import Released, load_model, read_facts, text_reader
from dpmac_cli.release.new_records import REMEDY, REMOVE, Unlabelled, read_unlabelled
from dpmac_cli.release.report import Facts
from dpmac_cli.runs.environment import choose_device
from dpmac_cli.storage.files import PRIVATE_MODE, to_csv, write_atomically
from dpmac_cli.storage.progress import LISTENER, Computing
from dpmac_cli.tasks.task import Task
from dpmac_cli.training.evaluation import outputs, places


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of a model for new records.

    Attributes:
        answers: what the network's outputs mean, float32, shape (records, outputs): probabilities
            of classes, or numbers in the units of their targets. NaN if an output contains NaN.
        task: what is predicted.
        records: names of records: file names relative to the folder of images, or rows from 0.
        ids: values of a table's column ``id``, or of another that was named; None without one.
        skipped: records that are left out, and why.
    """

    answers: NDArray[np.float32]
    task: Task
    records: Sequence[str] | Sequence[int]
    ids: Sequence[str] | None = None
    skipped: LeftOut = NONE_LEFT_OUT

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """Answers, by a name that fits classes: float32, shape (records, classes)."""
        return self.answers

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or targets, in the order of the columns."""
        return self.task.names

    @property
    def unanswered(self) -> int:
        """Number of records for which the network's output contains NaN."""
        return int(np.isnan(self.answers).any(1).sum())

    @property
    def predicted(self) -> Sequence[Any]:
        """Prediction for each record, as ``dpmac predict`` writes it.

        The name of the most probable class, "" if the output contains NaN; all labels above one
        half, joined by ";"; a number, NaN if the output is; or several, joined by ";".
        """
        return self.task.columns(self.answers)["predicted"]

    def write(self, path: Path) -> None:
        """Write a .csv that only its owner can read. Raises OSError."""
        columns: dict[str, Sequence[Any]] = {} if self.ids is None else {"id": self.ids}
        columns |= self.task.columns(self.answers)
        if isinstance(self.records[0], int):
            columns = {"row": self.records, **columns}
        else:  # names that are not UTF-8 are escaped
            names = [
                os.fsencode(n).decode(errors="backslashreplace") for n in map(str, self.records)
            ]
            columns = {"file": names, **columns}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        known = ({n: v for n, v in row.items() if v == v} for row in rows)  # noqa: PLR0124  (NaN)
        write_atomically(path, to_csv([*columns], known).encode(), PRIVATE_MODE)


def predict(
    run: Path | str,
    data: Path | str | NDArray[Any] | Sequence[str],
    device: str = "auto",
    factory: str | None = None,
    network: Network | None = None,
    *,
    skip_bad: bool = False,
    id_column: str | None = None,
) -> Predictions:
    """Predict the classes, labels or numbers of new records.

    Args:
        run: a run folder or a model file.
        data: a folder of images or texts, an .npz with an array x, or a table, like the model's
            training data; or the array x itself, or a list of texts.
        device: see ``--device``.
        factory: ``FILE.py:FACTORY`` of a user-supplied model.
        network: instead, a network of the program: see :func:`load_model`.
        skip_bad: leave out unusable records instead of rejecting all.
        id_column: column of a table to keep beside each record; by default ``id``.

    Raises:
        InputError: a file is missing or damaged, or records do not match the training data.
        ModelError: the model cannot be built.
    """
    where = choose_device(device)
    file, facts = read_facts(Path(run))
    released = load_model(file, device=where, factory=factory, network=network)
    reader = text_reader(file, facts)
    records = read_unlabelled(data, file, facts, reader, skip_bad=skip_bad, id_column=id_column)
    _check_some_left(records.path, len(records.names), records.skipped)
    answers = torch.cat([*_answers(released, facts, records, where)]).numpy()
    if not skip_bad:  # only now, because images are decoded one batch after another
        strays, faults = records.skipped.records, records.faults.values()
        raise_errors([*complaints(strays, REMOVE), *complaints([*faults], REMEDY)])
    return _usable(records, answers, facts.task)


def _answers(
    released: Released, facts: Facts, records: Unlabelled, device: torch.device
) -> Iterator[Tensor]:
    """Yield what the model's outputs mean for some records after the other, and report progress."""
    known = facts.input
    gain, offset = standardisation(known.levels, known.mean, known.std, device)
    some = places(len(records.names), known.shape)
    batches = (torch.from_numpy(records.at(rows)).to(device) for rows in some)
    inputs = (torch.addcmul(offset, batch.to(gain.dtype), gain) for batch in batches)
    formed = (each.reshape(len(each), *known.record) for each in inputs)
    done = 0
    for logits in outputs(released.model, formed):
        found = facts.task.answers(logits).cpu()
        yield found
        done += len(found)
        LISTENER.get()(Computing(done, len(records.names), released.path, what="predictions"))


def _usable(records: Unlabelled, answers: NDArray[np.float32], task: Task) -> Predictions:
    """Return the predictions of records without a fault."""
    kept = [row for row in range(len(records.names)) if row not in records.faults]
    skipped = records.skipped + left_out([*records.faults.values()])
    _check_some_left(records.path, len(kept), skipped)
    ids = None if records.ids is None else [records.ids[row] for row in kept]
    names: Any = [records.names[row] for row in kept]
    return Predictions(answers[kept], task, names, ids, skipped)


def _check_some_left(path: Path, count: int, skipped: LeftOut) -> None:
    """Reject data without a record."""
    if not count:
        what = f"{path} contains no records" + " that can be used" * bool(skipped.records)
        refuse([what, *skipped.reasons])
