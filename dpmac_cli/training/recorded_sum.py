"""The clipped sum of a chunk as a CUDA graph: recorded once, then replayed without Python.

A step of a small network starts hundreds of kernels, and a GPU waits for the CPU between them. A
replay starts them at once. Noise and the optimizer's rule are not part of it.
"""

import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpmac_cli.dp.clipping.batches import Batch, samples_in, tensors_in
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.eager_mode import EagerMode
from dpmac_cli.dp.clipping.norms import Mask, RegionMetric
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.torch_errors import out_of_memory, type_and_place
from dpmac_cli.randomness.layers import forked

#: Times that a chunk is computed before it is recorded: libraries allocate their workspaces then.
BEFORE = 2

#: Warning where a chunk is not recorded, and the reasons.
NOT_RECORDED = (
    "Steps are not recorded as a CUDA graph, because {}. So the processor starts their kernels one "
    "by one, and with a small network the GPU waits for it."
)
LOOPED = "the network runs on one record after the other"
FAILED = "recording failed ({}), as it does if the network reads the values of a tensor"
DRAWN = "the network draws random numbers, which a replay would repeat"
OTHERWISE = "a replay is rounded differently"

#: Runs a function while it records what is computed; returns its result, and what computes it again
#: from what then lies in the same memory.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


def cuda_graph(function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Record a function as a CUDA graph.

    Args:
        function: computes a tensor from others, whose memory stays where it is.

    Returns:
        The tensor, and what computes it again from what then lies in the same memory.

    Raises:
        RuntimeError: the function reads a value of a tensor, which a graph cannot; or memory ran
            out.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph.replay


@dataclass(frozen=True)
class _Recording:
    """A recorded chunk, and the memory that it reads and writes."""

    inputs: list[Tensor]  # rows, labels, which rows count, and the region
    read: list[Tensor]  # what else it reads: once freed, its memory would hold other records
    doubtful: Tensor  # whether float64 is needed, bool, ()
    replay: Callable[[], None]


class RecordedChunkSum(ClippedChunkSum):
    """A clipped sum of chunks that is recorded once for each of their shapes.

    It is recorded with made-up rows. Where that is not possible, chunks are computed as by
    :class:`.ClippedChunkSum`, and a warning says why. The sum has the same bits in both ways.

    Args:
        per_sample, capacity, batch: see :class:`.ClippedChunkSum`.
        record: how to record; by default a CUDA graph.

    Attributes:
        recordings: by the shapes of chunks: a recording, or the reason why there is none.
    """

    def __init__(
        self,
        per_sample: PerSample,
        capacity: int,
        batch: float,
        record: Record = cuda_graph,
    ) -> None:
        super().__init__(per_sample, capacity, batch)
        self._record = record
        self.recordings: dict[Any, _Recording | str] = {}

    def of(
        self, x: Batch, y: Batch, metric: RegionMetric, out: Tensor, counted: Tensor | None = None
    ) -> None:
        """Write the sum of a chunk: see :class:`.ClippedChunkSum`.

        The first call with a shape records it, on the device, and may warn.

        Args:
            x, y: inputs and labels of the chunk, one row per sample.
            metric: metric of the ellipsoid to clip to.
            out: the sum is written to it, shape (d,). It is the same tensor in every call.
            counted: which rows count, bool, shape (rows,); None for all.
        """
        shape = metric.region.is_ball, *((t.shape, t.dtype) for t in tensors_in((x, y)))
        if shape not in self.recordings:
            recording = self._recorded(samples_in(x), metric.region, out)
            self.recordings[shape] = recording
            if isinstance(recording, str):
                warnings.warn(NOT_RECORDED.format(recording), stacklevel=2)
        recording = self.recordings[shape]
        if isinstance(recording, _Recording):
            counted = self.all_of(x, out) if counted is None else counted
            inputs = _inputs(x, y, counted, metric.region)
            for recorded, new in zip(recording.inputs, inputs, strict=True):
                recorded.copy_(new, non_blocking=True)
            recording.replay()
        if isinstance(recording, str) or bool(recording.doubtful):
            super().of(x, y, metric, out, counted)

    def _mask(self, valid: Tensor) -> Mask:
        return valid  # to ask whether all are would wait for the device

    def _recorded(self, rows: int, like: Ellipsoid, out: Tensor) -> _Recording | str:
        """Record a chunk of made-up rows.

        Args:
            rows: number of rows of the chunk.
            like: region of the same shape as those of steps.
            out: the sum is written to it, shape (d,).

        Returns:
            The recording, or why there is none: for example, its replay gives other bits.
        """
        if not self._per_sample.vmapped:
            return LOOPED
        x, y = self._per_sample.made_up(rows)
        counted = self.all_of(x, out)
        counted[-1] = False
        region = Ellipsoid(like.centre.clone(), like.inverse.clone(), like.factor.clone())

        def sum_up() -> Tensor:
            gradients, weights = self.gradients(x, y, ball=region.is_ball)
            return self.sum_up(gradients, weights, RegionMetric(region), counted, out)

        cut = self.cut.clone()  # made-up rows do not count
        with forked():
            before, reads = _generators(out), _Reads()
            for number in range(BEFORE):
                with reads if number == 0 else nullcontext():
                    doubtful = sum_up()
            computed = out.clone()
            try:
                recorded, replay = self._record(sum_up)
            except RuntimeError as failure:
                if out_of_memory(failure):
                    self.recordings.clear()  # they keep the memory of their chunks
                    raise
                return FAILED.format(type_and_place(failure))
            out.zero_()
            replay()
            self.cut.copy_(cut)
            if _generators(out) != before:
                return DRAWN
        if not (out.equal(computed) and recorded.equal(doubtful)):
            return OTHERWISE
        return _Recording(_inputs(x, y, counted, region), reads.tensors, recorded, replay)


class _Reads(EagerMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Finds the tensors that are read and were there before, such as those of a closure.

    Attributes:
        tensors: these tensors, each memory once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors, self._computed = list[Tensor](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if tensor.data_ptr() and _memory(tensor) not in self._computed:
                self.tensors.append(tensor)
                self._computed.add(_memory(tensor))
        result = func(*args, **(kwargs or {}))
        self._computed |= set(map(_memory, tensors_in(result)))
        return result


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _inputs(x: Batch, y: Batch, counted: Tensor, region: Ellipsoid) -> list[Tensor]:
    """Return all tensors that differ from step to step, in the order of a recording."""
    return [*tensors_in((x, y)), counted, region.centre, region.inverse, region.factor]


def _generators(out: Tensor) -> tuple[bytes, ...]:
    """Return the states of the generators that a network may draw from."""
    state = torch.cuda.get_rng_state(out.device) if out.is_cuda else torch.get_rng_state()
    numpy: Any = np.random.get_state()
    return (
        state.numpy().tobytes(),
        numpy[1].tobytes(),
        repr((numpy[2:], random.getstate())).encode(),
    )
