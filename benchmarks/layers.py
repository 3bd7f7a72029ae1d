"""Measure how each layer of tests/layer_cases.py is run, and its cost over plain training.

    PYTHONPATH=. python benchmarks/layers.py docs/data/layers.json
    python docs/generate.py

writes the table of docs/own-network.md (a few minutes on one core). Both kinds of step run in turn
in one process, on the same records; a cost is the median of the ratios of their times.
"""

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from dpmac_cli import ClippedSum, ball
from dpmac_cli.dp.clipping.layer_rules import LAYER_RULES
from dpmac_cli.errors import ModelError
from tests.layer_cases import CASES, Case

RECORDS, ROUNDS = 256, 6


def measured(case: Case) -> dict[str, Any]:
    """Return the row of a case: how its network is run, why not by rules, and the cost."""
    torch.manual_seed(0)
    network, plain, batch = case.build(), case.build(), case.batch(RECORDS)
    known = {"group": case.group, "name": case.name}
    trained = [p for p in network.parameters() if p.requires_grad and not is_lazy(p)]
    like = torch.zeros(max(1, sum(p.numel() for p in trained)))
    try:
        clipped = ClippedSum(network, case.loss, ball(1.0, like), batch_size=RECORDS)
        sums = clipped.prepare(batch)
    except ModelError as failure:
        return {**known, "path": "refused", "why": str(failure).replace("network.", "")}
    alone, layers = sums._isolated, sums.clipped_sum.layers
    why = clipped.notes[0].replace("network.", "") if alone else ""
    if alone:
        path = "isolated, vmap" if alone.vmapped else "isolated, loop"
    else:
        ruled = all(layer.direct or type(layer.module) in LAYER_RULES for layer in layers)
        path = "rule" if ruled else "vmap of a layer"

    def gradient() -> None:
        plain.zero_grad()
        loss: Any = case.loss(plain, batch).mean()
        loss.backward()

    return {**known, "path": path, "why": why, "cost": _ratio(gradient, lambda: clipped(batch))}


def _ratio(plain: Callable[[], object], ours: Callable[[], object]) -> float:
    """Return the median of ratios of the times of two steps that run in turn."""
    ratios = []
    for _ in range(ROUNDS):
        taken = []
        for step in (plain, ours):
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
        ratios.append(taken[1] / taken[0])
    return round(statistics.median(ratios[1:]), 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "There is a performance drop")
    rows = []
    for number, each in enumerate(CASES, 1):
        rows.append(measured(each))
        print(f"{number}/{len(CASES)}", rows[-1], file=sys.stderr)
    found = {"torch": torch.__version__, "records": RECORDS, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
