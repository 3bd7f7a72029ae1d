"""Clipped sum of a batch, in chunks that fit into memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import ceil, lcm, sqrt
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batch_invariance import (
    LEAST_ROWS,
    TRIED,
    RunNetwork,
    chunks_alike,
    fixed_numbers,
    rounded_up,
    rows_of,
    spread,
)
from dpmac_cli.dp.clipping.batches import (
    NOTHING,
    Structure,
    map_rows,
    samples_in,
    tensors_in,
)
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum, most_samples
from dpmac_cli.dp.clipping.layers import (
    blocks,
    flatten_parameters,
    skipped_by,
    without_gradients,
)
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.order_of_sums import BLOCK, shares_of
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.losses import Loss, returned
from dpmac_cli.dp.precision import Arithmetic
from dpmac_cli.dp.torch_errors import code_of_network, out_of_memory
from dpmac_cli.dp.weights import Weigh
from dpmac_cli.errors import InputError, ModelError, RunError
from dpmac_cli.models.fingerprint import DURING, Fingerprint
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.sampling import Indices, RandomPlaces
from dpmac_cli.training.recorded_sum import RecordedChunkSum

#: Note for a network whose records have random places.
PLACED = (
    "On this machine, results for a record may be rounded by its place among the others of a "
    "batch. So the records of each step have random places in {:,} rows, of which {:,} are used on "
    "average: the network takes about {:.1f} times as long."
)
#: Message for a batch that is too large for the margin for rounding.
TOO_MANY = (
    "The batch has many times more records than the batch size that was stated. No sampler draws "
    "such a batch, and the margin for rounding is for about as many records as stated. State the "
    "expected batch_size; for batches of all records use batch_size=n."
)
#: Note for parameters that are trained without a gradient.
IDLE = (
    "The loss does not depend on {}, which get noise only. If that is not intended, use them, or "
    "freeze them with requires_grad_(False)."
)


class ChunkedSum(ABC):
    """Sum of the clipped, centred gradients of a batch, computed chunk by chunk.

    A subclass says where records are read: :class:`BatchSum` from the batches of a program,
    :class:`.DataSum` from a dataset. The network is validated and its parameters are moved when an
    instance is made; :meth:`of` then computes the sum of a step.

    Args:
        model: the network.
        inputs, labels: structure of a sample's inputs and labels, with all views.
        layers: random draws of layers, augmented views and the records of units; None if the
            network draws no random numbers and nothing else does.
        places: random places of records, for networks whose rows are rounded by their place.
        loss: loss per sample.
        physical_batch: samples to process at a time.
        batch: expected number B of samples in a step.
        views: number of inputs per sample, whose mean loss counts.
        private: whether rows must not round others.
        rowwise: whether loss and weights are built in.
        weigh: weights of rows, :mod:`dpmac_cli.dp.weights`; by default those of the loss, if any.

    Raises:
        ModelError: layers cannot be clipped, or the network would cast its inputs.

    Attributes:
        model: the network, which each step runs in the modes in which it was validated.
        theta: the model's parameters, moved into one vector, shape (d,).
        skipped: slices of theta that are never trained: rows of embeddings that are padding.
        size: number of parameters that are trained.
        chunk: initial number of samples per chunk: the physical batch, or fewer.
        clipped_sum: clipped sum of one chunk.
        per_sample: the network on each sample alone.
        placed: whether the records of a step have random places.
        trained: ids of the parameters that are trained.
        unchanged: the network as it was validated, before the trial of how rows are rounded.
        arithmetic: settings of torch in this trial, with which steps must compute.
        notes: messages about how the network is run; () if there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Structure,
        labels: Structure,
        layers: LayerDraws | None,
        places: RandomPlaces,
        *,
        loss: Loss,
        physical_batch: int,
        batch: float,
        views: int = 1,
        private: bool = True,
        rowwise: bool = False,
        weigh: Weigh | None = None,
    ) -> None:
        self._layers, self._places, self._private = layers, places, private
        self.arithmetic, self.model = Arithmetic.now(), model
        self.per_sample = PerSample(
            model, inputs, labels, views, loss, rowwise=rowwise, weigh=weigh
        )
        self.chunk = min(first_chunk(physical_batch, batch), self.per_sample.most)
        trained = self.per_sample.layers
        self._parameters = list[nn.Parameter]()
        for layer in trained:
            self._parameters.extend(layer.parameters.values())
        self.trained = set(map(id, self._parameters))
        self.theta, self.skipped = flatten_parameters(trained), skipped_by(trained)
        self.size = sum(layer.size for layer in trained)
        self._check_dtype()
        for p in self._parameters:
            p.requires_grad_(True)
            p.grad = None  # of training outside
        self._sum = torch.empty_like(self.theta)
        self.unchanged = Fingerprint(model, self.trained)
        self._block = 1  # divisor of the number of rows of a chunk
        self.placed, self.notes = self._needs_places(), self.per_sample.notes
        if self.placed:
            at_once = physical_batch if physical_batch < batch else places.count
            self.chunk = min(at_once, places.count, self.per_sample.most)
            note = PLACED.format(places.count, round(batch), max(1.0, places.count / batch))
            self.notes = (*self.notes, note)
        capacity = self.chunk
        if not self.placed:
            capacity = rounded_up(capacity, max(LEAST_ROWS, self._block))
        kind = RecordedChunkSum if self.theta.is_cuda else ClippedChunkSum
        self.clipped_sum = kind(self.per_sample, capacity, batch)
        idle = ", ".join(self.per_sample.idle)
        if idle:
            self.notes = (*self.notes, IDLE.format(idle))
        self.unchanged.check(DURING)

    @abstractmethod
    def _read(self, drawn: Indices, part: slice | Indices, step: int) -> tuple[Any, Any]:
        """Return inputs and labels of a part of the drawn samples, in its order.

        Args:
            drawn: records or units of the step.
            part: places in ``drawn``, as a slice or as numbers.
            step: step t, for random draws.
        """

    def _check_dtype(self) -> None:
        """Raise ModelError if the network would cast its inputs, and was not tried with them."""
        inputs = self.per_sample.inputs
        if inputs.keep_dtype:
            return
        for tensor in tensors_in(inputs.template):
            if tensor.is_floating_point() and tensor.dtype != self.theta.dtype:
                raise ModelError(
                    f"The parameters are {self.theta.dtype}, but the network's input is "
                    f"{tensor.dtype}. Add this line to the network's factory, or before "
                    "make_private: network.float()"
                )

    def _needs_places(self) -> bool:
        """Choose how products are computed; return whether records need random places.

        They do unless a trial shows that rows are rounded by neither their number nor their place.
        """
        (base, _), (_, label) = map(self.per_sample.made_up, (TRIED, 1))

        def labels_of(x: Any) -> Any:
            return map_rows(lambda t: t.expand(samples_in(x), *t.shape[1:]), label)

        def run(x: Any) -> Any:
            with code_of_network(x):
                return self.per_sample.observed(x, labels_of(x))

        if not (self.per_sample.vmapped and self.chunk > 1 and self._private):
            return False
        odd = min(self.chunk - 1, LEAST_ROWS) // 2 * 2 + 1
        few = map_rows(itemgetter(slice(odd)), base)
        with without_gradients(self._parameters), code_of_network(few):
            by_rows, blocks, elements = self.per_sample.shapes_noted(few, labels_of(few))
        if self.theta.is_cuda:  # most products are rounded by the number of rows
            return True
        self._block = BLOCK if blocks else 1
        shares = shares_of(2 * self.chunk * elements)
        if shares > 1:
            self._block = lcm(LEAST_ROWS, shares * self._block)
        if shares == 1 or 2 * self._block <= self.chunk:
            for self.per_sample.by_rows in (True,) if by_rows else (False, True):
                if self._tried(run, base):
                    return False
        self.per_sample.by_rows = by_rows
        return True

    def _tried(self, run: RunNetwork, base: Any) -> bool:
        """Return whether ``run`` treats records alike; fewer at a time than fit, if any."""
        chunk = self.chunk
        while True:
            try:
                with fixed_numbers(self.theta), without_gradients(self._parameters):
                    return chunks_alike(run, base, chunk, self._block)
            except (RuntimeError, MemoryError) as failure:
                if not out_of_memory(failure) or chunk == 1:
                    raise
                chunk //= 2  # as in a step

    @property
    def trained_mask(self) -> Tensor:
        """Return which of theta's coordinates are trained, bool, shape (d,).

        Those of rows of embeddings that are padding are not.
        """
        mask = torch.ones_like(self.theta, dtype=torch.bool)
        for gap in self.skipped:
            mask[gap] = False
        return mask

    def check(self) -> None:
        """Reject a network that is no longer the one that was validated.

        Raises:
            ModelError: a module, a hook, a method or an attribute of it is another one. Values of
                parameters and buffers are not compared here.
        """
        with self.unchanged.as_validated():  # the program may have left it in evaluation mode
            self.unchanged.check()

    def of(self, drawn: Indices, step: int, metric: RegionMetric, chunk: int) -> tuple[Tensor, int]:
        """Return the sum over a batch, and the chunk size that fits into memory.

        A chunk that runs out of memory is halved. Chunk sizes depend only on public numbers,
        because the number of drawn records is private. The clipping bound is unchanged; its margin
        for rounding is larger than fewer terms need.

        Args:
            drawn: training records or units; may be empty, which gives zeros.
            step: step t, for random draws.
            metric: metric of the ellipsoid to clip to.
            chunk: samples to process at a time, of which no more than the attribute ``chunk`` are.

        Returns:
            The sum, shape (d,), in float64 if there were several chunks. Its memory may be used
            again by the next call. And the chunk size to begin the next step with.

        Raises:
            ModelError: the network changes itself.
            RunError: memory runs out with one sample.
        """
        draws = nullcontext() if self._layers is None else self._layers.of(step)
        with self.unchanged.as_validated():
            with draws:
                total_and_chunk = self._add_up(drawn, step, metric, chunk)
            self.unchanged.check(DURING)
        return total_and_chunk

    def _add_up(
        self, drawn: Indices, step: int, metric: RegionMetric, chunk: int
    ) -> tuple[Tensor, int]:
        """Return the sum and the chunk size of :meth:`of`."""
        part, total, begin, chunk = self._sum, None, 0, min(chunk, self.chunk)
        at = self._arranged(len(drawn), step, chunk)
        while begin < len(at):
            rows = _evenly(self._places.count if self.placed else len(at) - begin, chunk)
            end = begin + rows
            rows = rows if self.placed else rows_of(rows, chunk, self._block)
            try:
                self._sum_rows(drawn, at[begin:end], rows, step, metric)
            except (RuntimeError, MemoryError) as failure:
                if not out_of_memory(failure):
                    raise
                if chunk == 1:
                    raise RunError(
                        "Memory ran out with a single sample at a time. Free some memory, or use "
                        "a smaller {model} or another {device}."
                    ) from failure
                chunk //= 2
                continue
            if begin == 0 and end >= len(at):
                return part, chunk
            # Sum chunks in float64: the rounding of float32 would exceed the margin.
            if total is None:
                total = torch.zeros_like(part, dtype=torch.float64)
            for block in blocks(len(part), part.device):  # avoids a float64 copy of the whole
                total[block].add_(part[block])
            begin = end
        return part.zero_() if total is None else total, chunk

    def _arranged(self, samples: int, step: int, chunk: int) -> Indices:
        """Return the number of the sample at each place, -1 where there is none; shape (places,).

        Without random places they are in order. With them, places fill whole chunks of equal size.
        More samples than places get more chunks: that is as rare as delta allows for.
        """
        if not self.placed:
            return np.arange(samples)
        rows = _evenly(self._places.count, chunk)
        places = -(-max(self._places.count, samples) // rows) * rows
        at = np.full(places, -1)
        at[self._places.draw(step, places)[:samples]] = np.arange(samples)
        return at

    def _sum_rows(
        self, drawn: Indices, at: Indices, rows: int, step: int, metric: RegionMetric
    ) -> None:
        """Write the sum of the samples at some places, in a chunk of at least as many rows."""
        samples = at[at >= 0]
        if len(samples) == 0:
            self._sum.zero_()
            return
        counted = np.zeros(rows, bool)
        counted[: len(at)] = at >= 0
        part = samples if self.placed else slice(samples[0], samples[-1] + 1)
        inputs, labels = self._read(drawn, part, step)
        self._sum_chunk(inputs, labels, metric, counted)

    def _sum_chunk(
        self, inputs: Any, labels: Any, metric: RegionMetric, counted: NDArray[np.bool_]
    ) -> None:
        """Write the sum of a chunk whose samples are in the rows that count, in their order."""
        inputs, labels = spread(inputs, counted), spread(labels, counted)
        counts = torch.from_numpy(counted).to(self.theta.device, non_blocking=True)
        with without_gradients(self._parameters):
            self.clipped_sum.of(inputs, labels, metric, self._sum, counts)


class BatchSum(ChunkedSum):
    """Sum over the records of batches that a program supplies, and the sampler that they are.

    Within :meth:`given`, it sums over that batch; outside, there are no records to sum over.

    Args:
        objective: a network that returns its own losses.
        inputs: structure of a sample.
        layers: random draws of its layers.
        places: random places of records.
        physical_batch: samples to process at a time.
        batch: expected number B of records in a step.
        weigh: weights of records; None for those of the loss, if any.

    Attributes:
        structure: structure of a sample.
    """

    def __init__(
        self,
        objective: nn.Module,
        inputs: Structure,
        layers: LayerDraws,
        places: RandomPlaces,
        physical_batch: int,
        batch: float,
        weigh: Weigh | None = None,
    ) -> None:
        super().__init__(
            objective,
            inputs,
            Structure(NOTHING),
            layers,
            places,
            loss=returned,
            physical_batch=physical_batch,
            batch=batch,
            weigh=weigh,
        )
        self.structure, self._most = inputs, most_samples(batch)

    @contextmanager
    def given(self, records: Indices, batch: Any) -> Iterator[None]:
        """Sum over a batch within a context. The batch is let go at its end.

        Args:
            records: number of each record, shape (records,), by which its random numbers are drawn.
            batch: the batch, which has one row for each of its records, in their order.

        Raises:
            InputError: the batch is too large for the margin for rounding.
        """
        if len(records) > self._most:
            raise InputError(TOO_MANY)
        self._records, self._batch = records, batch
        try:
            yield
        finally:
            del self._records, self._batch  # they are private

    def draw(self, step: int) -> Indices:
        """Return the records of the batch, whatever the step: the batch is its own sampler.

        Args:
            step: not used.
        """
        del step
        return self._records

    def _read(self, drawn: Indices, part: slice | Indices, step: int) -> tuple[Any, Any]:
        return map_rows(itemgetter(part), self._batch), NOTHING


def first_chunk(physical_batch: int, batch: float) -> int:
    """Return the number of samples to process at a time, enough for a whole step if B fit.

    A draw of more than B samples then needs no second pass over the model and d coordinates. The
    limit is six standard deviations of a Poisson draw above B, which is never exceeded in practice.
    It is not larger where more would fit, because chunks may have to be filled.

    Args:
        physical_batch: largest number of samples that is asked for.
        batch: expected number B of samples in a step.

    >>> first_chunk(256, 1000), first_chunk(1000, 100)
    (256, 160)
    """
    return physical_batch if physical_batch < batch else ceil(batch + 6 * sqrt(batch))


def _evenly(samples: int, chunk: int) -> int:
    """Return the next chunk size if samples are split evenly into the fewest chunks."""
    chunks = max(1, ceil(samples / chunk))
    return ceil(samples / chunks)
