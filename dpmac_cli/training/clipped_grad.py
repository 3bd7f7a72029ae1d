"""The first half of a private step alone: a clipped sum of a batch that knows its sensitivity."""

import secrets
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dpmac_cli.arguments import checked
from dpmac_cli.dp.clipping.batches import (
    Batch,
    Structure,
    check_rows,
    samples_in,
)
from dpmac_cli.dp.clipping.clipped_sum import most_samples
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.geometry import (
    at_places,
    part_of,
)
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.dp.weights import RecordWeights
from dpmac_cli.errors import (
    InputError,
    ModelError,
    raise_errors,
)
from dpmac_cli.models.build import without_batch_norm
from dpmac_cli.models.digest import identical
from dpmac_cli.models.trial_samples import (
    BatchLoss,
    Objective,
    Trial,
    fitted,
)
from dpmac_cli.models.validation import check_trial
from dpmac_cli.randomness.keystream import KEY_BYTES
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.sampling import RandomPlaces
from dpmac_cli.training.chunks import BatchSum

#: Message for an update of a program that gave noise to a row that is padding.
PADDING_CHANGED = (
    "The row of {} that padding_idx names was changed, which torch promises never to happen. Leave "
    "it out of your update: private.value.mul_(clipped.trained). If you set it on purpose, call "
    "clipped_grad again with the network."
)


class ClippedGrad:
    """Sum of the clipped per-record gradients of a network; :func:`clipped_grad` makes it.

    Call it with a batch. It adds no noise and counts no step.

    Attributes:
        region: region to clip to in the next call; a program may replace it.
        notes: messages about how the network is run; () before it is validated.
    """

    #: Bound on the change of the sum, in the norm of the region, by one record.
    sensitivity = 1.0

    def __init__(
        self,
        objective: Objective,
        region: Ellipsoid,
        batch_size: int,
        physical_batch: int,
        *,
        isolate: bool,
        weigh: RecordWeights | None = None,
    ) -> None:
        self._objective, self._weigh = objective, weigh
        self.region, self.notes = region, tuple[str, ...]()
        self._batch, self._physical, self._isolate = batch_size, physical_batch, isolate
        self._sums: BatchSum | None = None
        self._structure: Structure | None = None
        self._padding = list[Tensor]()  # values of theta that are never trained
        self._calls, self._chunk = 0, 0

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Return the sum over the records of a batch, shape (d,), float64 for several chunks.

        It is 0 where :attr:`trained` is. It is a copy, and private until noise is added. The first
        call validates the network, unless :meth:`prepare` did.

        Args:
            batch: tensors with one row per record, in dicts, lists and tuples; also of no row.

        Raises:
            InputError: the batch is not tensors with one row per record, has other parts, shapes or
                types than the one that was validated, or many times more records than
                ``batch_size``; or the region does not fit the parameters.
            ModelError: the network cannot be clipped, is no longer the one that was validated, or
                an update changed a row that is padding.
            RunError: memory ran out with a single record.
        """
        check_rows(batch, self._structure)
        sums = self._sums or self.prepare(batch)
        _check_region(self.region, sums.theta)
        sums.check()
        self._check_padding()
        self._calls += 1
        region = self.region
        if sums.skipped and not region.is_ball:
            region = at_places(part_of(region, sums.trained_mask), sums.trained_mask)
        metric, records = RegionMetric(region), np.arange(samples_in(batch))
        with full_float32(sums.arithmetic), sums.given(records, batch):
            total, self._chunk = sums.of(records, self._calls, metric, self._chunk)
        return total.clone()

    @property
    def theta(self) -> Tensor:
        """Return the trained parameters as one vector, shape (d,); changing it changes the model.

        The row that an embedding declares as padding (``padding_idx``) has its place in it and is
        not to be changed: see :attr:`trained`.

        Raises:
            ModelError: neither :meth:`prepare` nor a first batch came before.
        """
        return self._ready.theta

    @property
    def trained(self) -> Tensor:
        """Return where theta is trained: a mask of 1 and, for rows that are padding, 0; shape (d,).

        It has the dtype of theta. Multiply a private mean by it, so that those rows get no noise.

        Raises:
            ModelError: neither :meth:`prepare` nor a first batch came before.
        """
        return self._ready.trained_mask.to(self.theta.dtype)

    def by_parameter(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Return views of a vector by the names of parameters, in their shapes.

        Args:
            vector: one number per trained parameter, shape (d,), such as a sum or :attr:`theta`.

        Returns:
            Views by the names of ``model.named_parameters()``, without frozen parameters. Writing
            to a view changes the vector.

        Raises:
            ModelError: neither :meth:`prepare` nor a first batch came before.
        """
        named = self._objective.named_parameters()
        names = {id(p): name.removeprefix("network.") for name, p in named}
        views = dict[str, Tensor]()
        for layer in self._ready.clipped_sum.layers:
            part = vector[layer.start : layer.stop]
            for key, p in layer.parameters.items():
                views[names[id(p)]] = part[layer.slices[key]].view(p.shape)
        return views

    def prepare(self, example: Batch) -> BatchSum:
        """Validate the network on the structure of a batch, whose values are not used.

        The first batch does this too. A second call validates it again, on another structure.

        Args:
            example: tensors with one row per record, in dicts, lists and tuples.

        Returns:
            What computes the sums, on which :attr:`theta` depends.

        Raises:
            InputError: the example is not tensors with one row per record.
            ModelError: the network or the loss cannot be clipped.
        """
        check_rows(example, None)
        sums = validated_sum(
            self._objective,
            Structure.of(example),
            secrets.token_bytes(KEY_BYTES),
            places=int(most_samples(self._batch)) + 1,
            physical_batch=self._physical,
            batch_size=self._batch,
            weigh=self._weigh,
            isolated=self._isolate,
        )
        self._sums, self._structure = sums, sums.structure
        self._chunk, self.notes = sums.chunk, sums.notes
        self._padding = [sums.theta[gap].clone() for gap in sums.skipped]
        return sums

    def _check_padding(self) -> None:
        """Raise ModelError if a row that is padding was changed."""
        sums = self._ready
        for gap, before in zip(sums.skipped, self._padding, strict=True):
            if not identical(sums.theta[gap], before):
                named = self.by_parameter(torch.arange(sums.theta.numel()))
                name = next(name for name, where in named.items() if gap.start in where)
                raise ModelError(PADDING_CHANGED.format(name))

    @property
    def _ready(self) -> BatchSum:
        if self._sums is None:
            raise ModelError("The network is validated on the first batch: call prepare(batch).")
        return self._sums


