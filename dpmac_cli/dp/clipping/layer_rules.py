"""Rules that instantiate per-sample gradients, by layer type; torch.func.vmap for other layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import group_norm, layer_norm, unfold
from torch.nn.grad import conv2d_weight

from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.modules import LEAST_SQUARE, StandardisedConv2d

#: Inputs per output of a convolution up to which unfolding the image is faster (27: half the time;
#: 288: twice the time).
UNFOLDED = 64

#: Gradients by a layer's parameters, by name: each (samples, ...).
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Call:
    """Everything about one call of a layer except its tensors."""

    positional: tuple[Any, ...] = (Tensor,)  # with the class Tensor in place of tensors
    named: Mapping[str, Any] = field(default_factory=dict)
    output: int | None = None  # index of the output that the use is about, if there are several

    def again(self, module: nn.Module, parameters: Gradients, inputs: Sequence[Tensor]) -> Tensor:
        """Repeat the call with other parameters and inputs; return the output at ``output``."""
        given = iter(inputs)
        arguments = tuple(next(given) if a is Tensor else a for a in self.positional)
        result: Any = functional_call(module, dict(parameters), arguments, dict(self.named))
        chosen: Tensor = result if self.output is None else result[self.output]
        return chosen


@dataclass(frozen=True)
class Use:
    """Inputs and output gradients of one use of a layer in a forward pass."""

    inputs: tuple[Tensor, ...]  # each (samples * views, ...)
    delta: Tensor  # gradients of the loss by the output, (samples * views, ...)
    call: Call = Call()

    def part(self, rows: slice) -> "Use":
        """Return some of the rows."""
        return Use(tuple(x[rows] for x in self.inputs), self.delta[rows], self.call)


def instantiate(layer: Layer, uses: Sequence[Use], views: int = 1) -> Tensor:
    """Return gradients summed over uses and views, in theta's order, (samples, d_layer)."""
    first, *others = uses
    g = _instantiate(layer, first, views)
    for use in others:
        g += _instantiate(layer, use, views)
    return g


def is_plain(layer: Layer, use: Use) -> bool:
    """Return whether a layer has one input and one output, and no parameters that rules ignore."""
    return use.call == Call() and layer.parameters.keys() <= {"weight", "bias", "gain"}


def _instantiate(layer: Layer, use: Use, views: int) -> Tensor:
    rule = RULES.get(type(layer.module)) if is_plain(layer, use) else None
    found = rule(layer, use.inputs[0], use.delta, views) if rule else None
    gradients = found or _by_vmap(layer, use, views)
    samples = len(use.delta) // views
    return torch.cat([gradients[name].reshape(samples, -1) for name in layer.parameters], 1)


def _by_vmap(layer: Layer, use: Use, views: int) -> Gradients:
    """Gradients of any layer whose outputs for one sample do not depend on the others."""
    values = {n: p.detach().to(use.delta.dtype) for n, p in layer.module.named_parameters()}
    trained = {name: values.pop(name) for name in layer.parameters}

    def one(inputs: tuple[Tensor, ...], delta: Tensor) -> Gradients:
        def forward(parameters: Gradients) -> Tensor:
            return use.call.again(layer.module, {**values, **parameters}, inputs)

        pull_back: Any = vjp(forward, trained)[1]
        gradients: Gradients = pull_back(delta)[0]
        return gradients

    inputs = tuple(_by_sample(rows, views) for rows in use.inputs)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
        gradients: Gradients = vmap(one)(inputs, _by_sample(use.delta, views))
    return gradients


