"""The forms in which a layer's per-sample gradients are held, each the cheapest for its layer.

A form yields whitened norms with a bound on their rounding error, and a weighted sum. For a Linear
layer it is the pair (delta, a) of output gradients and inputs: sample i's gradient is the outer
product delta_i a_i^T, and with A = 1/b^2

    ||(g_i - m)/b||^2 = S1_i - 2 S2_i + S3,     S1_i = sum_jk delta_ij^2 a_ik^2 A_jk,
                                                S2_i = sum_jk delta_ij a_ik (m A)_jk,
                                                S3   = sum_jk m_jk^2 A_jk:

two matrix products for the whole batch and one constant; a ball needs none. Everything else is
instantiated, one row a sample: by a rule for the layer's type, or by torch.func.vmap over that
layer alone. There a sample's gradient may be a sum: over several views of the sample, and over
several uses of the layer in one forward pass.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.linalg import vector_norm
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import group_norm, layer_norm, unfold
from torch.nn.grad import conv2d_weight

from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.modules import LEAST_SQUARE, StandardisedConv2d

#: Numbers that are instantiated at a time on a CPU, but for convolutions: its cache holds them, and
#: of many times as many, made only once, everything takes several times as long.
PIECE = 1 << 20
#: The same elsewhere, where starting an operation takes longer than so many numbers.
DEVICE_PIECE = 1 << 24
#: Terms of a sum that are added up in float32 before it goes on in float64.
ROW = 256
#: Terms of a Linear layer's gradient up to which their pairs cost less than writing it out.
PAIRED = 8
#: Inputs of a convolution's output up to which unfolding the image is faster (27: half the time;
#: 288: twice).
UNFOLDED = 64


@dataclass(frozen=True)
class LayerMetric:
    """The whitened metric of one layer, but for a factor that all coordinates share.

    Attributes:
        inverse: A = 1/b^2 times ``factor``, shape (d_layer,), or () for a ball.
        centre_inverse: m A, shape (d_layer,); None for a ball, whose m is 0.
        centre: m, shape (d_layer,); None for a ball.
        s3: sum of m^2 A over the layer, float64, shape ().
        largest: the largest A, shape ().
        factor: what squared norms by this A are divided by, float64, shape ().
    """

    inverse: Tensor
    centre_inverse: Tensor | None
    centre: Tensor | None
    s3: Tensor
    largest: Tensor
    factor: Tensor


@dataclass(frozen=True)
class SquaredNorms:
    """Squared whitened norms and a bound on their rounding error.

    Attributes:
        value: ||(g_i - m)/b||^2 as computed, float64, shape (samples,).
        slack: at least the distance of ``value`` from the truth, float64, shape (samples,).
    """

    value: Tensor
    slack: Tensor

    def __add__(self, other: "SquaredNorms") -> "SquaredNorms":
        return SquaredNorms(self.value + other.value, self.slack + other.slack)


#: Some samples by a mask, or all of them by ``slice(None)``.
Rows = Tensor | slice


class PerSampleGradients(Protocol):
    """One layer's gradients for each sample of a chunk, in whatever form is cheapest."""

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """||(g_i - m)/b||^2 over this layer."""
        ...

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """out = sum of c_i g_i over the valid samples.

        Args:
            c: weights, shape (samples,); 0 where not valid.
            valid: which samples are finite, bool, shape (samples,); None if all are. The others
                add exactly 0.
            out: the layer's slice, shape (d_layer,).
        """
        ...

    def select(self, rows: Rows) -> "PerSampleGradients":
        """The gradients of some samples, in float64."""
        ...


