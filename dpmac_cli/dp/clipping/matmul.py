"""Matrix products in float32 on a CPU by oneDNN, and Linear layers that use them.

oneDNN rounds a row of a product by neither the other rows nor its place, and by their number only
where it is 1: docs/rounding.md. ``torch.mm`` calls MKL, which rounds many shapes by all three.
oneDNN also uses AVX-512 on all processors that have it, MKL on Intel's alone: on an AMD EPYC (Zen
5) it takes 2.2 times as long, and 1.1 times with AVX2. The operator is the one that torch.compile
calls; torch has no public one for float32.

A sum over samples may be rounded by all of them, and belongs to a slice of a vector. There,
``torch.mm`` writes to the slice, which saves a copy: :func:`multiply`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from dpmac_cli.dp.clipping.eager_mode import EagerMode

# torch gives it no types.
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ b.T + bias, shape (..., columns), of which no row rounds another.

    On a CPU in float32 by oneDNN, where torch has it; otherwise by ``F.linear``.

    Args:
        a: shape (..., terms).
        b: shape (columns, terms).
        bias: shape (columns,); None to add nothing.

    Example:
        >>> matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([1.0]))
        tensor([[12.]])
    """
    in_float32 = a.device.type == "cpu" and a.dtype == torch.float32
    if _ONEDNN and in_float32 and a.numel() and b.numel():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
        return product
    return linear(a, b, bias)


#: Number of products that are copied to their place at a time: 8 MiB of float32.
COPIED = 1 << 21
#: Line of /proc/cpuinfo of AMD's processors whose AVX-512 units have their full width: Zen 5.
FULL_WIDTH = "cpu family\t: 26\n"


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN on this processor saves more time than a copy of its product takes.

    It is so on AMD's Zen 5 with AVX-512; determined once in a process.
    """
    listed = Path("/proc/cpuinfo")
    wide = listed.exists() and FULL_WIDTH in listed.read_text()
    return _ONEDNN and wide and torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a.T @ b to ``out``; its rows may round each other.

    Args:
        a: shape (terms, rows).
        b: shape (terms, columns).
        out: memory for the result, shape (rows, columns), contiguous. Overwritten.

    Example:
        >>> out = torch.empty(1, 2)
        >>> multiply(torch.tensor([[2.0]]), torch.tensor([[3.0, 4.0]]), out)
        >>> out
        tensor([[6., 8.]])
    """
    in_float32 = a.device.type == "cpu" and a.dtype == torch.float32
    if not (in_float32 and onednn_is_faster()):
        torch.mm(a.T, b, out=out)
        return
    rows = max(1, COPIED // b.shape[1])
    places = torch.split(out, rows)
    groups = torch.split(a.T.contiguous(), rows)
    for to, some in zip(places, groups, strict=True):
        to.copy_(matmul(some, b.T))


#: Least number of rows and columns, and divisor of the number of terms, for which torch's products
#: are tried. With others, MKL rounds by the alignment of rows in memory, and has other kernels.
ALIGNED = 16
#: Largest number of weights for which they are tried: larger products are not slower by oneDNN.
FEW_WEIGHTS = 1 << 16


class RowProducts(EagerMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Computes all matrix products by :func:`matmul`, so that no row rounds another.

    A mode: operations in the block below ``with`` go through it.

    Attributes:
        needed: whether one of them has a shape that torch is not tried with. Otherwise torch's are
            faster: a call of oneDNN takes 11 us more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            a, b = args
            return self._product(a, b, None)
        if func is torch.ops.aten.addmm.default and args[0].ndim == 1 and not kwargs:
            bias, a, b = args
            return self._product(a, b, bias)
        return func(*args, **(kwargs or {}))

    def linear(self, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a @ weight.T + bias, shape (rows, columns), by :func:`matmul`.

        It counts for :attr:`needed`, as products that the mode sees do.

        Args:
            a: shape (rows, terms).
            weight: shape (columns, terms).
            bias: shape (columns,); None to add nothing.
        """
        return self._product(a, weight.T, bias)

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        self.needed = self.needed or not _is_plain(a, b)
        return matmul(a, b.T, bias)


@contextmanager
def product_of_rows() -> Iterator[Callable[..., Tensor]]:
    """Yield a function (x, weight, bias) that returns x @ weight.T + bias, for a ``with`` block.

    The block is one with many small operations. The function is :meth:`RowProducts.linear` where
    that is torch's only mode, which then does not look at each operation of the block, which takes
    5 us. Elsewhere it is ``F.linear``.
    """
    modes = _get_current_dispatch_mode_stack()
    if len(modes) == 1 and isinstance(modes[0], RowProducts):
        with _disable_current_modes():
            yield modes[0].linear
    else:
        yield linear


def _is_plain(a: Tensor, b: Tensor) -> bool:
    """Return whether torch's product a @ b is tried, or :func:`matmul` calls it in any case.

    Args:
        a: shape (rows, terms).
        b: shape (terms, columns).
    """
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return True
    in_order = a.is_contiguous() and (b.is_contiguous() or b.T.is_contiguous())
    aligned = min(len(a), b.shape[1]) >= ALIGNED and len(b) % ALIGNED == 0
    return in_order and aligned and b.numel() <= FEW_WEIGHTS


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
    """Return the outputs of a module, with gradients w.r.t. its inputs alone.

    A Linear layer runs by :func:`matmul`, and no hook of it is called. Any other module is called.

    Args:
        module: a layer of which :func:`~dpmac_cli.dp.clipping.layer_calls.chain_of` knows that it
            acts on each row alone.
        x: its inputs, shape (rows, ...).
    """
    if type(module) is nn.Linear:
        outputs: Tensor = _Linear.apply(x, module.weight, module.bias)
    else:
        outputs = module(x)
    return outputs
