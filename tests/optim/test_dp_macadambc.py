"""DP-MacAdamBC against Algorithm 1 with the step of Section III-D."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import HYPER
from tests.optim.judge import (
    SIGMA,
    AdamBC,
    B,
    Gradients,
    Vector,
    assert_follows_paper,
    assert_is_torchs_own,
    cases,
)
from tests.optim.test_dp_macadam import algorithm1


def paper(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    phi = np.zeros_like(theta)

    def move(m_hat: Vector, v: Vector, t: int, noise_variance: Vector) -> Vector:
        nonlocal phi
        phi = p.beta2 * phi + (1 - p.beta2) * noise_variance
        v_hat = v / (1 - p.beta2**t)
        Phi = (SIGMA / B) ** 2 if p.phi == "paper" else phi / (1 - p.beta2**t)
        return np.asarray(p.lr * m_hat / np.sqrt(np.maximum(v_hat - Phi, p.gamma_prime)))

    return algorithm1(theta, gradients, noise, p, move)


@pytest.mark.privacy
@cases(
    {"kappa": "paper", "phi": "paper"},
    {"kappa": "paper", "phi": "tracked"},
    {"kappa": "tracked", "phi": "tracked"},
)
def test_follows_the_paper(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    assert_follows_paper("dp-macadambc", paper, hyper, dtype)


def test_without_noise_and_clipping_is_along_torchs_moments() -> None:
    assert_is_torchs_own("dp-macadambc", lambda params: AdamBC(params, HYPER))
