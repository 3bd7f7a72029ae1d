"""TensorBoard events of a run, from its lines of metrics.jsonl: ``tensorboard --logdir runs``."""

from typing import TYPE_CHECKING

import numpy as np

from dpmac_cli.config.checks import fault_of_package
from dpmac_cli.errors import raise_errors
from dpmac_cli.release.run import RunEvent
from dpmac_cli.runs import folder
from dpmac_cli.runs.loop import Evaluated
from dpmac_cli.runs.session import Started, Update
from dpmac_cli.storage import files

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

#: Keys that are not curves: their axes, constants of a run, and marks.
NOT_CURVES = ("step", "seconds", "delta", "test_samples", "diverged")


class TensorBoard:
    """Writer of a run's scores for TensorBoard; replaces what an earlier attempt wrote.

    Raises InputError if tensorboard, an extra, is not installed. :meth:`show` raises OSError if
    the file cannot be written.
    """

    def __init__(self) -> None:
        raise_errors(fault_of_package("tensorboard", "tensorboard", "--tensorboard"))
        self._writer: SummaryWriter | None = None
        self._written = 0

    def show(self, event: RunEvent) -> None:
        """Write the scores of an event, and at the start those from before a run was resumed."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (loads an extra)

        if isinstance(event, Started):
            for earlier in event.folder.glob(folder.TENSORBOARD):
                earlier.unlink()
            self._writer, self._written = SummaryWriter(event.folder), 0
        elif not (isinstance(event, Update) and isinstance(event.event, Evaluated)):
            return
        assert self._writer is not None  # noqa: S101  (a run starts before it is scored)
        lines = files.read_lines(self._writer.log_dir / folder.METRICS)
        for line in lines[self._written :]:
            for name, value in line.items():
                if isinstance(value, int | float) and name not in NOT_CURVES:
                    self._writer.add_scalar(name, _as_float(name, value), line["step"])
        self._written = len(lines)
        self._writer.flush()


def _as_float(name: str, value: float) -> float:
    """Return the nearest float32; for epsilon the next above, so that it is never understated."""
    nearest = np.float32(value)
    if name == "epsilon" and float(nearest) < value:
        nearest = np.nextafter(nearest, np.float32(np.inf))
    return float(nearest)
