"""Clipped sums of per-sample gradients, for a Linear layer without ever forming one.

A layer's per-sample gradients are kept in the cheapest form that yields their whitened norms and
their weighted sum. For a Linear layer that is the pair (delta, a) of output gradients and inputs,
whose outer product delta_i a_i^T is sample i's gradient: with A = 1/b^2,

    ||(g_i - m)/b||^2 = S1_i - 2 S2_i + S3,     S1_i = sum_jk delta_ij^2 a_ik^2 A_jk,
                                                S2_i = sum_jk delta_ij a_ik (m A)_jk,
                                                S3   = sum_jk m_jk^2 A_jk:

two matrix products for the whole batch and one constant; a ball needs none. Convolutions and group
norms, which have few parameters, are instantiated chunk by chunk; any other layer falls back on
torch.func.vmap over that layer alone.

Rounding is a privacy matter: a norm that comes out too small lets a sample contribute more than
1. So every norm comes with a bound on its error and samples are clipped by their sum; where the
three terms cancel too much, those rows are done again in float64.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.functional import cross_entropy, group_norm
from torch.nn.grad import conv2d_weight
from torch.utils.hooks import RemovableHandle

from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.errors import ModelError

#: Samples are clipped to this norm instead of 1. The gap covers the rounding of the clipped sum.
CLIP_LIMIT = 1 - 1e-4
#: Rows whose rounding bound exceeds this share of their squared norm are done again in float64.
SLACK_SHARE = 0.01
#: The sum of c_i times ||m/b|| above which sum c_i g_i - (sum c_i) m cancels too much for float32.
CANCELLATION_LIMIT = 500.0
#: Numbers that the fallback may instantiate at a time.
FALLBACK_NUMBERS = 1 << 24

Observer = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Layer:
    """A module whose parameters are handled together: one slice of theta.

    Attributes:
        name: the module's name in the model.
        module: the module.
        parameters: its trainable parameters by their names within the module, in theta's order.
        start, stop: the slice of theta that they fill.
    """

    name: str
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    start: int
    stop: int


def find_layers(model: nn.Module) -> list[Layer]:
    """Split a model's trainable parameters into layers, in the order of ``model.parameters()``.

    Raises:
        ModelError: a parameter is shared by two modules, or nothing is trainable.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shared = sorted(set(names) - {name for name, _ in model.named_parameters()})
    if shared:
        raise ModelError(
            f"The parameter {shared[0]} is shared with another layer. A sample's gradient for a "
            "shared parameter is a sum over its uses, which cannot be clipped layer by layer: "
            "give each layer a parameter of its own."
        )
    layers: list[Layer] = []
    start = 0
    for name, module in _owners(model, ""):
        parameters = {key: p for key, p in module.named_parameters() if p.requires_grad}
        if parameters:
            stop = start + sum(p.numel() for p in parameters.values())
            layers.append(Layer(name, module, parameters, start, stop))
            start = stop
    if not layers:
        raise ModelError("The model has no trainable parameter.")
    return layers


