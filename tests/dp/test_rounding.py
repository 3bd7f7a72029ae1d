"""What float32 may not break: no sample contributes more than 1, and norms never read low.

Every test here measures against the gradients as stored, in float64: the sensitivity is that of
what the program computed, not of what exact arithmetic would have.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping import clipped_sum as per_sample
from dpmac_cli.dp.clipping.clipped_sum import (
    LEAST_WEIGHT,
    ROOM,
    SLACK_SHARE,
    SMALL,
    cancellation_limit,
    clip_limit,
    clip_weights,
)
from dpmac_cli.dp.clipping.ghost_clipping import PositionProducts, UseSizes, sizes
from dpmac_cli.dp.clipping.layer_gradients import Instantiated, total_squared_norms
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer, find_layers
from dpmac_cli.dp.clipping.norms import RegionMetric, SquaredNorms, sum_rounded_up
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.geometry import part_of
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, PrivateMean, ball, ellipsoid
from dpmac_cli.randomness.noise import SeededNormals
from tests.helpers import Batches, in_chunks_of, make_trainer
from tests.tiers import pairs_short, rest_long

from .reference import Subject, norms_of, whiten

#: ||m/b||. Near 20 in real runs; 1000 is what a gradient that never moves would give.
RATIOS = (0.0, 1.0, 20.0, 1000.0)
#: How far samples lie from the one whose gradient is m, relative to their size.
SPREADS = (0.0, 1e-6, 1e-3, 1.0)


@pytest.fixture(autouse=True)
def _serial() -> None:
    torch.set_num_threads(1)  # tensors this small only wait for one another


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * 49, 10),
    )


def sequence() -> nn.Sequential:
    """A Linear layer over many positions, whose gradients are written out."""
    return nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(28, 32), nn.ReLU(), nn.Flatten(), nn.Linear(896, 10)
    )


def means() -> nn.Sequential:
    """So few inputs that norms far from m are precise enough."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 10))


class Case:
    """A batch around one image, and an ellipsoid whose centre is that image's own gradient.

    With a small spread every sample lies near m, nobody is clipped, and all that is left of
    sum c_i g_i - (sum c_i) m is a difference of nearly equal numbers. The last sample is far off.
    """

    def __init__(
        self,
        model: nn.Sequential,
        ratio: float,
        spread: float,
        size: int,
        batch: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        like = torch.zeros(1, 1, 28, 28)
        like = like.flatten(1) if isinstance(model[0], nn.Linear) else like
        self.subject: Subject = Subject(model, like, batch=batch)
        first = torch.randn(1, 1, 28, 28)
        x = first + spread * torch.randn(size, 1, 28, 28)
        x[0], x[-1] = first[0], torch.randn(1, 28, 28)
        if isinstance(model[0], nn.Linear):
            x = x.flatten(1)
        self.x, self.y = x, torch.zeros(size, dtype=torch.long)
        self.y[-1] = 3
        g = self.subject.stored_gradients(self.x[:1], self.y[:1])[0].float()
        b = torch.exp(0.5 * torch.randn(len(g)))
        if ratio:
            scale = b * ((g / b).norm() / ratio)
            self.region = Ellipsoid(g, 1 / (7 * scale.square()), torch.tensor(1 / 7))
        else:
            self.region = ball(float(g.norm()) / 2, g)

    def whitened_sum(self) -> Tensor:
        """sum of c_i (g_i - m) / b as computed, float64."""
        total = self.subject.add(self.x, self.y, self.region)
        whitened: Tensor = total.double() / self.region.scale.double()
        return whitened

    def exact_sum(self) -> Tensor:
        """sum of c_i (g_i - m) / b of the stored gradients, float64."""
        c = self.subject.weights(self.x, self.y, self.region)
        gradients = self.subject.stored_gradients(self.x, self.y)
        total: Tensor = (c.unsqueeze(1) * whiten(gradients, self.region)).sum(0)
        return total

    def exact_norms(self) -> Tensor:
        norms: Tensor = whiten(self.subject.stored_gradients(self.x, self.y), self.region).norm(
            dim=1
        )
        return norms

    def float32_norms(self) -> SquaredNorms:
        """Norms as the layers give them, nothing done again."""
        gradients = self.subject.gradients(self.x, self.y, ball=self.region.is_ball)
        return total_squared_norms(gradients, RegionMetric(self.region))


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("model", "ratio", "spread"), pairs_short([mlp, cnn, sequence], RATIOS, SPREADS)
)
def test_no_sample_weighs_more_than_one(
    model: Callable[[], nn.Sequential], ratio: float, spread: float
) -> None:
    case = Case(model(), ratio, spread, size=12)
    exact = case.exact_norms()
    plain = case.float32_norms()
    assert ((plain.value - exact.square()).abs() <= plain.slack + 1e-12 * ratio**2).all()

    c = case.subject.weights(case.x, case.y, case.region)
    assert (c * exact <= case.subject.limit * (1 + 1e-9)).all()
    assert (c * exact >= 0.99 * exact.clamp(max=1)).all()  # nor needlessly less


