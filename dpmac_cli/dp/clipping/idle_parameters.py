"""Parameters on which no output of a network depends, such as those of a layer that is not used.

Their gradient is zero for every sample. They get noise all the same.
"""

import torch
from torch import nn

from dpmac_cli.dp.clipping.batches import Batch, tensors_in


def idle_parameters(model: nn.Module, example: Batch) -> set[int]:
    """Return the ids of trained parameters that are in no graph of outputs of an example batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with torch.enable_grad():
            outputs = [x.sum() for x in tensors_in(model(example)) if x.requires_grad]
            found = torch.autograd.grad(outputs, trained, allow_unused=True)
    except Exception:  # noqa: BLE001  (user code may raise anything, and would in training)
        return set()
    return {id(p) for p, gradient in zip(trained, found, strict=True) if gradient is None}
