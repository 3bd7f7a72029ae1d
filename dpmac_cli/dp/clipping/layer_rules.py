"""Per-sample gradient rules by layer type, and torch.func.vmap for other layers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import group_norm, instance_norm, layer_norm, rms_norm

from dpmac_cli.dp.clipping.custom_layers import ConstantNorm, Standardisation, StandardisedConv2d
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.unfold import (
    gradients_by_position,
    has_rows,
    inputs_by_position,
    kernel_gradient,
)
from dpmac_cli.dp.vmap_rules import without_own_rules
from dpmac_cli.errors import ModelError

#: Inputs per output of a convolution, and positions of an image, up to which products of patches
#: are faster than a grouped convolution.
FEW_INPUTS = 64
FEW_POSITIONS = 256

#: Layers whose gradients are sums of products of output gradients and patches of inputs.
CONVOLUTIONS = frozenset({nn.Conv1d, nn.Conv2d, nn.Conv3d, StandardisedConv2d})

#: Gradients w.r.t. a layer's parameters, by parameter name, each (samples, ...).
Gradients = Mapping[str, Tensor | OuterProducts]
#: Gradients of samples in theta's order, (samples, d_layer), as tensors side by side: one for each
#: parameter, so that products are written to dense memory.
ByParameter = Sequence[Tensor]


@dataclass(frozen=True)
class Call:
    """Arguments and output of one call of a layer, without its tensors."""

    positional: tuple[Any, ...] = (Tensor,)  # with the class Tensor instead of tensors
    named: Mapping[str, Any] = field(default_factory=dict)
    output: int | None = None  # index of the output that the use refers to, if there are several

    def again(
        self, module: nn.Module, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Repeat the call with other parameters and inputs; return the output at ``output``.

        Hooks of the module do not run: the inputs are those after, the outputs those before them.
        """
        given = iter(inputs)
        arguments = tuple(next(given) if a is Tensor else a for a in self.positional)
        values = {f"module.{name}": value for name, value in parameters.items()}
        result: Any = functional_call(_Unhooked(module), values, arguments, dict(self.named))
        chosen: Tensor = result if self.output is None else result[self.output]
        return chosen


