"""Several processes that work on one run: who has which part of a batch, and how they meet.

Rank 0 leads. It alone has the run's secrets: it draws the batches and the noise, and it alone
writes and prints. In every step each rank gets its share of one global draw, their clipped sums are
added up at rank 0, noise is added there, once, and the private mean goes back to all. From it every
rank works out the same next parameters and ellipsoid. So nothing of the guarantee depends on how
many ranks there are.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean
from dpmac_cli.errors import InputError, RunError
from dpmac_cli.randomness.noise import NoiseSource, Normals
from dpmac_cli.randomness.sampling import Batch, Sampler

#: Seconds that a rank may keep the others waiting: computing features may take many minutes.
PATIENCE = 3600.0
#: Seconds that all ranks may take to begin, once they have met.
ARRIVAL = 300.0
#: Seconds that a rank has to answer after a failure before it is presumed dead, and between looks.
SILENCE, PULSE = 10.0, 0.5
#: Seconds that rank 0, which may host the store, waits at its end for the others to leave.
FAREWELL = 3.0
#: In place of the size of a batch: there is none, training is over.
NO_MORE = -1
#: Key in the store that says that rank 0 has ended.
OVER = "over"


class DismissedError(Exception):
    """Rank 0 needs this rank no more."""


class Ranks:
    """The processes of a run.

    Args:
        rank: of this one, from 0.
        size: how many there are, two or more.
        store: that all of them reach.
        local: number of this one on its machine, which is that of its GPU.
    """

    def __init__(self, rank: int, size: int, store: Store, local: int = 0) -> None:
        self.rank, self.size, self.local = rank, size, local
        self._store = store

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def share(self, drawn: Batch | None) -> Batch:
        """This rank's part of a global draw, which rank 0 has.

        Raises:
            DismissedError: there is no more to draw.
        """
        count = torch.tensor([NO_MORE if drawn is None else len(drawn)])
        self._meet(dist.broadcast, count, 0)
        if int(count) == NO_MORE:
            raise DismissedError
        rows = torch.empty(int(count), dtype=torch.int64)
        if drawn is not None:
            rows.copy_(torch.from_numpy(drawn))
        self._meet(dist.broadcast, rows, 0)
        mine: Batch = rows[self.rank :: self.size].numpy()
        return mine

    def divide(
        self, mechanism: GaussianMechanism, sampler: Sampler, noise: NoiseSource
    ) -> "tuple[SharedMechanism, DealtSampler, NoiseSource]":
        """What one process would have, as this rank is to use it: secrets at rank 0 alone."""
        sigma, batch = mechanism.noise_multiplier, mechanism.expected_batch
        return (
            SharedMechanism(sigma, batch, mechanism, self),
            DealtSampler(self, sampler if self.leads else None),
            noise if self.leads else NoNoise(),
        )

    def add_up(self, part: Tensor) -> Tensor:
        """The sum over ranks in float64, shape as given; of use to rank 0 alone."""
        total = part.double()
        self._meet(dist.reduce, total, 0)
        return total

    def tell(self, tensor: Tensor) -> None:
        """Rank 0's tensor to all, in place."""
        self._meet(dist.broadcast, tensor, 0)

    def least(self, number: int) -> int:
        """The least of what the ranks say."""
        said = torch.tensor([number])
        self._meet(dist.all_reduce, said, dist.ReduceOp.MIN)
        return int(said)

    def post(self, machine: Mapping[str, Any]) -> None:
        """Tell rank 0 what this rank computes on, as JSON values."""
        self._store.set(f"machine {self.rank}", json.dumps(machine))

    def posted(self) -> list[dict[str, Any]]:
        """What the others compute on. Raises RunError if one of them never says."""
        names = [f"machine {rank}" for rank in range(1, self.size)]
        try:
            self._store.wait(names, timedelta(seconds=ARRIVAL))
            return [json.loads(self._store.get(name)) for name in names]
        except RuntimeError as failure:
            raise RunError(_lost([], self.size)) from failure

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Make sure that tensors are the same at every rank, bit by bit.

        Raises:
            RunError: they are not: then samples are clipped to other regions than noise is for.
        """
        sums = torch.stack([t.detach().reshape(-1).view(torch.int32).sum().cpu() for t in tensors])
        if not self.alike(sums).all():
            raise RunError(
                "The processes of this run went apart: from the same private means they worked out "
                "other parameters. Use the same kind of machine, and the same torch, for all."
            )

    def alike(self, numbers: Tensor) -> Tensor:
        """Return which of some whole numbers are the same at every rank; shape as given."""
        low, high = numbers.clone(), numbers.clone()
        self._meet(dist.all_reduce, low, dist.ReduceOp.MIN)
        self._meet(dist.all_reduce, high, dist.ReduceOp.MAX)
        return low == high

    def brief(self, said: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What rank 0 says, as JSON values, to all; None at the others, which listen."""
        text = b"" if said is None else json.dumps(said).encode()
        length = torch.tensor([len(text)])
        self.tell(length)
        letters = torch.zeros(int(length), dtype=torch.uint8)
        if text:
            letters.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.tell(letters)
        heard: dict[str, Any] = json.loads(bytes(letters.tolist()))
        return heard

    def dismiss(self) -> None:
        """Rank 0 lets the others go: between two steps."""
        with contextlib.suppress(DismissedError):
            self.share(None)

    def leave(self) -> None:
        """End this rank's part in the run. Rank 0 stays until the others have heard of its end."""
        with contextlib.suppress(RuntimeError):
            self._store.set(OVER if self.leads else f"left {self.rank}", "yes")
        self._disconnect()
        if self.leads:
            with contextlib.suppress(RuntimeError):
                others = [f"left {rank}" for rank in range(1, self.size)]
                self._store.wait(others, timedelta(seconds=FAREWELL))

    def _disconnect(self) -> None:
        """Close this rank's connections, which fails the operations of ranks that wait for it."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _meet(self, operation: Any, tensor: Tensor, *rest: Any) -> None:
        """Perform a collective operation.

        Raises:
            DismissedError: rank 0 has ended.
            RunError: a rank is gone; the message names it.
        """
        with contextlib.suppress(RuntimeError):
            operation(tensor, *rest)
            return
        # Not within the handler of the failure, whose traceback would keep the connections open.
        self._disconnect()
        gone = self._gone()
        if gone is None:
            raise DismissedError
        raise RunError(_lost(gone, self.size))

    def _gone(self) -> list[int] | None:
        """Return the ranks that do not answer a roll call; None if rank 0 has ended in order."""
        names = [f"here {rank}" for rank in range(self.size)]
        silent: list[int] = []
        try:
            self._store.set(names[self.rank], "yes")
            for _ in range(round(SILENCE / PULSE)):
                if self._store.check([OVER]):
                    return None
                silent = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                if not silent:
                    break
                time.sleep(PULSE)
        except RuntimeError:  # rank 0, or its launcher, hosts the store
            return [0]
        return silent


def _lost(gone: list[int], size: int) -> str:
    if not gone:
        return f"The connection between the {size} processes of this run broke."
    which = " and ".join(map(str, gone))
    return (
        f"Rank {which} of the {size} processes of this run stopped, or did not answer within "
        f"{SILENCE:g} seconds. See what it printed."
    )


def join() -> Ranks:
    """The ranks that a launcher such as torchrun has started.

    Raises:
        InputError: the launcher's variables cannot be used.
    """
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=PATIENCE))))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
        )
    except (RuntimeError, ValueError) as failure:
        raise InputError(
            f"The processes of this run cannot meet: {str(failure).splitlines()[0]}. Start them by "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as it does."
        ) from failure
    return Ranks(rank, size, store, int(os.environ.get("LOCAL_RANK", "0")))


class DealtSampler:
    """Draws at rank 0, and deals to all.

    Args:
        ranks: of the run.
        sampler: of rank 0; None at the others.
    """

    def __init__(self, ranks: Ranks, sampler: Sampler | None) -> None:
        self._ranks, self._sampler = ranks, sampler

    def draw(self) -> Batch:
        """This rank's share. Raises DismissedError when training is over."""
        return self._ranks.share(None if self._sampler is None else self._sampler.draw())

    def state(self) -> dict[str, Any]:
        """Rank 0's sampler's."""
        return {} if self._sampler is None else self._sampler.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """At rank 0, go on from a state."""
        if self._sampler is not None:
            self._sampler.restore(state)


class NoNoise:
    """Stands in for the source of noise at the ranks that have no secret."""

    def standard_normal(self, like: Tensor) -> NoReturn:
        """Fail: nothing asks for it."""
        raise AssertionError("noise is drawn at rank 0")

    bits = standard_normal

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class SharedMechanism(GaussianMechanism):
    """A mechanism at rank 0, whose private means go to all.

    Attributes:
        at_first: the mechanism.
        ranks: of the run.
    """

    at_first: GaussianMechanism
    ranks: Ranks

    def release(self, clipped: Tensor, region: Ellipsoid, noise: Normals) -> PrivateMean:
        """Rank 0's private mean, at every rank."""
        if self.ranks.leads:
            private = self.at_first.release(clipped, region, noise)
        else:
            scale = region.scale
            value = torch.empty_like(clipped, dtype=scale.dtype)
            private = PrivateMean(value, scale, self.noise_multiplier / self.expected_batch)
        self.ranks.tell(private.value)
        return private

    def rounding(self, size: int) -> float:
        """As of the mechanism at rank 0."""
        return self.at_first.rounding(size)
