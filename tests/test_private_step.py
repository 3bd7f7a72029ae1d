"""A private step on the batches of a program: any network, any loss, any dataset."""

import copy
import ctypes
import itertools
import multiprocessing
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, default_collate

from dpmac_cli import (
    Account,
    ArrayData,
    BudgetError,
    InputError,
    Poisson,
    PrivateStep,
    RandomAllocation,
    Settings,
    clipped_grad,
    make_private,
    total_epsilon,
)
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.config.settings import DELTA
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.keystream import STREAMS, Keys, make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.training import memory, private_program, private_step
from dpmac_cli.training.chunks import BatchSum
from dpmac_cli.training.step import Step
from tests.helpers import equal_keys, without
from tests.test_resume import Draws

WORDS, LENGTH, RECORDS, BATCH = 20, 6, 200, 12
#: Noise that is cheap to price.
SIGMA = 6.0
SETTINGS: dict[str, Any] = {"sigma": SIGMA, "steps": 6, "lr": 0.01}


class Notes(Dataset[dict[str, Tensor]]):
    """Texts of unequal length, padded, each with a mask and a label."""

    def __init__(self, records: int = RECORDS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, WORDS, (records, LENGTH), generator=generator)
        self.lengths = torch.randint(1, LENGTH + 1, (records,), generator=generator)
        self.labels = torch.randint(0, 2, (records,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        return {
            "input_ids": self.ids[index] * mask,
            "attention_mask": mask,
            "labels": self.labels[index],
        }


class Reader(nn.Module):
    """Classifies the mean of the vectors of the words; takes keyword arguments, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        mask = attention_mask.unsqueeze(2).float()
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return {"logits": self.head(torch.tanh(mean))}


def reader() -> nn.Module:
    torch.manual_seed(0)
    return Reader()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return cross_entropy(model(**inputs)["logits"], batch["labels"], reduction="none")


POISSON = Poisson(n=RECORDS, batch_size=BATCH)


def placed(event: TrainingEvent) -> TrainingEvent:
    """Return the event of steps of a program that has as few random places as delta allows."""
    return replace(event, overflow=overflow_of(DELTA))


def started(**changes: Any) -> PrivateStep:
    return PrivateStep(reader(), loss, **{"sampling": POISSON, **SETTINGS, **changes})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.promise("target")
@pytest.mark.parametrize("optimizer", ["dp-sgd", "dp-macadam"])
def test_a_program_trains_on_dicts_and_pays_what_its_steps_cost(optimizer: str) -> None:
    step = started(optimizer=optimizer)
    assert (len(step), step.epsilon, step.notes) == (6, 0.0, ())
    before = weights(step.model).clone()
    for number, batch in enumerate(step.loader(Notes()), 1):
        assert step(batch) == number
        assert step.event == placed(POISSON.event(SIGMA, number))
        assert step.epsilon == total_epsilon((step.event,), step.delta)
    assert number == 6
    assert not weights(step.model).equal(before)
    with pytest.raises(BudgetError, match="All 6 steps"):
        step(batch)


def test_a_program_changes_the_learning_rate() -> None:
    step = started()
    batches = step.loader(Notes())
    step(next(batches))
    before = weights(step.model).clone()
    step.lr = 0.0
    step(next(batches))
    assert weights(step.model).equal(before)
    step.lr = 0.01
    step(next(batches))
    assert not weights(step.model).equal(before)


# What is trained on is what was drawn.


@pytest.mark.promise("sampling")
def test_the_loader_draws_what_is_accounted_for() -> None:
    """Every batch has the rows of the sampler's draw, in order, and each of them once."""
    notes, step = Notes(), started(steps=30)
    drawn = POISSON.draws(step._keys.sampler)
    for number, batch in enumerate(step.loader(notes), 1):
        rows = drawn.draw(number)
        assert batch["input_ids"].equal(torch.stack([notes[int(i)]["input_ids"] for i in rows]))
        assert batch["labels"].equal(notes.labels[torch.from_numpy(rows)])
        step(batch)


def odd_batches(batch: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """What a program may make of the batch that was drawn."""
    yield "a row less", {name: t[1:] for name, t in batch.items()}
    yield "a row twice", {name: torch.cat([t, t[:1]]) for name, t in batch.items()}
    yield "another order", {name: t.flip(0) for name, t in batch.items()}
    yield "a copy", {name: t.clone() for name, t in batch.items()}
    yield "only the same tensors", dict(batch)


@pytest.mark.promise("sampling")
def test_a_batch_that_was_not_drawn_for_the_step_is_refused() -> None:
    step, epsilon = started(), 0.0
    for number, batch in enumerate(step.loader(Notes())):
        for _, odd in odd_batches(batch):
            with pytest.raises(InputError, match="not the one that the loader drew"):
                step(odd)
        assert step.epsilon == epsilon, "a refused batch costs nothing"
        if number == 3:
            batch["labels"][:1] = 1 - batch["labels"][:1]  # changed in place
            with pytest.raises(InputError, match="not the one that the loader drew"):
                step(batch)
            break
        step(batch)
        epsilon = step.epsilon
        with pytest.raises(InputError, match="not the one that the loader drew"):
            step(batch)  # again
    loader = step.loader(Notes())
    next(loader)  # left out
    with pytest.raises(InputError, match="not the one that the loader drew"):
        step(next(loader))


def doubled(records: list[Any]) -> Any:
    return {name: torch.stack([r[name] for r in [*records, *records]]) for name in records[0]}


def to_the_longest(records: list[Any]) -> Any:
    longest = max(int(r["attention_mask"].sum()) for r in records)
    return {
        name: torch.stack([r[name][:longest] if r[name].ndim else r[name] for r in records])
        for name in records[0]
    }


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (doubled, "2 rows for one record"),
        (to_the_longest, "Pad to a fixed length"),
        (lambda records: {"text": ["a"] * len(records)}, "a str as batch"),
        (lambda records: {"n": torch.tensor(1.0)}, "no dimension for one record"),
        (lambda records: records[7], "cannot be read by index"),
    ],
)
def test_a_record_that_is_not_one_row_of_one_shape_is_refused(collate: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        trained(started(), Notes(), collate=collate)


@pytest.mark.promise("published")
@pytest.mark.parametrize("first", [True, False])
def test_no_error_quotes_a_record(first: bool) -> None:
    """Neither that of the first record nor of another one, nor what they were raised from."""
    records = Notes()

    def collate(given: list[Any]) -> Any:
        if first or not given[0]["input_ids"].equal(records[0]["input_ids"]):
            raise ValueError(f"secret {given[0]['input_ids'].tolist()}")
        return default_collate(given)

    with pytest.raises(InputError) as caught:
        trained(started(), records, collate=collate)
    said = "".join(traceback.format_exception(caught.value))
    assert "ValueError" in said
    assert "secret" not in said.replace("raise ValueError(f", "")
    if first:
        assert "Record 0 cannot be read by index: ValueError at test_private_step.py" in said


class Reusing(Notes):
    """Writes every record to the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Tensor] = {}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        for name, value in super().__getitem__(index).items():
            self.memory.setdefault(name, value.clone()).copy_(value)
        return self.memory


class Jittered(Notes):
    """Adds a random number to every record."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "jitter": torch.rand((), dtype=torch.float64)}


def test_random_transforms_are_others_in_every_step_and_for_every_record() -> None:
    seen = list[float]()
    step = started(sampling=Poisson(n=RECORDS, batch_size=RECORDS), steps=2)
    for batch in step.loader(Jittered()):
        seen += batch["jitter"].tolist()
        step(batch)
    assert len(seen) == len(set(seen)) == 2 * RECORDS


class Widening(Notes):
    """Has one record of another type of numbers."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        kind = torch.float64 if index == RECORDS // 2 + 1 else torch.float32
        return {**super().__getitem__(index), "weight": torch.ones((), dtype=kind)}


def as_views(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value[None] for name, value in records[0].items()}


@pytest.mark.promise("reading")
@pytest.mark.parametrize("collate", [None, as_views])
def test_a_record_of_another_type_does_not_change_the_batch(collate: Any) -> None:
    step = started(sampling=Poisson(n=RECORDS, batch_size=RECORDS))
    with pytest.raises(InputError, match=r"batch\['weight'\] of a record has shape"):
        next(step.loader(Widening(), collate))


@pytest.mark.promise("alone")
def test_records_in_the_same_memory_are_rows_of_their_own() -> None:
    """Otherwise the last record of a batch would be all of them."""
    step = started()
    batch = next(step.loader(Reusing(), as_views))
    rows = POISSON.draws(step._keys.sampler).draw(1)
    assert batch["input_ids"].equal(torch.stack([Notes()[int(i)]["input_ids"] for i in rows]))
    assert batch["labels"].equal(Notes().labels[torch.from_numpy(rows)])


class Counting(Notes):
    """A record depends on those that were read before."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        record = super().__getitem__(index)
        return {**record, "input_ids": (record["input_ids"] + self.reads) % WORDS}


class Accumulating:
    """A collate function that keeps a sum of the records that it has seen."""

    def __init__(self) -> None:
        self.total = torch.zeros(LENGTH, dtype=torch.long)

    def __call__(self, records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.total += records[0]["input_ids"]
        return {**as_views(records), "input_ids": (self.total % WORDS)[None]}


@pytest.mark.promise("alone")
@pytest.mark.parametrize(("dataset", "collate"), [(Counting, None), (Notes, Accumulating)])
def test_records_that_are_others_when_they_are_read_again_are_refused(
    dataset: type[Notes], collate: Any
) -> None:
    """One could change others."""
    with pytest.raises(InputError, match="another one when it is read again"):
        started().loader(dataset(), None if collate is None else collate())


class Threaded(Notes):
    """A transform that computes with the threads of its process."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        record = super().__getitem__(index)
        return {**record, "labels": torch.tensor(torch.get_num_threads())}


@pytest.mark.promise("alone")
def test_records_are_read_on_one_thread_as_in_a_worker() -> None:
    """Transforms round alike, however many workers there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert set(next(started().loader(Threaded()))["labels"].tolist()) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.promise("alone")
@pytest.mark.parametrize("by", ["data", "numpy"])
def test_what_torch_does_not_see_being_written_to_a_batch_has_no_effect(by: str) -> None:
    """Neither of these raises a version counter."""
    with equal_keys():
        step, expected = started(), trained(started(), Notes())
    for batch in step.loader(Notes()):
        if by == "data":
            batch["labels"].data.copy_(1 - batch["labels"])
        else:
            batch["labels"].numpy()[:] = 0
            batch["input_ids"].numpy()[:] = 3
        step(batch)
    assert weights(step.model).equal(expected)


@pytest.mark.promise("failed")
def test_threads_take_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step, summed = started(), BatchSum.of
    inside, most = list[int](), list[int]()

    def slowly(*args: Any) -> Any:
        inside.append(1)
        time.sleep(0.02)
        most.append(len(inside))
        found = summed(*args)
        inside.pop()
        return found

    monkeypatch.setattr(BatchSum, "of", slowly)
    batch = next(step.loader(Notes()))

    def taken(_: int) -> int:
        with suppress(InputError):  # the batch was taken by another thread
            return step(batch)
        return 0

    with ThreadPoolExecutor(3) as threads:
        numbers = [*threads.map(taken, range(3))]
    assert (sorted(numbers), most, step.event.steps) == ([0, 0, 1], [1], 1)


# Any worker, and any interruption, leads to the same weights.


def trained(step: PrivateStep, dataset: Any, **options: Any) -> Tensor:
    for batch in step.loader(dataset, **{"collate_fn": options.pop("collate", None), **options}):
        step(batch)
    return weights(step.model)


def saved_after(step: PrivateStep, steps: int, records: int = RECORDS) -> dict[str, Any]:
    for batch in step.loader(Notes(records)):
        if step(batch) == steps:
            break
    return copy.deepcopy(step.state_dict())


@pytest.mark.promise("published")
def test_no_record_is_in_a_state() -> None:
    structure = saved_after(started(), 1)["structure"]
    assert structure.keys() == Notes()[0].keys()
    assert not any(bool(part.any()) for part in structure.values())


@pytest.mark.promise("resume")
def test_a_training_that_was_killed_goes_on_and_counts_the_lost_steps() -> None:
    first, again = started(steps=20), started(steps=20)
    state = saved_after(first, 7)
    for batch in itertools.islice(first.loader(Notes()), 3):
        first(batch)
    again.load_state_dict(state, taken=10)
    assert again.taken == 7
    assert weights(again.model).equal(state["tensors"]["theta"])
    assert again.epsilon == first.epsilon == total_epsilon((POISSON.event(SIGMA, 10),), again.delta)
    trained(again, Notes())
    assert again.taken == len(again) == 20
    assert again.epsilon == total_epsilon((POISSON.event(SIGMA, 23),), again.delta)


@pytest.mark.promise("resume")
def test_a_training_that_was_resumed_often_counts_each_step_once() -> None:
    """``taken`` is the number of steps in all: two in each process, and one that is lost."""
    step = started(steps=20)
    for process in range(1, 5):
        batches = step.loader(Notes())
        for batch in itertools.islice(batches, 2):
            step(batch)
        state = copy.deepcopy(step.state_dict())
        step(next(batches))
        assert step.begun == 3 * process
        assert step.epsilon == total_epsilon((POISSON.event(SIGMA, 3 * process),), step.delta)
        begun, step = step.begun, started(steps=20)
        with pytest.raises(InputError, match=f"but the state holds {begun - 1} of"):
            step.load_state_dict(state, taken=begun - 2)
        step.load_state_dict(state, taken=begun)
        assert (step.begun, step.taken) == (begun, 2 * process)


@pytest.mark.promise("resume")
def test_steps_of_another_training_are_not_among_those_that_were_taken() -> None:
    first = started()
    trained(first, Notes())
    second = PrivateStep(first.model, loss, sampling=POISSON, **SETTINGS)
    state, again = saved_after(second, 2), started()
    again.load_state_dict(state, taken=2)
    assert again.epsilon == second.epsilon
    assert (again.begun, second.begun) == (2, 2)


@pytest.mark.promise("resume")
def test_no_noise_and_no_batch_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever continues from a state, also from the same one; and no key is in the state."""
    keys = list[Keys]()

    def kept(*given: Any, **options: Any) -> Keys:
        keys.append(make_keys(*given, **options))
        return keys[-1]

    draws = Draws(monkeypatch)
    for module in (private_program, private_step):
        monkeypatch.setattr(module, "make_keys", kept)
    first, again, another = started(), started(), started()
    state = dict[str, Any]()
    for batch in first.loader(Notes()):
        if first(batch) == 2:
            state = copy.deepcopy(first.state_dict())
        if first.taken == 4:  # two steps more, which are lost
            break
    for step in (again, another):
        step.load_state_dict(state, taken=4)
        trained(step, Notes())
    assert not any(a.eq(b).any() for a, b in itertools.combinations(draws.noise, 2))
    assert len({*draws.batches}) == len(draws.batches) == 12
    written = pickle.dumps(state) + repr(state).encode()
    for each in keys:
        for name in STREAMS:
            key = getattr(each, name)
            assert key not in written
            assert key.hex().encode() not in written


@pytest.mark.promise("resume")
def test_a_continued_training_begins_an_epoch() -> None:
    """A record is in one batch of each epoch that is counted."""
    drawn = RandomAllocation(n=RECORDS, batch_size=BATCH)
    settings: dict[str, Any] = {**SETTINGS, "steps": 2 * drawn.steps_per_epoch}
    first, again = (PrivateStep(reader(), loss, sampling=drawn, **settings) for _ in range(2))
    again.load_state_dict(saved_after(first, 1), taken=1)
    rows = []
    for batch in again.loader(Notes()):
        rows.append(len(batch["labels"]))
        again(batch)
    assert sum(rows[: drawn.steps_per_epoch]) == RECORDS
    counted = (drawn.event(SIGMA, 1), drawn.event(SIGMA, settings["steps"] - 1))
    assert again.epsilon == total_epsilon(counted, again.delta)


@pytest.mark.promise("sampling")
def test_another_loader_begins_an_epoch_and_counts_the_one_before() -> None:
    """The dataset may be in another order, by which a record could be twice in an epoch."""
    drawn = RandomAllocation(n=RECORDS, batch_size=BATCH)
    length = drawn.steps_per_epoch
    step = PrivateStep(reader(), loss, sampling=drawn, **{**SETTINGS, "steps": 3 * length})
    first = step.loader(Notes())
    for batch in itertools.islice(first, 2):
        step(batch)
    rows, second = list[int](), step.loader(Notes())
    assert step.event == placed(drawn.event(SIGMA, length))
    with pytest.raises(InputError, match="this earlier loader has ended"):
        next(first)
    for batch in itertools.islice(second, length):
        rows.append(len(batch["labels"]))
        step(batch)
    assert sum(rows) == RECORDS
    step.loader(Notes())
    assert step.event == placed(drawn.event(SIGMA, 2 * length)), (
        "an epoch that ended is left as it is"
    )
    assert step.epsilon == total_epsilon((step.event,), step.delta)
    last = trained(step, Notes())
    assert (step.taken, len(step)) == (2 + 2 * length,) * 2
    assert step.event == placed(drawn.event(SIGMA, 3 * length))
    assert weights(step.model).equal(last)


def test_a_dataset_without_a_length_is_refused() -> None:
    class Streamed(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(Notes())

    with pytest.raises(InputError, match=r"Streamed has no length.*Pass a map-style"):
        started().loader(Streamed())


@pytest.mark.promise("noise")
def test_a_seed_is_refused_in_a_program() -> None:
    """Two trainings, or a state that is loaded twice, would add the same noise to two sums."""
    with pytest.raises(InputError, match="seed: a program has none"):
        started(seed=0)
    with pytest.raises(InputError, match="seed: a program has none"):
        make_private(nn.Linear(64, 10), "digits", Settings(seed=0, sigma=SIGMA))


@pytest.mark.promise("target")
def test_a_training_for_an_epsilon_keeps_to_it() -> None:
    settings: dict[str, Any] = {"steps": 20, "epsilon": 2.0, "sigma": None}
    settings["sampling"] = Poisson(n=10, batch_size=10)  # cheap to price
    first, again, done = (started(**settings) for _ in range(3))
    saved = saved_after(first, 7, 10)
    again.load_state_dict(saved, taken=10)
    assert len(again) == 17
    trained(again, Notes(10))
    assert 1.9 < again.epsilon <= 2.0
    done.load_state_dict(saved, taken=20)
    assert len(done) == done.taken == 7
    with pytest.raises(BudgetError):
        done(Notes()[0])


@pytest.mark.promise("resume")
def test_a_state_may_be_loaded_with_other_settings() -> None:
    other, saved = Poisson(n=RECORDS, batch_size=BATCH // 2), saved_after(started(), 2)
    step = started(sampling=other, sigma=2.0)
    step.load_state_dict(saved, taken=3)
    again = PrivateStep(copy.deepcopy(step.model), loss, sampling=POISSON, **SETTINGS)
    assert again.epsilon == total_epsilon((POISSON.event(SIGMA, 3),), step.delta)
    step(next(iter(step.loader(Notes()))))
    events = (POISSON.event(SIGMA, 3), other.event(2.0, 1))
    assert step.epsilon == total_epsilon(events, step.delta)
    new = PrivateStep(step.model, loss, sampling=POISSON, **SETTINGS)
    assert new.epsilon == pytest.approx(step.epsilon, rel=1e-9)


@pytest.mark.promise("resume")
def test_a_state_is_loaded_with_the_steps_that_were_taken() -> None:
    saved = saved_after(started(), 2)
    for taken in (1, 7):
        with pytest.raises(InputError, match=f"taken is {taken}, but the state holds 2 of 6"):
            started().load_state_dict(saved, taken=taken)
    step = started()
    step.load_state_dict(saved, taken=2)
    with pytest.raises(InputError, match="into a new PrivateStep"):
        step.load_state_dict(saved, taken=2)
    with pytest.raises(ModelError, match="belongs to another model or optimizer"):
        started(optimizer="dp-sgd").load_state_dict(saved, taken=2)
    with pytest.raises(InputError, match="This is not a state of PrivateStep"):
        started().load_state_dict(reader().state_dict(), taken=2)


# With an account on disk.


def counted(steps: int) -> float:
    return total_epsilon((POISSON.event(SIGMA, steps),), DELTA)


@pytest.mark.promise("ledger")
def test_a_step_is_in_the_account_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account.create(tmp_path / "account.json", delta=1e-5)
    begun, draw = list[int](), Step._draw

    def drawn(step: Step) -> Any:
        begun.append(sum(event.steps for event in Account.open(tmp_path / "account.json").own))
        return draw(step)

    monkeypatch.setattr(Step, "_draw", drawn)
    step = started(account=account)
    trained(step, Notes())
    assert begun == [1, 2, 3, 4, 5, 6]
    assert account.epsilon == step.epsilon == counted(6)


@pytest.mark.promise("ledger")
def test_trainings_on_the_same_records_share_an_account(tmp_path: Path) -> None:
    """Of another network, of the same one, and of a copy that another process loaded."""
    path = tmp_path / "account.json"
    Account.create(path, delta=1e-5)
    first = started(account=Account.open(path))
    trained(first, Notes())
    second = started(account=Account.open(path))
    assert second.epsilon == counted(6)
    trained(second, Notes())
    third = PrivateStep(
        second.model, loss, sampling=POISSON, account=Account.open(path), **SETTINGS
    )
    trained(third, Notes())
    fourth = PrivateStep(
        pickle.loads(pickle.dumps(third.model)),
        *(loss,),
        sampling=POISSON,
        account=Account.open(path),
        **SETTINGS,
    )
    assert first.epsilon == fourth.epsilon == counted(18)
    elsewhere = PrivateStep(third.model, loss, sampling=POISSON, **SETTINGS)
    assert elsewhere.epsilon == counted(18), "the network carries what its weights came from"
    assert b"account.json" not in pickle.dumps(third.model)


@pytest.mark.promise("resume")
@pytest.mark.parametrize("saved", [0, 2])
def test_a_killed_training_continues_with_its_account(tmp_path: Path, saved: int) -> None:
    """Also one that was killed before it saved a state."""
    path = tmp_path / "account.json"
    first = started(account=Account.create(path, delta=1e-5))
    state = dict[str, Any]()
    for batch in itertools.islice(first.loader(Notes()), 4):
        if first(batch) == saved:
            state = copy.deepcopy(first.state_dict())
    again = started(account=Account.open(path))
    if saved:
        again.load_state_dict(state)
    assert (again.taken, again.epsilon) == (saved, counted(4))
    trained(again, Notes())
    assert again.epsilon == counted(10 - saved)


@pytest.mark.promise("target")
def test_a_training_keeps_to_the_budget_of_its_account(tmp_path: Path) -> None:
    every = Poisson(n=10, batch_size=10)  # cheap to price
    path = tmp_path / "account.json"
    Account.create(path, delta=1e-5, epsilon=2)
    settings: dict[str, Any] = {"sampling": every, "steps": 20}
    first = started(account=Account.open(path), sigma=8.0, **settings)
    trained(first, Notes(10))
    second = started(account=Account.open(path), **{**settings, "sigma": None, "epsilon": 2.0})
    assert first.epsilon < 2
    trained(second, Notes(10))
    assert second.taken == 20
    assert 1.95 < second.epsilon <= 2
    with pytest.raises(BudgetError):
        started(account=Account.open(path), **settings)


@pytest.mark.promise("target")
def test_a_training_composes_as_its_adaptive_account_does(tmp_path: Path) -> None:
    """Also the next one, on a network that carries what was chosen after results were seen."""
    path = tmp_path / "account.json"
    account = Account.create(path, delta=1e-5, epsilon=20, adaptive=True)
    step = started(account=account)
    trained(step, Notes())
    assert step.epsilon == account.epsilon > counted(6)
    assert "the guarantee is the account's target, epsilon 20" in step.statement
    elsewhere = PrivateStep(step.model, loss, sampling=POISSON, **SETTINGS)
    assert elsewhere.epsilon == account.epsilon


@pytest.mark.promise("allocation")
def test_an_epoch_begins_in_the_account_as_a_whole(tmp_path: Path) -> None:
    drawn = RandomAllocation(n=RECORDS, batch_size=BATCH)
    account = Account.create(tmp_path / "account.json", delta=1e-5)
    settings: dict[str, Any] = {**SETTINGS, "steps": 2 * drawn.steps_per_epoch}
    for epochs in (1, 2):
        step = PrivateStep(reader(), loss, sampling=drawn, account=account, **settings)
        for batch in itertools.islice(step.loader(Notes()), 2):
            step(batch)
        event = placed(drawn.event(SIGMA, epochs * drawn.steps_per_epoch))
        assert step.epsilon == total_epsilon((event,), 1e-5)


@pytest.mark.promise("resume")
def test_a_state_needs_the_account_that_counts_its_steps(tmp_path: Path) -> None:
    path, before = tmp_path / "account.json", tmp_path / "before.json"
    step = started(account=Account.create(path, delta=1e-5))
    shutil.copy(path, before)
    state = saved_after(step, 2)
    other = Account.create(tmp_path / "other.json", delta=1e-5)
    for account in (other, Account.open(before)):
        with pytest.raises(InputError, match="does not count what the training of this state did"):
            started(account=account).load_state_dict(state)
    with pytest.raises(InputError, match="Leave taken out"):
        started(account=Account.open(path)).load_state_dict(state, taken=2)
    with pytest.raises(InputError, match="of a training with an account"):
        started().load_state_dict(state, taken=2)
    with pytest.raises(InputError, match="taken is None"):
        started().load_state_dict(saved_after(started(), 2))


def test_an_account_of_another_unit_or_delta_is_refused(tmp_path: Path) -> None:
    persons = Account.create(tmp_path / "persons.json", delta=1e-5, unit=("unit", "id"))
    with pytest.raises(InputError, match="protects one unit, and this training one training rec"):
        started(account=persons)
    records = Account.create(tmp_path / "records.json", delta=1e-6)
    with pytest.raises(InputError, match="is not that of the account, 1e-06"):
        started(account=records, delta=1e-5)
    with pytest.raises(InputError, match=r"account must come from Account\.create"):
        started(account="records.json")


# Other loaders, other trainings, other networks.


@pytest.mark.promise("again")
def test_what_the_network_was_trained_for_before_is_paid_for_too() -> None:
    first = started()
    trained(first, Notes())
    second = PrivateStep(first.model, loss, sampling=POISSON, **SETTINGS)
    assert second.epsilon == first.epsilon > 0
    trained(second, Notes())
    both = (first.event, second.event)
    assert second.epsilon == total_epsilon(both, second.delta) > first.epsilon
    again = started()
    again.load_state_dict(second.state_dict(), taken=6)
    assert again.epsilon == second.epsilon, "a saved state carries earlier training"
    waiting = PrivateStep(again.model, loss, sampling=POISSON, **SETTINGS)
    other = PrivateStep(again.model, loss, sampling=POISSON, **SETTINGS)
    trained(other, Notes())
    with pytest.raises(ModelError, match="trained by another PrivateStep"):
        waiting.loader(Notes())


@pytest.mark.promise("again")
def test_noise_is_calibrated_for_what_earlier_training_left() -> None:
    every = Poisson(n=10, batch_size=10)  # cheap to price
    first = started(sampling=every, steps=2)
    trained(first, Notes(10))
    settings: dict[str, Any] = {**SETTINGS, "sigma": None, "epsilon": 2.0}
    second = PrivateStep(first.model, loss, sampling=every, **settings)
    trained(second, Notes(10))
    assert second.taken == 6
    assert first.epsilon < second.epsilon <= 2.0


@pytest.mark.promise("again")
def test_a_network_that_weights_read_is_not_trained_meanwhile() -> None:
    teacher = reader()

    def sure(batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        found: Tensor = teacher(**inputs)["logits"].softmax(1).amax(1)
        return found

    step, other = started(weights=sure), PrivateStep(teacher, loss, sampling=POISSON, **SETTINGS)
    batches = step.loader(Notes())
    step(next(batches))
    trained(other, Notes())
    with pytest.raises(ModelError, match="one that it or its loss uses, was trained by another"):
        step(next(batches))


class Weighing(nn.Module):
    """A loss with a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch) * self.scale


@pytest.mark.promise("again")
def test_a_loss_that_was_trained_carries_what_it_learned() -> None:
    """Into the training of another network."""
    learned = Weighing()
    first = PrivateStep(reader(), learned, sampling=POISSON, **SETTINGS)
    trained(first, Notes())
    assert learned.scale != 1
    second = PrivateStep(reader(), learned, sampling=POISSON, **SETTINGS)
    assert second.epsilon == first.epsilon
    trained(second, Notes())
    assert second.epsilon == total_epsilon((first.event, second.event), second.delta)


FORK = multiprocessing.get_context("fork")


def in_a_fork(work: Callable[[], object]) -> object:
    """Return what some work raises or returns in a copy of this process."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send(work())
        except Exception as failure:  # noqa: BLE001
            sender.send(str(failure))
        os._exit(0)

    copied = FORK.Process(target=child, daemon=True)
    copied.start()
    found = receiver.recv() if receiver.poll(60) else None
    copied.join(60)
    copied.kill()
    return found


def stepping() -> PrivateStep:
    torch.set_num_threads(1)  # a fork has no other threads
    return PrivateStep(reader(), loss, sampling=POISSON, **SETTINGS)


@pytest.mark.promise("resume")
@pytest.mark.parametrize("prepared", [True, False])
def test_a_copy_of_the_process_adds_no_noise(prepared: bool) -> None:
    """It has the same keys: the difference of the two releases would have no noise."""
    before = torch.get_num_threads()
    try:
        step = stepping()
        given = [next(iter(step.loader(Notes())))] if prepared else []

        def take() -> int:
            return step(*(given or [next(iter(step.loader(Notes())))]))

        assert "in another process, of which this one is a copy" in str(in_a_fork(take))
        assert take() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.promise("noise")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_training_cannot_be_copied(copied: Callable[[Any], Any]) -> None:
    step = stepping()
    images, labels = load_digits(return_X_y=True)
    data = ArrayData(images, labels, classes="0123456789", low=0, high=16)
    private = make_private(nn.Linear(64, 10), data, sigma=SIGMA, steps=2, device="cpu")
    holders = [] if copied is copy.copy else [private._step, [{"step": step}]]
    for training in (step, private, Noise(bytes(32)), *holders):
        with pytest.raises(InputError, match="cannot be copied or pickled"):
            copied(training)


RADIUS = 0.7


def notes(count: int = 9) -> dict[str, Tensor]:
    """Some records as one batch."""
    records = Notes()
    rows = [records[i] for i in range(count)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def centred(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = loss(model, batch)
    return losses * (losses - losses.mean()).detach()


def of_the_next(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, {**batch, "labels": batch["labels"].roll(1)})


def of_the_longest(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) * batch["attention_mask"].sum(1).max()


@pytest.mark.promise("alone")
@pytest.mark.parametrize("mixing", [centred, of_the_next, of_the_longest])
def test_a_loss_that_mixes_records_is_refused_or_sees_one_at_a_time(
    mixing: Callable[..., Tensor],
) -> None:
    model, batch = reader(), notes()
    where = ball(RADIUS, weights(model))
    if mixing is not of_the_longest:  # made-up masks are of one length
        with pytest.raises(ModelError, match="The network or its loss computes something else"):
            clipped_grad(model, mixing, where, batch_size=9)(batch)
    clipped = clipped_grad(model, mixing, where, batch_size=9, isolate=True)
    total = clipped(batch)
    for row in range(9):
        moved = float((total - clipped(without(batch, row))).double().norm())
        assert moved <= RADIUS
    settings: dict[str, Any] = {**SETTINGS, "steps": 1}
    trained(PrivateStep(reader(), mixing, sampling=POISSON, isolate=True, **settings), Notes())


def test_a_sum_is_not_overwritten_by_the_next_one() -> None:
    model, batch = reader(), notes()
    clipped = clipped_grad(model, loss, ball(RADIUS, weights(model)), batch_size=9)
    first = clipped(batch)
    kept = first.clone()
    assert not clipped(without(batch, 0)).equal(first)
    assert first.equal(kept)


@pytest.mark.promise("alone")
def test_nobody_can_repeat_what_a_network_draws_for_a_sum() -> None:
    """Masks of dropout would tell the place of a record in the batch."""

    def dropped(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.dropout(loss(model, batch)[:, None].expand(-1, 64)).mean(1)

    sums = []
    for _ in range(2):
        model = reader()
        sums.append(clipped_grad(model, dropped, ball(9.0, weights(model)), batch_size=9)(notes()))
    assert not sums[0].allclose(sums[1])


@pytest.mark.promise("alone")
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda model, batch: loss(model, batch).sum(), "which is not the mean of the losses"),
        (lambda model, batch: loss(model, batch)[:, None], "The loss returns"),
        (lambda model, batch: loss(model, batch).argmax(0, keepdim=True), "The loss returns"),
        (lambda model, batch: model(**batch), "unexpected keyword argument 'labels'"),
    ],
)
def test_a_loss_that_is_not_one_number_per_record_is_refused(odd: Any, said: str) -> None:
    model = reader()
    with pytest.raises(ModelError, match=said):
        clipped_grad(model, odd, ball(RADIUS, weights(model)), batch_size=9)(notes())


def mean_of_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the words of all records: a long record weighs more in a batch."""
    counts = batch["input_ids"].sum(1).double()
    return (loss(model, batch) * counts).sum() / counts.sum()


@pytest.mark.promise("alone")
@pytest.mark.parametrize("mixing", [centred, of_the_next])
def test_a_mean_loss_that_mixes_records_is_refused(mixing: Callable[..., Tensor]) -> None:
    """On a public example, because made-up texts of words 0 and 1 are all the same."""
    with pytest.raises(ModelError, match="which is not the mean of the losses"):
        PrivateStep(
            reader(),
            lambda model, batch: mixing(model, batch).mean(),
            sampling=POISSON,
            example=notes(),
            **SETTINGS,
        )


@pytest.mark.promise("alone")
def test_a_mean_over_all_words_is_refused_or_is_that_of_each_record() -> None:
    model, batch = reader(), notes()
    where = ball(RADIUS, weights(model))
    with pytest.raises(ModelError, match="which is not the mean of the losses"):
        PrivateStep(reader(), mean_of_tokens, sampling=POISSON, example=batch, **SETTINGS)
    total = clipped_grad(model, mean_of_tokens, where, batch_size=9, isolate=True)(batch)
    expected = clipped_grad(reader(), loss, where, batch_size=9)(batch)
    assert total.allclose(expected, atol=1e-6)


@pytest.mark.promise("alone")
def test_a_mean_loss_is_clipped_as_the_losses_of_its_records() -> None:
    model, batch = reader(), notes()
    where = ball(RADIUS, weights(model))
    clipped = clipped_grad(model, lambda *given: loss(*given).mean(), where, batch_size=9)
    total = clipped(batch)
    assert total.allclose(clipped_grad(reader(), loss, where, batch_size=9)(batch), atol=1e-6)
    for row in range(9):
        moved = float((total - clipped(without(batch, row))).double().norm())
        assert moved <= RADIUS


class Lazy(Reader):
    """Makes a value when it first runs."""

    def __init__(self, made: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.made = made
        self.value: object = None

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        if self.value is None:
            self.value = self.made(input_ids)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.promise("validated")
def test_a_network_may_make_a_constant_when_it_first_runs() -> None:
    """One that depends on the records would carry a record to all others."""
    torch.manual_seed(0)
    model = Lazy(lambda ids: f"{ids.shape[1]} words")
    clipped_grad(model, loss, ball(RADIUS, weights(model)), batch_size=9)(notes())
    assert model.value == f"{LENGTH} words"
    for made in (lambda ids: float(ids.double().mean()), lambda ids: ids[0], lambda _: object()):
        model = Lazy(made)
        with pytest.raises(ModelError):
            clipped_grad(model, loss, ball(RADIUS, weights(model)), batch_size=9)(notes())


@pytest.mark.promise("alone")
def test_a_loss_that_remembers_a_record_is_refused() -> None:
    kept: list[Tensor] = []

    def remembers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = loss(model, batch)
        kept.append(losses.detach().sum())
        return losses * (1 + sum(kept))

    model = reader()
    clipped = clipped_grad(model, remembers, ball(RADIUS, weights(model)), batch_size=9)
    with pytest.raises(ModelError, match="different outputs for the same sample"):
        clipped(notes())


@pytest.mark.promise("validated")
def test_a_network_that_was_changed_is_refused() -> None:
    model = reader()
    clipped = clipped_grad(model, loss, ball(RADIUS, weights(model)), batch_size=9)
    clipped(notes())
    model.words = nn.Embedding(WORDS, 8)
    with pytest.raises(ModelError, match="no longer the one that was validated"):
        clipped(notes())


def reduced(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """A loss that subtracts a row of the batch from the others."""
    return F.softplus(model(batch["x"] - batch["mean"])).sum(1)


def rows_of(count: int) -> dict[str, Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mean": torch.zeros(count, 4)}


@pytest.mark.promise("validated")
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda b: {**b, "mean": b["x"].mean(0, keepdim=True)}, "different numbers of rows"),
        (lambda b: {**b, "mean": float(b["x"].mean())}, "is a float, not a tensor"),
        (lambda b: {n: t[:, :2] for n, t in b.items()}, "other parts, shapes or types"),
        (lambda b: {n: t.double() for n, t in b.items()}, "other parts, shapes or types"),
        (lambda b: {**b, "more": b["x"]}, "other parts, shapes or types"),
    ],
)
@pytest.mark.parametrize("prepared", [True, False])
def test_a_batch_of_another_structure_than_validated_is_refused(
    odd: Callable[[Any], Any], said: str, prepared: bool
) -> None:
    """What is the same for all records may be computed from them."""
    clipped = clipped_grad(nn.Linear(4, 3), reduced, ball(1.0), batch_size=9)
    if prepared:
        clipped.prepare(rows_of(2))
    elif "other parts" in said:
        clipped(rows_of(3))
    with pytest.raises(InputError, match=said):
        clipped(odd(rows_of(9)))


@pytest.mark.promise("alone")
def test_a_batch_far_larger_than_stated_is_refused() -> None:
    """The margin for rounding is for sums of about the stated number of records."""
    clipped = clipped_grad(nn.Linear(4, 3), reduced, ball(1.0), batch_size=9)
    clipped(rows_of(40))
    with pytest.raises(InputError, match="many times more records"):
        clipped(rows_of(80))


def test_a_name_of_another_library_is_answered_with_that_of_dpmac() -> None:
    with pytest.raises(InputError, match=r"In dpmac it is called (--)?sigma"):
        started(noise_multiplier=1.0)


@pytest.mark.parametrize(("chosen", "calls"), [({}, 2), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, 0)])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    chosen: dict[str, str], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in memory.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    libc = MagicMock()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    memory.keep_freed_memory()
    assert libc.mallopt.call_count == calls