@pytest.mark.promise("one")
def test_the_slack_of_gradients_that_are_held_is_a_bound() -> None:
    case = Case(sequence(), 1000.0, 1e-3, size=12)
    layer = case.subject.layers[0]
    part = slice(layer.start, layer.stop)
    gradients = case.subject.stored_gradients(case.x, case.y)[:, part].float()
    held = Instantiated(lambda: [[gradients[:, of] for of in layer.slices.values()]])
    found = total_squared_norms([(layer, held)], RegionMetric(case.region))
    exact = whiten(gradients.double(), part_of(case.region, part)).square().sum(1)
    assert ((found.value - exact).abs() <= found.slack).all()


@pytest.mark.promise("one")
def test_rows_that_cancel_are_done_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mlp(), 1000.0, 1e-3, size=12)
    exact = case.exact_norms()
    plain = case.float32_norms()
    # Between one share of slack and two, a norm goes gradually from float32 to float64.
    hopeless = plain.slack > 2 * SLACK_SHARE * plain.value
    fine = plain.slack <= SLACK_SHARE * plain.value
    assert hopeless.sum() > 8
    assert fine.any()

    again = case.subject.squared_norms(case.x, case.y, case.region)
    torch.testing.assert_close(
        again.value[hopeless], exact[hopeless].square(), rtol=1e-7, atol=1e-7
    )
    assert torch.equal(again.value[fine], plain.value[fine])

    monkeypatch.setattr(per_sample, "SLACK_SHARE", math.inf)
    left = case.subject.squared_norms(case.x, case.y, case.region)
    c, _ = clip_weights(left, case.subject.limit)
    assert ((left.value - exact.square()).abs() / exact.square()).max() > 1e-3
    assert (c * exact)[1:].min() < 0.5  # safe still, but at the price of the signal


@pytest.mark.promise("one")
def test_a_sum_that_cancels_is_done_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(means(), 100.0, 1e-6, size=64)
    exact = case.exact_sum()
    assert (case.whitened_sum() - exact).norm() < 1e-6
    monkeypatch.setattr(per_sample, "CANCELLATION_LIMIT", math.inf)
    assert (case.whitened_sum() - exact).norm() > 1e-4  # more than rounding may take of the margin


@pytest.mark.promise("one")
@pytest.mark.parametrize("factor", [1.0, 1e-6])
def test_the_norm_of_a_centre_is_that_of_its_region(factor: float) -> None:
    """From it follows which sums cancel."""
    layer, centre, scale = nn.Linear(3, 2), torch.randn(8), 1 + torch.rand(8)
    region = Ellipsoid(centre, factor / scale.square(), torch.tensor(factor))
    found = RegionMetric(region).centre_norm(find_layers(layer))
    assert float(found) == pytest.approx(float((centre / scale).norm()), rel=1e-3)


@pytest.mark.promise("one")
def test_a_draw_many_times_larger_than_expected_cancels_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Poisson sampling may draw many records where one is expected, all of them near m."""
    case = Case(means(), 100.0, 1e-6, size=100, batch=1)
    exact = case.exact_sum()
    assert (case.whitened_sum() - exact).norm() < 1e-6
    for batch in range(1, SMALL):
        assert cancellation_limit(100, batch) == cancellation_limit(100, SMALL)
    monkeypatch.setattr(per_sample, "SMALL", 0)
    assert (case.whitened_sum() - exact).norm() > ROOM  # more than the margin


@pytest.mark.promise("one")
@pytest.mark.parametrize("count", [1, 255, 256, 100_000])
def test_the_third_term_is_never_too_small(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        terms = torch.rand(count, generator=generator).pow(4)
        exact, found = terms.double().sum(), sum_rounded_up(terms)
        assert exact <= found <= exact * (1 + 5e-5)


def by_position(layer: Layer, a: Tensor, grad_output: Tensor) -> PositionProducts:
    uses = (Use.of(layer.module, a, grad_output),)
    found = sizes(layer, uses)
    assert found is not None
    return PositionProducts(layer, uses, found)


@pytest.mark.promise("one")
@pytest.mark.parametrize("rest", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
def test_the_slack_of_pairs_of_terms_is_a_bound(
    kind: str, rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three terms that cancel, and a rest."""
    torch.manual_seed(0)
    grad_output, a = torch.randn(20, 4, 10), torch.randn(20, 4, 300)
    a[:, :2] = (a[:, :2] * 1024).round() / 1024
    a[:, 2] = -a[:, 0] - a[:, 1]  # exactly
    grad_output[:, 1:3] = grad_output[:, :1]
    grad_output[:, 3] *= rest
    [layer] = find_layers(nn.Linear(300, 10, bias=False))
    region = ball(1.0, torch.zeros(3000))
    if kind == "ellipsoid":
        region = ellipsoid(torch.randn(3000), torch.exp(torch.randn(3000)))
    monkeypatch.setattr(UseSizes, "pairs", 0)
    found = by_position(layer, a, grad_output).squared_norms(RegionMetric(region).of(layer))
    exact = whiten((grad_output.double().mT @ a.double()).flatten(1), region).square().sum(1)
    assert ((found.value - exact).abs() <= found.slack + 1e-12 * exact).all()

    terms = (grad_output.double().unsqueeze(3) * a.double().unsqueeze(2)).flatten(2)
    reach = (terms / region.scale.double()).norm(dim=2).sum(1)
    if kind == "ellipsoid":
        reach += (region.centre.double() / region.scale.double()).norm()
        assert (found.slack >= 310 * 2.0**-24 * reach.square() * (1 - 1e-6)).all()
    assert (found.slack <= 350 * 2.0**-24 * reach.square()).all()


