"""The compiled path: the same numbers as without it, and the same noise."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli.dp import fused
from dpmac_cli.dp.clipping import layers, norms
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.dp.optimizers import OPTIMIZERS
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness import noise
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.training.schedules import Recipe
from dpmac_cli.training.trainer import Trainer
from tests.conftest import OPTIMIZER_NAMES
from tests.dp.reference import prepare
from tests.dp.test_per_sample import (
    KINDS,
    NETS,
    POISONS,
    assert_a_non_finite_sample_adds_nothing,
    assert_matches_oracle,
)
from tests.dp.test_rounding import (
    RATIOS,
    SPREADS,
    Case,
    assert_no_sample_weighs_more_than_one,
    cnn,
    mlp,
)
from tests.helpers import (
    HYPER,
    PLAN,
    Batches,
    a_key,
    assert_deviation_of,
    in_chunks_of,
    make_trainer,
    walk,
)

COMPILED = replace(PLAN, compiled=True)
#: Each a compilation of its own.
VARIANTS = [
    *((name, "paper") for name in OPTIMIZER_NAMES),
    ("dp-macadam", "tracked"),
    ("dp-macadambc", "tracked"),
]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    """A C++ compiler is there. On CI its absence is a failure; elsewhere a skip."""
    if any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return
    reason = "torch.compile needs a C++ compiler on the CPU, and there is none"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _all_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The eager path, too, draws for all coordinates at once: then the draws are the same."""
    monkeypatch.setattr(layers, "BLOCK", 10**9)
    monkeypatch.setattr(noise, "NOISE_PAIRS", 10**9)
    monkeypatch.setattr(norms, "COMPILED", 1)
    yield
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize(("name", "choice"), VARIANTS)
def test_compiled_steps_are_the_same_steps(name: str, choice: str) -> None:
    """In one chunk and in several, whose sum is float64 in either."""
    options: dict[str, Any] = {"kappa": choice, "phi": choice}
    recipe = Recipe("cosine", 2, 0.01, 0.9)
    for plan in (PLAN, replace(in_chunks_of(3), recipe=recipe)):
        plain, compiled = (
            make_trainer(name, plan=replace(plan, compiled=on), **options) for on in (False, True)
        )
        torch.testing.assert_close(walk(compiled, 6), walk(plain, 6), rtol=1e-10, atol=1e-13)
        for key, tensor in plain.state.tensors().items():
            other = compiled.state.tensors()[key]
            torch.testing.assert_close(other, tensor, rtol=1e-8, atol=1e-12, msg=key)
        assert compiled.state.numbers() == plain.state.numbers()


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_compiled_steps_are_the_same_in_float32(name: str) -> None:
    plain, compiled = (
        make_trainer(name, plan=replace(PLAN, compiled=on), dtype=torch.float32)
        for on in (False, True)
    )
    torch.testing.assert_close(walk(compiled, 5), walk(plain, 5), rtol=1e-3, atol=1e-5)


