"""What is released: the sum of clipped gradients, noise of the stated size once, over B.

With ``--secure``, sum and noise are on a fixed public grid.
"""

from itertools import cycle, product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.dp.mechanism import (
    GRID,
    GaussianMechanism,
    PrivateMean,
    SecureMechanism,
    ball,
    ellipsoid,
)
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.noise import Noise, SeededNormals
from tests.conftest import OPTIMIZER_NAMES, every_optimizer
from tests.helpers import (
    Batches,
    KeptNoise,
    SecureSpy,
    Spy,
    a_key,
    assert_deviation_of,
    in_chunks_of,
    make_trainer,
    place,
    walk,
)
from tests.pairwise import all_pairs

DTYPES = (torch.float32, torch.float64)
BATCHES: tuple[list[int], ...] = ([3, 1, 4, 5, 9], [], list(range(11)), [7])


def source(*, secure: bool = True) -> Noise:
    return Noise(a_key(0), secure=secure)


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


# Noise.


def noise_of_run(name: str, sigma: float, physical_batch: int, noise: KeptNoise) -> Tensor:
    """What a run's whitened sums hold beyond the data's share, shape (steps, d).

    The share comes from a trainer without noise that is led along the same regions; theta stays.
    """
    spy, quiet = Spy(sigma, 8), Spy(0.0, 8)
    batches: tuple[list[int], ...] = ([3, 1, 4, 5, 9], [], list(range(11)))
    plan = in_chunks_of(physical_batch)
    noisy = make_trainer(name, spy, plan=plan, sampler=Batches(*batches), noise=noise, lr=0.0)
    clean = make_trainer(name, quiet, sampler=Batches(*batches), lr=0.0)
    for _ in range(12):
        place(clean, noisy.state.region)
        noisy.step()
        clean.step()
    return torch.stack([spy.whitened_sum(t) - quiet.whitened_sum(t) for t in range(12)])


@pytest.mark.promise("noise")
@pytest.mark.parametrize(
    ("name", "physical_batch"), [*zip(OPTIMIZER_NAMES, cycle([2, 1000]), strict=False)]
)
def test_noise_is_normal_with_deviation_sigma(name: str, physical_batch: int) -> None:
    sigma, noise = 1.7, KeptNoise()
    found = noise_of_run(name, sigma, physical_batch, noise)
    assert len(noise.drawn) == len(found), "once a step, however many chunks"
    torch.testing.assert_close(found, sigma * torch.stack(noise.drawn), rtol=0, atol=1e-9)
    assert_deviation_of(found.flatten().numpy(), sigma)


@pytest.mark.promise("noise")
@every_optimizer
def test_noise_is_independent_across_steps_and_coordinates(name: str) -> None:
    spy = Spy(1.0, 8)
    walk(make_trainer(name, spy, sampler=Batches([])), 60)
    z = torch.stack([spy.whitened_sum(t) for t in range(60)])
    for lag in (1, 2, 5):
        for one, later in ((z[:-lag], z[lag:]), (z[:, :-lag], z[:, lag:])):
            assert abs((one * later).mean()) < 4 / one.numel() ** 0.5
    assert len(torch.unique(z.float())) > 0.99 * z.numel()


# The mean.


@pytest.mark.promise("noise")
@every_optimizer
def test_the_divisor_is_the_expected_batch_whatever_was_drawn(name: str) -> None:
    """The size drawn is private: dividing by it would release it, and void the sensitivity."""

    def first_value(expected: float, rows: list[int]) -> Tensor:
        spy = Spy(0.0, expected)
        make_trainer(name, spy, sampler=Batches(rows)).step()
        return spy.released[0].value

    one = first_value(8, [3])
    assert one.norm() > 0
    for copies in (2, 8, 20):
        torch.testing.assert_close(first_value(8, [3] * copies), copies * one)
    torch.testing.assert_close(first_value(16, [3]), one / 2)


@pytest.mark.promise("one")
@pytest.mark.promise("secure")
@pytest.mark.parametrize(
    ("kind", "name", "dtype"), all_pairs([Spy, SecureSpy], OPTIMIZER_NAMES, DTYPES)
)
def test_a_record_more_or_less_moves_the_whitened_sum_by_at_most_1(
    kind: type[Spy], name: str, dtype: torch.dtype
) -> None:
    """After the same five steps, and with the same noise: on the grid it drops out exactly."""
    secure = kind is SecureSpy
    spy = kind(1.0, 8)
    common = Batches([0, 1, 2], [], list(range(20)), [5], list(range(9)))
    trainer = make_trainer(name, spy, dtype=dtype, sampler=common, noise=source(secure=secure))
    walk(trainer, 5)
    tensors = {key: tensor.clone() for key, tensor in trainer.state.tensors().items()}
    numbers = trainer.state.numbers()

    def last(*rows: int) -> Tensor:
        trainer.state.restore(tensors, numbers)
        trainer.sampler, trainer.noise = Batches(rows), source(secure=secure)
        trainer.step()
        return spy.sums[-1] if isinstance(spy, SecureSpy) else spy.whitened_sum().double()

    rows = range(10, 22)
    without = last(*rows)
    moves = [last(*rows, record) - without for record in range(22, 30)]
    if secure:
        assert_on_grid(torch.stack(moves))
    norms = [float(move.norm()) for move in moves]
    assert max(norms) <= 1
    assert max(norms) > 0.9, "some record is clipped, or this shows nothing"


@pytest.mark.promise("noise")
@pytest.mark.parametrize("kind", [GaussianMechanism, SecureMechanism])
@pytest.mark.parametrize("sigma", [float("nan"), float("inf"), -1.0])
def test_a_noise_multiplier_that_is_no_number_is_not_taken_for_no_noise(
    kind: type[GaussianMechanism], sigma: float
) -> None:
    with pytest.raises(InputError, match="noise_multiplier must be a number of at least 0"):
        kind(sigma, 8)
    for batch in (0.0, -8.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="expected_batch must be a number above 0"):
            kind(1.0, batch)


@pytest.mark.promise("one")
@pytest.mark.parametrize("radius", [0.0, -1.0, float("nan"), float("inf"), 1e25, 1e200, 1e-25])
def test_a_ball_without_a_norm_in_its_numbers_is_refused(radius: float) -> None:
    """1 / C^2 would be 0 in float32, so that nothing is clipped, or infinite."""
    with pytest.raises(InputError, match="The radius of a ball must be"):
        ball(radius)
    if 0 < radius < 1e100:
        assert ball(radius, torch.zeros(1, dtype=torch.float64)).scale == pytest.approx(radius)


# On a grid.


@pytest.mark.promise("secure")
@pytest.mark.parametrize(
    ("name", "dtype", "physical_batch"), all_pairs(OPTIMIZER_NAMES, DTYPES, [2, 1000])
)
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


@pytest.mark.promise("secure")
@every_optimizer
def test_noise_on_the_grid_is_normal_with_deviation_sigma(name: str) -> None:
    spy = spied(name, ([],), steps=60, sigma=1.7, dtype=torch.float32)
    released = torch.stack([spy.whitened_sum(t) for t in range(60)]).double()
    torch.testing.assert_close(released, torch.stack(spy.sums), rtol=0, atol=1e-3)
    for noise in (released, torch.stack(spy.sums)):
        assert_deviation_of(noise.flatten().numpy(), 1.7)


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
