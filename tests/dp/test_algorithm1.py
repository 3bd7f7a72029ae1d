"""Every optimizer against a transcription of its paper, in float64 and without the package.

The transcriptions share nothing with the package but CLIP_LIMIT, the norm it clips to where the
papers clip to 1. They get the batches and the standard normal draws of the run they follow.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.dp.optimizers import Hyperparameters
from tests.helpers import (
    CLIP_LIMIT,
    HYPER,
    Batches,
    KeptNoise,
    make_trainer,
    per_sample_gradients,
    tiny_data,
    walk,
)

Vector = NDArray[np.float64]
#: (theta, t) -> the per-sample gradients of batch t, shape (drawn, d).
Gradients = Callable[[Vector, int], Vector]

#: Chosen so that the estimated variance meets both of its bounds: less noise leaves it on h1.
STEPS, SIGMA, B, H1, H2 = 50, 4.0, 8, 1e-6, 3e-5

CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp-sgd", {}),
    ("dp-adam", {}),
    ("dp-adambc", {}),
    ("adaclip", {"beta1": 0.99, "beta2": 0.9}),
    ("dp-macadam", {"kappa": "paper"}),
    ("dp-macadam", {"kappa": "exact"}),
    ("dp-macadam", {"kappa": "tracked"}),
    ("dp-macadambc", {"kappa": "paper", "phi": "paper"}),
    ("dp-macadambc", {"kappa": "paper", "phi": "tracked"}),
    ("dp-macadambc", {"kappa": "tracked", "phi": "tracked"}),
]


def fixed_ball(
    name: str, theta: Vector, gradients: Gradients, noise: list[Vector], p: Hyperparameters
) -> Iterator[Vector]:
    """DP-SGD (Abadi et al. 2016), DP-Adam, and DP-AdamBC (Tang et al. 2023)."""
    C, m, v = p.clip_norm, np.zeros_like(theta), np.zeros_like(theta)
    for t, z in enumerate(noise, start=1):
        total = SIGMA * C * z
        for g in gradients(theta, t):
            total = total + g / max(1, np.linalg.norm(g) / (C * CLIP_LIMIT))
        g_tilde = total / B
        m = p.beta1 * m + (1 - p.beta1) * g_tilde
        v = p.beta2 * v + (1 - p.beta2) * g_tilde**2
        m_hat, v_hat = m / (1 - p.beta1**t), v / (1 - p.beta2**t)
        if name == "dp-sgd":
            theta = theta - p.lr * g_tilde
        elif name == "dp-adam":
            theta = theta - p.lr * m_hat / (np.sqrt(v_hat) + p.gamma)
        else:
            Phi = (SIGMA * C / B) ** 2
            theta = theta - p.lr * m_hat / np.sqrt(np.maximum(v_hat - Phi, p.gamma_prime))
        yield theta


def adaclip(
    theta: Vector, gradients: Gradients, noise: list[Vector], p: Hyperparameters
) -> Iterator[Vector]:
    """AdaClip (Pichapati et al. 2019), started at s^2 = sqrt(h1 h2)."""
    m = np.zeros_like(theta)
    s = np.full_like(theta, (p.h1 * p.h2) ** 0.25)
    for t, z in enumerate(noise, start=1):
        b = np.sqrt(s) * np.sqrt(s.sum())
        total = SIGMA * z
        for g in gradients(theta, t):
            w = (g - m) / b
            total = total + w / max(1, np.linalg.norm(w) / CLIP_LIMIT)
        g_tilde = b * total / B + m
        theta = theta - p.lr * g_tilde
        m = p.beta1 * m + (1 - p.beta1) * g_tilde
        v = np.clip((g_tilde - m) ** 2 - b**2 * SIGMA**2 / B**2, p.h1, p.h2)
        s = np.sqrt(p.beta2 * s**2 + (1 - p.beta2) * v)
        yield theta


def macadam(
    name: str, theta: Vector, gradients: Gradients, noise: list[Vector], p: Hyperparameters
) -> Iterator[Vector]:
    """Algorithm 1, and what replaces its lines 15, 18 and 19 in the variants."""
    d, beta = len(theta), p.beta1
    m = m_hat = v = s = psi = phi = np.zeros(d)
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
        m_hat, v_hat = m / (1 - beta**t), v / (1 - p.beta2**t)  # 14
        noise_variance = b**2 * SIGMA**2 / B**2
        phi = p.beta2 * phi + (1 - p.beta2) * noise_variance
        if name == "dp-macadam":
            theta = theta - p.lr * m_hat / (np.sqrt(v_hat) + p.gamma)  # 15
        else:
            Phi = (SIGMA / B) ** 2 if p.phi == "paper" else phi / (1 - p.beta2**t)
            theta = theta - p.lr * m_hat / np.sqrt(np.maximum(v_hat - Phi, p.gamma_prime))
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


def both_ways(
    name: str, hyper: dict[str, Any], steps: int, dtype: torch.dtype
) -> tuple[Vector, Vector]:
    """theta_0 to theta_T by the package and by the transcription, shapes (T + 1, d)."""
    data, noise = tiny_data(), KeptNoise()
    rng = np.random.default_rng(3)
    # One batch is empty and one holds everything.
    sizes = [0 if t == 6 else 40 if t == 9 else rng.binomial(40, B / 40) for t in range(steps)]
    batches = [rng.choice(40, size, replace=False) for size in sizes]
    chosen = {"h1": H1, "h2": H2} | hyper
    mechanism = GaussianMechanism(SIGMA, B)
    trainer = make_trainer(
        name, mechanism, dtype=dtype, sampler=Batches(*batches), noise=noise, **chosen
    )
    start = trainer.state.theta.double().numpy().copy()
    ours = walk(trainer, steps).double().numpy()
    draws = [z.double().numpy() for z in noise.drawn]
    assert len(draws) == steps

    def gradients(theta: Vector, t: int) -> Vector:
        return per_sample_gradients(theta, data, batches[t - 1])

    p = replace(HYPER, **chosen)
    if name == "adaclip":
        theirs = adaclip(start, gradients, draws, p)
    elif name.startswith("dp-macadam"):
        theirs = macadam(name, start, gradients, draws, p)
    else:
        theirs = fixed_ball(name, start, gradients, draws, p)
    return np.stack([start, *ours]), np.stack([start, *theirs])


@pytest.mark.privacy
@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_float64_follows_the_paper(name: str, hyper: dict[str, Any]) -> None:
    ours, theirs = both_ways(name, hyper, STEPS, torch.float64)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_float32_follows_the_paper(name: str, hyper: dict[str, Any]) -> None:
    """Less closely: besides rounding, its bounds make float32 clip a little shorter."""
    ours, theirs = both_ways(name, hyper, 15, torch.float32)
    moved = np.linalg.norm(theirs - theirs[0], axis=1)
    assert (np.linalg.norm(ours - theirs, axis=1) <= 1e-3 * moved).all()


@pytest.mark.parametrize("kappa", ["paper", "exact", "tracked"])
def test_the_followed_runs_meet_both_bounds_and_neither(kappa: str) -> None:
    """Else agreement would say nothing of what lies between them."""
    trainer = make_trainer("dp-macadam", GaussianMechanism(SIGMA, B), kappa=kappa, h1=H1, h2=H2)
    low, high = np.zeros(STEPS), np.zeros(STEPS)
    for t in range(STEPS):
        trainer.step()
        public = trainer.public_values()
        low[t], high[t] = public["share_h1"], public["share_h2"]
    assert (low > 0).any()
    assert (high > 0).any()
    assert (low + high < 1).sum() > STEPS / 2
