"""Optimizers against their papers, and what no batch may do to them.

A transcription shares nothing with the package but CLIP_LIMIT, the norm that it clips to where the
papers clip to 1. It gets the batches and the standard normal draws of the run that it follows.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn

from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.dp.mechanism import GaussianMechanism, PrivateMean
from dpmac_cli.optim.optimizer import OPTIMIZERS
from tests.conftest import every_optimizer
from tests.helpers import (
    CLIP_LIMIT,
    Batches,
    KeptNoise,
    Spy,
    make_trainer,
    optimizer_of,
    per_sample_gradients,
    planned,
    tiny_data,
    tiny_model,
    walk,
)

Vector = NDArray[np.float64]
#: (theta, t) -> the per-sample gradients of batch t, shape (drawn, d).
Gradients = Callable[[Vector, int], Vector]
#: m-hat_t, v_t, t and the variance of the noise of step t -> theta_{t-1} - theta_t.
Move = Callable[[Vector, Vector, int, Vector], Vector]

#: Chosen so that the estimated variance meets both of its bounds: less noise leaves it on h1.
STEPS, SIGMA, B, H1, H2 = 30, 4.0, 8, 1e-6, 3e-5


# Transcriptions: theta_0, the gradients, the normal draws of the steps, and hyperparameters ->
# theta_1 to theta_T.


def private_means(
    theta: Vector, gradients: Gradients, noise: list[Vector], C: float
) -> Iterator[Vector]:
    """g-tilde_1 to g-tilde_T of a ball of radius C. ``theta`` is changed in place by the caller."""
    for t, z in enumerate(noise, start=1):
        total = SIGMA * C * z
        for g in gradients(theta, t):
            total = total + g / max(1, np.linalg.norm(g) / (C * CLIP_LIMIT))
        yield total / B


def dp_sgd(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    """Abadi et al. 2016, Algorithm 1."""
    for g_tilde in private_means(theta, gradients, noise, p.clip_norm):
        theta -= p.lr * g_tilde
        yield theta


def dp_adam(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    """Lines 12 to 15 of Algorithm 1, with a fixed ball."""

    def move(m_hat: Vector, v: Vector, t: int, _: Vector) -> Vector:
        v_hat = v / (1 - p.beta2**t)  # 14
        return np.asarray(p.lr * m_hat / (np.sqrt(v_hat) + p.gamma))  # 15

    return adam(theta, gradients, noise, p, move)


def adam(
    theta: Vector, gradients: Gradients, noise: list[Vector], p: Any, move: Move
) -> Iterator[Vector]:
    """Adam with a line 15 of its own."""
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, g_tilde in enumerate(private_means(theta, gradients, noise, p.clip_norm), start=1):
        m = p.beta1 * m + (1 - p.beta1) * g_tilde  # 12
        v = p.beta2 * v + (1 - p.beta2) * g_tilde**2  # 13
        theta -= move(m / (1 - p.beta1**t), v, t, np.array((SIGMA * p.clip_norm / B) ** 2))
        yield theta


def dp_adambc(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    """Tang et al. 2023."""

    def move(m_hat: Vector, v: Vector, t: int, Phi: Vector) -> Vector:
        v_hat = v / (1 - p.beta2**t)
        return np.asarray(p.lr * m_hat / np.sqrt(np.maximum(v_hat - Phi, p.gamma_prime)))

    return adam(theta, gradients, noise, p, move)


def adaclip(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    """Pichapati et al. 2019, started at s^2 = sqrt(h1 h2)."""
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


def algorithm1(
    theta: Vector, gradients: Gradients, noise: list[Vector], p: Any, move: Move
) -> Iterator[Vector]:
    """Algorithm 1 with a line 15 of its own, and what replaces lines 18 and 19 for other kappas."""
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


def dp_macadam(
    theta: Vector, gradients: Gradients, noise: list[Vector], p: Any
) -> Iterator[Vector]:
    def move(m_hat: Vector, v: Vector, t: int, _: Vector) -> Vector:
        v_hat = v / (1 - p.beta2**t)
        return np.asarray(p.lr * m_hat / (np.sqrt(v_hat) + p.gamma))

    return algorithm1(theta, gradients, noise, p, move)


def dp_macadambc(
    theta: Vector, gradients: Gradients, noise: list[Vector], p: Any
) -> Iterator[Vector]:
    """The step of Section III-D."""
    phi = np.zeros_like(theta)

    def move(m_hat: Vector, v: Vector, t: int, noise_variance: Vector) -> Vector:
        nonlocal phi
        phi = p.beta2 * phi + (1 - p.beta2) * noise_variance
        v_hat = v / (1 - p.beta2**t)
        Phi = (SIGMA / B) ** 2 if p.phi == "paper" else phi / (1 - p.beta2**t)
        return np.asarray(p.lr * m_hat / np.sqrt(np.maximum(v_hat - Phi, p.gamma_prime)))

    return algorithm1(theta, gradients, noise, p, move)


#: Per optimizer its paper, and hyperparameters to try.
PAPERS: Mapping[str, tuple[Any, tuple[dict[str, Any], ...]]] = {
    "dp-sgd": (dp_sgd, ({},)),
    "adaclip": (adaclip, ({"beta1": 0.99, "beta2": 0.9},)),
    "dp-adam": (dp_adam, ({},)),
    "dp-adambc": (dp_adambc, ({},)),
    "dp-macadam": (dp_macadam, ({"kappa": "paper"}, {"kappa": "exact"}, {"kappa": "tracked"})),
    "dp-macadambc": (
        dp_macadambc,
        (
            {"kappa": "paper", "phi": "paper"},
            {"kappa": "paper", "phi": "tracked"},
            {"kappa": "tracked", "phi": "tracked"},
        ),
    ),
}


@pytest.mark.promise("mean")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("name", "hyper"), [(name, hyper) for name, (*_, of) in PAPERS.items() for hyper in of]
)
def test_every_step_is_that_of_the_paper(
    name: str, hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    """Less closely in float32: besides rounding, its bounds make it clip a little shorter."""
    steps = STEPS if dtype == torch.float64 else 15
    data, noise = tiny_data(), KeptNoise()
    rng = np.random.default_rng(3)
    # One batch is empty and one holds everything.
    sizes = [0 if t == 6 else 40 if t == 9 else rng.binomial(40, B / 40) for t in range(steps)]
    batches = [rng.choice(40, size, replace=False) for size in sizes]
    chosen = {"h1": H1, "h2": H2} | hyper
    trainer = make_trainer(
        name,
        GaussianMechanism(SIGMA, B),
        dtype=dtype,
        sampler=Batches(*batches),
        noise=noise,
        **chosen,
    )
    start = trainer.state.theta.double().numpy().copy()
    ours = walk(trainer, steps).double().numpy()
    draws = [z.double().numpy() for z in noise.drawn]
    assert len(draws) == steps

    def gradients(theta: Vector, t: int) -> Vector:
        return per_sample_gradients(theta, data, batches[t - 1])

    found = PAPERS[name][0](start.copy(), gradients, draws, optimizer_of(name, **chosen))
    theirs = np.stack([theta.copy() for theta in found])
    if dtype == torch.float64:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    moved = np.linalg.norm(theirs - start, axis=1)
    assert (np.linalg.norm(ours - theirs, axis=1) <= 1e-3 * moved).all()


# The registry.


@every_optimizer
def test_every_optimizer_is_in_the_settings_and_refuses_what_is_beyond_its_limits(
    name: str,
) -> None:
    kind = OPTIMIZERS[name]
    assert name in PAPERS
    assert kind.__module__ == f"dpmac_cli.optim.{name.replace('-', '_')}"
    assert kind.model_fields.keys() <= SETTINGS.keys()
    valid = {field: 0.5 for field in kind.model_fields if field not in ("kappa", "phi")}
    assert kind(**valid).with_lr(0.25).lr == 0.25
    for field in valid:
        with pytest.raises(ValidationError):
            kind(**{**valid, field: -1.0})


# Batches of any size, and values that are not finite.


@pytest.mark.promise("mean")
@every_optimizer
def test_an_empty_batch_is_a_step_of_noise_alone(name: str) -> None:
    """Skipping it would tell that nobody was drawn, and take fewer steps than were priced."""
    noise = KeptNoise()
    spy = Spy(1.0, 8)
    trainer = make_trainer(name, spy, sampler=Batches([1, 2], [], [3]), noise=noise)
    thetas = torch.stack([trainer.state.theta.clone(), *walk(trainer, 3)])
    assert trainer.state.step == len(noise.drawn) == len(spy.released) == 3
    torch.testing.assert_close(spy.whitened_sum(1), noise.drawn[1])
    for before, after in pairwise(thetas):
        assert (before != after).all()
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state.tensors().values())
    if OPTIMIZERS[name].keeps:
        assert trainer.state.moments.step == 3


class NotANumber(nn.Module):
    """Turns an image with a bright first pixel into NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :, :1, :1] > 0, float("nan"), x)


