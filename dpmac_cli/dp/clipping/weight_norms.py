"""Norms of the gradient w.r.t. a layer's weight in the layer's metric, a few rows at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import conv2d

from dpmac_cli.dp.clipping.custom_layers import Standardisation, StandardisedConv2d
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.norms import ROW, LayerMetric, row_squares, row_sums


class Kernel:
    """Metric of one layer, and the map from G_i to gradients w.r.t. its parameters.

    The map is linear: the identity, or that of :class:`Standardisation`.
    """

    def __init__(self, layer: Layer, metric: LayerMetric, dtype: torch.dtype) -> None:
        self.metric, self._parts = metric, layer.slices
        self._module: Any = layer.module
        self._through, self.extra = None, 0  # terms of the sums in the map, for its rounding
        if isinstance(layer.module, StandardisedConv2d):
            self._through = Standardisation.of(layer.module, dtype)
            self.extra = min(ROW, layer.module.weight[0].numel())
        self._largest = self._largest_inverse()

    def reach(self, delta: Tensor, squares: Tensor) -> Tensor:
        """Return R_i^2 or an upper bound, float64, shape (samples,).

        ``delta`` is (samples, T, O); ``squares`` are squared norms of a, float64, (samples, T).
        """
        root = self._largest.sqrt()
        if root.ndim == 0:
            by_delta: Tensor = vector_norm(delta, dim=2, dtype=torch.float64).mul_(root)
        else:
            by_delta = vector_norm(delta * root, dim=2)
        by_input = (squares + float("bias" in self._parts)).sqrt_()
        return (by_delta * by_input).sum(1).square_()

    def _largest_inverse(self) -> Tensor:
        """Return the largest A applied to an output's gradients in the map, float64, (O,)."""
        by_name = {}
        for name, part in self._parts.items():
            inverse = self.metric.inverse
            if self.metric.centre is not None:
                inverse = inverse[part].view(len(self._module.weight), -1).amax(1)
            by_name[name] = inverse.double()
        weights = by_name["weight"]
        if self._through is not None:
            weights = weights * self._through.scale.double().square()
        if "bias" in by_name:
            weights = torch.maximum(weights, by_name["bias"])
        return weights + by_name["gain"] if "gain" in by_name else weights

    def scaled(self, delta: Tensor) -> Tensor:
        """Return delta for G_i w.r.t. the weight instead of W-hat, (samples, T, O)."""
        return delta if self._through is None else delta * self._through.scale

    def along(self, uses: Sequence[Use]) -> tuple[Tensor, Tensor] | None:
        """Return the change of norms in a ball by the map of :class:`Standardisation`, if any.

        The first result is the contribution of the gain minus that of the direction of W, the
        second is their sum; float64, shape (samples,) each.
        """
        conv, through, by_use = self._module, self._through, []
        if through is None:
            return None
        for use in uses:
            a = use.inputs
            direction = through.direction.to(a.dtype).view_as(conv.weight)
            output = conv2d(a, direction, None, conv.stride, conv.padding, conv.dilation)
            by_row = output.mul_(use.delta).flatten(2).sum(2, dtype=torch.float64)
            by_use.append(by_row.view(use.samples, use.rows, -1).sum(1))
        along = torch.stack(by_use).sum(0).square_()
        gained = along.sum(1) if "gain" in self._parts else torch.zeros_like(along[:, 0])
        lost = along @ (through.scale.square() * through.moves)
        return (gained - lost) * self.metric.inverse, (gained + lost) * self.metric.inverse

    def centred(self, a: Tensor) -> Tensor:
        """Return inputs for which G_i is centred, if the map centres it."""
        return a if self._through is None else a - a.mean(2, keepdim=True)

    def squares(self, g: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Return squared norms of some outputs' gradients, and their values before cancellation.

        ``g`` are G_i of these outputs for centred inputs, (samples, outputs, K). Overwritten.
        The norms are float64, shape (samples,).
        """
        samples, outputs, inputs = g.shape
        flat = g.view(samples, -1)
        weights = slice(part.start * inputs, part.stop * inputs)
        if self._through is None:
            value = self.metric.squares(flat, weights, out=flat)
            return value, value
        direction, moves = self._through.direction[part], self._through.moves[part]
        scale = self._through.scale[part]
        along = row_sums((g * direction).view(-1, inputs)).view(samples, outputs)
        by_gain = torch.zeros(samples, dtype=torch.float64, device=g.device)
        if "gain" in self._parts:
            gains = self._parts["gain"]
            chosen = slice(gains.start + part.start, gains.start + part.stop)
            by_gain = self.metric.squares(along.to(g.dtype), chosen)
        if self.metric.centre is None:
            rows = row_squares(g.view(-1, inputs)).view(samples, outputs)
            scales = scale.double().square() * self.metric.inverse
            before = rows @ scales + by_gain
            return before - along.square_() @ (scales * moves), before
        g.addcmul_(direction, along.to(g.dtype).mul_(moves).unsqueeze(2), value=-1)
        g.mul_(scale.unsqueeze(1))
        value = self.metric.squares(flat, weights, out=flat).add_(by_gain)
        return value, value