def private_means(trainer: Trainer, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(g~, centre, scale) of each step, g~ read off the first moment."""
    for _ in range(steps):
        region, before = trainer.state.region, trainer.state.moments.m.clone()
        centre, scale = region.centre.clone(), region.scale
        trainer.step()
        beta = HYPER.beta1
        yield (trainer.state.moments.m - beta * before) / (1 - beta), centre, scale


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_the_noise_is_the_stated_one(name: str) -> None:
    """Nobody is drawn: what is left is sigma z, each z once."""
    sigma, batch = 1.7, 8.0
    source = Noise(a_key(5))
    trainer = make_trainer(
        name,
        GaussianMechanism(sigma, batch),
        plan=COMPILED,
        sampler=Batches([]),
        noise=source,
    )
    seen = [(g - centre) / scale * batch for g, centre, scale in private_means(trainer, 80)]
    twin = Noise(a_key(5))
    for step, found in enumerate(seen, 1):
        expected = sigma * twin.at(step).standard_normal(found)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert_deviation_of(torch.cat(seen).numpy(), sigma)


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("name", ["dp-adam", "dp-macadam"])
def test_a_record_more_or_less_moves_the_compiled_sum_by_at_most_1(name: str) -> None:
    common = [[0, 1, 2], [], list(range(20)), [5], list(range(9))]

    def last(rows: list[int]) -> tuple[Tensor, Tensor]:
        trainer = make_trainer(name, plan=COMPILED, sampler=Batches(*common, rows))
        *_, (g, _, scale) = private_means(trainer, 6)
        return g, scale

    rows = list(range(10, 22))
    without, scale = last(rows)
    moves = [float(((last([*rows, i])[0] - without) / scale).norm() * 8) for i in range(22, 30)]
    assert 0.9 < max(moves) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_bits_make_the_draws_that_the_source_makes(count: int, dtype: torch.dtype) -> None:
    one, other = (Noise(a_key(3)).at(1) for _ in range(2))
    for _ in range(3):
        like = torch.empty(count, dtype=dtype)
        made = one.bits(like).standard_normal(like)
        torch.testing.assert_close(made, other.standard_normal(like), rtol=0, atol=1e-6)


@pytest.mark.privacy
def test_the_compiled_metric_is_the_metric() -> None:
    trainer = make_trainer("dp-macadam")
    walk(trainer, 4)
    found = layers.find_layers(trainer.model.requires_grad_(True))
    region = trainer.state.region
    plain, compiled = Metric(region), Metric(region, compiled=fused.compile_terms())
    for layer in found:
        one, other = plain.of(layer), compiled.of(layer)
        assert one.centre_inverse is not None
        assert other.centre_inverse is not None
        torch.testing.assert_close(other.centre_inverse, one.centre_inverse)
        torch.testing.assert_close(other.s3, one.s3)
        assert torch.equal(other.largest, one.largest)


@pytest.mark.privacy
def test_the_compiled_third_term_is_added_up_in_float64() -> None:
    centre = torch.rand(300_000, generator=torch.Generator().manual_seed(0))
    times = torch.empty_like(centre)
    s3, _ = fused.compile_terms()(centre, torch.full_like(centre, 3.0), times)
    exact = (centre.double() * times.double()).sum()
    assert abs(float(s3 / exact) - 1) < 1e-9  # rounded products average out, a float32 sum does not


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "conv", "group-norm", "conv-reflect", "gated-root"])
def test_compiled_norms_and_what_is_clipped_by_them_match_the_oracle(name: str, kind: str) -> None:
    torch.manual_seed(0)
    subject = prepare(NETS[name].build(), norms=fused.compile_norms())
    for samples in (8, 5, 1, 12):
        assert_matches_oracle(subject, *NETS[name].batch(samples), kind)


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("build", [mlp, cnn])
def test_the_bound_holds_for_compiled_norms(build: Callable[[], nn.Sequential]) -> None:
    compiled = fused.compile_norms()
    for ratio, spread in itertools.product(RATIOS, SPREADS):
        case = Case(build(), ratio, spread, 12, compiled)
        assert_no_sample_weighs_more_than_one(case, ratio)


@pytest.mark.long
@pytest.mark.privacy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "group-norm"])
def test_where_norms_are_compiled_a_non_finite_sample_adds_nothing(name: str, kind: str) -> None:
    compiled = fused.compile_norms()
    for poison in POISONS:
        assert_a_non_finite_sample_adds_nothing(name, kind, poison, compiled)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    torch.compiler.reset()
    trainer = make_trainer("dp-sgd", plan=COMPILED)
    before = trainer.state.theta.clone()
    with pytest.raises(ModelError, match=r"--compile failed .*leave --compile out"):
        trainer.step()
    assert torch.equal(trainer.state.theta, before)


def test_all_six_can_be_compiled() -> None:
    assert {name for name, _ in VARIANTS} == set(OPTIMIZERS)
