"""A run of dpmac's ``make_private`` without noise, on chosen records."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from dpmac_cli import ArrayData, make_private
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import DpmacError
from dpmac_cli.models.validation import check_model
from dpmac_cli.runs import prepare
from tests.helpers import Batches
from tests.silent.judge import CLIP_NORM, LR, RECORDS, STEPS, Situation, Weights, records

REFUSALS = (DpmacError,)
#: Situations that were validated, which takes most of the time of a run and sees no record.
_checked: set[Situation] = set()


class Ours:
    """A run of dpmac."""

    def __init__(self, situation: Situation) -> None:
        x, y = records()
        self.net: Any = situation.network()
        options: dict[str, Any] = {"isolate": True} if situation.isolate else {}
        # With records to test on, none is held out.
        data = ArrayData(x, y, x[:3], y[:3], low=-1, high=1, classes=["a", "b", "c"])

        def checked_once(*parts: Any, **options: Any) -> None:
            if situation not in _checked:
                check_model(*parts, **options)
                _checked.add(situation)

        with patch.object(prepare, "check_model", checked_once):
            self.private = make_private(
                situation.wrap(self.net),
                data,
                loss=situation.loss,
                optimizer="dp-sgd",
                lr=LR,
                clip_norm=CLIP_NORM,
                batch_size=RECORDS,
                steps=STEPS,
                sigma=1,
                delta=1e-5,
                seed=0,
                device="cpu",
                **options,
                **situation.settings,
            )
        self.private._step.mechanism = GaussianMechanism(0.0, RECORDS)

    def step(self, rows: Sequence[int]) -> None:
        trainer = self.private._step
        trainer.sampler = Batches(rows)
        self.private.step()

    def follow(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(weights[name])

    def set_clip_norm(self, norm: float) -> None:
        self.private.clip_norm = norm  # type: ignore[attr-defined]  # refused by Python

    def add(self, name: str, layer: nn.Module) -> None:
        self.net.add_module(name, layer)
