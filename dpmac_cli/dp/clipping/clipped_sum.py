"""Sums of clipped, centred per-sample gradients, with margins for rounding.

Rounding affects privacy: if a computed norm is too small, a sample contributes more than 1. Samples
are clipped by norm plus error bound. A chunk in which terms cancel too much is computed in float64.
"""

from math import sqrt

import torch
from torch import Tensor

from dpmac_cli.dp.clipping.batches import Batch, samples_in
from dpmac_cli.dp.clipping.layer_gradients import ByLayer, choose_form, total_squared_norms
from dpmac_cli.dp.clipping.norms import Mask, RegionMetric, SquaredNorms
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.torch_errors import code_of_network
from dpmac_cli.dp.weights import Weights

#: Number of samples that a step may add up before the margin for rounding grows.
FEW = 1024
#: Margin: 2.5 times the largest rounding error found by a search over adversarial batches.
ROOM = 6e-4
#: Rows whose rounding bound exceeds this fraction of their squared norm are computed in float64,
#: those of twice as much with nothing else.
SLACK_SHARE = 0.01
#: The sum of c_i times ||m/b|| above which sum c_i g_i - (sum c_i) m cancels too much for float32,
#: for a batch of :data:`FEW` samples.
CANCELLATION_LIMIT = 250.0
#: Expected size of a batch below which a draw may have many times as many samples.
SMALL = 16
#: c_i R_i above which a chunk is added up in float64, see :class:`SquaredNorms`: the clipped norm
#: is at most 1, but the terms of the sum that it consists of may be larger.
REACH = 8.0
#: c_i below which a sample adds nothing, because float32 has few digits left for it. Up to twice as
#: much, it adds less than its clipped gradient, so that no last bit decides whether it counts.
LEAST_WEIGHT = 1e-30


