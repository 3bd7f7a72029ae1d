"""Sum and noise on a fixed public grid: what is released, and what it cannot tell."""

from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import kstest
from torch import Tensor

from dpmac_cli.dp.mechanism import (
    GRID,
    GaussianMechanism,
    PrivateMean,
    SecureMechanism,
    ball,
    ellipsoid,
)
from dpmac_cli.randomness import noise as noises
from dpmac_cli.randomness.noise import Noise, SeededNormals
from tests.conftest import every_optimizer
from tests.helpers import (
    Batches,
    SecureSpy,
    a_key,
    assert_deviation_of,
    in_chunks_of,
    make_trainer,
    walk,
)

either_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
BATCHES: tuple[list[int], ...] = ([3, 1, 4, 5, 9], [], list(range(11)), [7])


def source(seed: int = 0) -> Noise:
    return Noise(a_key(seed), secure=True)


def spied(
    name: str,
    batches: tuple[list[int], ...],
    *,
    steps: int,
    sigma: float = 1.0,
    dtype: torch.dtype = torch.float64,
    physical_batch: int = 1000,
) -> SecureSpy:
    """A secure run of some steps."""
    spy = SecureSpy(sigma, 8)
    trainer = make_trainer(
        name,
        spy,
        plan=in_chunks_of(physical_batch),
        dtype=dtype,
        sampler=Batches(*batches),
        noise=source(),
    )
    walk(trainer, steps)
    return spy


def assert_on_grid(values: Tensor) -> None:
    assert values.dtype == torch.float64
    assert (torch.remainder(values, GRID) == 0).all()


class Given(SeededNormals):
    """Hands out given normals, once."""

    def __init__(self, normals: Tensor) -> None:
        self._normals = normals

    def standard_normal(self, like: Tensor) -> Tensor:
        assert like.dtype == torch.float64
        return self._normals.clone()


# The grid.


@pytest.mark.promise("secure")
@every_optimizer
@either_dtype
@pytest.mark.parametrize("physical_batch", [2, 1000], ids=["chunks", "whole"])
def test_a_noisy_sum_lies_on_the_grid(name: str, dtype: torch.dtype, physical_batch: int) -> None:
    """And what is released is worked out from it and from public values, nothing else."""
    spy = spied(name, BATCHES, steps=8, dtype=dtype, physical_batch=physical_batch)
    assert len(spy.sums) == 8
    for total, region, private, rows in zip(
        spy.sums, spy.regions, spy.released, 2 * BATCHES, strict=True
    ):
        assert_on_grid(total)
        of_sum = torch.float64 if len(rows) > physical_batch else dtype
        expected = total.to(of_sum).mul_(region.scale).div_(8)
        if not region.is_ball:
            expected.add_(region.centre)
        assert torch.equal(private.value, expected.to(dtype))


@pytest.mark.promise("secure")
def test_what_is_lost_in_rounding_is_lost_for_good() -> None:
    """Sums closer than the grid give one release, bit for bit. Without a grid they give two."""
    half = torch.full((500,), 0.5, dtype=torch.float64)
    region = ellipsoid(torch.full_like(half, 0.3), half)
    rng = np.random.default_rng(0)
    on_grid = torch.from_numpy(np.round(rng.normal(0, 1, 500) / GRID) * GRID)

    def release(mechanism: GaussianMechanism, shift: float) -> PrivateMean:
        return mechanism.release((on_grid + shift * GRID) * half, region, source().at(1))

    secure, plain = SecureMechanism(1.0, 8), GaussianMechanism(1.0, 8)
    one, other = (release(secure, shift).value for shift in (-0.4, 0.4))
    assert torch.equal(one, other)
    one, other = (release(plain, shift).value for shift in (-0.4, 0.4))
    assert (one != other).all()


