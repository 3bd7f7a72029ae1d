"""All optimizers at once: what no batch may do to them."""

import json
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.dp.mechanism import GaussianMechanism, PrivateMean
from dpmac_cli.optim import OPTIMIZERS
from dpmac_cli.optim.optimizer import InBall
from tests.conftest import OPTIMIZER_NAMES, every_optimizer
from tests.helpers import (
    Batches,
    KeptNoise,
    Spy,
    in_chunks_of,
    make_trainer,
    tiny_data,
    tiny_model,
    walk,
)

ELLIPSOIDS = [name for name, kind in OPTIMIZERS.items() if not issubclass(kind, InBall)]


# Batches of any size.


@pytest.mark.privacy
@every_optimizer
def test_an_empty_batch_is_a_step_of_noise_alone(name: str) -> None:
    """Skipping it would tell that nobody was drawn, and take fewer steps than were priced."""
    noise = KeptNoise()
    spy = Spy(1.0, 8)
    trainer = make_trainer(name, spy, sampler=Batches([1, 2], [], [3]), noise=noise)
    thetas = torch.stack([trainer.state.theta.clone(), *walk(trainer, 3)])
    assert trainer.state.step == len(noise.drawn) == len(spy.released) == 3
    torch.testing.assert_close(spy.whitened_sum(1), noise.drawn[1])
    for before, after in pairwise(thetas):
        assert (before != after).all()
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state.tensors().values())
    if OPTIMIZERS[name].keeps:
        assert trainer.state.moments.step == 3


@every_optimizer
def test_only_empty_batches(name: str) -> None:
    trainer = make_trainer(name, sampler=Batches([]))
    assert torch.isfinite(walk(trainer, 10)).all()
    assert trainer.state.step == 10


@pytest.mark.long
@every_optimizer
def test_physical_batches_do_not_show(name: str) -> None:
    """Noise included: chunks of any size give the run that whole batches give."""
    runs = {}
    for size in (1, 7, 1000):
        spy = Spy(1.0, 20)
        trainer = make_trainer(name, spy, plan=in_chunks_of(size), seed=2)
        thetas = walk(trainer, 10)
        runs[size] = (thetas, torch.stack([spy.whitened_sum(t) for t in range(10)]))
    for size in (1, 7):
        torch.testing.assert_close(runs[size][1], runs[1000][1], rtol=0, atol=1e-6)
        torch.testing.assert_close(runs[size][0], runs[1000][0], rtol=0, atol=1e-9)


@every_optimizer
def test_physical_batches_do_not_show_in_float32(name: str) -> None:
    sums = []
    for size in (1, 7, 1000):
        spy = Spy(0.0, 40)
        sampler = Batches(range(40))
        make_trainer(
            name, spy, plan=in_chunks_of(size), dtype=torch.float32, sampler=sampler
        ).step()
        sums.append(spy.whitened_sum())
    for total in sums[:2]:
        assert (total - sums[2]).norm() <= 1e-6 * sums[2].norm()


# Values that are not finite.


