"""Parameters and modules of a network as a forward pass on an example batch shows them."""

from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch, samples_in, tensors_in, with_another
from dpmac_cli.dp.clipping.outside_reads import Reads
from dpmac_cli.dp.clipping.projections import is_composite, is_plainly_called


@dataclass(frozen=True)
class ExamplePass:
    """Findings of a forward pass; empty if it fails.

    Attributes:
        idle: ids of trained parameters on which no output depends, such as those of a layer that is
            not used. Their gradient is zero for every sample, and they get noise all the same.
        readers: modules that read trained parameters of layers which are not running, with the ids
            of these parameters.
        plain: ids of attention and recurrent layers whose calls are all plain.
        rows: rows per sample of modules that are called with more than one, by id.
    """

    idle: Set[int] = frozenset()
    readers: Mapping[nn.Module, Set[int]] = field(default_factory=dict)
    plain: Set[int] = frozenset()
    rows: Mapping[int, int] = field(default_factory=dict)


def run_example(model: nn.Module, example: Batch) -> ExamplePass:
    """Run a network on an example batch."""
    calls = _Calls()
    reads = Reads(model, calls.running)
    try:
        with torch.enable_grad(), calls.watched(model), reads:
            outputs = model(example)
    except Exception:  # noqa: BLE001  (user code may raise anything, and would in training)
        return ExamplePass()
    plain = {module for module, plainly in calls.plain.items() if plainly}
    return ExamplePass(
        _idle_parameters(model, outputs),
        reads.readers,
        plain,
        _rows_per_sample(model, example, calls),
    )


class _Calls:
    """Calls of modules in a forward pass.

    Attributes:
        running: modules that are running, the outermost first.
        lengths: lengths of the first tensor that a module with parameters was given, by id.
        plain: whether all calls of an attention or recurrent layer were plain, by id.
    """

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.lengths: dict[int, set[int]] = {}
        self.plain: dict[int, bool] = {}

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Watch all modules of a network."""
        with ExitStack() as hooks:
            for module in model.modules():
                before = module.register_forward_pre_hook(self._entered, with_kwargs=True)
                after = module.register_forward_hook(self._left)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def _entered(self, module: nn.Module, inputs: tuple[Any, ...], named: Any) -> None:
        self.running.append(module)
        if is_composite(module):
            plainly = is_plainly_called(module, inputs, named)
            self.plain[id(module)] = self.plain.get(id(module), True) and plainly
        if next(module.parameters(), None) is not None:
            first = next((x for x in inputs if isinstance(x, Tensor) and x.ndim), None)
            self.lengths.setdefault(id(module), set()).add(0 if first is None else len(first))

    def _left(self, *_: object) -> None:
        self.running.pop()


def _idle_parameters(model: nn.Module, outputs: Any) -> set[int]:
    """Return the ids of trained parameters that are in no graph of the outputs."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with torch.enable_grad():
            sums = [x.sum() for x in tensors_in(outputs) if x.requires_grad]
        found = torch.autograd.grad(sums, trained, allow_unused=True)
    except Exception:  # noqa: BLE001  (user code may raise anything, and would in training)
        return set()
    return {id(p) for p, gradient in zip(trained, found, strict=True) if gradient is None}


def _rows_per_sample(model: nn.Module, example: Batch, calls: _Calls) -> dict[int, int]:
    """Return the rows per sample of modules that have several in every call, by id.

    A batch of another size must show the same number: a length may be its multiple by chance.
    """
    found = _multiples(calls, samples_in(example))
    if not found:
        return {}
    again, other = _Calls(), with_another(example)
    try:
        with torch.enable_grad(), again.watched(model):
            model(other)
    except Exception:  # noqa: BLE001  (user code may raise anything, and would in training)
        return {}
    confirmed = _multiples(again, samples_in(other))
    return {module: rows for module, rows in found.items() if confirmed.get(module) == rows}


def _multiples(calls: _Calls, samples: int) -> dict[int, int]:
    """Return how many times as many rows as samples modules have in all their calls, by id."""
    alone = {module: max(of) for module, of in calls.lengths.items() if len(of) == 1}
    return {
        module: length // samples
        for module, length in alone.items()
        if length > samples and length % samples == 0
    }
