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
    """Return a batch, filled up to a number of rows with copies of its first row.

    Args:
        batch: tensors of shape (samples, ...), with at least one row.
        rows: least number of rows of the result. A batch that has them is returned as it is.

    Example:
        >>> fill_rows(torch.tensor([1, 2]), 4)
        tensor([1, 2, 1, 1])
    """

    def filled(x: Tensor) -> Tensor:
        missing = rows - len(x)
        if missing <= 0:
            return x
        return torch.cat([x, x[:1].expand(missing, *x.shape[1:])])

    return map_rows(filled, batch)


def spread(batch: Batch, counted: NDArray[np.bool_]) -> Batch:
    """Return a batch with its rows at some of more places, in order, and copies at the others.

    A copy is that of the last row before it, or of the first one. Only the rows at the given
    places are meant to count in a sum.

    Args:
        batch: tensors of shape (samples, ...), with a row for each place that counts, at least one.
        counted: mask of the places that count, bool, shape (places,).

    Returns:
        Tensors of shape (places, ...); ``batch`` itself if all places count.

    Example:
        >>> spread(torch.tensor([1, 2]), np.array([False, True, False, True]))
        tensor([1, 1, 1, 2])
    """
    if counted.all():
        return batch
    row_at = (counted.cumsum() - 1).clip(0)
    index = torch.from_numpy(row_at)
    return map_rows(lambda x: x[index.to(x.device, non_blocking=True)], batch)


@contextmanager
def fixed_numbers(theta: Tensor) -> Iterator[None]:
    """Replace parameters by fixed random numbers for a ``with`` block: a trial for any weights.

    Args:
        theta: all parameters, shape (d,), which are restored at the end of the block.
    """
    before = theta.clone()
    generator = torch.Generator().manual_seed(0)
    try:
        theta.copy_(0.1 * torch.randn(theta.shape, generator=generator))
        yield
    finally:
        theta.copy_(before)


