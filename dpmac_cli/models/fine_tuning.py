"""The part of a network with public weights that is trained, and the rest as constants."""

from typing import Any

from torch import Tensor, nn

from dpmac_cli.dp.clipping.modules import ConstantNorm
from dpmac_cli.errors import ModelError
from dpmac_cli.models.features import WithHead, head_of, linear_calls
from dpmac_cli.models.registry import Trained

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, ConstantNorm)


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
