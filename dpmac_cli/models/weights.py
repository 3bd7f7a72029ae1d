"""Parameters and persistent buffers of a network by name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

#: Keys of the headers that dpmac writes: of a published model, and of a private checkpoint.
MODEL_HEADER, CHECKPOINT_HEADER = "dpmac", "dpmac-checkpoint"
#: Exceptions that reading a header leads to that is not as dpmac writes it.
BROKEN = (KeyError, TypeError, ValueError, OverflowError, RecursionError)


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in ``state_dict``.

    The hooks and the extra state of ``state_dict`` may hold statistics of private records.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def adopt(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters and buffers of the same names, in place."""
    for name, own in published(model).items():
        if name in tensors:
            own.copy_(tensors[name])


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