class ClippedChunkSum:
    """Compute the sum of clipped, centred gradients of a chunk of samples.

    Args:
        per_sample: per-sample gradients of a network. The mean gradient of a sample's views, or of
            a unit's records, is clipped once.
        capacity: largest number of samples in a call of :meth:`of`; public.
        batch: expected number B of samples in a step; by default one chunk.

    Attributes:
        cut: number of samples so far whose weight was outside [0, 1], int64, (). Private.
    """

    def __init__(
        self, per_sample: PerSample, capacity: int = 1024, batch: float | None = None
    ) -> None:
        self._per_sample, self.layers = per_sample, per_sample.layers
        self.views = per_sample.views
        self._capacity, self._batch = capacity, batch
        self._limit = clip_limit(max(capacity, batch or 0))
        first = next(iter(self.layers[0].parameters.values()))
        self.cut = torch.zeros((), dtype=torch.long, device=first.device)

    def of(
        self, x: Batch, y: Batch, metric: RegionMetric, out: Tensor, counted: Tensor | None = None
    ) -> None:
        """Write the sum of w_i c_i (g_i - m) into ``out``, with each ||c_i (g_i - m)/b|| <= 1.

        A sample whose gradient or norm is not finite adds exactly zero.

        Args:
            x, y: at least one input with its label: see :class:`.PerSample`.
            metric: metric of the ellipsoid to clip to.
            out: result, shape (d,).
            counted: rows that count, bool, shape (rows,), if the others only fill the batch.

        Raises:
            ModelError: see :class:`.PerSample`.
            ValueError: there are more samples than the capacity.
        """
        rows = samples_in(x)
        if rows > self._capacity:
            raise ValueError(f"{rows} samples, but the capacity is {self._capacity}")
        counted = self.all_of(x, out) if counted is None else counted
        with code_of_network(x):  # norms and sums may run the network's code again
            gradients, weights = self.gradients(x, y, ball=metric.region.is_ball)
            if bool(self.sum_up(gradients, weights, metric, counted, out)):
                self.sum_up_precisely(gradients, weights, metric, counted, out)

    @staticmethod
    def all_of(x: Batch, out: Tensor) -> Tensor:
        """Return that all rows of a chunk count; bool, shape (rows,)."""
        return torch.ones(samples_in(x), dtype=torch.bool, device=out.device)

    def sum_up(
        self,
        gradients: ByLayer,
        weights: Weights,
        metric: RegionMetric,
        counted: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the sum of the samples that count; return whether float64 is needed, bool, ().

        Nothing in it waits for a device, or has a shape that depends on values.
        """
        squared, doubtful = self.norms(gradients, metric, counted)
        self._add_up(gradients, squared, weights, metric.region, counted, out)
        self.cut.add_((weights.cut & counted & ~doubtful).sum())
        return doubtful

    def sum_up_precisely(
        self,
        gradients: ByLayer,
        weights: Weights,
        metric: RegionMetric,
        counted: Tensor,
        out: Tensor,
    ) -> None:
        """Write the sum of the samples that count, in float64."""
        self.cut.add_((weights.cut & counted).sum())
        gradients, squared = self.precise_norms(gradients, metric)
        total = torch.empty_like(out, dtype=torch.float64)
        self._add_up(gradients, squared, weights, metric.region, counted, total)
        out.copy_(total)

    def _add_up(
        self,
        gradients: ByLayer,
        squared: SquaredNorms,
        weights: Weights,
        region: Ellipsoid,
        counted: Tensor,
        out: Tensor,
    ) -> None:
        c, valid = clip_weights(squared, self._limit)
        c = torch.where(counted, c * weights.value, 0)  # after clipping: w c (g - m)
        total, c, kept = c.sum(), c.to(out.dtype), self._mask(valid)
        for layer, form in gradients:
            form.weighted_sum(c, kept, out[layer.start : layer.stop])
        if not region.is_ball:
            out.addcmul_(region.centre.to(out.dtype), -total.to(out.dtype))

    def _mask(self, valid: Tensor) -> Mask:
        """Return the mask of samples to keep, None if there is no other."""
        return None if bool(valid.all()) else valid

    def gradients(self, x: Batch, y: Batch, *, ball: bool) -> tuple[ByLayer, Weights]:
        """Return every layer's per-sample gradients, for a ball or an ellipsoid, and weights."""
        _, weights, by_layer = self._per_sample(x, y)
        pairs = zip(self.layers, by_layer, strict=True)
        return [(layer, choose_form(layer, uses, ball=ball)) for layer, uses in pairs], weights

    def weights(self, squares: Tensor) -> Tensor:
        """Return c_i for squared norms without rounding, float64, shape (samples,)."""
        nothing = torch.zeros_like(squares)
        return clip_weights(SquaredNorms(squares, nothing, nothing), self._limit)[0]

    def norms(
        self, gradients: ByLayer, metric: RegionMetric, counted: Tensor
    ) -> tuple[SquaredNorms, Tensor]:
        """Return squared norms, and whether float32 may not do for one that counts, or the sum."""
        squared = total_squared_norms(gradients, metric)
        c = torch.where(counted, clip_weights(squared, self._limit)[0], 0)
        doubtful = (self._share(squared) > 0).any() | (c * squared.reach.sqrt() > REACH).any()
        if not metric.region.is_ball:
            most = cancellation_limit(1, self._batch or len(counted)) * counted.sum()
            doubtful |= c.sum() * metric.centre_norm(self.layers) > most
        return squared, doubtful

    def precise_norms(
        self, gradients: ByLayer, metric: RegionMetric
    ) -> tuple[ByLayer, SquaredNorms]:
        """Return gradients in float64, and squared norms.

        The norm of a sample changes only if it needs that itself, so that none changes the others'.
        """
        squared = total_squared_norms(gradients, metric)
        share = self._share(squared)
        gradients = [(layer, form.double()) for layer, form in gradients]
        exact = total_squared_norms(gradients, RegionMetric(metric.region, torch.float64))
        value, slack, reach = (
            torch.where(share == 1, fine, rough + share * (fine - rough))
            for rough, fine in zip(vars(squared).values(), vars(exact).values(), strict=True)
        )
        return gradients, SquaredNorms(value, slack, reach)

    def _share(self, squared: SquaredNorms) -> Tensor:
        """Return the share of the precise norm in that of each sample, from 0 to 1.

        It grows where slack begins to matter: at a jump, a last bit, which may depend on the other
        rows, would decide. Samples that are not clipped do not need it.
        """
        upper, value = squared.value + squared.slack, squared.value.clamp(min=0)
        share = (squared.slack / (SLACK_SHARE * value) - 1).clamp(0, 1)
        return torch.where(upper.isfinite(), share, 1.0).masked_fill_(upper <= self._limit**2, 0)


def clip_limit(samples: float) -> float:
    """Return the norm to clip to instead of 1, for steps of about this many samples.

    The difference covers the rounding of float32 sums. It grows with the number of terms, in one
    or several chunks, because removing a record moves all others to other places in their chunks.
    """
    return 1 / (1 + ROOM * max(1.0, samples / FEW))


def most_samples(batch: float) -> float:
    """Return the largest number of samples in a step for which margins for rounding were chosen.

    Batches of expected size ``batch`` are larger with a probability below e^-70, drawn by any
    sampler.
    """
    return batch + 12 * sqrt(batch) + 30


def cancellation_limit(samples: int, batch: float) -> float:
    """Return a chunk's share of :data:`CANCELLATION_LIMIT`; ``batch`` is the expected size."""
    return CANCELLATION_LIMIT * max(1.0, batch / FEW) * samples / max(batch, SMALL)


def clip_weights(squared: SquaredNorms, limit: float) -> tuple[Tensor, Tensor]:
    """Return c_i = min(1, limit / ||w_i||) for the largest ||w_i|| within the rounding bound.

    Returns:
        c, less near :data:`LEAST_WEIGHT`, float64, shape (samples,), 0 where the norm is not
        finite; and the mask of finite norms.
    """
    upper = squared.value.clamp(min=0) + squared.slack
    valid = torch.isfinite(upper)
    c = (limit / upper.sqrt()).clamp(max=1.0)
    fading = (c / LEAST_WEIGHT - 1).clamp(0, 1)
    return torch.where(valid & (fading > 0), c * fading, 0.0), valid
