"""Poisson sampling: everyone, in every step, by a coin of their own."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom, chisquare, kstest

from dpmac_cli import assembly
from dpmac_cli.config import resolve
from dpmac_cli.sampling import PoissonSampler

N, Q, STEPS = 400, 0.1, 2000


@pytest.fixture(scope="module")
def included() -> NDArray[np.bool_]:
    """Who was in which step, shape (STEPS, N)."""
    sampler = PoissonSampler(N, Q, np.random.SeedSequence(1))
    inside = np.zeros((STEPS, N), bool)
    for row in inside:
        row[sampler.draw()] = True
    return inside


@pytest.mark.privacy
def test_everyone_is_in_as_often_as_the_rate_says(included: NDArray[np.bool_]) -> None:
    """Counts per record are binomial: a shuffled partition gives everyone the same."""
    counts = included.sum(0)
    z = (counts - STEPS * Q) / (STEPS * Q * (1 - Q)) ** 0.5
    assert kstest(z, "norm").pvalue > 0.001
    assert np.abs(z).max() < 4.5
    assert chisquare(counts).pvalue > 0.001


@pytest.mark.privacy
def test_batch_sizes_are_binomial(included: NDArray[np.bool_]) -> None:
    sizes = included.sum(1)
    edges = binom.ppf(np.linspace(0.1, 0.9, 9), N, Q)
    shares = np.diff(np.concatenate([[0], binom.cdf(edges, N, Q), [1]]))
    found = np.bincount(np.searchsorted(edges, sizes), minlength=10)
    assert chisquare(found, shares * STEPS).pvalue > 0.001
    assert abs(sizes.var() / (N * Q * (1 - Q)) - 1) < 5 * (2 / STEPS) ** 0.5


@pytest.mark.privacy
@pytest.mark.parametrize("lag", [1, 2, N // 2])
def test_inclusions_are_independent(included: NDArray[np.bool_], lag: int) -> None:
    """Of the steps before, and of one's neighbours. A partition leaves whom it took out."""
    z = (included - Q) / (Q * (1 - Q)) ** 0.5
    for one, other in ((z[:-lag], z[lag:]), (z[:, :-lag], z[:, lag:])):
        assert abs((one * other).mean()) < 4 / one.size**0.5


def test_batches_may_be_empty() -> None:
    sampler = PoissonSampler(10, 0.05, np.random.SeedSequence(0))
    sizes = [len(sampler.draw()) for _ in range(500)]
    assert abs(sizes.count(0) / 500 - 0.95**10) < 4 * (0.6 * 0.4 / 500) ** 0.5
    assert max(sizes) >= 2


def test_rate_1_draws_everyone() -> None:
    sampler = PoissonSampler(50, 1.0, np.random.SeedSequence(0))
    for _ in range(20):
        assert sampler.draw().tolist() == list(range(50))


def test_draws_are_increasing_indices() -> None:
    drawn = PoissonSampler(1000, 0.3, np.random.SeedSequence(0)).draw()
    assert drawn.dtype == np.int64
    assert (np.diff(drawn) > 0).all()
    assert drawn[0] >= 0
    assert drawn[-1] < 1000


def test_seeds_repeat_and_differ() -> None:
    def batches(seed: int) -> list[list[int]]:
        sampler = PoissonSampler(100, 0.2, np.random.SeedSequence(seed))
        return [sampler.draw().tolist() for _ in range(5)]

    assert batches(1) == batches(1)
    assert batches(1) != batches(2)
    assert all(one != other for one, other in pairwise(batches(1)))


@pytest.mark.privacy
@pytest.mark.parametrize("flags", [{}, {"physical_batch": 7}, {"physical_batch": 1000}])
def test_a_run_samples_at_the_rate_that_is_priced(flags: dict[str, Any]) -> None:
    """The expected batch over n, however few samples are worked on at a time."""
    config = resolve({"dataset": "digits", "batch_size": 100, "seed": 3, **flags}).config
    assert config.sampling_rate == 100 / 1437
    trainer = assembly.make_trainer(config, 1, torch.device("cpu"))
    sizes = [len(trainer.state.sampler.draw()) for _ in range(300)]
    assert abs(np.mean(sizes) - 100) < 4 * (100 * (1 - 100 / 1437) / 300) ** 0.5
    assert trainer.mechanism.expected_batch == 100
