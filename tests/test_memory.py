"""Memory: a few vectors as long as theta, and nothing that grows with the batch beyond a chunk."""

import gc
import itertools
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum, clip_limit
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import GaussianMechanism, ball
from dpmac_cli.errors import RunError
from dpmac_cli.runs.loop import fit
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.training.chunks import first_chunk
from dpmac_cli.training.schedules import StepPlan
from tests.conftest import OPTIMIZER_NAMES
from tests.helpers import (
    CLASSES,
    SIDE,
    Batches,
    KeptNoise,
    Spy,
    make_trainer,
    tiny_data,
    walk,
)
from tests.tiers import rest_long

pytestmark = pytest.mark.trial

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
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_a_step_takes_ten_vectors(name: str, physical_batch: int) -> None:
    """Weights included, and what a block of coordinates needs, which does not grow with d."""
    d = sum(p.numel() for p in wide_model().parameters())
    peak = peak_of(name, 16, replace(PLAN, physical_batch=physical_batch))
    assert peak <= 10 * 4 * d + 24 * MIB


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_batch_costs_no_more_than_its_activations(name: str) -> None:
    """Per-sample gradients would take 31 MiB a sample."""
    small, large = (peak_of(name, batch, PLAN) for batch in (16, 400))
    activations = 4 * (SIDE**2 + 2 * WIDTH + 4 * WIDTH + CLASSES)  # with their gradients
    # Their squares are as large again, and a contraction.
    assert large - small <= 5 * 450 * activations


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_batch_costs_nothing_beyond_its_chunk(name: str) -> None:
    plan = replace(PLAN, physical_batch=16)
    small, large = (peak_of(name, batch, plan) for batch in (64, 400))
    assert large <= small + MIB


class Shortcuts(nn.Module):
    """No sequence of known layers, so it is tried: layers, or matrices that no rule knows."""

    def __init__(self, width: int, blocks: int, *, raw: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(0 if raw else blocks))
        matrices = (torch.randn(width, width) / width for _ in range(blocks if raw else 0))
        self.matrices = nn.ParameterList(matrices)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        for matrix in self.matrices:
            x = x + (x @ matrix).tanh()
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    ("width", "blocks", "raw", "vectors"),
    [(500, 8, False, 5), (1000, 8, True, 9), (2000, 1, False, 7)],
)
def test_the_trial_of_a_network_takes_few_vectors(
    width: int, blocks: int, raw: bool, vectors: int
) -> None:
    """In float64: the network, gradients of a sample by autograd, and of a layer by its rule.

    A step takes up to ten, with the network.
    """
    network = Shortcuts(width, blocks, raw=raw)
    d = sum(p.numel() for p in network.parameters())
    x = torch.zeros(1, width)

    def work() -> None:
        assert PerSample(network, Structure(x)).vmapped

    assert peak_bytes(work) <= vectors * 4 * d + MIB


def peak_with_views(views: int) -> int:
    """Of the clipped sum of 16 samples of so many views, by convolutions of a million weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 512, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(512, 128, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    )
    several = (views,) if views > 1 else ()
    x, y = torch.randn(16, *several, 1, 8, 8), torch.zeros(16, *several, dtype=torch.long)
    per_sample = PerSample(model, Structure(x[:1]), Structure(y[:1], keep=True), views)
    theta = flatten_parameters(per_sample.layers)
    clipped_sum = ClippedChunkSum(per_sample, 16)
    out, metric = torch.empty_like(theta), ball(1.0, theta)
    return peak_bytes(lambda: clipped_sum.of(x, y, RegionMetric(metric), out))


@pytest.mark.long
def test_views_cost_activations_but_no_gradients_of_their_own() -> None:
    """All gradients of the samples together would take 54 MiB."""
    one, many = peak_with_views(1), peak_with_views(8)
    activations = 16 * 4 * 2 * (64 * 64 + 512 * 16 + 128 * 4)  # with their gradients
    assert one < 18 * MIB
    assert many <= one + 7 * 3 * activations + 16 * MIB  # float64 factors of a few samples


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


@pytest.mark.privacy
@pytest.mark.parametrize("fault", FAULTS, ids=["cuda", "cpu", "python"])
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_when_memory_runs_out_chunks_are_halved_and_the_sum_is_the_same(
    name: str, fault: Callable[[], BaseException]
) -> None:
    rows = np.arange(600)
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


@pytest.mark.privacy
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_when_memory_runs_out_every_sample_counts_once_and_noise_is_added_once(name: str) -> None:
    noise, other, spy = KeptNoise(), KeptNoise(), Spy(1.0, 600)
    trainer, undisturbed = chunked(name, noise=noise), chunked(name, noise=other)
    trainer.mechanism = spy
    sizes = too_many(trainer, lambda n: 256 if n < 4 else 20)
    found, expected = walk(trainer, 4), walk(undisturbed, 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert sum(sizes) == 4 * 600
    assert len(noise.drawn) == len(other.drawn) == len(spy.released) == 4
    assert all(torch.equal(a, b) for a, b in zip(noise.drawn, other.drawn, strict=True))


@pytest.mark.privacy
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


@pytest.mark.privacy
@pytest.mark.parametrize("count", rest_long([501, 3001]))
def test_many_small_chunks_round_no_more_than_a_few_large_ones(count: int) -> None:
    trainer = make_trainer("dp-sgd", dtype=torch.float32)
    trainer.state.chunk = 1
    single = trainer._clip_and_sum(np.array([3])).double()
    found = trainer._clip_and_sum(np.full(count, 3)).double() / count
    assert (found - single).norm() <= 1e-7 * single.norm()


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


def test_a_step_in_which_memory_ran_out_is_told_at_once() -> None:
    trainer = chunked("dp-adam")
    too_many(trainer, lambda n: 256 if n < 4 else 60)
    steps = fit(trainer, lambda: False)
    assert next(event.step for event in steps if trainer.state.chunk == 64) == 2


LIMITED = """
import resource
from dataclasses import replace
import numpy as np
import torch
from torch import nn
from dpmac_cli.dp.mechanism import GaussianMechanism
from tests.helpers import CLASSES, PLAN, SIDE, make_trainer, tiny_data

torch.set_num_threads(1)
wide = 20_000
trainer = make_trainer(
    "dp-macadam",
    GaussianMechanism(1.0, 2048),
    plan=replace(PLAN, physical_batch=2048),
    data=tiny_data(torch.float32, records=2048),
    model=nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, wide), nn.Tanh(), nn.Linear(wide, CLASSES)
    ),
    dtype=torch.float32,
)
rows = np.arange(2048)
whole = trainer._clip_and_sum(rows).double().clone()
# What a few hundred samples need: the activations of all 2,048, and as many gradients, fill 160 MiB
# each.
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
found = trainer._clip_and_sum(rows).double()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert ((found - whole).norm() <= 1e-6 * whole.norm()).item()
print(trainer.state.chunk)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit on address space")
def test_a_limit_of_the_system_is_lived_with() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert 1 < int(done.stdout) < 4096


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    """A block of 64 MiB, which glibc gives back by itself: 16,384 pages to map again."""
    code = """
        import resource
        import torch
        from dpmac_cli.runs.memory import keep_freed_memory

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(1 << 24)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        faults()
        assert faults() > 10_000
        keep_freed_memory()
        for _ in range(10):  # the heap grows to what aligned blocks need
            faults()
        assert faults() < 1_000
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