class _Unhooked(nn.Module):
    """A module without its own hooks; those of modules inside it are part of its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module.forward(*inputs, **named)


@dataclass(frozen=True)
class Use:
    """Inputs and output gradients of one use of a layer in a forward pass.

    A parameter with one copy per row has no inputs; delta are its gradients, row by row.
    """

    inputs: tuple[Tensor, ...]  # each (samples * views, ...)
    delta: Tensor  # gradients of the loss w.r.t. the output, (samples * views, ...)
    call: Call = Call()
    user: Layer | None = None  # the layer that was called, if several share the parameter

    def part(self, rows: slice) -> "Use":
        """Return a slice of the rows."""
        return Use(tuple(x[rows] for x in self.inputs), self.delta[rows], self.call, self.user)


def in_groups(uses: Sequence[Use], views: int, samples: int) -> Iterator[list[Use]]:
    """Yield the uses of ``samples`` samples at a time."""
    rows = samples * views
    for begin in range(0, len(uses[0].delta), rows):
        yield [use.part(slice(begin, begin + rows)) for use in uses]


def instantiate(
    layer: Layer, uses: Sequence[Use], views: int = 1, samples: int | None = None
) -> ByParameter:
    """Return gradients summed over uses and views, shape (samples, numbers) for each parameter.

    They are instantiated for a number of ``samples`` at a time, by default for all.
    """
    delta, through = uses[0].delta, None
    if type(layer.module) is StandardisedConv2d:
        through = Standardisation.of(layer.module, delta.dtype)
    total = len(delta) // views
    samples = samples or total
    columns = [delta.new_empty(total, p.numel()) for p in layer.parameters.values()]
    groups = in_groups(uses, views, samples)
    for begin, (first, *others) in zip(range(0, total, samples), groups, strict=True):
        to = [column[begin : begin + samples] for column in columns]
        _write(layer, first, views, through, to)
        for use in others:
            more = [torch.empty_like(part) for part in to]
            _write(layer, use, views, through, more)
            for part, term in zip(to, more, strict=True):
                part.add_(term)
    return columns


def has_plain_use(layer: Layer, use: Use) -> bool:
    """Return whether a layer has one input and one output, and no parameters that rules ignore."""
    known = layer.parameters.keys() <= {"weight", "bias", "gain"}
    return use.call == Call() and known and not layer.direct


def _write(
    layer: Layer, use: Use, views: int, through: Standardisation | None, out: ByParameter
) -> None:
    """Write the gradients of one use to ``out``."""
    layer = use.user or layer
    if layer.direct:
        by_sample = use.delta.reshape(len(out[0]), views, -1).sum(1)
        parts = torch.split(by_sample, [to.shape[1] for to in out], 1)
        for to, part in zip(out, parts, strict=True):
            to.copy_(part)
        return
    gradients = _gradients(layer, use, views, through)
    for name, to in zip(layer.parameters, out, strict=True):
        found = gradients[name]
        if isinstance(found, OuterProducts):
            found.weights(to.view(len(to), found.delta.shape[2], -1))
        else:
            to.copy_(found.reshape(len(to), -1))


def _gradients(layer: Layer, use: Use, views: int, through: Standardisation | None) -> Gradients:
    """Return the gradients of one use, by the layer's rule or else by vmap."""
    rule = LAYER_RULES.get(type(layer.module)) if has_plain_use(layer, use) else None
    gradients = rule(layer, use.inputs[0], use.delta, views) if rule else None
    if gradients is None:
        return _by_vmap(layer, use, views)
    if through is None:
        return gradients
    weight = gradients["weight"]
    by_kernel = weight if isinstance(weight, Tensor) else weight.weights()
    return {**gradients, **through(by_kernel)}


def _by_vmap(layer: Layer, use: Use, views: int) -> Gradients:
    """Return gradients of any layer whose outputs for one sample do not depend on the others."""
    values = {n: p.detach().to(use.delta.dtype) for n, p in layer.module.named_parameters()}
    trained = {name: values.pop(name) for name in layer.parameters}

    def one(inputs: tuple[Tensor, ...], delta: Tensor) -> Any:
        def forward(parameters: Mapping[str, Tensor]) -> Tensor:
            return use.call.again(layer.module, {**values, **parameters}, inputs)

        pull_back: Any = vjp(forward, trained)[1]
        return pull_back(delta)[0]

    inputs = tuple(_by_sample(rows, views) for rows in use.inputs)
    try:
        # The other backends have no batching rule.
        with sdpa_kernel(SDPBackend.MATH), without_own_rules():
            gradients: Gradients = vmap(one)(inputs, _by_sample(use.delta, views))
    except RuntimeError as failure:
        if "random" not in str(failure):
            raise
        raise ModelError(
            f"The layer {layer.name or 'of the model itself'} ({type(layer.module).__name__}) "
            "has parameters and draws random numbers in one forward, which cannot be repeated for "
            "per-sample gradients. Construct it with dropout=0, and put nn.Dropout around it."
        ) from None
    return gradients


