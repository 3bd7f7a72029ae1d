"""The part of a network with public weights that is trained: norms, low-rank updates, or all.

Noise grows with the number of trained parameters, and the norm of a clipped gradient does not. So
with few records, train a small part of a large network (docs/fine-tuning.md).
"""

from typing import Any

from torch import Tensor, nn

from dpmac_cli.config.networks import Trained
from dpmac_cli.dp.clipping.custom_layers import ConstantNorm
from dpmac_cli.errors import ModelError
from dpmac_cli.features.frozen import WithHead, head_of, linear_calls, shared_parameters

#: Scale of a low-rank update, times its rank.
ALPHA = 16.0
#: Layers that ``--train norm`` trains.
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, ConstantNorm)


class LoraLinear(nn.Linear):
    """Frozen linear layer with a trained low-rank update (Hu et al. 2021, arXiv 2106.09685).

    It computes W x + b + (alpha / rank) B A x. The update is initially 0, because B is.

    Args:
        layer: layer whose weight and bias these are, by the same names.
        trained: its ``rank`` is that of the update.

    Attributes:
        down: A, of shape (rank, in).
        up: B, of shape (out, rank).
        scale: alpha / rank, where alpha is :data:`ALPHA`.
    """

    def __init__(self, layer: nn.Linear, trained: Trained) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, "meta")
        self.weight, self.bias = layer.weight, layer.bias
        down = nn.Linear(layer.in_features, trained.rank, bias=False)
        up = nn.Linear(trained.rank, layer.out_features, bias=False)
        self.down = down.to(layer.weight)  # its dtype and device
        self.up = up.to(layer.weight)
        self.scale = ALPHA / trained.rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b + (alpha / rank) B A x, shape (samples, ..., out).

        Args:
            x: inputs, shape (samples, ..., in).
        """
        added: Tensor = self.up(self.down(x))
        return super().forward(x) + self.scale * added

    def merged(self) -> Tensor:
        """Return the weight of an equivalent plain layer, W + (alpha / rank) B A, shape (out, in).

        It is computed in float64, and rounded to the dtype of W.
        """
        product = self.up.weight.double() @ self.down.weight.double()
        merged = self.weight.double() + self.scale * product
        return merged.to(self.weight.dtype)


def freeze(network: nn.Module, trained: Trained, shape: tuple[int, ...]) -> None:
    """Freeze everything except one part of a network, in place: trained parameters need gradients.

    Batch norms become constants. The head is that of :func:`head_of`, or the child ``head`` of a
    network with a backbone.

    Args:
        network: network with public weights.
        trained: the part to train: all; the head; also normalisation layers; or also low-rank
            updates, which are added to linear layers.
        shape: shape of a record, on which the network is tried to find its layers.

    Raises:
        ModelError: the network has no such part.
    """
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name:
            network.set_submodule(name, ConstantNorm(module, name))
    network.requires_grad_(trained.part == "all")
    if trained.part == "all":
        return
    head = "head" if isinstance(network, WithHead) else head_of(network, shape)
    if head is None:
        raise _missing(trained, "the network does not end in a linear layer that it does not share")
    parts = [network.get_submodule(head)]
    if trained.part == "norm":
        parts += _norms(network, trained)
    elif trained.part == "lora":
        parts += _low_rank(network, trained, head, shape)
    for part in parts:
        part.requires_grad_(True)


def _norms(network: nn.Module, trained: Trained) -> list[nn.Module]:
    """Return the normalisation layers of a network. Raises ModelError if it has none."""
    norms: list[nn.Module] = [module for module in network.modules() if isinstance(module, NORMS)]
    if not norms:
        raise _missing(trained, "the network has no normalisation layer")
    return norms


def _low_rank(
    network: nn.Module, trained: Trained, head: str, shape: tuple[int, ...]
) -> list[nn.Module]:
    """Wrap linear layers in place, and return the parts of their updates.

    Layers that share a parameter are left out: merged into one of them, an update would change the
    others, too. So are those that the network's family does not name, and layers that are not
    called for a record.

    Args:
        network: network with public weights.
        trained: rank of the updates.
        head: name of the layer that is trained whole.
        shape: shape of a record.

    Raises:
        ModelError: no layer is left.
    """
    calls, _ = linear_calls(network, shape)
    of_family = network.lora_layers if isinstance(network, WithHead) else None
    shared = shared_parameters(network)
    names = list[str]()
    for name in dict.fromkeys(called for called, *_ in calls):
        in_head = f"{name}.".startswith(f"{head}.")
        passed_over = of_family is not None and name not in of_family
        parameters = {id(p) for p in network.get_submodule(name).parameters()}
        if not in_head and not passed_over and shared.isdisjoint(parameters):
            names.append(name)
    if not names:
        raise _missing(trained, "the network has no linear layer of its own besides its head")
    parts = list[nn.Module]()
    for name in names:
        layer: Any = network.get_submodule(name)
        wrapped = LoraLinear(layer, trained)
        network.set_submodule(name, wrapped)
        parts += [wrapped.down, wrapped.up]
    return parts


def _missing(trained: Trained, why: str) -> ModelError:
    """Return the error for a part that a network does not have, with the end of its sentence."""
    return ModelError(f"{{train=}}{trained.part}: {why}. Train another part, or use {{train=}}all.")
