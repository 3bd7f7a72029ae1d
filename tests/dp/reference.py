"""What the clipped sums ought to be: float64, one record at a time by autograd, no cleverness."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum, clip_limit, clip_weights
from dpmac_cli.dp.clipping.layer_gradients import ByLayer, PerSampleGradients
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric, SquaredNorms
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.clipping.vmap_support import constant_draws
from dpmac_cli.dp.losses import Loss, plain
from dpmac_cli.dp.mechanism import Ellipsoid, ball, ellipsoid


def norms_of(
    clipped_sum: ClippedChunkSum, gradients: ByLayer, metric: RegionMetric, samples: int
) -> SquaredNorms:
    """The norms by which some samples are clipped, all of which count."""
    counted = torch.ones(samples, dtype=torch.bool)
    squared, doubtful = clipped_sum.norms(gradients, metric, counted)
    return clipped_sum.precise_norms(gradients, metric)[1] if doubtful else squared


class Subject:
    """A model as the engine prepares it, for chunks up to ``capacity``, its oracle beside it.

    Attributes:
        per_sample, layers, theta, clipped_sum: as the engine prepares them.
        limit: the norm it clips to, a little below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Tensor,
        capacity: int = 1024,
        views: int = 1,
        batch: float | None = None,
        *,
        rowwise: bool = False,
        loss: Loss = plain,
    ) -> None:
        several = (views,) if views > 1 else ()
        row = example[:1].reshape(1, *[1] * len(several), *example.shape[1:])
        inputs = Structure(row.expand(1, *several, *example.shape[1:]), keep=True)
        labels = Structure(torch.zeros(1, *several, dtype=torch.long), keep=True)
        self.views, self._loss = views, loss
        self._alone = copy.deepcopy(model).double().requires_grad_()
        self.per_sample = PerSample(model, inputs, labels, views, loss, rowwise=rowwise)
        self.layers = self.per_sample.layers
        self.theta = flatten_parameters(self.layers)
        self.clipped_sum = ClippedChunkSum(self.per_sample, capacity, batch)
        self.limit = clip_limit(max(capacity, batch or 0))

    def add(self, x: Tensor, y: Tensor, region: Ellipsoid) -> Tensor:
        """sum of c_i (g_i - m) as computed, shape (d,)."""
        out = torch.full_like(self.theta, torch.nan)  # whatever was there before
        self.clipped_sum.of(x, y, RegionMetric(region), out)
        return out

    def exact_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """g_i by autograd on a copy, the mean over a record's views, float64, (samples, d)."""
        x = x.double() if x.is_floating_point() else x
        named = dict(self._alone.named_parameters())
        parameters = [named[name] for of in self.per_sample._names for name in of]
        rows = []
        with torch.enable_grad(), constant_draws():
            for pair in zip(x, y, strict=True):
                one, label = pair if self.views > 1 else (t.unsqueeze(0) for t in pair)
                loss: Any = self._loss(self._alone(one), label).mean()
                found = torch.autograd.grad(loss, parameters, materialize_grads=True)
                rows.append(torch.cat([g.to_dense().flatten() for g in found]))
        return torch.stack(rows)

    def gradients(self, x: Tensor, y: Tensor, *, ball: bool = True) -> ByLayer:
        """The layers, each with its per-sample gradients as the program stores them."""
        return self.clipped_sum.gradients(x, y, ball=ball)[0]

    def forms(self, x: Tensor, y: Tensor) -> list[PerSampleGradients]:
        """The layers' per-sample gradients as the program stores them."""
        return [form for _, form in self.gradients(x, y)]

    def squared_norms(self, x: Tensor, y: Tensor, region: Ellipsoid) -> SquaredNorms:
        """The norms that the program clips by."""
        gradients = self.gradients(x, y, ball=region.is_ball)
        return norms_of(self.clipped_sum, gradients, RegionMetric(region), len(x))

    def weights(self, x: Tensor, y: Tensor, region: Ellipsoid) -> Tensor:
        """c_i as the program chooses them, float64, shape (samples,)."""
        return clip_weights(self.squared_norms(x, y, region), self.limit)[0]

    def stored_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """g_i of the stored float32 activations, without further rounding, (samples, d).

        Sensitivity is a property of these: the oracle's differ by the rounding of the forward
        pass, which changes what is learnt but not what a sample may contribute.
        """
        gradients = torch.zeros(len(x), len(self.theta), dtype=torch.float64)
        everyone = torch.ones(len(x), dtype=torch.bool)
        forms = [(layer, form.double()) for layer, form in self.gradients(x, y)]
        for row, g in enumerate(gradients):
            one = torch.zeros(len(x), dtype=torch.float64)
            one[row] = 1
            for layer, form in forms:
                form.weighted_sum(one, everyone, g[layer.start : layer.stop])
        return gradients


def region_clipping_half(kind: str, gradients: Tensor, like: Tensor) -> Ellipsoid:
    """A region whose border lies between the samples, so that both cases of c occur."""
    generator = torch.Generator().manual_seed(1)
    norms = gradients.norm(dim=1)
    if kind == "ball":
        return ball(float(norms.median()), like)
    m = float(norms.mean()) / len(like) ** 0.5 * torch.randn(len(like), generator=generator)
    b = torch.exp(torch.randn(len(like), generator=generator))
    wide = ellipsoid(m.to(like.dtype), b.to(like.dtype))
    size = float(whiten(gradients, wide).norm(dim=1).median()) ** 2
    # b^2 is a quotient, as line 20 leaves it.
    return Ellipsoid(wide.centre, wide.inverse / size * 7, 7 * wide.factor)


def whiten(g: Tensor, region: Ellipsoid) -> Tensor:
    """(g - m) / b in float64."""
    scale = (region.factor.double() / region.inverse.double()).sqrt()
    return (g.double() - region.centre.double()) / scale


def clip(g: Tensor, region: Ellipsoid, limit: float) -> Tensor:
    """c_i (g_i - m), clipped to exactly ``limit``, float64, (samples, d)."""
    norms: Tensor = whiten(g, region).norm(dim=1, keepdim=True)
    clipped: Tensor = (limit / norms).clamp(max=1.0) * (g - region.centre.double())
    return clipped
