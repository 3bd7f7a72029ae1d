"""TensorBoard events from the lines of metrics.jsonl: ``tensorboard --logdir runs``.

They depend on those lines alone; torch's own writer would add clock, host and process. Needs
``tensorboard``, an extra.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.runs import folder
from dpmac_cli.storage import files

#: Keys that are no curves: their axes, constants of a run, and marks.
NO_CURVES = ("step", "seconds", "delta", "test_samples", "diverged")
#: TensorBoard reads every file with "tfevents" in its name.
FILE = "events.out.tfevents.dpmac"


class EventLog:
    """The events of a run. Replaces those that are there, which may lie past its checkpoint.

    The constructor and :meth:`follow` raise OSError.
    """

    def __init__(self, run: Path) -> None:
        where = run / folder.EVENTS
        if where.exists():
            shutil.rmtree(where)
        where.mkdir()
        self._path, self._written = where / FILE, 0
        self._append(wall_time=0.0, file_version="brain.Event:2")

    def follow(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of a run's history that are not in the file yet."""
        for line in history[self._written :]:
            values = [
                {"tag": name, "simple_value": _as_float(name, value)}
                for name, value in line.items()
                if isinstance(value, int | float) and name not in NO_CURVES
            ]
            seconds = line.get("seconds", 0.0)  # of training, instead of the date
            self._append(step=line["step"], wall_time=seconds, summary={"value": values})
            self._written += 1

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  (an extra)
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  (extra)

        with files.naming(self._path), self._path.open("ab") as file:
            RecordWriter(file).write(Event(**fields).SerializeToString())


def _as_float(name: str, value: float) -> float:
    """Return the nearest float32; for epsilon the next above, to never understate it."""
    nearest = np.float32(value)
    if name == "epsilon" and float(nearest) < value:
        nearest = np.nextafter(nearest, np.float32(np.inf))
    return float(nearest)
