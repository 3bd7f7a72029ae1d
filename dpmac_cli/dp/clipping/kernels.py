"""Norms of the gradient by a layer's kernel, in the layer's metric, from a few of its rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import conv2d

from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.modules import LEAST_SQUARE, StandardisedConv2d
from dpmac_cli.dp.clipping.norms import ROW, LayerMetric, row_sums


class Kernel:
    """One layer's metric, and the map from G_i to gradients by its parameters.

    The map is linear: the identity, or that of :func:`through_standardisation`.

    Attributes:
        extra: terms of the sums in the map, for the bound on its rounding.
    """

    def __init__(self, layer: Layer, metric: LayerMetric, dtype: torch.dtype) -> None:
        self._metric, self._parts, begin = metric, {}, 0
        for name, p in layer.parameters.items():
            self._parts[name] = slice(begin, begin + p.numel())
            begin += p.numel()
        module: Any = layer.module
        self._module = module
        self.extra, self._standardised = 0, isinstance(module, StandardisedConv2d)
        if self._standardised:
            direction, scale = module.standardised(torch.float64)
            self.extra = min(ROW, module.weight[0].numel())
            self._moves = (scale.square() * LEAST_SQUARE < 1).to(dtype).squeeze(1)
            self._direction = direction.to(dtype)
            self._scale = (module.gain * scale.squeeze(1)).to(dtype)  # (O,)

    def distance(self, g: Tensor, name: str) -> Tensor:
        """Return the squared norm of g - m over one parameter, float64, shape (samples,)."""
        return self._squares(g, self._parts[name])

    def reach(self, delta: Tensor, squares: Tensor) -> Tensor:
        """Return R_i^2, or more: float64, shape (samples,).

        Args:
            delta: (samples, T, O).
            squares: of the norms of a, float64, (samples, T).
        """
        weights = self._largest("weight")
        if self._standardised:
            weights = weights * self._scale.double().square()
        if "bias" in self._parts:
            weights = torch.maximum(weights, self._largest("bias"))
        if "gain" in self._parts:
            weights = weights + self._largest("gain")
        by_delta: Tensor = vector_norm(delta.double() * weights.sqrt(), dim=2)
        by_input = (squares + float("bias" in self._parts)).sqrt_()
        return (by_delta * by_input).sum(1).square_()

    def _largest(self, name: str) -> Tensor:
        """Return the largest A of each output's coordinates in one parameter, float64, (O,)."""
        inverse = self._metric.inverse
        if self._metric.centre is not None:
            inverse = inverse[self._parts[name]].view(len(self._module.weight), -1).amax(1)
        return inverse.double()

    def scaled(self, delta: Tensor) -> Tensor:
        """Return delta for G_i by the weight instead of W-hat, (samples, T, O)."""
        return delta * self._scale if self._standardised else delta

    def along(self, uses: Sequence[Use], views: int) -> tuple[Tensor, Tensor]:
        """Return what the map of :func:`through_standardisation` changes about norms in a ball.

        Returns:
            what the gain adds less what the direction of W takes away, and the sum of both,
            float64, shape (samples,) each.
        """
        conv, by_use = self._module, []
        for use in uses:
            a = use.inputs[0]
            direction = self._direction.to(a.dtype).view_as(conv.weight)
            output = conv2d(a, direction, None, conv.stride, conv.padding, conv.dilation)
            by_row = output.mul_(use.delta).flatten(2).sum(2, dtype=torch.float64)
            by_use.append(by_row.view(-1, views, by_row.shape[1]).sum(1))
        along = torch.stack(by_use).sum(0).square_()
        gained = along.sum(1) if "gain" in self._parts else torch.zeros_like(along[:, 0])
        lost = along @ (self._scale.square() * self._moves)
        return (gained - lost) * self._metric.inverse, (gained + lost) * self._metric.inverse

    def centred(self, a: Tensor) -> Tensor:
        """Return inputs that make G_i centred where the map centres it."""
        return a - a.mean(2, keepdim=True) if self._standardised else a

    def squares(self, g: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return the squared norms of some outputs' gradients, and those before anything cancels.

        Args:
            g: G_i of these outputs, by centred inputs, (samples, outputs, K); is overwritten.
            part: these outputs.

        Returns:
            float64, shape (samples,) each.
        """
        samples, outputs, inputs = g.shape
        weights = slice(part.start * inputs, part.stop * inputs)
        if not self._standardised:
            value = self._squares(g.view(samples, -1), weights)
            return value, value
        direction, moves = self._direction[part], self._moves[part]
        along = row_sums((g * direction).view(-1, inputs)).view(samples, outputs)
        by_gain = torch.zeros(samples, dtype=torch.float64, device=g.device)
        if "gain" in self._parts:
            gains = self._parts["gain"]
            by_gain = self._squares(
                along.to(g.dtype), slice(gains.start + part.start, gains.start + part.stop)
            )
        if self._metric.centre is None:
            rows = row_sums(g.square_().view(-1, inputs)).view(samples, outputs)
            scales = self._scale[part].double().square() * self._metric.inverse
            before = rows @ scales + by_gain
            return before - along.square_() @ (scales * moves), before
        g.addcmul_(direction, along.to(g.dtype).mul_(moves).unsqueeze(2), value=-1)
        g.mul_(self._scale[part].unsqueeze(1))
        value = self._squares(g.view(samples, -1), weights).add_(by_gain)
        return value, value

    def _squares(self, g: Tensor, part: slice) -> Tensor:
        """Return the squared norm of g - m over some coordinates; may overwrite g."""
        metric = self._metric
        if metric.centre is None:
            return row_sums(g.square()).mul_(metric.inverse)
        squares = (g - metric.centre[part]).square_()
        return row_sums(squares.mul_(metric.inverse[part]))
