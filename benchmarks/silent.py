"""Situations in which training can be silently wrong, in dpmac and in Opacus, with one judge.

    PYTHONPATH=. python benchmarks/silent.py dpmac hooks ghost docs/data/silent.json

runs every situation of tests/silent with those trainers (a minute on one core), replaces their
results in the file, which the site has a table of. ``hooks`` and ``ghost`` are
Opacus, with per-sample gradients by hooks and with ghost clipping, used as its guides say: its
engine, optimizer and criterion, and the loop of a user.
"""

import copy
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.silent.judge import (
    CLIP_NORM,
    LR,
    RECORDS,
    REFUSALS,
    Ours,
    Situation,
    Start,
    Weights,
    judge,
    records,
)
from tests.silent.situations import SITUATIONS


class RefusedError(Exception):
    """Opacus or torch raised an exception of any kind: nothing was silent."""


def loudly(call: Callable[[], Any]) -> Any:
    """Return the result of a call; any exception is a refusal."""
    try:
        return call()
    except Exception as failure:
        raise RefusedError(f"{type(failure).__name__}: {failure}") from failure


class Opacus:
    """A run of Opacus. Its messages may name the size of a batch."""

    def __init__(self, mode: str, situation: Situation) -> None:
        self.net: Any = situation.network()
        criterion: Any = situation.loss or nn.CrossEntropyLoss()
        self.criterion = copy.deepcopy(criterion)
        reduction = self.criterion.reduction
        # With sums, Opacus does not divide by the size of the batch: a user divides the rate.
        rate = LR if reduction == "mean" else LR / RECORDS
        self.ghost = mode == "ghost"

        def make() -> Any:
            module = situation.wrap(self.net)
            return PrivacyEngine().make_private(
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), rate),
                criterion=self.criterion,
                data_loader=DataLoader(TensorDataset(*records()), batch_size=RECORDS),
                noise_multiplier=0.0,
                max_grad_norm=CLIP_NORM,
                poisson_sampling=False,
                loss_reduction=reduction,
                grad_sample_mode=mode,
            )

        self.model, self.optimizer, *rest = loudly(make)
        if self.ghost:
            self.criterion = rest[0]

    def step(self, rows: Sequence[int]) -> None:
        """Take a step on some records."""
        x, y = (part[list(rows)] for part in records())

        def take() -> None:
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()

        loudly(take)

    def follow(self, weights: Weights) -> None:
        """Go on from given weights."""
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(weights[name])

    def set_clip_norm(self, norm: float) -> None:
        """Change the clipping norm, as its documentation shows."""
        self.optimizer.max_grad_norm = norm

    def add(self, name: str, layer: nn.Module) -> None:
        """Add a layer, and give its parameters to the optimizer."""
        self.net.add_module(name, layer)
        self.optimizer.add_param_group({"params": list(layer.parameters())})


TRAINERS: dict[str, tuple[Start, tuple[type[Exception], ...]]] = {
    "dpmac": (Ours, REFUSALS),
    "hooks": (partial(Opacus, "hooks"), (RefusedError,)),
    "ghost": (partial(Opacus, "ghost"), (RefusedError,)),
}


def found(side: str, situation: Situation) -> dict[str, Any]:
    """Return what is kept of a verdict."""
    start, refusals = TRAINERS[side]
    if side != "dpmac":
        situation = replace(situation, weights=())  # they clip the gradient of the weighted loss
    if (situation.settings or situation.isolate) and side != "dpmac":
        return {"outcome": "-"}  # settings of dpmac
    verdict = judge(start, situation, refusals, messages=side == "dpmac")
    message = verdict.message.removeprefix("RefusedError: ")
    line = {"outcome": verdict.outcome, "message": message}
    return line | {"error": rounded(verdict.error), "moved": rounded(verdict.moved)}


def rounded(number: float) -> float | None:
    """Return a number to four digits, or None if it is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None


def main(sides: Sequence[str], out: Path) -> None:
    """Run some sides, and write."""
    kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for side in sides:
        kept[side] = {}
        for situation in SITUATIONS:
            kept[side][situation.name] = line = found(side, situation)
            print(side, situation.name, *line.values(), sep=" | ", flush=True)
    kept["versions"] = {name: version(name) for name in ("opacus", "torch")}
    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    *chosen, file = sys.argv[1:]
    main(chosen, Path(file))