def rounded_up(rows: int, block: int = LEAST_ROWS) -> int:
    """Return a number of rows, rounded up to a multiple of another number.

    Args:
        rows: number of rows, at least 0.
        block: the number that the result is a multiple of, at least 1.

    Example:
        >>> rounded_up(17), rounded_up(32)
        (32, 32)
    """
    return -(-rows // block) * block


def rows_of(samples: int, chunk: int, block: int) -> int:
    """Return the number of rows to compute for some samples of a chunk; the others are copies.

    Args:
        samples: number of samples, at most ``chunk``.
        chunk: capacity of the chunk, the largest number of samples.
        block: number of which the rows are a multiple, unless the capacity is below it; 1 for any.

    Example:
        >>> rows_of(3, chunk=64, block=1), rows_of(17, chunk=64, block=16)
        (16, 32)
    """
    least = min(chunk, max(LEAST_ROWS, block))
    rows = samples if chunk < block else rounded_up(samples, block)
    return max(least, rows)


#: Runs a network on rows, as in training, and returns results with one or more rows per row.
RunNetwork = Callable[[Batch], Any]


def chunks_alike(run: RunNetwork, base: Batch, chunk: int, block: int = 1) -> bool:
    """Return whether a network's results for a row depend on no other row, in chunks of any size.

    It is run on copies of a few random rows, in several numbers and at every place of each, with
    numbers that show the order of sums. Results of equal rows must be equal, bit for bit. This is a
    measurement on this machine, not a proof.

    Args:
        run: runs the network on rows, as in training.
        base: random rows to copy, shape (:data:`TRIED`, ...).
        chunk: capacity of a chunk, see :func:`rows_of`.
        block: number of which the rows of a chunk are a multiple; 1 for any.
    """
    numbers = {rows_of(samples, chunk, block) for samples in some_numbers(chunk)}
    return _tried_alike(run, base, sorted(numbers, reverse=True))


def _tried_alike(run: RunNetwork, base: Batch, numbers: list[int]) -> bool:
    """Return whether rows are alike on numbers that show the order of sums."""

    def showing_order(rows: Batch) -> Any:
        # Random numbers would differ by place.
        with Constant(), OrderOfSums():
            return run(rows)

    return rows_alike(showing_order, base, numbers)


def unaffected(
    run: Callable[[Tensor], Tensor], like: Tensor, size: int, *, may_mix: bool
) -> Callable[[Tensor], Tensor]:
    """Return a network as a function of up to ``size`` rows, none of which changes another's bits.

    It always computes the same number of rows. Where that does not help, it runs row by row. A
    network that is not built in is copied, for each row if they run one by one, so that it keeps
    nothing of a row.

    Args:
        run: a network or a method of one, which maps (rows, ...) to (rows, ...).
        like: a tensor with the shape of one row, its dtype and device; its values are not read.
        size: largest number of rows of a call, at least 1.
        may_mix: whether ``run`` may mix rows, so that it sees one at a time; False for built-in
            networks.

    Returns:
        A function that maps (rows, ...) to what ``run`` returns for each row alone.

    Raises:
        Exception: that of ``run`` on random rows, if memory runs out or it is built in. Another
            network that fails there runs row by row.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(TRIED, *like.shape, generator=generator)
    each = each_alone(copy.deepcopy(run)) if may_mix else run
    count = size if size < LEAST_ROWS else rounded_up(size)
    alike = False
    try:
        with Elementwise() as elementwise:
            each(fill_rows(drawn.to(like), count)[:count])
        shares = shares_of(elementwise.largest)
        if shares > 1:
            count = rounded_up(count, shares * BLOCK)
        alike = shares <= MOST_SHARES and _tried_alike(each, drawn.to(like), [count])
    except Exception as failure:
        if not may_mix or out_of_memory(failure):
            raise  # vmap runs whatever is built in

    def row_by_row(rows: Tensor) -> Tensor:
        outputs = []
        for row in torch.split(rows, 1):
            run_alone = copy.deepcopy(run) if may_mix else run
            outputs.append(run_alone(row))
        return torch.cat(outputs)

    def at_fixed_number(rows: Tensor) -> Tensor:
        return each(fill_rows(rows, count))[: len(rows)]

    return at_fixed_number if alike else row_by_row


def some_numbers(chunk: int) -> list[int]:
    """Return numbers of rows on which :func:`chunks_alike` tries a network, the largest first.

    They have all remainders by 4, are even and odd, and grow as thresholds in libraries do.

    Args:
        chunk: largest number of rows; below :data:`LEAST_ROWS`, it is the only one.

    Example:
        >>> some_numbers(64)
        [64, 63, 50, 33, 32, 22, 21, 19, 17, 16]
    """
    if chunk < LEAST_ROWS:
        return [chunk]
    numbers = {LEAST_ROWS, chunk}
    for number in (17, 19, 22, 33, 50, 75):
        if number < chunk:
            numbers.add(number)
    for number in (chunk // 3, chunk // 2, chunk - 1):
        numbers.add(max(LEAST_ROWS, number))
    return sorted(numbers, reverse=True)


@torch.no_grad()
def rows_alike(run: RunNetwork, base: Batch, numbers: list[int]) -> bool:
    """Return whether a network's results for equal rows are equal, bit for bit; NaN equals NaN.

    It is run on copies of the rows, in several numbers and at several places. Large numbers are
    tried once, with the first rows; numbers in which most differences show, with others as well.

    Args:
        run: runs a network on rows.
        base: rows to copy, shape (:data:`TRIED`, ...).
        numbers: numbers of rows to try, the largest first; at least one.
    """
    few = [n for n in numbers if n <= 2 * LEAST_ROWS + 1] or numbers[-1:]
    trials = zip(range(0, TRIED, PERIOD), (numbers, *[few] * (TRIALS - 1)), strict=True)
    for begin, tried in trials:
        rows = map_rows(itemgetter(slice(begin, begin + PERIOD)), base)
        first = dict[tuple[int, int], Tensor]()
        for number in tried:
            shifts = PERIOD if number <= LEAST_ROWS else 1  # a few rows are at several places, too
            for shift in range(shifts):
                if not _alike(first, run, rows, number, shift):
                    return False
    return True


def _alike(
    first: dict[tuple[int, int], Tensor],
    run: RunNetwork,
    base: Batch,
    number: int,
    shift: int,
) -> bool:
    """Return whether results for equal rows are the first ones.

    Args:
        first: first result by number of the tensor and of the row; filled.
        run: runs a network on rows.
        base: :data:`PERIOD` different rows.
        number: number of rows to run on: copies of these, in turn.
        shift: number of places by which they are moved.
    """
    same = True
    results = run(map_rows(partial(_in_turn, number, shift), base))
    for n, tensor in enumerate(tensors_in(results)):
        if tensor.ndim == 0 or len(tensor) == 0 or len(tensor) % number:
            continue  # it has no rows
        rows = tensor.detach().reshape(number, -1)
        for k, row in enumerate(rows[:PERIOD]):
            before = first.setdefault((n, (k + shift) % PERIOD), row.clone())
            if row.shape == before.shape:
                same &= _equal(rows[k::PERIOD], before)
    return same


def _in_turn(number: int, shift: int, base: Tensor) -> Tensor:
    """Return a number of rows: those of ``base`` from the row ``shift`` on, again and again."""
    moved = base.roll(-shift, 0)
    times = -(-number // len(base))
    return moved.repeat(times, *[1] * (base.ndim - 1))[:number]


def _equal(rows: Tensor, row: Tensor) -> bool:
    """Return whether all rows are equal to one, bit for bit; NaN is equal to NaN."""
    same = (rows == row) | (rows.isnan() & row.isnan())
    return bool(same.all())
