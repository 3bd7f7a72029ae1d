"""Rejection of networks that compute in fewer than 32 bits, or with other processes."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import tensors_in
from dpmac_cli.errors import ModelError
from dpmac_cli.models.trial import Trial

#: Why at least 32 bits are needed.
ROUNDING = (
    "With fewer than 32 bits, rounding changes the clipped sum by more than the noise allows for."
)
#: Namespaces of torch's operations between processes.
COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


class _Permitted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Reject operations that read other processes, or whose results have fewer than 32 bits.

    The latter is so under autocast.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVE:
            raise ModelError(
                f"The model or its loss calls torch.distributed ({func.overloadpacket.__name__}), "
                "by which a record changes what other processes compute of their records. Remove "
                "that: dpmac adds up the gradients of several processes itself."
            )
        result = func(*args, **(kwargs or {}))
        for value in tensors_in(result):
            if value.is_floating_point() and value.itemsize < 4:
                raise ModelError(
                    f"The model computes {func.overloadpacket.__name__} in {value.dtype}, as under "
                    f"torch.autocast. {ROUNDING} Remove autocast and casts to half precision."
                )
        return result


@torch.enable_grad()
def check_precision(model: nn.Module, trial: Trial) -> None:
    """Reject a network that reads other processes, or computes in fewer than 32 bits on its device.

    Raises ModelError.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x, y = Trial(trial.inputs.to(device), trial.classes).samples(1)
    network = copy.deepcopy(model).train()
    trained = [p for p in network.parameters() if p.requires_grad]
    with torch.random.fork_rng(), _Permitted():  # type: ignore[no-untyped-call]
        loss = trial.loss(network(x), y).sum()
        if loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)
