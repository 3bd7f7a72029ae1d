"""Batch invariance: run a network so that a row's result depends on no other row, bit for bit.

Libraries may round a row by the number of rows computed with it, or by its place among them.
Removing a record changes both for the others. Differences of rounding are within the margin of the
clipped sum, except at a kink, such as that of ReLU, where they change on which side a record is.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.batches import Batch, map_rows, tensors_in
from dpmac_cli.dp.clipping.vmap_support import constant_draws, each_alone
from dpmac_cli.dp.torch_errors import out_of_memory

#: Least number of rows to compute at once, unless chunks are smaller. Matrix libraries round rows
#: of products of fewer rows differently (measured up to 11), and the last rows of numbers that are
#: no multiple of it.
LEAST_ROWS = 16
#: Number of different rows in a trial. Their copies are at all places; 7 has no factor in common
#: with the widths of vector registers.
PERIOD = 7
#: Number of trials, each with rows of its own: sums of a few products, such as those of a layer
#: with 22 inputs, come out alike in either order for many rows.
TRIALS = 3
#: Number of random rows for all trials.
TRIED = TRIALS * PERIOD
#: Note for a network whose chunks are filled.
FILLED = (
    "On this machine, results for a record would be rounded by the other records of a batch. To "
    "avoid that, every chunk is filled to its capacity. This is slower."
)


def fill_rows(batch: Batch, rows: int) -> Batch:
    """Return a batch, filled up to at least ``rows`` rows with copies of the first."""

    def filled(x: Tensor) -> Tensor:
        filling = x[:1].expand(max(0, rows - len(x)), *x.shape[1:])
        return torch.cat([x, filling]) if len(filling) else x

    return map_rows(filled, batch)


@contextmanager
def without_zeros(theta: Tensor) -> Iterator[None]:
    """Replace zero parameters, which would hide all rounding before them."""
    before, generator = theta.clone(), torch.Generator().manual_seed(0)
    try:
        drawn = 0.1 * torch.randn(theta.shape, generator=generator)
        theta.copy_(torch.where(theta == 0, drawn.to(theta), theta))
        yield
    finally:
        theta.copy_(before)


def rounded_up(chunk: int) -> int:
    """Return a number of rows, rounded up to a multiple of :data:`LEAST_ROWS`."""
    return -(-chunk // LEAST_ROWS) * LEAST_ROWS


@dataclass(frozen=True)
class RowFilling:
    """A way to run a network: ``full`` if every chunk is filled to its capacity."""

    full: bool = False

    def rows(self, samples: int, chunk: int) -> int:
        """Return the number of rows to compute for some samples of a chunk of this capacity."""
        if chunk == 1:
            return samples
        if self.full:
            return chunk if chunk < LEAST_ROWS else rounded_up(chunk)
        return max(samples, min(chunk, LEAST_ROWS))

    @property
    def note(self) -> str | None:
        """Return a message that tells what is slower than by default."""
        return FILLED if self.full else None


#: Runs a network on rows, as in training, and returns results with one or more rows per row.
RunNetwork = Callable[[Batch], Any]


def find_filling(
    run: RunNetwork, base: Batch, chunk: int, *, fixed: bool = False
) -> RowFilling | None:
    """Return the cheapest way to run a network in which no row depends on the others, if any.

    It is run on copies of a few random rows, in several numbers and at every place of each. Their
    results must be equal, bit for bit. This is a measurement on this machine, not a proof.

    Args:
        run: runs the network on rows.
        base: rows to copy, shape (:data:`TRIED`, ...).
        chunk: capacity of a chunk.
        fixed: chunks are always filled.
    """
    # On GPUs, most products are rounded by the number of rows.
    filled = fixed or any(x.is_cuda for x in tensors_in(base))
    # Random numbers differ by place.
    with constant_draws() if _draws(run, base, min(chunk, LEAST_ROWS)) else nullcontext():
        fillings = [RowFilling(full=True)] if filled else [RowFilling(), RowFilling(full=True)]
        for filling in fillings:
            numbers = sorted({filling.rows(n, chunk) for n in some_numbers(chunk)}, reverse=True)
            if rows_alike(run, base, numbers):
                return filling
    return None


def unaffected(
    run: Callable[[Tensor], Tensor], like: Tensor, size: int, *, own: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function of up to ``size`` rows, none of which changes or rounds another.

    It always computes the same number of rows. Where that does not help, it runs row by row. A
    network that is not built in is copied, for each row if they run one by one, so that it keeps
    nothing of a row.

    Args:
        run: a network or a method of one, which maps rows to rows.
        like: a tensor with the shape of a row, its dtype and device.
        size: largest number of rows.
        own: whether ``run`` may mix rows, so that it sees one at a time.
    """
    drawn = torch.randn(TRIED, *like.shape, generator=torch.Generator().manual_seed(0))
    each, filling = each_alone(copy.deepcopy(run)) if own else run, None
    try:
        filling = find_filling(each, drawn.to(like), size, fixed=True)
    except Exception as failure:
        if not own or out_of_memory(failure):
            raise  # vmap runs whatever is built in
    if filling is None:
        return lambda rows: torch.cat(
            [(copy.deepcopy(run) if own else run)(row) for row in torch.split(rows, 1)]
        )
    count = filling.rows(size, size)
    return lambda rows: each(fill_rows(rows, count))[: len(rows)]