@pytest.mark.promise("mean")
@every_optimizer
def test_a_sample_that_is_not_finite_adds_nothing(name: str) -> None:
    """Not even to its neighbours in the batch."""
    data = tiny_data()
    bright = data.train.images[:, 0, 0, 0] > 128
    good, all_rows = torch.nonzero(~bright).flatten().tolist(), range(40)
    assert 0 < len(good) < 40
    thetas = [
        walk(make_trainer(name, model=model, sampler=Batches(rows)), 5)
        for model, rows in (
            (tiny_model(), good),
            (tiny_model(torch.float64, NotANumber()), all_rows),
        )
    ]
    torch.testing.assert_close(thetas[1], thetas[0], rtol=0, atol=1e-12)


@every_optimizer
def test_a_restored_state_goes_on_as_if_nothing_had_happened(name: str) -> None:
    """Tensors and numbers are the whole state: with the same draws, the rest is the same."""
    options: dict[str, Any] = {"kappa": "tracked", "phi": "tracked"}
    options["plan"] = planned(ema=0.9)
    first, second = (make_trainer(name, **options) for _ in range(2))
    walk(first, 5)
    tensors = {key: tensor.clone() for key, tensor in first.state.tensors().items()}
    numbers = json.loads(json.dumps(first.state.numbers()))
    rest = walk(first, 5)
    walk(second, 3)
    second.state.restore(tensors, numbers)
    assert torch.equal(walk(second, 5), rest)
    assert first.state.average is not None
    assert second.state.average is not None
    assert torch.equal(second.state.average, first.state.average)


@pytest.mark.promise("mean")
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *((name, "paper") for name in OPTIMIZERS),
        ("dp-macadam", "tracked"),
        ("dp-macadambc", "tracked"),
    ],
)
def test_the_state_sees_the_data_through_the_private_mean_alone(name: str, choice: str) -> None:
    """Two data sets with nothing in common, the same private means: the same state, to the bit."""
    told = Spy(1.0, 8)
    walk(make_trainer(name, told, kappa=choice, phi=choice), 8)

    class Replay(GaussianMechanism):
        def release(self, *_: object) -> PrivateMean:
            private = next(means)
            return replace(private, value=private.value.clone())

    states, batches = [], (Batches([0, 1, 2]), Batches(range(30), []))
    for seed, sampler in zip((5, 6), batches, strict=True):
        means = iter(told.released)
        data = tiny_data(seed=seed)
        trainer = make_trainer(
            name, Replay(1.0, 8), data=data, sampler=sampler, kappa=choice, phi=choice
        )
        walk(trainer, 8)
        states.append(trainer.state.tensors())
    assert (
        states[0].keys() == states[1].keys() >= {"theta", "m", "v", "centre", "inverse", "factor"}
    )
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key
