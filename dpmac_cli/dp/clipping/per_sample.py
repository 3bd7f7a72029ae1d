"""Per-sample gradients of a network that sees one record at a time, by vmap or in a loop.

The network is a function of one record: no operation of it, of its hooks or of its loss sees two,
so none can mix them. :func:`torch.func.vmap` runs it on all records of a chunk. Layers with a rule
(:data:`.RULES`) have a tap, a zero that is added to their output: the gradient w.r.t. the tap is
the layer's output gradient, one row per record, and norms and weighted sums follow from inputs and
output gradients. The gradients of other parameters are instantiated by the same call of ``grad``.

This is line 5 of Algorithm 1. Two other ways give the same gradients. A sequence of built-in
layers, which are independent across samples, runs on the whole chunk without vmap, which is faster.
A network that vmap cannot run, runs in a loop over copies of it, one for each record.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import (
    Batch,
    Structure,
    by_row,
    map_rows,
    samples_in,
)
from dpmac_cli.dp.clipping.by_vmap import ByVmap, UsesOrGradients, first_parameter
from dpmac_cli.dp.clipping.layer_calls import (
    calls_by_module,
    calls_of,
    chain_of,
    gradients_of_sample,
    known_layers,
    uses_of,
)
from dpmac_cli.dp.clipping.layers import Layer, find_layers
from dpmac_cli.dp.clipping.one_sample import (
    SINGLE,
    TOLERANCE,
    OneSample,
    alike,
    sample_of,
)
from dpmac_cli.dp.clipping.order_of_sums import Elementwise
from dpmac_cli.dp.clipping.padding import read_otherwise
from dpmac_cli.dp.clipping.vmap_support import (
    constant_draws,
    reason_of_vmap,
    unwrapped,
)
from dpmac_cli.dp.copies import copied
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

#: Messages for weights that cannot be used.
KEEPING_WEIGHTS = (
    "weights= returned another weight for the same record again, so one record could change the "
    "weights of others. It must not store anything between calls."
)


class PerSample:
    """Computes per-sample losses and gradients of a network that sees one sample at a time.

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
        recorded: names of the layers whose gradients follow from calls by a rule.
        by_rows: whether products are computed by :class:`.RowProducts` instead of by torch.
        weighed: torch's loss whose class weights are the weights of records; "" for none.
        notes: messages about how the network is run.

    Raises:
        ModelError: the network fails on a made-up sample, or the loss depends on no layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> per_sample = PerSample(model, Structure(torch.zeros(1, 3)))
        >>> x, y = torch.ones(5, 3), torch.zeros(5, dtype=torch.long)
        >>> losses, weights, uses = per_sample(x, y)
        >>> losses.shape, [layer.name for layer in per_sample.layers], uses[0][0].grad_output.shape
        (torch.Size([5]), ['0', '2'], torch.Size([5, 1, 4]))
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
        self._model = model
        self._loss_of = loss
        self._weigh = weigh
        self._rowwise = rowwise
        self._labels = labels
        self.inputs = inputs
        self.views = views
        self.layers = find_layers(model)
        self._names = _names_by_layer(model, self.layers)
        all_names = list(chain.from_iterable(self._names))
        self._alone = OneSample(loss, all_names, views, rowwise=rowwise, weigh=weigh)
        self._by_vmap = ByVmap(self._alone, self._names, known_layers(self.layers))
        self.idle: tuple[str, ...] = ()
        self.weighed = ""
        self.notes: tuple[str, ...] = ()
        # Results of the network's operations, where they are asked for: see :meth:`observed`.
        self._results: list[Tensor] | None = None
        self.vmapped = True
        all_known = rowwise and len(self.recorded) == len(self.layers)
        self._chain = chain_of(model) if all_known else None
        reason = self._try() if self._chain is None else None  # known layers need no trial
        if not any(layer.size for layer in self.layers):
            raise ModelError(UNTRAINED)
        if reason is not None:
            self.run_in_a_loop(reason)

    @property
    def recorded(self) -> set[str]:
        """Return the names of the layers whose gradients follow from calls."""
        return self._by_vmap.recorded

    @property
    def by_rows(self) -> bool:
        """Return whether products are computed by :class:`.RowProducts` instead of by torch."""
        return self._by_vmap.by_rows

    @by_rows.setter
    def by_rows(self, by_rows: bool) -> None:
        self._by_vmap.by_rows = by_rows

    @property
    def most(self) -> int:
        """Return the largest number of samples in a chunk, so that written-out gradients fit.

        It follows from the sizes of layers, so it is public.
        """
        instantiated = 0  # coordinates of layers whose gradients are written out
        for layer in self.layers:
            if not self._by_vmap.records(layer):
                instantiated += layer.stop - layer.start
        return max(1, WRITTEN_OUT // max(1, instantiated))

    def __call__(self, x: Batch, y: Batch) -> tuple[Tensor, Weights, UsesOrGradients]:
        """Return losses, weights and per-sample gradients of a chunk: line 5 of Algorithm 1.

        Args:
            x: inputs: tensors of shape (samples, ...), or (samples, views, ...).
            y: one label per input: tensors of shape (samples, ...) or (samples, views, ...).

        Returns:
            Losses, shape (samples,); weights of the samples; and for each layer its uses, or its
            gradients, shape (samples, d_layer).

        Raises:
            ModelError: the network calls other layers than in the trial.
        """
        if not self.vmapped:
            return self._looped(x, y)
        if self._chain is not None:
            return self._chained(self._chain, x, y)
        return self._by_vmap(self._model, self.layers, x, y, self._results)

    def observed(self, x: Batch, y: Batch) -> list[Tensor]:
        """Return everything that a chunk's gradients are computed from, to compare it bit for bit.

        Gradients are not computed. A result that is equal for two samples may come from values that
        differ, such as the zero of a ReLU or of a hinge loss. So the results of all operations are
        included.

        Args:
            x: inputs of the chunk, shape (samples, ...).
            y: their labels.

        Returns:
            Losses, weights, and results of operations, with one row per sample or view each.
        """
        results = self._results = list[Tensor]()
        try:
            losses, weights, _ = self(x, y)
        finally:
            self._results = None
        return [losses, weights.value, *results]

    def shapes_noted(self, x: Batch, y: Batch) -> tuple[bool, bool, int]:
        """Compute a chunk, and return three facts on how its operations round rows, by its shapes.

        Afterwards, :attr:`by_rows` is True.

        Args:
            x: inputs of the chunk, shape (samples, ...).
            y: their labels.

        Returns:
            True if a matrix product has a shape that torch's products are not tried with; True if
            elementwise operations may round the last rows of an odd number otherwise; and of the
            operations that round the last elements of each thread otherwise, the largest number of
            elements per sample, 0 without any.
        """
        self.by_rows = True
        self._by_vmap.products.needed = False
        with Elementwise() as elementwise:
            self(x, y)
        elements_per_sample = -(-elementwise.largest // samples_in(x))
        return self._by_vmap.products.needed, elementwise.ends, elements_per_sample

    def run_in_a_loop(self, reason: str) -> None:
        """Run samples one after the other from now on, without vmap; there is no way back.

        :attr:`notes` then says so, :attr:`vmapped` is False, and no layer is recorded.

        Args:
            reason: why vmap cannot run the network: a sentence that the note quotes.
        """
        self.vmapped = False
        self._by_vmap.recorded = set()
        self.notes = (LOOP.format(reason),)

    def made_up(self, samples: int, *, double: bool = False) -> tuple[Batch, Batch]:
        """Return made-up inputs and labels of samples, the same in each call.

        Args:
            samples: number of samples, which is that of rows.
            double: whether numbers are in float64, unless a structure keeps their dtype.
        """
        inputs = self.inputs.made_up(samples, double=double)
        labels = self._labels.made_up(samples, double=double)
        return inputs, labels

    def _chained(
        self, parts: Sequence[nn.Module], x: Batch, y: Batch
    ) -> tuple[Tensor, Weights, UsesOrGradients]:
        """Return losses, weights and uses of known layers, which run on the whole chunk."""
        called, inputs, outputs = list[nn.Module](), list[Tensor](), list[Tensor]()
        first = by_row(x, self.views)
        labels = by_row(y, self.views)
        rows = first
        with torch.enable_grad():
            for part in parts:
                calls_of_part, rows = calls_of(part, rows)
                for module, a, out in calls_of_part:
                    called.append(module)
                    inputs.append(a.detach())
                    outputs.append(out)
            losses = self._loss_of(rows, labels).view(-1, self.views)
            if self._weigh is None:
                losses = losses.mean(1)
                weights = equal_weights(losses)
            else:
                value, cut = bounded(self._weigh(first, labels, rows))
                of_rows = Weights(value.view(-1, self.views), cut.view(-1, self.views))
                losses, weights = of_unit(losses, of_rows)
            if self._results is not None:
                self._results += inputs
                self._results += [out.detach() for out in outputs]
                return losses.detach(), weights, []
            grad_outputs = torch.autograd.grad(losses.sum(), outputs)
        by_sample = (-1, self.views)
        calls = calls_by_module(
            called,
            [torch.unflatten(a, 0, by_sample) for a in inputs],
            [torch.unflatten(g, 0, by_sample) for g in grad_outputs],
        )
        return losses.detach(), weights, [uses_of(layer, calls) for layer in self.layers]

    def _looped(self, x: Batch, y: Batch) -> tuple[Tensor, Weights, UsesOrGradients]:
        """Return losses, weights and gradients of samples that run one after the other."""
        like = first_parameter(self.layers)
        samples = samples_in(x)
        by_layer = [like.new_zeros(samples, layer.stop - layer.start) for layer in self.layers]
        losses = list[Tensor]()
        values, cut = list[Tensor](), list[Tensor]()  # of the weights
        one_by_one = self._alone.one_by_one(self._model, x, y)
        for i, (loss, weight, gradients) in enumerate(one_by_one):
            losses.append(loss)
            values.append(weight.value)
            cut.append(weight.cut)
            for layer, names, of_layer in zip(self.layers, self._names, by_layer, strict=True):
                for name, part in zip(names, layer.slices.values(), strict=True):
                    g = gradients.pop(name)
                    if g is not None:
                        of_layer[i, part] = g.flatten()
        weights = Weights(torch.stack(values), torch.stack(cut))
        return torch.stack(losses), weights, [*by_layer]

    def _try(self) -> str | None:
        """Find the layers to record; return why vmap cannot run the network, None if it can."""
        x, y = self.made_up(2, double=True)
        with forked(), torch.no_grad(), code_of_network(x):
            seed_all(0)
            probe = copied(self._model)
            probe = probe if self.inputs.keep_dtype else probe.double()
            for p in probe.parameters():  # zeros would hide uses of other weights
                p.add_(torch.randn_like(p), alpha=0.1)
            layers = find_layers(probe)
            try:
                self.idle = self._find_idle(probe, x, y)
            except RuntimeError:  # the loss may hold weights of classes in float32
                self._alone.single = first_parameter(self.layers).dtype == torch.float32
                self.idle = self._find_idle(probe, x, y)
            if len(self.idle) == len(layers):
                raise ModelError(UNTRAINED)
            if not self._rowwise:
                self._check_weights(probe, x, y)
            self._keep_padding(probe, layers, x, y)
            self._by_vmap.recorded = known_layers(layers)
            reason = self._record_fewer(probe, layers, x, y)
            if reason is not None:  # taps may be what vmap cannot run
                self._by_vmap.recorded = set()
                reason = self._record_fewer(probe, layers, x, y)
        return reason

    def _record_fewer(
        self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> str | None:
        """Record fewer layers until all gradients are right; return why they cannot be."""
        while True:
            try:
                wrong, same_losses = self._compare(probe, layers, x, y)
            except Exception as failure:
                if out_of_memory(failure):
                    raise
                return reason_of_vmap(failure)
            if not wrong and same_losses:
                return None
            if not wrong & self.recorded:
                return "its results under vmap are others."
            self._by_vmap.recorded -= wrong

    def _check_weights(self, probe: nn.Module, x: Batch, y: Batch) -> None:
        """Raise ModelError if class weights in the loss do not multiply all of it."""
        x_0, y_0 = sample_of(0, x), sample_of(0, y)

        def loss_within(apart: WeightsApart) -> Tensor:
            alone = copied(probe, probe.parameters())
            with constant_draws():
                loss, _ = self._alone.loss(alone, x_0, y_0, apart)
            return loss

        self.weighed = check_alone(loss_within, self.views)
        if self._weigh is not None:
            alone = copied(probe, probe.parameters())
            with constant_draws():
                _, first = self._alone.loss(alone, x_0, y_0)
                _, again = self._alone.loss(alone, x_0, y_0)
            if not first.value.equal(again.value):
                raise ModelError(KEEPING_WEIGHTS)

    def _find_idle(self, probe: nn.Module, x: Batch, y: Batch) -> tuple[str, ...]:
        """Return the names of layers on which no sample's loss depends."""
        used = set[str]()
        with constant_draws():
            for *_, gradients in self._alone.one_by_one(probe, x, y, probe.parameters()):
                used |= {name for name, g in gradients.items() if g is not None}
                gradients.clear()
        idle = []
        for layer, names in zip(self.layers, self._names, strict=True):
            if used.isdisjoint(names):
                idle.append(layer.name)
        return tuple(idle)

    def _keep_padding(self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch) -> None:
        """Train the padding of those layers whose weight something else than embeddings reads."""
        padded = {}
        for layer in layers:
            if layer.padding is not None:
                padded[layer.name] = (layer.parameters["weight"], layer.padding)
        if not padded:
            return
        trained = set[str]()  # layers whose padding is an ordinary row
        for i in range(samples_in(x)):
            alone = copied(probe, probe.parameters())
            with constant_draws(), torch.enable_grad():
                loss, _ = self._alone.loss(alone, sample_of(i, x), sample_of(i, y))
                trained |= read_otherwise(loss, padded)
        for number, layer in enumerate(self.layers):
            if layer.name in trained:
                self.layers[number] = replace(layer, padding=None)

    def _compare(
        self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> tuple[set[str], bool]:
        """Return the names of layers with other gradients, and whether losses are alike.

        Layers that are not called are among them, unless ``F.linear`` with their weight is.
        """
        with constant_draws():
            called = self._by_vmap.note_calls(probe, layers, x, y)
            not_called, products = set[str](), set[str]()
            for layer in self._by_vmap.recorded_of(layers):
                if called.isdisjoint(layer.called):
                    not_called.add(layer.name)
                    if all(type(module) is nn.Linear for module in layer.called):
                        products.add(layer.name)
            if not products <= self._by_vmap.by_function:
                self._by_vmap.by_function |= products
                return self._compare(probe, layers, x, y)
            if not_called:
                return not_called, True
            return self._compare_gradients(probe, layers, x, y)

    def _compare_gradients(
        self, probe: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> tuple[set[str], bool]:
        """Compare results under vmap with those of each sample alone, see :meth:`_compare`.

        Gradients of few samples, and of one layer by its rule, are in memory at a time.
        """
        tolerance = SINGLE if self.inputs.keep_dtype else TOLERANCE
        wrong = set[str]()
        losses, weights = list[Tensor](), list[Tensor]()
        expected_losses, expected_weights = list[Tensor](), list[Tensor]()
        step = min(self.most, samples_in(x))
        for begin in range(0, samples_in(x), step):
            few = itemgetter(slice(begin, begin + step))
            some_x, some_y = map_rows(few, x), map_rows(few, y)
            some_losses, some_weights, by_layer = self._by_vmap(probe, layers, some_x, some_y)
            losses.append(some_losses)
            weights.append(some_weights.value)
            one_by_one = self._alone.one_by_one(probe, some_x, some_y, probe.parameters())
            for i, (loss, weight, gradients) in enumerate(one_by_one):
                expected_losses.append(loss)
                expected_weights.append(weight.value)
                for layer, of_layer, names in zip(layers, by_layer, self._names, strict=True):
                    alone = [gradients.pop(name) for name in names]
                    by_rule = gradients_of_sample(layer, of_layer, i)
                    if not alike(by_rule, alone, tolerance):
                        wrong.add(layer.name)
        same_losses = alike([torch.cat(losses)], [torch.stack(expected_losses)], tolerance)
        same_weights = alike([torch.cat(weights)], [torch.stack(expected_weights)], tolerance)
        return wrong, same_losses and same_weights


def _names_by_layer(model: nn.Module, layers: Sequence[Layer]) -> list[list[str]]:
    """Return the names in the model of the parameters of each layer."""
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = []
    for layer in layers:
        parameters = map(id, layer.parameters.values())
        names.append(list(map(name_of.__getitem__, parameters)))
    return names
