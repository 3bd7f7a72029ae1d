"""An Opacus program whose batches are dicts, and its port: benchmarks/migration."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.test_private_step import Notes, Reader

FOLDER = Path(__file__).parents[1] / "benchmarks" / "migration"


class Outputs(Reader):
    """The same with outputs that have attributes."""

    def forward(self, **inputs: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(**super().forward(**inputs))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_both_programs_run_at_the_same_cost_and_ours_is_not_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opacus")
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    ours: Any = importlib.import_module("texts_dpmac")
    theirs: Any = importlib.import_module("texts_opacus")

    def network() -> nn.Module:
        torch.manual_seed(0)
        return Outputs()

    # Opacus samples at 1 / ceil(n / 64), which is 64 / n for such an n alone.
    texts = Notes(4 * 64)
    cost = theirs.run(network(), texts, steps=3)
    assert ours.run(network(), texts, steps=3) == pytest.approx(cost, rel=0.01)
    lines = {f.stem: len(f.read_text().splitlines()) for f in FOLDER.glob("texts_*.py")}
    assert lines["texts_dpmac"] <= lines["texts_opacus"]