@pytest.mark.promise("secure")
@pytest.mark.parametrize("size", [1, 2**20, 2**52, 2**55, 2**60])
def test_a_noisy_sum_depends_on_the_exact_sum_alone(size: int) -> None:
    """However it is split into data and noise; where float64 no longer holds every step, too."""
    rng, step = np.random.default_rng(size), max(1, size >> 52)
    fine = rng.integers(-3, 3, 200, endpoint=True)  # lost beside a number that is large enough
    noise = rng.integers(-size // step, size // step, 200, endpoint=True) * step
    moved = rng.integers(-(2**52) // step, 2**52 // step, 200, endpoint=True) * step
    region = ball(1.0, torch.zeros(1, dtype=torch.float64))

    def bits(data: NDArray[np.int64], drawn: NDArray[np.int64]) -> Tensor:
        parts = [torch.from_numpy(steps).double() * GRID for steps in (data, drawn)]
        value = SecureMechanism(1.0, 1).release(parts[0], region, Given(parts[1])).value
        return value.view(torch.int64)

    assert torch.equal(bits(fine, noise), bits(fine + moved, noise - moved))
    assert (bits(noise, -noise) == 0).all(), "no sign of zero either"


@pytest.mark.promise("secure")
@pytest.mark.parametrize("signs", list(product((0.0, -0.0), repeat=3)))
def test_zeros_have_one_sign(signs: tuple[float, float, float]) -> None:
    """Also where the centre of the ellipsoid is the other zero."""
    data, drawn, centre = (torch.full((3,), zero, dtype=torch.float64) for zero in signs)
    region = ellipsoid(centre, torch.ones_like(data))
    value = SecureMechanism(1.0, 1).release(data, region, Given(drawn)).value
    assert (value.view(torch.int64) == 0).all()


# Noise.


@pytest.mark.promise("secure")
@every_optimizer
@either_dtype
def test_noise_is_normal_with_deviation_sigma(name: str, dtype: torch.dtype) -> None:
    spy = spied(name, ([],), steps=60, sigma=1.7, dtype=dtype)
    released = torch.stack([spy.whitened_sum(t) for t in range(60)]).double()
    torch.testing.assert_close(released, torch.stack(spy.sums), rtol=0, atol=1e-3)
    for noise in (released, torch.stack(spy.sums)):
        assert_deviation_of(noise.flatten().numpy(), 1.7)


@pytest.mark.promise("secure")
@pytest.mark.parametrize("shape", ["ball", "ellipsoid"])
def test_parts_have_noise_and_scale_of_their_own(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector whose noise has many parts: no noise comes twice, and each has its scale."""
    rng = np.random.default_rng(3)
    scale = torch.from_numpy(rng.lognormal(0, 1, 1000))
    region = ball(1.5, scale) if shape == "ball" else ellipsoid(torch.zeros_like(scale), scale)
    clipped = torch.from_numpy(rng.normal(0, 1, 1000))
    sums = {}
    for size in (7, 1000):
        monkeypatch.setattr(noises, "PAIRS", size)
        for sigma in (0.0, 1.0):
            value = SecureMechanism(sigma, 1).release(clipped.clone(), region, source().at(1)).value
            sums[size, sigma] = value / region.scale
    assert torch.equal(sums[7, 0.0], sums[1000, 0.0])
    torch.testing.assert_close(sums[7, 0.0], clipped / region.scale, rtol=0, atol=GRID)
    noise = sums[7, 1.0] - sums[7, 0.0]
    assert len(torch.unique(noise)) == 1000
    assert kstest(noise.numpy(), "norm").pvalue > 0.001


# The data.


@pytest.mark.promise("secure")
@every_optimizer
@either_dtype
def test_a_record_more_or_less_moves_the_rounded_sum_by_at_most_1(
    name: str, dtype: torch.dtype
) -> None:
    """The noise is the same on both sides, so it drops out of the difference, exactly."""
    common: tuple[list[int], ...] = ([0, 1, 2], [], list(range(20)), [5], list(range(9)))
    rows = list(range(10, 22))

    def last(rows: list[int]) -> Tensor:
        return spied(name, (*common, rows), steps=6, dtype=dtype).sums[-1]

    without = last(rows)
    moves = [last([*rows, record]) - without for record in range(22, 30)]
    for move in moves:
        assert_on_grid(move)
    norms = [float(move.norm()) for move in moves]
    assert max(norms) <= 1
    assert max(norms) > 0.9, "some record is clipped, or this shows nothing"


# The margin.


@pytest.mark.promise("secure")
def test_the_stated_rounding_is_a_bound_and_no_more_than_one() -> None:
    """Two sums whose coordinates are rounded apart by as much as can be."""
    size = 400
    region = ball(1.0, torch.zeros(1, dtype=torch.float64))
    secure = SecureMechanism(0.0, 1)
    low, high = (
        torch.full((size,), half * GRID, dtype=torch.float64) for half in (0.499999, 0.500001)
    )
    exact = (high - low).norm()
    rounded = [secure.release(x.clone(), region, source().at(1)).value for x in (low, high)]
    moved = (rounded[1] - rounded[0]).norm()
    assert exact < moved <= exact + secure.rounding(size)
    assert moved > 0.999 * secure.rounding(size)
    assert GaussianMechanism(0.0, 1).rounding(size) == 0
