"""Calls of layers whose per-sample gradients follow from inputs and output gradients.

A layer may be called several times in a forward pass, and a call may have several rows per sample.
What is recorded of a call is its input and the gradient of the loss w.r.t. its output. The output
gradient comes from a tap: a function that sees the output and may return another one.
"""

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
        nn.Identity,
        nn.Dropout,
        nn.MaxPool2d,
        nn.AvgPool2d,
        nn.AdaptiveAvgPool2d,
        nn.ReLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.GELU,
        nn.SiLU,
        nn.ELU,
        nn.LeakyReLU,
    }
)
#: Inputs and output gradients of the calls of modules, and weights that they compute.
Calls = defaultdict[nn.Module, list[tuple[Tensor, Tensor, Computed | None]]]
#: Returns the output of a call, given the module, or the weights that it computed, its input and
#: its output.
Tap = Callable[[nn.Module | Computed, Tensor, Tensor], Tensor]


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the parts of a network that is a sequence of known layers, which run on a whole chunk.

    Known are layers with a rule, and modules of torch that act on each row alone. None may have
    hooks, not even those of all modules, because they would see several samples.

    Args:
        model: a network; sequences may be nested.

    Returns:
        Its layers in the order in which they run; None for any other network.

    Example:
        >>> chain = chain_of(nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 2), nn.ReLU())))
        >>> [type(part).__name__ for part in chain]
        ['Flatten', 'Linear', 'ReLU']
        >>> chain_of(nn.Sequential(nn.Linear(4, 2), nn.Softmax(0))) is None  # mixes samples
        True
    """
    attributes = vars(model)
    hooked = any(attributes[key] for key in attributes if key.endswith("_hooks"))
    if "forward" in attributes or hooked or of_modules._has_any_global_hook():  # type: ignore[no-untyped-call]
        return None
    if type(model) is nn.Sequential:
        parts: list[nn.Module] = []
        for module in model:
            chain = chain_of(module)
            if chain is None:
                return None
            parts += chain
        return parts
    known = type(model) in RULES or type(model) is LinearWithPlaces
    if known or _acts_on_rows(model):
        return [model]
    return None


def _acts_on_rows(module: Any) -> bool:
    """Return whether a module without parameters acts on each row alone, and makes a new tensor."""
    if type(module) is nn.Flatten:
        starts_at_columns: bool = module.start_dim == 1
        return starts_at_columns
    return type(module) in ROWWISE and not getattr(module, "inplace", False)


def calls_of(part: nn.Module, x: Tensor) -> tuple[list[tuple[nn.Module, Tensor, Tensor]], Tensor]:
    """Run a part of a chain on all rows of a chunk, and return the calls of layers in it.

    Args:
        part: one of the parts that :func:`chain_of` returns.
        x: its input, shape (rows, ...).

    Returns:
        The calls of known layers (layer, input, output), whose outputs require gradients; and the
        output of the part.
    """
    if type(part) is LinearWithPlaces:
        numbers, rows = part.split(x)
        of_numbers = _requiring_grad(apply(part.numbers, numbers))
        vectors = embedding(rows, part.lookups.weight.detach()).requires_grad_()
        calls = [(part.numbers, numbers, of_numbers), (part.lookups, rows, vectors)]
        return calls, joined(of_numbers, vectors)
    out = apply(part, x)
    if type(part) not in RULES:
        return [], out
    out = _requiring_grad(out)
    return [(part, x, out)], out


def _requiring_grad(out: Tensor) -> Tensor:
    """Return an output that requires gradients, also if nothing before it does."""
    return out if out.requires_grad else out.requires_grad_()


def known_layers(layers: Sequence[Layer]) -> set[str]:
    """Return the names of those layers whose per-sample gradients follow from calls by a rule.

    Args:
        layers: layers of a model, see :func:`~dpmac_cli.dp.clipping.layers.find_layers`.
    """
    names = set[str]()
    for layer in layers:
        if not layer.called:
            continue
        if _has_rule(layer) or all(map(computes_weights, layer.called)):
            names.add(layer.name)
    return names


def _has_rule(layer: Layer) -> bool:
    """Return whether a rule knows all modules and parameters of a layer."""
    if not layer.parameters.keys() <= KNOWN:
        return False
    return layer.swapped or all(type(module) in RULES for module in layer.called)


def calls_by_module(
    called: Sequence[nn.Module | Computed],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
) -> Calls:
    """Group calls by module, in the order of the forward pass.

    Args:
        called: module of each call, or the weights that it computed.
        inputs: input of each call, shape (samples, ...).
        grad_outputs: gradient of the loss w.r.t. the output of each call, shape (samples, ...).

    Returns:
        For each module a list of its calls: input, gradient w.r.t. the output, and the weights that
        it computed, None for a layer that computes none.
    """
    calls = Calls(list)
    for callee, a, grad_output in zip(called, inputs, grad_outputs, strict=True):
        if isinstance(callee, Computed):
            calls[callee.module].append((a, grad_output, callee))
        else:
            calls[callee].append((a, grad_output, None))
    return calls


def uses_of(layer: Layer, calls: Calls) -> list[Use]:
    """Return the uses of a recorded layer by a chunk, one for each call of one of its modules.

    Args:
        layer: a layer of :func:`known_layers`.
        calls: calls of a chunk, see :func:`calls_by_module`.

    Returns:
        Uses in the order of the layer's modules, and of their calls; [] if none was called.
    """
    uses = []
    for module in layer.called:
        for a, grad_output, computed in calls.get(module, []):
            if layer.swapped:
                uses.append(Use.of(layer.module, grad_output, a))
            elif computed is None:
                uses.append(Use.of(module, a, grad_output))
            else:
                through = None if computed.nothing else computed
                uses.append(Use.of(computed.plain, a, grad_output, through))
    return uses


def gradients_of_sample(
    layer: Layer, gradients: Sequence[Use] | Tensor, sample: int
) -> Sequence[Tensor]:
    """Return one sample's gradients w.r.t. the parameters of a layer, written out.

    Args:
        layer: the layer.
        gradients: its uses by a chunk, at least one; or its gradients, shape (samples, d_layer).
        sample: number of the sample in its chunk, from 0.

    Returns:
        One tensor per parameter, in theta's order, shape (size of the parameter,).
    """
    if isinstance(gradients, Tensor):
        return [gradients[sample, part] for part in layer.slices.values()]
    uses = [use.part(slice(sample, sample + 1)) for use in gradients]
    return [column[0] for column in instantiate(layer, uses)]


@contextmanager
def tapped(
    recorded: Sequence[Layer],
    by_function: Collection[str],
    tap: Tap,
) -> Iterator[None]:
    """Call a function in each call of some layers, for the block below ``with``.

    Args:
        recorded: layers whose calls are recorded.
        by_function: names of those that the network does not call: it passes their weight to
            ``F.linear``.
        tap: the function. It gets the module, or the weights that it computed, its input and its
            output, and returns the output that the network sees. Not called without gradients.
    """

    def hook(module: nn.Module, inputs: Any, named: Any, out: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return out  # a network's no_grad block needs no tap
        a = tensors_in((inputs, named))[0]
        return tap(module, a, out)

    modules = set[nn.Module]()
    functional_only = set[nn.Module]()
    composites = set[nn.Module]()
    for layer in recorded:
        modules.update(layer.called)
        if layer.name in by_function:
            functional_only.update(layer.called)
        if layer.composite is not None:
            composites.add(layer.composite)
    with ExitStack() as stack:
        product = partial(_tapped_product, functional_only, tap)
        if functional_only:
            stack.enter_context(replaced(functional, "linear", product))
        stack.enter_context(by_projections(composites, product))
        computing = set(filter(computes_weights, modules))
        stack.enter_context(weights_noted(computing, tap))
        for module in modules - functional_only - computing:
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

    Args:
        layers: modules whose weight may be that of the product.
        tap: see :func:`tapped`.
        x: input, shape (..., in).
        weight: shape (out, in).
        bias: shape (out,); None to add nothing.
        known: the product, if it was computed before, without a gradient.
    """
    if torch.is_grad_enabled():
        for layer in layers:
            if layer.weight is weight:
                product = linear(x, weight, bias) if known is None else known
                return tap(layer, x, product)
    return linear(x, weight, bias)
