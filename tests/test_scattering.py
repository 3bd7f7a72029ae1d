"""Scattering against an independent implementation, in float64."""

import warnings
from typing import Any

import pytest
import torch

from dpmac_cli.models.registry import SCATTERED
from dpmac_cli.models.scattering import Scattering


@pytest.fixture(scope="module")
def kymatio() -> Any:
    """Kymatio's two-dimensional part; its three-dimensional one asks for what scipy has dropped."""
    import scipy.special  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not hasattr(scipy.special, "sph_harm"):
            patch.setattr(scipy.special, "sph_harm", None, raising=False)
        from kymatio.torch import Scattering2D  # noqa: PLC0415

        return Scattering2D


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (8, 8), (16, 24)])
def test_features_are_those_of_kymatio(kymatio: Any, height: int, width: int) -> None:
    x = torch.rand(3, 2, height, width, dtype=torch.float64)
    oracle = kymatio(J=2, shape=(height, width), L=8)
    oracle.load_filters()
    for name, buffer in oracle.named_buffers():
        oracle.register_buffer(name, buffer.double())
    expected = oracle(x.contiguous())
    found = Scattering(height, width, torch.float64)(x)
    assert found.shape == (3, 2 * SCATTERED, height // 4, width // 4)
    wanted = expected.reshape(found.shape)
    # Kymatio's filters are complex64, and its pi is 3.1415.
    torch.testing.assert_close(found, wanted, rtol=3e-4, atol=1e-6)
    single = Scattering(height, width)(x.float())
    torch.testing.assert_close(single.double(), found, rtol=1e-4, atol=1e-5)


def test_an_image_s_features_are_its_own() -> None:
    scatter = Scattering(16, 16)
    x = torch.rand(4, 1, 16, 16)
    torch.testing.assert_close(scatter(x)[2:3], scatter(x[2:3]), rtol=1e-5, atol=1e-6)
