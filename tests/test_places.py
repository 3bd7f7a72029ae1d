"""Random places of records: no record changes those of others, or how they are rounded."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import binom, chisquare
from torch import Tensor, nn

from dpmac_cli import clipped_grad
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import ROUNDING, total_epsilon
from dpmac_cli.accounting.events import MOST_OVERFLOW, TrainingEvent
from dpmac_cli.accounting.places import OVERFLOW, log_tail, overflow_of, places_of
from dpmac_cli.accounting.selection import Search, trials_of
from dpmac_cli.dp.clipping import batch_invariance
from dpmac_cli.dp.clipping.batch_invariance import TRIED, chunks_alike, rows_of, unaffected
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.order_of_sums import _ordinary, _showing_order
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import InputError
from dpmac_cli.randomness.sampling import RandomPlaces
from dpmac_cli.runs.ledger import done
from dpmac_cli.training.chunks import BatchSum, ChunkedSum
from tests.helpers import make_trainer, planned, tiny_data, walk

pytestmark = pytest.mark.trial
KEY, DELTA = bytes(range(32)), 1e-5
#: Records of an attack, and what one unit more or less changes in a product rounded by place.
COPIES, ONE_ULP = 64, 2.0**-20

# Their number.


@pytest.mark.parametrize("sampler", ["poisson", "random-allocation"])
@pytest.mark.parametrize(
    ("records", "batch"), [(60_000, 256), (60_000, 4096), (1000, 16), (300, 299), (64, 64), (5, 1)]
)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("delta", [1e-20, 1e-5, 0.1])
@pytest.mark.promise("price")
def test_a_composition_has_more_records_than_places_as_rarely_as_delta_allows(
    sampler: str, records: int, batch: int, ranks: int, delta: float
) -> None:
    per_epoch = math.ceil(records / batch)
    allowed, share = min(OVERFLOW * delta, MOST_OVERFLOW), math.ceil(records / ranks)
    assert overflow_of(delta) == allowed
    event = TrainingEvent(batch / records, 1.0, 1000, sampler, per_epoch, overflow=allowed)
    places = places_of(event, records, ranks)
    once = sampler == "random-allocation"
    rate, times = (1 / per_epoch, per_epoch) if once else (event.sampling_rate, 1)
    # One of as many places is for the record that another run has more.
    assert binom.sf(places - 1, share, rate) * ranks * times <= allowed
    assert places <= share + 1
    if 1 < places <= share:
        assert binom.sf(places - 2, share, rate) * ranks * times >= 0.9 * allowed


def test_a_full_batch_has_a_place_for_one_record_more() -> None:
    assert places_of(TrainingEvent(1.0, 1.0, 10, overflow=MOST_OVERFLOW), 128) == 129


def test_without_an_overflow_that_is_covered_there_is_a_place_for_every_record() -> None:
    assert places_of(TrainingEvent(0.01, 1.0, 10), 1000) == 1001


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3, 0.999])
def test_the_tail_is_an_upper_bound_that_is_nearly_exact(rate: float) -> None:
    for least in (math.floor(1000 * rate + 5), 900, 1000):
        if least > 1000 * rate:
            each = binom.logpmf(np.arange(least, 1001), 1000, rate)
            exact = float(logsumexp(each))
            assert exact - 1e-6 <= log_tail(1000, rate, least) <= exact + 1.5
    assert log_tail(1000, rate, 1001) == -math.inf


@pytest.mark.promise("price")
@pytest.mark.parametrize("delta", [0.1, DELTA, 1e-16])
def test_delta_covers_more_records_than_places(delta: float) -> None:
    """Where it is taken off by rounding, and by RDP, which takes off nothing else."""
    steps, overflow = 1_000_000, overflow_of(delta)
    assert MOST_OVERFLOW + 4e-17 <= ROUNDING
    plain = TrainingEvent(0.01, 1.0, steps)
    without = [total_epsilon((plain,), d, "rdp") for d in (delta, delta - overflow * steps)]
    assert without[0] < without[1]
    placed = replace(plain, overflow=overflow)
    assert total_epsilon((placed,), delta, "rdp") == without[1]
    with pytest.raises(InputError, match="overflow must be from 0 to 5e-16"):
        replace(plain, overflow=2 * MOST_OVERFLOW)


@pytest.mark.promise("price")
def test_a_composition_covers_the_places_of_all_trainings() -> None:
    """Each has as many as its own delta allows, which may be larger than that of the whole."""
    small, steps = 1e-16, 50
    parts = [TrainingEvent(0.01, s, steps, overflow=overflow_of(DELTA)) for s in (3.0, 4.0)]
    plain = tuple(replace(part, overflow=0.0) for part in parts)
    account = Account(event=parts[0], earlier=(done(parts[1]),), delta=2 * small)
    account.begin(account.steps(steps))
    assert account.epsilon == total_epsilon(plain, small) < math.inf
    account.delta = small
    assert math.isinf(account.epsilon)


@pytest.mark.promise("price")
def test_a_search_covers_the_places_of_all_trials() -> None:
    """Their number is that of a training at delta, and a trial costs what it does at less."""
    trials, delta, steps = trials_of(1000), 1e-17, 1_000_000
    plain = TrainingEvent(0.01, 1.0, steps)
    placed = replace(plain, overflow=overflow_of(delta))
    found = Search(trials, ((placed,),)).trial_epsilon(delta / trials.mean)
    kept = delta / trials.mean - steps * overflow_of(delta)
    assert found == total_epsilon((plain,), kept) > total_epsilon((plain,), delta / trials.mean)


# Draws.


@pytest.mark.promise("alone")
def test_places_are_drawn_without_replacement_anew_in_each_step_and_rank() -> None:
    places = RandomPlaces(KEY, 7)
    drawn = [places.draw(step, 7) for step in range(1, 2001)]
    assert all(sorted(each) == list(range(7)) for each in drawn)
    for record in range(7):
        counts = np.bincount([each[record] for each in drawn], minlength=7)
        assert chisquare(counts).pvalue > 1e-6
    assert (places.draw(3, 7) == RandomPlaces(KEY, 7).draw(3, 7)).all()
    many = [RandomPlaces(KEY, 50, rank).draw(3, 50).tolist() for rank in range(3)]
    assert len({*map(tuple, many)}) == 3


@pytest.mark.promise("alone")
def test_equal_words_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the order of records would decide between them."""
    words = iter([np.array([5, 1, 5], np.uint64), np.array([9, 1, 5], np.uint64)])

    class Stretch:
        def generate_state(self, count: int, dtype: Any) -> NDArray[np.uint64]:
            return next(words)

    places = RandomPlaces(KEY, 3)
    monkeypatch.setattr(places._keys, "at", lambda *_: Stretch())
    assert places.draw(1, 3).tolist() == [1, 2, 0]