def _linear(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Sum over positions, including the views of a sample."""
    samples = len(a) // views
    a, delta = (rows.reshape(samples, -1, rows.shape[-1]) for rows in (a, delta))
    bias = delta.sum(1)
    if "weight" not in layer.parameters:
        return {"bias": bias}
    return {"weight": torch.bmm(delta.transpose(1, 2), a), "bias": bias}


def _conv2d(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    weight = _kernel_gradients(layer.module, a, delta, views)
    return None if weight is None else {"weight": weight, "bias": _over_positions(delta, views)}


def _kernel_gradients(conv: Any, a: Tensor, delta: Tensor, views: int) -> Tensor | None:
    """Gradients by the kernel that a convolution used, (samples, out, in, height, width).

    By one matrix product per sample, or a grouped convolution over views; None if neither fits.
    """
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str) or a.ndim != 4:
        return None
    samples = len(a) // views
    outputs, *kernel = conv.weight.shape
    if conv.groups == 1 and math.prod(kernel) <= UNFOLDED:
        patches = unfold(a, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        g, a = (_behind_channels(rows, views) for rows in (delta.flatten(2), patches))
        weight = torch.bmm(g, a.transpose(1, 2))
    else:
        a, g = (_before_samples(rows, views) for rows in (a, delta))
        shape, groups = (samples * outputs, *kernel), samples * conv.groups
        options = (conv.stride, conv.padding, conv.dilation, groups)
        weight = conv2d_weight(a, shape, g, *options)  # type: ignore[no-untyped-call]
    return weight.reshape(samples, outputs, *kernel)


def _standardised_conv2d(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    by_kernel = _kernel_gradients(layer.module, a, delta, views)
    if by_kernel is None:
        return None
    gradients = through_standardisation(layer.module, by_kernel)
    return {**gradients, "bias": _over_positions(delta, views)}


def through_standardisation(conv: Any, by_kernel: Tensor) -> dict[str, Tensor]:
    """Turn gradients by W-hat into those by a StandardisedConv2d's weight and gain.

    W-hat = gain z / ||z|| with z = W - mean, row by row. The map is linear.

    Args:
        conv: the layer.
        by_kernel: (samples, out, in, height, width); is overwritten.
    """
    g = by_kernel.flatten(2)
    direction, scale = conv.standardised(torch.float64)  # z / ||z||, 1 / ||z||
    moves = scale.square() * LEAST_SQUARE < 1  # otherwise ||z|| is treated as a constant
    scale = (conv.gain.unsqueeze(1) * scale).to(g.dtype)
    direction = direction.to(g.dtype)
    along = (g * direction).sum(2, keepdim=True)
    g.addcmul_(direction, along * moves, value=-1)
    weight = g.sub_(g.mean(2, keepdim=True)).mul_(scale)
    return {"weight": weight, "gain": along}


def _group_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    norm: Any = layer.module
    product = delta * group_norm(a, norm.num_groups, eps=norm.eps)
    return {"weight": _over_positions(product, views), "bias": _over_positions(delta, views)}


def _layer_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    norm: Any = layer.module
    shape = (len(a) // views, -1, *norm.normalized_shape)
    product = delta * layer_norm(a, norm.normalized_shape, eps=norm.eps)
    return {"weight": product.reshape(shape).sum(1), "bias": delta.reshape(shape).sum(1)}


def _embedding(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Rows of delta, added up where a sample has a token more than once."""
    table: Any = layer.module
    samples = len(a) // views
    tokens, width = table.weight.shape
    g = delta.new_zeros(samples * tokens, width)
    rows = torch.arange(samples, device=a.device).mul_(tokens).unsqueeze(1)
    g.index_add_(0, (rows + a.reshape(samples, -1)).flatten(), delta.reshape(-1, width))
    g = g.view(samples, tokens, width)
    if table.padding_idx is not None:
        g[:, table.padding_idx] = 0
    return {"weight": g}


#: How a layer's gradients are instantiated, by its exact type; None falls back on vmap.
RULES: Mapping[type[nn.Module], Callable[[Layer, Tensor, Tensor, int], Gradients | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    StandardisedConv2d: _standardised_conv2d,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}


def _by_sample(rows: Tensor, views: int) -> Tensor:
    """(samples * views, ...) as (samples, views, ...)."""
    return rows.reshape(len(rows) // views, views, *rows.shape[1:])


def _behind_channels(rows: Tensor, views: int) -> Tensor:
    """(samples * views, channels, positions) as (samples, channels, views * positions)."""
    return _by_sample(rows, views).transpose(1, 2).flatten(2)


def _before_samples(rows: Tensor, views: int) -> Tensor:
    """(samples * views, channels, ...) as (views, samples * channels, ...)."""
    return _by_sample(rows, views).transpose(0, 1).flatten(1, 2)


def _over_positions(rows: Tensor, views: int) -> Tensor:
    """(samples * views, channels, ...) summed to (samples, channels)."""
    by_view = rows.sum(tuple(range(2, rows.ndim))) if rows.ndim > 2 else rows
    return _by_sample(by_view, views).sum(1)
