"""Batches of a loader are read at a DataLoader's price, and no record changes another one's row."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from dpmac_cli import InputError, Poisson, PrivateStep
from dpmac_cli.dp.clipping.batches import Structure, parts_by_name
from dpmac_cli.models.digest import identical
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.training.reading import OneByOne, Reader, first_row, probes, seeds_generators
from dpmac_cli.training.stored_rows import stored_in

RECORDS, KEY = 40, bytes(range(32))
NUMBERS = np.arange(RECORDS)


def reader_of(dataset: Any, collate: Any = default_collate, key: bytes = KEY) -> Reader:
    """Return the reader that a loader would use."""
    records = OneByOne(dataset, collate, key)
    structure = Structure.of(first_row(records))
    return Reader(records, structure, alone=seeds_generators(records, probes(len(dataset))))


def equal(a: Any, b: Any) -> bool:
    """Return whether batches have the same tensors in the same places."""
    parts, others = parts_by_name(a), parts_by_name(b)
    alike = parts.keys() == others.keys()
    return alike and all(identical(part, others[name]) for name, part in parts.items())


def started(sampling: Poisson) -> PrivateStep:
    """Return a step with batches of any kind."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first = tree_leaves(batch)[0]
        outputs: Tensor = model(first.float().reshape(len(first), -1).mean(1, keepdim=True))
        return outputs.sum(1)

    return PrivateStep(nn.Linear(1, 2), loss, sampling=sampling, sigma=6.0, steps=2)


# The batch is that of torch's default_collate.


X, Y = torch.randn(RECORDS, 3, 4), torch.arange(RECORDS)


class Pair(NamedTuple):
    x: Tensor
    y: int


