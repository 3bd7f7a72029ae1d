"""AdaClip against Pichapati et al. 2019, started at s^2 = sqrt(h1 h2)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import CLIP_LIMIT, HYPER
from tests.optim.judge import (
    SIGMA,
    B,
    Gradients,
    Vector,
    assert_follows_paper,
    assert_is_torchs_own,
    cases,
)


def paper(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    m = np.zeros_like(theta)
    s = np.full_like(theta, (p.h1 * p.h2) ** 0.25)
    for t, z in enumerate(noise, start=1):
        b = np.sqrt(s) * np.sqrt(s.sum())
        total = SIGMA * z
        for g in gradients(theta, t):
            w = (g - m) / b
            total = total + w / max(1, np.linalg.norm(w) / CLIP_LIMIT)
        g_tilde = b * total / B + m
        theta -= p.lr * g_tilde
        m = p.beta1 * m + (1 - p.beta1) * g_tilde
        v = np.clip((g_tilde - m) ** 2 - b**2 * SIGMA**2 / B**2, p.h1, p.h2)
        s = np.sqrt(p.beta2 * s**2 + (1 - p.beta2) * v)
        yield theta


@pytest.mark.privacy
@cases({"beta1": 0.99, "beta2": 0.9})
def test_follows_the_paper(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    assert_follows_paper("adaclip", paper, hyper, dtype)


def test_without_noise_and_clipping_is_torchs_own() -> None:
    assert_is_torchs_own("adaclip", lambda params: torch.optim.SGD(params, HYPER.lr))
