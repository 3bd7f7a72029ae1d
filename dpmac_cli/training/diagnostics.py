"""Diagnostics: losses and norms computed without noise. NOT private."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpmac_cli.storage import files
from dpmac_cli.training.hooks import Hook

DIAGNOSTICS_WARNING = (
    "NOT PRIVATE: these values were computed from the training records without noise. "
    "Publishing them, or choosing by them, voids the guarantee in report.json."
)


@dataclass(frozen=True)
class Diagnosis:
    """Averages over the samples of some steps; no norms in a run without clipping. NOT private."""

    samples: int
    not_finite: int  # samples without a finite gradient; the averages are of the others
    mean_loss: float | None
    mean_norm: float | None  # of centred gradients, in units of the clipping norm
    clipped_share: float | None  # 0 to 1


class Diagnostics(Hook):
    """Collects losses and norms for --diagnostics, and compares them if the run clips."""

    def __init__(self, clipped: bool) -> None:
        self._clips = clipped
        self._seen = [torch.zeros(2, 0)]

    def observe(self, losses: Tensor, norms: Tensor) -> None:
        """Keep a chunk's per-sample losses and whitened norms, shape (samples,) each."""
        self._seen.append(torch.stack([losses, norms]))

    def flush(self, file: Path, step: int) -> Diagnosis:
        """Average what was seen since the last time, and append it to a file."""
        every = torch.cat([part.cpu() for part in self._seen], 1)
        del self._seen[1:]
        losses, norms = every[:, every[1].isfinite()]
        seen = len(norms)
        clipped = seen and self._clips
        diagnosis = Diagnosis(
            samples=every.shape[1],
            not_finite=every.shape[1] - seen,
            mean_loss=float(losses.mean()) if seen else None,
            mean_norm=float(norms.mean()) if clipped else None,
            clipped_share=float((norms > 1).double().mean()) if clipped else None,
        )
        if not file.exists():
            files.append_line(file, {"warning": DIAGNOSTICS_WARNING}, files.PRIVATE_MODE)
        files.append_line(file, {"step": step, **vars(diagnosis)}, files.PRIVATE_MODE)
        return diagnosis