class Made(Dataset[Any]):
    """Records that a function of the index makes."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


STORED = TensorDataset(X, Y)
DATASETS: dict[str, Any] = {
    "TensorDataset": STORED,
    "Subset": Subset(Subset(STORED, list(range(RECORDS - 1, -1, -1))), range(RECORDS)),
    "negative indices": Subset(STORED, [-index for index in range(1, RECORDS + 1)]),
    "ConcatDataset": ConcatDataset([Subset(STORED, range(9)), Subset(STORED, range(9, RECORDS))]),
    "several tables": ConcatDataset(
        [TensorDataset(X[:15] + 1, Y[:15]), Subset(TensorDataset(X - 1, Y), range(15, RECORDS))]
    ),
    "tensor": X,
    "array": X.numpy(),
    "list": [(x, int(y)) for x, y in zip(X, Y, strict=True)],
    "pairs of tensors": Made(lambda i: (X[i], Y[i])),
    "arrays and numbers": Made(lambda i: [X[i].numpy(), float(i), i, i > 3, np.float32(i)]),
    "dicts": Made(lambda i: {"x": X[i], "of": {"y": i, "z": (Y[i], [X[i, 0].numpy()])}}),
    "named tuples": Made(lambda i: Pair(X[i], i)),
    "other classes": Made(lambda i: (X[i], np.int64(i) if i % 2 else i)),
    "other order": Made(lambda i: {"a": i, "b": X[i]} if i % 2 else {"b": X[i], "a": i}),
    "half precision": Made(lambda i: X[i].bfloat16()),
    "gradients": Made(lambda i: X[i] * torch.ones((), requires_grad=True)),
    "numbers in arrays": Made(lambda i: {"x": X[i], "n": np.array(i, np.int16)}),
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_batch_is_that_of_torch(name: str) -> None:
    dataset, rows = DATASETS[name], np.array([3, 7, 8, 21, 39])
    expected = default_collate([dataset[row] for row in rows.tolist()])
    assert equal(reader_of(dataset)[1, rows], expected)


@pytest.mark.parametrize("name", DATASETS)
def test_a_batch_without_records_has_the_same_parts(name: str) -> None:
    dataset = DATASETS[name]
    empty = reader_of(dataset)[1, np.arange(0)]
    expected = default_collate([dataset[0], dataset[1]])
    assert equal(empty, tree_map(lambda t: t[:0], expected))


def test_datasets_of_rows_are_indexed() -> None:
    """And a subclass, which may read its records in another way, is not."""

    class Scaled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * tensor[index] for tensor in self.tensors)

    names = ("TensorDataset", "Subset", "negative indices", "ConcatDataset", "several tables")
    assert all(stored_in(DATASETS[name]) for name in (*names, "tensor", "array"))
    scaled = Scaled(X, Y)
    assert stored_in(Subset(scaled, range(9))) is None
    assert equal(reader_of(scaled)[1, NUMBERS], [2 * X, 2 * Y])


@pytest.mark.promise("reading")
def test_rows_of_several_tables_have_one_type() -> None:
    """Otherwise a record of another table would change the others of its batch."""
    tables: Any = ConcatDataset([TensorDataset(X[:20]), TensorDataset(X[20:].double())])
    assert stored_in(tables) is None
    assert "torch.float64" in reader_of(tables)[1, NUMBERS].why


# A record changes no other one's row.


class Greedy(Dataset[Any]):
    """Adds noise to records, and draws as many numbers more as its record says."""

    def __init__(self, draw: Callable[[], float], counts: Any, seed: Any = None) -> None:
        self.draw, self.counts, self.seed = draw, counts, seed

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        if self.seed is not None:
            self.seed(index)
        drawn = self.draw()
        for _ in range(self.counts[index]):
            self.draw()
        return torch.tensor(drawn, dtype=torch.float64), index


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}
#: Ways to seed a generator that a dataset may draw from.
SEEDS: dict[str, Callable[[int], object]] = {
    "torch": lambda index: torch.manual_seed(0),
    "numpy": lambda index: np.random.seed(7),
    "python": random.seed,
}


def noise_of(dataset: Dataset[Any], collate: Any, steps: int = 60) -> Tensor:
    """Return the noise of each record in each step; shape (steps, records)."""
    reader: Any = reader_of(dataset, collate)
    return torch.stack([reader[step, NUMBERS][0] for step in range(1, steps + 1)])


def one_at_a_time(records: list[Any]) -> Any:
    """Return the record, as a collate function that sees one of them may."""
    [(noise, index)] = records
    return [noise[None], torch.tensor([index])]


@pytest.mark.promise("alone")
@pytest.mark.parametrize("collate", [default_collate, one_at_a_time])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_record_that_draws_more_numbers_changes_no_distribution(kind: str, collate: Any) -> None:
    """The others get other draws of the same distribution: uniform, and independent of it."""
    few, many = np.zeros(RECORDS, int), np.zeros(RECORDS, int)
    many[4] = 3
    before, after = (noise_of(Greedy(DRAWS[kind], of), collate) for of in (few, many))
    assert before[:, :5].equal(after[:, :5]), "records before it, and itself, have the same draws"
    assert not (before[:, 5:] == after[:, 5:]).any(), "those after it have others"
    for noise in (before, after):
        assert len(set(noise.flatten().tolist())) == noise.numel(), "no number is used twice"
        assert kstest(noise.flatten().numpy(), "uniform").pvalue > 1e-4
        shifted = np.corrcoef(noise[:, :-1].flatten(), noise[:, 1:].flatten())[0, 1]
        assert abs(shifted) < 4 / noise.numel() ** 0.5


@pytest.mark.promise("alone")
@pytest.mark.parametrize("kind", DRAWS)
def test_a_dataset_that_seeds_generators_is_read_with_seeds_of_each_record(kind: str) -> None:
    """Otherwise a record that draws more would shift draws that are known."""
    few, many = np.zeros(RECORDS, int), np.zeros(RECORDS, int)
    many[4] = 3
    others = [name for name in DRAWS if name != kind]
    for other in others:
        before, after = (
            noise_of(Greedy(DRAWS[other], of, SEEDS[kind]), default_collate, steps=2)
            for of in (few, many)
        )
        assert before.equal(after), "each record has its own draws, whatever the others take"
        assert len(set(before.flatten().tolist())) == before.numel()


@pytest.mark.promise("alone")
def test_nobody_can_repeat_what_records_draw() -> None:
    """Who knew the draws could tell how many a record took."""
    dataset = Greedy(DRAWS["torch"], np.zeros(RECORDS, int))
    readers: list[Any] = [reader_of(dataset, key=key) for key in (KEY, bytes(32))]
    seen = [value for each in readers for value in each[1, NUMBERS][0].tolist()]
    for _ in range(2):
        seen += next(started(Poisson(n=RECORDS, batch_size=RECORDS)).loader(dataset))[0].tolist()
    with LayerDraws(KEY).of(1):  # dropout of the network in this step
        seen += [DRAWS["torch"]() for _ in range(RECORDS)]
    assert len(seen) == len(set(seen)) == 5 * RECORDS


@pytest.mark.promise("alone")
def test_a_rare_record_that_seeds_torch_is_noticed() -> None:
    """Also if none of the records that are read before the first step does so."""
    rare = next(iter(set(range(RECORDS)) - set(probes(RECORDS))))

    def seed(index: int) -> None:
        if index == rare:
            torch.manual_seed(0)

    few, many = np.zeros(RECORDS, int), np.zeros(RECORDS, int)
    many[rare] = 3
    before, after = (
        noise_of(Greedy(DRAWS["torch"], of, seed), default_collate, steps=2) for of in (few, many)
    )
    others = [row for row in range(RECORDS) if row != rare]
    assert before[:, others].equal(after[:, others])
    assert len(set(before[:, others].flatten().tolist())) == len(others) * len(before)


class Lazy(Greedy):
    """Seeds Python's generator for each record, but only in a worker."""

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            random.seed(0)
        return super().__getitem__(index)