def _linear(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Sum over positions, including the views of a sample."""
    samples = len(a) // views
    a, delta = (rows.reshape(samples, -1, rows.shape[-1]) for rows in (a, delta))
    bias = delta.sum(1)
    if "weight" not in layer.parameters:
        return {"bias": bias}
    return {"weight": OuterProducts(delta, a, bias=False), "bias": bias}


def _convolution(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    """Return gradients w.r.t. a convolution's kernel, (samples, out, in, *kernel size).

    Uses one matrix product per sample, or a grouped convolution over views; None if neither fits.
    """
    conv: Any = layer.module
    if not has_rows(conv, a):
        return None
    samples, bias = len(a) // views, _over_positions(delta, views)
    outputs, *kernel = conv.weight.shape
    few = math.prod(kernel) <= FEW_INPUTS or math.prod(delta.shape[2:]) <= FEW_POSITIONS
    if conv.groups == 1 and few:
        by_position = gradients_by_position(conv, delta, views)
        products = OuterProducts(by_position, inputs_by_position(conv, a, views), bias=False)
        return {"weight": products, "bias": bias}
    # (views, samples * channels, ...) each: one group of channels per sample.
    a, g = (_by_sample(rows, views).transpose(0, 1).flatten(1, 2) for rows in (a, delta))
    shape, groups = (samples * outputs, *kernel), samples * conv.groups
    weight = kernel_gradient(conv, a, g, shape, groups).reshape(samples, outputs, *kernel)
    return {"weight": weight, "bias": bias}


def _channel_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Return gradients of a norm with a weight and a bias for each channel."""
    norm: Any = layer.module
    constant = isinstance(norm, ConstantNorm)
    normal = norm.normalised(a) if constant else group_norm(a, norm.num_groups, eps=norm.eps)
    return {"weight": _over_positions(delta * normal, views), "bias": _over_positions(delta, views)}


def _instance_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    """Return None for inputs without a dimension of samples, and with running statistics."""
    norm: Any = layer.module
    if norm.running_mean is not None or a.ndim < 3 or isinstance(norm, _PLANES.get(a.ndim, ())):
        return None
    product = delta * instance_norm(a, eps=norm.eps)
    return {"weight": _over_positions(product, views), "bias": _over_positions(delta, views)}


#: Instance norms, by the number of dimensions of a sample.
_PLANES = {3: (nn.InstanceNorm2d,), 4: (nn.InstanceNorm3d,)}


def _layer_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Return gradients of a norm over the last dimensions, centred or not."""
    norm: Any = layer.module
    shape = (len(a) // views, -1, *norm.normalized_shape)
    normalise = layer_norm if isinstance(norm, nn.LayerNorm) else rms_norm
    product = delta * normalise(a, norm.normalized_shape, eps=norm.eps)
    return {"weight": product.reshape(shape).sum(1), "bias": delta.reshape(shape).sum(1)}


def _prelu(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Sum over positions, and over channels too if they share their slope."""
    product = delta * a.clamp(max=0)
    if layer.parameters["weight"].numel() > 1:
        return {"weight": _over_positions(product, views)}
    return {"weight": product.reshape(len(a) // views, -1).sum(1)}


def _embedding_bag(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    """Give each token of a bag its part of the bag's gradient; None for the largest of a bag."""
    table: Any = layer.module
    if table.mode == "max" or a.ndim != 2:
        return None
    by_token = delta.unsqueeze(1).expand(-1, a.shape[1], -1)
    if table.mode == "mean":
        counted = torch.ones_like(a) if table.padding_idx is None else a != table.padding_idx
        by_token = by_token / counted.sum(1).clamp(min=1).view(-1, 1, 1)
    return _embedding(layer, a, by_token, views)


def _embedding(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Return rows of delta, summed over repeated tokens of a sample."""
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


#: Functions that instantiate a layer's gradients, by its exact type; None falls back to vmap.
LAYER_RULES: Mapping[type[nn.Module], Callable[[Layer, Tensor, Tensor, int], Gradients | None]] = {
    nn.Linear: _linear,
    **dict.fromkeys(CONVOLUTIONS, _convolution),  # w.r.t. W-hat, if it is standardised
    nn.GroupNorm: _channel_norm,
    ConstantNorm: _channel_norm,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    nn.PReLU: _prelu,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
}


def _by_sample(rows: Tensor, views: int) -> Tensor:
    """Reshape (samples * views, ...) to (samples, views, ...)."""
    return rows.reshape(len(rows) // views, views, *rows.shape[1:])


def _over_positions(rows: Tensor, views: int) -> Tensor:
    """Sum (samples * views, channels, ...) to (samples, channels)."""
    by_view = rows.sum(tuple(range(2, rows.ndim))) if rows.ndim > 2 else rows
    return _by_sample(by_view, views).sum(1)
