"""What is released: the sum of clipped gradients, noise of the stated size once, over B."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, SecureMechanism, ball, ellipsoid
from dpmac_cli.errors import InputError
from dpmac_cli.optim.optimizer import OPTIMIZERS, InBall
from tests.conftest import OPTIMIZER_NAMES, every_optimizer
from tests.helpers import (
    CLIP_LIMIT,
    DIMENSION,
    HYPER,
    Batches,
    KeptNoise,
    Spy,
    assert_deviation_of,
    in_chunks_of,
    make_trainer,
    per_sample_gradients,
    place,
    tiny_data,
    walk,
)


def random_ellipsoid(size: float, dtype: torch.dtype = torch.float64) -> Ellipsoid:
    """Lopsided and away from the origin, with scales around ``size``."""
    rng = np.random.default_rng(4)
    centre = torch.from_numpy(rng.normal(0, 0.1, DIMENSION))
    scale = torch.from_numpy(rng.lognormal(0, 1, DIMENSION) * size)
    return ellipsoid(centre.to(dtype), scale.to(dtype))


REGIONS = {
    "ball": ball(1.5, torch.zeros(DIMENSION, dtype=torch.float64)),
    "ellipsoid": random_ellipsoid(0.2),
}


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


@pytest.mark.privacy
@every_optimizer
@pytest.mark.parametrize("physical_batch", [2, 1000])
def test_noise_is_normal_with_deviation_sigma(name: str, physical_batch: int) -> None:
    sigma, noise = 1.7, KeptNoise()
    found = noise_of_run(name, sigma, physical_batch, noise)
    assert len(noise.drawn) == len(found), "once a step, however many chunks"
    torch.testing.assert_close(found, sigma * torch.stack(noise.drawn), rtol=0, atol=1e-9)
    assert_deviation_of(found.flatten().numpy(), sigma)


@pytest.mark.privacy
@every_optimizer
def test_noise_is_independent_across_steps_and_coordinates(name: str) -> None:
    spy = Spy(1.0, 8)
    walk(make_trainer(name, spy, sampler=Batches([])), 60)
    z = torch.stack([spy.whitened_sum(t) for t in range(60)])
    for lag in (1, 2, 5):
        for one, later in ((z[:-lag], z[lag:]), (z[:, :-lag], z[:, lag:])):
            assert abs((one * later).mean()) < 4 / one.numel() ** 0.5
    assert len(torch.unique(z.float())) > 0.99 * z.numel()


@pytest.mark.parametrize("shape", REGIONS)
def test_noise_variance_is_that_of_the_value(shape: str) -> None:
    region, noise = REGIONS[shape], KeptNoise().at(1)
    mechanism, repeats = GaussianMechanism(1.7, 8), 2000
    zeros = torch.zeros(DIMENSION, dtype=torch.float64)
    released = [mechanism.release(zeros.clone(), region, noise) for _ in range(repeats)]
    stated = released[0].noise_variance
    torch.testing.assert_close(stated, region.scale**2 * 1.7**2 / 8**2)
    assert stated.shape == region.inverse.shape
    seen = torch.stack([private.value for private in released]).var(0)
    ratio = seen / stated
    assert (ratio - 1).abs().max() < 5 * (2 / repeats) ** 0.5
    assert abs(ratio.mean() - 1) < 4 * (2 / repeats / DIMENSION) ** 0.5


@pytest.mark.parametrize("shape", REGIONS)
def test_no_data_and_no_noise_give_the_centre(shape: str) -> None:
    region = REGIONS[shape]
    nothing = torch.zeros(DIMENSION, dtype=torch.float64)
    private = GaussianMechanism(0.0, 8).release(nothing, region, KeptNoise().at(1))
    assert torch.equal(private.value, region.centre.expand(DIMENSION))
    assert (private.noise_variance == 0).all()


# The mean.


@pytest.mark.privacy
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


@pytest.mark.privacy
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


def test_a_ball_clips_as_dp_sgd_does() -> None:
    C, rows = HYPER.clip_norm, list(range(30))
    spy = Spy(0.0, 8)
    trainer = make_trainer("dp-sgd", spy, sampler=Batches(rows))
    g = per_sample_gradients(trainer.state.theta.numpy().copy(), tiny_data(), rows)
    trainer.step()
    norms = np.linalg.norm(g, axis=1)
    assert (norms > C).any()
    assert (norms < C).any()
    clipped = g / np.maximum(1, norms / (C * CLIP_LIMIT))[:, None]
    np.testing.assert_allclose(spy.released[0].value, clipped.sum(0) / 8, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZER_NAMES if not issubclass(OPTIMIZERS[name], InBall)]
)
@pytest.mark.parametrize("drawn", [0, 1, 5, 8, 20])
@pytest.mark.parametrize("size", [1e3, 5.0])
def test_an_ellipsoid_clips_about_its_centre(name: str, drawn: int, size: float) -> None:
    """g~ = sum c_i (g_i - m) / B + m; unclipped, sum g_i / B + (1 - drawn / B) m."""
    B, rows = 8, list(range(drawn))
    spy = Spy(0.0, B)
    trainer = make_trainer(name, spy, sampler=Batches(rows))
    g = per_sample_gradients(trainer.state.theta.numpy().copy(), tiny_data(), rows)
    region = random_ellipsoid(size)
    place(trainer, region)
    m, b = region.centre.numpy(), region.scale.numpy()
    trainer.step()
    if size == 1e3:
        expected = g.sum(0) / B + (1 - drawn / B) * m
    else:
        norms = np.linalg.norm((g - m) / b, axis=1)
        assert drawn < 20 or ((norms > 1).any() and (norms < 1).any())
        c = np.minimum(1, CLIP_LIMIT / norms)
        expected = c @ (g - m) / B + m
    np.testing.assert_allclose(spy.released[0].value, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.privacy
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