class Twice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x + self.linear(x))
        return out


VIEWED: dict[str, Callable[[], nn.Module]] = {
    "wide convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 1), nn.Conv2d(8, 2, 3), nn.Flatten(), nn.Linear(8, 5)
    ),
    "used twice": lambda: nn.Sequential(nn.Flatten(), Twice(16)),
    "norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.GroupNorm(2, 8)),
}


@pytest.mark.promise("one")
@pytest.mark.parametrize("views", [1, 2, 8])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("model", VIEWED)
def test_a_sample_of_many_views_weighs_no_more_than_one(model: str, kind: str, views: int) -> None:
    """Large and small, all alike, and such that cancel; of one label or of different ones."""
    generator = torch.Generator().manual_seed(0)
    subject = Subject(VIEWED[model](), torch.zeros(1, 1, 4, 4), views=views)
    region = ball(0.01, subject.theta)
    if kind == "ellipsoid":
        m = 0.1 * torch.randn(len(subject.theta), generator=generator)
        region = ellipsoid(m, 0.01 * torch.exp(torch.randn(len(m), generator=generator)))
    x = torch.randn(6, views, 1, 4, 4, generator=generator)
    x[1:3] = x[1:3, :1]
    x[3, : views // 2] = -x[3, views // 2 : 2 * (views // 2)]
    x *= torch.tensor([1.0, 1.0, 100.0, 100.0, 1e-3, 1e10]).view(-1, 1, 1, 1, 1)
    x = x if views > 1 else x.squeeze(1)
    y = torch.tensor([0, 1, 2, 3, 4, 0])
    if views > 1:
        y = (y[:, None] + torch.arange(views) * (torch.arange(6) % 2)[:, None]) % 5
    everyone = subject.add(x, y, region).double()
    for i in range(6):
        others = torch.arange(6) != i
        moved = everyone - subject.add(x[others], y[others], region).double()
        assert (moved / region.scale).norm() <= 1


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("kind", "grad_output", "a"),
    [("ball", 1e-24, 1e19), ("ball", 1e19, 1e-24), ("ellipsoid", 1e19, 1e-24)],
)
def test_squares_that_underflow_are_not_free(kind: str, grad_output: float, a: float) -> None:
    layer = find_layers(nn.Linear(1, 1, bias=False))[0]
    small = torch.full((1,), 1e-6)
    region = ball(1e-6, small) if kind == "ball" else ellipsoid(torch.zeros(1), small)
    pair = OuterProducts(torch.full((1, 1, 1), grad_output), torch.full((1, 1, 1), a), False)
    c, _ = clip_weights(pair.squared_norms(RegionMetric(region).of(layer)), clip_limit(1))
    assert float(c) * grad_output * a / 1e-6 <= 1


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("size", "chunk", "trials"),
    rest_long(
        [
            *((16, 16, 40), (512, 32, 5), (256, 256, 80), (1024, 1024, 60)),
            *((8192, 8192, 30), (512, 32, 40), (4096, 256, 10), (8192, 32, 3)),
        ],
        2,
    ),
)
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
def test_the_margin_covers_the_rounding_of_the_sum(
    kind: str, size: int, chunk: int, trials: int
) -> None:
    """With few parameters, rounding lines up with the sample and the margin is thinnest.

    Each chunk rounds, and a record less moves all that come after it to other chunks.
    """
    assert worst_contribution(kind, size, chunk, trials) <= 1


