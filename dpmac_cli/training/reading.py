"""Rows of the records that a step draws, none of which changes the row of another.

- Rows of tensors and arrays, as in a ``TensorDataset``, are indexed.
- Other records are read one after the other. Tensors and whole numbers are then stacked, if no two
  are in the same memory. Otherwise each record is written to its row before the next one is read,
  so a dataset may write all of them to the same memory. A ``collate_fn`` sees one at a time.
- Random transforms draw from one secret stream per batch. How many numbers a record takes changes
  which ones the next record gets, but not their distribution. If the dataset seeds a generator
  itself, they would be known, so generators are then seeded for each record.

Out of scope: a dataset that keeps what it has read, seeds NumPy's or Python's generator, or writes
to the memory of a record that it has returned, for few of its records, unless reading
:data:`PROBES` of them shows it.
"""

import math
import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from dpmac_cli.config.facts import InMemoryData
from dpmac_cli.dp.clipping.batches import Batch, Structure, map_rows, parts_by_name, tensors_in
from dpmac_cli.dp.torch_errors import code_of_network, type_and_place
from dpmac_cli.errors import InputError, ModelError
from dpmac_cli.models.digest import digest
from dpmac_cli.randomness.keystream import KEY_BYTES
from dpmac_cli.randomness.layers import LayerDraws, forked, seed_all
from dpmac_cli.randomness.sampling import Indices
from dpmac_cli.training.rows import Fault, Form, as_row, joined, shapes_differ
from dpmac_cli.training.stored_rows import Stored, stored_in
from dpmac_cli.training.torch_datasets import check_copies

#: Records whose contents identify a dataset, evenly spaced.
PROBES = 16
#: Step whose random numbers are used for records that are read before the first step.
BEFORE = 0

#: Rank of the random draws of records. A program has one process, of rank 0, whose layers draw.
RANK = 1

#: Message for records that are others when they are read again.
REREAD = (
    "A record is another one when it is read again, although all random number generators were "
    "seeded alike. The dataset or collate_fn keeps something of the records that it has read, by "
    "which one could change others, or draws random numbers that cannot be repeated. Let a record "
    "depend on its index alone, and draw with the global generators of torch, NumPy or Python "
    "(torch.rand, np.random.rand, random.random)."
)

Collate = Callable[[list[Any]], Any]
#: A step, and the numbers of its records.
Item = tuple[int, Indices]


@dataclass(frozen=True)
class OneByOne:
    """Reads and collates records one by one. Pickled to workers.

    Attributes:
        dataset: map-style dataset.
        collate: collates a list of records, here always of one.
        key: secret key of random transforms, 32 bytes.
    """

    dataset: Any
    collate: Collate
    key: bytes

    def row(self, number: int) -> Batch | Fault:
        """Return a record as a batch of one row, or its fault.

        Whatever the dataset or ``collate`` raises is a fault, except for MemoryError and Ctrl-C.

        Args:
            number: index of the record.
        """
        try:
            return as_row(self.collate([self.dataset[number]]))
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as failure:  # noqa: BLE001  (user code may raise anything)
            return _unreadable(failure)

    def seeded_row(self, step: int, number: int) -> Batch | Fault:
        """Return :meth:`row` with random draws that are a function of key, step and record.

        The global generators are as before afterwards.

        Args:
            step: number of the step; :data:`BEFORE` for none.
            number: index of the record.
        """
        [[word]] = LayerDraws(self.key).words(step, np.array([number]), 1)
        with _seeded(int(word)):
            return self.row(number)


