"""Clipped sum of a batch, in chunks that fit into memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import ceil, sqrt
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.config.class_weights import class_weights
from dpmac_cli.config.defaults import physical_batch
from dpmac_cli.config.plan import Plan
from dpmac_cli.dp.clipping.batch_invariance import (
    LEAST_ROWS,
    TRIED,
    RowFilling,
    RunNetwork,
    fill_rows,
    find_filling,
    rounded_up,
    without_zeros,
)
from dpmac_cli.dp.clipping.batches import (
    NOTHING,
    PUBLIC,
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
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.losses import Loss, build_loss, build_weights, returned
from dpmac_cli.dp.precision import Arithmetic
from dpmac_cli.dp.torch_errors import code_of_network, out_of_memory
from dpmac_cli.dp.weights import Weigh
from dpmac_cli.errors import InputError, ModelError, RunError
from dpmac_cli.models.dataset import Data
from dpmac_cli.models.fingerprint import DURING, Fingerprint
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.sampling import Indices
from dpmac_cli.training.augmentation import views_of
from dpmac_cli.training.recorded_sum import RecordedChunkSum

#: Reason for running a network whose records round others in a loop.
ROUNDED = "on this machine, results for a record would be rounded by the others of a batch."
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

    Args:
        model: the network.
        inputs, labels: structure of a sample's inputs and labels, with all views.
        layers: random draws of layers, augmented views and the records of units.
        loss: loss per sample.
        views: number of inputs per sample, whose mean loss counts.
        physical_batch: samples to process at a time. batch: expected number B in a step.
        private: whether rows must not round others.
        rowwise: whether loss and weights are built in.
        weigh: weights of rows, :mod:`dpmac_cli.dp.weights`; by default those of the loss, if any.

    Raises:
        ModelError: layers cannot be clipped.

    Attributes:
        model: the network, which each step runs in the modes in which it was validated.
        theta: the model's parameters, moved into one vector, shape (d,).
        skipped: slices of theta that are never trained: rows of embeddings that are padding.
        size: number of parameters that are trained.
        chunk: initial number of samples per chunk: the physical batch, or fewer.
        clipped_sum: clipped sum of one chunk.
        per_sample: the network on each sample alone.
        filling: how the network is run, so that no row depends on the others.
        trained: ids of the parameters that are trained.
        unchanged: the network as it was validated, before the trial of how rows are rounded.
        arithmetic: settings of torch in this trial, with which steps must compute.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Structure,
        labels: Structure,
        layers: LayerDraws | None,
        *,
        loss: Loss,
        physical_batch: int,
        batch: float,
        views: int = 1,
        private: bool = True,
        rowwise: bool = False,
        weigh: Weigh | None = None,
    ) -> None:
        self._layers, self._private = layers, private
        self.arithmetic, self.model = Arithmetic.now(), model
        self.per_sample = PerSample(
            model, inputs, labels, views, loss, rowwise=rowwise, weigh=weigh
        )
        self.chunk = min(first_chunk(physical_batch, batch), self.per_sample.most)
        found = self.per_sample.layers
        self._parameters = [p for layer in found for p in layer.parameters.values()]
        self.trained = set(map(id, self._parameters))
        self.theta, self.skipped = flatten_parameters(found), skipped_by(found)
        self.size = sum(layer.size for layer in found)
        self._check_dtype()
        for p in self._parameters:
            p.requires_grad_(True)
            p.grad = None  # of training outside
        capacity = rounded_up(self.chunk)
        self.clipped_sum = (
            RecordedChunkSum(self.per_sample, capacity, batch)
            if self.theta.is_cuda
            else ClippedChunkSum(self.per_sample, capacity, batch)
        )
        self._sum = torch.empty_like(self.theta)
        self.unchanged = Fingerprint(model, self.trained)
        self.filling, self.notes = self._row_filling()
        if idle := ", ".join(self.per_sample.idle):
            self.notes = (*self.notes, IDLE.format(idle))
        self.unchanged.check(DURING)

    @abstractmethod
    def _read(self, drawn: Indices, part: slice, step: int) -> tuple[Any, Any]:
        """Return inputs and labels of a part of the drawn samples."""

    def _check_dtype(self) -> None:
        """Raise ModelError if the network would cast its inputs, and was not tried with them."""
        inputs = self.per_sample.inputs
        for given in () if inputs.own else tensors_in(inputs.template):
            if given.is_floating_point() and given.dtype != self.theta.dtype:
                raise ModelError(
                    f"The parameters are {self.theta.dtype}, but the network's input is "
                    f"{given.dtype}. Add this line to the network's factory, or before "
                    "make_private: network.float()"
                )

    def _row_filling(self) -> tuple[RowFilling, tuple[str, ...]]:
        """Return a way to run the network in which no record depends on others, and notes."""
        (base, _), (_, label) = map(self.per_sample.made_up, (TRIED, 1))

        def labels_of(x: Any) -> Any:
            return map_rows(lambda t: t.expand(samples_in(x), *t.shape[1:]), label)

        def run(x: Any) -> Any:
            with code_of_network(x):
                return self.per_sample.observed(x, labels_of(x))

        if not (self.per_sample.vmapped and self.chunk > 1 and self._private):
            return RowFilling(), self.per_sample.notes
        few = map_rows(itemgetter(slice(min(self.chunk, LEAST_ROWS))), base)
        with without_gradients(self._parameters), code_of_network(few):
            self.per_sample.choose_products(few, labels_of(few))
        filling = self._tried(run, base)
        if filling is None:
            self.per_sample.multiply_each_record_alone()
            self.chunk = min(self.chunk, self.per_sample.most)
            with suppress(ModelError):  # raised where the network reads the value of a weight
                filling = self._tried(run, base)
        if filling is None:
            self.per_sample.run_in_a_loop(ROUNDED)
            self.chunk = min(self.chunk, self.per_sample.most)
            filling = RowFilling()
        return filling, (*self.per_sample.notes, *filter(None, [filling.note]))

    def _tried(self, run: RunNetwork, base: Any) -> RowFilling | None:
        """Return a way in which ``run`` treats records alike; fewer at a time than fit, if any."""
        chunk = self.chunk
        while True:
            try:
                with without_zeros(self.theta), without_gradients(self._parameters):
                    return find_filling(run, base, chunk)
            except (RuntimeError, MemoryError) as failure:
                if not out_of_memory(failure) or chunk == 1:
                    raise
                chunk //= 2  # as in a step

    @property
    def trained_mask(self) -> Tensor:
        """Return which of theta's coordinates are trained, bool, shape (d,)."""
        mask = torch.ones_like(self.theta, dtype=torch.bool)
        for gap in self.skipped:
            mask[gap] = False
        return mask

    def check(self) -> None:
        """Raise ModelError if the network is no longer the one that was validated."""
        with self.unchanged.as_validated():  # the program may have left it in evaluation mode
            self.unchanged.check()

    def of(self, drawn: Indices, step: int, metric: RegionMetric, chunk: int) -> tuple[Tensor, int]:
        """Return the sum over a batch, shape (d,), and the chunk size that fits into memory.

        A chunk that runs out of memory is halved. Chunk sizes depend only on public numbers,
        because the number of drawn records is private. The clipping bound is unchanged; its margin
        for rounding is larger than fewer terms need.

        Args:
            drawn: training records or units; may be empty.
            step: step t, for random draws.
            metric: metric of the ellipsoid to clip to.
            chunk: samples to process at a time.

        Raises ModelError if the network changes itself, and RunError if memory runs out with one
        sample.
        """
        draws = nullcontext() if self._layers is None else self._layers.of(step)
        with self.unchanged.as_validated():
            with draws:
                found = self._add_up(drawn, step, metric, chunk)
            self.unchanged.check(DURING)
        return found

    def _add_up(
        self, drawn: Indices, step: int, metric: RegionMetric, chunk: int
    ) -> tuple[Tensor, int]:
        part, total, begin, chunk = self._sum, None, 0, min(chunk, self.chunk)
        while begin < len(drawn):
            end = begin + _evenly(len(drawn) - begin, chunk)
            try:
                inputs, labels = self._read(drawn, slice(begin, end), step)
                rows = self.filling.rows(end - begin, chunk)
                self._sum_chunk(drawn[begin:end], inputs, labels, step, metric, rows)
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
            if begin == 0 and end >= len(drawn):
                return part, chunk
            # Sum chunks in float64: the rounding of float32 would exceed the margin.
            if total is None:
                total = torch.zeros_like(part, dtype=torch.float64)
            for block in blocks(len(part), part.device):  # avoids a float64 copy of the whole
                total[block].add_(part[block])
            begin = end
        return part.zero_() if total is None else total, chunk

    def _sum_chunk(
        self, drawn: Indices, inputs: Any, labels: Any, step: int, metric: RegionMetric, rows: int
    ) -> None:
        """Write the sum of a chunk, filled to ``rows`` rows."""
        inputs, labels = fill_rows(inputs, rows), fill_rows(labels, rows)
        with without_gradients(self._parameters):
            self.clipped_sum.of(inputs, labels, metric, self._sum, len(drawn))


