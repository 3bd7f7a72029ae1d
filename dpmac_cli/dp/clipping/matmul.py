"""Matrix products in float32, by the faster of a CPU's two libraries."""

from dataclasses import dataclass

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
    few = out is not None and a.shape[1] <= FEW_TERMS
    if not _by_onednn(a) or few or a.numel() == 0 or b.numel() == 0:
        return torch.mm(a, b, out=out)
    a, b = _dense(a), _dense(b)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return product if out is None else out.copy_(product)


@dataclass(frozen=True)
class SumsOfOuterProducts:
    """G_i = sum_t delta_it a_it^T for each sample i, which are written to where they are needed."""

    delta: Tensor  # (samples, terms, out)
    a: Tensor  # (samples, terms, in)

    def write(self, out: Tensor) -> Tensor:
        """Write them to ``out``, shape (samples, out, in), and return it."""
        if not _by_onednn(self.delta):
            return out.copy_(torch.bmm(self.delta.mT, self.a))
        for delta, a, to in zip(self.delta, self.a, out, strict=True):
            to.copy_(matmul(delta.T, a))
        return out

    def computed(self) -> Tensor:
        """Return them, shape (samples, out, in)."""
        if not _by_onednn(self.delta):
            return torch.bmm(self.delta.mT, self.a)
        if len(self.delta) == 1:
            return matmul(self.delta[0].T, self.a[0]).unsqueeze(0)
        shape = (len(self.delta), self.delta.shape[2], self.a.shape[2])
        return self.write(self.delta.new_empty(shape))


def _by_onednn(like: Tensor) -> bool:
    return ONEDNN and like.dtype == torch.float32 and like.device.type == "cpu"


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix without gaps between its rows or columns: oneDNN is very slow with gaps."""
    dense = matrix.is_contiguous() or matrix.T.is_contiguous()
    return matrix if dense else matrix.contiguous()
