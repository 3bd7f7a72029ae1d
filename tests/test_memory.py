"""Memory: a few vectors as long as theta, and nothing that grows with the batch beyond a chunk."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.engine import Plan
from tests.conftest import OPTIMIZER_NAMES
from tests.helpers import CLASSES, SIDE, make_trainer, tiny_data

WIDTH = 2000
PLAN = Plan(steps=100, steps_per_epoch=10, physical_batch=1000)
MIB = 2**20


def wide_model() -> nn.Sequential:
    """Eight million parameters, nearly all of them in one layer."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE**2, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.ReLU(),
        nn.Linear(2 * WIDTH, CLASSES),
    )


def peak_bytes(work: Callable[[], None]) -> int:
    """The most bytes of tensors that some work holds at a time."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def peak_of(name: str, expected: int, plan: Plan) -> int:
    """Of building a trainer and three steps at an expected batch."""
    data = tiny_data(torch.float32, records=4 * expected)

    def work() -> None:
        model = wide_model()
        mechanism = GaussianMechanism(1e-3, expected)
        # Little noise in a wide ellipsoid: what goes on in float64, where m/b is large, takes more.
        wide: dict[str, Any] = {"h1": 1.0, "h2": 2.0}
        trainer = make_trainer(name, mechanism, plan=plan, data=data, model=model, **wide)
        for _ in range(3):
            trainer.step()

    return peak_bytes(work)


@pytest.mark.parametrize("physical_batch", [1000, 8])
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_a_step_takes_ten_vectors(name: str, physical_batch: int) -> None:
    """Weights included, and what a block of coordinates needs, which does not grow with d."""
    d = sum(p.numel() for p in wide_model().parameters())
    peak = peak_of(name, 16, replace(PLAN, physical_batch=physical_batch))
    assert peak <= 10 * 4 * d + 24 * MIB


@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_batch_costs_no_more_than_its_activations(name: str) -> None:
    """Per-sample gradients would take 31 MiB a sample."""
    small, large = (peak_of(name, batch, PLAN) for batch in (16, 400))
    activations = 4 * (SIDE**2 + 2 * WIDTH + 4 * WIDTH + CLASSES)  # with their gradients
    # Their squares are as large again, and a contraction.
    assert large - small <= 5 * 450 * activations


@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_batch_costs_nothing_beyond_its_chunk(name: str) -> None:
    plan = replace(PLAN, physical_batch=16)
    small, large = (peak_of(name, batch, plan) for batch in (64, 400))
    assert large <= small + MIB
