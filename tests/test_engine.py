"""The loop around the steps: when it scores, when it ends, and the memory that it takes."""

import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, recall_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.clipping import layers
from dpmac_cli.dp.clipping.clipped_sum import clip_limit
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.errors import DivergedError, RunError
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.chunks import first_chunk
from dpmac_cli.training.evaluation import RECORDS, Evaluation, evaluate
from tests.conftest import every_optimizer
from tests.helpers import (
    CLASSES,
    DIMENSION,
    SIDE,
    Batches,
    KeptNoise,
    Spy,
    make_trainer,
    planned,
    tiny_data,
    tiny_model,
    walk,
)

T = planned(steps=12)


def facts(result: Evaluation) -> tuple[float, list[list[int]]]:
    """What can be compared."""
    return result.loss, result.confusion.tolist()


# Evaluation.


@pytest.mark.parametrize("tail", [-1, 0, 1, 5, RECORDS])
def test_every_sample_is_scored(tail: int) -> None:
    """The last partial batch too."""
    count = RECORDS + tail
    data, model = tiny_data(records=count), tiny_model()
    result = evaluate(model, data, data.train)
    logits = model(data.standardised(data.train.images))
    truth, guess = data.train.labels.numpy(), logits.argmax(1).numpy()
    assert result.samples == count
    assert (result.confusion == confusion_matrix(truth, guess)).all()
    assert result.confusion.dtype == np.int64
    assert result.accuracy == pytest.approx(accuracy_score(truth, guess))
    assert result.per_class == pytest.approx(recall_score(truth, guess, average=None).tolist())
    assert result.loss == pytest.approx(cross_entropy(logits, data.train.labels).item())


class WhenTraining(nn.Module):
    """Spoils its input in training mode, as dropout does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 if self.training else x


@pytest.mark.parametrize("training", [True, False])
def test_models_are_scored_in_evaluation_mode_and_put_back(training: bool) -> None:
    data, plain = tiny_data(), tiny_model()
    model = tiny_model(torch.float64, WhenTraining()).train(training)
    assert facts(evaluate(model, data, data.tested)) == facts(evaluate(plain, data, data.tested))
    assert [module.training for module in model.modules()] == [training] * 6


# The loop.


@every_optimizer
def test_divergence_is_an_error(name: str) -> None:
    trainer = make_trainer(name, plan=T, lr=math.inf)
    steps = (trainer.take() for _ in range(T.event.steps))
    with pytest.raises(DivergedError, match=r"diverged: after step 5 .*--lr"):
        list(steps)


# Blocks.


def in_blocks_of(size: int, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> Trainer:
    """A trainer that goes through its vectors in blocks of about this size."""
    with monkeypatch.context() as patch:
        patch.setattr(layers, "BLOCK", size)
        trainer = make_trainer(*args, **kwargs)
    assert len(trainer._blocks) == max(1, round(DIMENSION / size))
    return trainer


@every_optimizer
def test_blocks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, choices = GaussianMechanism(0.0, 8), {"kappa": "tracked", "phi": "tracked"}
    whole, parts = (in_blocks_of(n, monkeypatch, name, quiet, **choices) for n in (1000, 7))
    torch.testing.assert_close(walk(parts, 12), walk(whole, 12), rtol=0, atol=1e-12)
    assert parts.state.tensors().keys() == whole.state.tensors().keys()
    for key, tensor in parts.state.tensors().items():
        torch.testing.assert_close(tensor, whole.state.tensors()[key], rtol=1e-9, atol=1e-12)


@pytest.mark.promise("noise")
@every_optimizer
def test_every_coordinate_gets_noise_of_its_own_from_its_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, spy = KeptNoise(), Spy(1.0, 8)
    trainer = in_blocks_of(7, monkeypatch, name, spy, sampler=Batches([]), noise=noise)
    count = len(trainer._blocks)
    walk(trainer, 3)
    assert [len(z) for z in noise.drawn] == 3 * [b.stop - b.start for b in trainer._blocks]
    for step in range(3):
        drawn = torch.cat(noise.drawn[step * count : (step + 1) * count])
        seen = torch.cat([spy.whitened_sum(step * count + i) for i in range(count)])
        torch.testing.assert_close(seen, drawn)
        assert len(drawn) == DIMENSION
    assert len(torch.unique(torch.cat(noise.drawn))) == 3 * DIMENSION


WIDTH = 2000
LONG: dict[str, Any] = {"steps": 100, "steps_per_epoch": 10}
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


@pytest.mark.long
@pytest.mark.parametrize("physical_batch", [1000, 8])
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadambc"])
def test_a_step_takes_ten_vectors(name: str, physical_batch: int) -> None:
    """Weights included, and what a block of coordinates needs, which does not grow with d."""
    d = sum(p.numel() for p in wide_model().parameters())
    peak = peak_of(name, 16, planned(**LONG, physical_batch=physical_batch))
    assert peak <= 10 * 4 * d + 24 * MIB


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_batch_costs_nothing_beyond_its_chunk(name: str) -> None:
    plan = planned(**LONG, physical_batch=16)
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

    def of(x: Tensor, y: Tensor, metric: RegionMetric, out: Tensor, counted: Tensor) -> None:
        whole(x, y, metric, out, counted)
        samples = int(counted.sum())
        if samples > most(next(tried)):
            out.fill_(torch.nan)
            raise fault()
        sizes.append(samples)

    trainer.sums.clipped_sum.of = of  # type: ignore[assignment,method-assign]
    return sizes


def chunked(name: str) -> Trainer:
    """Batches of all 600 records in chunks of at most 256, in float32."""
    data, batches = tiny_data(torch.float32, records=600), Batches(range(600))
    plan, mechanism = planned(**LONG, physical_batch=256), GaussianMechanism(1.0, 600)
    return make_trainer(name, mechanism, plan=plan, dtype=torch.float32, data=data, sampler=batches)


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
        plan=planned(**LONG, physical_batch=1 << 17),
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