class NotANumber(nn.Module):
    """Turns an image with a bright first pixel into NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :, :1, :1] > 0, float("nan"), x)


@pytest.mark.privacy
@every_optimizer
def test_a_sample_that_is_not_finite_adds_nothing(name: str) -> None:
    """Not even to its neighbours in the batch."""
    data = tiny_data()
    bright = data.train.images[:, 0, 0, 0] > 128
    good, all_rows = torch.nonzero(~bright).flatten().tolist(), range(40)
    assert 0 < len(good) < 40
    thetas = [
        walk(make_trainer(name, model=model, sampler=Batches(rows)), 5)
        for model, rows in (
            (tiny_model(), good),
            (tiny_model(torch.float64, NotANumber()), good),
            (tiny_model(torch.float64, NotANumber()), all_rows),
        )
    ]
    torch.testing.assert_close(thetas[1], thetas[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(thetas[2], thetas[0], rtol=0, atol=1e-12)


@every_optimizer
@pytest.mark.parametrize("gain", [float("nan"), float("inf")])
def test_a_whole_batch_that_is_not_finite_is_an_empty_batch(name: str, gain: float) -> None:
    data = tiny_data()
    broken = replace(data, gain=torch.full_like(data.gain, gain))
    trainer = make_trainer(name, data=broken, sampler=Batches(range(1, 40)))
    thetas = walk(trainer, 5)
    assert torch.equal(thetas, walk(make_trainer(name, sampler=Batches([])), 5))
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state.tensors().values())


# Seeds.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_runs_from_one_seed_differ_and_repeat(dtype: torch.dtype) -> None:
    def run(name: str, seed: int) -> tuple[Tensor, Tensor]:
        spy = Spy(1.0, 8)
        thetas = walk(make_trainer(name, spy, seed=seed, dtype=dtype), 4)
        return thetas, torch.stack([private.value for private in spy.released])

    runs = {name: run(name, 0) for name in OPTIMIZER_NAMES}
    for one, other in combinations(OPTIMIZER_NAMES, 2):
        assert (runs[one][0][-1] != runs[other][0][-1]).any(), (one, other)
    for name, (thetas, means) in runs.items():
        again, others = run(name, 0), run(name, 1)
        assert torch.equal(thetas, again[0]), name
        assert torch.equal(means, again[1]), name
        assert (thetas[-1] != others[0][-1]).any(), name
        assert (means != others[1]).all(), name


@pytest.mark.parametrize("name", ELLIPSOIDS)
def test_the_ellipsoid_follows_the_run(name: str) -> None:
    """Centre and scale of step t are public before it: set by the steps before, and no other."""
    spy = Spy(1.0, 8)
    trainer = make_trainer(name, spy)
    walk(trainer, 4)
    assert all((spy.regions[0].centre == 0).tolist())
    for before, after in pairwise([*spy.regions, trainer.state.region]):
        assert (before.centre != after.centre).all()


@every_optimizer
def test_a_restored_state_goes_on_as_if_nothing_had_happened(name: str) -> None:
    """Tensors and numbers are the whole state: with the same draws, the rest is the same."""
    first, second, other = (
        make_trainer(name, seed=seed, kappa="tracked", phi="tracked") for seed in (0, 0, 9)
    )
    walk(first, 5)
    tensors = {key: tensor.clone() for key, tensor in first.state.tensors().items()}
    numbers = json.loads(json.dumps(first.state.numbers()))
    rest = walk(first, 5)
    walk(second, 3)
    second.state.restore(tensors, numbers)
    assert torch.equal(walk(second, 5), rest)
    other.state.restore(tensors, numbers)
    assert (walk(other, 5) != rest).any(1).all()


# Post-processing.


@pytest.mark.privacy
@every_optimizer
@pytest.mark.parametrize("choice", ["paper", "tracked"])
def test_the_state_sees_the_data_through_the_private_mean_alone(name: str, choice: str) -> None:
    """Two data sets with nothing in common, the same private means: the same state, to the bit."""
    told = Spy(1.0, 8)
    walk(make_trainer(name, told, kappa=choice, phi=choice), 8)

    class Replay(GaussianMechanism):
        def release(self, *_: object) -> PrivateMean:
            private = next(means)
            return replace(private, value=private.value.clone())

    states, batches = [], (Batches([0, 1, 2]), Batches(range(30), []))
    for seed, sampler in zip((5, 6), batches, strict=True):
        means = iter(told.released)
        data = tiny_data(seed=seed)
        trainer = make_trainer(
            name, Replay(1.0, 8), data=data, sampler=sampler, kappa=choice, phi=choice
        )
        walk(trainer, 8)
        states.append(trainer.state.tensors())
    assert (
        states[0].keys() == states[1].keys() >= {"theta", "m", "v", "centre", "inverse", "factor"}
    )
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key
