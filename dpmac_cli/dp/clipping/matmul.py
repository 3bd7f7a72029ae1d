"""Matrix products in float32 on a CPU by oneDNN, and Linear layers that use them.

oneDNN uses AVX-512 on all processors that have it. ``torch.mm`` calls MKL, which uses it on Intel's
alone: on an AMD EPYC (Zen 5) it takes 2.2 times as long, and 1.1 times with AVX2. The operator is
the one that torch.compile calls; torch has no public one for float32.
"""

from typing import Any

import torch
from torch import Tensor, nn

# torch gives it no types.
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ b.T + bias, shape (..., columns).

    Args:
        a: shape (..., terms).
        b: shape (columns, terms).
        bias: shape (columns,); None to add nothing.
    """
    in_float32 = a.device.type == "cpu" and a.dtype == torch.float32
    if _ONEDNN and in_float32 and a.numel() and b.numel():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
        return product
    return nn.functional.linear(a, b, bias)


class _Linear(torch.autograd.Function):
    """Linear layer whose parameters get no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return matmul(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return matmul(grad_outputs[0], weight.T), None, None


def apply(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a module without hooks computes; its parameters get no gradients."""
    if type(module) is nn.Linear:
        y: Tensor = _Linear.apply(x, module.weight, module.bias)
    else:
        y = module(x)
    return y
