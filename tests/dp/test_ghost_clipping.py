"""Privacy of layers that act at several positions: Gram matrices, pairs, pieces, weighted products.

Forms are given inputs and output gradients directly, so that terms can cancel within a sample as no
network makes them. What is exact is computed in float64 from the floats that the forms were given.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from dpmac_cli.dp.clipping import clipped_sum as clipping
from dpmac_cli.dp.clipping import ghost_clipping
from dpmac_cli.dp.clipping.clipped_sum import REACH, ClippedChunkSum, clip_limit
from dpmac_cli.dp.clipping.ghost_clipping import PositionProducts, UseSizes, sizes
from dpmac_cli.dp.clipping.layer_gradients import (
    ByLayer,
    PerSampleGradients,
    total_squared_norms,
)
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer, find_layers, flatten_parameters
from dpmac_cli.dp.clipping.norms import ROW, RegionMetric, SquaredNorms
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, ball, ellipsoid
from dpmac_cli.dp.weights import Weights, equal_weights
from dpmac_cli.training.chunks import ChunkedSum, first_chunk
from tests.helpers import in_chunks_of, make_trainer
from tests.pairwise import all_pairs
from tests.tiers import one_in, pairs_short

from .reference import norms_of, whiten

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
KINDS = ("ball", "ellipsoid")
#: Ways to compute a norm, and the method that each takes for a ball and for an ellipsoid.
WAYS = {"gram": ("_by_gram", "_by_pairs"), "pieces": ("_by_pieces", "_by_pieces")}
#: Every way for every kind.
WAYS_AND_KINDS = list(itertools.product(WAYS, KINDS))


@pytest.fixture(autouse=True)
def _seeded_and_serial() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small only wait for one another


@dataclass(frozen=True)
class Kind:
    """A layer and the shape of its input for one row, without samples."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def layer(self, dtype: torch.dtype = torch.float32) -> Layer:
        module = self.build().to(dtype)
        [layer] = find_layers(module)
        flatten_parameters([layer])
        return layer


def conv(*size: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(*size, **options)


LAYERS: Mapping[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(5, 4), (3, 5)),
    "linear-no-bias": Kind(lambda: nn.Linear(5, 4, bias=False), (2, 3, 5)),
    "conv": Kind(conv(2, 3, 3), (2, 5, 4)),
    "padding": Kind(conv(2, 3, 3, padding=1), (2, 4, 3)),
    "stride": Kind(conv(2, 3, 3, stride=2, padding=1), (2, 5, 6)),
    "stride-over-kernel": Kind(conv(2, 3, 2, stride=3), (2, 5, 8)),
    "dilation": Kind(conv(2, 3, 2, dilation=2, padding=1), (2, 4, 3)),
    "all-at-once": Kind(
        conv(2, 3, (2, 3), stride=(2, 1), dilation=(1, 2), padding=(1, 2)), (2, 4, 5)
    ),
    "1x1": Kind(conv(3, 4, 1), (3, 2, 3)),
}


def use_of(module: nn.Module, inputs: Tensor, grad_output: Tensor, views: int = 1) -> Use:
    """A use of a module, of adjacent views of each sample."""
    by_sample = [torch.unflatten(t, 0, (-1, views)) for t in (inputs, grad_output)]
    return Use.of(module, by_sample[0], by_sample[1])


def random_uses(
    kind: Kind, layer: Layer, samples: int, views: int = 1, count: int = 1
) -> tuple[Use, ...]:
    """Inputs and output gradients, normal."""
    dtype = next(iter(layer.parameters.values())).dtype
    found = []
    for _ in range(count):
        a = torch.randn(samples * views, *kind.shape, dtype=dtype)
        with torch.no_grad():
            found.append(use_of(layer.module, a, torch.randn_like(layer.module(a)), views))
    return tuple(found)


