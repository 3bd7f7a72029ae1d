"""Per-sample gradient rules by layer type: from the inputs and output gradients of its calls."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm, rms_norm

from dpmac_cli.dp.clipping.computed_weights import Computed
from dpmac_cli.dp.clipping.custom_layers import (
    ConstantNorm,
    Lookups,
    Standardisation,
    StandardisedConv2d,
)
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.unfold import (
    gradients_by_position,
    inputs_by_position,
    kernel_gradient,
)

#: Inputs per output of a convolution, and positions of an image, up to which products of patches
#: are faster than a grouped convolution.
FEW_INPUTS = 64
FEW_POSITIONS = 256
#: Channels that oneDNN computes at a time. A grouped convolution of multiples of them is faster
#: than products of patches (1.1 to 1.9 times on an AMD EPYC, Zen 5, with AVX2 and AVX-512).
CHANNELS = 16

#: Layers whose gradients are sums of products of output gradients and patches of inputs.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: Gradients w.r.t. a layer's parameters, by parameter name, each (samples, ...).
Gradients = Mapping[str, Tensor | OuterProducts]
#: Gradients of samples in theta's order, (samples, d_layer), as tensors side by side: one for each
#: parameter, so that products are written to dense memory.
ByParameter = Sequence[Tensor]
#: Instantiates the gradients of one use of a module.
Rule = Callable[[Any, "Use"], Gradients]

#: Rules by exact type.
RULES: dict[type[nn.Module], Rule] = {}
#: Names of parameters that rules know.
KNOWN = frozenset({"weight", "bias", "gain"})


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register a function as the rule of layer types."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


@dataclass(frozen=True)
class Use:
    """Inputs and output gradients of one call of a module for a chunk of samples.

    Attributes:
        module: the module that was called.
        inputs: its input, shape (samples * rows, ...).
        grad_output: gradients of the loss w.r.t. its output, shape (samples * rows, ...).
        rows: number of adjacent rows per sample, whose gradients are summed.
        computed: weights of the call, if the layer computes them; ``module`` is then a plain layer.
    """

    module: nn.Module
    inputs: Tensor
    grad_output: Tensor
    rows: int = 1
    computed: Computed | None = None

    @staticmethod
    def of(
        module: Any, inputs: Tensor, grad_output: Tensor, computed: Computed | None = None
    ) -> "Use":
        """Return the use of a module, given one call per sample: tensors (samples, ...) each."""
        samples = len(grad_output)
        if isinstance(module, nn.Linear):
            wide, narrow = module.out_features, module.in_features
            by_row = inputs.reshape(samples, -1, narrow), grad_output.reshape(samples, -1, wide)
        elif isinstance(module, nn.Embedding):
            by_row = inputs.flatten(1), grad_output.reshape(samples, -1, module.embedding_dim)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            shape = (samples, -1, *module.normalized_shape)
            by_row = inputs.reshape(shape), grad_output.reshape(shape)
        else:
            dims = (
                len(module.kernel_size) + 1 if isinstance(module, CONVOLUTIONS) else inputs.ndim - 2
            )
            by_row = inputs.flatten(0, -1 - dims), grad_output.flatten(0, -1 - dims)
        a, g = by_row
        return Use(module, a.contiguous(), g.contiguous(), len(g) // samples, computed)

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return len(self.grad_output) // self.rows

    def part(self, samples: slice) -> "Use":
        """Return a slice of the samples, ``slice(begin, end)``."""
        rows = slice(samples.start * self.rows, samples.stop * self.rows)
        return replace(self, inputs=self.inputs[rows], grad_output=self.grad_output[rows])

    def double(self) -> "Use":
        """Return the use in float64."""
        return replace(self, inputs=self.inputs.double(), grad_output=self.grad_output.double())


def in_groups(uses: Sequence[Use], samples: int) -> Iterator[list[Use]]:
    """Yield the uses of ``samples`` samples at a time."""
    for begin in range(0, uses[0].samples, samples):
        yield [use.part(slice(begin, begin + samples)) for use in uses]


def instantiate(layer: Layer, uses: Sequence[Use], samples: int | None = None) -> ByParameter:
    """Return gradients summed over uses and rows, shape (samples, numbers) for each parameter.

    They are instantiated for a number of ``samples`` at a time, by default for all.
    """
    grad_output, through = uses[0].grad_output, None
    if type(layer.module) is StandardisedConv2d:
        through = Standardisation.of(layer.module, grad_output.dtype)
    total = uses[0].samples
    samples = samples or total
    columns = [grad_output.new_empty(total, p.numel()) for p in layer.parameters.values()]
    groups = in_groups(uses, samples)
    for begin, (first, *others) in zip(range(0, total, samples), groups, strict=True):
        to = [column[begin : begin + samples] for column in columns]
        _write(layer, first, through, to)
        for use in others:
            more = [torch.empty_like(part) for part in to]
            _write(layer, use, through, more)
            for part, term in zip(to, more, strict=True):
                part.add_(term)
    return columns


def _write(layer: Layer, use: Use, through: Standardisation | None, out: ByParameter) -> None:
    """Write the gradients of one use to ``out``."""
    gradients = RULES[type(use.module)](use.module, use)
    if through is not None:
        gradients = {**gradients, **through(_written_out(gradients["weight"]))}
    if use.computed is not None:
        by_weight = {name: _written_out(part) for name, part in gradients.items()}
        gradients = use.computed.gradients(by_weight)
    for name, to in zip(layer.parameters, out, strict=True):
        found = gradients[name]
        if isinstance(found, OuterProducts):
            found.weights(to.view(len(to), found.grad_output.shape[2], -1))
        else:
            to.copy_(found.reshape(len(to), -1))


def _written_out(part: Tensor | OuterProducts) -> Tensor:
    return part if isinstance(part, Tensor) else part.weights()


@rule(nn.Linear)
def _linear(_: nn.Linear, use: Use) -> Gradients:
    """Sum over positions."""
    weight = OuterProducts(use.grad_output, use.inputs, bias=False)
    return {"weight": weight, "bias": use.grad_output.sum(1)}


@rule(*CONVOLUTIONS, StandardisedConv2d)
def _convolution(conv: Any, use: Use) -> Gradients:
    """Return gradients w.r.t. a convolution's kernel, (samples, out, in, *kernel size).

    Uses one matrix product per sample, or a grouped convolution over rows.
    """
    samples, bias = use.samples, _over_positions(use.grad_output, use.rows)
    outputs, *kernel = conv.weight.shape
    many = math.prod(kernel) > FEW_INPUTS and math.prod(use.grad_output.shape[2:]) > FEW_POSITIONS
    whole = not (use.grad_output.is_cuda or outputs % CHANNELS or kernel[0] % CHANNELS)
    if conv.groups == 1 and not many and not whole:
        by_position = gradients_by_position(conv, use.grad_output, use.rows)
        patches = inputs_by_position(conv, use.inputs, use.rows)
        return {"weight": OuterProducts(by_position, patches, bias=False), "bias": bias}
    # (rows, samples * channels, ...) each: one group of channels per sample.
    a, g = (
        t.reshape(samples, use.rows, *t.shape[1:]).transpose(0, 1).flatten(1, 2)
        for t in (use.inputs, use.grad_output)
    )
    shape, groups = (samples * outputs, *kernel), samples * conv.groups
    weight = kernel_gradient(conv, a, g, shape, groups).reshape(samples, outputs, *kernel)
    return {"weight": weight, "bias": bias}


@rule(nn.GroupNorm, ConstantNorm)
def _channel_norm(norm: Any, use: Use) -> Gradients:
    """Return gradients of a norm with a weight and a bias for each channel."""
    constant = isinstance(norm, ConstantNorm)
    a = use.inputs
    normal = norm.normalised(a) if constant else group_norm(a, norm.num_groups, eps=norm.eps)
    weight = _over_positions(use.grad_output * normal, use.rows)
    return {"weight": weight, "bias": _over_positions(use.grad_output, use.rows)}


@rule(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(norm: Any, use: Use) -> Gradients:
    """Return gradients of a norm over the last dimensions, centred or not."""
    normalise = layer_norm if isinstance(norm, nn.LayerNorm) else rms_norm
    normal = normalise(use.inputs, norm.normalized_shape, eps=norm.eps)
    return {"weight": (use.grad_output * normal).sum(1), "bias": use.grad_output.sum(1)}


@rule(nn.Embedding, Lookups)
def _embedding(table: Any, use: Use) -> Gradients:
    """Return rows of grad_output, summed over repeated tokens of a sample."""
    samples, (tokens, width) = use.samples, table.weight.shape
    g = use.grad_output.new_zeros(samples * tokens, width)
    rows = torch.arange(samples, device=g.device).mul_(tokens).unsqueeze(1)
    g.index_add_(0, (rows + use.inputs).flatten(), use.grad_output.reshape(-1, width))
    g = g.view(samples, tokens, width)
    if table.padding_idx is not None:
        g[:, table.padding_idx] = 0
    return {"weight": g}


def _over_positions(by_row: Tensor, rows: int) -> Tensor:
    """Sum (samples * rows, channels, ...) to (samples, channels)."""
    summed = by_row.sum(tuple(range(2, by_row.ndim))) if by_row.ndim > 2 else by_row
    return summed.reshape(len(by_row) // rows, rows, -1).sum(1)
