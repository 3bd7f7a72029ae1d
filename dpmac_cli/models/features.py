"""Networks with a frozen, public part, and the part that is trained.

Where all that is frozen comes first, it is run over every record once, and the trainer is given its
outputs in place of images. The whole network is published, which takes images. A record's features
depend on that record alone, so they change nothing about the guarantee.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpmac_cli.dp.clipping.modules import ConstantNorm
from dpmac_cli.errors import ModelError
from dpmac_cli.models.registry import SCATTERED, Trained
from dpmac_cli.models.scattering import Scattering

#: Layers that ``--train norm`` trains.
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, ConstantNorm)


class WithHead(nn.Module):
    """A network, which maps images to features, and its head, which maps them to logits."""

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
    """A network of which only the head is trained.

    Features have three dimensions or more beside the samples', and are rounded to the dtype
    ``stored``, in training and evaluation alike.
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

    A norm of 27 groups is between them, as in Tramer and Boneh 2021, arXiv 2011.11660. ``shape`` is
    (channels, height, width) of an image; the head takes that of ``Scattered(kind).shape_of``.
    """
    channels, height, width = shape
    norm = nn.GroupNorm(27, channels * SCATTERED, affine=False)
    network: nn.Module = nn.Sequential(Scattering(height, width), norm)
    network = Mirrored(network) if kind == "scatter-mirror" else network
    return FrozenFeatures(network, head, torch.float16)


def cut_before_head(network: nn.Module, shape: tuple[int, ...]) -> FrozenFeatures:
    """Split a network into a frozen part and its last linear layer, which remain parts of it.

    The frozen part is in evaluation mode: batch norms in it are public constants. Raises ModelError
    if the network does not end in a linear layer of its own.
    """
    name = head_of(network, shape)
    if name is None:
        raise ModelError(
            "--train head trains the last linear layer, whose output must be the logits, and the "
            "network does not end in one that is called once, on one row per sample, and shares no "
            "parameter. Use --train all."
        )
    shared = {id(t): t for t in (*network.parameters(), *network.buffers())}
    frozen = copy.deepcopy(network.eval(), shared)
    frozen.get_submodule(name).forward = lambda x: x  # the output is what the layer is given
    head = nn.Sequential(nn.Flatten(), network.get_submodule(name))
    frozen = nn.Sequential(frozen, nn.Unflatten(1, (-1, 1, 1)))
    return FrozenFeatures(frozen, head, torch.float32)


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


class LoraLinear(nn.Linear):
    """A frozen linear layer, and a trained addition of low rank (Hu et al. 2021, arXiv 2106.09685).

    Weight and bias are those of ``layer`` and keep their names. The addition has the rank that is
    given; it is scaled by alpha / rank, and 0 at first.
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

    Batch norms become constants. The head is that of :func:`head_of`, or the child ``head`` of a
    network with a backbone. Raises ModelError if it has no such part.
    """
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name:
            network.set_submodule(name, ConstantNorm(module, name))
    network.requires_grad_(trained.part == "all")
    if trained.part == "all":
        return
    head = "head" if isinstance(network, WithHead) else head_of(network, shape)
    if head is None:
        raise _missing(trained, "the network does not end in a linear layer of its own")
    parts = [network.get_submodule(head)]
    if trained.part == "norm":
        norms = [module for module in network.modules() if isinstance(module, NORMS)]
        if not norms:
            raise _missing(trained, "the network has no norm")
        parts += norms
    elif trained.part == "lora":
        calls, _ = linear_calls(network, shape)
        names = dict.fromkeys(n for n, *_ in calls if not f"{n}.".startswith(f"{head}."))
        if not names:
            raise _missing(trained, "the network has no linear layer but its head")
        for name in names:
            layer: Any = network.get_submodule(name)
            wrapped = LoraLinear(layer, trained)
            network.set_submodule(name, wrapped)
            parts += [wrapped.down, wrapped.up]
    for part in parts:
        part.requires_grad_(True)


def _missing(trained: Trained, why: str) -> ModelError:
    return ModelError(f"--train {trained.part}: {why}. Choose another part, or --train all.")