# Sums.


@torch.library.custom_op("dpmac_tests::sum_by_place", mutates_args=())
def sum_by_place(x: Tensor) -> Tensor:
    """Sums over columns: at odd places, from the last to the first."""
    forwards, backwards = x[:, 0].clone(), x[:, -1].clone()
    for column in range(1, x.shape[1]):
        forwards += x[:, column]
        backwards += x[:, -1 - column]
    return torch.where(torch.arange(len(x)) % 2 == 0, forwards, backwards)


class ByPlace(nn.Module):
    """A product that rounds by place, as seen by torch below vmap, and a hinge at a kink."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def hinge(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """0 at the kink: an ulp decides whether a record has a gradient."""
    x, y = batch
    scores: Tensor = model(x)[:, 0]
    return torch.relu(1 - y * scores) * 8


@pytest.fixture
def by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round products by the place of a row, every other one."""

    def product(self: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        found = a @ b
        odd = torch.arange(len(a)).view(-1, 1) % 2
        self.needed = True
        return found - ONE_ULP * odd.to(found)

    monkeypatch.setattr("dpmac_cli.dp.clipping.matmul.RowProducts._product", product)


def sums_of(physical: int = 256, batch: int = COPIES) -> BatchSum:
    clipped = clipped_grad(ByPlace(), hinge, ball(1.0), batch_size=batch, physical_batch=physical)
    return clipped.prepare((torch.zeros(1, 4), torch.zeros(1)))


def kink(copies: int) -> tuple[Tensor, Tensor]:
    """Copies of a record at the kink, each followed by one far from it, which has no gradient."""
    far = torch.arange(copies) % 2
    return torch.full((copies, 4), 0.25) * (1 + far.view(-1, 1)), torch.ones(copies)


def added(
    sums: BatchSum, records: NDArray[np.int64], at: NDArray[np.int64] | None = None
) -> Tensor:
    """The sum over some of 64 copies at the kink, with given places of all of them."""
    x, y = kink(COPIES)
    if at is not None:
        places = iter([at])

        def arranged(samples: int, step: int, chunk: int) -> NDArray[np.int64]:
            return next(places)

        sums._arranged = arranged  # type: ignore[method-assign]
    with torch.no_grad(), sums.given(records, (x[records], y[records])):
        return sums.of(records, 1, RegionMetric(ball(1.0)), sums.chunk)[0].double().clone()


@pytest.mark.promise("alone")
@pytest.mark.parametrize("physical", [256, 20])
def test_with_random_places_a_record_moves_the_sum_by_its_own_gradient(
    by_place: None, physical: int
) -> None:
    """Other records keep their places when it is removed, so they are rounded as before."""
    sums = sums_of(physical)
    assert sums.placed
    assert "random places" in sums.notes[-1]
    places = sums._arranged(COPIES, 1, sums.chunk)
    everyone, moves = np.arange(COPIES), []
    for removed in (0, 1, 7, 40, 63):
        at = np.where(places == removed, -1, places)
        rest = np.delete(everyone, removed)
        renumbered = np.where(at > removed, at - 1, at)
        whole = added(sums, everyone, places)
        moves.append(float((whole - added(sums, rest, renumbered)).norm()))
    assert max(moves) <= 1
    assert whole.norm() > 5


@pytest.mark.promise("alone")
def test_without_random_places_the_same_attack_succeeds(
    by_place: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkedSum, "_tried", lambda *_: True)
    sums, everyone = sums_of(), np.arange(COPIES)
    assert not sums.placed
    whole = added(sums, everyone)
    assert max(float((whole - added(sums, everyone[n:])).norm()) for n in (1, 33)) > 1


@pytest.mark.promise("alone")
def test_the_number_of_rows_and_the_other_places_do_not_depend_on_a_record(
    by_place: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a step draws none at all, whose chunks are not computed."""
    sums, shapes = sums_of(physical=20, batch=COPIES), list[tuple[int, int]]()
    compute = sums.clipped_sum.of

    def note(x: Any, y: Any, metric: Any, out: Tensor, counted: Tensor) -> None:
        shapes.append((len(x[0]), len(counted)))
        compute(x, y, metric, out, counted)

    monkeypatch.setattr(sums.clipped_sum, "of", note)
    for count in (0, 1, 63, 64):
        records = np.arange(count)
        assert added(sums, records).shape == sums.theta.shape
    assert {rows for pair in shapes for rows in pair} == {shapes[0][0]}


@pytest.mark.promise("alone")
def test_a_trial_shows_the_order_of_sums_whatever_the_numbers_are() -> None:
    """Whole numbers add up to the same in any order."""
    rows = torch.arange(6.0 * TRIED).view(TRIED, 6)
    assert sum_by_place(rows).equal(rows.sum(1))
    assert not chunks_alike(sum_by_place, rows, 50)
    assert chunks_alike(lambda x: x.sum(1), rows, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_show_an_order_are_of_all_sizes_and_both_signs(dtype: torch.dtype) -> None:
    numbers = torch.randn(100, 100, dtype=dtype)
    for made, least, largest in ((_showing_order, 2.0**-12, 2.0**13), (_ordinary, 0.5, 2.0)):
        found = made(numbers)
        assert found.dtype == dtype
        assert found.abs().min() < 1.1 * least
        assert 0.9 * largest < found.abs().max() <= largest
        assert 0.45 < (found > 0).double().mean() < 0.55
        last_bits = made(torch.nextafter(numbers, numbers + 1))
        assert (last_bits == found).double().mean() < 1e-3
        assert made(numbers[:, 1::3]).equal(found[:, 1::3])
    assert _showing_order(numbers[:1, 1::3].expand(7, -1)).stride() == (0, 3)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("physical", [10, 40, 1000])
@pytest.mark.parametrize("optimizer", ["dp-sgd", "dp-macadam"])
def test_random_places_change_no_step_by_more_than_rounding(
    physical: int, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, data = planned(physical_batch=physical), tiny_data(torch.float64, records=90)
    expected = walk(make_trainer(optimizer, plan=plan, data=data), 3)
    monkeypatch.setattr(ChunkedSum, "_needs_places", lambda *_: True)
    trainer = make_trainer(optimizer, plan=plan, data=data)
    assert trainer.sums.placed
    torch.testing.assert_close(walk(trainer, 3), expected)


def test_more_records_than_places_get_more_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedSum, "_needs_places", lambda *_: True)
    trainer = make_trainer("dp-sgd", data=tiny_data(torch.float64, records=400))
    sums = trainer.sums
    count = sums._places.count
    for samples in (0, count, count + 1, 3 * count + 1):
        at = sums._arranged(samples, 1, sums.chunk)
        assert sorted(at[at >= 0]) == list(range(samples))
        assert len(at) >= max(count, samples)
        assert len(at) % sums.chunk == 0


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    "activation", [nn.Sigmoid, nn.SiLU, nn.Softplus, nn.ELU, nn.Mish, nn.GELU, nn.Tanh]
)
def test_the_ends_of_elementwise_operations_round_no_row_otherwise(
    activation: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes the last elements of a tensor by other code, unless it has whole blocks."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch)
        return outputs.square().sum(1)

    network = nn.Sequential(nn.Linear(6, 5), activation(), nn.Linear(5, 1))
    sums = clipped_grad(network, loss, ball(1.0), batch_size=40).prepare(torch.zeros(1, 6))
    assert not sums.placed
    assert sums._block == 32
    seen, compute = list[int](), sums.clipped_sum.of

    def note(x: Tensor, *rest: Any) -> None:
        seen.append(len(x))
        results = sums.per_sample.observed(x[:1].expand(len(x), 6).contiguous(), ())
        assert all(bool((rows == rows[0]).all()) for rows in results)
        compute(x, *rest)

    monkeypatch.setattr(sums.clipped_sum, "of", note)
    for count in (1, 31, 33, 50):
        records, batch = np.arange(count), torch.randn(count, 6)
        with torch.no_grad(), sums.given(records, batch):
            sums.of(records, 1, RegionMetric(ball(1.0)), sums.chunk)
    assert seen == [32, 32, 64, 64]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads of torch, also on a machine with fewer cores."""
    before, count = torch.get_num_threads(), int(request.param)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


def wide(width: int) -> nn.Sequential:
    """A network whose hidden layer has elements enough to be shared by threads."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Mish(), nn.Linear(width, 1))


@pytest.mark.promise("alone")
@pytest.mark.parametrize(("threads", "width"), [(2, 160), (2, 161), (4, 160)], indirect=["threads"])
def test_threads_that_share_an_elementwise_operation_round_no_row_otherwise(
    threads: int, width: int
) -> None:
    """Each thread computes the last elements of its own share by other code."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch)
        return outputs.square().sum(1)

    sums = clipped_grad(wide(width), loss, ball(1.0), batch_size=1024, physical_batch=384)
    chunks = sums.prepare(torch.zeros(1, 6))
    assert not chunks.placed
    record = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    for count in (384, 353, 225, 224, 223, 97):
        rows = rows_of(count, chunks.chunk, chunks._block)
        with torch.no_grad():
            results = chunks.per_sample.observed(record.repeat(rows, 1), ())
        assert all(bool((copies == copies[0]).all()) for copies in results), count


@pytest.mark.promise("alone")
@pytest.mark.parametrize("threads", [5], indirect=True)
def test_more_threads_need_random_places(threads: int) -> None:
    """No number of rows divides the shares of all numbers of threads."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1)  # type: ignore[no-any-return]

    for width, placed in ((160, True), (16, False)):
        sums = clipped_grad(wide(width), loss, ball(1.0), batch_size=200)
        assert sums.prepare(torch.zeros(1, 6)).placed == placed


@pytest.mark.promise("alone")
@pytest.mark.parametrize("threads", [3, 5], indirect=True)
def test_threads_round_no_row_of_a_fixed_number_otherwise(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in covered scores and histograms, also where a trial would see nothing."""
    monkeypatch.setattr(batch_invariance, "_tried_alike", lambda *_: True)
    run = unaffected(wide(601)[:2], torch.zeros(6), 128, may_mix=True)
    record = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    found = run(record.repeat(128, 1))
    assert bool((found == found[0]).all())
