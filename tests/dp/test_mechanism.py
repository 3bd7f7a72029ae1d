"""What is released: the sum of clipped gradients, noise of the stated size once, over B."""

import pytest
import torch
from torch import Tensor

from dpmac_cli.dp.mechanism import (
    GaussianMechanism,
    SecureMechanism,
)
from dpmac_cli.errors import InputError
from tests.conftest import every_optimizer
from tests.helpers import (
    Batches,
    KeptNoise,
    Spy,
    assert_deviation_of,
    in_chunks_of,
    make_trainer,
    place,
    walk,
)

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
@every_optimizer
@pytest.mark.parametrize("physical_batch", [2, 1000])
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
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_more_or_less_moves_the_whitened_sum_by_at_most_1(
    name: str, dtype: torch.dtype
) -> None:
    """Along a run: the same five steps, then a batch with or without one record."""
    common = [[0, 1, 2], [], list(range(20)), [5], list(range(9))]

    def last(rows: list[int]) -> Spy:
        spy = Spy(1.0, 8)
        walk(make_trainer(name, spy, dtype=dtype, sampler=Batches(*common, rows)), 6)
        return spy

    rows = list(range(10, 22))
    without = last(rows)
    scale = without.regions[-1].scale.double()
    moves = []
    for record in range(22, 30):
        change = last([*rows, record]).released[-1].value - without.released[-1].value
        moves.append(float((change.double() / scale).norm() * 8))
    assert max(moves) <= 1
    assert max(moves) > 0.9, "some record is clipped, or this shows nothing"


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