def _owners(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold parameters themselves; what lies inside one belongs to it."""
    if any(True for _ in module.parameters(recurse=False)):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _owners(child, f"{name}.{child_name}" if name else child_name)


def flatten_parameters(layers: list[Layer]) -> Tensor:
    """Move all parameters into one vector theta, shape (d,), and make each a view of it.

    Updating theta in place updates the model. Gradients are switched off: autograd computes
    output gradients only, and the clipped sums do the rest.
    """
    parameters = [p for layer in layers for p in layer.parameters.values()]
    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for p in parameters:
        p.data = theta[offset : offset + p.numel()].view_as(p)
        p.requires_grad_(False)
        offset += p.numel()
    return theta


@dataclass(frozen=True)
class LayerMetric:
    """The whitened metric of one layer.

    Attributes:
        inverse: A = 1/b^2, shape (d_layer,), or () for a ball.
        centre_inverse: m A, shape (d_layer,); None for a ball, whose m is 0.
        scale: b, shape (d_layer,) or ().
        centre: m, shape (d_layer,); None for a ball.
        s3: sum of m^2 A over the layer, float64, shape ().
    """

    inverse: Tensor
    centre_inverse: Tensor | None
    scale: Tensor
    centre: Tensor | None
    s3: Tensor


class Metric:
    """What the norms of one step need of its ellipsoid, worked out once and read by every chunk.

    Args:
        region: the ellipsoid.
        dtype: float32, or float64 for the rows that are done again.
    """

    def __init__(self, region: Ellipsoid, dtype: torch.dtype | None = None) -> None:
        self.region = region
        self._centre = region.centre.to(dtype or region.centre.dtype)
        self._scale = region.scale.to(dtype or region.scale.dtype)
        self._inverse = self._scale.square().reciprocal_()
        self._centre_inverse = None if region.is_ball else self._centre * self._inverse
        self._s3: dict[str, Tensor] = {}

    def of(self, layer: Layer) -> LayerMetric:
        """The part of one layer."""
        if self._centre_inverse is None:
            zero = torch.zeros_like(self._scale, dtype=torch.float64)
            return LayerMetric(self._inverse, None, self._scale, None, zero)
        part = slice(layer.start, layer.stop)
        centre, centre_inverse = self._centre[part], self._centre_inverse[part]
        if layer.name not in self._s3:
            self._s3[layer.name] = (centre * centre_inverse).sum(dtype=torch.float64)
        return LayerMetric(
            self._inverse[part], centre_inverse, self._scale[part], centre, self._s3[layer.name]
        )

    def double(self) -> "Metric":
        """The same ellipsoid in float64."""
        return Metric(self.region, torch.float64)


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


class PerSampleGradients(Protocol):
    """One layer's gradients for each sample of a chunk, in whatever form is cheapest."""

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """||(g_i - m)/b||^2 over this layer."""
        ...

    def add_weighted_sum(self, c: Tensor, valid: Tensor, out: Tensor) -> None:
        """out += sum of c_i g_i over the valid samples.

        Args:
            c: weights, shape (samples,); 0 where not valid.
            valid: which samples are finite, bool, shape (samples,). The others add exactly 0.
            out: the layer's slice, shape (d_layer,).
        """
        ...

    def select(self, rows: Tensor) -> "PerSampleGradients":
        """The gradients of some samples, by index or mask, in float64."""
        ...


@dataclass(frozen=True)
class OuterProducts:
    """g_i = delta_i a_i^T for the weight of a Linear layer and delta_i for its bias.

    Attributes:
        delta: gradients of the loss by the layer's outputs, shape (samples, out).
        a: the layer's inputs, shape (samples, in).
        bias: whether the layer has a trainable bias.
    """

    delta: Tensor
    a: Tensor
    bias: bool

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """S1 - 2 S2 + S3 by two matrix products, or a product of two norms for a ball."""
        delta_squared, a_squared = self.delta.square(), self.a.square()
        u = _roundoff(self.a.shape[1] + self.bias + self.delta.shape[1], self.a.dtype)
        if metric.centre_inverse is None:
            a_norms = a_squared.sum(1, dtype=torch.float64) + float(self.bias)
            s1 = delta_squared.sum(1, dtype=torch.float64) * a_norms * metric.inverse
            return SquaredNorms(s1, u * s1)
        p = self._contract(a_squared, metric.inverse)
        s1 = p.mul_(delta_squared).sum(1, dtype=torch.float64)
        q = self._contract(self.a, metric.centre_inverse)
        s2 = q.mul_(self.delta).sum(1, dtype=torch.float64)
        reach = s1.mul(1 + u).sqrt_() + (metric.s3 * (1 + u)).sqrt()
        return SquaredNorms(s1 - 2 * s2 + metric.s3, u * reach.square_())

    def add_weighted_sum(self, c: Tensor, valid: Tensor, out: Tensor) -> None:
        """One more matrix product: (c delta)^T a."""
        keep = valid.unsqueeze(1)
        weighted = torch.where(keep, self.delta * c.unsqueeze(1), 0)
        weight, bias = self._views(out)
        weight.addmm_(weighted.T, torch.where(keep, self.a, 0))
        if bias is not None:
            bias.add_(weighted.sum(0))

    def select(self, rows: Tensor) -> "OuterProducts":
        """Some samples, in float64."""
        return OuterProducts(self.delta[rows].double(), self.a[rows].double(), self.bias)

    def _contract(self, inputs: Tensor, coefficients: Tensor) -> Tensor:
        """sum_k inputs_ik coefficients_jk, the bias taken as an input that is 1; (samples, out)."""
        weight, bias = self._views(coefficients)
        return inputs @ weight.T if bias is None else torch.addmm(bias, inputs, weight.T)

    def _views(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """A layer's slice as weight (out, in) and bias (out,)."""
        rows, columns = self.delta.shape[1], self.a.shape[1]
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
        centred = self.g if metric.centre is None else self.g - metric.centre
        value = (centred / metric.scale).square_().sum(1, dtype=torch.float64)
        return SquaredNorms(value, _roundoff(0, self.g.dtype) * value)

    def add_weighted_sum(self, c: Tensor, valid: Tensor, out: Tensor) -> None:
        """One matrix-vector product."""
        out.addmv_(torch.where(valid.unsqueeze(1), self.g, 0).T, c)

    def select(self, rows: Tensor) -> "Instantiated":
        """Some samples, in float64."""
        return Instantiated(self.g[rows].double())


@dataclass(frozen=True)
class ByVmap:
    """Gradients of any layer that treats samples apart: instantiated a few rows at a time.

    Attributes:
        layer: the layer.
        inputs: its positional inputs, each (samples, ...).
        delta: gradients of the loss by its output, shape (samples, ...).
    """

    layer: Layer
    inputs: tuple[Tensor, ...]
    delta: Tensor

    def squared_norms(self, metric: LayerMetric) -> SquaredNorms:
        """Directly, from instantiated gradients."""
        rows = max(1, FALLBACK_NUMBERS // (self.layer.stop - self.layer.start))
        parts = []
        for begin in range(0, len(self.delta), rows):
            g = self._instantiate(slice(begin, begin + rows))
            whitened = (g if metric.centre is None else g.sub_(metric.centre)).div_(metric.scale)
            parts.append(whitened.square_().sum(1, dtype=torch.float64))
        value = torch.cat(parts)
        return SquaredNorms(value, _roundoff(0, self.delta.dtype) * value)

    def add_weighted_sum(self, c: Tensor, valid: Tensor, out: Tensor) -> None:
        """One ordinary backward through this layer: the sum is linear in delta."""
        inputs = tuple(x[valid] for x in self.inputs)
        weights = c[valid].view(-1, *[1] * (self.delta.ndim - 1))
        out.add_(_flat(self._pull_back(inputs, self.delta[valid] * weights), ()))

    def select(self, rows: Tensor) -> "ByVmap":
        """Some samples, in float64."""
        inputs = tuple(_double(x[rows]) for x in self.inputs)
        return ByVmap(self.layer, inputs, self.delta[rows].double())

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().to(self.delta.dtype) for name, p in self.layer.parameters.items()}

    def _forward(self, parameters: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        rest = {
            name: p.detach().to(self.delta.dtype)
            for name, p in self.layer.module.named_parameters()
            if name not in parameters
        }
        return functional_call(self.layer.module, {**rest, **parameters}, inputs)  # type: ignore[no-any-return]

    def _pull_back(self, inputs: tuple[Tensor, ...], delta: Tensor) -> dict[str, Tensor]:
        """The gradient of <delta, layer(inputs)> by the layer's parameters."""
        pull_back: Any = vjp(lambda p: self._forward(p, inputs), self._parameters())[1]
        gradients: dict[str, Tensor] = pull_back(delta)[0]
        return gradients

    def _instantiate(self, rows: slice) -> Tensor:
        """Per-sample gradients of some rows, shape (rows, d_layer)."""

        def one(inputs: tuple[Tensor, ...], delta: Tensor) -> dict[str, Tensor]:
            return self._pull_back(tuple(x.unsqueeze(0) for x in inputs), delta.unsqueeze(0))

        inputs = tuple(x[rows] for x in self.inputs)
        delta = self.delta[rows]
        return _flat(vmap(one)(inputs, delta), (len(delta),))


def _flat(gradients: dict[str, Tensor], lead: tuple[int, ...]) -> Tensor:
    return torch.cat([g.reshape(*lead, -1) for g in gradients.values()], dim=len(lead))


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _roundoff(terms: int, dtype: torch.dtype) -> float:
    """u: a bound on the relative error of the sums behind one squared norm."""
    return (terms + 10) * torch.finfo(dtype).eps / 2


class _Record:
    """One layer's stored input, and the place in the graph where its output's gradient is."""

    def __init__(self, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.inputs = tuple(x.detach() for x in inputs)
        self._versions = tuple(x._version for x in self.inputs)
        if not output.requires_grad:
            output.requires_grad_()
        self.edge = torch.autograd.graph.get_gradient_edge(output)

    @property
    def intact(self) -> bool:
        """Whether no in-place operation has changed the stored inputs since."""
        return self._versions == tuple(x._version for x in self.inputs)


class ClippedSum:
    """Turns a chunk of samples into the sum of their clipped, centred gradients.

    Args:
        model: maps a batch (samples, ...) to logits (samples, classes), treating samples apart.
        layers: :func:`find_layers` of the model.
    """

    def __init__(self, model: nn.Module, layers: list[Layer]) -> None:
        self._model = model
        self._layers = layers
        self._records: dict[str, _Record] | None = None
        self._hooks: list[RemovableHandle] = [
            layer.module.register_forward_hook(self._recorder(layer)) for layer in layers
        ]

    def add(
        self, x: Tensor, y: Tensor, metric: Metric, out: Tensor, observer: Observer | None = None
    ) -> None:
        """out += sum over the chunk of c_i (g_i - m), each ||c_i (g_i - m)/b|| <= 1.

        A sample whose gradient or norm is not finite adds exactly zero.

        Args:
            x: inputs, shape (samples, ...), samples >= 1.
            y: labels, shape (samples,).
            metric: of the ellipsoid to clip to.
            out: shape (d,).
            observer: sees per-sample losses and whitened norms, shape (samples,) each. They are
                not private: only diagnostics may pass one.

        Raises:
            ModelError: the model used a layer twice, or not at all, or changed a layer's input
                in place.
        """
        losses, gradients = self._gradients(x, y)
        squared = self._squared_norms(gradients, metric)
        c, valid = clip_weights(squared)
        if observer is not None:
            observer(losses.detach(), squared.value.clamp(min=0).sqrt())
        if metric.region.is_ball:
            self._add(gradients, c.to(out.dtype), valid, out)
            return
        total = c.sum()
        s3 = torch.stack([metric.of(layer).s3 for layer in self._layers]).sum()
        if bool(total * s3.sqrt() > CANCELLATION_LIMIT):
            everyone = torch.ones_like(valid)
            exact = [form.select(everyone) for form in gradients]
            centred = torch.zeros_like(out, dtype=torch.float64)
            self._add(exact, c, valid, centred)
            out.add_(centred.addcmul_(metric.region.centre.double(), -total))
        else:
            self._add(gradients, c.to(out.dtype), valid, out)
            out.addcmul_(metric.region.centre, -total.to(out.dtype))

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[PerSampleGradients]]:
        """Per-sample losses, shape (samples,), and every layer's per-sample gradients."""
        records: dict[str, _Record] = {}
        self._records = records
        try:
            with torch.enable_grad():
                losses = cross_entropy(self._model(x), y, reduction="none")
        finally:
            self._records = None
        missing = [layer.name for layer in self._layers if layer.name not in records]
        if missing:
            raise ModelError(
                f"The layer {missing[0]} has trainable parameters but took no part in the "
                "model's output. Remove it, or freeze it with requires_grad_(False)."
            )
        edges = [records[layer.name].edge for layer in self._layers]
        deltas = torch.autograd.grad(losses.sum(), edges)
        return losses, [
            _form(layer, records[layer.name], delta)
            for layer, delta in zip(self._layers, deltas, strict=True)
        ]

    def _squared_norms(self, gradients: list[PerSampleGradients], metric: Metric) -> SquaredNorms:
        squared = self._total(gradients, metric)
        # Rows that are not clipped even with the slack need no better norm.
        clipped = squared.value + squared.slack > CLIP_LIMIT**2
        rows = clipped & (squared.slack > SLACK_SHARE * squared.value)
        if bool(rows.any()):
            exact = self._total([form.select(rows) for form in gradients], metric.double())
            squared.value[rows] = exact.value
            squared.slack[rows] = exact.slack
        return squared

    def _total(self, gradients: list[PerSampleGradients], metric: Metric) -> SquaredNorms:
        parts = [
            form.squared_norms(metric.of(layer))
            for layer, form in zip(self._layers, gradients, strict=True)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _add(
        self, gradients: list[PerSampleGradients], c: Tensor, valid: Tensor, out: Tensor
    ) -> None:
        for layer, form in zip(self._layers, gradients, strict=True):
            form.add_weighted_sum(c, valid, out[layer.start : layer.stop])

    def _recorder(self, layer: Layer) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            del module
            if self._records is None:
                return
            if layer.name in self._records:
                raise ModelError(
                    f"The layer {layer.name} is used more than once in a forward pass, which "
                    "clipping layer by layer does not support: give each use a layer of its own."
                )
            if not isinstance(output, Tensor) or not all(isinstance(x, Tensor) for x in inputs):
                raise ModelError(
                    f"The layer {layer.name} must map tensors to one tensor; "
                    f"it gave {type(output).__name__}."
                )
            self._records[layer.name] = _Record(inputs, output)

        return record


def _form(layer: Layer, record: _Record, delta: Tensor) -> PerSampleGradients:
    """The cheapest form that the layer's type and input allow."""
    if not record.intact:
        raise ModelError(
            f"The input of layer {layer.name} was changed in place after the layer read it. "
            "Use the out-of-place operation (x = x + y instead of x += y)."
        )
    rule = RULES.get(type(layer.module)) if len(record.inputs) == 1 else None
    form = rule(layer, record.inputs[0], delta) if rule else None
    return form or ByVmap(layer, record.inputs, delta)


def _linear(layer: Layer, a: Tensor, delta: Tensor) -> PerSampleGradients | None:
    if a.ndim != 2 or "weight" not in layer.parameters:
        return None
    return OuterProducts(delta, a, "bias" in layer.parameters)


def _conv2d(layer: Layer, a: Tensor, delta: Tensor) -> PerSampleGradients | None:
    """One grouped convolution for the whole chunk, a group a sample."""
    conv = layer.module
    assert isinstance(conv, nn.Conv2d)  # noqa: S101
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str) or a.ndim != 4:
        return None
    samples = len(a)
    outputs, *kernel = conv.weight.shape
    weight = conv2d_weight(  # type: ignore[no-untyped-call]
        a.reshape(1, -1, *a.shape[2:]),
        (samples * outputs, *kernel),
        delta.reshape(1, -1, *delta.shape[2:]),
        conv.stride,
        conv.padding,
        conv.dilation,
        groups=samples * conv.groups,
    )
    return _instantiated(layer, samples, weight=weight, bias=delta.sum((2, 3)))


def _group_norm(layer: Layer, a: Tensor, delta: Tensor) -> PerSampleGradients | None:
    norm = layer.module
    assert isinstance(norm, nn.GroupNorm)  # noqa: S101
    product = delta * group_norm(a, norm.num_groups, eps=norm.eps)
    inner = tuple(range(2, a.ndim))
    if inner:
        return _instantiated(layer, len(a), weight=product.sum(inner), bias=delta.sum(inner))
    return _instantiated(layer, len(a), weight=product, bias=delta)


def _instantiated(layer: Layer, samples: int, **gradients: Tensor) -> Instantiated:
    """Rows in theta's order, of the parameters that are trainable."""
    return Instantiated(
        torch.cat([gradients[name].reshape(samples, -1) for name in layer.parameters], 1)
    )


#: How a layer's gradients are held, by its exact type; None to fall back on vmap.
RULES: Mapping[type[nn.Module], Callable[[Layer, Tensor, Tensor], PerSampleGradients | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.GroupNorm: _group_norm,
}


def clip_weights(squared: SquaredNorms) -> tuple[Tensor, Tensor]:
    """c_i = min(1, limit / ||w_i||) for the largest ||w_i|| that the rounding bound allows.

    Returns:
        c, float64, shape (samples,), 0 where the norm is not finite; and which are finite.
    """
    upper = squared.value.clamp(min=0) + squared.slack
    valid = torch.isfinite(upper)
    c = (CLIP_LIMIT / upper.sqrt()).clamp(max=1.0)
    return torch.where(valid, c, 0.0), valid
