"""DP-Adam against lines 12 to 15 of Algorithm 1, with a fixed ball."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import HYPER
from tests.optim.judge import (
    Gradients,
    Vector,
    assert_follows_paper,
    assert_is_torchs_own,
    cases,
    private_means,
)


def paper(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, g_tilde in enumerate(private_means(theta, gradients, noise, p.clip_norm), start=1):
        m = p.beta1 * m + (1 - p.beta1) * g_tilde  # 12
        v = p.beta2 * v + (1 - p.beta2) * g_tilde**2  # 13
        m_hat, v_hat = m / (1 - p.beta1**t), v / (1 - p.beta2**t)  # 14
        theta -= p.lr * m_hat / (np.sqrt(v_hat) + p.gamma)  # 15
        yield theta


@pytest.mark.privacy
@cases()
def test_follows_the_paper(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    assert_follows_paper("dp-adam", paper, hyper, dtype)


def test_without_noise_and_clipping_is_torchs_own() -> None:
    betas = (HYPER.beta1, HYPER.beta2)
    assert_is_torchs_own(
        "dp-adam", lambda params: torch.optim.Adam(params, HYPER.lr, betas, HYPER.gamma)
    )
