"""Clipped sum of a batch, in chunks of as many samples as fit into memory."""

from math import ceil, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli.data.augmentation import views_of
from dpmac_cli.data.dataset import Data
from dpmac_cli.dp.clipping.clipped_sum import ClippedSum
from dpmac_cli.dp.clipping.isolation import Isolated
from dpmac_cli.dp.clipping.layers import blocks, find_layers, flatten_parameters, split_by_module
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.losses import build_loss
from dpmac_cli.errors import ModelError, RunError
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.sampling import Batch
from dpmac_cli.torch_errors import out_of_memory
from dpmac_cli.training.schedules import Plan


class ChunkedSum:
    """Sums the clipped, centred gradients of a batch, chunk by chunk.

    Takes the model, the data on its device, the plan, B, and the random draws of a unit's records
    and of augmented views. Raises ModelError if layers cannot be clipped.

    Attributes:
        theta: the parameters of the model, moved into one vector, shape (d,).
        chunk: samples to begin with: the physical batch, or fewer.
        clipped_sum: of one chunk.
        trained: ids of the parameters that are trained.
    """

    def __init__(
        self, model: nn.Module, data: Data, plan: Plan, batch: float, layers: LayerDraws | None
    ) -> None:
        self._data, self._recipe, self._layers = data, plan.recipe, layers
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
        self.trained = {id(p) for layer in found for p in layer.parameters.values()}
        self.theta = flatten_parameters(found)
        if plan.isolated and self.theta.dtype != data.gain.dtype:
            raise ModelError(
                f"The parameters are {self.theta.dtype}, and a network that runs on each sample "
                f"alone has those of its input, {data.gain.dtype}. Add this line to the "
                "network's factory, or before make_private: network.float()"
            )
        self.clipped_sum = ClippedSum(model, found, self.chunk, inputs, batch, isolated, loss)
        self._sum = torch.empty_like(self.theta)

    def of(self, drawn: Batch, step: int, metric: Metric, chunk: int) -> tuple[Tensor, int]:
        """Return the sum over a batch, shape (d,), and the chunk size that fitted into memory.

        A chunk that runs out of memory is halved. Chunk sizes follow from public numbers alone:
        how many records were drawn is private. The clipping bound stays as it is, with more room
        for rounding than fewer terms need.

        Args:
            drawn: records of the training set, or units; may be empty.
            step: t, for what is drawn of each unit, and augmented views.
            metric: of the ellipsoid to clip to.
            chunk: samples to work on at a time. Raises RunError if memory runs out with one.
        """
        part, total, begin = self._sum, None, 0
        while begin < len(drawn):
            end = begin + _evenly(len(drawn) - begin, chunk)
            ahead = drawn[end : end + _evenly(len(drawn) - end, chunk)]
            try:
                self._sum_chunk(drawn[begin:end], ahead, step, metric)
            except (RuntimeError, MemoryError) as failure:
                if not out_of_memory(failure):
                    raise
                if chunk == 1:
                    raise RunError(
                        "Memory ran out with a single sample at a time. Free some, or choose a "
                        "smaller --model or another --device."
                    ) from failure
                chunk //= 2
                continue
            if begin == 0 and end >= len(drawn):
                return part, chunk
            # Chunks are added up in float64: float32 would round by more than the margin.
            if total is None:
                total = torch.zeros_like(part, dtype=torch.float64)
            for block in blocks(len(part), part.device):  # else torch makes a float64 copy of it
                total[block].add_(part[block])
            begin = end
        return part.zero_() if total is None else total, chunk

    def _sum_chunk(self, drawn: Batch, ahead: Batch, step: int, metric: Metric) -> None:
        """Write a chunk's sum, while the records of the next chunk, ``ahead``, are read."""
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
        self.clipped_sum.of(inputs, labels, metric, self._sum)

    def _rows(self, drawn: Batch, step: int) -> Batch:
        """Return the records of the units that were drawn, shape (units * K,)."""
        units = self._data.units
        if units is None:
            return drawn
        recipe = self._recipe
        *_, words = self._words(drawn, step, recipe.inputs + 1).T  # others are for augmentation
        return units.records(drawn, words, recipe.records).reshape(-1)

    def _words(self, drawn: Batch, step: int, count: int) -> NDArray[np.uint64]:
        assert self._layers is not None, "views and records of units are drawn"  # noqa: S101
        return self._layers.words(step, drawn, count)


def first_chunk(physical_batch: int, batch: float) -> int:
    """Return the samples to work on at a time: with room for a whole step if B of them fit.

    A draw of more than B is then no reason for a second pass over the model and over d coordinates.
    Six standard deviations of a Poisson draw above B are never drawn in practice.
    """
    if physical_batch < batch:
        return physical_batch
    return max(physical_batch, ceil(batch + 6 * sqrt(batch)))


def _evenly(left: int, chunk: int) -> int:
    """Return the size of the next of the fewest chunks for ``left`` records, of even sizes."""
    return -(-left // max(1, -(-left // chunk)))
