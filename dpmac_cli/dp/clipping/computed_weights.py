"""Linear layers and convolutions that compute their weight, as weight standardisation does.

Such a layer is a subclass of torch's with a ``forward`` of its own, which calls ``F.linear`` or a
convolution with a weight that is a function of its parameters. With w(theta) the computed weight
and J its Jacobian, which is public, the gradient of a sample is J^T g: g is the gradient w.r.t. the
computed weight, by the rule of the plain layer. Weights that depend on a record have no such form.

The weights of each call are noted while the network runs under vmap, with their graph to the
parameters; J^T g is then one batched call of ``torch.autograd.grad``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpmac_cli.dp.clipping.projections import replaced

#: Plain layers by the name of their function.
PLAIN: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "linear": nn.Linear,
        "conv1d": nn.Conv1d,
        "conv2d": nn.Conv2d,
        "conv3d": nn.Conv3d,
    }
)
#: Arguments of a convolution after its bias.
OPTIONS = ("stride", "padding", "dilation", "groups")
#: Reason why a network with such a layer has no rule for it.
WEIGHTS_OF_RECORDS = "a layer computes its weight from the record."


def computes_weights(module: nn.Module) -> bool:
    """Return whether a module may be a layer that computes its weight: a subclass of a plain one.

    It has a ``forward`` of its class, and no modules inside.

    Args:
        module: any module; :data:`PLAIN` has the plain layers.

    Example:
        >>> class Scaled(nn.Linear):
        ...     def forward(self, x):
        ...         return functional.linear(x, 2 * self.weight, self.bias)
        >>> computes_weights(Scaled(3, 2)), computes_weights(nn.Linear(3, 2))
        (True, False)
    """
    kinds = tuple(PLAIN.values())
    if not isinstance(module, kinds) or type(module) in kinds:
        return False
    return "forward" not in vars(module) and not list(module.children())


def with_graph(model: nn.Module, modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return copies of the parameters that weights are computed from, which require gradients.

    Called with them, a network's computed weights have a graph to them.

    Args:
        model: the network.
        modules: modules of its layers.

    Returns:
        Tensors by the names of the parameters, which share their memory; {} if no module computes
        its weight.
    """
    computing = set[int]()
    for module in modules:
        if computes_weights(module):
            computing.update(map(id, module.parameters()))
    parameters: dict[str, Tensor] = {}
    if computing:
        for name, p in model.named_parameters():
            if id(p) in computing:
                parameters[name] = p.detach().requires_grad_()
    return parameters


@dataclass(frozen=True)
class Computed:
    """Weight and bias that a layer computed for one call, with their graph to its parameters.

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
        """Return whether the call used the parameters themselves, so nothing was computed."""
        names = self.parameters.keys()
        return all(self.weights.get(name) is self.parameters[name] for name in names)

    def gradients(self, by_weight: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return per-sample gradients w.r.t. the parameters: J^T g, with the Jacobian J.

        May be called several times.

        Args:
            by_weight: gradients g w.r.t. the computed weight and bias, by name, with as many
                numbers per sample as the weight has: shape (samples, ...) each.

        Returns:
            Gradients by name of the parameter, shape (samples, *shape of the parameter) each; 0 for
            one that no weight is computed from.
        """
        weights = []
        grad_weights = []
        for name, weight in self.weights.items():
            if weight.requires_grad:
                weights.append(weight)
                grad_weights.append(by_weight[name].view(-1, *weight.shape))
        grad_parameters = torch.autograd.grad(
            weights,
            list(self.parameters.values()),
            grad_weights,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        samples = len(grad_weights[0])
        gradients = {}
        for (name, p), grad_p in zip(self.parameters.items(), grad_parameters, strict=True):
            # None for a parameter that no weight is computed from.
            gradients[name] = p.new_zeros(samples, *p.shape) if grad_p is None else grad_p
        return gradients


#: Returns the output of a call, given the weights that it computed, its input and its output.
Tap = Callable[[Computed, Tensor, Tensor], Tensor]


@contextmanager
def weights_noted(modules: Collection[nn.Module], tap: Tap) -> Iterator[None]:
    """Tap the products of layers that compute their weights, for the block below ``with``.

    In each call of a function of :data:`PLAIN` by one of the modules, ``tap`` gets the weights that
    were computed, and may return another output.

    Args:
        modules: layers that compute their weights, see :func:`computes_weights`.
        tap: gets the weights of the call, its input and its output, and returns the output that the
            layer sees.

    Raises:
        RuntimeError: in the block, if a weight depends on the record.
    """
    if not modules:
        yield
        return
    running = list[nn.Module]()  # the modules whose forward runs now, the innermost last
    with ExitStack() as stack:
        for module in modules:
            vars(module)["forward"] = partial(_run_forward, running, module, module.forward)
            stack.callback(vars(module).pop, "forward")
        for name in PLAIN:
            function = partial(_noted, running, tap, name, getattr(functional, name))
            stack.enter_context(replaced(functional, name, function))
        yield


def _run_forward(
    running: list[nn.Module],
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    """Call a module's forward, and note that it runs."""
    running.append(module)
    try:
        return forward(*args, **named)
    finally:
        running.pop()


def _noted(
    running: list[nn.Module],
    tap: Tap,
    name: str,
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **named: Any,
) -> Tensor:
    """Compute a function of :data:`PLAIN`, and tap its output if a module of dpmac calls it.

    The product is computed with weights without their graph, because gradients w.r.t. them follow
    from the tap.
    """
    if not running or not torch.is_grad_enabled():
        return function(x, weight, bias, *args, **named)
    weights = {"weight": _without_levels(weight)}
    if bias is not None:
        weights["bias"] = _without_levels(bias)
    values = {key: t.detach() for key, t in weights.items()}
    out = function(x, values["weight"], values.get("bias"), *args, **named)
    options = zip(OPTIONS, args, strict=False)
    plain = _plain(name, tuple(weight.shape), bias is not None, (*options, *named.items()))
    module = running[-1]
    parameters = {}
    for key, p in module.named_parameters(recurse=False):
        if p.requires_grad:
            parameters[key] = p
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
    """Return a plain layer without values.

    Args:
        name: key of :data:`PLAIN`.
        shape: shape of the weight.
        bias: whether it has a bias.
        options: arguments of a convolution by name, such as ("stride", 2).
    """
    outputs, inputs, *kernel = shape
    if name == "linear":
        return nn.Linear(inputs, outputs, bias=bias, device="meta")
    arguments = dict(options)
    channels = inputs * arguments.get("groups", 1)
    kind: Any = PLAIN[name]
    layer: nn.Module = kind(channels, outputs, kernel, bias=bias, device="meta", **arguments)
    return layer
