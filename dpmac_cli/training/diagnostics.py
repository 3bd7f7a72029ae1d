"""Diagnostics: losses and norms computed without noise. NOT private."""

from dataclasses import dataclass, field
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
    """Averages over the samples of some steps. NOT private.

    Attributes:
        samples: seen. not_finite: how many of them had no finite gradient.
        mean_loss: of the others.
        mean_norm: of their centred gradients, in units of the clipping norm.
        clipped_share: of them, 0 to 1. Both are None in a run that does not clip.
    """

    samples: int
    not_finite: int
    mean_loss: float | None
    mean_norm: float | None
    clipped_share: float | None


@dataclass
class Diagnostics(Hook):
    """Collects losses and norms for --diagnostics. NOT private.

    Attributes:
        clipped: whether the run clips; there is no norm to compare to otherwise.
    """

    clipped: bool
    _losses: list[Tensor] = field(default_factory=list)
    _norms: list[Tensor] = field(default_factory=list)

    def observe(self, losses: Tensor, norms: Tensor) -> None:
        """Keep a chunk's per-sample losses and whitened norms, shape (samples,) each."""
        self._losses.append(losses)
        self._norms.append(norms)

    def flush(self, file: Path, step: int) -> Diagnosis:
        """Average what was seen since the last time, and append it to a file."""
        losses = torch.cat(self._losses or [torch.zeros(0)])
        norms = torch.cat(self._norms or [torch.zeros(0)])
        self._losses.clear()
        self._norms.clear()
        finite = torch.isfinite(norms)
        seen = int(finite.sum())
        clipped = seen and self.clipped
        diagnosis = Diagnosis(
            samples=len(norms),
            not_finite=len(norms) - seen,
            mean_loss=float(losses[finite].mean()) if seen else None,
            mean_norm=float(norms[finite].mean()) if clipped else None,
            clipped_share=float((norms[finite] > 1).double().mean()) if clipped else None,
        )
        if not file.exists():
            files.append_line(file, {"warning": DIAGNOSTICS_WARNING}, files.PRIVATE_MODE)
        files.append_line(file, {"step": step, **vars(diagnosis)}, files.PRIVATE_MODE)
        return diagnosis
