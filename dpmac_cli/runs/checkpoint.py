"""The whole state of a run, on disk, private: enough to go on exactly.

A checkpoint is one safetensors file: the tensors, and in its header a JSON record of everything
else, the secret keys included. Whoever reads those can subtract the noise, so folder and files are
readable by their owner alone. Never pickle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from dpmac_cli.errors import InputError
from dpmac_cli.models.weights import CHECKPOINT_HEADER
from dpmac_cli.runs import folder
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
#: What reading a record leads to that is not as dpmac writes it.
BROKEN = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after some step.

    Attributes:
        tensors: by name, see :meth:`dpmac_cli.training.state.TrainState.tensors`.
        record: JSON values: the step, keys, configuration, history, ledger.
        path: of the file.
        damaged: newer ones, each by its name and what is wrong with it.
    """

    tensors: Mapping[str, Tensor]
    record: Mapping[str, Any]
    path: Path
    damaged: tuple[str, ...] = ()


def save(run: Path, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write a checkpoint whole, then drop all but the last two. Raises OSError."""
    where = folder.private_folder(run)
    note = where / NOTE
    if not note.exists():
        files.write_atomically(note, NOTE_TEXT.encode(), files.PRIVATE_MODE)
    stored = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    sealed = {"version": VERSION, "sha256": digest(stored, record), "record": record}
    content = safetensors.torch.save(
        stored, {CHECKPOINT_HEADER: json.dumps(sealed, allow_nan=False)}
    )
    path = where / f"step-{step:09d}.safetensors"
    files.write_atomically(path, content, files.PRIVATE_MODE)
    for old in _files(run)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def newest(run: Path) -> Checkpoint:
    """The newest whole checkpoint of a run.

    Raises:
        InputError: there is none; every damaged one is named.
    """
    damaged: list[str] = []
    for path in _files(run):
        try:
            return replace(_load(path), damaged=tuple(damaged))
        except (OSError, safetensors.SafetensorError, *BROKEN) as failure:
            damaged.append(f"{path.name} ({failure})")
    if damaged:
        raise InputError(
            f"No checkpoint in {run / FOLDER} is whole: {'; '.join(damaged)}. "
            "The run cannot be resumed; start a new one."
        )
    raise InputError(
        f"{run} holds no checkpoint, so the run cannot be resumed; start a new one, or replace it "
        f"with --force --out {run}."
    )


def last_step(run: Path) -> int | None:
    """The step of a run's newest checkpoint, by its name; None if there is none."""
    return next((int(path.stem.removeprefix("step-")) for path in _files(run)), None)


def discard(run: Path, but: Path | None = None) -> None:
    """Remove every checkpoint of a run but one."""
    for path in _files(run):
        if path != but:
            path.unlink(missing_ok=True)


def _files(run: Path) -> list[Path]:
    """Newest first."""
    return sorted((run / FOLDER).glob(f"step-{'[0-9]' * 9}.safetensors"), reverse=True)


def _load(path: Path) -> Checkpoint:
    with safetensors.safe_open(path, framework="pt") as opened:
        sealed = json.loads((opened.metadata() or {})[CHECKPOINT_HEADER])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if sealed["version"] != VERSION:
        raise ValueError(f"written by another version of dpmac, format {sealed['version']}")
    if sealed["sha256"] != digest(tensors, sealed["record"]):
        raise ValueError("its checksum does not match")
    return Checkpoint(tensors, sealed["record"], path)