@pytest.mark.promise("alone")
def test_a_dataset_that_seeds_generators_in_workers_is_noticed_there() -> None:
    noise, counts = DRAWS["torch"], np.zeros(RECORDS, int)
    step = started(Poisson(n=RECORDS, batch_size=20))
    batch = next(step.loader(Lazy(noise, counts), workers=1))
    rows = step._sampling.draws(step._keys.sampler).draw(1)
    records = OneByOne(Greedy(noise, counts), default_collate, step._keys.layers)
    alone: Any = partial(records.seeded_row, 1)
    assert batch[0].tolist() == [alone(row)[0].item() for row in rows.tolist()]


class Reused(Dataset[Any]):
    """Writes every record to the same memory."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {"x": torch.zeros(4), "n": np.zeros(2), "of": [0]}

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        self.record["x"].fill_(index)
        self.record["n"][:] = index
        self.record["of"][0] = index
        return self.record


@pytest.mark.promise("alone")
def test_records_that_share_memory_are_rows_of_their_own() -> None:
    """Otherwise the last record of a batch would be all of them."""
    batch = reader_of(Reused())[1, NUMBERS]
    rows = torch.arange(RECORDS, dtype=torch.float64)
    assert equal(
        batch,
        {
            "x": rows.float()[:, None].expand(-1, 4),
            "n": rows[:, None].expand(-1, 2),
            "of": [torch.arange(RECORDS)],
        },
    )


class Scratch(Dataset[Any]):
    """Writes some records to memory of its own, and the others to new memory.

    Args:
        reused: where a record is written, by its index; None for new memory.
        touched: whether other records are computed in that memory, too.
    """

    def __init__(self, reused: Callable[[int], slice | None], touched: bool = False) -> None:
        self.memory, self.reused, self.touched = np.zeros(12, np.float32), reused, touched

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        place = self.reused(index)
        if self.touched:
            self.memory[:] = index
        if place is None:
            return torch.full((4,), float(index)), index
        self.memory[place] = index
        return torch.from_numpy(self.memory[place]), index


#: Two records that are not read before the first step.
RARE = sorted(set(range(RECORDS)) - set(probes(RECORDS)))[2:4]
FOUR = slice(0, 4)
OVERLAPPING = dict(zip(RARE, (FOUR, slice(3, 7)), strict=True))
SCRATCH = {
    "all records": Scratch(lambda index: FOUR),
    "in turn": Scratch(lambda index: slice(index % 3 * 4, index % 3 * 4 + 4)),
    "two rare ones": Scratch(lambda index: FOUR if index in RARE else None),
    "two that overlap": Scratch(OVERLAPPING.get),
    "touched by others": Scratch(lambda index: FOUR if index % 2 else None, touched=True),
}


@pytest.mark.promise("alone")
@pytest.mark.parametrize("name", SCRATCH)
def test_records_that_share_some_memory_are_rows_of_their_own(name: str) -> None:
    batch = reader_of(SCRATCH[name])[1, NUMBERS]
    rows = torch.arange(RECORDS)
    assert equal(batch, [rows.float()[:, None].expand(-1, 4), rows])


class Ring(Dataset[Any]):
    """Fills lists in turn, more of them than are read before the first step."""

    def __init__(self, lists: int) -> None:
        self.lists, self.turn = [[0, 0] for _ in range(lists)], 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        self.turn += 1
        record = self.lists[self.turn % len(self.lists)]
        record[:] = index, index % 2
        return record


@pytest.mark.promise("alone")
@pytest.mark.parametrize("lists", [1, 16, 40])
def test_lists_of_whole_numbers_that_are_filled_again_are_rows_of_their_own(lists: int) -> None:
    batch: Any = reader_of(Ring(lists))[1, np.arange(200)]
    assert batch[0].tolist() == [*range(200)]


@pytest.mark.promise("alone")
def test_a_record_that_is_written_to_later_is_its_own_row() -> None:
    """Also if it is the only one of its batch in that memory."""
    lone = RARE[0]
    dataset = Scratch(lambda index: FOUR if index in (lone, *probes(RECORDS)[:1]) else None, True)
    rows = [lone, lone + 1]
    batch: Any = reader_of(dataset)[1, np.array(rows)]
    assert batch[0][:, 0].tolist() == rows


@pytest.mark.promise("reading")
def test_records_that_are_all_unlike_the_first_one_are_the_fault() -> None:
    """They are like each other."""
    for make in (
        lambda i: X[i] if i == 0 else X[i, :1],
        lambda i: X[i] if i == 0 else X[i].double(),
        lambda i: (X[i], Y[i] if i == 0 else i > 3),
    ):
        assert "first one" in reader_of(Made(make))[1, NUMBERS[1:]].why


@pytest.mark.parametrize(("name", "held"), [("pairs of tensors", 1), ("list", 1), ("dicts", 0)])
def test_tensors_are_stacked(name: str, held: bool) -> None:
    dataset = DATASETS[name]
    reader = reader_of(dataset)
    for _ in range(2):
        expected = default_collate([dataset[row] for row in range(RECORDS)])
        assert equal(reader[1, NUMBERS], expected)
        assert reader._held == held


ODD: dict[str, tuple[Any, str]] = {
    "a number of another type": (lambda i: (X[i], 2.0 if i == 9 else i), "torch.float64"),
    "a truth value": (lambda i: (X[i], i == 9 if i == 9 else i), "torch.bool"),
    "a tensor of another type": (lambda i: X[i].double() if i == 9 else X[i], "torch.float64"),
    "a tensor of another shape": (lambda i: X[i, :1] if i == 9 else X[i], r"\(1, 4\)"),
    "an array of another shape": (
        lambda i: X[i, :, :1].numpy() if i == 9 else X[i].numpy(),
        "3, 1",
    ),
    "an array of another type": (lambda i: X[i].double().numpy() if i == 9 else X[i].numpy(), "64"),
    "a part more": (lambda i: (X[i], i, i) if i == 9 else (X[i], i), "other parts"),
    "another name": (lambda i: {"y" if i == 9 else "x": X[i]}, "other parts"),
    "a list in place of a number": (lambda i: (X[i], [i] if i == 9 else i), "no number"),
    "a number that is too large": (lambda i: (X[i], 2**70 if i == 9 else i), "OverflowError"),
    "a failing transform": (lambda i: (X[i], 1 // (i - 9)), "ZeroDivisionError"),
}


@pytest.mark.promise("reading")
@pytest.mark.parametrize("name", ODD)
def test_a_record_unlike_the_first_one_is_the_fault(name: str) -> None:
    """No conversion is chosen for a whole batch, as torch's own stacking does."""
    make, said = ODD[name]
    step = started(Poisson(n=RECORDS, batch_size=RECORDS))
    with pytest.raises(InputError, match=said):
        next(step.loader(Made(make)))


