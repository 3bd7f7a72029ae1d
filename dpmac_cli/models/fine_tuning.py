"""The part of a network with public weights that is trained, and the rest as constants."""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Tracer

from dpmac_cli.dp.clipping.modules import ConstantNorm
from dpmac_cli.errors import ModelError
from dpmac_cli.models.features import Before, FrozenFeatures, WithHead, head_of
from dpmac_cli.models.registry import Trained

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, ConstantNorm)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class LoraLinear(nn.Linear):
    """A frozen linear layer, and a trained addition of low rank (Hu et al. 2021, arXiv 2106.09685).

    Weight and bias keep their names. The addition is 0 at first.

    Args:
        layer: the layer, whose parameters it takes over.
        trained: gives rank and alpha; the addition is scaled by alpha / rank.
    """

    def __init__(self, layer: nn.Linear, trained: Trained) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, "meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Linear(layer.in_features, trained.rank, bias=False).to(layer.weight)
        self.up = nn.Linear(trained.rank, layer.out_features, bias=False).to(layer.weight)
        self.scale = trained.alpha / trained.rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs of shape (samples, ..., in)."""
        added: Tensor = self.up(self.down(x))
        return super().forward(x) + self.scale * added

    def merged(self) -> Tensor:
        """Return the weight of one plain layer that does the same."""
        product = self.up.weight.double() @ self.down.weight.double()
        return (self.weight.double() + self.scale * product).to(self.weight.dtype)


def freeze(network: nn.Module, trained: Trained, shape: tuple[int, ...]) -> None:
    """Have only a part of a network trained; in place.

    Batch norms become constants. The head is that of :func:`~dpmac_cli.models.features.head_of`, or
    the child ``head`` of a network with a backbone.

    Raises:
        ModelError: it has no such part.
    """
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name:
            network.set_submodule(name, ConstantNorm(module))
    network.requires_grad_(trained.part == "all")
    if trained.part == "all":
        return
    head = "head" if isinstance(network, WithHead) else head_of(network, shape)
    if head is None:
        raise _missing(trained, "the network does not end in a linear layer of its own")
    parts = [network.get_submodule(head)]
    if trained.part == "last-block":
        calls = _calls(network, shape)
        parts += map(network.get_submodule, calls[calls.index(last_block(network, shape)) :])
    elif trained.part == "norm":
        norms = [module for module in network.modules() if isinstance(module, NORMS)]
        if not norms:
            raise _missing(trained, "the network has no norm")
        parts += norms
    elif trained.part == "lora":
        parts += _with_additions(network, head, trained, _calls(network, shape))
    for part in parts:
        part.requires_grad_(True)


def _missing(trained: Trained, why: str) -> ModelError:
    return ModelError(f"--train {trained.part}: {why}. Choose another part, or --train all.")


def _with_additions(
    network: nn.Module, head: str, trained: Trained, calls: list[str]
) -> list[nn.Module]:
    """Put additions on the linear layers that are called outside of the head; return them."""
    layers = {
        name: module
        for name in calls
        if type(module := network.get_submodule(name)) is nn.Linear
        and not f"{name}.".startswith(f"{head}.")
    }
    if not layers:
        raise _missing(trained, "the network has no linear layer but its head")
    wrapped = {name: LoraLinear(layer, trained) for name, layer in layers.items()}
    for name, module in wrapped.items():
        network.set_submodule(name, module)
    return [part for module in wrapped.values() for part in (module.down, module.up)]


def last_block(network: nn.Module, shape: tuple[int, ...]) -> str:
    """Return the name of the last called of the blocks that a network repeats.

    A block is of a class that is not torch's, of which the containers of the network hold two or
    more. Raises ModelError.
    """
    held = {
        f"{path}.{name}" if path else name: child
        for path, module in network.named_modules()
        if isinstance(module, CONTAINERS)
        for name, child in module.named_children()
        if not type(child).__module__.startswith("torch.nn.") and not isinstance(child, CONTAINERS)
    }
    kinds = [type(block) for block in held.values()]
    repeated = {name for name, block in held.items() if kinds.count(type(block)) > 1}
    called = [name for name in _calls(network, shape) if name in repeated]
    inner = {name for name in called for other in called if name.startswith(f"{other}.")}
    blocks = [name for name in called if name not in inner]
    if not blocks:
        raise _missing(Trained("last-block"), "the network has no repeated blocks")
    return blocks[-1]


@torch.no_grad()
def _calls(network: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """Return the names of a network's modules in the order of their first calls."""
    calls: dict[str, None] = {}

    def note(name: str, *_: Any) -> None:
        calls.setdefault(name)

    hooks = [m.register_forward_pre_hook(partial(note, n)) for n, m in network.named_modules()]
    training = network.training
    try:
        network.eval()(torch.zeros(1, *shape).to(next(network.parameters())))
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    return list(calls)


def cut_before_block(network: nn.Module, shape: tuple[int, ...]) -> FrozenFeatures | None:
    """Split a network before its last block, whose inputs then need to be computed only once.

    Returns:
        None if what follows cannot be separated: its forward cannot be traced, or reads more than
        the block's one input.
    """
    block, arguments = last_block(network, shape), signature(network.forward).parameters.values()
    fixed = {a.name: a.default for a in arguments if a.default is not a.empty}
    try:
        graph = _Outside(block).trace(network, fixed)
        rest = _after(graph, block)
    except Exception:  # noqa: BLE001  (of code that torch.fx cannot trace, anything)
        return None
    return FrozenFeatures(
        Before(network, network.get_submodule(block)), GraphModule(network, rest), torch.float32
    )


class _Outside(Tracer):
    """Traces only what is around a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether calls of a module are kept as they are."""
        return not self._name.startswith(f"{module_qualified_name}.")


def _after(graph: Graph, block: str) -> Graph:
    """Return the part of a graph from the call of a block on, as a function of its input.

    Raises KeyError if it reads anything else that was computed before.
    """
    [call] = [node for node in graph.nodes if node.target == block]
    rest = Graph()
    copies = {call.args[0]: rest.placeholder("x")}

    def copied(node: Node) -> Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = rest.node_copy(node)
        return copies[node]

    for node in list(graph.nodes)[list(graph.nodes).index(call) :]:
        if node.op == "output":
            rest.output(copied(node.args[0]))
        elif node.op != "get_attr":
            copies[node] = rest.node_copy(node, copied)
    return rest
