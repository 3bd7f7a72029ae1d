"""DP-SGD against Abadi et al. 2016, Algorithm 1."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers import HYPER, make_trainer, walk
from tests.optim.judge import (
    Gradients,
    Vector,
    assert_follows_paper,
    assert_is_torchs_own,
    cases,
    private_means,
)


def paper(theta: Vector, gradients: Gradients, noise: list[Vector], p: Any) -> Iterator[Vector]:
    for g_tilde in private_means(theta, gradients, noise, p.clip_norm):
        theta -= p.lr * g_tilde
        yield theta


@pytest.mark.privacy
@cases()
def test_follows_the_paper(hyper: dict[str, Any], dtype: torch.dtype) -> None:
    assert_follows_paper("dp-sgd", paper, hyper, dtype)


def test_without_noise_and_clipping_is_torchs_own() -> None:
    assert_is_torchs_own("dp-sgd", lambda params: torch.optim.SGD(params, HYPER.lr))


def test_learning_rate_scales_the_first_step() -> None:
    start = make_trainer("dp-sgd").state.theta
    once, twice = (walk(make_trainer("dp-sgd", lr=lr), 1)[0] - start for lr in (0.1, 0.2))
    torch.testing.assert_close(twice, 2 * once)
