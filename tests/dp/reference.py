"""What the clipped sums ought to be: float64, one gradient per sample, no cleverness."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum, clip_limit, clip_weights
from dpmac_cli.dp.clipping.forms import ByLayer, PerSampleGradients
from dpmac_cli.dp.clipping.layers import Layer, flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric, SquaredNorms
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.dp.mechanism import Ellipsoid


def per_sample_gradients(model: nn.Module, layers: list[Layer], x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the cross-entropy by vmap over the whole model, float64, (samples, d).

    torch's recurrent layers and bags of words have no batching rule: they run on one sample after
    the other.
    """
    without_rule = nn.RNNBase | nn.RNNCellBase | nn.EmbeddingBag
    if any(isinstance(module, without_rule) for module in model.modules()):
        return torch.stack([_alone(model, layers, *pair) for pair in zip(x, y, strict=True)])
    named = {id(p): name for name, p in model.named_parameters()}
    names = [named[id(p)] for layer in layers for p in layer.parameters.values()]
    values = {name: p.detach().double() for name, p in model.named_parameters()}
    theta = {name: values.pop(name) for name in names}

    def loss(theta: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, {**values, **theta}, (x.unsqueeze(0),))
        return cross_entropy(logits, y.unsqueeze(0))

    with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
        gradients: dict[str, Tensor] = vmap(grad(loss), (None, 0, 0))(theta, _double(x), y)
    return torch.cat([gradients[name].flatten(1) for name in names], 1)


def _alone(model: nn.Module, layers: list[Layer], x: Tensor, y: Tensor) -> Tensor:
    """Gradient of one sample's cross-entropy by autograd on a copy, float64, (d,)."""
    named = {id(p): name for name, p in model.named_parameters()}
    names = [named[id(p)] for layer in layers for p in layer.parameters.values()]
    alone = deepcopy(model).double().requires_grad_(True)
    with torch.enable_grad():
        loss: Any = cross_entropy(alone(_double(x).unsqueeze(0)), y.unsqueeze(0))
        loss.backward()
    parameters = [alone.get_parameter(name) for name in names]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([g.flatten() for g in gradients])


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@dataclass(frozen=True)
class Subject:
    """A model ready to be clipped, its oracle beside it.

    Attributes:
        model, layers, theta: as the engine prepares them.
        clipped_sum: the object under test.
        limit: the norm it clips to, a little below 1.
        views: of a sample; with several, inputs have shape (samples, views, ...).
    """

    model: nn.Module
    layers: list[Layer]
    theta: Tensor
    clipped_sum: ClippedChunkSum
    limit: float
    views: int = 1

    def add(self, x: Tensor, y: Tensor, region: Ellipsoid) -> Tensor:
        """sum of c_i (g_i - m) as computed, shape (d,)."""
        out = torch.full_like(self.theta, torch.nan)  # whatever was there before
        self.clipped_sum.of(x, y, RegionMetric(region), out)
        return out

    def norms(self, x: Tensor, y: Tensor, region: Ellipsoid) -> Tensor:
        """||(g_i - m)/b|| as computed, shape (samples,)."""
        return self.squared_norms(x, y, region).value.clamp(min=0).sqrt()

    def exact_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """g_i by the oracle, the mean over a sample's views, float64, (samples, d)."""
        if self.views == 1:
            return per_sample_gradients(self.model, self.layers, x, y)
        pairs = zip(x.unbind(1), y.unbind(1), strict=True)
        by_view = [per_sample_gradients(self.model, self.layers, *pair) for pair in pairs]
        return torch.stack(by_view).mean(0)

    def gradients(self, x: Tensor, y: Tensor, *, ball: bool = True) -> ByLayer:
        """The layers, each with its per-sample gradients as the program stores them."""
        return self.clipped_sum.gradients(x, y, ball=ball)

    def forms(self, x: Tensor, y: Tensor, *, ball: bool = True) -> list[PerSampleGradients]:
        """The layers' per-sample gradients as the program stores them."""
        return [form for _, form in self.gradients(x, y, ball=ball)]

    def squared_norms(self, x: Tensor, y: Tensor, region: Ellipsoid) -> SquaredNorms:
        """The norms that the program clips by."""
        gradients = self.gradients(x, y, ball=region.is_ball)
        return self.clipped_sum.norms(gradients, RegionMetric(region), len(x))[1]

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


def prepare(
    model: nn.Module,
    example: Tensor,
    capacity: int = 1024,
    views: int = 1,
    batch: float | None = None,
    *,
    rowwise: bool = False,
) -> Subject:
    """A model as the engine prepares it, for chunks up to ``capacity`` of rows like the example."""
    several = (views,) if views > 1 else ()
    inputs = Structure(example[:1].reshape(1, *[1] * len(several), *example.shape[1:]), keep=True)
    if several:
        inputs = Structure(inputs.template.expand(1, views, *example.shape[1:]), keep=True)
    labels = Structure(torch.zeros(1, *several, dtype=torch.long), keep=True)
    per_sample = PerSample(model, inputs, labels, views, rowwise=rowwise)
    assert per_sample.vmapped, per_sample.notes
    theta = flatten_parameters(per_sample.layers)
    clipped_sum = ClippedChunkSum(per_sample, capacity, batch)
    limit = clip_limit(max(capacity, batch or 0))
    return Subject(model, per_sample.layers, theta, clipped_sum, limit, views)


def whiten(g: Tensor, region: Ellipsoid) -> Tensor:
    """(g - m) / b in float64."""
    scale = (region.factor.double() / region.inverse.double()).sqrt()
    return (g.double() - region.centre.double()) / scale


def clip(g: Tensor, region: Ellipsoid, limit: float) -> Tensor:
    """c_i (g_i - m), clipped to exactly ``limit``, float64, (samples, d)."""
    norms: Tensor = whiten(g, region).norm(dim=1, keepdim=True)
    clipped: Tensor = (limit / norms).clamp(max=1.0) * (g - region.centre.double())
    return clipped
