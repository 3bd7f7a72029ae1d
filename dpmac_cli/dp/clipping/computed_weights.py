"""Linear layers and convolutions that compute their weight, as weight standardisation does.

Such a layer is a subclass of torch's with a ``forward`` of its own, which calls ``F.linear`` or a
convolution with a weight that is a function of its parameters. With w(theta) the computed weight
and J its Jacobian, which is public, the gradient of a sample is J^T g: g is the gradient w.r.t. the
computed weight, by the rule of the plain layer. Weights that depend on a record have no such form.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpmac_cli.dp.clipping.projections import replaced

#: Plain layers by the name of their function.
PLAIN: Mapping[str, type[nn.Module]] = {
    "linear": nn.Linear,
    **{f"conv{n}d": kind for n, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1)},
}
WEIGHTS_OF_RECORDS = "a layer computes its weight from the record."


def computes_weights(module: nn.Module) -> bool:
    """Return whether a module may be a layer that computes its weight."""
    kinds = tuple(PLAIN.values())
    own = isinstance(module, kinds) and type(module) not in kinds
    return own and "forward" not in vars(module) and not list(module.children())


def with_graph(model: nn.Module, modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters of a network that weights are computed from, with a graph.

    It is {} if none of the modules computes weights.
    """
    computing = {id(p) for m in modules if computes_weights(m) for p in m.parameters()}
    named = model.named_parameters() if computing else ()
    return {name: p.detach().requires_grad_() for name, p in named if id(p) in computing}


@dataclass(frozen=True)
class Computed:
    """Weight and bias of one call, with their graph to the parameters of their layer.

    Attributes:
        module: the layer that was called.
        plain: plain layer with the arguments of the call; its tensors have no values.
        weights: weight and bias as they were computed, by name.
        parameters: those of the layer of which the weights are functions, by name.
    """

    module: nn.Module
    plain: nn.Module
    weights: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]

    @property
    def nothing(self) -> bool:
        """Return whether the weights are the parameters."""
        names = self.parameters.keys()
        return all(self.weights.get(name) is self.parameters[name] for name in names)

    def gradients(self, by_weight: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients w.r.t. the parameters, given those w.r.t. the weights.

        Both have shape (samples, ...).
        """
        used = {name: t for name, t in self.weights.items() if t.requires_grad}
        g = [by_weight[name].view(-1, *t.shape) for name, t in used.items()]
        found = torch.autograd.grad(
            [*used.values()],
            [*self.parameters.values()],
            g,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        pairs = zip(self.parameters.items(), found, strict=True)
        return {
            name: p.new_zeros(len(g[0]), *p.shape) if part is None else part
            for (name, p), part in pairs
        }


#: Returns the output of a call, given the weights that it computed, its input and its output.
Tap = Callable[[Computed, Tensor, Tensor], Tensor]


@contextmanager
def weights_noted(modules: Collection[nn.Module], tap: Tap) -> Iterator[None]:
    """Call ``tap`` in each call of a function of :data:`PLAIN` by one of the modules."""
    within = list[nn.Module]()
    with ExitStack() as stack:
        for module in modules:
            vars(module)["forward"] = partial(_called_within, within, module, module.forward)
            stack.callback(vars(module).pop, "forward")
        for name in PLAIN if modules else ():
            function = partial(_noted, within, tap, name, getattr(functional, name))
            stack.enter_context(replaced(functional, name, function))
        yield


def _called_within(
    within: list[nn.Module],
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    within.append(module)
    try:
        return forward(*args, **named)
    finally:
        within.pop()


def _noted(
    within: list[nn.Module],
    tap: Tap,
    name: str,
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **named: Any,
) -> Tensor:
    if not within or not torch.is_grad_enabled():
        return function(x, weight, bias, *args, **named)
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    weights = {key: _without_levels(t) for key, t in given.items()}
    values = {key: t.detach() for key, t in weights.items()}
    out = function(x, values["weight"], values.get("bias"), *args, **named)
    options = tuple(zip(("stride", "padding", "dilation", "groups"), args, strict=False))
    plain = _plain(name, tuple(weight.shape), bias is not None, (*options, *named.items()))
    module = within[-1]
    trained = module.named_parameters(recurse=False)
    parameters = {key: p for key, p in trained if p.requires_grad}
    return tap(Computed(module, plain, weights, parameters), x, out)


def _without_levels(weight: Tensor) -> Tensor:
    """Return a tensor without the levels of ``torch.func``; raise RuntimeError if it is batched."""
    levels = torch._C._functorch
    while levels.is_functorch_wrapped_tensor(weight):
        if levels.is_batchedtensor(weight):
            raise RuntimeError(WEIGHTS_OF_RECORDS)
        weight = levels.get_unwrapped(weight)
    return weight


@cache
def _plain(
    name: str, shape: tuple[int, ...], bias: bool, options: tuple[tuple[str, Any], ...]
) -> nn.Module:
    """Return a plain layer without values."""
    if name == "linear":
        return nn.Linear(shape[1], shape[0], bias=bias, device="meta")
    named = dict(options)
    inputs = shape[1] * named.get("groups", 1)
    kind: Any = PLAIN[name]
    layer: nn.Module = kind(inputs, shape[0], shape[2:], bias=bias, device="meta", **named)
    return layer