class BatchSum(ChunkedSum):
    """Sum over the records of batches that a program supplies, and the sampler that they are.

    Takes a network that returns its own losses, the structure of a sample, the random draws of its
    layers, samples to process at a time, B, and weights of records.
    """

    def __init__(
        self,
        objective: nn.Module,
        inputs: Structure,
        layers: LayerDraws,
        physical_batch: int,
        batch: float,
        weigh: Weigh | None = None,
    ) -> None:
        super().__init__(
            objective,
            inputs,
            Structure(NOTHING),
            layers,
            loss=returned,
            physical_batch=physical_batch,
            batch=batch,
            weigh=weigh,
        )
        self._most = most_samples(batch)

    @contextmanager
    def given(self, records: Indices, batch: Any) -> Iterator[None]:
        """Sum over a batch, which has one row for each of its records, in their order.

        Raises InputError for a batch that is too large for the margin for rounding.
        """
        if len(records) > self._most:
            raise InputError(TOO_MANY)
        self._records, self._batch = records, batch
        try:
            yield
        finally:
            del self._records, self._batch  # they are private

    def draw(self, step: int) -> Indices:
        """Return the records of the batch, whatever the step."""
        del step
        return self._records

    def _read(self, drawn: Indices, part: slice, step: int) -> tuple[Any, Any]:
        return map_rows(itemgetter(part), self._batch), NOTHING


