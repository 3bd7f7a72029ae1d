"""Matrix products in float32 on a CPU by oneDNN, and Linear layers that use them.

oneDNN rounds a row of a product by neither the other rows nor its place, and by their number only
where it is 1: docs/rounding.md. ``torch.mm`` calls MKL, which rounds many shapes by all three.
oneDNN also uses AVX-512 on all processors that have it, MKL on Intel's alone: on an AMD EPYC (Zen
5) it takes 2.2 times as long, and 1.1 times with AVX2. The operator is the one that torch.compile
calls; torch has no public one for float32.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


#: Least number of rows and columns, and divisor of the number of terms, for which torch's products
#: are tried. With others, MKL rounds by the alignment of rows in memory, and has other kernels.
ALIGNED = 16
#: Largest number of weights for which they are tried: larger products are not slower by oneDNN.
FEW_WEIGHTS = 1 << 16
#: Numbers of rows with which they are tried. They have all remainders by 4, are even and odd, and
#: grow as thresholds in libraries do.
ROWS = (16, 17, 18, 19, 21, 31, 33, 50, 75, 128, 300)
#: Number of rows of a trial.
TRIED = 16


class RowProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Computes all matrix products by :func:`matmul`, so that no row rounds another.

    Attributes:
        needed: whether torch's own product would round rows in one of them, or may do so. Without,
            torch's are faster where products are small: a call of oneDNN takes 11 us more.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.needed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            a, b = args
            return self._product(a, b, None)
        if func is torch.ops.aten.addmm.default and args[0].ndim == 1 and not kwargs:
            bias, a, b = args
            return self._product(a, b, bias)
        return func(*args, **(kwargs or {}))

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        self.needed = self.needed or not torch_rounds_alike(a, b, with_bias=bias is not None)
        return matmul(a, b.T, bias)


def torch_rounds_alike(a: Tensor, b: Tensor, *, with_bias: bool) -> bool:
    """Return whether torch rounds a row of a product a @ b by no other row.

    Args:
        a: shape (rows, terms).
        b: shape (terms, columns).
        with_bias: whether a bias is added.
    """
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return True  # as for matmul
    plain = a.is_contiguous() and (b.is_contiguous() or b.T.is_contiguous())
    aligned = min(len(a), b.shape[1]) >= ALIGNED and len(b) % ALIGNED == 0
    if not plain or not aligned or b.numel() > FEW_WEIGHTS:
        return False
    return _rows_alike(*b.shape, not b.is_contiguous(), with_bias, torch.get_num_threads())


@cache
def _rows_alike(terms: int, columns: int, transposed: bool, with_bias: bool, threads: int) -> bool:
    """Return whether torch rounds equal rows alike in products of this shape, at all places.

    The numbers are of very different sizes and cancel, so that sums show the order of their terms.
    They are the same for all networks and weights.

    Args:
        terms, columns: shape of the second factor.
        transposed: whether it is stored column by column.
        with_bias: whether a bias is added.
        threads: number of threads of torch, by which it chooses how to multiply.
    """
    del threads
    draws = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        exponents = torch.randint(-12, 13, shape, generator=draws)
        return torch.ldexp(torch.randn(shape, generator=draws), exponents)

    rows, b, bias = numbers(TRIED, terms), numbers(terms, columns), numbers(columns)
    b = b.T.contiguous().T if transposed else b
    for row in rows:
        copies = [row.repeat(count, 1) for count in ROWS]
        found = torch.cat([torch.addmm(bias, a, b) if with_bias else a @ b for a in copies])
        if not found.equal(found[:1].expand_as(found)):
            return False
    return True


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