@torch.no_grad()
def _draws(run: RunNetwork, base: Batch, rows: int) -> bool:
    """Return whether results differ with the seed of torch's random numbers."""
    some, found = map_rows(itemgetter(slice(rows)), base), []
    with torch.random.fork_rng():
        for seed in range(2):
            torch.manual_seed(seed)
            found.append([x.clone() for x in tensors_in(run(some))])
    return not all(map(_equal, *found))


def some_numbers(chunk: int) -> list[int]:
    """Return numbers of rows to try, the largest first.

    They have all remainders by 4, are even and odd, and grow as thresholds in libraries do.
    """
    least = min(chunk, LEAST_ROWS)
    sizes = {least, chunk, *(n for n in (17, 19, 22, 33, 50, 75) if n < chunk)}
    sizes |= {max(least, n) for n in (chunk // 3, chunk // 2, chunk - 1)}
    return sorted(sizes, reverse=True) if chunk >= LEAST_ROWS else [chunk]


@torch.no_grad()
def rows_alike(run: RunNetwork, base: Batch, numbers: list[int]) -> bool:
    """Return whether results for equal rows are equal, in any number and at any place.

    Large numbers are tried once, with the first rows; numbers in which most differences show, with
    others as well.
    """
    few = [n for n in numbers if n <= 2 * LEAST_ROWS + 1] or numbers[-1:]
    trials = zip(range(0, TRIED, PERIOD), (numbers, *[few] * (TRIALS - 1)), strict=True)
    for begin, some in trials:
        rows, first = (
            map_rows(itemgetter(slice(begin, begin + PERIOD)), base),
            dict[tuple[int, int], Tensor](),
        )
        # A few rows are at several places, too.
        moved = ((n, shift) for n in some for shift in range(PERIOD if n <= LEAST_ROWS else 1))
        if not all(_alike(first, run, rows, *each) for each in moved):
            return False
    return True


def _alike(
    first: dict[tuple[int, int], Tensor],
    run: RunNetwork,
    base: Batch,
    number: int,
    shift: int,
) -> bool:
    """Run on a number of rows, moved by ``shift``; return whether results are the first ones."""
    same = True
    for n, tensor in enumerate(tensors_in(run(map_rows(partial(_in_turn, number, shift), base)))):
        if tensor.ndim == 0 or len(tensor) == 0 or len(tensor) % number:
            continue  # it has no rows
        rows = tensor.detach().reshape(number, -1)
        for k, row in enumerate(rows[:PERIOD]):
            before = first.setdefault((n, (k + shift) % PERIOD), row.clone())
            if row.shape == before.shape:
                same &= _equal(rows[k::PERIOD], before)
    return same


def _in_turn(number: int, shift: int, base: Tensor) -> Tensor:
    moved = base.roll(-shift, 0)
    return moved.repeat(-(-number // len(base)), *[1] * (base.ndim - 1))[:number]


def _equal(rows: Tensor, row: Tensor) -> bool:
    return bool(((rows == row) | (rows.isnan() & row.isnan())).all())
