"""Situations in which a library can be silently wrong: dpmac is right, or refuses and says why."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.silent.judge import (
    CLIP_NORM,
    LR,
    RECORDS,
    REFUSALS,
    Oracle,
    Ours,
    Situation,
    Weights,
    judge,
    norm_of,
    records,
    weights_of,
)
from tests.silent.situations import SITUATIONS, Net
from tests.tiers import one_in

KEPT = json.loads((Path(__file__).parents[1] / "docs" / "data" / "silent.json").read_text())
ORDINARY = Situation("ordinary", Net)

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # vmap, in isolation
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.promise("silent")
@pytest.mark.parametrize(
    "situation",
    one_in(
        9,
        (
            pytest.param(each, id=each.name, marks=[pytest.mark.long] if each.long else [])
            for each in SITUATIONS
        ),
    ),
)
def test_a_step_is_right_or_refused(situation: Situation) -> None:
    verdict = judge(Ours, situation, REFUSALS)
    assert verdict.outcome == ("refused" if situation.refused else "right"), verdict
    assert re.search(situation.refused, verdict.message), verdict
    assert verdict.outcome == KEPT["dpmac"][situation.name]["outcome"]


def test_every_situation_is_in_the_documentation() -> None:
    names = [situation.name for situation in SITUATIONS]
    assert len(set(names)) == len(names) >= 54
    for side in ("before", "dpmac", "hooks", "ghost"):
        assert list(KEPT[side]) == names


# The judge.


class Honest:
    """DP-SGD in float32, record by record; variants break it."""

    def __init__(self, situation: Situation) -> None:
        self.situation, self.net, self.changed = situation, situation.network(), False
        self.clip_norm = CLIP_NORM

    def sized(self, gradients: list[Weights]) -> list[Weights]:
        """Clip the gradients, and divide by the size of the batch."""
        factors = [min(1.0, self.clip_norm / float(norm_of(g))) / RECORDS for g in gradients]
        return [
            {n: f * part for n, part in g.items()} for f, g in zip(factors, gradients, strict=True)
        ]

    def step(self, rows: Sequence[int]) -> None:
        at, oracle = weights_of(self.net), Oracle(self.situation)
        gradients = [oracle.gradient(at, row, changed=self.changed) for row in rows]
        with torch.no_grad():
            for g in self.sized(gradients):
                for name, p in self.net.named_parameters():
                    p.sub_(g[name], alpha=LR)
        self.changed = True

    def follow(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(weights[name])

    def set_clip_norm(self, norm: float) -> None:
        self.clip_norm = norm

    def add(self, name: str, layer: Any) -> None:
        raise NotImplementedError


class NotClipped(Honest):
    def sized(self, gradients: list[Weights]) -> list[Weights]:
        return [{n: part / RECORDS for n, part in g.items()} for g in gradients]


class ByBatch(Honest):
    """Divides by the number of records drawn."""

    def sized(self, gradients: list[Weights]) -> list[Weights]:
        scale = RECORDS / len(gradients)
        return [{n: scale * part for n, part in g.items()} for g in super().sized(gradients)]


class OneLayer(Honest):
    """Forgets a layer: protected, and not what was asked."""

    def sized(self, gradients: list[Weights]) -> list[Weights]:
        return [{**g, "first.bias": 0 * g["first.bias"]} for g in super().sized(gradients)]


class StopsIfLarge(Honest):
    """Refuses a batch with the largest gradient, and so tells whether it was there."""

    def step(self, rows: Sequence[int]) -> None:
        if 3 in rows:
            raise REFUSALS[0]("No.")


class Remembers(Honest):
    """Adds to each step the mean of the batches before, which no clipping has seen."""

    seen = torch.zeros(())

    def step(self, rows: Sequence[int]) -> None:
        super().step(rows)
        with torch.no_grad():
            self.net.second.bias.add_(self.seen)  # type: ignore[union-attr,operator]
        self.seen = records()[0][list(rows)].sum()


@pytest.mark.promise("silent")
@pytest.mark.parametrize(
    ("trainer", "outcome"),
    [
        (Honest, "right"),
        (NotClipped, "open"),
        (ByBatch, "open"),
        (OneLayer, "wrong"),
        (StopsIfLarge, "open"),
        (Remembers, "open"),
    ],
)
def test_the_judge_finds_a_wrong_and_an_unprotected_trainer(
    trainer: type[Honest], outcome: str
) -> None:
    assert judge(trainer, ORDINARY, REFUSALS).outcome == outcome
