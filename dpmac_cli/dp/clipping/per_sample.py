"""Per-sample gradients of a network that sees one record at a time, by vmap or in a loop.

The network is a function of one record: no operation of it, of its hooks or of its loss sees two,
so none can mix them. :func:`torch.func.vmap` runs it on all records of a chunk. Layers with a rule
(:data:`.RULES`) have a tap, a zero that is added to their output: the gradient w.r.t. the tap is
the layer's output gradient, one row per record, and norms and weighted sums follow from inputs and
output gradients. The gradients of other parameters are instantiated by the same call of ``grad``.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch._functorch import autograd_function
from torch.func import functional_call, grad, vmap
from torch.linalg import vector_norm
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import (
    Batch,
    Structure,
    by_row,
    map_rows,
    samples_in,
    tensors_in,
)
from dpmac_cli.dp.clipping.layer_rules import KNOWN, RULES, Use, instantiate
from dpmac_cli.dp.clipping.layers import Layer, find_layers
from dpmac_cli.dp.clipping.matmul import apply
from dpmac_cli.dp.clipping.padding import read_otherwise
from dpmac_cli.dp.clipping.projections import by_projections, masks_kept, replaced
from dpmac_cli.dp.losses import Loss, plain
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
from dpmac_cli.torch_errors import code_of_network, out_of_memory, what_failed

#: Number of instantiated gradient entries per chunk: 16 MiB of float32. On a CPU, 2^20 and 2^24
#: take up to 1.4 times as long.
WRITTEN_OUT = 1 << 22
#: Structure of labels that are classes.
CLASS = Structure(torch.zeros(1, dtype=torch.long), keep=True)
#: Largest error of gradients in float64, relative to the layer's largest.
TOLERANCE = 1e-6
#: The same in float32, for networks that cannot be tried in float64.
SINGLE = 1e-3
LOOP = (
    "torch.func.vmap cannot run the network: {} So it runs on one record after the other, which "
    "takes many times as long as plain training. The guarantee does not cover a network, loss or "
    "weights that keep numbers of records in Python, as a running mean by .item() or a list: "
    "remove that."
)
BY_ROW = (
    "On this machine, products of matrices round a record by the others of a batch. To avoid that, "
    "each record is multiplied with the weights by itself. This is slower."
)
_NO_RULE = (
    "it has a torch.autograd.Function without a rule for vmap. If its forward and backward consist "
    "of torch operations, define setup_context in it and set generate_vmap_rule = True."
)
OWN_RULE = "a torch.autograd.Function with a vmap of its own"
#: Words of messages of torch, and remedies.
REMEDIES = {
    "generate_vmap_rule": _NO_RULE,
    "setup_context": _NO_RULE,
    OWN_RULE: (
        f"it has {OWN_RULE}, which sees several records. If its forward and backward consist of "
        "torch operations, remove its vmap, and set generate_vmap_rule = True."
    ),
    "data-dependent control flow": (
        "it decides by the values of a record, as in if x.max() > 1 or x.item(). Use "
        "torch.where(condition, a, b)."
    ),
    "saved tensor hooks": "it uses torch.utils.checkpoint. Leave that out.",
}
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
TWO_WEIGHTS = "The loss has class weights, and weights= was given, too. Use one of them."
KEEPING_WEIGHTS = (
    "weights= returned another weight for the same record again, so one record could change the "
    "weights of others. It must not store anything between calls."
)
REDUCED = (
    "A unit has {} records, each with its weight, but the loss returned a tensor of shape {} for "
    "it. Return one loss per record: with torch's losses, use reduction='none'."
)

#: Modules without parameters that act on each row alone.
ROWWISE = frozenset(
    {
        *(nn.Identity, nn.Dropout, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU),
    }
)


#: The uses of each layer, or its gradients, shape (samples, d_layer).
Found: TypeAlias = list[list[Use] | Tensor]
#: Inputs and output gradients of the calls of modules.
Calls = defaultdict[nn.Module, list[tuple[Tensor, Tensor]]]


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
        self._by_row = False  # whether each sample is multiplied with the weights by itself
        self._by_function: set[str] = set()  # those whose products are computed by F.linear
        self._single = False  # whether the loss is computed in float32 in the trial, too
        # Calls of recorded layers: names of the layers, and shape of the output for one sample.
        self._shapes: list[tuple[frozenset[str], tuple[int, ...]]] = []
        self.idle: tuple[str, ...] = ()
        self.weighed = ""
        self.notes: tuple[str, ...] = ()
        # Results of the network's operations, where they are asked for: see :meth:`observed`.
        self._results: list[Tensor] | None = None
        # Names of the layers whose gradients follow from calls.
        self._recorded = _known(self.layers)
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

        A result that is equal for two samples may come from values that differ, such as the zero of
        a ReLU or of a hinge loss. So the results of all operations are included.
        """
        results = self._results = list[Tensor]()
        try:
            losses, weights, found = self(x, y)
        finally:
            self._results = None
        uses = [g if isinstance(g, Tensor) else [use.inputs for use in g] for g in found]
        return [losses, weights.value, *results, *tensors_in(uses)]

    def multiply_each_record_alone(self) -> None:
        """Give each sample its own weights from now on, so that products are of one sample."""
        if self._chain is not None:
            self._try()  # under vmap, which can run known layers
        # Products of attention and recurrent layers are found by weights of their own.
        self._recorded -= {layer.name for layer in self.layers if layer.composite is not None}
        self._chain, self._by_row, self.notes = None, True, (BY_ROW,)

    def run_in_a_loop(self, why: str) -> None:
        """Run samples one after the other from now on, and note why."""
        self.vmapped, self._recorded, self.notes = False, set(), (LOOP.format(why),)

    def made_up(self, samples: int, *, double: bool = False) -> tuple[Batch, Batch]:
        """Return made-up inputs and labels of samples; with ``double``, numbers are in float64."""
        made = (of.made_up(samples, double=double) for of in (self.inputs, self._labels))
        return next(made), next(made)

    def _loss(
        self, network: Callable[[Batch], Any], x: Batch, y: Batch, apart: WeightsApart | None = None
    ) -> tuple[Tensor, Weights]:
        """Return loss and weight of one sample: the mean loss, with weights, over its views."""
        alone = partial(torch.unsqueeze, dim=0)
        rows, labels = (t if self.views > 1 else map_rows(alone, t) for t in (x, y))
        apart = apart or WeightsApart(self.views)
        with nullcontext() if self._rowwise else apart:
            outputs = network(rows)
            loss_of = _without_memory(self._loss_of)
            losses = loss_of(outputs.float() if self._single else outputs, labels)
        if self._weigh is not None:
            if apart.weights is not None:
                raise ModelError(TWO_WEIGHTS)
            if losses.numel() != self.views:
                raise ModelError(REDUCED.format(self.views, tuple(losses.shape)))
            weights = bounded(self._weigh(rows, labels, outputs))
            return of_unit(losses.reshape(self.views), weights)
        loss = losses.mean()
        if apart.weights is None:
            return loss, equal_weights(loss)
        weights = bounded(apart.weights)
        return loss, Weights(weights.value.mean(), weights.cut.any())

    def _chained(
        self, chain: Sequence[nn.Module], x: Batch, y: Batch
    ) -> tuple[Tensor, Weights, Found]:
        """Return losses, weights and uses of known layers, which run on the whole chunk."""
        first = rows = by_row(x, self.views)
        called, inputs, outputs = list[nn.Module](), [], []
        with torch.enable_grad():
            for part in chain:
                given, rows = rows, apply(part, rows)
                if type(part) in RULES:
                    rows = rows if rows.requires_grad else rows.requires_grad_()
                    called.append(part)
                    inputs.append(given.detach())
                    outputs.append(rows)
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
            deltas = torch.autograd.grad(losses.sum(), outputs)
        if self._results is not None:
            self._results += [out.detach() for out in outputs]
        by_sample = [[t.unflatten(0, (-1, self.views)) for t in of] for of in (inputs, deltas)]
        calls = _calls(called, *by_sample)
        return losses.detach(), weights, [_uses(layer, calls) for layer in self.layers]

    def _mapped(
        self, model: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> tuple[Tensor, Weights, Found]:
        """Return losses, weights, and uses or gradients, by vmap."""
        loose = [n for la, n in zip(layers, self._names, strict=True) if not self._records(la)]
        parameters = dict(model.named_parameters())
        trained: dict[str, Tensor] = {n: parameters[n] for names in loose for n in names}
        like = _first(layers)
        own: dict[str, Tensor] = {
            name: p for name, p in parameters.items() if self._by_row and name not in trained
        }
        taps = [like.new_zeros(shape) for names, shape in self._shapes if names & self._recorded]
        left, called, read = list[Tensor](), list[nn.Module](), list[Tensor]()
        kept = None if self._results is None else list[Tensor]()

        def tap(module: nn.Module, given: Tensor, out: Tensor) -> Tensor:
            if not left or out.shape != left[0].shape:
                raise ModelError(OTHER_CALLS)
            called.append(module)
            read.append(given)
            return out.add_(left.pop(0))

        def loss_of(
            taps: Sequence[Tensor],
            trained: dict[str, Tensor],
            own: dict[str, Tensor],
            x: Batch,
            y: Batch,
        ) -> tuple[Tensor, tuple[Tensor, Weights, list[Tensor], list[Tensor]]]:
            called.clear()
            read.clear()
            left[:] = taps
            given = trained | own
            network = partial(_called_with, model, given) if given else model
            with nullcontext() if kept is None else _KeptResults(kept):
                loss, weight = self._loss(network, x, y)
            if left:
                raise ModelError(OTHER_CALLS)
            return loss, (loss, weight, read, kept or [])

        one: Any = grad(loss_of, argnums=(0, 1), has_aux=True)
        by_row = 0 if self._by_row else None
        trained, own = (self._for_each(samples_in(x), of) for of in (trained, own))
        mapped = vmap(one, in_dims=(None, by_row, by_row, 0, 0), randomness="different")
        with torch.no_grad(), _supported(), self._tapped(layers, tap), _DrawnAnew():
            (deltas, g), (losses, weights, inputs, results) = mapped(taps, trained, own, x, y)
        if self._results is not None:
            self._results += results
        calls = _calls(called, inputs, deltas)
        return (
            losses,
            weights,
            [
                _uses(layer, calls)
                if self._records(layer)
                else torch.cat([g.pop(name).reshape(len(losses), -1) for name in names], 1)
                for layer, names in zip(layers, self._names, strict=True)
            ],
        )

    def _for_each(self, samples: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as they are, or one for each sample, in the same memory."""
        if not self._by_row:
            return tensors
        return {name: t.detach().expand(samples, *t.shape) for name, t in tensors.items()}

    def _records(self, layer: Layer) -> bool:
        return layer.name in self._recorded

    @contextmanager
    def _tapped(
        self, layers: Sequence[Layer], tap: Callable[[nn.Module, Tensor, Tensor], Tensor]
    ) -> Iterator[None]:
        """Call ``tap`` with the module, input and output of each call of recorded layers."""

        def hook(module: nn.Module, inputs: Any, named: Any, out: Tensor) -> Tensor:
            # A network's no_grad block needs no tap.
            given = tensors_in((inputs, named))[0]
            return tap(module, given, out) if torch.is_grad_enabled() else out

        recorded = list(filter(self._records, layers))
        modules = dict.fromkeys(module for layer in recorded for module in layer.called)
        names = self._by_function
        by_function = {m for la in recorded if la.name in names for m in la.called}
        composites = {layer.composite for layer in recorded if layer.composite is not None}
        with ExitStack() as stack:
            if by_function:
                product = partial(_tapped_product, by_function, tap)
                stack.enter_context(replaced(functional, "linear", product))
            stack.enter_context(by_projections(composites))
            for module in modules.keys() - by_function:
                # Before the hooks of the program, which may change the output.
                handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _looped(self, x: Batch, y: Batch) -> tuple[Tensor, Weights, list[Tensor]]:
        """Return losses, weights and gradients of samples that run one after the other."""
        like, samples = _first(self.layers), samples_in(x)
        found = [like.new_zeros(samples, layer.stop - layer.start) for layer in self.layers]
        losses, weights = list[Tensor](), list[Weights]()
        for i, (loss, weight, gradients) in enumerate(self._one_by_one(self._model, x, y)):
            losses.append(loss)
            weights.append(weight)
            for layer, names, g in zip(self.layers, self._names, found, strict=True):
                for name, slot in zip(names, layer.slices.values(), strict=True):
                    if (part := gradients.pop(name)) is not None:
                        g[i, slot] = part.flatten()
        return torch.stack(losses), _stacked(weights), found

    def _one_by_one(
        self, model: nn.Module, x: Batch, y: Batch, shared: Iterable[Tensor] = ()
    ) -> Iterator[tuple[Tensor, Weights, dict[str, Tensor | None]]]:
        """Yield loss, weight and gradients of each sample by parameter; None if it has no effect.

        Each sample gets a new copy of the network, so none leaves anything to the next. Tensors in
        ``shared`` are not copied.
        """
        same = {id(t): t for t in shared}
        for i in range(samples_in(x)):
            x_i, y_i = (map_rows(partial(_row, i), batch) for batch in (x, y))
            alone = copy.deepcopy(model, dict(same)).requires_grad_(False)
            named = dict(alone.named_parameters())
            trained = {n: named[n].requires_grad_() for names in self._names for n in names}
            with torch.enable_grad():
                loss, weight = self._loss(alone, x_i, y_i)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            yield loss.detach(), weight, {name: _taken(p) for name, p in trained.items()}

    def _try(self) -> str | None:
        """Find the layers to record; return why vmap cannot run the network, None if it can."""
        x, y = self.made_up(2, double=True)
        with forked(), torch.no_grad(), code_of_network(x):
            seed_all(0)
            probe = copy.deepcopy(self._model)
            probe = probe if self.inputs.own else probe.double()
            for p in probe.parameters():  # zeros would hide uses of other weights
                p.add_(torch.randn_like(p), alpha=0.1)
            layers = find_layers(probe)
            try:
                self.idle = self._find_idle(probe, x, y)
            except RuntimeError:  # the loss may hold weights of classes in float32
                self._single = _first(self.layers).dtype == torch.float32
                self.idle = self._find_idle(probe, x, y)
            if len(self.idle) == len(layers):
                raise ModelError(UNTRAINED)
            if not self._rowwise:
                self._check_weights(probe, x, y)
            self._keep_padding(probe, layers, x, y)
            why = ""
            for some in (_known(layers), set[str]()):
                self._recorded = some
                while True:
                    try:
                        wrong, alike = self._compare(probe, layers, x, y)
                    except Exception as failure:
                        if out_of_memory(failure):
                            raise
                        why = _reason(failure)
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
        x_0, y_0 = (map_rows(partial(_row, 0), batch) for batch in (x, y))

        def loss_within(apart: WeightsApart) -> Tensor:
            alone = copy.deepcopy(probe, {id(p): p for p in probe.parameters()})
            with constant_draws():
                return self._loss(alone, x_0, y_0, apart)[0]

        self.weighed = check_alone(loss_within, self.views)
        if self._weigh is not None:
            alone = copy.deepcopy(probe, {id(p): p for p in probe.parameters()})
            with constant_draws():
                first, again = (self._loss(alone, x_0, y_0)[1].value for _ in range(2))
            if not first.equal(again):
                raise ModelError(KEEPING_WEIGHTS)

    def _find_idle(self, probe: nn.Module, x: Batch, y: Batch) -> tuple[str, ...]:
        """Return the names of layers on which no sample's loss depends."""
        idle = {name for names in self._names for name in names}
        with constant_draws():
            for *_, gradients in self._one_by_one(probe, x, y, probe.parameters()):
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
            x_i, y_i = (map_rows(partial(_row, i), batch) for batch in (x, y))
            alone = copy.deepcopy(probe, dict(same))
            with constant_draws(), torch.enable_grad():
                others |= read_otherwise(self._loss(alone, x_i, y_i)[0], padded)
        self.layers = [replace(la, padding=None) if la.name in others else la for la in self.layers]

    def _compare(
        self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> tuple[set[str], bool]:
        """Return the names of layers with other gradients, and whether losses are alike.

        Gradients of few samples, and of one layer by its rule, are in memory at a time.
        """
        wrong, found, expected = set[str](), list[Tensor](), list[Tensor]()
        found_weights, expected_weights = list[Tensor](), list[Tensor]()
        step, tolerance = min(self.most, samples_in(x)), SINGLE if self.inputs.own else TOLERANCE
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
                alone = self._one_by_one(probe, some_x, some_y, probe.parameters())
                for i, (loss, weight, gradients) in enumerate(alone):
                    expected.append(loss)
                    expected_weights.append(weight.value)
                    for la, got, names in zip(layers, by_layer, self._names, strict=True):
                        alone_g = [gradients.pop(n) for n in names]
                        if not _alike(_written(la, got, i), alone_g, tolerance):
                            wrong.add(la.name)
        same_losses = _alike([torch.cat(found)], [torch.stack(expected)], tolerance)
        same_weights = _alike(
            [torch.cat(found_weights)], [torch.stack(expected_weights)], tolerance
        )
        return wrong, same_losses and same_weights

    def _note_calls(
        self, model: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> set[nn.Module]:
        """Run the first sample; note the shapes of calls, and return the modules called."""
        self._shapes, called = [], set[nn.Module]()
        x_0, y_0 = (map_rows(partial(_row, 0), batch) for batch in (x, y))

        def note(module: nn.Module, _: Tensor, out: Tensor) -> Tensor:
            called.add(module)
            names = frozenset(layer.name for layer in layers if module in layer.called)
            self._shapes.append((names, tuple(out.shape)))
            return out

        with self._tapped(layers, note), torch.enable_grad():
            self._loss(model, x_0, y_0)
        return called


def _without_memory(loss: Loss) -> Loss:
    """Return a copy of a loss that is a module, so that no record leaves anything in its buffers.

    Its parameters, such as those of a teacher, are not copied.
    """
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss, {id(p): p for p in loss.parameters()})


def _stacked(weights: Sequence[Weights]) -> Weights:
    """Return weights of samples as those of a chunk."""
    return Weights(*map(torch.stack, zip(*weights, strict=True)))


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the parts of a sequence of known layers; None for any other network.

    It has no hooks, not even those of all modules, because they would see several samples.
    """
    held = vars(model)
    hooked = any(held[key] for key in held if key.endswith("_hooks"))
    if "forward" in held or hooked or of_modules._has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    if type(model) is nn.Sequential:
        parts = list(map(chain_of, model))
        return None if None in parts else [part for some in parts for part in some or []]
    plain: Any = model
    rowwise = type(model) in ROWWISE and not getattr(model, "inplace", False)
    flat = type(model) is nn.Flatten and plain.start_dim == 1
    return [model] if rowwise or flat or type(model) in RULES else None


def _known(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers whose gradients follow from calls by a rule."""
    return {
        layer.name
        for layer in layers
        if layer.called
        and all(type(module) in RULES or layer.swapped for module in layer.called)
        and layer.parameters.keys() <= KNOWN
    }


def _calls(
    modules: Sequence[nn.Module], inputs: Sequence[Tensor], deltas: Sequence[Tensor]
) -> Calls:
    """Return the inputs and output gradients of calls by module."""
    calls = Calls(list)
    for module, *found in zip(modules, inputs, deltas, strict=True):
        calls[module].append((found[0], found[1]))
    return calls


def _uses(layer: Layer, calls: Calls) -> list[Use]:
    """Return the uses of a recorded layer."""
    if layer.swapped:
        [module] = layer.called
        return [Use.of(layer.module, delta, a) for a, delta in calls.get(module, [])]
    return [Use.of(m, a, delta) for m in layer.called for a, delta in calls.get(m, [])]


def _tapped_product(
    layers: Iterable[Any],
    tap: Callable[[nn.Module, Tensor, Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``F.linear``; tap products of layers that are not called themselves."""
    out, used = linear(x, weight, bias), (la for la in layers if la.weight is weight)
    layer = next(used, None) if torch.is_grad_enabled() else None
    return out if layer is None else tap(layer, x, out)


def _called_with(model: nn.Module, parameters: dict[str, Tensor], x: Batch) -> Any:
    """Call a network with other parameters; a batch that is a tuple is one argument."""
    return functional_call(model, parameters, (x,))


def _first(layers: Sequence[Layer]) -> Tensor:
    """Return the first parameter, of which the others have dtype and device."""
    return next(iter(layers[0].parameters.values()))


def _taken(p: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, and leave none."""
    g, p.grad = p.grad, None
    return None if g is None else g.to_dense()


def _written(layer: Layer, found: Sequence[Use] | Tensor, sample: int) -> Sequence[Tensor]:
    """Return the gradients of one sample by parameter, flat."""
    if isinstance(found, Tensor):
        return [found[sample, slot] for slot in layer.slices.values()]
    uses = [use.part(slice(sample, sample + 1)) for use in found]
    return [column[0] for column in instantiate(layer, uses)]


def _reason(failure: Exception) -> str:
    """Return why vmap failed on made-up samples, as the end of a sentence."""
    remedies = (remedy for word, remedy in REMEDIES.items() if word in str(failure))
    return next(remedies, what_failed(failure))


def unwrapped(network: nn.Module) -> nn.Module:
    """Return a network without torch.compile and nn.DataParallel, which vmap cannot run."""
    if isinstance(network, nn.DataParallel):
        return unwrapped(network.module)
    before = getattr(network, "_orig_mod", None)
    return before if isinstance(before, nn.Module) else network


def each_alone(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of rows that runs a function on each row alone, without gradients.

    ``run`` maps (1, ...) to (1, ...), by operations that vmap can run.
    """

    def one(row: Tensor) -> Tensor:
        return run(row.unsqueeze(0)).squeeze(0)

    def mapped(rows: Tensor) -> Tensor:
        with torch.no_grad(), _supported():
            found: Tensor = vmap(one, randomness="different")(rows)
        return found

    return mapped


@contextmanager
def _supported() -> Iterator[None]:
    """Choose what vmap supports: the only backend of attention with a batching rule, and masks.

    A vmap of the network's own is not called, because it sees several samples.
    """
    with (
        sdpa_kernel(SDPBackend.MATH),
        masks_kept(),
        replaced(autograd_function, "custom_function_call_vmap_helper", _reject_own_rule),
    ):
        yield


def _reject_own_rule(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(OWN_RULE)


class _Constant(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Replaces random numbers by one half."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in tensors_in(result):
                tensor.fill_(0.5)
        return result


class _DrawnAnew(TorchFunctionMode):
    """Returns a new tensor from ``tensor.bernoulli_(p)``, which vmap only runs on batched tensors.

    So stochastic depth is written: ``torch.empty(shape).bernoulli_(p)``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bernoulli_:
            given = dict(zip(("tensor", "p"), args, strict=False)) | (kwargs or {})
            return torch.bernoulli(torch.zeros_like(given["tensor"]) + given.get("p", 0.5))
        return func(*args, **(kwargs or {}))


class _KeptResults(TorchFunctionMode):
    """Keeps copies of the results of operations on a sample, inside of vmap."""

    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()
        self._results = results
        self._level = torch._C._functorch.maybe_current_level() or 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" not in getattr(func, "__name__", ""):  # which has no values yet
            self._results += [t.detach().clone() for t in tensors_in(result) if self._keeps(t)]
        return result

    def _keeps(self, tensor: Tensor) -> bool:
        """Return whether a result depends on samples, and outlives a vmap of the network's own."""
        return 0 < torch._C._functorch.maybe_get_level(tensor) <= self._level


@contextmanager
def constant_draws() -> Iterator[None]:
    """Make torch's random numbers one half, wherever they are drawn."""
    # The other kernels of attention draw and use random numbers in one operation.
    with sdpa_kernel(SDPBackend.MATH), _Constant():  # type: ignore[no-untyped-call]
        yield


def _row(index: int, rows: Tensor) -> Tensor:
    return rows[index].clone()


def _alike(
    found: Sequence[Tensor], expected: Sequence[Tensor | None], tolerance: float = TOLERANCE
) -> bool:
    """Return whether numbers are finite and differ only by rounding; overwrites ``found``.

    None stands for zeros.
    """
    sizes = [_largest(b) for b in expected if b is not None]
    errors = [
        _largest(a if b is None else a.sub_(b.reshape(a.shape)))
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors) <= tolerance * max(sizes, default=0.0) < math.inf


def _largest(numbers: Tensor) -> float:
    """Return the largest absolute value; infinity if a number is not finite."""
    size = float(vector_norm(numbers, torch.inf)) if numbers.numel() else 0.0
    return math.inf if math.isnan(size) else size
