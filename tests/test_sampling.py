"""Who is in a step: each sampler draws from the distribution that its price is for."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy.stats import binom, chisquare, kstest

from dpmac_cli.accounting.events import SAMPLERS, TrainingEvent
from dpmac_cli.randomness.keystream import KeyStream, Stretch
from dpmac_cli.randomness.sampling import (
    BatchSampling,
    KeyedSampler,
    Poisson,
    RandomAllocation,
    Sampler,
    SecureDraws,
)
from dpmac_cli.runs.resolve import resolve
from tests.digits_runs import run_trainer
from tests.helpers import a_key

N, Q, STEPS = 400, 0.1, 2000
ONCE_AN_EPOCH = tuple(name for name, sampling in SAMPLERS.items() if sampling.once_an_epoch)


#: Drawn by numpy's generator, and by a cipher.
either_way = pytest.mark.parametrize("secure", [False, True], ids=["numpy", "cipher"])
each_way = pytest.fixture(scope="module", params=[False, True], ids=["numpy", "cipher"])


def sampler_of(
    name: str, size: int, batch: int, secure: bool, seed: int = 1, base: int = 0
) -> Sampler:
    event = TrainingEvent(batch / size, 1.0, 1, name, math.ceil(size / batch))
    return KeyedSampler(event, size=size, key=a_key(seed), secure=secure, base=base)


def inclusions(sampler: Sampler, size: int, steps: int) -> NDArray[np.bool_]:
    """Who was in which step, shape (steps, size)."""
    inside = np.zeros((steps, size), bool)
    for step, row in enumerate(inside, 1):
        row[sampler.draw(step)] = True
    return inside


def dealt(sampler: Sampler, size: int, batch: int, epochs: int) -> NDArray[np.int64]:
    """The batch of each record in each epoch, shape (epochs, size): a partition, or it fails."""
    steps = math.ceil(size / batch)
    inside = inclusions(sampler, size, epochs * steps).reshape(epochs, steps, size)
    assert (inside.sum(1) == 1).all(), "everyone is in exactly one batch of each epoch"
    slots: NDArray[np.int64] = inside.argmax(1)
    return slots


def assert_sizes_are_binomial(sizes: NDArray[np.int64], size: int, rate: float) -> None:
    edges = binom.ppf(np.linspace(0.1, 0.9, 9), size, rate)
    shares = np.diff(np.concatenate([[0], binom.cdf(edges, size, rate), [1]]))
    found = np.bincount(np.searchsorted(edges, sizes), minlength=10)
    assert chisquare(found, shares * sizes.size).pvalue > 0.001
    assert abs(sizes.var() / (size * rate * (1 - rate)) - 1) < 5 * (2 / sizes.size) ** 0.5


# Poisson: everyone, in every step, by a coin of their own.


@each_way
def included(request: pytest.FixtureRequest) -> NDArray[np.bool_]:
    """Who was in which step, shape (STEPS, N)."""
    return inclusions(sampler_of("poisson", N, round(N * Q), request.param), N, STEPS)


@pytest.mark.promise("sampling")
def test_everyone_is_in_as_often_as_the_rate_says(included: NDArray[np.bool_]) -> None:
    """Counts per record are binomial: a shuffled partition gives everyone the same."""
    counts = included.sum(0)
    z = (counts - STEPS * Q) / (STEPS * Q * (1 - Q)) ** 0.5
    assert kstest(z, "norm").pvalue > 0.001
    assert np.abs(z).max() < 4.5
    assert chisquare(counts).pvalue > 0.001


@pytest.mark.promise("sampling")
def test_batch_sizes_are_binomial(included: NDArray[np.bool_]) -> None:
    assert_sizes_are_binomial(included.sum(1), N, Q)


@pytest.mark.promise("sampling")
@pytest.mark.parametrize("lag", [1, 2, N // 2])
def test_inclusions_are_independent(included: NDArray[np.bool_], lag: int) -> None:
    """Of the steps before, and of one's neighbours. A partition leaves whom it took out."""
    z = (included - Q) / (Q * (1 - Q)) ** 0.5
    for one, other in ((z[:-lag], z[lag:]), (z[:, :-lag], z[:, lag:])):
        assert abs((one * other).mean()) < 4 / one.size**0.5


