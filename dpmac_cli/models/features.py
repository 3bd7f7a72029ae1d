"""Networks with a frozen, public part: only what follows it is trained.

The frozen part is run over every record once, and the trainer is given its outputs in place of
images. The whole network is published, which takes images. A record's features depend on that
record alone, so they change nothing about the guarantee.
"""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli.errors import ModelError
from dpmac_cli.models.scattering import CHANNELS, Scattering


class WithHead(nn.Module):
    """A network and its head, which is trained on its outputs.

    Args:
        frozen: maps images to features.
        head: maps features to logits.
    """

    #: Images that a CPU works on at a time where no gradient is needed.
    at_a_time = 256

    def __init__(self, frozen: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.frozen, self.head = frozen, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits for images."""
        if torch.is_grad_enabled():
            logits: Tensor = self.head(self.frozen(x))
            return logits
        return torch.cat([self.head(self.frozen(part)) for part in self._parts(x)])

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        return torch.split(x, self.at_a_time) if x.device.type == "cpu" else [x]


class FrozenFeatures(WithHead):
    """A frozen part, and what is trained on its outputs.

    Args:
        frozen: maps images to features, (samples, ...), of three dimensions or more.
        head: maps features to logits.
        stored: dtype that features are rounded to, in training and evaluation alike.
    """

    #: Whether the features of the records are computed one record at a time.
    isolated = False

    def __init__(self, frozen: nn.Module, head: nn.Module, stored: torch.dtype) -> None:
        super().__init__(frozen, head)
        self.stored = stored

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return the features of images, in the dtype that they are stored in."""
        return torch.cat([self.frozen(part).to(self.stored) for part in self._parts(x)])

    def public_weights(self) -> dict[str, Tensor]:
        """Return parameters and all buffers of the frozen part by name, and none of the head."""
        trained = {id(p) for p in self.head.parameters()}
        held = (*self.frozen.named_parameters(), *self.frozen.named_buffers())
        return {name: tensor for name, tensor in held if id(tensor) not in trained}

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits for images."""
        logits: Tensor = self.head(self.features(x).to(x.dtype))
        return logits


class Mirrored(nn.Module):
    """Features of images in opponent colours, averaged over each image and its mirror image."""

    #: The sum of red, green and blue and two differences, by row, not yet of unit norm.
    COLOURS = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of images; those without three channels keep their values."""
        if x.shape[1] == len(self.COLOURS):
            x = torch.einsum("oc,nchw->nohw", normalize(self.COLOURS.to(x)), x)
        mean: Tensor = (self.network(x) + self.network(x.flip(3))) / 2
        return mean


def with_features(
    head: nn.Module, shape: tuple[int, int, int], kind: str = "scatter"
) -> FrozenFeatures:
    """Put a network behind the scattering of images, stored in float16 to save memory and disk.

    A norm of 27 groups is between them, as in Tramer and Boneh 2021, arXiv 2011.11660.

    Args:
        head: takes the shape of :meth:`dpmac_cli.models.registry.Scattered.shape_of`.
        shape: (channels, height, width) of an image.
        kind: a key of :data:`dpmac_cli.models.registry.FEATURES`.
    """
    channels, height, width = shape
    norm = nn.GroupNorm(27, channels * CHANNELS, affine=False)
    network: nn.Module = nn.Sequential(Scattering(height, width), norm)
    network = Mirrored(network) if kind == "scatter-mirror" else network
    return FrozenFeatures(network, head, torch.float16)


class Before(nn.Module):
    """The input of a layer of a network, (samples, ...), of four dimensions where it has two."""

    def __init__(self, network: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.network, self._layer = network, [layer]  # in a list, it is no part of this module

    def forward(self, x: Tensor) -> Tensor:
        """Return the input of the layer in a forward pass."""
        seen: list[Tensor] = []
        with self._layer[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            self.network(x)
        # Where images are split there are several; the proof for networks knows no cat.
        given = seen[0] if len(seen) == 1 else torch.cat(seen)
        return given[:, :, None, None] if given.ndim == 2 else given


def cut_before_head(network: nn.Module, shape: tuple[int, ...]) -> FrozenFeatures:
    """Split a network into a frozen part and its last linear layer, which remain parts of it.

    The frozen part is in evaluation mode: batch norms in it are public constants.

    Raises:
        ModelError: it does not end in a linear layer of its own.
    """
    name = head_of(network, shape)
    if name is None:
        raise ModelError(
            "--train head trains the last linear layer, whose output must be the logits, and the "
            "network does not end in one that is called once, on one row per sample, and shares no "
            "parameter. Use --train all."
        )
    layer = network.get_submodule(name)
    return FrozenFeatures(
        Before(network.eval(), layer), nn.Sequential(nn.Flatten(), layer), torch.float32
    )


#: Samples on which calls are looked at.
SEEN = 2
#: A call of a linear layer: its name, input and output.
Call = tuple[str, Tensor, Tensor]


@torch.no_grad()
def linear_calls(network: nn.Module, shape: tuple[int, ...]) -> tuple[list[Call], Tensor]:
    """Return the calls of plain linear layers on made-up samples, and the logits; a copy is run."""
    calls: list[Call] = []

    def note(name: str, _: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        calls.append((name, given[0], out))

    network = copy.deepcopy(network).eval()
    for name, module in network.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(partial(note, name))
    weight = next(network.parameters(), torch.empty(0))
    x = torch.randn(SEEN, *shape, generator=torch.Generator().manual_seed(0)).to(weight)
    return calls, network(x)


def head_of(network: nn.Module, shape: tuple[int, ...]) -> str | None:
    """Return the name of the linear layer whose output is the logits; None if there is none.

    It must be called once, on one row per sample, and share no parameter.
    """
    calls, logits = linear_calls(network, shape)
    if not calls:
        return None
    head, given, out = calls[-1]
    once = [called for called, *_ in calls].count(head) == 1
    fits = given.ndim == 2 and len(given) == SEEN and torch.equal(out, logits)
    owners = [id(p) for _, p in network.named_parameters(remove_duplicate=False)]
    own = all(owners.count(id(p)) == 1 for p in network.get_submodule(head).parameters())
    return head if once and fits and own else None
