"""Batches of a map-style dataset, drawn by the sampler that is accounted for.

Workers read each record and collate it alone, and its rows are joined afterwards. So no record
changes another one's row, and each drawn record is exactly one row. Random transforms are a
function of the secret key, the step and the record, in any worker.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from dpmac_cli.dp.clipping.batches import Batch, Structure, map_rows, parts_by_name, tensors_in
from dpmac_cli.dp.torch_errors import type_and_place
from dpmac_cli.errors import InputError
from dpmac_cli.models.digest import digest
from dpmac_cli.randomness import sampling
from dpmac_cli.randomness.layers import LayerDraws, forked, seed_all

#: Records whose contents identify a dataset, evenly spaced.
PROBES = 16
#: Step whose random numbers are used for records that are read before the first step.
BEFORE = 0

#: Message for records that are others when they are read again.
REREAD = (
    "A record is another one when it is read again, although all random number generators were "
    "seeded alike. The dataset or collate_fn keeps something of the records that it has read, by "
    "which one could change others, or draws random numbers that cannot be repeated. Let a record "
    "depend on its index alone, and draw with the global generators of torch, NumPy or Python "
    "(torch.rand, np.random.rand, random.random)."
)
#: Message for a batch that the loader did not give.
NOT_DRAWN = (
    "The batch is not the one that the loader drew for this step, unchanged. Take one step with "
    "each batch of step.loader(...), in order: epsilon covers those records. To transform records, "
    "do it in the dataset or in collate_fn, which see each one alone."
)

#: Message for batches of a loader that another one has replaced.
REPLACED = (
    "loader() was called again, or a state was loaded, so this earlier loader has ended. Take "
    "steps with the batches of a new one: for batch in step.loader(dataset)."
)

Collate = Callable[[list[Any]], Any]
#: A step, and the number of a record.
Item = tuple[int, int]


class Fault(NamedTuple):
    """Reason why a record cannot be used. Workers return it: raising would quote the record."""

    why: str


class Drawn(NamedTuple):
    """A batch as the loader gave it, and the records that it consists of.

    A program can write to ``batch`` by way of NumPy or ``.data``, which no version counter shows.
    So a step uses ``rows``, a copy that no program has.
    """

    step: int
    records: sampling.Indices
    batch: Batch
    rows: Batch
    versions: tuple[tuple[int, int], ...]  # id and version counter of every tensor

    @staticmethod
    def of(step: int, records: sampling.Indices, batch: Batch) -> "Drawn":
        """Return a batch, with a copy and the state of its tensors."""
        return Drawn(step, records, batch, map_rows(Tensor.clone, batch), _state_of(batch))

    def is_of(self, step: int, batch: Batch) -> bool:
        """Return whether this is the batch of a step, with the same tensors, unchanged."""
        return step == self.step and batch is self.batch and _state_of(batch) == self.versions


def _state_of(batch: Batch) -> tuple[tuple[int, int], ...]:
    return tuple((id(t), t._version) for t in tensors_in(batch))


@dataclass(frozen=True)
class OneByOne:
    """Reads and collates records one by one. Pickled to workers.

    Attributes:
        dataset: map-style dataset.
        collate: collates a list of records, here always of one.
        key: secret key of random transforms.
    """

    dataset: Any
    collate: Collate
    key: bytes

    def __getitem__(self, item: Item) -> Any:
        """Return a record as a batch of one row, or its fault."""
        step, number = item
        [[word]] = LayerDraws(self.key).words(step, np.array([number]), 1)
        with _seeded(int(word)):
            try:
                return _as_row(self.collate([self.dataset[number]]))
            except (MemoryError, KeyboardInterrupt):
                raise
            except Exception as failure:  # noqa: BLE001  (user code may raise anything)
                return Fault(f"A record cannot be read: {type(failure).__name__}.")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of this process, and restore them at the end.

    Transforms compute on one thread, as in a worker, so that they round alike.
    """
    threads = torch.get_num_threads()
    with forked(()):
        seed_all(seed, ())
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _as_row(collated: Any) -> Any:
    """Return a collated record as dicts, lists and tuples of tensors of one row, or its fault."""
    if isinstance(collated, Mapping) and not isinstance(collated, dict):
        collated = dict(collated)
    for name, part in parts_by_name(collated).items():
        if not isinstance(part, Tensor):
            return Fault(
                f"collate_fn returns a {type(part).__name__} as {name}, not a tensor. Return "
                "dicts, lists or tuples of tensors; leave out what is none."
            )
        if part.ndim == 0 or len(part) != 1:
            rows = "no dimension" if part.ndim == 0 else f"{len(part)} rows"
            return Fault(
                f"collate_fn returns {rows} for one record as {name}. A record must be exactly one "
                "row: epsilon covers one gradient for each record that was drawn."
            )
    if not tensors_in(collated):
        return Fault("collate_fn returns no tensor.")
    # A dataset may write every record to the same memory.
    return map_rows(lambda t: t.detach().clone(), collated)


