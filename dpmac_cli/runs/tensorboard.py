"""The lines of metrics.jsonl as events that TensorBoard shows: ``tensorboard --logdir runs``.

They are a function of those lines: no clock, host or process goes into them, as those that torch's
own writer makes do. Loads ``tensorboard``, an extra, when the first one is written.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.runs import folder
from dpmac_cli.storage import files

#: What is no curve: the axes of all of them, and what a run never changes.
NO_CURVES = ("step", "seconds", "delta", "test_samples")
#: TensorBoard reads every file with "tfevents" in its name; a session of a run has one.
FILE = "events.out.tfevents.dpmac"
VERSION = "brain.Event:2"


@dataclass
class EventLog:
    """The events of a run, which follow its history.

    Attributes:
        path: of the file. written: how many lines of the history are in it.
    """

    path: Path
    written: int = 0

    @classmethod
    def begin(cls, run: Path) -> "EventLog":
        """Begin anew: what a run showed past its checkpoint, it shows again. Raises OSError."""
        where = run / folder.EVENTS
        if where.exists():
            shutil.rmtree(where)
        where.mkdir()
        log = cls(where / FILE)
        log._append(wall_time=0.0, file_version=VERSION)
        return log

    def follow(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines that are not there yet. Raises OSError, naming the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  (an extra)

        for line in history[self.written :]:
            values = [
                Summary.Value(tag=name, simple_value=_as_float(name, value))
                for name, value in curves(line).items()
            ]
            seconds = line.get("seconds", 0.0)  # of training, instead of the date
            self._append(step=line["step"], wall_time=seconds, summary=Summary(value=values))
            self.written += 1

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  (an extra)
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415

        with files.naming(self.path), self.path.open("ab") as file:
            RecordWriter(file).write(Event(**fields).SerializeToString())


def curves(line: Mapping[str, Any]) -> dict[str, float]:
    """What TensorBoard shows of a line of metrics.jsonl: every finite number that may change."""
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, float | int) and not isinstance(value, bool) and name not in NO_CURVES
    }


def _as_float(name: str, value: float) -> float:
    """The nearest float32; of a price the next above: it is never shown smaller than it is."""
    nearest = np.float32(value)
    if name == "epsilon" and float(nearest) < value:
        nearest = np.nextafter(nearest, np.float32(np.inf))
    return float(nearest)
