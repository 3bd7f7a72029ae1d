"""Clipped sum of a batch, in chunks that fit into memory."""

from math import ceil, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.data.augmentation import views_of
from dpmac_cli.data.dataset import Data
from dpmac_cli.dp.clipping.batch_invariance import (
    PERIOD,
    Manner,
    Whole,
    fill_rows,
    find_manner,
    without_zeros,
)
from dpmac_cli.dp.clipping.clipped_sum import ClippedSum
from dpmac_cli.dp.clipping.isolation import Isolated
from dpmac_cli.dp.clipping.layers import (
    blocks,
    find_layers,
    flatten_parameters,
    split_by_module,
    without_gradients,
)
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.errors import ModelError, RunError
from dpmac_cli.models.unchanged import DURING, Unchanged
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.sampling import Batch
from dpmac_cli.torch_errors import code_of_network, out_of_memory
from dpmac_cli.training.schedules import StepPlan

#: Note for a network whose records depend on others under vmap.
IN_A_LOOP = (
    "On this machine, results for a record would be rounded by the other records of a batch. To "
    "avoid that, the network is run on one record after the other. This is slower."
)


class ChunkedSum:
    """Sum of the clipped, centred gradients of a batch, computed chunk by chunk.

    Takes the model, the data on its device, the plan, B, and the random draws for the records of
    units and for augmented views. Raises ModelError if layers cannot be clipped.

    Attributes:
        theta: the model's parameters, moved into one vector, shape (d,).
        chunk: initial number of samples per chunk: the physical batch, or fewer.
        clipped_sum: clipped sum of one chunk.
        manner: how the network is run, so that no row depends on the others.
        trained: ids of the parameters that are trained.
        unchanged: the network as it was validated, before the trial of how rows are rounded.
    """

    def __init__(
        self, model: nn.Module, data: Data, plan: StepPlan, batch: float, layers: LayerDraws | None
    ) -> None:
        self._data, self._recipe, self._layers = data, plan.recipe, layers
        self._private = plan.private
        inputs, isolated, kind = plan.recipe.inputs, None, plan.recipe.loss
        loss = plan.loss or build_loss(kind.name, kind.smoothing, kind.weights, data.gain.device)
        self.chunk = first_chunk(plan.physical_batch, batch)
        shape = tuple(data.train.images.shape[1:])
        if plan.isolated:
            found = split_by_module(model)
            given = shape if inputs == 1 else (inputs, *shape)
            label = data.train.labels.new_zeros(data.train.labels.shape[1:])
            isolated = Isolated(model, found, given, inputs, loss, label)
            self.chunk = min(self.chunk, isolated.most)
        else:
            found = find_layers(model, data.gain.new_zeros(2, *shape))
        self._isolated = isolated
        self._parameters = [p for layer in found for p in layer.parameters.values()]
        self.trained = set(map(id, self._parameters))
        self.theta = flatten_parameters(found)
        if plan.isolated and self.theta.dtype != data.gain.dtype:
            raise ModelError(
                f"The parameters are {self.theta.dtype}, but a network that runs on each sample "
                f"alone needs the dtype of its input, {data.gain.dtype}. Add this line to the "
                "network's factory, or before make_private: network.float()"
            )
        for p in self._parameters:
            p.requires_grad_(True)
        run = None if isolated is None else Whole(isolated)
        self._network = model if run is None else run
        most = Manner(full=True).least(self.chunk)
        self.clipped_sum = ClippedSum(model, found, most, inputs, batch, run, loss)
        self._sum = torch.empty_like(self.theta)
        model.train()  # as validated
        self.unchanged = Unchanged(model, self.trained, plan.loss)
        self.manner, self.notes = self._manner(isolated)
        self.unchanged.check(DURING)

    def _manner(self, isolated: Isolated | None) -> tuple[Manner, tuple[str, ...]]:
        """Return a way to run the network in which no record depends on others, and notes.

        Raises ModelError if there is none.
        """
        data, inputs = self._data, self._recipe.inputs
        several = (inputs,) if inputs > 1 else ()
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(PERIOD, *several, *data.train.images.shape[1:], generator=generator)
        base = base.to(data.gain)
        label = data.train.labels.new_zeros((*several, *data.train.labels.shape[1:]))

        def run(x: Tensor) -> Any:
            with code_of_network(x):
                return self.clipped_sum.forward(x, label.expand(len(x), *label.shape))

        one_by_one = isolated is not None and not isolated.vmapped
        if one_by_one or self.chunk == 1 or not self._private:
            return Manner(), ()
        chunk, manner = self.chunk, None
        while manner is None:
            try:
                with without_zeros(self.theta), without_gradients(self._parameters):
                    manner = find_manner(self._network, run, base, chunk)
            except (RuntimeError, MemoryError) as failure:
                if not out_of_memory(failure) or chunk == 1:
                    raise
                chunk //= 2  # as in a step
        if isinstance(manner, Manner):
            return manner, () if manner.note is None else (manner.note,)
        if isolated is not None:
            self.chunk = min(self.chunk, isolated.run_in_a_loop())
            return Manner(), (IN_A_LOOP,)
        named = ", ".join(name or "the network itself" for name in manner)
        raise ModelError(
            f"On this machine, the results of {named} for a record are rounded by the number of "
            "records computed with it or by its place among them, whatever threads and libraries "
            "are used. One record could then move others across a kink, such as that of ReLU, "
            "which the noise does not cover. Use another --device, or add --isolate to run the "
            "network on each record separately."
        )

    def of(self, drawn: Batch, step: int, metric: Metric, chunk: int) -> tuple[Tensor, int]:
        """Return the sum over a batch, shape (d,), and the chunk size that fits into memory.

        A chunk that runs out of memory is halved. Chunk sizes depend only on public numbers,
        because the number of drawn records is private. The clipping bound is unchanged; its margin
        for rounding is larger than fewer terms need.

        Args:
            drawn: training records or units; may be empty.
            step: step t, for the random draws of units and augmented views.
            metric: metric of the ellipsoid to clip to.
            chunk: samples to process at a time. Raises RunError if memory runs out with one.
        """
        part, total, begin = self._sum, None, 0
        while begin < len(drawn):
            end = begin + _evenly(len(drawn) - begin, chunk)
            ahead = drawn[end : end + _evenly(len(drawn) - end, chunk)]
            try:
                self._sum_chunk(drawn[begin:end], ahead, step, metric, self.manner.least(chunk))
            except (RuntimeError, MemoryError) as failure:
                if not out_of_memory(failure):
                    raise
                if chunk == 1:
                    raise RunError(
                        "Memory ran out with a single sample at a time. Free some memory, or use "
                        "a smaller --model or another --device."
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

    def _sum_chunk(self, drawn: Batch, ahead: Batch, step: int, metric: Metric, least: int) -> None:
        """Write the sum of a chunk, filled to ``least`` rows; read the next chunk's records."""
        recipe, rows = self._recipe, self._rows(drawn, step)
        images, labels = self._data.train.at(rows)
        if len(ahead):
            self._data.train.read_ahead(self._rows(ahead, step))
        if recipe.augmented:
            words = self._words(drawn, step, recipe.inputs).reshape(len(rows), -1)
            images = views_of(images, words, recipe.augment)
            labels = labels.repeat_interleave(recipe.views, 0)
        inputs = self._data.standardised(images)
        if recipe.inputs > 1:
            inputs, labels = (t.view(len(drawn), -1, *t.shape[1:]) for t in (inputs, labels))
        inputs, labels = fill_rows(inputs, least), fill_rows(labels, least)
        if self._isolated is not None and self._layers is not None:
            filling = drawn[:1].repeat(len(inputs) - len(drawn))
            self._isolated.seeds = self._layers.seeds(step, np.append(drawn, filling))
        with self.manner.of(self._network), without_gradients(self._parameters):
            self.clipped_sum.of(inputs, labels, metric, self._sum, len(drawn))

    def _rows(self, drawn: Batch, step: int) -> Batch:
        """Return the records of the drawn units, shape (units * K,)."""
        units = self._data.train.units
        if units is None:
            return drawn
        recipe = self._recipe
        *_, words = self._words(drawn, step, recipe.inputs + 1).T  # the others are for augmentation
        return units.records(drawn, words, recipe.records).reshape(-1)

    def _words(self, drawn: Batch, step: int, count: int) -> NDArray[np.uint64]:
        assert self._layers is not None, "views and records of units are drawn"  # noqa: S101
        return self._layers.words(step, drawn, count)


def first_chunk(physical_batch: int, batch: float) -> int:
    """Return the number of samples to process at a time, enough for a whole step if B fit.

    A draw of more than B samples then needs no second pass over the model and d coordinates. The
    limit is six standard deviations of a Poisson draw above B, which is never exceeded in practice.
    """
    if physical_batch < batch:
        return physical_batch
    return max(physical_batch, ceil(batch + 6 * sqrt(batch)))


def _evenly(left: int, chunk: int) -> int:
    """Return the next chunk size if ``left`` records are split evenly into the fewest chunks."""
    return -(-left // max(1, -(-left // chunk)))