@dataclass(frozen=True)
class OuterProducts:
    """g_i = sum_t delta_it a_it^T for the weight of a Linear layer, sum_t delta_it for its bias.

    With several terms S1_i is a sum over their pairs, and S2_i over the terms.

    Attributes:
        delta: gradients of the loss by the layer's outputs, shape (samples, terms, out).
        a: the layer's inputs, shape (samples, terms, in).
        bias: whether the layer has a trainable bias.
    """

    delta: Tensor
    a: Tensor
    bias: bool

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """S1 - 2 S2 + S3 by products of matrices; products of norms alone for a ball."""
        if metric.centre_inverse is None:
            return self._in_a_ball(metric.inverse / metric.factor)
        u = _roundoff(self.a.shape[2] + self.bias + self.delta.shape[2], self.a.dtype)
        alike, across, cross, lost = [], [], [], []
        for t, (a, delta) in enumerate(self._terms()):
            cross.append(self._contract(a, delta, metric.centre_inverse))
            a_squared, delta_squared = a.square(), delta.square()
            alike.append(self._contract(a_squared, delta_squared, metric.inverse))
            lost.append(self._underflow(a_squared, delta_squared, metric))
            for a_too, delta_too in self._terms()[t + 1 :]:
                across.append(self._contract(a * a_too, delta * delta_too, metric.inverse))
        # By Cauchy and Schwarz a pair's error is within its terms' lengths, times u.
        reach = _total([s1.mul(1 + u).sqrt_() for s1 in alike]) + (metric.s3 * (1 + u)).sqrt()
        slack = reach.square_().mul_(u).add_(_total(lost), alpha=len(lost))
        value = _total(alike).sub_(_total(cross), alpha=2).add_(metric.s3)
        if across:
            value.add_(_total(across), alpha=2)
        return SquaredNorms(value.div_(metric.factor), slack.div_(metric.factor))

    def _in_a_ball(self, inverse: Tensor) -> SquaredNorms:
        """Norms times ``inverse``, A, which is the same for all coordinates; in float64."""
        widths = self.a.shape[2] + self.bias + self.delta.shape[2]
        if self.a.shape[1] == 1:
            norms = vector_norm(self.delta, dim=(1, 2), dtype=torch.float64)
            s1 = norms.square_().mul_(inverse) * (
                vector_norm(self.a, dim=(1, 2), dtype=torch.float64).square_() + float(self.bias)
            )
            return SquaredNorms(s1, _roundoff(widths, self.a.dtype) * s1)
        delta, a = self.delta.double(), self.a.double()
        by_pair = delta @ delta.mT * (a @ a.mT + float(self.bias))
        reach = by_pair.diagonal(dim1=1, dim2=2).sqrt().sum(1)
        slack = reach.square_().mul_(inverse * 2 * _roundoff(widths, torch.float64))
        return SquaredNorms(by_pair.sum((1, 2)).mul_(inverse), slack)

    def _underflow(self, a_squared: Tensor, delta_squared: Tensor, metric: LayerMetric) -> Tensor:
        """A bound on what S1 - 2 S2 loses where products are too small for their dtype.

        Each product loses at most the smallest normal number. That of a small delta and a large
        input may matter, and then the row is done again in float64. Of a pair of terms it is at
        most the mean of theirs.
        """
        ins, outs = self.a.shape[2] + self.bias, self.delta.shape[2]
        largest, tiny = metric.largest.double(), torch.finfo(self.a.dtype).tiny
        by_delta = delta_squared.sum(1).double().mul_(2 * ins * tiny * (4 + largest))
        by_a = a_squared.sum(1).double().add_(1).mul_(2 * outs * tiny * largest)
        return by_delta.add_(by_a).add_(4 * (ins + 1) * outs * tiny)

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """One more matrix product: (c delta)^T a.

        Several terms may cancel within a sample, which must not grow the rounding of the others'
        sum: they are added up in float64.
        """
        terms = self.a.shape[1]
        if terms > 1:
            delta, a, c = self.delta.double(), self.a.double(), c.double()
            total = torch.empty_like(out, dtype=torch.float64)
        else:
            delta, a, total = self.delta, self.a, out
        weighted = _kept((delta * c.view(-1, 1, 1)).flatten(1), valid).view(-1, delta.shape[2])
        weight, bias = self._views(total)
        torch.mm(weighted.T, _kept(a.flatten(1), valid).view(-1, a.shape[2]), out=weight)
        if bias is not None:
            torch.sum(weighted, 0, out=bias)
        if terms > 1:
            out.copy_(total)

    def select(self, rows: Rows) -> "OuterProducts":
        """Some samples, in float64."""
        return OuterProducts(self.delta[rows].double(), self.a[rows].double(), self.bias)

    def _terms(self) -> list[tuple[Tensor, Tensor]]:
        """a and delta of each term, shapes (samples, in) and (samples, out)."""
        return list(zip(self.a.unbind(1), self.delta.unbind(1), strict=True))

    def _contract(self, inputs: Tensor, outputs: Tensor, coefficients: Tensor) -> Tensor:
        """sum_jk outputs_ij inputs_ik coefficients_jk, the bias's input being 1; (samples,)."""
        weight, bias = self._views(coefficients)
        total = (inputs @ weight.T).mul_(outputs).sum(1)
        return (total if bias is None else total.addmv_(outputs, bias)).double()

    def _views(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """A layer's slice as weight (out, in) and bias (out,)."""
        rows, columns = self.delta.shape[2], self.a.shape[2]
        weight = flat[: rows * columns].view(rows, columns)
        return weight, flat[rows * columns :] if self.bias else None


@dataclass(frozen=True)
class Instantiated:
    """Gradients written out, one row a sample: for layers with few parameters.

    Attributes:
        g: shape (samples, d_layer).
    """

    g: Tensor

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Directly; nothing cancels."""
        if metric.centre is None:
            value = row_sums(self.g.square().mul_(metric.inverse))
        else:
            value = row_sums((self.g - metric.centre).square_().mul_(metric.inverse))
        value.div_(metric.factor)
        return SquaredNorms(value, _roundoff(ROW, self.g.dtype) * value)

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """One matrix-vector product."""
        torch.mv(_kept(self.g, valid).T, c, out=out)

    def select(self, rows: Rows) -> "Instantiated":
        """Some samples, in float64."""
        return Instantiated(self.g[rows].double())


#: Stands for a tensor among what a layer was given.
TENSOR = object()


@dataclass(frozen=True)
class Call:
    """How a layer was called, but for the tensors.

    Attributes:
        positional: what it was given by place; :data:`TENSOR` where a tensor goes.
        named: what it was given by name, no tensors.
        output: which of several outputs the loss depends on; None if there is but one.
    """

    positional: tuple[Any, ...] = (TENSOR,)
    named: Mapping[str, Any] = field(default_factory=dict)
    output: int | None = None

    def again(
        self, module: nn.Module, parameters: dict[str, Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        """The same call with other parameters and inputs; the output that counts."""
        given = iter(inputs)
        arguments = tuple(next(given) if a is TENSOR else a for a in self.positional)
        result: Any = functional_call(module, parameters, arguments, dict(self.named))
        chosen: Tensor = result if self.output is None else result[self.output]
        return chosen


@dataclass(frozen=True)
class Use:
    """What one use of a layer in a forward pass leaves for its gradients.

    Attributes:
        inputs: the tensors that the layer was given by place, each (samples * views, ...).
        delta: gradients of the loss by its output, shape (samples * views, ...).
        call: what else it was given.
    """

    inputs: tuple[Tensor, ...]
    delta: Tensor
    call: Call = Call()

    def part(self, rows: slice) -> "Use":
        """Some of the rows."""
        return Use(tuple(x[rows] for x in self.inputs), self.delta[rows], self.call)


@dataclass(frozen=True)
class InPieces:
    """Gradients that are too many to be held: written out for a few samples at a time.

    Norms and sum both instantiate the same samples in the same pieces, so both read the same
    floats.

    Attributes:
        layer: the layer.
        uses: each use of it in the forward pass.
        views: rows of a sample in each use.
        chosen: the samples meant, in float64; None for all, in their own dtype.
    """

    layer: Layer
    uses: tuple[Use, ...]
    views: int = 1
    chosen: Rows | None = None

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Directly, from instantiated gradients."""
        parts = [Instantiated(g).squared_norms(metric) for g in self._pieces()]
        return SquaredNorms(
            torch.cat([part.value for part in parts]), torch.cat([part.slack for part in parts])
        )

    def weighted_sum(self, c: Tensor, valid: Tensor | None, out: Tensor) -> None:
        """A matrix-vector product a piece."""
        out.zero_()
        begin = 0
        for g in self._pieces():
            rows = slice(begin, begin + len(g))
            kept = _kept(g, None if valid is None else valid[rows])
            out.addmv_(kept.T, c[rows])
            begin += len(g)

    def select(self, rows: Rows) -> "InPieces":
        """Some samples, in float64."""
        return InPieces(self.layer, self.uses, self.views, rows)

    def _pieces(self) -> Iterator[Tensor]:
        """Gradients of the samples meant, piece by piece, shape (samples, d_layer)."""
        step = max(1, _piece(self.uses[0].delta) // (self.layer.stop - self.layer.start))
        for begin in range(0, len(self.uses[0].delta) // self.views, step):
            rows = slice(begin * self.views, (begin + step) * self.views)
            g = instantiate(self.layer, [use.part(rows) for use in self.uses], self.views)
            match self.chosen:
                case None:
                    yield g
                case slice():
                    yield g.double()
                case mask:
                    yield g[mask[begin : begin + step]].double()


def total_squared_norms(
    gradients: Sequence[PerSampleGradients], metrics: Sequence[LayerMetric]
) -> SquaredNorms:
    """||(g_i - m)/b||^2 over some layers, each with its part of the metric."""
    first, *rest = [
        form.squared_norms(metric) for form, metric in zip(gradients, metrics, strict=True)
    ]
    return sum(rest, start=first)


def row_sums(numbers: Tensor) -> Tensor:
    """Sums of rows, float64, shape (rows,).

    So many as :data:`ROW` are added up in their own dtype at first, which is much faster.
    """
    whole = numbers.shape[1] // ROW * ROW
    parts = numbers[:, :whole].view(len(numbers), whole // ROW, ROW).sum(2)
    return parts.sum(1, dtype=torch.float64).add_(numbers[:, whole:].sum(1))


def _total(parts: Sequence[Tensor]) -> Tensor:
    first, *rest = parts
    return sum(rest, start=first)


def _roundoff(terms: int, dtype: torch.dtype) -> float:
    """u: a bound on the relative error of the sums behind one squared norm."""
    return (terms + 10) * torch.finfo(dtype).eps / 2


def _kept(rows: Tensor, valid: Tensor | None) -> Tensor:
    """Rows that are not valid become 0: 0 times a number that is not finite would not."""
    return rows if valid is None else torch.where(valid.unsqueeze(1), rows, 0)


#: Gradients by the parameters of a layer, by name: each (samples, ...).
Gradients = Mapping[str, Tensor]


def _linear(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """A sum over positions, of which a sample's views are some more."""
    samples = len(a) // views
    a, delta = (rows.reshape(samples, -1, rows.shape[-1]) for rows in (a, delta))
    bias = delta.sum(1)
    if "weight" not in layer.parameters:
        return {"bias": bias}
    return {"weight": torch.bmm(delta.transpose(1, 2), a), "bias": bias}


def _conv2d(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    weight = _kernel_gradients(layer.module, a, delta, views)
    return None if weight is None else {"weight": weight, "bias": _over_positions(delta, views)}


def _kernel_gradients(conv: nn.Module, a: Tensor, delta: Tensor, views: int) -> Tensor | None:
    """Gradients by the kernel that a convolution used, shape (samples, out, in, height, width).

    A product of matrices a sample, or one grouped convolution with a group a sample, whose batch
    are the views; None where neither fits.
    """
    assert isinstance(conv, nn.Conv2d)  # noqa: S101
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str) or a.ndim != 4:
        return None
    samples = len(a) // views
    outputs, *kernel = conv.weight.shape
    if conv.groups == 1 and math.prod(kernel) <= UNFOLDED:
        patches = unfold(a, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        weight = torch.bmm(
            _behind_channels(delta.flatten(2), views),
            _behind_channels(patches, views).transpose(1, 2),
        )
    else:
        weight = conv2d_weight(  # type: ignore[no-untyped-call]
            _before_samples(a, views),
            (samples * outputs, *kernel),
            _before_samples(delta, views),
            conv.stride,
            conv.padding,
            conv.dilation,
            groups=samples * conv.groups,
        )
    return weight.reshape(samples, outputs, *kernel)


def _apart(rows: Tensor, views: int) -> Tensor:
    """(samples * views, ...) as (samples, views, ...)."""
    return rows.reshape(len(rows) // views, views, *rows.shape[1:])


def _behind_channels(rows: Tensor, views: int) -> Tensor:
    """(samples * views, channels, positions) as (samples, channels, views * positions)."""
    return _apart(rows, views).transpose(1, 2).flatten(2)


def _before_samples(rows: Tensor, views: int) -> Tensor:
    """(samples * views, channels, ...) as (views, samples * channels, ...)."""
    return _apart(rows, views).transpose(0, 1).flatten(1, 2)


def _over_positions(rows: Tensor, views: int) -> Tensor:
    """(samples * views, channels, ...) summed to (samples, channels)."""
    inner = tuple(range(2, rows.ndim))
    by_view = rows.sum(inner) if inner else rows
    return _apart(by_view, views).sum(1)


def _standardised_conv2d(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients | None:
    """By the kernel used, then through W-hat = gain z / ||z|| with z = W - mean, row by row."""
    conv = layer.module
    assert isinstance(conv, StandardisedConv2d)  # noqa: S101
    by_kernel = _kernel_gradients(conv, a, delta, views)
    if by_kernel is None:
        return None
    g = by_kernel.flatten(2)
    direction, scale = conv.standardised()  # z / ||z||, 1 / ||z||
    along = (g * direction).sum(2, keepdim=True)
    moves = scale.square() * LEAST_SQUARE < 1  # else ||z|| is taken for a constant
    by_centred = scale * (g - torch.where(moves, direction * along, 0.0))
    weight = conv.gain.unsqueeze(1) * (by_centred - by_centred.mean(2, keepdim=True))
    return {"weight": weight, "gain": along, "bias": _over_positions(delta, views)}


def _group_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    norm = layer.module
    assert isinstance(norm, nn.GroupNorm)  # noqa: S101
    product = delta * group_norm(a, norm.num_groups, eps=norm.eps)
    return {"weight": _over_positions(product, views), "bias": _over_positions(delta, views)}


def _layer_norm(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    norm = layer.module
    assert isinstance(norm, nn.LayerNorm)  # noqa: S101
    shape = (len(a) // views, -1, *norm.normalized_shape)
    product = delta * layer_norm(a, norm.normalized_shape, eps=norm.eps)
    return {"weight": product.reshape(shape).sum(1), "bias": delta.reshape(shape).sum(1)}


def _embedding(layer: Layer, a: Tensor, delta: Tensor, views: int) -> Gradients:
    """Rows of delta, added up where a sample has a token more than once."""
    table = layer.module
    assert isinstance(table, nn.Embedding)  # noqa: S101
    samples = len(a) // views
    tokens, width = table.weight.shape
    g = delta.new_zeros(samples * tokens, width)
    rows = torch.arange(samples, device=a.device).mul_(tokens).unsqueeze(1)
    g.index_add_(0, (rows + a.reshape(samples, -1)).flatten(), delta.reshape(-1, width))
    g = g.view(samples, tokens, width)
    if table.padding_idx is not None:
        g[:, table.padding_idx] = 0
    return {"weight": g}


def _by_vmap(layer: Layer, use: Use, views: int) -> Gradients:
    """Gradients of any layer that treats samples apart."""
    dtype = use.delta.dtype
    trained = {name: p.detach().to(dtype) for name, p in layer.parameters.items()}
    rest = {
        name: p.detach().to(dtype)
        for name, p in layer.module.named_parameters()
        if name not in trained
    }

    def one(inputs: tuple[Tensor, ...], delta: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return use.call.again(layer.module, {**rest, **parameters}, inputs)

        pull_back: Any = vjp(forward, trained)[1]
        gradients: dict[str, Tensor] = pull_back(delta)[0]
        return gradients

    apart = [_apart(rows, views) for rows in (*use.inputs, use.delta)]
    with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
        gradients: Gradients = vmap(one)(tuple(apart[:-1]), apart[-1])
    return gradients


#: How a layer's gradients are instantiated, by its exact type; None to fall back on vmap.
RULES: Mapping[type[nn.Module], Callable[[Layer, Tensor, Tensor, int], Gradients | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    StandardisedConv2d: _standardised_conv2d,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}


def instantiate(layer: Layer, uses: Sequence[Use], views: int = 1) -> Tensor:
    """Gradients written out, in theta's order: a sum over uses, shape (samples, d_layer)."""
    first, *others = uses
    g = _instantiate(layer, first, views)
    for use in others:
        g += _instantiate(layer, use, views)
    return g


def _instantiate(layer: Layer, use: Use, views: int) -> Tensor:
    rule = RULES.get(type(layer.module)) if _is_plain(layer, use) else None
    found = rule(layer, use.inputs[0], use.delta, views) if rule else None
    gradients = found or _by_vmap(layer, use, views)
    samples = len(use.delta) // views
    return torch.cat([gradients[name].reshape(samples, -1) for name in layer.parameters], 1)


def _piece(like: Tensor) -> int:
    """How many numbers to instantiate at a time."""
    return DEVICE_PIECE if like.is_cuda else PIECE


def _is_plain(layer: Layer, use: Use) -> bool:
    """Whether a layer computes what its type says, of one input."""
    return use.call == Call() and layer.parameters.keys() <= {"weight", "bias", "gain"}


def hold(layer: Layer, uses: Sequence[Use], views: int = 1) -> PerSampleGradients:
    """The cheapest form that the layer's type and its uses allow.

    Args:
        layer: the layer.
        uses: each use of it in a forward pass, at least one.
        views: rows of a sample in each use, next to each other; its gradient is their sum.
    """
    delta = uses[0].delta
    samples = len(delta) // views
    numbers = samples * (layer.stop - layer.start)
    if _are_outer_products(layer, uses):
        delta = _by_term([use.delta for use in uses], samples)
        a = _by_term([use.inputs[0] for use in uses], samples)
        if a.shape[1] == 1 or (a.shape[1] <= PAIRED and numbers > _piece(delta)):
            return OuterProducts(delta, a, "bias" in layer.parameters)
    # A convolution's are too dear to be made twice.
    if numbers > _piece(delta) and not isinstance(layer.module, nn.Conv2d):
        return InPieces(layer, tuple(uses), views)
    return Instantiated(instantiate(layer, uses, views))


def _are_outer_products(layer: Layer, uses: Sequence[Use]) -> bool:
    linear = type(layer.module) is nn.Linear and "weight" in layer.parameters
    return linear and all(_is_plain(layer, use) for use in uses)


def _by_term(rows: Sequence[Tensor], samples: int) -> Tensor:
    """What each use had as (samples, terms, width): a term for each use, view and position."""
    apart = [of_use.reshape(samples, -1, of_use.shape[-1]) for of_use in rows]
    return apart[0] if len(apart) == 1 else torch.cat(apart, 1)
