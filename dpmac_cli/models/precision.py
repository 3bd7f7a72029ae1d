"""Reject networks that compute in fewer than 32 bits."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpmac_cli.errors import ModelError
from dpmac_cli.models.features import FrozenFeatures

#: Why 32 bits are needed.
ROUNDING = (
    "In fewer than 32 bits, rounding moves the clipped sum by more than the noise is scaled for."
)


class _FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Rejects any operation whose result has fewer than 32 bits, as under autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4:
                raise ModelError(
                    f"The model computes {func.overloadpacket.__name__} in {value.dtype}, as under "
                    f"torch.autocast. {ROUNDING} Leave out autocast and casts to half."
                )
        return result


@torch.enable_grad()
def check_precision(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Run a network on one sample of a shape, on its device; reject operations below 32 bits.

    The network is not changed. Raises ModelError, naming the operation.
    """
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    x = x.to(next(model.parameters(), x).device)
    if isinstance(model, FrozenFeatures):  # which may round: they are computed once
        x, model = model.features(x).to(x.dtype), model.head
    network = copy.deepcopy(model).train()
    trained = [p for p in network.parameters() if p.requires_grad]
    with torch.random.fork_rng(), _FullPrecision():  # type: ignore[no-untyped-call]
        loss = cross_entropy(network(x), torch.zeros(1, dtype=torch.long, device=x.device))
        if loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)
