"""TensorBoard events of a run, from its event stream: ``tensorboard --logdir runs``.

They depend only on the lines of metrics.jsonl. Torch's own writer would add the clock, the host and
the process. Needs ``tensorboard``, an extra.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpmac_cli.config.checks import fault_of_package
from dpmac_cli.errors import raise_errors
from dpmac_cli.release.run import RunEvent
from dpmac_cli.runs import folder
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.storage import files
from dpmac_cli.training.loop import Evaluated

#: Keys that are not curves: their axes, constants of a run, and marks.
NOT_CURVES = ("step", "seconds", "delta", "test_samples", "diverged")


class TensorBoard:
    """Writer of a run's scores for TensorBoard; replaces what an earlier attempt wrote.

    Raises InputError if tensorboard is not installed. :meth:`show` raises OSError if the file
    cannot be written.
    """

    def __init__(self) -> None:
        raise_errors(fault_of_package("tensorboard", "tensorboard", "--tensorboard"))
        self._run: Path | None = None
        self._written = 0

    def show(self, event: RunEvent) -> None:
        """Write the scores of an event, and at the start those from before a run was resumed."""
        if isinstance(event, Started):
            self._run, self._written = event.folder, 0
            file = event.folder / folder.TENSORBOARD
            files.write_atomically(file, _record(wall_time=0.0, file_version="brain.Event:2"))
            self._follow()
        elif isinstance(event, Update) and isinstance(event.event, Evaluated):
            self._follow()

    def _follow(self) -> None:
        """Write the lines of metrics.jsonl that are not in the file yet."""
        assert self._run is not None  # noqa: S101  (a run starts before it is scored)
        lines = files.read_lines(self._run / folder.METRICS)
        file = self._run / folder.TENSORBOARD
        with files.naming(file), file.open("ab") as opened:
            for line in lines[self._written :]:
                opened.write(_record_of(line))
        self._written = len(lines)


def _record_of(line: Mapping[str, Any]) -> bytes:
    """Return the record of one line of metrics.jsonl."""
    values = [
        {"tag": name, "simple_value": _as_float(name, value)}
        for name, value in line.items()
        if isinstance(value, int | float) and name not in NOT_CURVES
    ]
    seconds = line.get("seconds") or 0.0  # of training, instead of the date
    return _record(step=line["step"], wall_time=seconds, summary={"value": values})


def _record(**fields: Any) -> bytes:
    """Return an event in the format of TensorBoard's files."""
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415  (an extra)
    from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  (extra)

    buffer = io.BytesIO()
    RecordWriter(buffer).write(Event(**fields).SerializeToString())
    return buffer.getvalue()


def _as_float(name: str, value: float) -> float:
    """Return the nearest float32; for epsilon the next above, so that it is never understated."""
    nearest = np.float32(value)
    if name == "epsilon" and float(nearest) < value:
        nearest = np.nextafter(nearest, np.float32(np.inf))
    return float(nearest)
