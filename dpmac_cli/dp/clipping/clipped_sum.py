"""From a chunk of samples to the sum of their clipped, centred gradients.

Rounding is a privacy matter: a norm that comes out too small lets a sample contribute more than 1.
So every norm comes with a bound on its error and samples are clipped by their sum; where terms
cancel too much, those rows are done again in float64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.hooks import RemovableHandle

from dpmac_cli.dp.clipping.forms import (
    ROW,
    TENSOR,
    Call,
    LayerMetric,
    PerSampleGradients,
    SquaredNorms,
    Use,
    hold,
    row_sums,
    total_squared_norms,
)
from dpmac_cli.dp.clipping.layers import Layer, blocks
from dpmac_cli.dp.clipping.spikes import Spikes
from dpmac_cli.dp.fused import Norms, Terms
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.errors import ModelError
from dpmac_cli.torch_errors import code_of_network

#: Samples that a step may add up before it takes more room for rounding.
FEW = 1024
#: The room: 2.5 times the largest rounding of such a sum that a search over adversarial batches
#: found.
ROOM = 4e-4
#: Rows whose rounding bound exceeds this share of their squared norm are done again in float64.
SLACK_SHARE = 0.01
#: Parameters of a layer from which on its metric is worth compiling.
COMPILED = 1 << 17
#: The sum of c_i times ||m/b|| above which sum c_i g_i - (sum c_i) m cancels too much for float32;
#: of a chunk, its share of that.
CANCELLATION_LIMIT = 250.0

#: What a layer may be given beside tensors: the same for every sample.
PLAIN = (bool, int, float, str, type(None))

Observer = Callable[[Tensor, Tensor], None]
#: Computes per-sample losses, shape (samples,), and every layer's per-sample gradients.
PerSample = Callable[[Tensor, Tensor], tuple[Tensor, list[PerSampleGradients]]]


class Metric:
    """What the norms of one step need of its ellipsoid, worked out once and read by every chunk.

    Args:
        region: the ellipsoid.
        dtype: float32, or float64 for the rows that are done again.
        compiled: of :func:`dpmac_cli.dp.fused.compile_terms`, for large layers; None not to.
    """

    def __init__(
        self,
        region: Ellipsoid,
        dtype: torch.dtype | None = None,
        compiled: Terms | None = None,
    ) -> None:
        dtype = dtype or region.inverse.dtype
        self.region = region
        self._centre, self._inverse = region.centre.to(dtype), region.inverse.to(dtype)
        self._centre_inverse = torch.empty_like(self._centre)
        self._layers: dict[str, LayerMetric] = {}
        self._compiled = compiled

    def refresh(self) -> None:
        """Read the ellipsoid again after it has changed in place."""
        self._layers.clear()

    def of(self, layer: Layer) -> LayerMetric:
        """The part of one layer."""
        if layer.name not in self._layers:
            part = slice(layer.start, layer.stop)
            self._layers[layer.name] = self._ball() if self.region.is_ball else self._part(part)
        return self._layers[layer.name]

    def _ball(self) -> LayerMetric:
        zero = torch.zeros_like(self._inverse, dtype=torch.float64)
        return LayerMetric(self._inverse, None, None, zero, self._inverse, self._factor)

    def _part(self, part: slice) -> LayerMetric:
        inverse, centre, times = self._inverse[part], self._centre[part], self._centre_inverse[part]
        if self._compiled is not None and len(centre) >= COMPILED:
            s3_whole, top = self._compiled(centre, inverse, times)
            return LayerMetric(inverse, times, centre, s3_whole, top, self._factor)
        s3, largest = [], []
        product = torch.empty(0, dtype=centre.dtype, device=centre.device)
        for block in blocks(len(centre), centre.device):
            torch.mul(centre[block], inverse[block], out=times[block])
            product = torch.mul(centre[block], times[block], out=product.resize_(0))
            s3.append(_sum_rounded_up(product))
            largest.append(inverse[block].max())
        total, top = torch.stack(s3).sum(), torch.stack(largest).max()
        return LayerMetric(inverse, times, centre, total, top, self._factor)

    def centre_norm(self, layers: list[Layer]) -> Tensor:
        """||m/b||, float64, shape ()."""
        s3 = torch.stack([self.of(layer).s3 for layer in layers]).sum()
        return (s3 / self._factor).sqrt_()

    @property
    def _factor(self) -> Tensor:
        return self.region.factor.double()

    def double(self) -> "Metric":
        """The same ellipsoid in float64."""
        return Metric(self.region, torch.float64)


def _sum_rounded_up(terms: Tensor) -> Tensor:
    """At least the sum of terms that are none negative; float64, shape ()."""
    total = row_sums(terms.unsqueeze(0)).squeeze(0)
    return total.mul_(1 + ROW * torch.finfo(terms.dtype).eps)


class _Started(torch.autograd.Function):
    """Lets the graph begin at a layer's output, at no cost and open to in-place operations."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        del anchor
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _Record:
    """What one use of a layer read, and the place in the graph where an output's gradient is."""

    def __init__(self, call: Call, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.call = call
        self.inputs = tuple(x.detach() for x in inputs)
        self._versions = tuple(x._version for x in self.inputs)
        self.edge = torch.autograd.graph.get_gradient_edge(output)

    @property
    def intact(self) -> bool:
        """Whether no in-place operation has changed the stored inputs since."""
        return self._versions == tuple(x._version for x in self.inputs)


class ClippedSum:
    """Turns a chunk of samples into the sum of their clipped, centred gradients.

    Args:
        model: maps a batch (samples, ...) to logits (samples, classes). It must not mix samples,
            unless ``per_sample`` keeps them apart.
        layers: of the model, as ``per_sample`` takes them; by default
            :func:`~dpmac_cli.dp.clipping.layers.find_layers`.
        capacity: the most samples that :meth:`of` will be given; public.
        batch: B, the expected number that a step adds up, in one chunk or in several. None: at most
            the capacity, in one.
        norms: :func:`~dpmac_cli.dp.clipping.forms.total_squared_norms`, or that compiled.
        views: of each sample, public. Its loss is the mean over them, and so is its gradient,
            which is clipped once: that of a sample with many views counts no more.
        per_sample: computes the gradients, such as
            :class:`~dpmac_cli.dp.clipping.isolation.Isolated`; None to run the model on the chunk
            at once.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[Layer],
        capacity: int = 1024,
        norms: Norms = total_squared_norms,
        views: int = 1,
        batch: float | None = None,
        per_sample: PerSample | None = None,
    ) -> None:
        self._model = model
        self._per_sample = per_sample or self._together
        self._norms = norms
        self._layers = layers
        self._capacity = capacity
        self._views = views
        self._batch = batch
        self._limit = clip_limit(max(capacity, batch or 0))
        self._records: dict[str, list[_Record]] | None = None
        self._hooks: list[RemovableHandle] = [
            layer.module.register_forward_hook(self._recorder(layer), with_kwargs=True)
            for layer in layers
            if per_sample is None
        ]

    def of(
        self, x: Tensor, y: Tensor, metric: Metric, out: Tensor, observer: Observer | None = None
    ) -> None:
        """out = sum over the chunk of c_i (g_i - m), each ||c_i (g_i - m)/b|| <= 1.

        A sample whose gradient or norm is not finite adds exactly zero.

        Args:
            x: inputs, shape (samples, ...), or (samples, views, ...) if there are several;
                samples >= 1.
            y: labels, shape (samples,).
            metric: of the ellipsoid to clip to.
            out: shape (d,).
            observer: sees per-sample losses and whitened norms, shape (samples,) each. They are
                not private: only diagnostics may pass one.

        Raises:
            ModelError: the model did not use a layer, or not row by row, or changed a layer's
                input in place.
            ValueError: there are more samples than the capacity that the clipping allows for, or
                others than ``views`` of each.
        """
        if len(x) > self._capacity:
            raise ValueError(f"{len(x)} samples, but the capacity is {self._capacity}")
        if self._views > 1 and x.shape[1:2] != (self._views,):
            raise ValueError(f"inputs of shape {tuple(x.shape)}, but {self._views} views of each")
        with code_of_network(x):
            losses, gradients = self._gradients(x, y)
        squared = self._squared_norms(gradients, metric)
        c, valid = clip_weights(squared, self._limit)
        self._centred_sum(gradients, c, valid, metric, out)
        if observer is not None:  # last of all: a chunk that fails may be tried again
            observer(losses.detach(), squared.value.clamp(min=0).sqrt())

    def weights(self, spikes: Spikes, metric: Metric) -> Tensor:
        """c_i of gradients along one coordinate each, float64, shape (spikes,)."""
        squared = spikes.squared_norms(metric.region, metric.centre_norm(self._layers))
        return clip_weights(squared, self._limit)[0]

    def centre_norm(self, metric: Metric) -> Tensor:
        """||m/b||, float64, shape ()."""
        return metric.centre_norm(self._layers)

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _centred_sum(
        self,
        gradients: list[PerSampleGradients],
        c: Tensor,
        valid: Tensor,
        metric: Metric,
        out: Tensor,
    ) -> None:
        """out = sum of c_i (g_i - m) over the samples that are valid."""
        # On CUDA, asking would wait for the device.
        kept = None if not valid.is_cuda and bool(valid.all()) else valid
        if metric.region.is_ball:
            self._sum(gradients, c.to(out.dtype), kept, out)
            return
        total = c.sum()
        most = cancellation_limit(len(c), self._batch or len(c))
        if bool(total * metric.centre_norm(self._layers) > most):
            everyone = slice(None)
            exact = [form.select(everyone) for form in gradients]
            centred = torch.empty_like(out, dtype=torch.float64)
            self._sum(exact, c, kept, centred)
            out.copy_(centred.addcmul_(metric.region.centre.double(), -total))
        else:
            self._sum(gradients, c.to(out.dtype), kept, out)
            out.addcmul_(metric.region.centre, -total.to(out.dtype))

    def _gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[PerSampleGradients]]:
        """Per-sample losses, shape (samples,), and every layer's per-sample gradients."""
        return self._per_sample(x, y)

    def _together(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[PerSampleGradients]]:
        """Run the model on the whole chunk at once."""
        losses, uses = self.uses(x, y)
        pairs = zip(self._layers, uses, strict=True)
        return losses, [hold(layer, used, self._views) for layer, used in pairs]

    def uses(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[list[Use]]]:
        """Per-sample losses, shape (samples,), and what each layer's uses leave for its gradients.

        Raises:
            ModelError: as :meth:`of`.
        """
        rows = x if self._views == 1 else x.flatten(0, 1)
        records: dict[str, list[_Record]] = {layer.name: [] for layer in self._layers}
        self._records = records
        try:
            with torch.enable_grad():
                logits = self._model(rows)
                by_view = cross_entropy(logits, y.repeat_interleave(self._views), reduction="none")
                losses = by_view.view(-1, self._views).mean(1)
                total = losses.sum()
            edges = [record.edge for uses in records.values() for record in uses]
            nothing: tuple[Tensor | None, ...] = (None,) * len(edges)
            reached = edges and total.requires_grad
            # Layers that are run again on the way back, by torch.utils.checkpoint, are not noted.
            self._records = {layer.name: [] for layer in self._layers}
            found = torch.autograd.grad(total, edges, allow_unused=True) if reached else nothing
        finally:
            self._records = None
        deltas = iter(found)
        uses = []
        for layer in self._layers:
            recorded = [(record, next(deltas)) for record in records[layer.name]]
            uses.append(_uses(layer, recorded, len(rows)))
        return losses, uses

    def _squared_norms(self, gradients: list[PerSampleGradients], metric: Metric) -> SquaredNorms:
        squared = self._norms(gradients, [metric.of(layer) for layer in self._layers])
        # Rows that are not clipped even with the slack need no better norm.
        clipped = squared.value + squared.slack > self._limit**2
        rows = clipped & (squared.slack > SLACK_SHARE * squared.value)
        if bool(rows.any()):
            exact_metric = metric.double()
            exact = total_squared_norms(
                [form.select(rows) for form in gradients],
                [exact_metric.of(layer) for layer in self._layers],
            )
            squared.value[rows] = exact.value
            squared.slack[rows] = exact.slack
        return squared

    def _sum(
        self, gradients: list[PerSampleGradients], c: Tensor, valid: Tensor | None, out: Tensor
    ) -> None:
        for layer, form in zip(self._layers, gradients, strict=True):
            form.weighted_sum(c, valid, out[layer.start : layer.stop])

    def _recorder(self, layer: Layer) -> Callable[..., Any]:
        def record(
            module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
        ) -> Any:
            del module
            if self._records is None or not torch.is_grad_enabled():
                return None
            several = type(output) is tuple
            outputs = list(output) if several else [output]
            others = [x for x in (*inputs, *named.values()) if not isinstance(x, Tensor)]
            tensors = tuple(x for x in inputs if isinstance(x, Tensor))
            odd = [name for name, value in named.items() if isinstance(value, Tensor)]
            if odd or not tensors or not all(isinstance(x, PLAIN) for x in others):
                raise ModelError(
                    f"The layer {layer.name} must be given tensors by place, a row a sample, and "
                    f"beside them only plain values; it got {', '.join(odd) or 'others'}. Keep a "
                    "mask as a buffer, in a module around this one that makes the call itself."
                )
            _check_outputs(layer.name, outputs, several, len(tensors[0]))
            positional = tuple(TENSOR if isinstance(x, Tensor) else x for x in inputs)
            started = [_start(output) for output in outputs]
            if several:  # one may be made of another: what is done with each outside is told apart
                started = [o if o is None else o.view_as(o) for o in started]
            self._records[layer.name] += [
                _Record(Call(positional, named, number if several else None), tensors, output)
                for number, output in enumerate(started)
                if output is not None and output.requires_grad
            ]
            return tuple(started) if several else started[0]

        return record


def _check_outputs(name: str, outputs: list[Any], several: bool, samples: int) -> None:
    """Refuse what is no tensor, or has no row for each sample; says no size, which is private."""
    for output in outputs:
        if output is None and several:
            continue
        if not isinstance(output, Tensor):
            raise ModelError(
                f"The layer {name} must map tensors to one tensor, or to a tuple of them; it gave "
                f"a {type(output).__name__}{' in a tuple' if several else ''}."
            )
        if output.is_floating_point() and (output.ndim == 0 or len(output) != samples):
            raise ModelError(
                f"The layer {name} gives a tensor whose first dimension is not the samples, one "
                "row each, as nn.GRU does with its last state. Write it of layers that do not."
            )


def _start(output: Tensor | None) -> Tensor | None:
    """A layer's output, with a place in the graph."""
    if output is None or not output.is_floating_point() or output.requires_grad:
        return output
    anchor = torch.zeros((), dtype=output.dtype, device=output.device)
    started: Tensor = _Started.apply(output, anchor.requires_grad_())
    return started


def _uses(layer: Layer, found: Sequence[tuple[_Record, Tensor | None]], batch: int) -> list[Use]:
    """A layer's uses that reach the loss, once it is sure that their rows are the batch's."""
    if not all(record.intact for record, _ in found):
        raise ModelError(
            f"The input of layer {layer.name} was changed in place after the layer read it. "
            "Use the out-of-place operation (x = x + y instead of x += y)."
        )
    uses = [Use(record.inputs, delta, record.call) for record, delta in found if delta is not None]
    if not uses:
        raise ModelError(
            f"The layer {layer.name} has trainable parameters, but no call of it took part in the "
            "model's output (to use its weights without calling it does not count: that cannot be "
            "clipped). Call it, remove it, or freeze it with requires_grad_(False)."
        )
    rows = {len(x) if x.ndim else 0 for use in uses for x in (*use.inputs, use.delta)}
    if rows != {batch}:
        raise ModelError(
            f"The layer {layer.name} sees {sorted(rows)} rows in a batch of {batch}: its first "
            "dimension must be the samples, one row each. Keep other dimensions behind it."
        )
    return uses


def clip_limit(samples: float) -> float:
    """The norm that samples are clipped to in place of 1, when a step adds up about so many.

    What is left covers the rounding of float32 sums. It grows with the number of their terms,
    in one chunk or in several: a record less moves all others to other places in their chunks.
    """
    return 1 / (1 + ROOM * max(1.0, samples / FEW))


def cancellation_limit(samples: int, batch: float) -> float:
    """What :data:`CANCELLATION_LIMIT` leaves to a chunk of a batch of about so many samples."""
    return CANCELLATION_LIMIT * max(1.0, batch / FEW) * samples / batch


#: Up to so many samples are clipped to this norm.
CLIP_LIMIT = clip_limit(FEW)


def clip_weights(squared: SquaredNorms, limit: float = CLIP_LIMIT) -> tuple[Tensor, Tensor]:
    """c_i = min(1, limit / ||w_i||) for the largest ||w_i|| that the rounding bound allows.

    Returns:
        c, float64, shape (samples,), 0 where the norm is not finite; and which are finite.
    """
    upper = squared.value.clamp(min=0) + squared.slack
    valid = torch.isfinite(upper)
    c = (limit / upper.sqrt()).clamp(max=1.0)
    return torch.where(valid, c, 0.0), valid