class Reader:
    """Reads the records of a step as one batch. Pickled to workers.

    It is indexed by an :data:`Item`, as a torch dataset is by a number. It tries the fastest way in
    which the first record is as it is when it is read alone.

    Args:
        records: dataset and ``collate_fn``.
        structure: structure of a row, which every record must have.
        alone: whether generators are seeded for each record.
    """

    def __init__(self, records: OneByOne, structure: Structure, *, alone: bool) -> None:
        self._records, self._alone = records, alone
        self._structure = structure.to(torch.device("cpu"))
        self._draws = LayerDraws(records.key, RANK)
        self._process = os.getpid()
        self._stored: Stored | None = None
        self._form: Form | None = None
        self._held = False  # whether all records of a batch are read before they are copied
        if records.collate is default_collate:
            self._choose(records.dataset)

    def _choose(self, dataset: Any) -> None:
        """Choose a faster way that returns the first record as it is when it is read alone."""
        with _seeded(0):
            record = dataset[0]
            row = as_row(default_collate([record]))
        if isinstance(row, Fault) or shapes_differ(row, self._structure):
            return
        stored, form = stored_in(dataset), Form.of(record, self._structure)
        if stored is not None and _same(self._indexed(stored, np.zeros(1, np.int64)), row):
            self._stored = stored
        elif form is not None and _same(form.batch_of(iter([record]), 1), row):
            self._form = form
            self._held = form.stacks and not overwritten(self._records)

    def __getitem__(self, item: Item) -> Batch | Fault:
        """Return the records of a step as a batch, or the fault of one of them.

        Args:
            item: the step, and the indices of its records, shape (records,), which may be none.

        Returns:
            A batch on the CPU with one row per record in their order, or a :class:`.Fault`, which
            does not quote a record.
        """
        step, numbers = item
        if self._stored is not None:
            return self._indexed(self._stored, numbers)
        if os.getpid() != self._process and len(numbers):
            self._process = os.getpid()
            self._alone = self._alone or seeds_generators(self._records, numbers[:1].tolist())
        for read in () if self._alone else (self._at_once, self._in_a_row):
            with self._draws.of(step, ()), _one_thread():
                seed = torch.initial_seed()
                batch = read(numbers)
                self._alone = torch.initial_seed() != seed  # a record seeded torch's generator
            if self._alone:
                break
            if batch is not None:
                return batch
        read_alone = partial(self._records.seeded_row, step)
        return joined(self._structure, map(read_alone, numbers.tolist()))

    def _indexed(self, stored: "Stored", numbers: Indices) -> Batch:
        _, spec = tree_flatten(self._structure.template)
        return tree_unflatten(stored.at(numbers), spec)

    def _at_once(self, numbers: Indices) -> Batch | None:
        """Return records that draw random numbers from one stream, by one copy; None to read again.

        That is tried no more if a batch could not be copied so.
        """
        if not self._held or self._form is None or len(numbers) == 0:
            return None
        dataset = self._records.dataset
        batch: Batch | None = None
        with suppress(Exception):  # reading again says which
            batch = self._form.stacked([dataset[number] for number in numbers.tolist()])
        self._held = batch is not None
        return batch

    def _in_a_row(self, numbers: Indices) -> Batch | Fault:
        """Return records that draw random numbers from one stream."""
        if self._form is None:
            return joined(self._structure, map(self._records.row, numbers.tolist()))
        records = map(partial(getitem, self._records.dataset), numbers.tolist())
        try:
            return self._form.batch_of(records, len(numbers))
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as failure:  # noqa: BLE001  (user code may raise anything)
            return _unreadable(failure)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute transforms on one thread, as in a worker, so that they round alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of this process, and restore them at the end."""
    with forked(()), _one_thread():
        seed_all(seed, ())
        yield


def _unreadable(failure: Exception) -> Fault:
    return Fault(f"A record cannot be read: {type(failure).__name__}.")


def size_of(dataset: Any) -> int:
    """Return the number of records of a map-style dataset.

    Args:
        dataset: anything that a program passes.

    Raises:
        InputError: it has no length, or is for another function of dpmac.
    """
    if isinstance(dataset, InMemoryData):
        raise InputError(
            f"{type(dataset).__name__} is for make_private, dpmac.train and estimators, which "
            "draw its records and units themselves. Pass a map-style torch.utils.data.Dataset "
            "here, such as TensorDataset(x, y). Epsilon protects one item: for units of several "
            "records, such as persons, return all records of a unit as one item, in tensors of one "
            "shape, with the mean of their losses."
        )
    try:
        return len(dataset)
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no length: its records come in an order of its own, but "
            "epsilon is for batches that dpmac draws. Pass a map-style torch.utils.data.Dataset, "
            "with __len__ and __getitem__, such as list(dataset) if its records fit in memory."
        ) from None


def first_row(records: OneByOne) -> Batch:
    """Return the first record as a batch of one row, which says what all records are like.

    The global generators are as before afterwards.

    Args:
        records: dataset and ``collate_fn``.

    Raises:
        InputError: it cannot be used. The message does not say what it contains.
    """
    try:
        with _seeded(0):
            row = as_row(records.collate([records.dataset[0]]))
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


def probes(size: int) -> list[int]:
    """Return the numbers of at most :data:`PROBES` of ``size`` records, evenly spaced.

    Args:
        size: number of records, at least 1.

    >>> probes(3), len(probes(1000))
    ([0, 1, 2], 16)
    """
    numbers: list[int] = np.unique(np.linspace(0, size - 1, PROBES).astype(int)).tolist()
    return numbers


def check_reread(records: OneByOne, numbers: list[int]) -> None:
    """Reject a dataset of which one of some records differs when it is read again, after others.

    Args:
        records: dataset and ``collate_fn``.
        numbers: indices of the records, see :func:`probes`. Each is read twice.

    Raises:
        InputError: one differs, with generators seeded alike.
    """
    first = dict[int, str]()
    for number in numbers:
        first[number] = _sum_of(records.seeded_row(BEFORE, number))
    for number in reversed(numbers):
        if _sum_of(records.seeded_row(BEFORE, number)) != first[number]:
            raise InputError(REREAD)


def overwritten(records: OneByOne) -> bool:
    """Return whether a record changes when others are read after it, or cannot be read.

    Args:
        records: dataset and ``collate_fn``, of which :func:`probes` are read.
    """
    read: list[tuple[Any, str]] = []
    with _seeded(0), suppress(Exception):
        for number in probes(len(records.dataset)):
            record = records.dataset[number]
            read.append((record, _sum_of(as_row(records.collate([record])))))
        return any(_sum_of(as_row(records.collate([record]))) != of for record, of in read)
    return True


def seeds_generators(records: OneByOne, numbers: list[int]) -> bool:
    """Return whether reading one of some records seeds a generator, whatever its state was.

    Args:
        records: dataset and ``collate_fn``.
        numbers: indices of the records, each of which is read twice.
    """
    for number in numbers:
        states = (_states_after(records, number, seed) for seed in (1, 2))
        for one, other in zip(*states, strict=True):  # of a generator
            if one == other:
                return True
    return False


def _states_after(records: OneByOne, number: int, seed: int) -> tuple[Any, ...]:
    """Return the states of the generators of torch, NumPy and Python after a record is read."""
    with _seeded(seed):
        records.row(number)
        _, words, *rest = np.random.get_state()
        torch_state = torch.get_rng_state().numpy().tobytes()
        return torch_state, (np.asarray(words).tobytes(), rest), random.getstate()


def _same(batch: Batch | Fault, row: Batch) -> bool:
    """Return whether a batch is one row, with the same bits."""
    return not isinstance(batch, Fault) and _sum_of(batch) == _sum_of(row)


def _sum_of(row: Batch) -> str:
    """Return the SHA-256 of a record."""
    parts, tensors = parts_by_name(row), dict[str, Tensor]()
    for name, part in parts.items():
        if isinstance(part, Tensor):
            tensors[name] = part.cpu()
    return digest(tensors, {"parts": list(parts)})


class Checked:
    """Records that were all read once. One that cannot be used later has a loss of NaN.

    A step leaves out a gradient that is not finite, so whether a record can be used changes nothing
    but its own part. It is itself a map-style dataset. A record is a dict of ``record`` and the
    factor ``used`` of its loss, 1 or NaN.

    Args:
        dataset: map-style dataset.
        example: public example of its records, as for a ``PrivateStep``; None without.
        size: number of records that it must have.
        use: function of a batch of one record, which fails if the network, or a function of the
            program, cannot be run on it; None for records that were checked before, none of which
            is read then. Without ``example``, the first one is.

    Attributes:
        example: the public example with its factors, in the form of the records; None without.
        structure: structure of a record with its factor.

    Raises:
        InputError: there is another number of records, or one cannot be used, differs when it is
            read again, or is there twice.
    """

    def __init__(
        self,
        dataset: Any,
        example: Batch | None,
        size: int,
        use: Callable[[Batch], object] | None,
    ) -> None:
        if size_of(dataset) != size:
            raise InputError(
                f"There are {size_of(dataset):,} records, but sampling has n={size:,}."
            )
        check_copies(dataset)
        self._records = OneByOne(dataset, default_collate, secrets.token_bytes(KEY_BYTES))
        row = first_row(self._records) if example is None else example
        self._like = Structure.of(row)
        if use is not None:
            self._check(use)
        self.example: Batch | None = None
        if example is not None:
            self.example = {"record": example, "used": torch.ones(len(tensors_in(example)[0]))}
        used = {"record": row, "used": torch.ones(1)}
        self.structure = Structure.of(used) if example is None else Structure(self.example, True)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records.dataset)

    def _check(self, use: Callable[[Batch], object]) -> None:
        """Raise InputError for a record that cannot be used, or differs when it is read again."""
        size = len(self)
        for number in range(size):
            record = self._row(number)
            if isinstance(record, Fault):
                raise InputError(f"Record {number}: {record.why}")
            _check_use(use, number, record)
        check_reread(self._records, probes(size))

    def _row(self, number: int) -> Batch | Fault:
        """Return a record as a batch of one row in the shape of the others, or its fault."""
        return joined(self._like, iter([self._records.row(number)]))

    def __getitem__(self, number: int) -> Any:
        """Return a record and the factor of its loss; a public one in place of one that fails."""
        record = self._row(number)
        lost = isinstance(record, Fault)
        row = self._like.template if lost else record
        return {
            "record": map_rows(lambda t: t[0], row),
            "used": torch.tensor(math.nan if lost else 1.0),
        }


def _check_use(use: Callable[[Batch], object], number: int, row: Batch) -> None:
    """Raise InputError if a function of the program fails on a record."""
    try:
        with code_of_network(row), torch.no_grad():
            use(row)
    except ModelError as failure:
        # Not raised from the failure, whose message may quote the record.
        raise InputError(f"Record {number}: {failure}") from None
