"""Multi-process training: batch shares, sums over ranks, and consistency checks.

Only rank 0 has the run's secrets: it draws batches and noise, writes files and prints. In every
step, each rank gets its share of one global batch, the clipped sums are added up at rank 0, noise
is added there once, and the next parameters and ellipsoid are sent to all ranks. So the guarantee
does not depend on the number of ranks.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dpmac_cli.errors import InputError, RunError
from dpmac_cli.randomness.sampling import Indices

#: Timeout for waiting on another rank; computing features may take many minutes.
PATIENCE = timedelta(hours=1)
#: Sent instead of a batch size when training is over.
NO_MORE = -1


def check_single_process() -> None:
    """Reject training in one of several processes, each of which would add noise of its own.

    Processes are known by an initialised ``torch.distributed``, or by the variable WORLD_SIZE.

    Raises:
        InputError: this is one of several.
    """
    if dist.is_available() and dist.is_initialized():
        count = dist.get_world_size()
    else:
        count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise InputError(
            f"This is one of {count} processes of torchrun or torch.distributed. Each would train "
            "on these records with noise of its own, and count only its own steps: together, or "
            "averaged, they cost more. Run the program in one process. To train on several GPUs, "
            f"use torchrun --nproc-per-node {count} -m dpmac_cli train ..., which adds noise once."
        )


class DismissedError(Exception):
    """Rank 0 no longer needs this rank: a loop of steps ends by it, and nothing is wrong."""


class Ranks:
    """Processes of a run: one, or several that use collective operations.

    :func:`join` makes those of a launcher; ``Ranks()`` is a single process. Every rank must call
    the same methods in the same order, because each waits for the others. A rank that stops, or
    does not answer within :data:`PATIENCE`, is a RunError at the others.

    Args:
        rank: rank of this process, from 0.
        size: number of processes.
        local: local rank on this machine, which is the index of its GPU.
    """

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0, which draws, adds noise, writes and prints."""
        return self.rank == 0

    def share(self, drawn: Indices | None) -> Indices:
        """Return this rank's share of rank 0's draw, in its order.

        The rank of a record or unit depends only on its own number: if it went by the place in the
        draw, adding a record would move others to ranks that may round differently.

        Args:
            drawn: numbers of records or units at rank 0, shape (records,); None at other ranks, and
                at rank 0 to dismiss them.

        Raises:
            DismissedError: rank 0 has drawn nothing more, see :meth:`dismiss`.
            RunError: a rank has stopped.
        """
        if self.size == 1 and drawn is not None:
            return drawn
        numbers = None if drawn is None else torch.from_numpy(drawn)
        rows = self._from_first(numbers, torch.int64)
        share: Indices = rows[rows % self.size == self.rank].numpy()
        return share

    def reduce(self, part: Tensor) -> Tensor:
        """Return the sum over several ranks in float64, shape (d,); valid only at rank 0.

        With one process it is ``part`` itself, in its dtype.

        Args:
            part: this rank's part of the sum, shape (d,).

        Raises:
            RunError: a rank has stopped.
        """
        if self.size == 1:
            return part
        total = part.double()
        self._meet(dist.reduce, total, 0)
        return total

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's tensor to all ranks, in place.

        Args:
            tensor: of the same shape and dtype at every rank.

        Raises:
            RunError: a rank has stopped.
        """
        self._meet(dist.broadcast, tensor, 0)

    def least(self, number: int) -> int:
        """Return the minimum over all ranks, which is the same at each.

        Args:
            number: whole number of this rank.

        Raises:
            RunError: a rank has stopped.

        >>> Ranks().least(3)
        3
        """
        smallest = torch.tensor([number])
        self._meet(dist.all_reduce, smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def alike(self, numbers: Tensor) -> Tensor:
        """Return which integers are the same at every rank: bool, in the shape of ``numbers``.

        Args:
            numbers: integers of this rank, in the same shape at every rank.

        Raises:
            RunError: a rank has stopped.

        >>> Ranks().alike(torch.tensor([1, 2]))
        tensor([True, True])
        """
        low, high = numbers.clone(), numbers.clone()
        self._meet(dist.all_reduce, low, dist.ReduceOp.MIN)
        self._meet(dist.all_reduce, high, dist.ReduceOp.MAX)
        return low == high

    def brief(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Broadcast JSON values from rank 0 and return them.

        Args:
            values: the values at rank 0; None at other ranks.

        Raises:
            DismissedError: at other ranks, if rank 0 has dismissed them.
            RunError: a rank has stopped.
        """
        text = None if values is None else torch.tensor(list(json.dumps(values).encode()))
        received = bytes(self._from_first(text, torch.uint8).tolist())
        briefing: dict[str, Any] = json.loads(received)
        return briefing

    def dismiss(self) -> None:
        """Release the other ranks between two steps, by rank 0 alone: their next call ends them."""
        with contextlib.suppress(DismissedError):
            self.share(None)

    def leave(self) -> None:
        """Close this rank's connections, which aborts the operations of ranks that wait for it.

        A second call does nothing, nor does one by a single process.
        """
        if dist.is_initialized():
            dist.destroy_process_group()

    def _from_first(self, vector: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return rank 0's vector of any length. Raises DismissedError if it has none."""
        count = torch.tensor([NO_MORE if vector is None else len(vector)])
        self.broadcast(count)
        if int(count) == NO_MORE:
            raise DismissedError
        received = torch.empty(int(count), dtype=dtype) if vector is None else vector.to(dtype)
        self.broadcast(received)
        return received

    def _meet(self, operation: Any, tensor: Tensor, *rest: Any) -> None:
        """Perform a collective operation; nothing if this is the only process.

        Raises RunError if a rank has stopped, or does not answer.
        """
        if self.size == 1:
            return
        try:
            operation(tensor, *rest)
            return
        except RuntimeError as failure:
            # Torch's message has a source location before the reason, and details after it.
            why = re.sub(r"\[/\S+\] ?", "", str(failure).partition("\n")[0]).partition(". ")[0]
        # Outside the exception handler, whose traceback would keep the connections open.
        self.leave()
        raise RunError(
            f"One of the {self.size} processes of this run stopped, or does not answer ({why}). "
            "Check the output of each process."
        )


def join() -> Ranks:
    """Join the ranks of a launcher such as torchrun, and wait until all have joined.

    It reads the variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK of the
    environment. Call :meth:`Ranks.leave` at the end.

    Raises:
        InputError: a variable is missing or invalid, or the ranks cannot connect.
    """
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as failure:
        raise InputError(
            f"The processes of this run cannot connect: {str(failure).splitlines()[0]}. Start them "
            "with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does."
        ) from failure
    return Ranks(rank, size, int(os.environ.get("LOCAL_RANK", "0")))
