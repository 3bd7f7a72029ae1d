"""Checkpoint: the state of a run after some step, from which it is resumed.

It is one safetensors file with the tensors and, in its header, a JSON record of everything else.
All of it is computed after noise or public, and no secret key is in it: a run that continues from
it draws new noise and batches. Pickle is never used.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from dpmac_cli import files
from dpmac_cli.errors import InputError
from dpmac_cli.models.digest import digest
from dpmac_cli.models.weights import CHECKPOINT_HEADER, unpacked
from dpmac_cli.runs import folder, headers

VERSION = 9
#: Beginning of the names of ranges.
RANGES = "ranges."


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after some step, as :func:`read` returns it.

    Attributes:
        tensors: tensors of the state and, with names that begin with :data:`RANGES`, ranges of a
            table's columns and of its target; by name, on the CPU.
        record: the step, configuration and history.
    """

    tensors: Mapping[str, Tensor]
    record: headers.Record

    @property
    def step(self) -> int:
        """Number of steps taken; 0 before the first."""
        return self.record.state.step

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state: see :meth:`.TrainState.tensors`."""
        return self._named(ranges=False)

    @property
    def ranges(self) -> dict[str, Tensor]:
        """Return the ranges that were counted: see :attr:`.Trainer.ranges`. {} for none."""
        return self._named(ranges=True)

    def _named(self, *, ranges: bool) -> dict[str, Tensor]:
        """Return the tensors that are ranges, or the others, by name."""
        named = dict[str, Tensor]()
        for name, tensor in self.tensors.items():
            if name.startswith(RANGES) == ranges:
                named[name.removeprefix(RANGES)] = tensor
        return named


def path_in(run: Path) -> Path:
    """Return the path of a run's checkpoint, which need not exist.

    Args:
        run: folder of the run.
    """
    return run / folder.CHECKPOINTS / folder.STATE


def save(
    run: Path,
    state: Mapping[str, Tensor],
    ranges: Mapping[str, Tensor],
    record: Mapping[str, Any],
) -> None:
    """Replace the checkpoint of a run, atomically; its folder is created if it is missing.

    Args:
        run: folder of the run, which must exist.
        state, ranges: tensors by name, on any device, as in :class:`Checkpoint`.
        record: everything else, as JSON values: the fields of :class:`.headers.Record`.

    Raises:
        OSError: the file cannot be written. The checkpoint before is unchanged.
        ValueError: a number of the record is not finite.
    """
    stored = dict[str, Tensor]()
    for prefix, tensors in (("", state), (RANGES, ranges)):
        for name, tensor in tensors.items():
            stored[f"{prefix}{name}"] = tensor.detach().cpu().contiguous().clone()
    sealed = {"version": VERSION, "sha256": digest(stored, record), "record": record}
    header = {CHECKPOINT_HEADER: json.dumps(sealed, allow_nan=False)}
    folder.checkpoints(run)
    files.write_atomically(path_in(run), safetensors.torch.save(stored, header))


def read(run: Path) -> Checkpoint:
    """Return the checkpoint of a run, all of which has been compared with its checksum.

    Args:
        run: folder of the run. Nothing in it is changed.

    Raises:
        InputError: it is missing, damaged, or of another format. The message says how to start
            again.
    """
    why = f"{path_in(run)} is damaged"
    try:
        tensors, header = unpacked(path_in(run).read_bytes())
        sealed = json.loads(header[CHECKPOINT_HEADER])
        version = index(sealed["version"])  # a number, whatever the file has
        if version != VERSION:
            why = (
                f"{path_in(run)} was written by another version of dpmac (format {version}; this "
                f"version reads {VERSION})"
            )
        elif sealed["sha256"] == digest(tensors, sealed["record"]):
            record = json.dumps(sealed["record"])
            return Checkpoint(tensors, headers.Record.model_validate_json(record, strict=True))
    except FileNotFoundError:
        why = f"{run} contains no checkpoint"
    except folder.BROKEN:
        pass
    raise InputError(
        f"{why}, so the run cannot be resumed. Start a new one, or replace it with "
        f"{{force=True}} and {{out=}}{run}."
    )
