"""Networks that see each sample alone, against plain autograd on each sample alone."""

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import ks_2samp
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack as functorch_level
from torch.nn.functional import cross_entropy, layer_norm, linear
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum, clip_limit
from dpmac_cli.dp.clipping.custom_layers import StandardisedConv2d
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.per_sample import WRITTEN_OUT, PerSample, each_alone
from dpmac_cli.dp.clipping.projections import MASKS
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism
from dpmac_cli.errors import ModelError
from dpmac_cli.runs.trainer import Trainer
from tests.conftest import every_optimizer
from tests.helpers import CLASSES as TINY_CLASSES
from tests.helpers import (
    PLAN,
    SIDE,
    Batches,
    KeptNoise,
    Spy,
    Through,
    classes,
    make_trainer,
    numbers,
    walk,
)

from .reference import clip
from .test_per_sample import region_clipping_half

SAMPLES, CLASSES = 6, 3

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Running(nn.Module):
    """A network made of layers, put together by a function."""

    def __init__(self, run: Callable[..., Tensor], /, **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def mlp(inputs: int = 5, width: int = 7) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, CLASSES))


class Transformer(nn.Module):
    """A vision transformer: class token, position embedding, dropout and torch's attention."""

    def __init__(self, dropout: float = 0.0, width: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Embedding(5, width)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], 1)
        tokens = self.drop(tokens + self.positions(torch.arange(5, device=x.device)))
        normed = self.norm(tokens)
        tokens = tokens + self.attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = self.head(tokens[:, 0])
        return out


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two matrices, which begins at zero."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return out


def tied() -> nn.Module:
    """The embedding's weight gives the logits, too."""

    def run(net: Any, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % CLASSES
        out: Tensor = net.mix(net.table(tokens).mean(1)).tanh() @ net.table.weight.T
        return out

    return Running(run, table=nn.Embedding(CLASSES, 4), mix=nn.Linear(4, 4))


def shared_parameter() -> nn.Module:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(5, CLASSES))


def checkpointed(reentrant: bool) -> nn.Module:
    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        out: Tensor = net.last(checkpoint(net.inner, hidden, use_reentrant=reentrant))
        return out

    layers = {"first": nn.Linear(5, 6), "inner": mlp(6), "last": nn.Linear(3, CLASSES)}
    return Running(run, **layers)


def branching() -> nn.Module:
    """How often a layer is used depends on the sample."""

    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        if bool(x.sum() > 0):
            hidden = net.middle(hidden.tanh())
            if bool(x.sum() > 1):
                hidden = net.middle(hidden.tanh())
        out: Tensor = net.last(hidden)
        return out

    layers = {"first": nn.Linear(5, 6), "middle": nn.Linear(6, 6), "last": nn.Linear(6, CLASSES)}
    return Running(run, **layers)


def flat_rows() -> nn.Module:
    """A layer whose rows are patches, not samples."""

    def run(net: Any, x: Tensor) -> Tensor:
        rows: Tensor = net.embed(x.reshape(-1, 5)).tanh()
        return rows.view(len(x), -1, CLASSES).sum(1)

    return Running(run, embed=nn.Linear(5, CLASSES))


def doubled(module: nn.Module) -> nn.Module:
    """The module with a hook that changes what it gives."""
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def head(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, CLASSES))