def region_of(name: str, layer: Layer) -> Ellipsoid:
    dtype = next(iter(layer.parameters.values())).dtype
    if name == "ball":
        return ball(0.7, torch.zeros(layer.stop, dtype=dtype))
    m = torch.randn(layer.stop, dtype=dtype)
    return ellipsoid(m, torch.exp(0.5 * torch.randn(layer.stop, dtype=dtype)))


def make_form(layer: Layer, uses: tuple[Use, ...]) -> PositionProducts:
    found = sizes(layer, uses)
    assert found is not None
    return PositionProducts(layer, uses, found)


@contextmanager
def going(way: str, kind: str) -> Iterator[None]:
    """Make forms go one way, whatever it costs, and assert that they did."""
    name = WAYS[way][KINDS.index(kind)]
    taken: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        cost = 0 if way == "pieces" else 1 << 60
        patch.setattr(UseSizes, "instantiating", lambda *_: cost)
        for other in ("_by_gram", "_by_pairs", "_by_pieces"):
            patch.setattr(PositionProducts, other, _noting(other, taken))
        yield
    assert set(taken) == {name}


def _noting(name: str, taken: list[str]) -> Callable[..., SquaredNorms]:
    before = getattr(PositionProducts, name)

    def note(*args: Any) -> SquaredNorms:
        taken.append(name)
        found: SquaredNorms = before(*args)
        return found

    return note


def by_autograd(layer: Layer, uses: tuple[Use, ...]) -> Tensor:
    """g_i by torch.autograd, a sample at a time, (samples, d): the oracle."""
    parameters = list(layer.parameters.values())
    rows = []
    for p in parameters:
        p.requires_grad_(True)
    for sample in range(uses[0].samples):
        parts = [use.part(slice(sample, sample + 1)) for use in uses]
        total = sum((layer.module(part.inputs) * part.grad_output).sum() for part in parts)
        assert isinstance(total, Tensor)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)]))
    for p in parameters:
        p.requires_grad_(False)
    return torch.stack(rows)


def terms_of(layer: Layer, uses: tuple[Use, ...]) -> tuple[Tensor, Tensor]:
    """grad_output, (samples, T, O), and a, (samples, T, K), float64, as stored."""
    module: Any = layer.module
    grad_output, a = [], []
    for use in uses:
        rows, d = use.inputs.double(), use.grad_output.double()
        if isinstance(module, nn.Linear):
            rows, d = rows.flatten(1, -2), d.flatten(1, -2)
        else:
            options = (module.dilation, module.padding, module.stride)
            rows, d = unfold(rows, module.kernel_size, *options).mT, d.flatten(2).mT
        a.append(rows.reshape(use.samples, -1, rows.shape[2]))
        grad_output.append(d.reshape(use.samples, -1, d.shape[2]))
    return torch.cat(grad_output, 1), torch.cat(a, 1)


def joined(layer: Layer, kernel: Tensor, bias: Tensor) -> Tensor:
    """Put gradients by the kernel, (rows, O, K), and by the bias beside each other, (rows, d)."""
    parts = {"weight": kernel, "bias": bias}
    return torch.cat([parts[name].flatten(1) for name in layer.parameters], 1)


def exact_gradients(layer: Layer, uses: tuple[Use, ...]) -> Tensor:
    """g_i of the stored floats, float64, (samples, d)."""
    grad_output, a = terms_of(layer, uses)
    return joined(layer, torch.bmm(grad_output.mT, a), grad_output.sum(1))


def summed_terms(layer: Layer, uses: tuple[Use, ...], region: Ellipsoid) -> Tensor:
    """The sum over positions of ||g_it/b||, of which R_i is an upper bound: (samples,)."""
    grad_output, a = terms_of(layer, uses)
    origin = replace(region, centre=torch.zeros_like(region.centre))
    total = torch.zeros(len(grad_output), dtype=torch.float64)
    for d, row in zip(grad_output.unbind(1), a.unbind(1), strict=True):
        term = joined(layer, d.unsqueeze(2) * row.unsqueeze(1), d)
        total += whiten(term, origin).norm(dim=1)
    return total


