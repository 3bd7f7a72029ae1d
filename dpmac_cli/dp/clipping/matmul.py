"""Matrix products in float32, by the faster of a CPU's two libraries."""

import torch
from torch import Tensor

#: Terms of a product that is faster by MKL because no copy of it is needed.
FEW_TERMS = 64
#: Whether torch was built with oneDNN.
ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b, shape (rows, columns), for a (rows, terms) and b (terms, columns).

    On a CPU, float32 is multiplied by oneDNN, which uses AVX-512 wherever there is any. torch.mm
    calls MKL, which does so on Intel's processors alone: on an AMD EPYC it takes 2.2 times as long.
    oneDNN cannot write to ``out``, so that copying would take longer than a product of few terms.
    """
    by_onednn = ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu"
    few = out is not None and a.shape[1] <= FEW_TERMS
    if not by_onednn or few or a.numel() == 0 or b.numel() == 0:
        return torch.mm(a, b, out=out)
    a, b = _dense(a), _dense(b)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return product if out is None else out.copy_(product)


def sums_of_outer_products(delta: Tensor, a: Tensor) -> Tensor:
    """Return sum_t delta_it a_it^T for each sample i, shape (samples, out, in).

    Args:
        delta: (samples, terms, out).
        a: (samples, terms, in).
    """
    if delta.device.type != "cpu" or delta.dtype != torch.float32:
        return torch.bmm(delta.mT, a)
    pairs = zip(delta, a, strict=True)
    by_sample = [matmul(d.T, x) for d, x in pairs]
    return by_sample[0].unsqueeze(0) if len(by_sample) == 1 else torch.stack(by_sample)


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix without gaps between its rows or columns: oneDNN is very slow with gaps."""
    dense = matrix.is_contiguous() or matrix.T.is_contiguous()
    return matrix if dense else matrix.contiguous()
