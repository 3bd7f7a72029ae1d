"""Batches of a map-style dataset, drawn by the sampler that is accounted for."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpmac_cli.dp.clipping.batches import Batch, Structure, map_rows, tensors_in
from dpmac_cli.errors import InputError
from dpmac_cli.randomness import sampling
from dpmac_cli.training.reading import Item, Reader
from dpmac_cli.training.rows import Fault

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


class Drawn(NamedTuple):
    """A batch as the loader gave it, and the records that it consists of.

    A program can write to ``batch`` by way of NumPy or ``.data``, which no version counter shows.
    So a step uses ``rows``, a copy that no program has.

    Attributes:
        step: number of the step that it was drawn for.
        records: numbers of its records, shape (records,), which are secret.
        batch: the batch that the program has, with one row per record.
        rows: the copy.
        versions: id and version counter of every tensor of ``batch``.
    """

    step: int
    records: sampling.Indices
    batch: Batch
    rows: Batch
    versions: tuple[tuple[int, int], ...]  # id and version counter of every tensor

    @staticmethod
    def of(step: int, records: sampling.Indices, batch: Batch) -> "Drawn":
        """Return a batch of a step, with a copy and the state of its tensors.

        Args:
            step: number of the step.
            records: numbers of its records, shape (records,).
            batch: the batch, with one row per record in their order.
        """
        return Drawn(step, records, batch, map_rows(Tensor.clone, batch), _state_of(batch))

    def is_of(self, step: int, batch: Batch) -> bool:
        """Return whether this is the batch of a step, with the same tensors, unchanged.

        Writes that torch does not count are not noticed: :attr:`rows` has what was read.

        Args:
            step: number of the step.
            batch: the object that a program passed.
        """
        return step == self.step and batch is self.batch and _state_of(batch) == self.versions


def _state_of(batch: Batch) -> tuple[tuple[int, int], ...]:
    """Return the id and the version counter of every tensor, which writes by torch increase."""
    return tuple((id(t), t._version) for t in tensors_in(batch))


def batches(
    reader: Reader,
    sampler: sampling.Sampler,
    structure: Structure,
    steps: range,
    workers: int,
) -> Iterator[Drawn]:
    """Yield the batches of some steps, in their order.

    Args:
        reader: reads the records of a step.
        sampler: draws the records of each step.
        structure: structure of a row, which every record must have, on the device for batches.
        steps: numbers of the steps.
        workers: number of processes that read records; 0 to read in this one. They read ahead.

    Raises:
        InputError: a record cannot be used. The message does not quote it.
    """
    drawn: dict[int, sampling.Indices] = {}

    def items() -> Iterator[Item]:
        for step in steps:
            drawn[step] = sampler.draw(step)
            yield step, drawn[step]

    device = tensors_in(structure.template)[0].device
    loader: DataLoader[Any] = DataLoader(
        reader,  # type: ignore[arg-type]  # it has no length, which is not needed
        batch_size=None,
        sampler=items(),
        num_workers=workers,
        collate_fn=_as_read,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # torch's own draws would change the global generator
    )
    for step, batch in zip(steps, loader, strict=True):
        if isinstance(batch, Fault):
            raise InputError(batch.why)
        on_device = map_rows(lambda t: t.to(device, non_blocking=True), batch)
        yield Drawn.of(step, drawn.pop(step), on_device)


def _as_read(batch: Any) -> Any:
    """Return a batch as it was read; torch would convert it."""
    return batch