#: Networks, the shape of a sample, and the layers that vmap records; None for the loop.
NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str] | None]] = {
    "mlp": (mlp, (5,), {"0", "2"}),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), head(36)
        ),
        (2, 5, 5),
        {"0", "1", "3.1"},
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3), nn.Tanh(), StandardisedConv2d(6, 3, 1), head(27)
        ),
        (3, 5, 5),
        {"0", "2", "3.1"},
    ),
    "transformer": (
        Transformer,
        (1, 4, 4),
        {"patches", "positions", "norm", "attention.in_proj", "attention.out_proj", "head"},
    ),
    "lora": (
        lambda: nn.Sequential(LoRA(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
        (5,),
        {"2"},
    ),
    "weight-norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, CLASSES)),
        (5,),
        {"2"},
    ),
    "hooked": (
        lambda: nn.Sequential(doubled(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, CLASSES)),
        (5,),
        {"0", "2"},
    ),
    "shared-layer": (
        lambda: Running(
            lambda net, x: net.last(net.twice(net.twice(x).tanh()).tanh()),
            twice=nn.Linear(5, 5),
            last=nn.Linear(5, CLASSES),
        ),
        (5,),
        {"twice", "last"},
    ),
    "tied-embedding": (tied, (5,), {"mix"}),
    "shared-parameter": (shared_parameter, (5,), {"0", "0.weight", "2", "4"}),
    "flat-rows": (flat_rows, (4, 5), {"embed"}),
    "by function": (
        lambda: Running(
            lambda net, x: net.last(linear(net.mid(x), net.first.weight, bias=net.first.bias)),
            mid=nn.Linear(5, 4),
            first=nn.Linear(4, 6),
            last=nn.Linear(6, CLASSES),
        ),
        (5,),
        {"mid", "first", "last"},
    ),
    "embedding by function": (
        lambda: Running(
            lambda net, x: net.last(linear(x, net.table.weight)),
            table=nn.Embedding(4, 5),
            last=nn.Linear(4, CLASSES),
        ),
        (5,),
        {"last"},
    ),
    "by function without its bias": (
        lambda: Running(
            lambda net, x: net.last(linear(x, net.first.weight) + 2 * net.first.bias),
            first=nn.Linear(5, 6),
            last=nn.Linear(6, CLASSES),
        ),
        (5,),
        {"last"},
    ),
    "gru": (
        lambda: Running(
            lambda net, x: net.last(net.gru(x)[1][0]),
            gru=nn.GRU(3, 4, batch_first=True),
            last=nn.Linear(4, CLASSES),
        ),
        (5, 3),
        {"gru.ih_l0", "gru.hh_l0", "last"},
    ),
    "checkpointed": (lambda: checkpointed(False), (5,), None),
    "checkpointed-reentrant": (lambda: checkpointed(True), (5,), None),
    "branching": (branching, (5,), None),
    "another under vmap": (
        lambda: Running(
            lambda net, x: net.last(net.first(x) * (1 if functorch_level() is None else 2)),
            first=nn.Linear(5, 6),
            last=nn.Linear(6, CLASSES),
        ),
        (5,),
        None,
    ),
}


