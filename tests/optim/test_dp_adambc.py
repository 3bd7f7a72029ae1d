"""DP-AdamBC against Tang et al. 2023."""

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
    private_means,
)


def paper(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    Phi = (SIGMA * p.clip_norm / B) ** 2
    for t, g_tilde in enumerate(private_means(theta, gradients, noise, p.clip_norm), start=1):
        m = p.beta1 * m + (1 - p.beta1) * g_tilde
        v = p.beta2 * v + (1 - p.beta2) * g_tilde**2
        m_hat, v_hat = m / (1 - p.beta1**t), v / (1 - p.beta2**t)
        theta -= p.lr * m_hat / np.sqrt(np.maximum(v_hat - Phi, p.gamma_prime))
        yield theta


@pytest.mark.privacy
@cases()
def test_follows_the_paper(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    assert_follows_paper("dp-adambc", paper, hyper, dtype)


def test_without_noise_and_clipping_is_along_torchs_moments() -> None:
    assert_is_torchs_own("dp-adambc", lambda params: AdamBC(params, HYPER))
