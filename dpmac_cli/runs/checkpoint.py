"""Checkpoints: the whole state of a run, enough to resume it exactly.

A checkpoint is one safetensors file: the tensors, and in its header a JSON record of everything
else, the secret keys included. Whoever reads those can subtract the noise, so folder and files are
readable by their owner alone. Never pickle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from dpmac_cli.errors import InputError
from dpmac_cli.models.weights import CHECKPOINT_HEADER, unpacked
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import Spent
from dpmac_cli.storage import files
from dpmac_cli.storage.digest import digest

FOLDER = folder.CHECKPOINTS
NOTE = "PRIVATE.txt"
NOTE_TEXT = """\
These files are private. They hold the keys of the noise and of the batches: whoever has them can
subtract the noise from what the run has published and goes on to publish. Do not share, publish or
back them up where others can read. The model to publish is model.safetensors, one folder up.
"""
#: Checkpoints kept: if the newest is damaged, the one before it serves.
KEPT = 2
VERSION = 5


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after some step.

    Attributes:
        tensors: by name, see :meth:`dpmac_cli.training.state.TrainState.tensors`.
        record: JSON values: the step, keys, configuration, history, ledger.
        damaged: newer ones, each by its name and what is wrong with it.
    """

    tensors: Mapping[str, Tensor]
    record: Mapping[str, Any]
    damaged: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return int(self.record["state"]["step"])

    @property
    def spent(self) -> Spent:
        """What the run had spent."""
        return Spent.of(self.record["spent"])


def save(run: Path, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write a checkpoint, then drop all but the last two. Raises OSError."""
    where = folder.private_folder(run)
    if not (where / NOTE).exists():
        files.write_atomically(where / NOTE, NOTE_TEXT.encode(), files.PRIVATE_MODE)
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    sealed = {"version": VERSION, "sha256": digest(stored, record), "record": record}
    header = {CHECKPOINT_HEADER: json.dumps(sealed, allow_nan=False)}
    path = where / f"step-{step:09d}.safetensors"
    files.write_atomically(path, safetensors.torch.save(stored, header), files.PRIVATE_MODE)
    for old in _files(run)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def newest(run: Path) -> Checkpoint:
    """Return the newest whole checkpoint of a run. Raises InputError if there is none."""
    damaged: list[str] = []
    for path in _files(run):
        try:
            return Checkpoint(*_load(path), tuple(damaged))
        except (safetensors.SafetensorError, *folder.BROKEN) as failure:
            damaged.append(f"{path.name} ({failure})")
    why = f"{run} holds no checkpoint"
    if damaged:
        why = f"No checkpoint in {run / FOLDER} is whole ({'; '.join(damaged)})"
    raise InputError(
        f"{why}, so the run cannot be resumed. Start a new one, or replace it with "
        f"--force --out {run}."
    )


def last_step(run: Path) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none."""
    return next((int(path.stem.removeprefix("step-")) for path in _files(run)), None)


def discard(run: Path, but: Path | None = None) -> None:
    """Remove every checkpoint of a run but one."""
    for path in _files(run):
        if path != but:
            path.unlink(missing_ok=True)


def _files(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    return sorted((run / FOLDER).glob(f"step-{'[0-9]' * 9}.safetensors"), reverse=True)


def _load(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    tensors, header = unpacked(path.read_bytes())
    sealed = json.loads(header[CHECKPOINT_HEADER])
    if sealed["version"] != VERSION:
        raise ValueError(f"written by another version of dpmac, format {sealed['version']}")
    if sealed["sha256"] != digest(tensors, sealed["record"]):
        raise ValueError("its checksum does not match")
    return tensors, sealed["record"]