class Alone:
    """A network ready to be clipped sample by sample."""

    def __init__(
        self, model: nn.Module, shape: tuple[int, ...], views: int = 1, *, loop: bool = False
    ) -> None:
        self.model, self.views = model, views
        self.shape = shape if views == 1 else (views, *shape)
        labels = classes(*[views] * (views > 1))
        self.per_sample = PerSample(model, numbers(*self.shape), labels, views)
        if loop:
            self.per_sample.run_in_a_loop("as asked.")
        self.layers = self.per_sample.layers
        self.untouched = copy.deepcopy(model)
        self.theta = flatten_parameters(self.layers)
        self.sum = ClippedChunkSum(self.per_sample, 1024)

    def add(self, x: Tensor, y: Tensor, region: Ellipsoid) -> Tensor:
        out = torch.full_like(self.theta, torch.nan)
        self.sum.of(x, y, RegionMetric(region), out)
        return out

    def exact(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradients by autograd on the model as it was, a fresh one for each sample."""
        rows = []
        for x_i, y_i in zip(x, y, strict=True):
            model = copy.deepcopy(self.untouched)
            given, label = (x_i, y_i) if self.views > 1 else (x_i[None], y_i[None])
            cross_entropy(model(given), label).backward()  # type: ignore[no-untyped-call]
            names = (name for of in self.per_sample._names for name in of)
            trained = map(model.get_parameter, names)
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows)

    def batch(self, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, *self.shape, dtype=self.theta.dtype)
        shape = (samples,) if self.views == 1 else (samples, self.views)
        return x, torch.arange(math.prod(shape)).view(shape) % CLASSES


def alone(name: str, views: int = 1, *, loop: bool = False, dtype: Any = torch.float64) -> Alone:
    build, shape, _ = NETS[name]
    return Alone(build().to(dtype), shape, views, loop=loop)


@pytest.mark.privacy
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("name", NETS)
def test_clipped_sums_match_autograd_on_each_sample(name: str, kind: str, views: int) -> None:
    subject = alone(name, views)
    x, y = subject.batch()
    exact = subject.exact(x, y)
    region = region_clipping_half(kind, exact, subject.theta)
    error = subject.add(x, y, region) - clip(exact, region, clip_limit(1024)).sum(0)
    assert (error / region.scale).norm() <= 1e-11 * SAMPLES


@pytest.mark.parametrize("name", NETS)
def test_vmap_is_used_where_it_can_be_and_records_layers(name: str) -> None:
    per_sample, (*_, recorded) = alone(name).per_sample, NETS[name]
    assert per_sample.vmapped == (recorded is not None)
    assert per_sample._recorded == (recorded or set())
    assert bool(per_sample.notes) == (recorded is None)


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", [name for name, (*_, recorded) in NETS.items() if recorded])
def test_vmap_and_the_loop_agree(name: str, views: int) -> None:
    torch.manual_seed(1)
    fast = alone(name, views)
    torch.manual_seed(1)
    slow = alone(name, views, loop=True)
    x, y = fast.batch()
    region = region_clipping_half("ellipsoid", fast.exact(x, y), fast.theta)
    assert fast.per_sample.vmapped
    assert not slow.per_sample.vmapped
    torch.testing.assert_close(fast.add(x, y, region), slow.add(x, y, region))


class NoRule(torch.autograd.Function):
    """The identity, in torch's old style."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class ByNoRule(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = NoRule.apply(super().forward(x))
        return out


def test_a_function_without_a_rule_for_vmap_is_told_of() -> None:
    net = nn.Sequential(ByNoRule(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    per_sample = PerSample(net, numbers(5))
    assert not per_sample.vmapped
    assert "set generate_vmap_rule = True" in per_sample.notes[0]


def test_views_of_one_sample_may_be_mixed() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        mixed = x - x.mean(0)
        out: Tensor = net.second(net.first(mixed).tanh().mean(0, keepdim=True))
        return out.expand(len(x), -1)

    net = Running(run, first=nn.Linear(5, 4), second=nn.Linear(4, CLASSES)).double()
    subject = Alone(net, (5,), 3)
    x, y = subject.batch()
    exact = subject.exact(x, y)
    region = region_clipping_half("ball", exact, subject.theta)
    torch.testing.assert_close(
        subject.add(x, y, region), clip(exact, region, clip_limit(1024)).sum(0)
    )
    assert subject.per_sample._recorded == {"first", "second"}


class Ghost(nn.Module):
    """Batch norm over groups of two samples."""

    def forward(self, x: Tensor) -> Tensor:
        normed = [layer_norm(part.T, part.T.shape[1:]).T for part in x.chunk(3)]
        return x + torch.cat(normed)


class Backwards(torch.autograd.Function):
    """Mixes samples in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + gradients[0].sum(0)


def _mixed_inside(mix: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 5), Through(mix), nn.Tanh(), nn.Linear(5, CLASSES))


MIXERS: Mapping[str, Callable[[], nn.Module]] = {
    "mean": _mixed_inside(lambda x: x - x.mean(0)),
    "maximum": _mixed_inside(lambda x: x / x.abs().max()),
    "ghost batch norm": _mixed_inside(Ghost()),
    "shuffled": _mixed_inside(lambda x: x[torch.randperm(len(x))]),
    "attention over the batch": _mixed_inside(lambda x: (x @ x.T).softmax(1) @ x),
    "backwards": _mixed_inside(Backwards.apply),
    "batch norm": lambda: nn.Sequential(
        nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES)
    ),
}
every_mixer = pytest.mark.parametrize("name", MIXERS)


def mixer(name: str) -> Alone:
    return Alone(MIXERS[name]().double(), (1, 5) if name == "batch norm" else (5,))


@pytest.mark.privacy
@every_mixer
def test_a_batch_adds_what_its_samples_add_alone(name: str) -> None:
    subject = mixer(name)
    x, y = subject.batch()
    region = region_clipping_half("ellipsoid", subject.exact(x, y), subject.theta)
    together = subject.add(x, y, region)
    by_itself = [subject.add(x[i : i + 1], y[i : i + 1], region) for i in range(len(x))]
    torch.testing.assert_close(together, torch.stack(by_itself).sum(0))


@pytest.mark.privacy
@every_mixer
def test_an_added_record_moves_the_whitened_sum_by_at_most_1(name: str) -> None:
    subject = mixer(name)
    x, y = subject.batch()
    x[0] *= 100  # as the first, it would be kept for all others
    region = region_clipping_half("ball", subject.exact(x, y), subject.theta)
    moved = subject.add(x, y, region) - subject.add(x[1:], y[1:], region)
    assert (moved / region.scale).norm() <= 1


@pytest.mark.parametrize("loop", [False, True])
def test_dropout_differs_between_samples_and_repeats_with_the_seed(loop: bool) -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, CLASSES)).double()
    subject = Alone(net, (40,), loop=loop)
    x, y = torch.ones(4, 40, dtype=torch.float64), torch.zeros(4, dtype=torch.long)

    def losses(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return subject.per_sample(x, y)[0]

    assert subject.per_sample.vmapped is not loop
    assert len(set(losses(0).tolist())) == len(x)
    assert torch.equal(losses(0), losses(0))
    assert not torch.equal(losses(0), losses(1))


@pytest.mark.parametrize("views", [1, 2])
def test_dropout_inside_a_transformer_is_supported(views: int) -> None:
    subject = Alone(Transformer(0.5), (1, 4, 4), views)
    x, y = subject.batch()
    region = region_clipping_half("ball", subject.exact(x, y), subject.theta)
    assert subject.per_sample.vmapped
    assert subject.add(x, y, region).isfinite().all()


def test_the_choice_of_vmap_draws_from_no_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, CLASSES))
    torch.manual_seed(5)
    PerSample(net, numbers(4))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.privacy
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "lora"])
def test_a_sample_that_is_not_finite_adds_nothing(name: str, poison: float, loop: bool) -> None:
    subject = alone(name, loop=loop, dtype=torch.float32)
    x, y = subject.batch()
    region = region_clipping_half("ellipsoid", subject.exact(x, y).double(), subject.theta)
    x[2] = poison
    healthy = [i for i in range(SAMPLES) if i != 2]
    total, without = subject.add(x, y, region), subject.add(x[healthy], y[healthy], region)
    assert total.isfinite().all()
    moved = ((total.double() - without.double()) / region.scale).norm()
    assert moved <= (1 if poison == 3e38 else 1e-5)


def tiny_mixer(mix: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, 5), Through(mix), nn.Linear(5, TINY_CLASSES)
    ).double()


@every_optimizer
@pytest.mark.privacy
def test_in_training_an_added_record_moves_the_whitened_sum_by_at_most_1(name: str) -> None:
    def whitened(batch: list[int]) -> tuple[Tensor, Trainer]:
        spy = Spy(0.0, 8)
        model = tiny_mixer(lambda x: x * torch.sin(100 * x.sum(0)))
        sampler = Batches([0, 1, 2, 3], batch)
        trainer = make_trainer(name, spy, plan=PLAN, model=model, sampler=sampler)
        walk(trainer, 2)
        return spy.whitened_sum(), trainer

    few, _ = whitened([4, 5, 6])
    many, _ = whitened([4, 5, 6, 7])
    assert 0 < (many - few).norm() <= 1


@every_optimizer
def test_an_empty_batch_is_a_step_of_noise_alone(name: str) -> None:
    noise = KeptNoise()
    trainer = make_trainer(
        name, GaussianMechanism(1.0, 8), plan=PLAN, sampler=Batches([]), noise=noise
    )
    assert walk(trainer, 2).isfinite().all()
    assert len(noise.drawn) == 2


def test_a_chunk_instantiates_a_bounded_number_of_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert alone("lora").per_sample.most == WRITTEN_OUT // (2 * 5 + 6 * 2)
    monkeypatch.setattr("dpmac_cli.dp.clipping.per_sample.WRITTEN_OUT", 60)
    model = nn.Sequential(nn.Flatten(), LoRA(SIDE**2, TINY_CLASSES)).double()
    model.get_parameter("1.b").data.normal_()
    batch = list(range(10))
    results = []
    for plan in (PLAN, replace(PLAN, physical_batch=3)):
        trainer = make_trainer(
            "dp-sgd", plan=plan, model=copy.deepcopy(model), sampler=Batches(batch)
        )
        assert trainer.state.chunk == min(plan.physical_batch, 60 // (2 * SIDE**2 + 2 * 4))
        results.append(walk(trainer, 2))
    torch.testing.assert_close(*results)


def test_zeros_at_the_start_hide_no_use_of_a_weight() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        hidden = net.table((x.abs() * 10).long() % CLASSES).mean(1).tanh()
        out: Tensor = net.head(hidden) + net.gate(hidden @ net.table.weight.T)
        return out

    gate = nn.Linear(CLASSES, CLASSES)
    nn.init.zeros_(gate.weight)
    net = Running(run, table=nn.Embedding(CLASSES, 4), head=nn.Linear(4, CLASSES), gate=gate)
    subject = Alone(net.double(), (5,))
    subject.theta.normal_()
    subject.untouched = copy.deepcopy(subject.model).requires_grad_()
    x, y = subject.batch()
    exact = subject.exact(x, y)
    region = region_clipping_half("ball", exact, subject.theta)
    torch.testing.assert_close(
        subject.add(x, y, region), clip(exact, region, clip_limit(1024)).sum(0)
    )


def test_a_network_that_fails_on_made_up_samples_is_refused() -> None:
    net = nn.Linear(4, CLASSES)
    with pytest.raises(ModelError, match=r"The network failed on samples of shape \(5,\)"):
        PerSample(net, numbers(5))


class Masked(nn.Module):
    """Leaves out a mask that hides nothing unless it is traced, as networks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = self.first(x), x[:, :4] > 0
        if sys.modules[MASKS].is_tracing(mask) or not bool(mask.all()):
            hidden = torch.where(mask, hidden, 0)
        out: Tensor = self.last(hidden.tanh())
        return out


@pytest.mark.privacy
def test_masks_of_transformers_are_kept_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    utilities: Any = ModuleType(MASKS)
    utilities.is_tracing = before = lambda _: False
    monkeypatch.setitem(sys.modules, MASKS, utilities)
    subject = Alone(Masked().double(), (5,))
    assert subject.per_sample.vmapped
    x, y = subject.batch()
    x[0] = 1.0  # hides nothing
    exact = subject.exact(x, y)
    region = region_clipping_half("ball", exact, subject.theta)
    torch.testing.assert_close(
        subject.add(x, y, region), clip(exact, region, clip_limit(1024)).sum(0)
    )
    alone = each_alone(subject.model, x)
    torch.testing.assert_close(
        alone(x), torch.cat([subject.model(row) for row in torch.split(x, 1)])
    )
    assert alone.__name__ == "mapped"
    assert utilities.is_tracing is before


def test_made_up_masks_leave_tokens_of_both_kinds() -> None:
    """Among equal tokens alone, attention has no gradient to compare."""
    for length in (2, 3, 4, 9):
        zeros = torch.zeros(1, length, dtype=torch.long)
        made = Structure({"ids": zeros, "mask": zeros}).made_up(3)
        assert {0, 1} == set(made["mask"].unique().tolist())
        seen = made["ids"][made["mask"].bool()].unique()
        assert len(seen) == (2 if length > 3 else 1)


@pytest.mark.privacy
def test_a_failure_of_vmap_in_training_is_an_error() -> None:
    """Which way samples are run must not depend on them."""
    broken: list[bool] = []

    def run(net: Any, x: Tensor) -> Tensor:
        if broken:
            x = x * float(x.sum())
        out: Tensor = net.layer(x)
        return out

    subject = Alone(Running(run, layer=nn.Linear(5, CLASSES)).double(), (5,))
    x, y = subject.batch()
    region = region_clipping_half("ball", subject.exact(x, y), subject.theta)
    broken.append(True)
    with pytest.raises(ModelError, match="The network failed"):
        subject.add(x, y, region)


def test_another_number_of_uses_is_an_error() -> None:
    uses = [1]

    def run(net: Any, x: Tensor) -> Tensor:
        for _ in range(uses[0]):
            x = net.layer(x)
        return x

    subject = Alone(Running(run, layer=nn.Linear(CLASSES, CLASSES)).double(), (CLASSES,))
    x, y = subject.batch()
    region = region_clipping_half("ball", subject.exact(x, y), subject.theta)
    for uses[0] in (0, 2):
        with pytest.raises(ModelError):
            subject.add(x, y, region)


def test_a_layer_that_no_sample_reaches_has_no_gradient() -> None:
    subject = Alone(
        Running(lambda net, x: net.layer(x), layer=nn.Linear(5, CLASSES), idle=nn.Linear(2, 2)),
        (5,),
    )
    x, y = subject.batch()
    region = region_clipping_half("ball", subject.exact(x, y).double(), subject.theta)
    total = subject.add(x, y, region)
    assert total[: subject.layers[0].stop].any()
    assert not total[subject.layers[1].start :].any()


class Counted(nn.Module):
    """Multiplies by Poisson draws, which take more random numbers for larger rates."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.poisson(x[:, :1].exp()) if self.training else 1
        logits: Tensor = self.head(x[:, 1:] * counts)
        return logits


@pytest.mark.privacy
def test_draws_of_others_are_distributed_alike_with_a_record_more() -> None:
    """By vmap all samples draw from one stream, in order: what is left of it is as random."""
    torch.set_num_threads(1)
    net = Counted()
    per_sample = PerSample(net, numbers(2))
    assert per_sample.vmapped
    x, y = torch.tensor([[4.0, 1.0], [1.0, 1.0], [2.0, 1.0]]), torch.zeros(3).long()

    def drawn(first: int) -> NDArray[Any]:
        torch.manual_seed(3)
        found = [per_sample(x[first:], y[first:])[0][-2:].sum() for _ in range(1000)]
        return torch.stack(found).numpy()

    more, less = drawn(0), drawn(1)
    assert not np.array_equal(more, less)
    assert ks_2samp(more, less).pvalue > 0.001