def worst_contribution(kind: str, size: int, chunk: int, trials: int) -> float:
    """The furthest that leaving out one of so many large samples moved the computed sum."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator))

    worst, subjects = (
        0.0,
        [
            Subject(nn.Linear(n, 2, bias=False), torch.zeros(1, n), capacity=chunk, batch=size)
            for n in (1, 2, 3)
        ],
    )
    for trial in range(trials):
        subject, inputs = subjects[trial % 3], 1 + trial % 3
        subject.theta.copy_(0.01 * torch.randn(len(subject.theta), generator=generator))
        spread = uniform(0, 0.5)
        x = uniform(20, 25) * (1 + spread * torch.randn(size, inputs, generator=generator))
        y = torch.zeros(size, dtype=torch.long)
        region = ball(uniform(0.5, 1.5), subject.theta)
        if kind == "ellipsoid":
            m = subject.stored_gradients(x[:1], y[:1])[0].float()
            b = torch.exp(0.5 * torch.randn(len(m), generator=generator))
            # Just short of what sends the sum to float64.
            region = ellipsoid(m, b * ((m / b).norm() * chunk / uniform(440, 498)))

        def total(x: Tensor, y: Tensor, subject: Subject, region: Ellipsoid) -> Tensor:
            begins = range(0, len(x), chunk)
            parts = [(x[i : i + chunk], y[i : i + chunk]) for i in begins]
            return sum((subject.add(*part, region).double() for part in parts), torch.zeros(()))

        everyone = total(x, y, subject, region)
        for i in (0, size // 2):
            others = torch.arange(size) != i
            moved = everyone - total(x[others], y[others], subject, region)
            worst = max(worst, float((moved / region.scale).norm()))
    return worst


@pytest.mark.promise("one")
def test_more_samples_than_the_margin_covers_are_refused() -> None:
    subject = Subject(nn.Linear(3, 2), torch.zeros(1, 3), capacity=4)
    x, y = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    region = ball(1.0, subject.theta)
    assert subject.add(x[:4], y[:4], region).any()
    with pytest.raises(ValueError, match="5 samples, but the capacity is 4"):
        subject.add(x, y, region)


@pytest.mark.promise("one")
def test_chunks_are_added_up_in_float64() -> None:
    """In float32 each of many chunks would round the sum anew, by more than the margin in all."""

    class Kept(GaussianMechanism):
        def release(self, clipped: Tensor, region: Ellipsoid, noise: SeededNormals) -> PrivateMean:
            kept.append(clipped.clone())
            return super().release(clipped, region, noise)

    def clipped_sum(*rows: int) -> Tensor:
        plan, sampler = in_chunks_of(1), Batches(rows)
        trainer = make_trainer(
            "dp-sgd", Kept(0.0, 8), plan=plan, dtype=torch.float32, sampler=sampler
        )
        trainer.step()
        return kept.pop()

    kept: list[Tensor] = []
    alone = torch.stack([clipped_sum(row) for row in range(40)])
    total = clipped_sum(*range(40))
    assert (alone.dtype, total.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(total, alone.double().sum(0), rtol=1e-13, atol=1e-13)


@pytest.mark.promise("one")
@pytest.mark.parametrize("weight", [LEAST_WEIGHT, 2 * LEAST_WEIGHT, 1.0])
def test_no_last_bit_of_a_norm_decides_whether_a_sample_counts(weight: float) -> None:
    norms = torch.tensor([1 - 1e-6, 1 + 1e-6], dtype=torch.float64) / weight
    nothing = torch.zeros_like(norms)
    c, _ = clip_weights(SquaredNorms(norms.square(), nothing, nothing), 1.0)
    before, after = (c * norms).tolist()
    assert abs(before - after) < 1e-5


@pytest.mark.promise("one")
def test_no_last_bit_of_a_bound_decides_how_a_norm_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [1 - 1e-9, 1 + 1e-9, 2 - 1e-9, 2.001, 9, math.inf, math.nan]
    shares = SLACK_SHARE * torch.tensor(times, dtype=torch.float64)
    subject = Subject(nn.Sequential(nn.Linear(1, 1)), torch.zeros(1, 1))
    rough = RegionMetric(ball(1.0, subject.theta))

    class Form:
        def double(self) -> "Form":
            return self

    def norms(gradients: Any, metric: RegionMetric) -> SquaredNorms:
        if metric is rough:
            return SquaredNorms(torch.full_like(shares, 4), 4 * shares, torch.zeros_like(shares))
        exact = torch.full_like(shares, 3)
        return SquaredNorms(exact, 0 * exact, 0 * exact)

    monkeypatch.setattr(per_sample, "total_squared_norms", norms)
    gradients: Any = [(None, Form())]
    found = norms_of(subject.clipped_sum, gradients, rough, len(shares))
    upper = (found.value + found.slack).tolist()
    assert upper[0] == pytest.approx(upper[1], abs=1e-6)
    assert upper[2] == pytest.approx(upper[3], abs=1e-6)
    assert upper[3:] == [3.0] * 4