@pytest.mark.parametrize("name", ["TensorDataset", "dicts", "arrays and numbers"])
def test_workers_read_what_this_process_reads(name: str) -> None:
    dataset = DATASETS[name]
    for workers in (0, 2):
        step = started(Poisson(n=RECORDS, batch_size=20))
        draws = step._sampling.draws(step._keys.sampler)
        for number, batch in enumerate(step.loader(dataset, workers=workers), 1):
            rows = [dataset[row] for row in draws.draw(number).tolist()]
            assert equal(batch, default_collate(rows))
            step(batch)
        assert number == 2


@pytest.mark.promise("alone")
def test_a_collate_function_sees_one_record_at_a_time() -> None:
    """Padding to the longest of several records would let one record change the others."""
    seen = set[int]()

    def padded(records: list[Any]) -> Any:
        seen.add(len(records))
        longest = max(len(record[0]) for record in records)
        return [torch.stack([nn.functional.pad(x, (0, longest - len(x))) for x, _ in records])]

    fixed = Made(lambda i: (X[i, 0], i))
    assert equal(reader_of(fixed, padded)[1, NUMBERS], [X[:, 0]])
    assert seen == {1}
    ragged = Made(lambda i: (X[i].flatten()[: 1 + i % 5], i))
    assert "Pad to a fixed length" in reader_of(ragged, padded)[1, NUMBERS].why
