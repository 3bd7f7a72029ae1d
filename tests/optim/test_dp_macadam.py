"""DP-MacAdam against Algorithm 1, and what replaces its lines 18 and 19 for other kappas."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dpmac_cli.dp.mechanism import GaussianMechanism
from tests.helpers import CLIP_LIMIT, HYPER, make_trainer
from tests.optim.judge import (
    H1,
    H2,
    SIGMA,
    STEPS,
    B,
    Gradients,
    Vector,
    assert_follows_paper,
    assert_is_torchs_own,
    cases,
)

#: m-hat_t, v_t, t and the variance of the noise of step t -> theta_{t-1} - theta_t.
Move = Callable[[Vector, Vector, int, Vector], Vector]


def algorithm1(
    theta: Vector, gradients: Gradients, noise: list[Vector], p: Any, move: Move
) -> Iterator[Vector]:
    """Algorithm 1 with a line 15 of its own."""
    d, beta = len(theta), p.beta1
    m = m_hat = v = s = psi = np.zeros(d)
    b = np.full(d, 1 / d)
    kappa_star = 0.0
    for t, z in enumerate(noise, start=1):
        w_bar = np.zeros(d)
        for g in gradients(theta, t):
            w = (g - m_hat) / b  # 6
            w_bar = w_bar + w / max(1, np.linalg.norm(w) / CLIP_LIMIT)  # 7
        w_tilde = w_bar / B + SIGMA / B * z  # 9, 10
        g_tilde = b * w_tilde + m_hat  # 11
        m = beta * m + (1 - beta) * g_tilde  # 12
        v = p.beta2 * v + (1 - p.beta2) * g_tilde**2  # 13
        m_hat = m / (1 - beta**t)  # 14
        noise_variance = b**2 * SIGMA**2 / B**2
        theta -= move(m_hat, v, t, noise_variance)  # 15
        u = (g_tilde - m_hat) * (g_tilde - m_hat)  # 16
        s = beta * s + (1 - beta) * u  # 17
        kappa = 2 * (beta - beta**t) / (1 + beta)  # 18
        c = [(1 - beta) * beta ** (t - i) / (1 - beta**t) for i in range(1, t + 1)]
        kappa_star = beta * kappa_star + (1 - beta) * (1 - 2 * c[-1] + sum(x * x for x in c))
        psi = beta * psi + (1 - beta) * (1 - c[-1]) ** 2 * noise_variance
        if t == 1:
            s_hat = np.full(d, p.h1)  # 0 / 0, taken as 0
        elif p.kappa == "paper":
            s_hat = np.clip(s / kappa - noise_variance, p.h1, p.h2)  # 19
        elif p.kappa == "exact":
            s_hat = np.clip(s / kappa_star - noise_variance, p.h1, p.h2)
        else:
            s_hat = np.clip((s - psi) / kappa_star, p.h1, p.h2)
        b = s_hat**0.25 * np.sqrt(np.sum(s_hat**0.5))  # 20
        yield theta


def paper(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    def move(m_hat: Vector, v: Vector, t: int, _: Vector) -> Vector:
        v_hat = v / (1 - p.beta2**t)
        return np.asarray(p.lr * m_hat / (np.sqrt(v_hat) + p.gamma))

    return algorithm1(theta, gradients, noise, p, move)


@pytest.mark.privacy
@cases({"kappa": "paper"}, {"kappa": "exact"}, {"kappa": "tracked"})
def test_follows_the_paper(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    assert_follows_paper("dp-macadam", paper, hyper, dtype)


def test_without_noise_and_clipping_is_torchs_own() -> None:
    betas = (HYPER.beta1, HYPER.beta2)
    assert_is_torchs_own(
        "dp-macadam", lambda params: torch.optim.Adam(params, HYPER.lr, betas, HYPER.gamma)
    )


@pytest.mark.parametrize("kappa", ["paper", "exact", "tracked"])
def test_the_followed_runs_meet_both_bounds_and_neither(kappa: str) -> None:
    """Else agreement would say nothing of what lies between them."""
    trainer = make_trainer("dp-macadam", GaussianMechanism(SIGMA, B), kappa=kappa, h1=H1, h2=H2)
    low, high = np.zeros(STEPS), np.zeros(STEPS)
    for t in range(STEPS):
        trainer.step()
        squares = trainer.state.region.scale.double().square()
        s_hat = squares.square() / squares.sum()  # as b^2 = s-hat^(1/2) times its sum
        low[t] = (s_hat <= H1 * (1 + 1e-4)).double().mean()
        high[t] = (s_hat >= H2 * (1 - 1e-4)).double().mean()
    assert (low > 0).any()
    assert (high > 0).any()
    assert (low + high < 1).sum() > STEPS / 2
