"""Matrix products by either library: what they round by, and that shapes and gaps do not matter."""

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor

from dpmac_cli.dp.clipping import matmul as libraries
from dpmac_cli.dp.clipping.matmul import FEW_TERMS, SMALL, matmul
from dpmac_cli.dp.clipping.norms import roundoff
from dpmac_cli.dp.clipping.outer_products import OuterProducts

SIZES = [(1, 1, 1), (3, 0, 2), (0, 3, 2), (5, 7, 3), (33, 65, 19), (64, 300, 70), (130, 17, 513)]


def laid_out(matrix: Tensor, how: str) -> Tensor:
    """The same numbers, in another place of memory."""
    if how == "transposed":
        return matrix.T.contiguous().T
    if how == "with gaps":
        wide = torch.full((matrix.shape[0], 2 * matrix.shape[1] + 1), torch.nan, dtype=matrix.dtype)
        wide[:, 1::2] = matrix
        return wide[:, 1::2]
    return matrix


@pytest.fixture(params=["Intel", "another", "without oneDNN"])
def of_any_maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of libraries on a processor of Intel, of another maker, and without oneDNN."""
    monkeypatch.setattr(libraries, "INTEL", request.param == "Intel")
    if request.param == "without oneDNN":
        monkeypatch.setattr(libraries, "ONEDNN", False)


@pytest.mark.privacy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_round_by_no_more_than_the_bound(
    size: tuple[int, int, int], dtype: torch.dtype, of_any_maker: None
) -> None:
    torch.manual_seed(0)
    rows, terms, columns = size
    a, b = torch.randn(rows, terms, dtype=dtype), torch.randn(terms, columns, dtype=dtype)
    exact, reach = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    layouts = ("as it is", "transposed", "with gaps")
    for one, other in itertools.product(layouts, layouts):
        for out in (None, torch.full((rows, columns), torch.nan, dtype=dtype)):
            found = matmul(laid_out(a, one), laid_out(b, other), out=out)
            assert out is None or found is out
            assert found.dtype == dtype
            assert ((found.double() - exact).abs() <= roundoff(terms, dtype) * reach).all()


@pytest.mark.privacy
def test_products_are_full_float32_whatever_the_environment_says() -> None:
    """bfloat16 inside would round by 2^-9 where norms are bounded by 2^-24 a term."""
    code = """
        import torch
        from dpmac_cli.dp.clipping.matmul import matmul
        from dpmac_cli.dp.precision import full_float32
        a, b = torch.randn(200, 300), torch.randn(300, 100)
        with full_float32():
            off = (matmul(a, b) - a.double() @ b.double()).abs().max()
        assert off < 1e-4, off
    """
    loose = {"ONEDNN_DEFAULT_FPMATH_MODE": "ANY", "DNNL_DEFAULT_FPMATH_MODE": "ANY"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, env={**os.environ, **loose}, check=True)


@pytest.mark.privacy
@pytest.mark.parametrize("small", [0, SMALL])
@pytest.mark.parametrize("terms", [1, FEW_TERMS + 1])
def test_each_sample_has_its_own_sum(
    terms: int, small: int, of_any_maker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "SMALL", small)
    delta, a = torch.randn(4, terms, 5), torch.randn(4, terms, 6)
    sums = OuterProducts(delta, a, bias=False)
    exact = torch.einsum("nto,ntk->nok", delta.double(), a.double())
    torch.testing.assert_close(sums.weights().double(), exact, rtol=1e-5, atol=1e-5)
    held = torch.zeros(4, 31)
    sums.weights(held[:, :30].view(4, 5, 6))
    torch.testing.assert_close(held[:, :30], sums.weights().flatten(1), rtol=1e-5, atol=1e-5)
    assert not held[:, 30].any()
    one = OuterProducts(delta[:1], a[:1], bias=False).weights()
    torch.testing.assert_close(one[0].double(), exact[0], rtol=1e-5, atol=1e-5)
