"""Calls of layers whose per-sample gradients follow from inputs and output gradients."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import embedding, linear
from torch.nn.modules import module as of_modules

from dpmac_cli.dp.clipping.batches import tensors_in
from dpmac_cli.dp.clipping.computed_weights import Computed, computes_weights, weights_noted
from dpmac_cli.dp.clipping.custom_layers import LinearWithPlaces, joined
from dpmac_cli.dp.clipping.layer_rules import KNOWN, RULES, Use, instantiate
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.matmul import apply
from dpmac_cli.dp.clipping.projections import replaced
from dpmac_cli.dp.clipping.recurrent import by_projections

#: Modules without parameters that act on each row alone.
ROWWISE = frozenset(
    {
        *(nn.Identity, nn.Dropout, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU),
    }
)
#: Inputs and output gradients of the calls of modules, and weights that they compute.
Calls = defaultdict[nn.Module, list[tuple[Tensor, Tensor, Computed | None]]]
#: Returns the output of a call, given the module, or the weights that it computed, its input and
#: its output.
Tap = Callable[[nn.Module | Computed, Tensor, Tensor], Tensor]


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
    known = type(model) in RULES or type(model) is LinearWithPlaces
    return [model] if rowwise or flat or known else None


def calls_of(part: nn.Module, x: Tensor) -> tuple[list[tuple[nn.Module, Tensor, Tensor]], Tensor]:
    """Run a part of a chain; return calls of known layers (layer, input, output), and its output.

    Outputs of these layers require gradients.
    """
    if type(part) is LinearWithPlaces:
        numbers, rows = part.split(x)
        of_numbers = apply(part.numbers, numbers)
        vectors = embedding(rows, part.lookups.weight.detach()).requires_grad_()
        of_numbers = of_numbers if of_numbers.requires_grad else of_numbers.requires_grad_()
        calls = [(part.numbers, numbers, of_numbers), (part.lookups, rows, vectors)]
        return calls, joined(of_numbers, vectors)
    out = apply(part, x)
    if type(part) not in RULES:
        return [], out
    out = out if out.requires_grad else out.requires_grad_()
    return [(part, x, out)], out


def known_layers(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the layers whose gradients follow from calls by a rule."""
    return {
        layer.name
        for layer in layers
        if layer.called and (_has_rule(layer) or all(map(computes_weights, layer.called)))
    }


def _has_rule(layer: Layer) -> bool:
    ruled = all(type(module) in RULES or layer.swapped for module in layer.called)
    return ruled and layer.parameters.keys() <= KNOWN


def calls_by_module(
    called: Sequence[nn.Module | Computed],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
) -> Calls:
    """Return the inputs and output gradients of calls by module."""
    calls = Calls(list)
    for of, given, grad_output in zip(called, inputs, grad_outputs, strict=True):
        computed = of if isinstance(of, Computed) else None
        module = of.module if isinstance(of, Computed) else of
        calls[module].append((given, grad_output, computed))
    return calls


def uses_of(layer: Layer, calls: Calls) -> list[Use]:
    """Return the uses of a recorded layer."""
    if layer.swapped:
        [module] = layer.called
        return [Use.of(layer.module, grad_output, a) for a, grad_output, _ in calls.get(module, [])]
    return [_use_of(module, *call) for module in layer.called for call in calls.get(module, [])]


def _use_of(module: nn.Module, a: Tensor, grad_output: Tensor, computed: Computed | None) -> Use:
    if computed is None:
        return Use.of(module, a, grad_output)
    return Use.of(computed.plain, a, grad_output, None if computed.nothing else computed)


def gradients_of_sample(
    layer: Layer, found: Sequence[Use] | Tensor, sample: int
) -> Sequence[Tensor]:
    """Return the gradients of one sample by parameter, flat."""
    if isinstance(found, Tensor):
        return [found[sample, slot] for slot in layer.slices.values()]
    uses = [use.part(slice(sample, sample + 1)) for use in found]
    return [column[0] for column in instantiate(layer, uses)]


@contextmanager
def tapped(
    recorded: Sequence[Layer],
    by_function: Collection[str],
    tap: Tap,
) -> Iterator[None]:
    """Call ``tap`` with the module, input and output of each call of recorded layers.

    ``by_function`` names those whose products are computed by ``F.linear``.
    """

    def hook(module: nn.Module, inputs: Any, named: Any, out: Tensor) -> Tensor:
        # A network's no_grad block needs no tap.
        given = tensors_in((inputs, named))[0]
        return tap(module, given, out) if torch.is_grad_enabled() else out

    modules = dict.fromkeys(module for layer in recorded for module in layer.called)
    functional_only = {m for la in recorded if la.name in by_function for m in la.called}
    composites = {layer.composite for layer in recorded if layer.composite is not None}
    with ExitStack() as stack:
        product = partial(_tapped_product, functional_only, tap)
        if functional_only:
            stack.enter_context(replaced(functional, "linear", product))
        stack.enter_context(by_projections(composites, product))
        computing = set(filter(computes_weights, modules))
        stack.enter_context(weights_noted(computing, tap))
        for module in modules.keys() - functional_only - computing:
            # Before the hooks of the program, which may change the output.
            handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _tapped_product(
    layers: Iterable[Any],
    tap: Tap,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Compute ``F.linear``; tap products of layers that are not called themselves.

    ``known`` is the product, if it was computed before, without a gradient.
    """
    used = (layer for layer in layers if layer.weight is weight)
    layer = next(used, None) if torch.is_grad_enabled() else None
    if layer is None:
        return linear(x, weight, bias)
    return tap(layer, x, linear(x, weight, bias) if known is None else known)