# Balls in bins: an epoch's batches are bins, and everyone falls into one, whatever others do.

BATCH, EPOCHS = 32, 400
BINS = math.ceil(N / BATCH)


@each_way
def bins(request: pytest.FixtureRequest) -> NDArray[np.int64]:
    """The batch of each record in each epoch, shape (EPOCHS, N)."""
    return dealt(sampler_of("random-allocation", N, BATCH, request.param), N, BATCH, EPOCHS)


@pytest.mark.promise("sampling")
def test_bins_fill_as_independent_balls_fill_them(bins: NDArray[np.int64]) -> None:
    """Sizes are binomial, in every bin alike, the last one too: none is short or always full."""
    sizes = np.stack([(bins == k).sum(1) for k in range(BINS)], axis=1)  # (EPOCHS, BINS)
    assert_sizes_are_binomial(sizes.ravel(), N, 1 / BINS)
    assert chisquare(sizes.sum(0)).pvalue > 0.001
    assert len(set(sizes[:, -1].tolist())) > 10


@pytest.mark.promise("sampling")
@pytest.mark.parametrize("lag", [1, 2, N // 2])
def test_balls_are_independent(bins: NDArray[np.int64], lag: int) -> None:
    """Two records meet in a bin once in BINS epochs; a record meets its own last one as often."""
    rate = 1 / BINS
    for one, other in ((bins[:-lag], bins[lag:]), (bins[:, :-lag], bins[:, lag:])):
        assert abs((one == other).mean() - rate) < 4 * (rate * (1 - rate) / one.size) ** 0.5
        # Nor does the bin of one say anything else about that of the other.
        pairs = np.bincount((one * BINS + other).ravel(), minlength=BINS**2)
        assert chisquare(pairs).pvalue > 0.001


@pytest.mark.promise("sampling")
@pytest.mark.parametrize("name", ONCE_AN_EPOCH)
@either_way
def test_each_epoch_is_dealt_anew(name: str, secure: bool) -> None:
    epochs = dealt(sampler_of(name, 60, 20, secure), 60, 20, 50)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 50


# All of them.


@pytest.mark.parametrize("name", SAMPLERS)
@either_way
def test_draws_are_increasing_indices(name: str, secure: bool) -> None:
    drawn = sampler_of(name, 1000, 300, secure, seed=0).draw(1)
    assert drawn.dtype == np.int64
    assert (np.diff(drawn) > 0).all()
    assert drawn[0] >= 0
    assert drawn[-1] < 1000


def batches(sampler: Sampler, count: int) -> list[list[int]]:
    return [sampler.draw(step).tolist() for step in range(1, count + 1)]


@pytest.mark.promise("sampling")
@pytest.mark.parametrize("name", SAMPLERS)
@either_way
def test_a_batch_is_a_function_of_key_and_step(name: str, secure: bool) -> None:
    """In whatever order steps are asked for, as in a resumed run."""
    whole = batches(sampler_of(name, 50, 15, secure), 20)
    for step in (20, 1, 7, 5, 5, 4, 9):  # an epoch has 4 steps: its begin, middle and end
        again = sampler_of(name, 50, 15, secure)
        assert again.draw(step).tolist() == whole[step - 1]
        assert again.draw(1).tolist() == whole[0]


@pytest.mark.promise("sampling")
@pytest.mark.parametrize("name", ONCE_AN_EPOCH)
@either_way
def test_epochs_begin_with_the_keys_of_a_branch(name: str, secure: bool) -> None:
    """A branch is charged for its own epochs: it must not continue one of another key."""
    for base in (0, 3, 5):
        sampler = sampler_of(name, 50, 15, secure, base=base)
        drawn = np.concatenate([sampler.draw(base + step) for step in range(1, 5)])
        assert np.sort(drawn).tolist() == list(range(50))


# By a cipher: what each record's 64 bits decide.


def deal_words(monkeypatch: pytest.MonkeyPatch, *rounds: Sequence[int]) -> Iterator[Sequence[int]]:
    """Have the key stream give these words, a round a draw; what is left of them is returned."""
    left = iter(rounds)

    def words(self: Stretch, count: int, dtype: Any) -> NDArray[Any]:
        drawn = np.array(next(left), dtype)
        assert len(drawn) == count
        return drawn

    monkeypatch.setattr(Stretch, "generate_state", words)
    return left


def a_stretch() -> Stretch:
    return KeyStream(a_key(1)).at(1)


@pytest.mark.promise("sampling")
@pytest.mark.parametrize(
    ("size", "batch"), [(3, 1), (1437, 100), (60_000, 256), (50_000, 512), (7, 6), (10**9, 1)]
)
def test_no_record_is_drawn_more_often_than_is_priced(
    size: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word just below q 2^64 is in and the next is not, q being the rate that is priced."""
    priced = Fraction(batch / size)
    most = math.floor(priced * 2**64)
    draws = SecureDraws(3, a_stretch())
    deal_words(monkeypatch, [most - 1, most, most + 1], [0, 2**64 - 1, most - 1])
    assert [draws.independently(batch / size).tolist() for _ in range(2)] == [[0], [0, 2]]
    assert Fraction(most, 2**64) <= priced < Fraction(most + 1, 2**64)


@pytest.mark.promise("sampling")
def test_batches_are_drawn_at_the_rate_that_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the batch does not divide the number of records."""
    sampling = Poisson(n=7, batch_size=6)
    most = math.floor(Fraction(sampling.event(1.0, 1).sampling_rate) * 2**64)
    sampler = sampling.draws(a_key(1), secure=True)
    deal_words(monkeypatch, [most - 1, most, *[0] * 5])
    assert sampler.draw(1).tolist() == [0, 2, 3, 4, 5, 6]


@pytest.mark.promise("sampling")
@pytest.mark.parametrize(
    ("kind", "name"),
    [(Poisson, "poisson"), (RandomAllocation, "random-allocation")],
)
@either_way
def test_a_program_draws_what_it_states_and_pays_for(
    kind: type[BatchSampling], name: str, secure: bool
) -> None:
    """The rate is B/n also where the batch does not divide n, and a key begins an epoch."""
    sampling = kind(n=50, batch_size=15)
    assert sampling.event(1.5, 3) == TrainingEvent(15 / 50, 1.5, 3, name, 4)
    for base in (0, 3):
        drawn = sampling.draws(a_key(1), secure=secure, base=base)
        expected = sampler_of(name, 50, 15, secure, base=base)
        for step in range(base + 1, base + 9):
            assert drawn.draw(step).tolist() == expected.draw(step).tolist()


@pytest.mark.promise("sampling")
def test_a_word_is_used_once() -> None:
    """Word for word the key stream of the step, 64 bits per record."""
    keys = KeyStream(a_key(7))
    for step in range(4):
        nonce = bytes(4) + step.to_bytes(8, "little") + bytes(4)
        cipher = Cipher(algorithms.ChaCha20(a_key(7), nonce), None).encryptor()
        draws = SecureDraws(5, keys.at(step))
        for _ in range(3):
            words = np.frombuffer(cipher.update(bytes(64)), np.uint64)[:5]
            expected = np.flatnonzero(words < np.uint64(2**63))
            assert draws.independently(0.5).tolist() == expected.tolist()


@pytest.mark.promise("sampling")
@pytest.mark.parametrize(
    ("flags", "sampler"),
    [
        ({"physical_batch": 7}, "poisson"),
        ({}, "random-allocation"),
        ({"physical_batch": 1000}, "random-allocation"),
    ],
)
def test_a_run_samples_at_the_rate_that_is_priced(flags: dict[str, Any], sampler: str) -> None:
    """The expected batch over n, however few samples are worked on at a time."""
    config = resolve(
        {"dataset": "digits", "sigma": 4, "batch_size": 100, "seed": 3, "sampler": sampler, **flags}
    ).plan
    assert config.event.sampling_rate == 100 / 1437
    assert config.event.steps_per_epoch == 15
    trainer = run_trainer(config, steps=1)
    drawing = trainer.sampler
    assert drawing is not None
    sizes = [len(drawing.draw(step)) for step in range(1, 301)]
    assert trainer.mechanism.expected_batch == 100
    match sampler:
        case "poisson":
            assert abs(np.mean(sizes) - 100) < 4 * (100 * (1 - 100 / 1437) / 300) ** 0.5
            assert len(set(sizes)) > 10
        case "random-allocation":
            assert [sum(sizes[i : i + 15]) for i in range(0, 300, 15)] == [1437] * 20
            assert len(set(sizes)) > 10
