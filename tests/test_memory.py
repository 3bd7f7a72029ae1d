"""Memory: a few vectors as long as theta, and nothing that grows with the batch beyond a chunk."""

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import RunError
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.chunks import first_chunk
from dpmac_cli.training.schedules import StepPlan
from tests.helpers import (
    CLASSES,
    SIDE,
    Batches,
    make_trainer,
    tiny_data,
    walk,
)

WIDTH = 2000
PLAN = StepPlan(steps=100, steps_per_epoch=10, physical_batch=1000)
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
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        work()
    assert profiled.profiler is not None
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def peak_of(name: str, expected: int, plan: StepPlan) -> int:
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


@pytest.mark.long
@pytest.mark.parametrize("physical_batch", [1000, 8])
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadambc"])
def test_a_step_takes_ten_vectors(name: str, physical_batch: int) -> None:
    """Weights included, and what a block of coordinates needs, which does not grow with d."""
    d = sum(p.numel() for p in wide_model().parameters())
    peak = peak_of(name, 16, replace(PLAN, physical_batch=physical_batch))
    assert peak <= 10 * 4 * d + 24 * MIB


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_batch_costs_nothing_beyond_its_chunk(name: str) -> None:
    plan = replace(PLAN, physical_batch=16)
    small, large = (peak_of(name, batch, plan) for batch in (64, 400))
    assert large <= small + MIB


# Memory that runs out.

FAULTS: tuple[Callable[[], BaseException], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError,
)


def too_many(
    trainer: Trainer, most: Callable[[int], int], fault: Callable[[], BaseException] = FAULTS[0]
) -> list[int]:
    """Have memory run out in chunks of more samples than ``most`` of the chunk's number.

    The sizes of the others are in what is returned. A chunk fails when all its work is done.
    """
    whole, tried, sizes = trainer.sums.clipped_sum.of, itertools.count(), []

    def of(x: Tensor, y: Tensor, metric: RegionMetric, out: Tensor, samples: int) -> None:
        whole(x, y, metric, out, samples)
        if samples > most(next(tried)):
            out.fill_(torch.nan)
            raise fault()
        sizes.append(samples)

    trainer.sums.clipped_sum.of = of  # type: ignore[assignment,method-assign]
    return sizes


def chunked(name: str, records: int = 600, **kwargs: Any) -> Trainer:
    """Batches of all 600 records in chunks of at most 256, in float32."""
    data = tiny_data(torch.float32, records=records)
    batches = Batches(range(records))
    plan = replace(PLAN, physical_batch=256)
    mechanism = GaussianMechanism(1.0, records)
    return make_trainer(
        name, mechanism, plan=plan, dtype=torch.float32, data=data, sampler=batches, **kwargs
    )


@pytest.mark.promise("faults")
@pytest.mark.parametrize("fault", FAULTS, ids=["cuda", "cpu", "python"])
def test_when_memory_runs_out_chunks_are_halved_and_the_sum_is_the_same(
    fault: Callable[[], BaseException],
) -> None:
    rows, name = np.arange(600), "dp-macadam"
    for most in (lambda n: 100, lambda n: 256 if n < 1 else 100, lambda n: 256 if n < 2 else 7):
        trainer, undisturbed = chunked(name), chunked(name)
        walk(trainer, 2)  # so that the ellipsoid has a centre
        walk(undisturbed, 2)
        sizes = too_many(trainer, most, fault)
        found = trainer._clip_and_sum(rows).double()
        expected = undisturbed._clip_and_sum(rows).double()
        assert (found - expected).norm() <= 1e-6 * expected.norm()
        assert sum(sizes) == 600
        assert max(sizes[-2:]) <= trainer.state.chunk in (128, 64, 4)


@pytest.mark.promise("faults")
def test_smaller_chunks_are_clipped_as_the_configured_ones() -> None:
    """The room for rounding is that of the chunk that was to be summed at once."""
    most = first_chunk(1 << 17, 1 << 17)
    trainer = make_trainer(
        "dp-sgd",
        GaussianMechanism(1.0, 1 << 17),
        plan=replace(PLAN, physical_batch=1 << 17),
        dtype=torch.float32,
        clip_norm=1e-3,
        sampler=Batches([0, 1, 2, 3]),
    )
    too_many(trainer, lambda n: 1)
    trainer.step()
    assert trainer.state.chunk == 1
    norm = trainer._clip_and_sum(np.array([0])).double().norm().item() / 1e-3
    assert norm == pytest.approx(clip_limit(most), rel=1e-5)
    assert norm == pytest.approx(1 / (1 + most / 1024 * 6e-4), rel=1e-5)


def test_a_single_sample_that_does_not_fit_is_an_error() -> None:
    trainer = chunked("dp-macadam")
    too_many(trainer, lambda n: 0)
    with pytest.raises(RunError, match="single sample"):
        trainer.step()
    assert trainer.state.step == 0


@pytest.mark.parametrize("failure", [RuntimeError("shapes do not fit"), ZeroDivisionError()])
def test_what_has_nothing_to_do_with_memory_is_not_tried_again(failure: Exception) -> None:
    trainer = chunked("dp-adam")
    too_many(trainer, lambda n: 0, lambda: failure)
    with pytest.raises(type(failure)):
        trainer.step()
    assert trainer.state.chunk == 256
