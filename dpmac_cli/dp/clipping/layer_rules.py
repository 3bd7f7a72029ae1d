"""Per-sample gradient rules by layer type: from the inputs and output gradients of its calls.

A rule is a function of a module and a :class:`Use` of it, which returns the gradient of each sample
w.r.t. each parameter. It is registered by :func:`rule`. Every rule needs a case of the oracle test,
tests/dp/test_clipped_sums.py, which compares it with autograd on one record at a time.
"""

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
#: Names of parameters that rules know. A layer with another one is not recorded.
KNOWN = frozenset({"weight", "bias", "gain"})


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the gradient rule of some layer types.

    The function gets a module and a :class:`Use` of it, and returns the gradients of each sample by
    parameter name, shape (samples, ...) each, or outer products for a weight.

    A layer with a rule must act on each row of its input alone: a sequence of such layers runs on a
    whole chunk at once, without vmap, and then no trial compares the rule with autograd.

    Args:
        kinds: exact types. A subclass has no rule, because its forward may be another one. A type
            that has a rule gets the new one.

    Returns:
        The decorator, which returns its function unchanged.
    """

    def register(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = function
        return function

    return register


@dataclass(frozen=True)
class Use:
    """Inputs and output gradients of one call of a module for a chunk of samples.

    Attributes:
        module: the module that was called.
        inputs: its input, shape (samples * rows, ...); see :meth:`of`.
        grad_output: gradients of the loss w.r.t. its output, shape (samples * rows, ...).
        rows: number of adjacent rows per sample, whose gradients are summed.
        computed: weights of the call, if the layer computes them; ``module`` is then a plain layer.

    Example:
        >>> inputs, grad_output = torch.ones(4, 3), torch.ones(4, 2)  # of four samples
        >>> use = Use.of(nn.Linear(3, 2), inputs, grad_output)
        >>> use.samples, use.rows, use.inputs.shape
        (4, 1, torch.Size([4, 1, 3]))
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
        """Return the use of a module by a chunk, of which each sample called it once.

        Layers on the last dimensions get shape (samples, positions, ...), so that a sample has one
        row. Convolutions, norms of channels and all other layers get shape (samples * rows,
        channels, ...): one row for each of the dimensions before the channels.

        Args:
            module: a module with a rule.
            inputs: its input, shape (samples, ...); for a layer with channels (samples, rows,
                channels, ...), as the network calls it with one or more rows of each sample.
            grad_output: gradient of the loss w.r.t. its output, with the same first dimensions.
            computed: weights of the call, if the layer computes them; None for others.
        """
        samples = len(grad_output)
        if isinstance(module, nn.Linear):
            a = inputs.reshape(samples, -1, module.in_features)
            g = grad_output.reshape(samples, -1, module.out_features)
        elif isinstance(module, nn.Embedding):
            a = inputs.flatten(1)
            g = grad_output.reshape(samples, -1, module.embedding_dim)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            shape = (samples, -1, *module.normalized_shape)
            a = inputs.reshape(shape)
            g = grad_output.reshape(shape)
        else:
            dims = inputs.ndim - 2
            if isinstance(module, CONVOLUTIONS):
                dims = len(module.kernel_size) + 1
            a = inputs.flatten(0, -1 - dims)
            g = grad_output.flatten(0, -1 - dims)
        return Use(module, a.contiguous(), g.contiguous(), len(g) // samples, computed)

    @property
    def samples(self) -> int:
        """Return the number of samples of the chunk."""
        return len(self.grad_output) // self.rows

    def part(self, samples: slice) -> "Use":
        """Return the use by some of the samples; its tensors are views.

        Args:
            samples: ``slice(begin, end)`` of the samples; no step.
        """
        rows = slice(samples.start * self.rows, samples.stop * self.rows)
        return replace(
            self,
            inputs=self.inputs[rows],
            grad_output=self.grad_output[rows],
        )

    def double(self) -> "Use":
        """Return the same use, whose inputs and gradients are in float64."""
        return replace(
            self,
            inputs=self.inputs.double(),
            grad_output=self.grad_output.double(),
        )


def in_groups(uses: Sequence[Use], samples: int) -> Iterator[list[Use]]:
    """Yield a layer's uses for one group of samples after the other.

    Args:
        uses: uses by all samples of a chunk, at least one.
        samples: number of samples of a group, at least 1; the last group may have fewer.

    Yields:
        As many uses as there are, each by the samples of the group; views.
    """
    for begin in range(0, uses[0].samples, samples):
        some = slice(begin, begin + samples)
        yield [use.part(some) for use in uses]


def instantiate(layer: Layer, uses: Sequence[Use], samples: int | None = None) -> ByParameter:
    """Return a layer's per-sample gradients, written out, summed over uses and rows of a sample.

    Args:
        layer: the layer, whose modules have a rule.
        uses: its uses by all samples of a chunk, at least one.
        samples: number of samples to process at a time, so that pieces stay in a cache; None for
            all. The result does not depend on it, except for rounding.

    Returns:
        One tensor for each parameter, in theta's order, shape (samples, size of the parameter).
    """
    grad_output = uses[0].grad_output
    through = None
    if type(layer.module) is StandardisedConv2d:
        through = Standardisation.of(layer.module, grad_output.dtype)
    total = uses[0].samples
    step = samples or total
    columns = [grad_output.new_empty(total, p.numel()) for p in layer.parameters.values()]
    begin = 0
    for first, *others in in_groups(uses, step):
        rows = slice(begin, begin + step)
        sums = [column[rows] for column in columns]
        _write(layer, first, through, sums)
        for use in others:
            terms = [torch.empty_like(part) for part in sums]
            _write(layer, use, through, terms)
            for part, term in zip(sums, terms, strict=True):
                part.add_(term)
        begin += step
    return columns


def _write(layer: Layer, use: Use, through: Standardisation | None, out: ByParameter) -> None:
    """Write the gradients of one use to ``out``, one tensor for each parameter of the layer."""
    apply_rule = RULES[type(use.module)]
    gradients = apply_rule(use.module, use)
    if through is not None:
        by_kernel = _written_out(gradients["weight"])
        gradients = {**gradients, **through(by_kernel)}
    if use.computed is not None:
        by_weight = {name: _written_out(gradient) for name, gradient in gradients.items()}
        gradients = use.computed.gradients(by_weight)
    for name, to in zip(layer.parameters, out, strict=True):
        gradient = gradients[name]
        if isinstance(gradient, OuterProducts):
            outputs = gradient.grad_output.shape[2]
            gradient.weights(out=to.view(len(to), outputs, -1))
        else:
            to.copy_(gradient.reshape(len(to), -1))


def _written_out(gradient: Tensor | OuterProducts) -> Tensor:
    """Return the gradient of each sample as a tensor, (samples, ...)."""
    return gradient if isinstance(gradient, Tensor) else gradient.weights()


@rule(nn.Linear)
def _linear(_: nn.Linear, use: Use) -> Gradients:
    """Return sum_t delta_it a_it^T, and sum_t delta_it for the bias.

    With delta_it the output gradient of sample i at position t, and a_it the input there.
    """
    weight = OuterProducts(use.grad_output, use.inputs, bias=False)
    bias = use.grad_output.sum(1)
    return {"weight": weight, "bias": bias}


@rule(*CONVOLUTIONS, StandardisedConv2d)
def _convolution(conv: Any, use: Use) -> Gradients:
    """Return gradients w.r.t. a convolution's kernel, (samples, out, in, *kernel size).

    Uses one matrix product of output gradients and patches per sample, or a convolution in groups,
    one for each sample, whichever is faster for the layer's shape.
    """
    bias = _over_positions(use.grad_output, use.rows)
    if conv.groups == 1 and not _grouped_is_faster(conv, use.grad_output):
        by_position = gradients_by_position(conv, use.grad_output, use.rows)
        patches = inputs_by_position(conv, use.inputs, use.rows)
        return {"weight": OuterProducts(by_position, patches, bias=False), "bias": bias}
    samples = use.samples
    outputs, *kernel = conv.weight.shape
    a = _samples_as_channels(use.inputs, use.rows)
    g = _samples_as_channels(use.grad_output, use.rows)
    shape = (samples * outputs, *kernel)
    weight = kernel_gradient(conv, a, g, shape, groups=samples * conv.groups)
    return {"weight": weight.reshape(samples, outputs, *kernel), "bias": bias}


def _grouped_is_faster(conv: Any, grad_output: Tensor) -> bool:
    """Return whether a convolution in groups is faster than products of patches."""
    outputs, *kernel = conv.weight.shape
    positions = math.prod(grad_output.shape[2:])
    if math.prod(kernel) > FEW_INPUTS and positions > FEW_POSITIONS:
        return True
    in_blocks = outputs % CHANNELS == 0 and kernel[0] % CHANNELS == 0
    return in_blocks and not grad_output.is_cuda


def _samples_as_channels(by_row: Tensor, rows: int) -> Tensor:
    """Return (samples * rows, channels, ...) as (rows, samples * channels, ...)."""
    by_sample = by_row.reshape(-1, rows, *by_row.shape[1:])
    return by_sample.transpose(0, 1).flatten(1, 2)


@rule(nn.GroupNorm, ConstantNorm)
def _channel_norm(norm: Any, use: Use) -> Gradients:
    """Return gradients of a norm with a weight and a bias for each channel.

    For y = weight x-hat + bias, they are the sums over positions of delta x-hat, and of delta.
    """
    if isinstance(norm, ConstantNorm):
        normal = norm.normalised(use.inputs)
    else:
        normal = group_norm(use.inputs, norm.num_groups, eps=norm.eps)
    weight = _over_positions(use.grad_output * normal, use.rows)
    bias = _over_positions(use.grad_output, use.rows)
    return {"weight": weight, "bias": bias}


@rule(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(norm: Any, use: Use) -> Gradients:
    """Return gradients of a norm over the last dimensions, centred or not.

    For y = weight x-hat + bias, they are the sums over positions of delta x-hat, and of delta.
    """
    normalise = layer_norm if isinstance(norm, nn.LayerNorm) else rms_norm
    normal = normalise(use.inputs, norm.normalized_shape, eps=norm.eps)
    weight = (use.grad_output * normal).sum(1)
    bias = use.grad_output.sum(1)
    return {"weight": weight, "bias": bias}


@rule(nn.Embedding, Lookups)
def _embedding(table: Any, use: Use) -> Gradients:
    """Return rows of grad_output, summed over repeated tokens of a sample.

    The row of the padding has no gradient.
    """
    samples = use.samples
    tokens, width = table.weight.shape
    g = use.grad_output.new_zeros(samples * tokens, width)
    first_rows = torch.arange(samples, device=g.device).mul_(tokens).unsqueeze(1)
    rows = (first_rows + use.inputs).flatten()
    g.index_add_(0, rows, use.grad_output.reshape(-1, width))
    g = g.view(samples, tokens, width)
    if table.padding_idx is not None:
        g[:, table.padding_idx] = 0
    return {"weight": g}


def _over_positions(by_row: Tensor, rows: int) -> Tensor:
    """Sum (samples * rows, channels, ...) to (samples, channels)."""
    summed = by_row
    if by_row.ndim > 2:
        positions = tuple(range(2, by_row.ndim))
        summed = by_row.sum(positions)
    samples = len(by_row) // rows
    return summed.reshape(samples, rows, -1).sum(1)
