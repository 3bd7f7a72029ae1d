"""The optimizers that are compared with ours, against what their papers say of one step."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.signal
import torch
from torch import Tensor

from dpmac_cli.dp.clipping.norms import SquaredNorms
from dpmac_cli.dp.geometry import joined
from dpmac_cli.dp.mechanism import PrivateMean
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim.dp_adam import DPAdam

STEPS, SIZE = 12, 5


def loaded(name: str) -> Any:
    """A script of the benchmarks, which are no package."""
    file = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


frontier = loaded("frontier")


def moments(like: Tensor) -> Moments:
    zeros = torch.zeros_like(like)
    return Moments(m=zeros.clone(), v=zeros.clone())


def means() -> Tensor:
    return torch.randn(STEPS, SIZE, generator=torch.Generator().manual_seed(0)).double()


def test_automatic_clipping_scales_every_gradient_and_lets_none_reach_the_limit() -> None:
    norms = torch.tensor([0.0, 1e-3, 0.5, 40.0, torch.inf], dtype=torch.float64)
    c, valid = frontier.automatic(SquaredNorms(norms**2, torch.zeros(5), norms), limit=0.999)
    assert valid.tolist() == [True] * 4 + [False]
    assert c[:4].tolist() == pytest.approx([0.999 / (norm + 0.01) for norm in norms[:4].tolist()])
    assert c[4] == 0
    assert bool((c[:4] * norms[:4] < 0.999).all())


def test_the_filter_is_the_difference_equation_divided_by_its_response() -> None:
    frontier.FILTERED.clear()
    x = means()
    theta, ours = torch.zeros(SIZE).double(), moments(x[0])
    expected, theirs = torch.zeros(SIZE).double(), moments(x[0])
    scale = torch.tensor(1.0).double()
    b, a = [0.05, 0.05], [1.0, -0.9]
    filtered = scipy.signal.lfilter(b, a, x.numpy(), axis=0)
    response = scipy.signal.lfilter(b, a, [1.0] * STEPS)
    for step in range(STEPS):
        ours.step = step + 1
        theirs.step = step + 1
        frontier.Doppler(clip_norm=1).update(theta, 0.1, PrivateMean(x[step], scale, 0.5), ours)
        y = torch.from_numpy(filtered[step] / response[step])
        DPAdam(clip_norm=1).update(expected, 0.1, PrivateMean(y, scale, 0.5), theirs)
    torch.testing.assert_close(theta, expected)


def test_the_centred_ball_keeps_its_radius_and_follows_the_mean() -> None:
    x = means()
    geometry, state = frontier.CentredBall(2.0, 0.9), moments(x[0])
    region, spread = geometry.start(x[0])
    assert spread is None
    for step in range(STEPS):
        private = PrivateMean(x[step], region.scale, 0.5)
        state.step = step + 1
        state.update(private.value, 0.9, 0.999)
        region = joined(region, [geometry.next(private, state, region, None)])
    torch.testing.assert_close(region.centre, state.m_hat(0.9))
    torch.testing.assert_close(region.scale, torch.full_like(x[0], 2.0))


def test_scale_then_privatise_scales_by_the_root_of_what_is_left_of_v() -> None:
    """Beside the rule of the bench, Adam, which knows nothing of the noise."""
    frontier.NOISE.clear()
    x = means()
    geometry, state = frontier.Preconditioned(3.0, 0.4, 0.999), moments(x[0])
    region, spread = geometry.start(x[0])
    assert spread is None
    torch.testing.assert_close(region.scale, torch.full_like(x[0], 3 * 0.4**0.5))
    v = phi = torch.zeros_like(x[0])
    for step in range(STEPS):
        private = PrivateMean(x[step], region.scale, 0.1)
        state.step = step + 1
        DPAdam(clip_norm=1).update(torch.zeros_like(x[0]), 0.1, private, state)
        v = 0.999 * v + 0.001 * x[step] ** 2
        phi = 0.999 * phi + 0.001 * private.noise_variance
        region = joined(region, [geometry.next(private, state, region, None)])
        left = ((v - phi) / (1 - 0.999**state.step)).clamp(min=0.4)
        torch.testing.assert_close(region.scale, 3 * left.sqrt())
        assert bool((left > 0.4).any())


def test_a_rate_is_doubled_or_halved_for_as_long_as_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[float] = []

    def accuracy(config: Path, optimizer: str, sigma: float, lr: float, seed: int) -> object:
        tried.append(lr)
        best = {"dp-adam": 0.0005, "ema": 0.008}[optimizer]
        reached = 90 - abs(torch.tensor(lr / best).log2().item())
        line = {"optimizer": optimizer, "sigma": sigma, "lr": lr, "seed": seed}
        return {**line, "accuracy": reached}

    monkeypatch.setattr(frontier, "accuracy", accuracy)
    file = tmp_path / "lines.jsonl"
    assert frontier.Bench(tmp_path, file, "dp-adam", 1.0).tuned() == 0.0005
    assert frontier.Bench(tmp_path, file, "ema", 1.0).tuned() == 0.008
    before = len(tried)
    assert frontier.Bench(tmp_path, file, "ema", 1.0).tuned() == 0.008
    assert len(tried) == before  # all of it was in the file
