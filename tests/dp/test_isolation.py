"""Networks that are run on each sample alone, against plain autograd on each sample alone."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from dpmac_cli.dp.gradients import Instantiated, OuterProducts
from dpmac_cli.dp.isolation import WRITTEN_OUT, Isolated
from dpmac_cli.dp.layers import Layer, flatten_parameters, split_by_module
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism
from dpmac_cli.dp.modules import StandardisedConv2d
from dpmac_cli.dp.per_sample import ClippedSum, Metric, clip_limit
from dpmac_cli.engine import Trainer
from dpmac_cli.errors import ModelError
from tests.conftest import every_optimizer
from tests.helpers import CLASSES as TINY_CLASSES
from tests.helpers import PLAN, SIDE, Batches, KeptNoise, Spy, make_trainer, walk

from .reference import clip, whiten
from .test_per_sample import region_clipping_half

SAMPLES, CLASSES = 6, 3


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
        return net.mix(net.table(tokens).mean(1)).tanh() @ net.table.weight.T

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
    "transformer": (Transformer, (1, 4, 4), {"patches", "norm", "head"}),
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
    "shared-parameter": (shared_parameter, (5,), {"2", "4"}),
    "flat-rows": (flat_rows, (4, 5), set()),
    "gru": (
        lambda: Running(
            lambda net, x: net.last(net.gru(x)[1][0]),
            gru=nn.GRU(3, 4, batch_first=True),
            last=nn.Linear(4, CLASSES),
        ),
        (5, 3),
        None,
    ),
    "checkpointed": (lambda: checkpointed(False), (5,), None),
    "checkpointed-reentrant": (lambda: checkpointed(True), (5,), None),
    "branching": (branching, (5,), None),
}


class Alone:
    """A network ready to be clipped sample by sample."""

    def __init__(
        self, model: nn.Module, shape: tuple[int, ...], views: int = 1, *, loop: bool = False
    ) -> None:
        self.layers: list[Layer] = split_by_module(model)
        self.model, self.views = model, views
        self.shape = shape if views == 1 else (views, *shape)
        self.isolated = Isolated(model, self.layers, self.shape, views, loop=loop)
        self.untouched = copy.deepcopy(model)
        self.theta = flatten_parameters(self.layers)
        self.sum = ClippedSum(model, self.layers, 1024, views=views, per_sample=self.isolated)

    def add(self, x: Tensor, y: Tensor, region: Ellipsoid) -> Tensor:
        out = torch.full_like(self.theta, torch.nan)
        self.sum.of(x, y, Metric(region), out)
        return out

    def exact(self, x: Tensor, y: Tensor) -> Tensor:
        """Gradients by autograd on the model as it was, a fresh one for each sample."""
        rows = []
        for x_i, y_i in zip(x, y, strict=True):
            model = copy.deepcopy(self.untouched)
            given = x_i if self.views > 1 else x_i[None]
            cross_entropy(model(given), y_i.expand(len(given))).backward()
            trained = [p for p in model.parameters() if p.requires_grad]
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows)

    def batch(self, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, *self.shape, dtype=self.theta.dtype)
        return x, torch.arange(samples) % CLASSES


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
    subject, recorded = alone(name), NETS[name][2]
    assert subject.isolated.vmapped == (recorded is not None)
    assert subject.isolated.recorded == (recorded or set())