class DataSum(ChunkedSum):
    """Sum over the training records of a dataset, or the records of its units.

    Takes the model, the data on its device, the plan, B, the random draws of layers, augmented
    views and the records of units, and a loss and weights of records instead of those of the
    settings.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        plan: Plan,
        batch: float,
        layers: LayerDraws | None,
        own: Loss | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        self.data, self._plan = data, plan
        inputs, settings, device = plan.inputs, plan.settings, data.gain.device
        loss = own or build_loss(settings.loss, settings.label_smoothing)
        built_in = None if own else build_weights(settings.loss, class_weights(settings), device)
        several = (inputs,) if inputs > 1 else ()
        images, labels = data.train.images.shape[1:], data.train.labels
        inputs_of = Structure(data.gain.new_zeros((1, *several, *images)))
        if (example := data.example) is not None:
            rows = example.to(data.gain).view(-1, *several and (1,), *images)
            inputs_of = Structure(rows.expand(-1, *several, *images), numbers=(PUBLIC,))
        super().__init__(
            model,
            inputs_of,
            Structure(labels.new_zeros((1, *several, *labels.shape[1:])), keep=True),
            layers,
            loss=loss,
            views=inputs,
            physical_batch=physical_batch(settings, plan.facts, device.type),
            batch=batch,
            private=plan.private,
            rowwise=own is None and weigh is None,
            weigh=weigh or built_in,
        )

    def _read(self, drawn: Indices, part: slice, step: int) -> tuple[Tensor, Tensor]:
        """Return the records of units, and their augmented views, standardised, with labels."""
        plan, settings, rows = self._plan, self._plan.settings, self._rows(drawn[part], step)
        images, labels = self.data.train.at(rows)
        if settings.augment is not None:
            words = self._words(drawn[part], step, plan.inputs).reshape(len(rows), -1)
            images = views_of(images, words, settings.augment)
            labels = labels.repeat_interleave(settings.augmentations or 1, 0)
        inputs, samples = self.data.standardised(images), len(drawn[part])
        if plan.inputs > 1:
            inputs, labels = (t.view(samples, -1, *t.shape[1:]) for t in (inputs, labels))
        return inputs, labels

    def _rows(self, drawn: Indices, step: int) -> Indices:
        """Return the records of the drawn units, shape (units * K,)."""
        units = self.data.train.units
        if units is None:
            return drawn
        plan = self._plan
        *_, words = self._words(drawn, step, plan.inputs + 1).T  # the others are for augmentation
        return units.records(drawn, words, plan.records_in_a_step).reshape(-1)

    def _words(self, drawn: Indices, step: int, count: int) -> NDArray[np.uint64]:
        assert self._layers is not None, "views and records of units are drawn"  # noqa: S101
        return self._layers.words(step, drawn, count)


def first_chunk(physical_batch: int, batch: float) -> int:
    """Return the number of samples to process at a time, enough for a whole step if B fit.

    A draw of more than B samples then needs no second pass over the model and d coordinates. The
    limit is six standard deviations of a Poisson draw above B, which is never exceeded in practice.
    It is not larger where more would fit, because chunks may have to be filled.
    """
    return physical_batch if physical_batch < batch else ceil(batch + 6 * sqrt(batch))


def _evenly(left: int, chunk: int) -> int:
    """Return the next chunk size if ``left`` records are split evenly into the fewest chunks."""
    return -(-left // max(1, -(-left // chunk)))
