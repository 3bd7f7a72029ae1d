"""Judges of an optimizer: a transcription of its paper, and torch's own without noise and clipping.

A transcription shares nothing with the package but CLIP_LIMIT, the norm that it clips to where the
papers clip to 1. It gets the batches and the standard normal draws of the run that it follows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.optim.optimizer import OPTIMIZERS, InBall
from tests.helpers import (
    CLIP_LIMIT,
    PLAN,
    Batches,
    KeptNoise,
    make_trainer,
    optimizer_of,
    per_sample_gradients,
    tiny_data,
    tiny_model,
    walk,
)

Vector = NDArray[np.float64]
#: (theta, t) -> the per-sample gradients of batch t, shape (drawn, d).
Gradients = Callable[[Vector, int], Vector]
#: theta_0, the gradients, the normal draws of the steps, hyperparameters -> theta_1 to theta_T.
Transcription = Callable[[Vector, Gradients, list[Vector], Any], Iterator[Vector]]

#: Chosen so that the estimated variance meets both of its bounds: less noise leaves it on h1.
STEPS, SIGMA, B, H1, H2 = 50, 4.0, 8, 1e-6, 3e-5


def cases(*hyper: dict[str, Any]) -> pytest.MarkDecorator:
    """Parametrise a test by some hyperparameters, in float64 and in float32."""
    return pytest.mark.parametrize(
        ("hyper", "dtype"), list(product(hyper or ({},), [torch.float64, torch.float32]))
    )


def private_means(
    theta: Vector, gradients: Gradients, noise: list[Vector], C: float
) -> Iterator[Vector]:
    """g-tilde_1 to g-tilde_T of a ball of radius C. ``theta`` is changed in place by the caller."""
    for t, z in enumerate(noise, start=1):
        total = SIGMA * C * z
        for g in gradients(theta, t):
            total = total + g / max(1, np.linalg.norm(g) / (C * CLIP_LIMIT))
        yield total / B


def assert_follows_paper(
    name: str, transcription: Transcription, hyper: dict[str, Any], dtype: torch.dtype
) -> None:
    """Every step of an optimizer is that of the transcription.

    Less closely in float32: besides rounding, its bounds make it clip a little shorter.
    """
    in_float64 = dtype == torch.float64
    ours, theirs = _both_ways(name, transcription, hyper, STEPS if in_float64 else 15, dtype)
    if in_float64:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
        return
    moved = np.linalg.norm(theirs - theirs[0], axis=1)
    assert (np.linalg.norm(ours - theirs, axis=1) <= 1e-3 * moved).all()


def _both_ways(
    name: str, transcription: Transcription, hyper: dict[str, Any], steps: int, dtype: torch.dtype
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

    theirs = transcription(start.copy(), gradients, draws, optimizer_of(name, **chosen))
    return np.stack([start, *ours]), np.stack([start, *(theta.copy() for theta in theirs)])


def assert_is_torchs_own(
    name: str, made: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """Without noise and clipping, an optimizer takes the steps of one of torch's.

    The loss of torch's is the sum over the batch, divided by the expected batch size.
    """
    rng, data, model = np.random.default_rng(0), tiny_data(), tiny_model()
    batches = [rng.choice(40, rng.binomial(40, 0.2), replace=False).tolist() for _ in range(40)]
    theirs = made(model.parameters())
    for rows in batches:
        theirs.zero_grad()
        logits = model(data.standardised(data.train.images[rows]))
        loss = cross_entropy(logits, data.train.labels[rows], reduction="sum")
        (loss / B).backward()  # type: ignore[no-untyped-call]
        theirs.step()
    expected = parameters_to_vector(model.parameters()).detach()
    for private in (False, True) if issubclass(OPTIMIZERS[name], InBall) else (False,):
        plan, quiet = replace(PLAN, private=private), GaussianMechanism(0.0, B)
        sampler = Batches(*batches)
        trainer = make_trainer(name, quiet, plan=plan, sampler=sampler, clip_norm=2.0**33)
        torch.testing.assert_close(walk(trainer, 40)[-1], expected, rtol=0, atol=1e-9)


class AdamBC(torch.optim.Adam):
    """torch's moments of Adam, and the step of DP-AdamBC along them, without noise."""

    def __init__(self, params: Iterable[nn.Parameter], p: Any) -> None:
        super().__init__(params, lr=0.0, betas=(p.beta1, p.beta2))
        self._p = p

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            state: dict[str, Tensor] = self.state[param]
            t = state["step"].item()
            m_hat = state["exp_avg"] / (1 - self._p.beta1**t)
            v_hat = state["exp_avg_sq"] / (1 - self._p.beta2**t)
            param.sub_(self._p.lr * m_hat / v_hat.clamp(min=self._p.gamma_prime).sqrt())