def squared(form: PerSampleGradients, region: Ellipsoid, layer: Layer) -> SquaredNorms:
    dtype = torch.float64 if region.inverse.dtype == torch.float64 else None
    return total_squared_norms([(layer, form)], RegionMetric(region, dtype))


# (1) Norms and sums against the oracle.


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("name", "way_and_kind", "cut", "dtype", "views_and_uses"),
    [
        *all_pairs(
            [*LAYERS],
            WAYS_AND_KINDS,
            [False, True],
            [*TOLERANCE],
            [(1, 1), (3, 1), (1, 2), (2, 2)],
        ),
        ("dilation", ("pieces", KINDS[1]), True, torch.float32, (1, 1)),  # 2 of 3 outputs at a time
    ],
)
def test_norms_and_sums_are_those_of_autograd(
    name: str,
    way_and_kind: tuple[str, str],
    cut: bool,
    dtype: torch.dtype,
    views_and_uses: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all samples at a time, and of one sample, few outputs and one product after another."""
    way, kind = way_and_kind
    layer = LAYERS[name].layer(dtype)
    uses = random_uses(LAYERS[name], layer, 5, *views_and_uses)
    region, tolerance = region_of(kind, layer), TOLERANCE[dtype]
    if cut:
        monkeypatch.setattr(ghost_clipping, "IN_CACHE", 15)
        monkeypatch.setattr(ghost_clipping, "ADDED", 2)
    form, oracle = make_form(layer, uses), by_autograd(layer, uses)
    with going(way, kind):
        found = squared(form, region, layer)
    expected = whiten(oracle, region).square().sum(1)
    far = whiten(torch.zeros_like(oracle[:1]), region).square().sum()  # pairs cancel against it
    assert ((found.value - expected).abs() <= tolerance * (expected + 2 * far)).all()
    assert_sums(form, oracle, tolerance)


def assert_sums(form: PerSampleGradients, oracle: Tensor, tolerance: float) -> None:
    """Of all samples, and of some."""
    samples = len(oracle)
    c = 0.5 + torch.rand(samples, dtype=torch.float64)
    for mask in (None, torch.arange(samples) != 1):
        weights = c if mask is None else c * mask
        out = torch.full_like(oracle[0], torch.nan)
        form.weighted_sum(weights.to(oracle.dtype), mask, out)
        total = (weights.to(oracle.dtype).unsqueeze(1) * oracle).sum(0)
        torch.testing.assert_close(out, total, rtol=tolerance, atol=20 * tolerance)


# (2) Slack and (3) reach.


def within_a_sample(kind: Kind, layer: Layer, samples: int, rest: float) -> Use:
    """Let the output gradients at half of the positions undo those of the other half.

    Inputs hardly differ between positions, so that sum_t delta_t a_t^T cancels.
    """
    [use] = random_uses(kind, layer, samples)
    a, grad_output = use.inputs, use.grad_output
    pixel = a.flatten(2)[:, :, :1] if a.ndim == 4 else a.flatten(1, -2)[:, :1]
    pixel = pixel.unsqueeze(3) if a.ndim == 4 else pixel.view(samples, *[1] * (a.ndim - 2), -1)
    a = pixel + rest * a
    flat = grad_output.flatten(2) if a.ndim == 4 else grad_output.flatten(1, -2).mT.contiguous()
    half = flat.shape[2] // 2
    flat[:, :, half : 2 * half] = -flat[:, :, :half] + rest * flat[:, :, half : 2 * half]
    if flat.shape[2] % 2:
        flat[:, :, -1] *= rest
    grad_output = flat.view_as(grad_output) if a.ndim == 4 else flat.mT.reshape(grad_output.shape)
    return use_of(layer.module, a, grad_output)


#: Of output gradients and of inputs.
MAGNITUDES = ((1.0, 1.0), (1e-6, 1e-6), (1e8, 1e-3), (1e6, 1e6))
#: Such that squares underflow.
TINY = ((1e-24, 1e22), (1e-30, 1e30), (1e22, 1e-24))


def assert_bounded(layer: Layer, use: Use, region: Ellipsoid, way: str, kind: str) -> None:
    """The norm lies within its slack of the exact one, in the stored dtype and in float64."""
    g = exact_gradients(layer, (use,))
    exact = whiten(g, region).square().sum(1)
    terms = summed_terms(layer, (use,), region)
    form = make_form(layer, (use,))
    far = whiten(torch.zeros_like(g[:1]), region).square().sum()
    unsure = 1e-14 * (terms.square() + far)  # of what is exact here
    with going(way, kind):
        found = squared(form, region, layer)
        again = total_squared_norms([(layer, form.double())], RegionMetric(region, torch.float64))
    for norms, dtype in ((found, torch.float32), (again, torch.float64)):
        assert (norms.value + norms.slack + unsure >= exact).all()
        above = ROW * torch.finfo(dtype).eps * far  # pairs round ||m/b||^2 up
        assert (norms.value - norms.slack - unsure - above <= exact).all()
        assert (norms.reach.sqrt() >= terms * (1 - 1e-6)).all()


def around(g: Tensor, ratio: float) -> Ellipsoid:
    """An ellipsoid about a gradient, with ||m/b|| = ratio; a ball for 0."""
    if not ratio:
        return ball(float(g.norm()) / 2, torch.zeros(len(g)))
    m = g.float()
    b = torch.exp(0.5 * torch.randn(len(m)))
    b *= (m.double() / b).norm().float() / ratio
    return Ellipsoid(m, 1 / (7 * b.square()), torch.tensor(1 / 7))


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("name", "rest", "way_and_ratio"),
    all_pairs(
        ["linear", "linear-no-bias", "padding", "stride"],
        [0.0, 1e-6, 1e-3, 1.0],
        list(itertools.product(WAYS, [0.0, 1.0, 20.0, 1000.0])),
    ),
)
def test_slack_and_reach_bound_terms_that_cancel(
    name: str, rest: float, way_and_ratio: tuple[str, float]
) -> None:
    way, ratio = way_and_ratio
    layer = LAYERS[name].layer()
    tiny = TINY if name == "linear-no-bias" and not ratio else ()
    for by_grad_output, by_input in (*MAGNITUDES, *tiny):
        use = within_a_sample(LAYERS[name], layer, 6, rest)
        use = use_of(layer.module, by_input * use.inputs, by_grad_output * use.grad_output)
        other = random_uses(LAYERS[name], layer, 1)[0]
        other = use_of(layer.module, by_input * other.inputs, by_grad_output * other.grad_output)
        region = around(exact_gradients(layer, (other,))[0], ratio)
        assert_bounded(layer, use, region, way, "ellipsoid" if ratio else "ball")


# (4) and (5): the weighted product.


class Given:
    """A clipped sum of samples whose inputs and output gradients are given.

    ``x`` of the program are their numbers.
    """

    def __init__(self, layer: Layer, use: Use, capacity: int, batch: int) -> None:
        self.layer, self.use = layer, use
        given: Any = SimpleNamespace(layers=[layer], views=1)
        self.clipped_sum = ClippedChunkSum(given, capacity, batch)
        self.clipped_sum.gradients = self.weighted  # type: ignore[assignment, method-assign]
        self.limit = clip_limit(max(capacity, batch))
        self.chunk = capacity

    def weighted(self, rows: Tensor, y: Tensor, *, ball: bool = True) -> tuple[ByLayer, Weights]:
        return self.gradients(rows, y, ball=ball), equal_weights(rows)

    def gradients(self, rows: Tensor, y: Tensor, *, ball: bool = True) -> ByLayer:
        use = use_of(self.layer.module, self.use.inputs[rows], self.use.grad_output[rows])
        return [(self.layer, make_form(self.layer, (use,)))]

    def reach(self, region: Ellipsoid) -> float:
        """The largest c_i R_i of the first samples."""
        rows = torch.arange(min(32, len(self.use.grad_output)))
        [(_, form)] = self.gradients(rows, rows)
        found = squared(form, region, self.layer)
        return float((clipping.clip_weights(found, self.limit)[0] * found.reach.sqrt()).max())

    def total(self, rows: Tensor, region: Ellipsoid) -> Tensor:
        """sum of c_i (g_i - m) / b as computed, in chunks, float64."""
        total = torch.zeros(self.layer.stop, dtype=torch.float64)
        for part in torch.split(rows, self.chunk):
            out = torch.full((self.layer.stop,), torch.nan)
            self.clipped_sum.of(part, torch.zeros_like(part), RegionMetric(region), out)
            total += out.double()
        return total / region.scale.double()


def cancelling(
    kind: Kind, layer: Layer, size: int, ratio: float, spread: float, generator: torch.Generator
) -> Use:
    """Samples along one direction, whose terms together are ``ratio`` times as large as their sum.

    Half of the positions have the opposite sign: the last ones, or any.
    """
    with torch.no_grad():
        output = layer.module(torch.zeros(1, *kind.shape))
    linear = isinstance(layer.module, nn.Linear)
    channels = output.shape[-1] if linear else output.shape[1]
    positions = output.numel() // channels
    signs = torch.ones(positions)
    signs[positions - positions // 2 :] = -1
    if int(torch.randint(2, (1,), generator=generator)):
        signs = signs[torch.randperm(positions, generator=generator)]
    signs = signs - signs.mean() + 1 / ratio
    a = 1 + spread * torch.randn(size, *kind.shape, generator=generator)
    lengths = 1 + 0.2 * spread * torch.randn(size, 1, 1, generator=generator)
    by_output = torch.randn(channels, generator=generator)
    grad_output = lengths * signs.unsqueeze(1) * by_output  # (size, T, O)
    grad_output = (grad_output if linear else grad_output.mT).reshape(size, *output.shape[1:])
    return use_of(layer.module, a, grad_output.contiguous())


SEARCHED: Mapping[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(1, 2, bias=False), (4, 1)),
    "linear-1": Kind(lambda: nn.Linear(1, 1, bias=False), (2, 1)),
    "linear-long": Kind(lambda: nn.Linear(2, 1), (64, 2)),
    "conv": Kind(conv(1, 2, 1, bias=False), (1, 2, 2)),
    "conv-1": Kind(conv(1, 1, 1, bias=False), (1, 8, 8)),
    "conv-stride": Kind(conv(2, 2, 2, stride=2, bias=False), (2, 8, 8)),
}
#: c_i R_i to have samples at, as a share of :data:`REACH`; None for terms that do not cancel.
SHARES = (0.98, None, 0.6, 1.02, 100.0)


def worst_move(name: str, kind: str, size: int, chunk: int) -> float:
    """How much of the margin is used up where leaving out a sample moved the computed sum furthest.

    0 is a move by the clipping norm, 1 a move by 1.
    """
    worst = 0.0
    for trial in range(5):
        generator = torch.Generator().manual_seed(trial)
        torch.manual_seed(trial)
        layer = SEARCHED[name].layer()
        given, region = _searched(name, kind, layer, size, chunk, SHARES[trial], generator)
        everyone = given.total(torch.arange(size), region)
        for i in (0, size // 2, size - 1):
            others = torch.arange(size)[torch.arange(size) != i]
            moved = float((everyone - given.total(others, region)).norm())
            worst = max(worst, (moved / given.limit - 1) / (1 / given.limit - 1))
    return worst


def _searched(
    name: str,
    kind: str,
    layer: Layer,
    size: int,
    chunk: int,
    share: float | None,
    generator: torch.Generator,
) -> tuple["Given", Ellipsoid]:
    """Samples that are all clipped, with c_i R_i as asked for, as far as the layer allows."""

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator))

    spread = uniform(0, 0.1) if share is not None and share < 2 else uniform(0, 0.5)
    smaller, ratio, state = uniform(0.3, 1.0), 1.0, generator.get_state()
    shape = torch.exp(0.2 * torch.randn(layer.stop, generator=generator))
    most = uniform(0.8, 0.99) * clipping.cancellation_limit(chunk, size) / chunk
    for _ in range(1 if share is None else 8):
        generator.set_state(state)
        use = cancelling(SEARCHED[name], layer, size, ratio, spread, generator)
        g = exact_gradients(layer, (use,))
        region = ball(float(g.norm(dim=1).median()) * smaller, torch.zeros(layer.stop))
        if kind == "ellipsoid":
            # Samples lie just beyond the ellipsoid about a centre that is nearly too far out.
            m = (g.mean(0) * most / (1 + most)).float()
            region = ellipsoid(m, shape * ((m / shape).norm() / most))
        given = Given(layer, use, chunk, size)
        if share is not None:
            ratio *= min(10.0, share * REACH / given.reach(region))
            ratio = max(ratio, 1.0)
    return given, region


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("name", "kind", "cut"),
    one_in(6, all_pairs([*SEARCHED], KINDS, [(32, 32), (1024, 1024), (1024, 256), (1024, 32)])),
)
def test_no_sample_whose_terms_cancel_weighs_more_than_one(
    name: str, kind: str, cut: tuple[int, int]
) -> None:
    """And the margin is not nearly used up."""
    assert worst_move(name, kind, *cut) <= 0.45


@pytest.mark.promise("one")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["linear", "conv-stride"])
def test_samples_beyond_reach_are_added_in_float64(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SEARCHED[name].layer()
    generator = torch.Generator().manual_seed(0)
    use = cancelling(SEARCHED[name], layer, 40, 1e4, 0.0, generator)
    other = cancelling(SEARCHED[name], layer, 40, 1.0, 0.1, generator)
    far = torch.arange(40) % 3 == 1
    a, grad_output = use.inputs, use.grad_output
    a[~far], grad_output[~far] = other.inputs[~far], other.grad_output[~far]
    g = exact_gradients(layer, (use,))
    region = ball(float(g[far].norm(dim=1).min()) / 2, torch.zeros(layer.stop))
    if kind == "ellipsoid":
        b = float(g[far].norm(dim=1).min()) * torch.exp(
            0.1 * torch.randn(layer.stop, generator=generator)
        )
        region = ellipsoid(0.1 * b, b / 2)
    given, rows = Given(layer, use, 40, 40), torch.arange(40)

    def error() -> float:
        form = given.gradients(rows, rows)
        found = norms_of(given.clipped_sum, form, RegionMetric(region), 40)
        c = clipping.clip_weights(found, given.limit)[0]
        assert torch.equal(c * found.reach.sqrt() > 8, far)
        assert (c * whiten(g, region).norm(dim=1) <= given.limit * (1 + 1e-9)).all()
        exact = (c.unsqueeze(1) * whiten(g, region)).sum(0)
        return float((given.total(rows, region) - exact).norm())

    assert error() < 5e-5
    # Whatever the bounds of the norms say.
    monkeypatch.setattr(ClippedChunkSum, "_share", lambda _, found: torch.zeros_like(found.value))
    assert error() < 5e-5
    monkeypatch.setattr(clipping, "REACH", float("inf"))
    assert error() > 1e-4


@pytest.mark.promise("one")
@pytest.mark.parametrize("name", ["linear-1", "conv-1"])
def test_products_of_many_samples_are_added_up_in_float64(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product's rounding is left, and that of one sum."""
    layer = SEARCHED[name].layer()
    use = use_of(
        layer.module,
        torch.ones(4096, *SEARCHED[name].shape),
        torch.ones(4096, *SEARCHED[name].shape),
    )
    use.grad_output.mul_(1 + 1e-3 * torch.rand(4096, *[1] * (use.grad_output.ndim - 1)))
    total, form = torch.empty(1), make_form(layer, (use,))
    exact = exact_gradients(layer, (use,)).sum(0)
    monkeypatch.setattr(ghost_clipping, "ADDED", 1)
    form.weighted_sum(torch.ones(4096, dtype=torch.float64), None, total)
    assert (total - exact).abs() <= 2**-23 * exact


@pytest.mark.promise("one")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_near_the_end_of_float32_weigh_no_more_than_one(way: str) -> None:
    """Their c_i has few digits in float32, or none."""
    layer = Kind(lambda: nn.Linear(1, 1, bias=False), (2, 1)).layer()
    for radius in (1.0, 1e-6):
        for exponent in np.linspace(30, 45, 100):
            grad_output = torch.full((1, 2, 1), 10 ** min(38.0, exponent))
            a = torch.full((1, 2, 1), 10 ** max(0.0, exponent - 38))
            with going(way, "ball"):
                total = Given(layer, use_of(layer.module, a, grad_output), 1, 1).total(
                    torch.arange(1), ball(radius, torch.zeros(1))
                )
            assert total.norm() <= 1


# (6) Samples that are not finite.


@pytest.mark.promise("one")
@pytest.mark.parametrize(
    ("name", "way", "kind"),
    pairs_short(["linear", "padding", "stride"], [*WAYS], KINDS),
)
def test_samples_that_are_not_finite_add_exactly_nothing(name: str, way: str, kind: str) -> None:
    layer = LAYERS[name].layer()
    [use] = random_uses(LAYERS[name], layer, 9)
    region = region_of(kind, layer)
    a, grad_output = use.inputs.flatten(1), use.grad_output.flatten(1)
    a[1, 0], a[2, -1], a[3] = torch.nan, torch.inf, -torch.inf
    grad_output[4, 0], grad_output[5, -1], grad_output[6] = torch.nan, -torch.inf, torch.inf
    a[7], grad_output[7] = 3e38, -3e38  # finite, as are none of the products
    grad_output[2], grad_output[5] = (
        0.0,
        torch.where(grad_output[5].isfinite(), 0.0, grad_output[5]),
    )
    given, finite = Given(layer, use, 9, 9), torch.tensor([0, 8])
    with going(way, kind):
        assert not given.total(torch.arange(1, 7), region).any()
        everyone = given.total(torch.arange(9), region)
        assert not given.total(torch.tensor([7]), region).isnan().any()
        huge = given.total(torch.tensor([7]), region)
        expected = given.total(finite, region)
    assert huge.norm() <= 1
    torch.testing.assert_close(everyone - huge, expected, rtol=1e-6, atol=2e-6)


# (7) Chunks.


@pytest.mark.promise("one")
@pytest.mark.parametrize(("physical", "batch"), [(8, 8), (16, 8), (5, 8), (3, 8), (1, 8), (64, 8)])
def test_chunks_are_even_and_change_no_sum(
    physical: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of draws of every size, from none to more than the largest chunk."""
    cut: list[int] = []
    before = ChunkedSum._sum_chunk

    def note(self: ChunkedSum, inputs: Any, labels: Any, metric: Any, counted: Any) -> None:
        cut.append(int(counted.sum()))
        before(self, inputs, labels, metric, counted)

    monkeypatch.setattr(ChunkedSum, "_sum_chunk", note)
    most = first_chunk(physical, batch)
    assert most == (physical if physical < batch else 25)
    trainers = [
        make_trainer("dp-sgd", GaussianMechanism(1.0, b), plan=in_chunks_of(p), dtype=torch.float32)
        for p, b in ((physical, batch), (1000, 800))
    ]
    cutting, whole = trainers
    metric = RegionMetric(whole.state.region)
    assert cutting.sums.chunk == most
    for size in range(most + first_chunk(physical, batch) + 1):
        drawn = np.arange(size) * 7 % 40
        expected = whole.sums.of(drawn, 1, metric, 1000)[0].double()
        cut.clear()
        total, chunk = cutting.sums.of(drawn, 1, metric, most)
        assert chunk == most
        assert (sum(cut), len(cut)) == (size, -(-size // most))
        assert not cut or max(cut) - min(cut) <= 1
        assert (total.double() - expected).norm() <= 1e-6 * max(1, size)
