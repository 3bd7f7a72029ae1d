"""Clipped sums of a network's gradients on a program's own batches, usable alone."""

import secrets
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch, Structure, check_rows, samples_in
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.losses import returned
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.errors import InputError, ModelError, raise_errors
from dpmac_cli.models.fingerprint import DURING
from dpmac_cli.models.trial import BatchLoss, Objective
from dpmac_cli.models.validation import validate_objective
from dpmac_cli.randomness.keystream import KEY_BYTES
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.training.chunks import BatchSum, Running


class ClippedSum:
    """Sum of the clipped per-record gradients of a network, without noise.

        clipped = ClippedSum(model, loss, ball(1.0), batch_size=256)
        total = clipped(batch)  # (d,): private until noise is added

    Adding or removing a record moves the sum by at most 1 in the norm ||(.)/b|| of the region: by
    at most C for a ball of radius C. Rounding is included. Each record's gradient g_i adds
    c_i (g_i - m), where c_i <= 1 is the largest factor with which it is in the region.

    The network and the loss are validated on the first batch, and compared with what was validated
    before each further one. Parameters become views of :attr:`theta`. Nothing is accounted for:
    see :class:`~dpmac_cli.PrivateStep` for a complete step.

    Args:
        model, loss: see :class:`~dpmac_cli.PrivateStep`.
        region: region to clip to, such as :func:`~dpmac_cli.ball`; a program may replace it.
        batch_size: expected number of records in a batch, which must not depend on the records.
        physical_batch: records to process at a time.
        isolate: train a network or loss that computes something else for a batch than for each
            record alone.

    Raises:
        InputError: a number of records is below 1.
        ModelError: the network or the loss cannot be clipped.
    """

    #: Bound on the change of the sum, in the norm of the region, by one record.
    sensitivity = 1.0

    def __init__(
        self,
        model: nn.Module,
        loss: BatchLoss,
        region: Ellipsoid,
        *,
        batch_size: int,
        physical_batch: int = 256,
        isolate: bool = False,
    ) -> None:
        counts = {"batch_size": batch_size, "physical_batch": physical_batch}
        raise_errors(
            f"{name} must be at least 1, not {value!r}."
            for name, value in counts.items()
            if not value >= 1
        )
        self._objective = Objective(model, loss)
        self.region, self.notes = region, tuple[str, ...]()
        self._batch, self._physical, self._isolate = batch_size, physical_batch, isolate
        self._layers = LayerDraws(secrets.token_bytes(KEY_BYTES))
        self._sums: BatchSum | None = None
        self._structure: Structure | None = None
        self._calls, self._chunk = 0, 0

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return the sum over the records of a batch, shape (d,), float64 for several chunks.

        Raises:
            InputError: the batch is not tensors with one row per record, has other parts, shapes or
                types than the one that was validated, or many times more records than
                ``batch_size``; or the region does not fit the parameters.
            ModelError: the network is no longer the one that was validated.
        """
        check_rows(batch, self._structure)
        sums = self._sums or self.prepare(batch)
        _check_region(self.region, sums.theta)
        self._objective.train()
        sums.unchanged.check()
        sums.batch, self._calls = batch, self._calls + 1
        metric = RegionMetric(self.region)
        with full_float32(sums.arithmetic), self._layers.of(self._calls):
            records = np.arange(samples_in(batch))
            total, self._chunk = sums.of(records, self._calls, metric, self._chunk)
        sums.unchanged.check(DURING)
        return total.clone()

    @property
    def theta(self) -> Tensor:
        """Return the trained parameters as one vector, shape (d,); changing it changes the model.

        Raises ModelError before :meth:`prepare` or the first batch.
        """
        return self._ready.theta

    def by_parameter(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Return views of a vector, shape (d,), by the names of parameters, in their shapes."""
        return dict(self._parts(vector))

    def prepare(self, example: Batch) -> BatchSum:
        """Validate the network on the structure of a batch, whose values are not used."""
        check_rows(example, None)
        structure = Structure.of(example)
        validate_objective(self._objective, structure, isolated=self._isolate)
        how = Running(
            loss=returned,
            physical_batch=self._physical,
            batch=self._batch,
        )
        with full_float32():
            self._sums = BatchSum(self._objective, structure, how, self._layers)
        self._structure = structure
        self._chunk, self.notes = self._sums.chunk, self._sums.notes
        return self._sums

    @property
    def _ready(self) -> BatchSum:
        if self._sums is None:
            raise ModelError("The network is validated on the first batch: call prepare(batch).")
        return self._sums

    def _parts(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        named = self._objective.named_parameters()
        names = {id(p): name.removeprefix("network.") for name, p in named}
        for layer in self._ready.clipped_sum.layers:
            for key, slot in layer.slices.items():
                p = layer.parameters[key]
                yield names[id(p)], vector[layer.start : layer.stop][slot].view(p.shape)


def _check_region(region: Ellipsoid, theta: Tensor) -> None:
    """Raise InputError if a region is not one of the parameters, shape (d,)."""
    shapes = {tuple(region.centre.shape), tuple(region.inverse.shape)}
    if shapes not in ({()}, {tuple(theta.shape)}):
        raise InputError(
            f"The region has the shapes {sorted(shapes)}, but the network has {theta.numel():,} "
            "trained parameters. Use ball(radius), or ellipsoid(centre, scale) with a number for "
            "each of them, such as torch.ones_like(clipped.theta)."
        )