@checked()
def clipped_grad(
    model: nn.Module,
    loss: BatchLoss,
    region: Ellipsoid,
    *,
    batch_size: int,
    physical_batch: int = 256,
    fix_norm: bool = False,
    isolate: bool = False,
    weights: Callable[[Batch], Tensor] | None = None,
    largest_weight: float = 1.0,
) -> ClippedGrad:
    """Return a function of a batch: the sum of its clipped per-record gradients, without noise.

        clipped = clipped_grad(model, loss, ball(1.0), batch_size=256)
        total = clipped(batch)  # (d,): private until noise is added

    Adding or removing a record moves the sum by at most ``clipped.sensitivity``, 1, in the norm
    ||(.)/b|| of the region: by at most C for a ball of radius C. Rounding is included. Gradient g_i
    of a record adds c_i (g_i - m), where c_i <= 1 is the largest factor with which it is in the
    region, times its weight.

    The network and the loss are validated on the first batch, and compared with what was validated
    before each further one. Parameters become views of ``clipped.theta``. Nothing is accounted for:
    see :class:`PrivateStep` for a complete step.

    Args:
        model, loss: see :class:`PrivateStep`.
        region: region to clip to, such as :func:`~dpmac_cli.ball`; a program may replace it.
        batch_size: expected number of records in a batch, which must not depend on the records.
        physical_batch: records to process at a time.
        fix_norm: replace batch norm by group norm, in the network itself.
        isolate: accept a network that computes something else for a batch than for one record.
        weights, largest_weight: see :class:`PrivateStep`.

    Raises:
        InputError: a number of records is below 1, or the weights are no function.
        ModelError: the network or the loss cannot be clipped.
    """
    errors = list[str]()
    for name, value in (("batch_size", batch_size), ("physical_batch", physical_batch)):
        if not value >= 1:
            errors.append(f"{name} must be at least 1, not {value!r}.")
    raise_errors(errors)
    weigh = None if weights is None else RecordWeights(weights, largest_weight, "batch")
    if fix_norm:
        model = without_batch_norm(model)
    objective, sizes = Objective(model, loss), (batch_size, physical_batch)
    return ClippedGrad(objective, region, *sizes, isolate=isolate, weigh=weigh)


def validated_sum(
    objective: Objective,
    structure: Structure,
    key: bytes,
    *,
    places: int,
    physical_batch: int,
    batch_size: float,
    weigh: RecordWeights | None,
    isolated: bool,
) -> BatchSum:
    """Validate a network and its loss, and return what sums its gradients on a program's batches.

    The network's parameters become views of one vector.

    Args:
        objective: the network with its loss.
        structure: structure of a record, such as that of the first one.
        key: secret key of the random draws of layers and places, 32 bytes.
        places: number of rows in which the records of a step have random places.
        physical_batch: records to process at a time.
        batch_size: expected number of records in a batch.
        weigh: weights of records; None for those of the loss, if any.
        isolated: whether a network is accepted that computes something else for a batch than for
            one record.

    Raises:
        ModelError: the network or the loss cannot be clipped.
    """
    structure = fitted(objective, structure, weigh)
    check_trial(objective, Trial(structure, None), isolated=isolated)
    draws, rows = LayerDraws(key), RandomPlaces(key, places)
    with full_float32():
        return BatchSum(objective, structure, draws, rows, physical_batch, batch_size, weigh)


def _check_region(region: Ellipsoid, theta: Tensor) -> None:
    """Raise InputError if a region is not one of the parameters, shape (d,)."""
    shapes = {tuple(region.centre.shape), tuple(region.inverse.shape)}
    if shapes not in ({()}, {tuple(theta.shape)}):
        raise InputError(
            f"The region has the shapes {sorted(shapes)}, but the network has {theta.numel():,} "
            "trained parameters. Use ball(radius), or ellipsoid(centre, scale) with a number for "
            "each of them, such as torch.ones_like(clipped.theta)."
        )
