"""Centre and scale of the clipping ellipsoid, and the variance estimates behind them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dpmac_cli.dp.geometry import (
    AdaClip,
    Ball,
    Geometry,
    MacAdam,
    Spread,
    joined,
    kappa_star,
    newest_weight,
    paper_kappa,
)
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim.dp_macadam import Kappa
from tests.helpers import DIMENSION, HYPER, copied, make_trainer, walk

KAPPAS: tuple[Kappa, ...] = ("paper", "exact", "tracked")
every_kappa = pytest.mark.parametrize("kappa", KAPPAS)

#: E[s_t] / V at some t for beta = 0.9, by kappa*, and what the paper's kappa says.
STAR = {2: 0.0449, 5: 0.2132, 10: 0.4454, 20: 0.6961, 60: 0.8496}
PAPER = {2: 0.0947, 5: 0.3258, 10: 0.5803, 20: 0.8194, 60: 0.9455}


def kappa_stars(steps: int, beta: float) -> list[float]:
    """kappa*_0 to kappa*_T."""
    values = [0.0]
    for t in range(1, steps + 1):
        values.append(kappa_star(t, beta, values[-1]))
    return values


def fresh_moments(like: Tensor) -> Moments:
    return Moments(torch.zeros_like(like), torch.zeros_like(like))


def advance(
    geometry: Geometry,
    private: PrivateMean,
    moments: Moments,
    region: Ellipsoid,
    spread: Spread | None,
    beta1: float = 0.9,
) -> Ellipsoid:
    """The next region, as the engine computes it from a private mean, in one block."""
    moments.step += 1
    moments.update(private.value, beta1, 0.99)
    geometry.begin(moments.step, spread)
    return joined(region, [geometry.next(private, moments, region, spread)])


def noisy(value: Tensor, deviation: Tensor | float) -> PrivateMean:
    """A private mean whose noise has this standard deviation."""
    scale = torch.as_tensor(deviation, dtype=value.dtype).expand(value.shape).clone()
    return PrivateMean(value, scale, 1.0)


# kappa.


def test_golden_kappas() -> None:
    stars = kappa_stars(60, 0.9)
    assert {t: round(stars[t], 4) for t in STAR} == STAR
    assert {t: round(paper_kappa(t, 0.9), 4) for t in PAPER} == PAPER
    assert stars[1] == paper_kappa(1, 0.9) == 0
    assert kappa_stars(400, 0.9)[-1] == pytest.approx(2 * 0.9**2 / 1.9)


@given(t=st.integers(1, 40), beta=st.floats(0, 0.999))
@settings(max_examples=60, deadline=None)
def test_kappas_are_their_sums_over_weights(t: int, beta: float) -> None:
    """Appendix A's sum for the paper's, and for kappa* the same with each step's own weights."""

    def weights(k: int) -> NDArray[np.float64]:
        return (1 - beta) * np.float64(beta) ** np.arange(k)[::-1] / (1 - beta**k)

    c = weights(t)
    assert newest_weight(t, beta) == pytest.approx(c[-1])
    assert paper_kappa(t, beta) == pytest.approx((1 - beta**t) * (1 - (c**2).sum()), abs=1e-12)
    total = 0.0
    for k in range(1, t + 1):
        deviation = -weights(k)  # g~_k - m-hat_k as a weighted sum of g~_1 to g~_k
        deviation[-1] += 1
        total += (1 - beta) * beta ** (t - k) * float((deviation**2).sum())
    assert kappa_stars(t, beta)[t] == pytest.approx(total, abs=1e-12)


@pytest.fixture(scope="module")
def chains() -> dict[int, Tensor]:
    """s_t / V of 100,000 coordinates with i.i.d. g~ of mean 5 and variance V = 9."""
    generator = torch.Generator().manual_seed(0)
    like = torch.zeros(100_000, dtype=torch.float64)
    geometry, moments, found = MacAdam(0.9, 1e-9, 1.0, "exact"), fresh_moments(like), {}
    region, spread = geometry.start(like)
    for t in range(1, 61):
        draw = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        region = advance(geometry, noisy(5 + 3 * draw, 0.0), moments, region, spread)
        if t in STAR:
            found[t] = spread.s / 9
    return found


