"""Matrix products in float32 on a CPU, by MKL or oneDNN: the faster for a processor and a size."""

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Largest number of terms for which MKL is faster because it needs no copy.
FEW_TERMS = 64
#: Multiplications of a product up to which starting oneDNN takes longer than MKL is slower.
SMALL = 1 << 22
#: Whether torch was built with oneDNN.
ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _has_intel() -> bool:
    """Return whether Intel made the processor."""
    listed = Path("/proc/cpuinfo")
    told = listed.read_text()[:1000] if listed.exists() else platform.processor()
    return "GenuineIntel" in told


#: Whether MKL uses all vector instructions of the processor, which it does on Intel's only.
INTEL = _has_intel()


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b, shape (rows, columns), for a (rows, terms) and b (terms, columns).

    On a CPU, float32 products use oneDNN, which uses AVX-512 if available. torch.mm calls MKL,
    which does so only on Intel processors: on an AMD EPYC it takes 2.2 times as long. oneDNN
    cannot write to ``out``: with it, MKL is faster on Intel's processors, and for few terms on all.
    """
    by_mkl = out is not None and (INTEL or a.shape[1] <= FEW_TERMS)
    if not uses_onednn(a) or by_mkl or a.numel() == 0 or b.numel() == 0:
        return torch.mm(a, b, out=out)
    product = _product(_dense(a), _dense(b).T)
    return product if out is None else out.copy_(product)


def batched(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a_i @ b_i, shape (samples, rows, columns), for each sample; written to ``out``.

    ``a`` is (samples, rows, terms), ``b`` (samples, terms, columns). By MKL, whose threads share
    the samples; by oneDNN, one after another, if the products are large and MKL is slow.
    """
    small = a[0].numel() * b.shape[2] <= SMALL if len(a) else True
    if INTEL or small or not uses_onednn(a):
        return torch.bmm(a, b, out=out)
    if out is None:
        out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for left, right, to in zip(a, b, out, strict=True):
        to.copy_(matmul(left, right))
    return out


def _product(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a @ weight.T + bias by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    """A Linear layer by :func:`matmul`, for inputs (rows, in). Its parameters get no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _product(_dense(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, None, None]:
        needed, [weight] = ctx.needs_input_grad[0], ctx.saved_tensors
        return matmul(delta, weight) if needed else None, None, None


@contextmanager
def products_by_onednn(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make Linear layers multiply by :func:`matmul`, forward and backward, in float32 on a CPU.

    Their parameters get no gradients: those of samples follow from inputs and output gradients.
    """
    linear: list[Any] = [m for m in modules if type(m) is nn.Linear and "forward" not in vars(m)]
    for module in linear:
        module.forward = partial(_forward, module)
    try:
        yield
    finally:
        for module in linear:
            del module.forward


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if not uses_onednn(x) or x.ndim < 2 or x.numel() == 0:
        return nn.Linear.forward(module, x)
    rows = _Linear.apply(x.flatten(0, -2), module.weight, module.bias)
    # Not a view: the network may change its output in place.
    whole: Tensor = torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])
    return whole


def uses_onednn(like: Tensor) -> bool:
    """Return whether a product of matrices like this one is computed by oneDNN."""
    return ONEDNN and like.dtype == torch.float32 and like.device.type == "cpu"


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix without gaps between rows or columns, with which oneDNN is very slow."""
    dense = matrix.is_contiguous() or matrix.T.is_contiguous()
    return matrix if dense else matrix.contiguous()
