"""Per-sample gradients of a network by one call of vmap over the samples of a chunk.

Each recorded layer has a tap: a zero that is added to its output in each call. The gradient of a
sample's loss w.r.t. the tap is the layer's output gradient. So one call of :func:`torch.func.grad`
under :func:`torch.func.vmap` gives inputs and output gradients of all recorded layers, and the
instantiated gradients of the parameters of all others.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from dpmac_cli.dp.clipping.batches import Batch
from dpmac_cli.dp.clipping.computed_weights import Computed, with_graph
from dpmac_cli.dp.clipping.layer_calls import Calls, calls_by_module, tapped, uses_of
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.matmul import RowProducts
from dpmac_cli.dp.clipping.one_sample import OneSample, sample_of
from dpmac_cli.dp.clipping.vmap_support import DrawnAgain, KeptResults, called_with, supported
from dpmac_cli.dp.weights import Weights
from dpmac_cli.errors import ModelError

#: Message for a network that calls its layers differently than in the trial.
OTHER_CALLS = (
    "The network called its layers differently in this step than during validation. Call the same "
    "layers in each forward pass, and use torch.where(condition, a, b) to choose."
)
#: For each layer its uses, or its gradients, shape (samples, d_layer).
UsesOrGradients: TypeAlias = list[list[Use] | Tensor]


class _TappedCalls:
    """Calls of recorded layers in the forward pass of one sample, with a tap for each of them.

    Attributes:
        called: module of each call, or the weights that it computed.
        inputs: input of each call.
    """

    def __init__(self) -> None:
        self.called = list[nn.Module | Computed]()
        self.inputs = list[Tensor]()
        self._taps = list[Tensor]()  # of the calls that are still to come

    def begin(self, taps: Sequence[Tensor]) -> None:
        """Begin a forward pass whose calls have these taps, in their order."""
        self.called.clear()
        self.inputs.clear()
        self._taps[:] = taps

    def tap(self, callee: nn.Module | Computed, a: Tensor, out: Tensor) -> Tensor:
        """Note a call, and return its output with its tap. Raises ModelError for another call."""
        if not self._taps or out.shape != self._taps[0].shape:
            raise ModelError(OTHER_CALLS)
        self.called.append(callee)
        self.inputs.append(a)
        return out.add_(self._taps.pop(0))

    def end(self) -> None:
        """Raise ModelError if fewer calls were made than there are taps."""
        if self._taps:
            raise ModelError(OTHER_CALLS)


class ByVmap:
    """Computes losses and per-sample gradients of a chunk by one call of vmap, when called.

    Args:
        alone: loss of the network on one sample.
        names: for each layer, the names of its parameters in the network.
        recorded: names of the layers whose gradients follow from the inputs and output gradients of
            their calls by a rule.

    Attributes:
        recorded: see above. The others' gradients are instantiated.
        by_function: names of the recorded layers whose products are computed by ``F.linear``.
        by_rows: whether matrix products are computed by ``products`` instead of by torch.
        products: mode that computes them so that no row rounds another.
    """

    def __init__(
        self, alone: OneSample, names: Sequence[Sequence[str]], recorded: set[str]
    ) -> None:
        self._alone = alone
        self._names = names
        self.recorded = recorded
        self.by_function: set[str] = set()
        self.by_rows = False
        self.products = RowProducts()
        # Calls of recorded layers: names of the layers, and shape of the output for one sample.
        self._shapes: list[tuple[frozenset[str], tuple[int, ...]]] = []

    def __call__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        x: Batch,
        y: Batch,
        results: list[Tensor] | None = None,
    ) -> tuple[Tensor, Weights, UsesOrGradients]:
        """Return losses, weights and per-sample gradients of a chunk.

        :meth:`note_calls` must have run with such samples before.

        Args:
            model, layers: the network, or a copy of it, and its layers.
            x, y: inputs and their labels, shape (samples, ...): see :class:`.PerSample`.
            results: list to which the results of all operations are added, one row per sample; no
                gradients are computed then. None to compute gradients.

        Returns:
            Losses, shape (samples,); weights of the samples; and for each layer its uses, or its
            gradients, shape (samples, d_layer). The last list is empty with ``results``.

        Raises:
            ModelError: the network calls its layers differently than when calls were noted.
        """
        recorded = self.recorded_of(layers)
        taps = self._zero_taps(layers)
        trained = self._parameters_without_rule(model, layers)
        computed_from = with_graph(model, [layer.module for layer in recorded])
        tapped_calls = _TappedCalls()
        all_results = None if results is None else list[Tensor]()

        def loss_of(
            taps: Sequence[Tensor], trained: dict[str, Tensor], x: Batch, y: Batch
        ) -> tuple[Tensor, tuple[Tensor, Weights, list[Tensor], list[Tensor]]]:
            """Return the loss of one sample, of which gradients are computed, and the rest."""
            tapped_calls.begin(taps)
            network: Any = model
            replaced = computed_from | trained
            if replaced:
                network = partial(called_with, model, replaced)
            with nullcontext() if all_results is None else KeptResults(all_results):
                loss, weight = self._alone.loss(network, x, y)
            tapped_calls.end()
            return loss, (loss, weight, tapped_calls.inputs, all_results or [])

        gradient: Any = grad if all_results is None else _without_backward
        one = gradient(loss_of, argnums=(0, 1), has_aux=True)
        mapped = vmap(one, in_dims=(None, None, 0, 0), randomness="different")
        taps_on = tapped(recorded, self.by_function, tapped_calls.tap)
        products = self.products if self.by_rows else nullcontext()
        graph = torch.enable_grad() if computed_from else torch.no_grad()
        with graph, supported(), taps_on, DrawnAgain(), products:
            (grad_outputs, g), (losses, weights, inputs, computed) = mapped(taps, trained, x, y)
        if results is not None:
            results += [*inputs, *computed]
            return losses, weights, []
        calls = calls_by_module(tapped_calls.called, inputs, grad_outputs)
        return losses, weights, self._by_layer(layers, calls, g)

    def records(self, layer: Layer) -> bool:
        """Return whether the gradients of a layer follow from its calls, not from ``grad``.

        Args:
            layer: a layer of the network.
        """
        return layer.name in self.recorded

    def recorded_of(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return those of some layers whose gradients follow from their calls, in order.

        Args:
            layers: layers of the network.
        """
        return [layer for layer in layers if self.records(layer)]

    def _by_layer(
        self, layers: Sequence[Layer], calls: Calls, g: dict[str, Tensor]
    ) -> UsesOrGradients:
        """Return the uses of each recorded layer, and the gradients of each other one.

        Args:
            layers: layers of the network.
            calls: calls of the recorded layers.
            g: gradients of the others by parameter, shape (samples, ...) each. Emptied, so that no
                two copies of all are in memory.
        """
        by_layer: UsesOrGradients = []
        for layer, names in zip(layers, self._names, strict=True):
            if self.records(layer):
                by_layer.append(uses_of(layer, calls))
            else:
                columns = []
                for name in names:
                    gradient = g.pop(name)
                    columns.append(gradient.reshape(len(gradient), -1))
                by_layer.append(torch.cat(columns, 1))
        return by_layer

    def _zero_taps(self, layers: Sequence[Layer]) -> list[Tensor]:
        """Return a zero for each call of a recorded layer, in the shape of its output."""
        like = first_parameter(layers)
        taps = []
        for names, shape in self._shapes:
            if names & self.recorded:
                taps.append(like.new_zeros(shape))
        return taps

    def _parameters_without_rule(
        self, model: nn.Module, layers: Sequence[Layer]
    ) -> dict[str, Tensor]:
        """Return the parameters by name of the layers whose gradients are instantiated."""
        named = dict(model.named_parameters())
        parameters: dict[str, Tensor] = {}
        for layer, names in zip(layers, self._names, strict=True):
            if not self.records(layer):
                for name in names:
                    parameters[name] = named[name]
        return parameters

    def note_calls(
        self, model: nn.Module, layers: Sequence[Layer], x: Batch, y: Batch
    ) -> set[nn.Module]:
        """Run the first sample, note the shape of each call, and return the modules called.

        A second call replaces what the first one noted.

        Args:
            model: the network.
            layers: its layers.
            x: made-up inputs, shape (samples, ...).
            y: their labels.
        """
        self._shapes = []
        called = set[nn.Module]()

        def note(callee: nn.Module | Computed, _: Tensor, out: Tensor) -> Tensor:
            module = callee.module if isinstance(callee, Computed) else callee
            called.add(module)
            names = frozenset(layer.name for layer in layers if module in layer.called)
            self._shapes.append((names, tuple(out.shape)))
            return out

        with tapped(self.recorded_of(layers), self.by_function, note), torch.enable_grad():
            self._alone.loss(model, sample_of(0, x), sample_of(0, y))
        return called


def _without_backward(function: Any, **_: Any) -> Any:
    """Return a function of the same arguments that prepares a backward pass, and runs none.

    Instead of gradients, it returns two empty containers. ``function`` is that of a call of
    ``torch.func.grad``, whose other arguments are ignored.
    """

    def forward(taps: Any, trained: Any, x: Batch, y: Batch) -> tuple[Any, Any]:
        def of_differentiated(differentiated: Any) -> Any:
            return function(*differentiated, x, y)

        *_, aux = vjp(of_differentiated, (taps, trained), has_aux=True)
        return ((), ()), aux

    return forward


def first_parameter(layers: Sequence[Layer]) -> Tensor:
    """Return the first parameter of some layers, of which the others have dtype and device.

    Args:
        layers: layers of a network, at least one.
    """
    return next(iter(layers[0].parameters.values()))
