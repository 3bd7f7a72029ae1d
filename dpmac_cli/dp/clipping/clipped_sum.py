"""Sums of clipped, centred per-sample gradients, with margins for rounding.

Lines 4 to 8 of Algorithm 1, for the ellipsoid with centre m = m-hat_(t-1) and scale b = b_(t-1):

    g_i = grad of loss(theta; x_i, y_i)                       line 5
    w_i = (g_i - m) / b                                       line 6
    w-bar_i = w_i / max(1, ||w_i||)                           line 7

The sum is kept in gradient space: b w-bar_i = c_i (g_i - m) with c_i = min(1, 1 / ||w_i||).

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
    """Computes sums of clipped, centred gradients of chunks of samples: :meth:`of`.

    Args:
        per_sample: per-sample gradients of a network. The mean gradient of a sample's views, or of
            a unit's records, is clipped once.
        capacity: largest number of samples in a call of :meth:`of`; public.
        batch: expected number B of samples in a step; by default one chunk.

    Attributes:
        layers: layers of the network.
        views: number of inputs per sample.
        cut: number of samples so far whose weight was outside [0, 1], int64, (). Private.
    """

    def __init__(
        self, per_sample: PerSample, capacity: int = 1024, batch: float | None = None
    ) -> None:
        self._per_sample = per_sample
        self.layers = per_sample.layers
        self.views = per_sample.views
        self._capacity = capacity
        self._batch = batch
        self._limit = clip_limit(max(capacity, batch or 0))
        first = next(iter(self.layers[0].parameters.values()))
        self.cut = torch.zeros((), dtype=torch.long, device=first.device)

    def of(
        self, x: Batch, y: Batch, metric: RegionMetric, out: Tensor, counted: Tensor | None = None
    ) -> None:
        """Write the sum of a chunk's clipped gradients into ``out``: lines 5 to 8 of Algorithm 1.

        That is the sum of v_i c_i (g_i - m), with each ||c_i (g_i - m)/b|| <= 1: g_i is the
        gradient of sample i and v_i its weight in [0, 1]; m is the centre of the ellipsoid and b
        its scale. A sample whose gradient or norm is not finite adds exactly zero.

        Args:
            x: inputs, shape (rows, ...), at least one: see :class:`.PerSample`.
            y: labels of the inputs.
            metric: metric of the ellipsoid to clip to.
            out: memory for the result, shape (d,). Overwritten.
            counted: mask of the rows that count, bool, shape (rows,), where the others only fill
                the chunk; None if all do.

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
        """Return a mask with which all rows of a chunk count, bool, shape (rows,).

        Args:
            x: inputs of the chunk, shape (rows, ...).
            out: any tensor on the device that the mask shall be on.
        """
        return torch.ones(samples_in(x), dtype=torch.bool, device=out.device)

    def sum_up(
        self,
        gradients: ByLayer,
        weights: Weights,
        metric: RegionMetric,
        counted: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write the sum of clipped gradients of the samples that count, in the dtype of ``out``.

        The sum is that of :meth:`of`. Its shapes depend on no values, so that it can be recorded
        and replayed on a GPU.

        Args:
            gradients: layers with the gradients of a chunk: see :meth:`gradients`.
            weights: weights of its samples.
            metric: metric of the ellipsoid to clip to.
            counted: mask of the rows that count, bool, shape (rows,).
            out: memory for the result, shape (d,). Overwritten.

        Returns:
            Whether float64 is needed: see :meth:`sum_up_precisely`; bool, shape ().
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
        """Write the sum of :meth:`sum_up`, computed in float64 and rounded once.

        It is for a chunk for which :meth:`sum_up` returned True.

        Args:
            gradients: layers with the gradients of a chunk: see :meth:`gradients`.
            weights: weights of its samples.
            metric: metric of the ellipsoid to clip to.
            counted: mask of the rows that count, bool, shape (rows,).
            out: memory for the result, shape (d,). Overwritten.
        """
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
        """Write the sum for given norms."""
        c, valid = clip_weights(squared, self._limit)
        c = torch.where(counted, c * weights.value, 0)  # after clipping: w c (g - m)
        total = c.sum()
        c = c.to(out.dtype)
        finite = self._mask(valid)
        for layer, form in gradients:
            of_layer = out[layer.start : layer.stop]
            form.weighted_sum(c, finite, of_layer)
        if not region.is_ball:
            out.addcmul_(region.centre.to(out.dtype), -total.to(out.dtype))

    def _mask(self, valid: Tensor) -> Mask:
        """Return the mask of samples with finite norms; None if all are finite."""
        if bool(valid.all()):
            return None
        return valid

    def gradients(self, x: Batch, y: Batch, *, ball: bool) -> tuple[ByLayer, Weights]:
        """Return the per-sample gradients g_i of a chunk, in a form for each layer: line 5.

        Args:
            x: inputs, shape (rows, ...): see :class:`.PerSample`.
            y: labels of the inputs.
            ball: whether norms will be those in a ball, for which other forms are cheaper.

        Returns:
            Every layer with its per-sample gradients, and the weights of the samples.
        """
        _, weights, uses_by_layer = self._per_sample(x, y)
        gradients = []
        for layer, uses in zip(self.layers, uses_by_layer, strict=True):
            gradients.append((layer, choose_form(layer, uses, ball=ball)))
        return gradients, weights

    def weights(self, squares: Tensor) -> Tensor:
        """Return the factors c_i of clipping for exact norms, float64, shape (samples,): line 7.

        Args:
            squares: squared whitened norms ||w_i||^2, float64, shape (samples,).
        """
        nothing = torch.zeros_like(squares)
        exact = SquaredNorms(squares, slack=nothing, reach=nothing)
        c, _ = clip_weights(exact, self._limit)
        return c

    def norms(
        self, gradients: ByLayer, metric: RegionMetric, counted: Tensor
    ) -> tuple[SquaredNorms, Tensor]:
        """Return the squared whitened norms ||w_i||^2 of line 7, and whether they need float64.

        Args:
            gradients: layers with the gradients of a chunk.
            metric: metric of the ellipsoid.
            counted: mask of the rows that count, bool, shape (rows,).

        Returns:
            Squared norms of all rows; and True if the bound on rounding is too large for the norm
            of a row, or for the sum of those that count: bool, shape ().
        """
        squared = total_squared_norms(gradients, metric)
        c, _ = clip_weights(squared, self._limit)
        c = torch.where(counted, c, 0)
        doubtful = (self._share(squared) > 0).any()
        doubtful |= (c * squared.reach.sqrt() > REACH).any()
        if not metric.region.is_ball:
            most = cancellation_limit(1, self._batch or len(counted)) * counted.sum()
            doubtful |= c.sum() * metric.centre_norm(self.layers) > most
        return squared, doubtful

    def precise_norms(
        self, gradients: ByLayer, metric: RegionMetric
    ) -> tuple[ByLayer, SquaredNorms]:
        """Return the gradients in float64, and squared norms that were computed from them.

        The norm of a sample that does not need float64 stays that of float32, so that no sample
        changes the norms of others.

        Args:
            gradients: layers with the gradients of a chunk.
            metric: metric of the ellipsoid.

        Returns:
            Layers with their gradients in float64; and squared whitened norms with bounds.
        """
        squared = total_squared_norms(gradients, metric)
        share = self._share(squared)
        gradients = [(layer, form.double()) for layer, form in gradients]
        exact = total_squared_norms(gradients, RegionMetric(metric.region, torch.float64))

        def mixed(rough: Tensor, fine: Tensor) -> Tensor:
            return torch.where(share == 1, fine, rough + share * (fine - rough))

        norms = SquaredNorms(
            value=mixed(squared.value, exact.value),
            slack=mixed(squared.slack, exact.slack),
            reach=mixed(squared.reach, exact.reach),
        )
        return gradients, norms

    def _share(self, squared: SquaredNorms) -> Tensor:
        """Return the share of the precise norm in that of each sample, from 0 to 1.

        It grows where slack begins to matter: at a jump, a last bit, which may depend on the other
        rows, would decide. Samples that are not clipped do not need it.
        """
        upper = squared.value + squared.slack
        value = squared.value.clamp(min=0)
        share = (squared.slack / (SLACK_SHARE * value) - 1).clamp(0, 1)
        share = torch.where(upper.isfinite(), share, 1.0)
        not_clipped = upper <= self._limit**2
        return share.masked_fill_(not_clipped, 0)


def clip_limit(samples: float) -> float:
    """Return the whitened norm, a little below 1, to clip to in steps of about ``samples`` samples.

    The difference covers the rounding of float32 sums. It grows with the number of terms, in one
    or several chunks, because removing a record moves all others to other places in their chunks.

    Args:
        samples: expected number of samples in a step, or the capacity of a chunk if it is larger.

    Example:
        >>> clip_limit(256) == clip_limit(1024) > clip_limit(4096) > 0.99
        True
    """
    return 1 / (1 + ROOM * max(1.0, samples / FEW))


def most_samples(batch: float) -> float:
    """Return the largest number of samples in a step for which margins for rounding were chosen.

    A batch that a sampler draws is larger with a probability below e^-70.

    Args:
        batch: expected size B of a batch.

    Example:
        >>> most_samples(100)
        250.0
    """
    return batch + 12 * sqrt(batch) + 30


def cancellation_limit(samples: int, batch: float) -> float:
    """Return how large a chunk's sum of c_i times ||m/b|| may be in float32.

    It is the chunk's share of :data:`CANCELLATION_LIMIT`; above it, float64 is needed.

    Args:
        samples: number of samples in the chunk.
        batch: expected number B of samples in a step.
    """
    return CANCELLATION_LIMIT * max(1.0, batch / FEW) * samples / max(batch, SMALL)


def clip_weights(squared: SquaredNorms, limit: float) -> tuple[Tensor, Tensor]:
    """Return the factors of clipping, c_i = min(1, limit / ||w_i||), and which norms are finite.

    Line 7 of Algorithm 1, with ``limit`` instead of 1, and for ||w_i|| the largest number within
    the bound on rounding. Factors near :data:`LEAST_WEIGHT` are less, and those below it 0.

    Args:
        squared: squared whitened norms ||w_i||^2 with their bounds, shape (samples,).
        limit: norm to clip to, see :func:`clip_limit`.

    Returns:
        c, float64, shape (samples,), 0 where a norm is not finite; and the mask of finite norms,
        bool, shape (samples,).

    Example:
        >>> zeros = torch.zeros(2, dtype=torch.float64)
        >>> squared = SquaredNorms(zeros + torch.tensor([0.25, 4.0]), slack=zeros, reach=zeros)
        >>> c, finite = clip_weights(squared, limit=1.0)
        >>> c.tolist(), finite.tolist()
        ([1.0, 0.5], [True, True])
    """
    upper = squared.value.clamp(min=0) + squared.slack
    valid = torch.isfinite(upper)
    c = (limit / upper.sqrt()).clamp(max=1.0)
    fading = (c / LEAST_WEIGHT - 1).clamp(0, 1)
    return torch.where(valid & (fading > 0), c * fading, 0.0), valid