@pytest.mark.parametrize("t", STAR)
def test_kappa_star_is_what_chance_gives_and_the_papers_kappa_is_not(
    t: int, chains: dict[int, Tensor]
) -> None:
    s = chains[t]
    error = float(s.std()) / len(s) ** 0.5
    mean = float(s.mean())
    assert abs(mean - kappa_stars(t, 0.9)[t]) < 4 * error
    assert abs(mean - paper_kappa(t, 0.9)) > 20 * error


def test_psi_is_the_share_of_noise_in_s_however_b_varies() -> None:
    """With nothing but noise s - psi has mean 0; b^2 sigma^2 / B^2 of one step is not the share.

    What "exact" keeps is s.
    """
    generator = torch.Generator().manual_seed(1)
    like = torch.zeros(20_000, dtype=torch.float64)
    geometries = MacAdam(0.9, 1e-9, 1.0, "exact"), MacAdam(0.9, 1e-9, 1.0, "tracked")
    states = [(geometry, fresh_moments(like)) for geometry in geometries]
    kept_by = [geometry.start(like) for geometry in geometries]
    for t in range(1, 31):
        deviation = torch.full_like(like, 10 ** np.sin(t))
        noise = deviation * torch.randn(like.shape, generator=generator, dtype=like.dtype)
        kept = []
        for i, (geometry, moments) in enumerate(states):
            region, spread = kept_by[i]
            private = noisy(region.centre + noise, deviation)
            kept_by[i] = advance(geometry, private, moments, region, spread), spread
            assert spread is not None
            kept.append(spread.s.clone())
        if t == 1:
            continue
        s, s_less_psi = kept
        error = float(s.std()) / len(like) ** 0.5
        assert abs(float(s_less_psi.mean())) < 4.5 * error
        by_last_step = s - kappa_stars(t, 0.9)[t] * deviation**2
        assert abs(float(by_last_step.mean())) > 10 * error


# Step 1 and other edges.


