"""Per-sample gradients of a network that sees one record at a time, by vmap or in a loop.

The network is a function of one record: no operation of it, of its hooks or of its loss sees two,
so none can mix them. :func:`torch.func.vmap` runs it on all records of a chunk. Layers with a rule
(:data:`.RULES`) have a tap, a zero that is added to their output: the gradient w.r.t. the tap is
the layer's output gradient, one row per record, and norms and weighted sums follow from inputs and
output gradients. The gradients of other parameters are instantiated by the same call of ``grad``.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from dpmac_cli.dp.clipping.batches import (
    Batch,
    Structure,
    by_row,
    map_rows,
    samples_in,
)
from dpmac_cli.dp.clipping.computed_weights import Computed, with_graph
from dpmac_cli.dp.clipping.layer_calls import (
    calls_by_module,
    calls_of,
    chain_of,
    gradients_of_sample,
    known_layers,
    tapped,
    uses_of,
)
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer, find_layers
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.one_sample import SINGLE, TOLERANCE, OneSample, alike, row_of
from dpmac_cli.dp.clipping.order_of_sums import Elementwise
from dpmac_cli.dp.clipping.padding import read_otherwise
from dpmac_cli.dp.clipping.vmap_support import (
    DrawnAgain,
    KeptResults,
    called_with,
    constant_draws,
    reason_of_vmap,
    supported,
    unwrapped,
)
from dpmac_cli.dp.losses import Loss, plain
from dpmac_cli.dp.torch_errors import code_of_network, out_of_memory
from dpmac_cli.dp.weights import (
    Weigh,
    Weights,
    WeightsApart,
    bounded,
    check_alone,
    equal_weights,
    of_unit,
)
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.layers import forked, seed_all

#: Number of instantiated gradient entries per chunk: 16 MiB of float32. On a CPU, 2^20 and 2^24
#: take up to 1.4 times as long.
WRITTEN_OUT = 1 << 22
#: Structure of labels that are classes.
CLASS = Structure(torch.zeros(1, dtype=torch.long), keep=True)
LOOP = (
    "torch.func.vmap cannot run the network: {} So it runs on one record after the other, which "
    "takes many times as long as plain training. The guarantee does not cover a network, loss or "
    "weights that keep numbers of records in Python, as a running mean by .item() or a list: "
    "remove that."
)
#: Message for a network of which nothing would be trained.
UNTRAINED = (
    "No trainable parameter affects the model's output, so nothing would be trained. Leave out "
    "detach() and torch.no_grad() in its forward."
)
#: Message for a network that calls its layers differently than in the trial.
OTHER_CALLS = (
    "The network called its layers differently in this step than during validation. Call the same "
    "layers in each forward pass, and use torch.where(condition, a, b) to choose."
)

#: Messages for weights that cannot be used.
KEEPING_WEIGHTS = (
    "weights= returned another weight for the same record again, so one record could change the "
    "weights of others. It must not store anything between calls."
)
#: The uses of each layer, or its gradients, shape (samples, d_layer).
Found: TypeAlias = list[list[Use] | Tensor]


class PerSample:
    """Per-sample losses and gradients of a network that sees one sample at a time.

    On two made-up samples in float64, gradients by rule are compared with those of a loop over
    copies of the network. Where they differ, as where a weight is used outside its layer, the
    layer's gradients are instantiated; if that differs, too, the network runs in the loop.

    Args:
        model: maps (1, ...), or the views of one sample (views, ...), to outputs (rows, ...).
        inputs: structure of a sample: (...), or (views, ...) if there are several views.
        labels: structure of the labels of a sample.
        views: number of inputs per sample, public. The network may mix them with each other.
        loss: one loss per row.
        rowwise: whether loss and weights are built in, and so act on each row alone.
        weigh: weights of rows, :mod:`dpmac_cli.dp.weights`; by default those of the loss, if any.

    Attributes:
        layers: the trainable parameters of the model, split by module.
        views: number of inputs per sample.
        vmapped: whether samples run under vmap instead of in a loop.
        idle: names of the layers on which the loss does not depend.
        by_rows: whether products are computed by :class:`.RowProducts` instead of by torch.
        weighed: torch's loss whose class weights are the weights of records; "" for none.
        notes: messages about how the network is run.

    Raises ModelError if the network fails on a made-up sample, or the loss depends on no layer.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Structure,
        labels: Structure = CLASS,
        views: int = 1,
        loss: Loss = plain,
        *,
        rowwise: bool = False,
        weigh: Weigh | None = None,
    ) -> None:
        model = unwrapped(model)
        self._model, self._loss_of, self.views = model, loss, views
        self._weigh, self._rowwise = weigh, rowwise
        self.inputs, self._labels = inputs, labels
        self.layers = find_layers(model)
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [[names[id(p)] for p in la.parameters.values()] for la in self.layers]
        flat = [name for names_of in self._names for name in names_of]
        self._alone = OneSample(loss, flat, views, rowwise=rowwise, weigh=weigh)
        self.by_rows, self._products = False, RowProducts()
        self._by_function: set[str] = set()  # those whose products are computed by F.linear
        # Calls of recorded layers: names of the layers, and shape of the output for one sample.
        self._shapes: list[tuple[frozenset[str], tuple[int, ...]]] = []
        self.idle: tuple[str, ...] = ()
        self.weighed = ""
        self.notes: tuple[str, ...] = ()
        # Results of the network's operations, where they are asked for: see :meth:`observed`.
        self._results: list[Tensor] | None = None
        # Names of the layers whose gradients follow from calls.
        self._recorded = known_layers(self.layers)
        known = rowwise and len(self._recorded) == len(self.layers)
        self._chain = chain_of(model) if known else None
        why = self._try() if self._chain is None else None  # known layers need no trial
        if not any(layer.size for layer in self.layers):
            raise ModelError(UNTRAINED)
        self.vmapped = why is None
        if why is not None:
            self.run_in_a_loop(why)

    @property
    def most(self) -> int:
        """Return the largest number of samples in a chunk, which is public."""
        loose = (layer for layer in self.layers if layer.name not in self._recorded)
        return max(1, WRITTEN_OUT // max(1, sum(layer.stop - layer.start for layer in loose)))

    def __call__(self, x: Batch, y: Batch) -> tuple[Tensor, Weights, Found]:
        """Return losses and weights of a chunk, and the uses of each layer or its gradients.

        Args:
            x: inputs: tensors of shape (samples, ...), or (samples, views, ...).
            y: one label per input: tensors of shape (samples, ...) or (samples, views, ...).

        Losses have shape (samples,), gradients (samples, d_layer). Raises ModelError if the network
        calls other layers than in the trial.
        """
        if self.vmapped and self._chain is not None:
            return self._chained(self._chain, x, y)
        if self.vmapped:
            return self._mapped(self._model, self.layers, x, y)
        losses, weights, found = self._looped(x, y)
        return losses, weights, [*found]

    def observed(self, x: Batch, y: Batch) -> list[Tensor]:
        """Return everything that a chunk's gradients are computed from, one row per sample or view.

        Gradients are not computed. A result that is equal for two samples may come from values that
        differ, such as the zero of a ReLU or of a hinge loss. So the results of all operations are
        included.
        """
        results = self._results = list[Tensor]()
        try:
            losses, weights, _ = self(x, y)
        finally:
            self._results = None
        return [losses, weights.value, *results]

    def shapes_noted(self, x: Batch, y: Batch) -> tuple[bool, bool, int]:
        """Compute a chunk; return what its shapes say of the rounding of rows.

        Returns:
            whether torch is not tried with the shape of one of its products; whether the last rows
            of an odd number may be rounded otherwise by elementwise operations; and the largest
            number of elements for a sample of one that rounds the last elements of a thread
            otherwise.
        """
        self.by_rows, self._products.needed = True, False
        with Elementwise() as elementwise:
            self(x, y)
        return self._products.needed, elementwise.ends, -(-elementwise.largest // samples_in(x))

    def run_in_a_loop(self, why: str) -> None:
        """Run samples one after the other from now on, and note why."""
        self.vmapped, self._recorded, self.notes = False, set(), (LOOP.format(why),)

    def made_up(self, samples: int, *, double: bool = False) -> tuple[Batch, Batch]:
        """Return made-up inputs and labels of samples; with ``double``, numbers are in float64."""
        made = (of.made_up(samples, double=double) for of in (self.inputs, self._labels))
        return next(made), next(made)

    def _chained(
        self, chain: Sequence[nn.Module], x: Batch, y: Batch
    ) -> tuple[Tensor, Weights, Found]:
        """Return losses, weights and uses of known layers, which run on the whole chunk."""
        first = rows = by_row(x, self.views)
        called, inputs, outputs = list[nn.Module](), [], []
        with torch.enable_grad():
            for part in chain:
                calls_of_part, rows = calls_of(part, rows)
                for module, given, out in calls_of_part:
                    called.append(module)
                    inputs.append(given.detach())
                    outputs.append(out)
            labels = by_row(y, self.views)
            losses = self._loss_of(rows, labels).view(-1, self.views)
            if self._weigh is None:
                losses = losses.mean(1)
                weights = equal_weights(losses)
            else:
                of_rows = bounded(self._weigh(first, labels, rows))
                losses, weights = of_unit(
                    losses, Weights(*(t.view(-1, self.views) for t in of_rows))
                )
            if self._results is not None:
                self._results += [t.detach() for t in (*inputs, *outputs)]
                return losses.detach(), weights, []
            grad_outputs = torch.autograd.grad(losses.sum(), outputs)
        by_sample = [
            [torch.unflatten(t, 0, (-1, self.views)) for t in of] for of in (inputs, grad_outputs)
        ]
        calls = calls_by_module(called, *by_sample)
        return losses.detach(), weights, [uses_of(layer, calls) for layer in self.layers]

    def _mapped(
        self, model: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> tuple[Tensor, Weights, Found]:
        """Return losses, weights, and uses or gradients, by vmap."""
        loose = [n for la, n in zip(layers, self._names, strict=True) if not self._records(la)]
        parameters = dict(model.named_parameters())
        trained: dict[str, Tensor] = {n: parameters[n] for names in loose for n in names}
        like = _first(layers)
        taps = [like.new_zeros(shape) for names, shape in self._shapes if names & self._recorded]
        left, called, read = list[Tensor](), list[nn.Module | Computed](), list[Tensor]()
        others = with_graph(model, [layer.module for layer in self._recorded_of(layers)])
        kept = None if self._results is None else list[Tensor]()

        def tap(of: nn.Module | Computed, given: Tensor, out: Tensor) -> Tensor:
            if not left or out.shape != left[0].shape:
                raise ModelError(OTHER_CALLS)
            called.append(of)
            read.append(given)
            return out.add_(left.pop(0))

        def loss_of(
            taps: Sequence[Tensor],
            trained: dict[str, Tensor],
            x: Batch,
            y: Batch,
        ) -> tuple[Tensor, tuple[Tensor, Weights, list[Tensor], list[Tensor]]]:
            called.clear()
            read.clear()
            left[:] = taps
            network = partial(called_with, model, others | trained) if others | trained else model
            with nullcontext() if kept is None else KeptResults(kept):
                loss, weight = self._alone.loss(network, x, y)
            if left:
                raise ModelError(OTHER_CALLS)
            return loss, (loss, weight, read, kept or [])

        gradient: Any = grad if kept is None else _without_backward
        one = gradient(loss_of, argnums=(0, 1), has_aux=True)
        mapped = vmap(one, in_dims=(None, None, 0, 0), randomness="different")
        taps_on = tapped(self._recorded_of(layers), self._by_function, tap)
        products = self._products if self.by_rows else nullcontext()
        graph = torch.enable_grad() if others else torch.no_grad()
        with graph, supported(), taps_on, DrawnAgain(), products:
            (grad_outputs, g), (losses, weights, inputs, results) = mapped(taps, trained, x, y)
        if self._results is not None:
            self._results += [*inputs, *results]
            return losses, weights, []
        calls = calls_by_module(called, inputs, grad_outputs)
        return (
            losses,
            weights,
            [
                uses_of(layer, calls)
                if self._records(layer)
                else torch.cat([g.pop(name).reshape(len(losses), -1) for name in names], 1)
                for layer, names in zip(layers, self._names, strict=True)
            ],
        )

    def _records(self, layer: Layer) -> bool:
        return layer.name in self._recorded

    def _recorded_of(self, layers: Sequence[Layer]) -> list[Layer]:
        return list(filter(self._records, layers))

    def _looped(self, x: Batch, y: Batch) -> tuple[Tensor, Weights, list[Tensor]]:
        """Return losses, weights and gradients of samples that run one after the other."""
        like, samples = _first(self.layers), samples_in(x)
        found = [like.new_zeros(samples, layer.stop - layer.start) for layer in self.layers]
        losses, weights = list[Tensor](), list[Weights]()
        for i, (loss, weight, gradients) in enumerate(self._alone.one_by_one(self._model, x, y)):
            losses.append(loss)
            weights.append(weight)
            for layer, names, g in zip(self.layers, self._names, found, strict=True):
                for name, slot in zip(names, layer.slices.values(), strict=True):
                    if (part := gradients.pop(name)) is not None:
                        g[i, slot] = part.flatten()
        return torch.stack(losses), _stacked(weights), found

    def _try(self) -> str | None:
        """Find the layers to record; return why vmap cannot run the network, None if it can."""
        x, y = self.made_up(2, double=True)
        with forked(), torch.no_grad(), code_of_network(x):
            seed_all(0)
            probe = copy.deepcopy(self._model)
            probe = probe if self.inputs.keep_dtype else probe.double()
            for p in probe.parameters():  # zeros would hide uses of other weights
                p.add_(torch.randn_like(p), alpha=0.1)
            layers = find_layers(probe)
            try:
                self.idle = self._find_idle(probe, x, y)
            except RuntimeError:  # the loss may hold weights of classes in float32
                self._alone.single = _first(self.layers).dtype == torch.float32
                self.idle = self._find_idle(probe, x, y)
            if len(self.idle) == len(layers):
                raise ModelError(UNTRAINED)
            if not self._rowwise:
                self._check_weights(probe, x, y)
            self._keep_padding(probe, layers, x, y)
            why = ""
            for some in (known_layers(layers), set[str]()):
                self._recorded = some
                while True:
                    try:
                        wrong, alike = self._compare(probe, layers, x, y)
                    except Exception as failure:
                        if out_of_memory(failure):
                            raise
                        why = reason_of_vmap(failure)
                        break
                    if not wrong and alike:
                        return None
                    if not wrong & self._recorded:
                        why = "its results under vmap are others."
                        break
                    self._recorded -= wrong
        return why

    def _check_weights(self, probe: nn.Module, x: Batch, y: Batch) -> None:
        """Raise ModelError if class weights in the loss do not multiply all of it."""
        x_0, y_0 = (map_rows(partial(row_of, 0), batch) for batch in (x, y))

        def loss_within(apart: WeightsApart) -> Tensor:
            alone = copy.deepcopy(probe, {id(p): p for p in probe.parameters()})
            with constant_draws():
                return self._alone.loss(alone, x_0, y_0, apart)[0]

        self.weighed = check_alone(loss_within, self.views)
        if self._weigh is not None:
            alone = copy.deepcopy(probe, {id(p): p for p in probe.parameters()})
            with constant_draws():
                first, again = (self._alone.loss(alone, x_0, y_0)[1].value for _ in range(2))
            if not first.equal(again):
                raise ModelError(KEEPING_WEIGHTS)

    def _find_idle(self, probe: nn.Module, x: Batch, y: Batch) -> tuple[str, ...]:
        """Return the names of layers on which no sample's loss depends."""
        idle = {name for names in self._names for name in names}
        with constant_draws():
            for *_, gradients in self._alone.one_by_one(probe, x, y, probe.parameters()):
                idle -= {name for name, g in gradients.items() if g is not None}
                gradients.clear()
        pairs = zip(self.layers, self._names, strict=True)
        return tuple(layer.name for layer, names in pairs if idle >= {*names})

    def _keep_padding(self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch) -> None:
        """Train the padding of those layers whose weight something else than embeddings reads."""
        padded = {
            la.name: (la.parameters["weight"], la.padding)
            for la in layers
            if la.padding is not None
        }
        if not padded:
            return
        others, same = set[str](), {id(p): p for p in probe.parameters()}
        for i in range(samples_in(x)):
            x_i, y_i = (map_rows(partial(row_of, i), batch) for batch in (x, y))
            alone = copy.deepcopy(probe, dict(same))
            with constant_draws(), torch.enable_grad():
                others |= read_otherwise(self._alone.loss(alone, x_i, y_i)[0], padded)
        self.layers = [replace(la, padding=None) if la.name in others else la for la in self.layers]

    def _compare(
        self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> tuple[set[str], bool]:
        """Return the names of layers with other gradients, and whether losses are alike.

        Gradients of few samples, and of one layer by its rule, are in memory at a time.
        """
        wrong, found, expected = set[str](), list[Tensor](), list[Tensor]()
        found_weights, expected_weights = list[Tensor](), list[Tensor]()
        step, tolerance = (
            min(self.most, samples_in(x)),
            SINGLE if self.inputs.keep_dtype else TOLERANCE,
        )
        with constant_draws():
            called = self._note_calls(probe, layers, x, y)
            idle = [la for la in filter(self._records, layers) if called.isdisjoint(la.called)]
            products = {la.name for la in idle if all(type(m) is nn.Linear for m in la.called)}
            if not products <= self._by_function:
                self._by_function |= products
                return self._compare(probe, layers, x, y)
            if idle:
                return {la.name for la in idle}, True
            for begin in range(0, samples_in(x), step):
                few = itemgetter(slice(begin, begin + step))
                some_x, some_y = (map_rows(few, batch) for batch in (x, y))
                losses, weights, by_layer = self._mapped(probe, layers, some_x, some_y)
                found.append(losses)
                found_weights.append(weights.value)
                alone = self._alone.one_by_one(probe, some_x, some_y, probe.parameters())
                for i, (loss, weight, gradients) in enumerate(alone):
                    expected.append(loss)
                    expected_weights.append(weight.value)
                    for la, got, names in zip(layers, by_layer, self._names, strict=True):
                        alone_g = [gradients.pop(n) for n in names]
                        if not alike(gradients_of_sample(la, got, i), alone_g, tolerance):
                            wrong.add(la.name)
        same_losses = alike([torch.cat(found)], [torch.stack(expected)], tolerance)
        same_weights = alike([torch.cat(found_weights)], [torch.stack(expected_weights)], tolerance)
        return wrong, same_losses and same_weights

    def _note_calls(
        self, model: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> set[nn.Module]:
        """Run the first sample; note the shapes of calls, and return the modules called."""
        self._shapes, called = [], set[nn.Module]()
        x_0, y_0 = (map_rows(partial(row_of, 0), batch) for batch in (x, y))

        def note(of: nn.Module | Computed, _: Tensor, out: Tensor) -> Tensor:
            module = of.module if isinstance(of, Computed) else of
            called.add(module)
            names = frozenset(layer.name for layer in layers if module in layer.called)
            self._shapes.append((names, tuple(out.shape)))
            return out

        with tapped(self._recorded_of(layers), self._by_function, note), torch.enable_grad():
            self._alone.loss(model, x_0, y_0)
        return called


def _without_backward(function: Any, **_: Any) -> Any:
    """Return a function of the same arguments that prepares a backward pass, and runs none.

    Instead of gradients, it returns two empty containers.
    """

    def forward(taps: Any, trained: Any, x: Batch, y: Batch) -> tuple[Any, Any]:
        *_, aux = vjp(lambda of: function(*of, x, y), (taps, trained), has_aux=True)
        return ((), ()), aux

    return forward


def _stacked(weights: Sequence[Weights]) -> Weights:
    """Return weights of samples as those of a chunk."""
    return Weights(*map(torch.stack, zip(*weights, strict=True)))


def _first(layers: Sequence[Layer]) -> Tensor:
    """Return the first parameter, of which the others have dtype and device."""
    return next(iter(layers[0].parameters.values()))
