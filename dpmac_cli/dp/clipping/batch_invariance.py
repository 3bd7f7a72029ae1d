"""Batch invariance: run a network so that a row's result depends on no other row, bit for bit.

Libraries may round a row by the number of rows computed with it, or by its place among them.
Removing a record changes both for the others. Differences of rounding are within the margin of the
clipped sum, except at a kink, such as that of ReLU, where they change on which side a record is.
Whether they do is tried on the operations of the network, with numbers that show the order of a
sum (:mod:`.order_of_sums`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.dp.clipping.batches import Batch, map_rows, tensors_in
from dpmac_cli.dp.clipping.order_of_sums import BLOCK, Elementwise, OrderOfSums, shares_of
from dpmac_cli.dp.clipping.vmap_support import Constant, each_alone
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
#: Largest number of shares of threads for which rows are computed together at fixed numbers.
MOST_SHARES = 12


def fill_rows(batch: Batch, rows: int) -> Batch:
    """Return a batch, filled up to at least ``rows`` rows with copies of the first."""

    def filled(x: Tensor) -> Tensor:
        filling = x[:1].expand(max(0, rows - len(x)), *x.shape[1:])
        return torch.cat([x, filling]) if len(filling) else x

    return map_rows(filled, batch)


def spread(batch: Batch, counted: NDArray[np.bool]) -> Batch:
    """Return a batch with its rows at the places that count, and copies of them at the others.

    Args:
        batch: tensors with a row for each place that counts, at least one.
        counted: bool, shape (places,).
    """
    if counted.all():
        return batch
    index = torch.from_numpy((counted.cumsum() - 1).clip(0))
    return map_rows(lambda x: x[index.to(x.device, non_blocking=True)], batch)


@contextmanager
def fixed_numbers(theta: Tensor) -> Iterator[None]:
    """Replace parameters by fixed random numbers, so that a trial is that of all weights."""
    before, generator = theta.clone(), torch.Generator().manual_seed(0)
    try:
        theta.copy_(0.1 * torch.randn(theta.shape, generator=generator))
        yield
    finally:
        theta.copy_(before)


def rounded_up(rows: int, block: int = LEAST_ROWS) -> int:
    """Return a number of rows, rounded up to a multiple of ``block``."""
    return -(-rows // block) * block


def rows_of(samples: int, chunk: int, block: int) -> int:
    """Return the number of rows to compute for some samples of a chunk.

    Args:
        samples: number of samples, at most ``chunk``.
        chunk: capacity of the chunk.
        block: divisor of the number of rows; 1 for any.
    """
    least = min(chunk, max(LEAST_ROWS, block))
    return max(least, samples if chunk < block else rounded_up(samples, block))


#: Runs a network on rows, as in training, and returns results with one or more rows per row.
RunNetwork = Callable[[Batch], Any]


def chunks_alike(run: RunNetwork, base: Batch, chunk: int, block: int = 1) -> bool:
    """Return whether a network treats equal rows alike in chunks of any number of samples.

    It is run on copies of a few random rows, in several numbers and at every place of each. Their
    results must be equal, bit for bit. This is a measurement on this machine, not a proof.

    Args:
        run: runs the network on rows.
        base: rows to copy, shape (:data:`TRIED`, ...).
        chunk, block: see :func:`rows_of`.
    """
    numbers = {rows_of(samples, chunk, block) for samples in some_numbers(chunk)}
    return _tried_alike(run, base, sorted(numbers, reverse=True))


def _tried_alike(run: RunNetwork, base: Batch, numbers: list[int]) -> bool:
    def showing_order(rows: Batch) -> Any:
        # Random numbers would differ by place.
        with Constant(), OrderOfSums():  # type: ignore[no-untyped-call]
            return run(rows)

    return rows_alike(showing_order, base, numbers)


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
    each, alike = each_alone(copy.deepcopy(run)) if own else run, False
    count = size if size < LEAST_ROWS else rounded_up(size)
    try:
        with Elementwise() as elementwise:
            each(fill_rows(drawn.to(like), count)[:count])
        shares = shares_of(elementwise.largest)
        if shares > 1:
            count = rounded_up(count, shares * BLOCK)
        alike = shares <= MOST_SHARES and _tried_alike(each, drawn.to(like), [count])
    except Exception as failure:
        if not own or out_of_memory(failure):
            raise  # vmap runs whatever is built in
    if not alike:
        return lambda rows: torch.cat(
            [(copy.deepcopy(run) if own else run)(row) for row in torch.split(rows, 1)]
        )
    return lambda rows: each(fill_rows(rows, count))[: len(rows)]


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