@every_kappa
@pytest.mark.parametrize("name", ["dp-macadam", "dp-macadambc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_estimate_is_h1_everywhere(name: str, kappa: Kappa, dtype: torch.dtype) -> None:
    """Line 19 divides 0 by 0 there: u_1 = 0 and kappa_1 = 0."""
    trainer = make_trainer(name, dtype=dtype, kappa=kappa, phi="tracked")
    assert trainer.state.region.scale.tolist() == pytest.approx([1 / DIMENSION] * DIMENSION)
    trainer.step()
    expected = (HYPER.h1 * DIMENSION) ** 0.5
    assert trainer.state.region.scale.tolist() == pytest.approx([expected] * DIMENSION)
    assert torch.isfinite(walk(trainer, 20)).all()


@every_kappa
@pytest.mark.parametrize("name", ["dp-macadam", "dp-macadambc"])
def test_without_memory_the_estimate_stays_on_h1(name: str, kappa: Kappa) -> None:
    """beta1 = 0 makes m-hat_t = g~_t at every t."""
    trainer = make_trainer(name, kappa=kappa, beta1=0.0)
    assert torch.isfinite(walk(trainer, 5)).all()
    expected = (HYPER.h1 * DIMENSION) ** 0.5
    assert trainer.state.region.scale.tolist() == pytest.approx([expected] * DIMENSION)


def test_a_ball_never_changes() -> None:
    like = torch.zeros(3)
    region, spread = Ball(2.0).start(like)
    assert region.is_ball
    for _ in range(2):
        assert region.scale == 2
        assert region.centre == 0
        region = advance(Ball(2.0), noisy(torch.ones(3), 1.0), fresh_moments(like), region, spread)


# Any run.


def geometry_of(kind: str, beta1: float, h1: float, h2: float) -> Geometry:
    """A ball, AdaClip's, or MacAdam's by its kappa."""
    if kind in KAPPAS:
        return MacAdam(beta1, h1, h2, kind)
    return Ball(1.0) if kind == "ball" else AdaClip(beta1, 0.9, h1, h2)


dtypes = st.sampled_from([torch.float32, torch.float64])
decays = st.just(0.0) | st.floats(1e-3, 0.999)
exponents = st.floats(-6, 3)


def some_private_means(seed: int, size: float, noise: float, like: Tensor) -> list[PrivateMean]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    return [noisy(draw() * size, draw().abs() * noise) for _ in range(5)]


def estimate(geometry: Geometry, private: PrivateMean, spread: Spread, t: int) -> Tensor:
    """The variance before clamping, from what the geometry remembers."""
    if isinstance(geometry, AdaClip):
        return spread.s
    assert isinstance(geometry, MacAdam)
    kappa = paper_kappa(t, geometry.beta1) if geometry.kappa == "paper" else spread.kappa_star
    s = spread.s / kappa if kappa > 0 else 0 * spread.s
    return s if geometry.kappa == "tracked" else s - private.noise_variance


@pytest.mark.parametrize("kind", ["adaclip", *KAPPAS])
@given(
    seed=st.integers(0, 2**32),
    size=exponents,
    noise=exponents,
    low=st.floats(-10, 1),
    span=st.floats(0, 8),
    beta1=decays,
    d=st.integers(1, 50),
    dtype=dtypes,
)
@settings(max_examples=40, deadline=None)
def test_every_ellipsoid_has_the_stated_axes(
    kind: str,
    seed: int,
    size: float,
    noise: float,
    low: float,
    span: float,
    beta1: float,
    d: int,
    dtype: torch.dtype,
) -> None:
    """b = s-hat^(1/4) (sum s-hat^(1/2))^(1/2) with h1 <= s-hat <= h2: positive, finite."""
    h1, h2 = 10**low, 10 ** (low + span)
    like = torch.zeros(d, dtype=dtype)
    geometry = geometry_of(kind, beta1, h1, h2)
    moments = fresh_moments(like)
    region, spread = geometry.start(like)
    assert spread is not None
    for private in some_private_means(seed, 10**size, 10**noise, like):
        region = advance(geometry, private, moments, region, spread, beta1)
        b = region.scale
        assert (b > 0).all()
        assert torch.isfinite(b).all()
        assert torch.isfinite(region.centre).all()
        s_hat = estimate(geometry, private, spread, moments.step).clamp(h1, h2)
        axes = s_hat**0.25 * (s_hat**0.5).sum() ** 0.5
        torch.testing.assert_close(b, axes, rtol=1e-4, atol=0)
        # Read back off b alone, since sum b^2 = (sum s-hat^(1/2))^2.
        back = (b.double() ** 2 / b.double().norm()) ** 2
        assert (back >= h1 * (1 - 1e-4)).all()
        assert (back <= h2 * (1 + 1e-4)).all()


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["ball", "adaclip", *KAPPAS])
def test_the_next_region_changes_no_argument_but_spread_and_the_last(
    kind: str,
) -> None:
    """What it computes is a function of post-noise values: the same twice over."""
    like = torch.zeros(6, dtype=torch.float64)
    geometry = geometry_of(kind, 0.9, 1e-6, 1e-2)

    def walked() -> list[Ellipsoid]:
        moments, regions = fresh_moments(like), []
        region, spread = geometry.start(like)
        for private in some_private_means(3, 0.1, 0.01, like):
            moments.step += 1
            moments.update(private.value, 0.9, 0.99)
            geometry.begin(moments.step, spread)
            read = (private.value, private.scale, moments.m, moments.v)
            before = [x.clone() for x in read]
            region = joined(region, [geometry.next(private, moments, region, spread)])
            assert all(map(torch.equal, read, before))
            regions.append(copied(region))
        return regions

    for one, other in zip(walked(), walked(), strict=True):
        assert torch.equal(one.centre, other.centre)
        assert torch.equal(one.scale, other.scale)
