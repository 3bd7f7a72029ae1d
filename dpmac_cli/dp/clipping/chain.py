"""Sequences of known layers, which run on whole chunks: their types act on each row alone.

A step of a small network takes less time than by vmap, and computes the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch
from dpmac_cli.dp.clipping.layer_rules import RULES
from dpmac_cli.dp.losses import Loss

#: Modules without parameters that act on each row alone.
ROWWISE = frozenset(
    {
        *(nn.Identity, nn.Dropout, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
        *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU),
    }
)


def chain_of(model: nn.Module) -> list[nn.Module] | None:
    """Return the parts of a sequence of known layers; None for any other network."""
    held = vars(model)
    if "forward" in held or any(held[key] for key in held if key.endswith("_hooks")):
        return None
    if type(model) is nn.Sequential:
        parts = list(map(chain_of, model))
        return None if None in parts else [part for some in parts for part in some or []]
    plain: Any = model
    rowwise = type(model) in ROWWISE and not getattr(model, "inplace", False)
    flat = type(model) is nn.Flatten and plain.start_dim == 1
    return [model] if rowwise or flat or type(model) in RULES else None


def run_chain(
    parts: Sequence[nn.Module], loss: Loss, x: Tensor, y: Batch, views: int
) -> tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
    """Return losses, and each module with a rule, its inputs and its output gradients.

    Args:
        parts: result of :func:`chain_of`. Their parameters require no gradients.
        loss: one loss per row, independent across rows.
        x, y: inputs and labels, (samples * views, ...).
        views: rows per sample. The loss of a sample is the mean over them, shape (samples,).
    """
    calls: list[tuple[nn.Module, Tensor]] = []
    outputs: list[Tensor] = []
    with torch.enable_grad():
        for part in parts:
            given, x = x, part(x)
            if type(part) in RULES:
                x = x if x.requires_grad else x.requires_grad_()
                calls.append((part, given.detach()))
                outputs.append(x)
        losses = loss(x, y).view(-1, views).mean(1)
        deltas = torch.autograd.grad(losses.sum(), outputs)
    return losses.detach(), [(*call, delta) for call, delta in zip(calls, deltas, strict=True)]