def batches(
    records: OneByOne,
    sampler: sampling.Sampler,
    structure: Structure,
    steps: range,
    workers: int,
) -> Iterator[Drawn]:
    """Yield the batches of some steps.

    Args:
        records: reads records.
        sampler: draws the records of each step.
        structure: structure of a row, which every record must have, on the device for batches.
        steps: numbers of the steps.
        workers: number of processes that read records; 0 to read in this one.

    Raises InputError if a record cannot be used.
    """
    drawn: dict[int, sampling.Indices] = {}

    def asked() -> Iterator[list[Item]]:
        for step in steps:
            drawn[step] = sampler.draw(step)
            yield [(step, number) for number in drawn[step].tolist()]

    loader: DataLoader[Any] = DataLoader(
        records,  # type: ignore[arg-type]  # it has no length, which is not needed
        batch_sampler=asked(),
        num_workers=workers,
        collate_fn=partial(_joined, structure.to(torch.device("cpu"))),
        generator=torch.Generator(),  # torch's own draws would change the global generator
    )
    device = tensors_in(structure.template)[0].device
    for step, batch in zip(steps, loader, strict=True):
        if isinstance(batch, Fault):
            raise InputError(batch.why)
        there = map_rows(lambda t: t.to(device), batch)
        yield Drawn.of(step, drawn.pop(step), there)


def _joined(structure: Structure, rows: list[Any]) -> Any:
    """Return rows as one batch, or the fault of one of them."""
    template, spec = tree_flatten(structure.template)
    names, columns = list(parts_by_name(structure.template)), [list[Tensor]() for _ in template]
    for row in rows:
        if isinstance(row, Fault):
            return row
        parts, own = tree_flatten(row)
        if own != spec:
            return Fault(
                f"Records have other parts after collate_fn ({', '.join(parts_by_name(row))}) than "
                f"the first one ({', '.join(names)}). Return the same for every record."
            )
        for column, part, like, name in zip(columns, parts, template, names, strict=True):
            if part.shape[1:] != like.shape[1:] or part.dtype != like.dtype:
                return Fault(
                    f"{name} of a record has shape {tuple(part.shape[1:])} and {part.dtype}, but "
                    f"that of the first one {tuple(like.shape[1:])} and {like.dtype}. All need the "
                    "same, public shape: padding to the longest record of a batch would let one "
                    "record change the others. Pad to a fixed length (padding='max_length')."
                )
            column.append(part)
    made = [
        torch.cat(column) if column else like.new_empty((0, *like.shape[1:]))
        for column, like in zip(columns, template, strict=True)
    ]
    return tree_unflatten(made, spec)


def size_of(dataset: Any) -> int:
    """Return the number of records of a map-style dataset. Raises InputError for another one."""
    try:
        return len(dataset)
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no length: its records come in an order of its own, but "
            "epsilon is for batches that dpmac draws. Pass a map-style torch.utils.data.Dataset, "
            "with __len__ and __getitem__, such as list(dataset) if its records fit in memory."
        ) from None


def first_row(records: OneByOne) -> Batch:
    """Return the first record as a batch of one row. Raises InputError if it cannot be used."""
    try:
        with _seeded(0):
            row = _as_row(records.collate([records.dataset[0]]))
    except Exception as failure:  # noqa: BLE001  (user code may raise anything)
        # Not raised from the failure, whose message may quote the record.
        raise InputError(
            f"Record 0 cannot be read by index: {type_and_place(failure)}. To see its message, "
            "which may contain the record, run collate_fn([dataset[0]]). Pass a map-style "
            "torch.utils.data.Dataset, and a collate_fn that takes a list of its records."
        ) from None
    if isinstance(row, Fault):
        raise InputError(row.why)
    return row


def check_reread(records: OneByOne, size: int) -> None:
    """Raise InputError if one of a few records differs when it is read again, after others."""
    numbers = np.unique(np.linspace(0, size - 1, PROBES).astype(int)).tolist()
    found = [_sum_of(records[BEFORE, number]) for number in numbers]
    again = [_sum_of(records[BEFORE, number]) for number in reversed(numbers)]
    if found != again[::-1]:
        raise InputError(REREAD)


def _sum_of(row: Batch) -> str:
    """Return the SHA-256 of a record."""
    parts = parts_by_name(row)
    named = {name: part.cpu() for name, part in parts.items() if isinstance(part, Tensor)}
    return digest(named, {"parts": list(parts)})
