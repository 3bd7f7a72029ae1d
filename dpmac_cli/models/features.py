"""Networks with a frozen part: what it computes is fixed and public, and only the rest is trained.

The frozen part is run over every record once, and the trainer sees its outputs in place of images.
Published is the whole network, which takes images. A record's features depend on that record alone,
so they change nothing about the guarantee.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm

from dpmac_cli.errors import ModelError
from dpmac_cli.models.scattering import Scattering


class FrozenFeatures(nn.Module):
    """A frozen part, and what is trained on its outputs.

    Args:
        frozen: maps images to features, (samples, channels, height, width).
        head: maps features to logits.
        stored: what features are rounded to. That belongs to the network: the rounding is the same
            in training, which reads them from a cache, and in evaluation, which does not.
    """

    #: Whether the features of the records are computed one record at a time.
    isolated = False

    def __init__(self, frozen: nn.Module, head: nn.Module, stored: torch.dtype) -> None:
        super().__init__()
        self.frozen, self.head, self.stored = frozen, head, stored

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What is kept of images, in the dtype that it is kept in."""
        features: Tensor = self.frozen(x)
        return features.to(self.stored)

    def public_weights(self) -> dict[str, Tensor]:
        """What the frozen part holds by name, constants too, and nothing of the head."""
        trained = {id(p) for p in self.head.parameters()}
        held = (*self.frozen.named_parameters(), *self.frozen.named_buffers())
        return {name: tensor for name, tensor in held if id(tensor) not in trained}

    def forward(self, x: Tensor) -> Tensor:
        """The logits for images."""
        logits: Tensor = self.head(self.features(x).to(x.dtype))
        return logits


class _Scatter(nn.Module):
    """Scattering and a group norm without parameters; 0 groups leave the norm out."""

    def __init__(self, height: int, width: int, groups: int) -> None:
        super().__init__()
        self.scattering, self.groups = Scattering(height, width), groups

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.scattering(x)
        return group_norm(found, self.groups) if self.groups else found


def with_features(head: nn.Module, shape: tuple[int, int, int], groups: int) -> FrozenFeatures:
    """A network that takes images of a shape, in front of one that takes their scattering.

    Features are float16: half the memory and half the disk.

    Args:
        head: takes what :meth:`dpmac_cli.models.registry.Features.shape_of` says.
        shape: (channels, height, width) of an image.
        groups: of the group norm; 0 for none.
    """
    return FrozenFeatures(_Scatter(shape[1], shape[2], groups), head, torch.float16)


class _Before(nn.Module):
    """What a layer of a network is given, shape (samples, columns, 1, 1)."""

    def __init__(self, network: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.network, self._layer = network, [layer]  # in a list, it is no part of this module

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = self._layer[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            self.network(x)
        finally:
            hook.remove()
        return seen[0][:, :, None, None]


def cut_before_head(network: nn.Module, shape: tuple[int, ...]) -> FrozenFeatures:
    """A network as a frozen part and its last linear layer, which stay parts of it.

    The frozen part is in evaluation mode: batch norms in it are public constants.

    Args:
        network: maps images of a shape to logits.
        shape: (channels, height, width).

    Raises:
        ModelError: it does not end in a linear layer of its own.
    """
    name = head_of(network, shape)
    if name is None:
        raise ModelError(
            "--train head trains the last linear layer, whose output must be the logits, and the "
            "network does not end in one that is called once, on one row a sample, and shares no "
            "parameter. Use --train all."
        )
    layer = network.get_submodule(name)
    return FrozenFeatures(
        _Before(network.eval(), layer), nn.Sequential(nn.Flatten(), layer), torch.float32
    )


@torch.no_grad()
def head_of(network: nn.Module, shape: tuple[int, ...]) -> str | None:
    """The name of the linear layer whose output is the logits; None if there is none.

    It must be called once, on one row a sample, and share no parameter. The network is run to see.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []

    def watcher(name: str) -> Any:
        return lambda _, given, out: calls.append((name, given[0], out))

    linear = [(n, m) for n, m in network.named_modules() if type(m) is nn.Linear]
    hooks = [module.register_forward_hook(watcher(name)) for name, module in linear]
    training = {module: module.training for module in network.modules()}
    weight = next(network.parameters(), torch.empty(0))
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        logits = network.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
        for module, before in training.items():
            module.training = before
    if not calls:
        return None
    name, given, out = calls[-1]
    alone = [called for called, *_ in calls].count(name) == 1
    fits = given.ndim == 2 and len(given) == len(x) and torch.equal(out, logits)
    mine = {id(p) for p in network.get_submodule(name).parameters()}
    owners = [id(p) for _, p in network.named_parameters(remove_duplicate=False)]
    shares = any(owners.count(one) > 1 for one in mine)
    return name if alone and fits and not shares else None
