"""Clipped sums against the float64 oracle, sample by sample."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.clipped_sum import (
    CANCELLATION_LIMIT,
    cancellation_limit,
    clip_limit,
    clip_weights,
)
from dpmac_cli.dp.clipping.custom_layers import StandardisedConv2d
from dpmac_cli.dp.clipping.forms import Instantiated, PerSampleGradients, held, in_pieces
from dpmac_cli.dp.clipping.ghost_clipping import PositionProducts, UseSizes
from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters
from dpmac_cli.dp.clipping.norms import RegionMetric, SquaredNorms
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.clipping.per_sample import PerSample, chain_of
from dpmac_cli.dp.clipping.tied_products import TiedProducts
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, ball, ellipsoid
from dpmac_cli.errors import ModelError
from tests.helpers import Batches, in_chunks_of, make_trainer
from tests.tiers import pairs_short

from .reference import Subject, clip, prepare, whiten

SAMPLES = 8
CLASSES = 3
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
KINDS = ("ball", "ellipsoid")

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # bags, under vmap
few_examples = settings(max_examples=15, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _seeded_and_serial() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small only wait for one another


class MeanOverTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Gated(nn.Module):
    """Owns a raw parameter beside child modules, so they are handled as one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gain * self.inner(x)
        return out


class GatedRoot(Gated):
    """The model itself owns the raw parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :CLASSES]


class SelfAttention(nn.Module):
    """torch's own attention, which is given names and gives a tuple."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def doubled_weights(width: int) -> nn.Module:
    """Attention whose output projection computes its weight."""
    module = SelfAttention(width)
    parametrize.register_parametrization(module.attention.out_proj, "weight", Double())
    return module


def tripled_outputs(width: int) -> nn.Module:
    """Attention whose output a hook changes."""
    module = SelfAttention(width)
    module.attention.register_forward_hook(lambda _, __, found: (3 * found[0], found[1]))
    return module


class MaskedAttention(nn.Module):
    """Attention with one mask for each sample and head, added to the scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).triu(1)
        hidden = (x[:, :, 0] > 0.5) & (torch.arange(x.shape[1]) > 0)  # all see the first
        by_row = (x[:, :1, :1].unsqueeze(1) * torch.stack([later, 1 - later])).flatten(0, 1)
        masks = {"attn_mask": by_row, "key_padding_mask": hidden.to(x.dtype)}
        out: Tensor = self.attention(x, x, x, need_weights=False, **masks)[0]
        return out


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module with some parameters, or all, frozen."""
    for name, p in module.named_parameters():
        p.requires_grad_(bool(names) and name not in names)
    return module


@dataclass(frozen=True)
class Net:
    """A model and the shape of a sample; ``tokens`` > 0 draws integers below it instead."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0

    def batch(self, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
        x = (
            torch.randint(self.tokens, (samples, *self.shape))
            if self.tokens
            else torch.randn(samples, *self.shape)
        )
        return x, torch.randint(CLASSES, (samples,))


class Scores(nn.Module):
    """Logits without parameters, at least two of them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.square().sum(1, keepdim=True)], 1)


def head(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, CLASSES))


class Tied(nn.Module):
    """An embedding whose weight is that of the head, as in GPT-2, and a head with a bias."""

    def __init__(self, length: int, words: int = CLASSES, padding: int | None = 1) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(words, 4, padding_idx=padding), nn.Linear(4, 4)
        self.head = nn.Linear(4, words)
        self.head.weight = self.table.weight
        self.length = length

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.mix(self.table(tokens))))
        return logits[:, : self.length].mean(1)


def of_one_weight() -> nn.Module:
    """Two layers with one weight, each with a bias of its own or none."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), head(5))


def flat_kernels() -> nn.Module:
    """Kernels that hardly differ from their mean: one row below the least, and one above."""
    conv = StandardisedConv2d(2, 2, 3)
    with torch.no_grad():
        conv.weight.sub_(conv.weight.flatten(1).mean(1).view(-1, 1, 1, 1)).mul_(1e-3).add_(0.5)
        conv.weight[1].mul_(100)
    return nn.Sequential(conv, nn.Tanh(), head(18))


NETS: Mapping[str, Net] = {
    "linear": Net(lambda: nn.Linear(5, 3), (5,)),
    "linear-no-bias": Net(lambda: nn.Linear(5, 3, bias=False), (5,)),
    "mlp": Net(lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)), (6,)),
    "frozen-bias": Net(
        lambda: nn.Sequential(frozen(nn.Linear(6, 7), "bias"), nn.ReLU(), head(7)), (6,)
    ),
    "frozen-weight": Net(
        lambda: nn.Sequential(frozen(nn.Linear(6, 7), "weight"), nn.ReLU(), head(7)), (6,)
    ),
    "frozen-layer": Net(lambda: nn.Sequential(frozen(nn.Linear(6, 7)), nn.ReLU(), head(7)), (6,)),
    "sequence": Net(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), MeanOverTime(), head(5)), (6, 4)
    ),
    "conv": Net(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, (3, 2), padding=(2, 1), dilation=2, groups=2, bias=False),
            head(4 * 4 * 4),
        ),
        (2, 7, 8),
    ),
    "conv-frozen-weight": Net(
        lambda: nn.Sequential(frozen(nn.Conv2d(2, 4, 3), "weight"), nn.ReLU(), head(16)),
        (2, 4, 4),
    ),
    "conv-reflect": Net(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding="same", padding_mode="reflect"), head(3 * 16)
        ),
        (1, 4, 4),
    ),
    "group-norm": Net(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), head(16)),
        (1, 4, 4),
    ),
    "layer-norm": Net(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), head(6)), (5,)
    ),
    "layer-norm-of-images": Net(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.LayerNorm((6, 2)), nn.Tanh(), head(24)),
        (1, 8, 4),
    ),
    "standardised-conv": Net(
        lambda: nn.Sequential(
            StandardisedConv2d(2, 4, 3, stride=2, padding=1),
            nn.Tanh(),
            StandardisedConv2d(4, 4, 3, padding=1, groups=2, bias=False),
            head(4 * 4 * 4),
        ),
        (2, 7, 8),
    ),
    "standardised-conv-flat": Net(flat_kernels, (2, 5, 5)),
    "standardised-conv-frozen-gain": Net(
        lambda: nn.Sequential(frozen(StandardisedConv2d(2, 3, 3), "gain"), nn.Tanh(), head(27)),
        (2, 5, 5),
    ),
    "embedding": Net(lambda: nn.Sequential(nn.Embedding(10, 4), head(20)), (5,), tokens=10),
    "tied": Net(lambda: Tied(5), (5,), tokens=CLASSES),
    "tied-at-one-position": Net(lambda: Tied(1), (1,), tokens=CLASSES),
    "tied-with-many-words": Net(lambda: Tied(2, 90), (3,), tokens=4),
    "tied-without-padding": Net(lambda: Tied(3, 90, None), (4,), tokens=4),
    "layers-of-one-weight": Net(of_one_weight, (5,)),
    "attention": Net(lambda: nn.Sequential(SelfAttention(4), nn.Tanh(), head(20)), (5, 4)),
    "attention-frozen-projection": Net(
        lambda: nn.Sequential(frozen(SelfAttention(4), "attention.in_proj_weight"), head(20)),
        (5, 4),
    ),
    "attention-parametrised": Net(lambda: nn.Sequential(doubled_weights(4), head(20)), (5, 4)),
    "attention-hooked": Net(lambda: nn.Sequential(tripled_outputs(4), head(20)), (5, 4)),
    "attention-masked-by-head": Net(lambda: nn.Sequential(MaskedAttention(4), head(20)), (5, 4)),
    "transformer": Net(
        lambda: nn.Sequential(
            nn.Linear(3, 4),
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2
            ),
            head(20),
        ),
        (5, 3),
    ),
    "gated": Net(lambda: nn.Sequential(nn.Linear(5, 4), Gated(4), head(4)), (5,)),
    "gated-root": Net(lambda: GatedRoot(4), (4,)),
    "inplace-relu": Net(
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.ReLU(True), head(7)),
        (6,),
    ),
    "inplace-relu-first": Net(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), head(8)), (1, 4, 4)
    ),
}


class Again(nn.Module):
    """A layer used several times, its output the input of the next use."""

    def __init__(self, layer: nn.Module, times: int = 2) -> None:
        super().__init__()
        self.layer, self._times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._times):
            x = self.layer(x).tanh()
        return x


class TwoScales(nn.Module):
    """One layer on an image and on a smaller one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        half = self.layer(nn.functional.avg_pool2d(x, 2))
        return torch.cat([self.layer(x).flatten(2), half.flatten(2)], 2)


class Recurrent(nn.Module):
    """A state that two layers move on from place to place of a sequence."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.read, self.move = nn.Linear(inputs, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.read(x[:, 0]))
        for place in x[:, 1:].unbind(1):
            state = torch.tanh(self.read(place) + self.move(state))
        return state


class Through(nn.Module):
    """All outputs of torch's recurrent layer and its last states, from a first one or zeros."""

    def __init__(self, layer: Any, first: float | None = None) -> None:
        super().__init__()
        self.layer, self._first = layer, first

    def forward(self, x: Tensor) -> Tensor:
        layer, given = self.layer, x if self.layer.batch_first else x.transpose(0, 1)
        if self._first is None:
            out, last = layer(given)
        else:
            states = (1 + layer.bidirectional) * layer.num_layers, len(x), layer.hidden_size
            first = x.mean() * 0 + x.new_full(states, self._first)
            several = isinstance(layer, nn.LSTM)
            out, last = layer(given, (first, first.sin()) if several else first)
        ends = last if isinstance(last, tuple) else (last,)
        out = out if layer.batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), *(end.transpose(0, 1).flatten(1) for end in ends)], 1)


class Blend(nn.Module):
    """A layer with two inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x * self.share + y * self.share.square())


class Blended(nn.Module):
    """A blend with itself, and of that with something else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blend = Blend(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blend(x, self.blend(x, x))
        return out


class Stopped(nn.Module):
    """A layer whose first use no gradient goes through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.layer(x)
        out: Tensor = self.layer(x)
        return out


AGAIN: Mapping[str, Net] = {
    "linear-twice": Net(lambda: nn.Sequential(Again(nn.Linear(5, 5)), head(5)), (5,)),
    "linear-frozen-bias-twice": Net(
        lambda: nn.Sequential(Again(frozen(nn.Linear(5, 5), "bias")), head(5)), (5,)
    ),
    "sequence-thrice": Net(
        lambda: nn.Sequential(Again(nn.Linear(4, 4), 3), MeanOverTime(), head(4)), (6, 4)
    ),
    "recurrent": Net(lambda: nn.Sequential(Recurrent(3, 4), head(4)), (5, 3)),
    "lstm": Net(lambda: nn.Sequential(Through(nn.LSTM(3, 4, batch_first=True)), head(28)), (5, 3)),
    "lstm-deep": Net(
        lambda: nn.Sequential(Through(nn.LSTM(3, 2, 2, bidirectional=True), 0.5), head(36)), (5, 3)
    ),
    "lstm-frozen": Net(
        lambda: nn.Sequential(
            frozen(Through(nn.LSTM(3, 4, batch_first=True)), "layer.weight_ih_l0"), head(28)
        ),
        (5, 3),
    ),
    "gru": Net(lambda: nn.Sequential(Through(nn.GRU(3, 4, batch_first=True)), head(24)), (5, 3)),
    "gru-deep": Net(
        lambda: nn.Sequential(
            Through(nn.GRU(3, 2, 2, batch_first=True, bias=False, bidirectional=True), 0.5),
            head(28),
        ),
        (5, 3),
    ),
    "rnn-relu": Net(
        lambda: nn.Sequential(Through(nn.RNN(3, 4, nonlinearity="relu")), head(24)), (5, 3)
    ),
    "conv-at-two-scales": Net(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 1), TwoScales(nn.Conv2d(2, 3, 3, padding=1)), head(3 * 20)
        ),
        (1, 4, 4),
    ),
    "grouped-conv-at-two-scales": Net(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 1), TwoScales(nn.Conv2d(4, 4, 3, padding=1, groups=2)), head(4 * 20)
        ),
        (1, 4, 4),
    ),
    "standardised-conv-at-two-scales": Net(
        lambda: nn.Sequential(TwoScales(StandardisedConv2d(2, 3, 3, padding=1)), head(3 * 20)),
        (2, 4, 4),
    ),
    "reflecting-conv-at-two-scales": Net(
        lambda: nn.Sequential(
            TwoScales(nn.Conv2d(1, 3, 3, padding=1, padding_mode="reflect")), head(3 * 20)
        ),
        (1, 4, 4),
    ),
    "norms-twice": Net(
        lambda: nn.Sequential(
            nn.Linear(5, 6), Again(nn.GroupNorm(2, 6)), Again(nn.LayerNorm(6)), head(6)
        ),
        (5,),
    ),
    "gated-twice": Net(lambda: nn.Sequential(nn.Linear(5, 4), Again(Gated(4)), head(4)), (5,)),
    "stopped": Net(lambda: nn.Sequential(Stopped(5), head(5)), (5,)),
    "blended": Net(lambda: nn.Sequential(Blended(4), head(4)), (4,)),
}


def region_clipping_half(kind: str, gradients: Tensor, like: Tensor) -> Ellipsoid:
    """A region whose border lies between the samples, so that both cases of c occur."""
    generator = torch.Generator().manual_seed(1)
    norms = gradients.norm(dim=1)
    if kind == "ball":
        return ball(float(norms.median()), like)
    m = float(norms.mean()) / len(like) ** 0.5 * torch.randn(len(like), generator=generator)
    b = torch.exp(torch.randn(len(like), generator=generator))
    wide = ellipsoid(m.to(like.dtype), b.to(like.dtype))
    size = float(whiten(gradients, wide).norm(dim=1).median()) ** 2
    # b^2 is a quotient, as line 20 leaves it.
    return Ellipsoid(wide.centre, wide.inverse / size * 7, 7 * wide.factor)


def assert_matches_oracle(subject: Subject, x: Tensor, y: Tensor, kind: str) -> None:
    tolerance = TOLERANCE[subject.theta.dtype]
    g = subject.exact_gradients(x, y)
    region = region_clipping_half(kind, g, subject.theta)
    norms, total = subject.norms(x, y, region), subject.add(x, y, region)

    exact = whiten(g, region).norm(dim=1)
    torch.testing.assert_close(norms, exact, rtol=tolerance, atol=tolerance)
    error = (total.double() - clip(g, region, subject.limit).sum(0)) / region.scale
    assert error.norm() <= tolerance * len(x)

    c = subject.weights(x, y, region)
    expected = (subject.limit / exact).clamp(max=1.0)
    torch.testing.assert_close(c, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("name", "kind", "dtype"), pairs_short([*NETS], KINDS, [*TOLERANCE]), ids=str
)
def test_norms_and_sums_match_the_oracle(name: str, kind: str, dtype: torch.dtype) -> None:
    net = NETS[name]
    x, y = net.batch()
    x = x.to(dtype) if x.is_floating_point() else x
    assert_matches_oracle(prepare(net.build().to(dtype), x), x, y, kind)


def views_of(net: Net, views: int) -> tuple[Tensor, Tensor]:
    """Views that differ from one another, shape (samples, views, ...) unless there is one."""
    x, y = net.batch(SAMPLES * views)
    return (x, y) if views == 1 else (x.view(SAMPLES, views, *net.shape), y.view(SAMPLES, views))


@pytest.mark.privacy
@pytest.mark.parametrize(("name", "kind", "views"), pairs_short([*NETS, *AGAIN], KINDS, [1, 3]))
def test_views_and_uses_match_the_oracle(name: str, kind: str, views: int) -> None:
    assert_viewed_matches_oracle(name, kind, views)


def assert_viewed_matches_oracle(name: str, kind: str, views: int) -> None:
    net = {**NETS, **AGAIN}[name]
    x, y = views_of(net, views)
    x = x.double() if x.is_floating_point() else x
    rows = x.flatten(0, 1) if views > 1 else x
    subject = prepare(net.build().double(), rows, views=views)
    assert_matches_oracle(subject, x, y, kind)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("name", "kind", "views"),
    pairs_short(
        [
            *("sequence", "linear-no-bias", "mlp", "recurrent", "linear-twice", "attention"),
            *("transformer", "lstm", "gru"),
        ],
        KINDS,
        [1, 3],
    ),
)
def test_pairs_of_positions_match_the_oracle(
    name: str, kind: str, views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.PIECE", 0)
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.HELD", 0)
    monkeypatch.setattr(UseSizes, "pairs", 0)
    net = {**NETS, **AGAIN}[name]
    subject = prepare(net.build(), net.batch()[0], views=views)
    [form, *_] = subject.forms(*views_of(net, views))
    assert isinstance(form, OuterProducts | PositionProducts)
    assert_viewed_matches_oracle(name, kind, views)


@pytest.mark.privacy
@few_examples
@given(
    inputs=st.integers(1, 9),
    outputs=st.integers(2, 6),
    samples=st.integers(1, 5),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_linear_of_any_shape(
    inputs: int, outputs: int, samples: int, bias: bool, kind: str
) -> None:
    x = torch.randn(samples, inputs, dtype=torch.float64)
    subject = prepare(nn.Linear(inputs, outputs, bias).double(), x)
    assert_matches_oracle(subject, x, torch.randint(outputs, (samples,)), kind)


@pytest.mark.privacy
@few_examples
@given(
    channels=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    dilation=st.integers(1, 2),
    size=st.tuples(st.integers(5, 7), st.integers(5, 7)),
    samples=st.integers(1, 4),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
    few=st.sampled_from([0, 1000]),
)
def test_conv2d_of_any_shape(
    channels: tuple[int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: int,
    size: tuple[int, int],
    samples: int,
    bias: bool,
    kind: str,
    few: int,
) -> None:
    groups, inputs, outputs = channels
    conv = nn.Conv2d(
        groups * inputs, groups * outputs, kernel, stride, padding, dilation, groups, bias
    )
    model = nn.Sequential(conv, nn.Flatten()).double()
    x = torch.randn(samples, groups * inputs, *size, dtype=torch.float64)
    y = torch.randint(model(x).shape[1], (samples,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpmac_cli.dp.clipping.layer_rules.FEW_INPUTS", few)
        patch.setattr("dpmac_cli.dp.clipping.layer_rules.FEW_POSITIONS", few)
        assert_matches_oracle(prepare(model, x), x, y, kind)


@pytest.mark.privacy
@few_examples
@given(
    groups=st.integers(1, 3),
    width=st.integers(1, 3),
    size=st.lists(st.integers(1, 4), max_size=3),
    samples=st.integers(1, 4),
    fixed=st.sampled_from([None, "weight", "bias"]),
    kind=st.sampled_from(KINDS),
)
def test_group_norm_of_any_shape(
    groups: int, width: int, size: list[int], samples: int, fixed: str | None, kind: str
) -> None:
    channels = groups * width + groups  # a group of one value has no spread, and no gradient
    norm = nn.GroupNorm(groups, channels)
    if fixed:
        frozen(norm, fixed)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    model = nn.Sequential(norm, nn.Flatten(), Scores()).double()
    x = torch.randn(samples, channels, *size, dtype=torch.float64)
    classes = model(x).shape[1]
    assert_matches_oracle(prepare(model, x), x, torch.randint(classes, (samples,)), kind)


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("mlp", [OuterProducts, OuterProducts]),
        ("frozen-layer", [OuterProducts]),
        ("frozen-weight", [Instantiated, OuterProducts]),
        ("sequence", [Instantiated, OuterProducts]),
        ("layer-norm", [OuterProducts, Instantiated, OuterProducts]),
        ("layer-norm-of-images", [Instantiated, Instantiated, OuterProducts]),
        ("embedding", [Instantiated, OuterProducts]),
        ("standardised-conv", [Instantiated, Instantiated, OuterProducts]),
        ("group-norm", [Instantiated, Instantiated, OuterProducts]),
        ("conv-reflect", [Instantiated, OuterProducts]),
        ("gated", [OuterProducts, Instantiated, OuterProducts, OuterProducts]),
    ],
)
def test_each_layer_takes_the_cheapest_form(name: str, forms: list[type]) -> None:
    net = NETS[name]
    subject = prepare(net.build(), net.batch()[0])
    assert [type(form) for form in subject.forms(*net.batch())] == forms


def test_the_centre_is_subtracted() -> None:
    net = NETS["mlp"]
    x, y = net.batch()
    subject = prepare(net.build(), x)
    g = subject.exact_gradients(x, y)
    m = torch.full_like(subject.theta, 0.5)
    far = ellipsoid(m, torch.full_like(m, 1e3))  # clips nobody
    expected = (g - 0.5).sum(0).float()
    torch.testing.assert_close(subject.add(x, y, far), expected, rtol=1e-4, atol=1e-5)


def test_theta_is_the_model() -> None:
    model = NETS["gated"].build()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    layers = find_layers(model)
    theta = flatten_parameters(layers)
    assert torch.equal(theta, flat)
    theta.zero_()
    assert not any(p.any() for p in model.parameters())
    assert [(a.stop, b.start) for a, b in pairwise(layers)] == [
        (layer.stop, layer.stop) for layer in layers[:-1]
    ]


@pytest.mark.parametrize(
    ("squared", "slack", "weight"),
    [
        (0.25, 0.0, 1.0),
        (4.0, 0.0, 0.4),
        (3.0, 1.0, 0.4),
        (-1.0, 4.0, 0.4),
        (0.0, 0.0, 1.0),
        (float("nan"), 0.0, 0.0),
        (float("inf"), 0.0, 0.0),
        (1.0, float("nan"), 0.0),
    ],
)
def test_weights(squared: float, slack: float, weight: float) -> None:
    pair = [torch.tensor([value], dtype=torch.float64) for value in (squared, slack, 0.0)]
    c, valid = clip_weights(SquaredNorms(*pair), limit=0.8)
    assert c.item() == pytest.approx(weight, rel=1e-15)
    assert valid.item() is (weight > 0)


def test_the_more_samples_the_wider_the_margin() -> None:
    limits = [clip_limit(samples) for samples in (1, 1024, 2048, 8192, 10**9)]
    assert limits == sorted(limits, reverse=True)
    assert 0.99 < limits[-2] < limits[0] < 1
    assert limits[-1] > 0


@pytest.mark.privacy
@pytest.mark.parametrize("batch", [256, 8192])
def test_the_margin_is_for_all_chunks_of_a_step(batch: int) -> None:
    """How many are worked on at a time leaves it as it is."""
    given: dict[str, Any] = {"clip_norm": 1e-3, "sampler": Batches([0]), "dtype": torch.float32}
    for physical in (2, 64):
        trainer = make_trainer(
            "dp-sgd", GaussianMechanism(0.0, batch), plan=in_chunks_of(physical), **given
        )
        norm = trainer._clip_and_sum(np.array([0])).double().norm().item() / 1e-3
        assert norm == pytest.approx(1 / (1 + 6e-4 * max(1, batch / 1024)), abs=1e-6)


def test_a_chunk_cancels_no_more_than_its_share() -> None:
    for batch in (256, 1024, 8192):
        parts = [cancellation_limit(samples, batch) for samples in (batch // 4, batch - batch // 4)]
        assert sum(parts) == pytest.approx(cancellation_limit(batch, batch))
        assert cancellation_limit(batch, batch) == CANCELLATION_LIMIT * max(1, batch / 1024)


# -- samples that are not finite ------------------------------------------------------------------

MASKED_NETS = ("mlp", "group-norm", "sequence", "conv-reflect", "gated", "layer-norm")
POISONS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


@pytest.mark.privacy
@pytest.mark.parametrize(("name", "kind", "poison"), pairs_short(MASKED_NETS, KINDS, [*POISONS]))
def test_a_non_finite_sample_adds_nothing(name: str, kind: str, poison: str) -> None:
    net = NETS[name]
    x, y = net.batch()
    subject = prepare(net.build(), x)
    region = region_clipping_half(kind, subject.exact_gradients(x, y), subject.theta)
    sick = [2, SAMPLES - 1]
    x[sick] = POISONS[poison]
    healthy = [i for i in range(SAMPLES) if i not in sick]

    total, without = subject.add(x, y, region), subject.add(x[healthy], y[healthy], region)
    assert total.isfinite().all()
    assert ((total - without) / region.scale).norm() <= 1e-6 * len(healthy)


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("name", "kind", "size"), pairs_short(MASKED_NETS, KINDS, [1e10, 1e19, 1e30, 3e38])
)
def test_a_sample_near_overflow_adds_at_most_one(name: str, kind: str, size: float) -> None:
    """Whether it counts as finite is up to rounding; what it may do is not."""
    net = NETS[name]
    x, y = net.batch()
    subject = prepare(net.build(), x)
    region = region_clipping_half(kind, subject.exact_gradients(x, y), subject.theta)
    without = subject.add(x[1:], y[1:], region)
    x[0].mul_(size)
    moved = (subject.add(x, y, region).double() - without.double()) / region.scale
    assert moved.norm() <= 1  # NaN is not


@pytest.mark.privacy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKED_NETS)
def test_a_batch_of_non_finite_samples_sums_to_zero(name: str, kind: str) -> None:
    net = NETS[name]
    x, y = net.batch()
    subject = prepare(net.build(), x)
    region = region_clipping_half(kind, subject.exact_gradients(x, y), subject.theta)
    total = subject.add(torch.full_like(x, float("nan")), y, region)
    assert not total.any()


def forms_with(a: Tensor, delta: Tensor) -> list[PerSampleGradients]:
    linear = nn.Linear(a.shape[1], delta.shape[1])
    [layer] = find_layers(linear)
    g = torch.cat([(delta.unsqueeze(2) * a.unsqueeze(1)).flatten(1), delta], 1)
    outer = OuterProducts(delta.unsqueeze(1), a.unsqueeze(1), True)
    return [outer, held([g]), in_pieces(layer, [Use.of(linear, a, delta)])]


@pytest.mark.privacy
@pytest.mark.parametrize("form", range(3), ids=["outer", "instantiated", "in pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_infinite_activations_times_zero_gradients(form: int, kind: str) -> None:
    a, delta = torch.randn(3, 4), torch.randn(3, 2)
    a[1], delta[1] = float("inf"), 0.0
    gradients = forms_with(a, delta)[form]
    theta = torch.zeros(10)
    region = ball(1.0, theta) if kind == "ball" else ellipsoid(theta + 0.1, theta + 1)
    layer = find_layers(nn.Linear(4, 2))[0]
    c, valid = clip_weights(gradients.squared_norms(RegionMetric(region).of(layer)), clip_limit(1))
    assert valid.tolist() == [True, False, True]

    gradients.weighted_sum(c.float(), valid, theta)
    expected = torch.zeros_like(theta)
    forms_with(a[valid], delta[valid])[form].weighted_sum(c[valid].float(), valid[valid], expected)
    torch.testing.assert_close(theta, expected)


# -- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "group-norm", "sequence", "gated"])
def test_chunks_add_up_to_the_batch(name: str, kind: str) -> None:
    net = NETS[name]
    x, y = net.batch()
    subject = prepare(net.build(), x)
    region = region_clipping_half(kind, subject.exact_gradients(x, y), subject.theta)
    whole = subject.add(x, y, region)
    metric = RegionMetric(region)
    for size in (1, 3):
        out, one = torch.zeros_like(whole), torch.empty_like(whole)
        for part in torch.split(torch.arange(SAMPLES), size):
            subject.clipped_sum.of(x[part], y[part], metric, one)
            out += one
        assert ((out - whole) / region.scale).norm() <= 1e-6 * SAMPLES


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("name", ["embedding", "norms-twice"])
def test_pieces_add_up_to_the_whole(
    name: str, views: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = {**NETS, **AGAIN}[name]
    x, y = views_of(net, views)
    subject = prepare(net.build().double(), x if views == 1 else x[0], views=views)
    x = x.double() if x.is_floating_point() else x
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.PIECE", rows * 30)
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.HELD", 0)
    forms = subject.forms(x, y)
    assert any(isinstance(f, Instantiated) and len([*f.pieces()]) > 1 for f in forms)
    for kind in KINDS:
        assert_matches_oracle(subject, x, y, kind)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 1000.0])
def test_linear_layers_never_form_per_sample_gradients(
    ratio: float, views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.PIECE", 1000)
    samples = 64
    network = nn.Sequential(nn.Linear(100, 80), nn.ReLU(), nn.Linear(80, 10))
    subject = prepare(network, torch.zeros(1, 100), views=views)
    shape = (samples, 100) if views == 1 else (samples, views, 100)
    x, y = torch.randn(shape), torch.randint(10, shape[:-1])
    m = torch.randn_like(subject.theta)
    region = (
        ellipsoid(m, torch.ones_like(m) * m.norm() / ratio) if ratio else ball(1.0, subject.theta)
    )
    with Largest() as largest:
        subject.add(x, y, region)
    assert 0 < largest.numel < samples * len(subject.theta) / 10


# -- networks that use their layers in odd ways ----------------------------------------------------


class Pair(nn.Module):
    """Two layers, put together by a function."""

    def __init__(self, run: Callable[["Pair", Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, CLASSES)
        self._run = run

    def forward(self, x: Tensor) -> Any:
        return self._run(self, x)


class Two(nn.Module):
    """A layer with two outputs, of which one is made of the other."""

    def __init__(self, kind: Callable[[Any], Any] = tuple) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._kind = kind

    def forward(self, x: Tensor, by: Any = 1.0) -> Any:
        first = torch.tanh(x * self.weight * by)
        return self._kind([first, first.square() * self.weight])


class BothOf(nn.Module):
    """What a layer gives, used in part or all of it."""

    def __init__(self, use: Callable[..., Tensor], kind: Callable[[Any], Any] = tuple) -> None:
        super().__init__()
        self.two = Two(kind)
        self._use = use

    def forward(self, x: Tensor) -> Tensor:
        return self._use(self.two, x)


def _uses_a_weight(pair: Pair, x: Tensor) -> Tensor:
    logits: Tensor = pair.second(pair.first(x) @ pair.first.weight)
    return logits


def _reuses_positions(pair: Pair, x: Tensor) -> Tensor:
    """Call a layer with more rows than samples."""
    rows = pair.first(x).repeat(3, 1)
    logits: Tensor = pair.second(pair.first(rows))
    return logits.view(3, -1, CLASSES).mean(0)


def _checks_values(pair: Pair, x: Tensor) -> Tensor:
    logits: Tensor = pair.second(pair.first(x))
    return logits if bool(x.sum() > 0) else 2 * logits


ODD: Mapping[str, Callable[[Pair, Tensor], Tensor]] = {
    "a weight used outside its layer": _uses_a_weight,
    "more rows than samples": _reuses_positions,
    "a layer that is not called": lambda pair, x: pair.second(x),
    "an output that is not used": lambda pair, x: (pair.first(x), pair.second(x))[1],
    "called by name": lambda pair, x: pair.second(input=pair.first(input=x)),
    "a mean over a record": lambda pair, x: pair.second(pair.first(x - x.mean(1, keepdim=True))),
}


@pytest.mark.privacy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ODD)
def test_odd_uses_of_layers_match_the_oracle(name: str, kind: str) -> None:
    x, y = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES
    assert_matches_oracle(prepare(Pair(ODD[name]).double(), x), x, y, kind)


@pytest.mark.privacy
def test_a_network_that_decides_by_values_runs_in_a_loop() -> None:
    model = Pair(_checks_values)
    x, y = torch.randn(SAMPLES, 4), torch.arange(SAMPLES) % CLASSES
    per_sample = PerSample(model, Structure(x[:1]))
    assert not per_sample.vmapped
    assert "decides by the values of a record" in per_sample.notes[0]
    _, gradients = per_sample(x, y)
    found = torch.cat([g for g in gradients if isinstance(g, Tensor)], 1)
    for row in range(SAMPLES):
        loss = torch.nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(found[row], torch.cat([e.flatten() for e in expected]))


@pytest.mark.privacy
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [False, True], ids=["behind another layer", "first"])
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda two, x: two(x)[1], id="one"),
        pytest.param(lambda two, x: torch.add(*two(x)), id="both"),
        pytest.param(lambda two, x: torch.mul(*two(two(x, by=0.5)[1], 2.0)), id="several uses"),
        pytest.param(lambda two, x: two(x=x, by=torch.ones(4))[0], id="by name"),
    ],
)
def test_layers_with_several_outputs_and_settings_match_the_oracle(
    use: Callable[..., Tensor], first: bool, kind: str, views: int
) -> None:
    before = nn.Identity() if first else nn.Linear(4, 4)
    net = Net(lambda: nn.Sequential(before, BothOf(use), head(4)), (4,))
    x, y = views_of(net, views)
    subject = prepare(net.build().double(), net.batch()[0], views=views)
    assert_matches_oracle(subject, x.double(), y, kind)


@pytest.mark.privacy
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_shared_by_other_layers_matches_the_oracle(kind: str) -> None:
    first, second = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
    second.weight = first.weight
    x, y = torch.randn(SAMPLES, 4, 3, dtype=torch.float64), torch.arange(SAMPLES) % CLASSES
    model = nn.Sequential(first, nn.Tanh(), second, head(12)).double()
    assert_matches_oracle(prepare(model, x), x, y, kind)


def test_a_module_under_two_names_is_one_layer_that_is_called_twice() -> None:
    shared, last = nn.Linear(5, 5), head(5)
    x, y = torch.randn(7, 5).double(), torch.arange(7) % CLASSES
    subject = prepare(nn.Sequential(shared, nn.Tanh(), shared, last).double(), x)
    assert [layer.name for layer in subject.layers] == ["0", "3.1"]
    assert_matches_oracle(subject, x, y, "ball")


@pytest.mark.privacy
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "group-norm", "conv", "layer-norm", "frozen-weight"])
def test_sequences_of_known_layers_compute_as_vmap_does(name: str, views: int) -> None:
    net = NETS[name]
    x, y = views_of(net, views)
    subjects = [
        prepare(copy.deepcopy(model), net.batch()[0], views=views, rowwise=rowwise)
        for model in [net.build()]
        for rowwise in (False, True)
    ]
    region = ball(1e-2, subjects[0].theta)
    by_vmap, at_once = (subject.add(x, y, region) for subject in subjects)
    assert subjects[1].clipped_sum._per_sample._chain is not None
    torch.testing.assert_close(at_once, by_vmap, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(0)),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        Pair(lambda pair, x: pair.second(x)),
    ],
    ids=["softmax", "flatten", "in place", "batch norm", "own"],
)
def test_other_networks_are_no_sequence_of_known_layers(model: nn.Module) -> None:
    assert chain_of(model) is None


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_a_hook_or_another_forward_is_no_known_layer(part: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert chain_of(model) == list(model)
    changed: Any = model if part == "whole" else model[0]
    handle = changed.register_forward_hook(lambda *_: None)
    assert chain_of(model) is None
    handle.remove()
    changed.forward = lambda x: x - x.mean(0)
    assert chain_of(model) is None


def test_a_large_tied_weight_is_instantiated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.HELD", 20)
    monkeypatch.setattr("dpmac_cli.dp.clipping.forms.PIECE", 30)
    net = NETS["tied"]
    x, y = net.batch()
    assert_matches_oracle(prepare(net.build().double(), x), x, y, "ball")


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["tied-with-many-words", "tied-without-padding"])
@pytest.mark.parametrize("added", [2, 64])
def test_a_tied_weight_of_many_words_is_never_instantiated(
    name: str, added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpmac_cli.dp.clipping.tied_products.ADDED", added)
    net = NETS[name]
    x, y = net.batch()
    subject = prepare(net.build().double(), x)
    for ball_ in (True, False):
        kinds = map(type, subject.forms(x, y, ball=ball_))
        assert (TiedProducts in kinds) == ball_
    assert_matches_oracle(subject, x, y, "ball")


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        find_layers(frozen(nn.Linear(4, 2)))


@pytest.mark.privacy
@pytest.mark.parametrize("part", ["choose_form", "total_squared_norms", "clip_weights"])
def test_no_failure_of_a_clipped_sum_tells_of_its_records(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception may quote what it sees."""

    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("the patient weighs 71 kg")

    x, y = torch.randn(SAMPLES, 4), torch.zeros(SAMPLES, dtype=torch.long)
    subject = prepare(nn.Linear(4, CLASSES), x)
    monkeypatch.setattr(f"dpmac_cli.dp.clipping.clipped_sum.{part}", failing)
    with pytest.raises(ModelError, match="may contain private records") as caught:
        subject.add(x, y, ball(1.0, subject.theta))
    assert "71" not in str(caught.value)


@pytest.mark.privacy
def test_views_of_a_sample_may_be_used_together() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            means = x.view(-1, 2, 4).mean(1)
            return torch.repeat_interleave(self.linear(means), 2, 0)

    model, x = Joined().double(), torch.randn(SAMPLES, 2, 4, dtype=torch.float64)
    y = torch.zeros(SAMPLES, 2, dtype=torch.long)
    subject = prepare(model, x[0], views=2)
    total = subject.add(x, y, ball(1e6, subject.theta))
    loss = torch.nn.functional.cross_entropy(model(x.flatten(0, 1)), y.flatten()) * SAMPLES
    parameters = [p.requires_grad_(True) for p in model.parameters()]
    loss = torch.nn.functional.cross_entropy(model(x.flatten(0, 1)), y.flatten()) * SAMPLES
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.privacy
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", ["mlp", "group-norm", "sequence"])
def test_a_sample_with_one_view_that_is_not_finite_adds_nothing(name: str, poison: str) -> None:
    net = NETS[name]
    x, y = views_of(net, 3)
    subject = prepare(net.build(), x[0], views=3)
    region = ball(1.0, subject.theta)
    without = subject.add(x[1:], y[1:], region)
    x[0, 2] = POISONS[poison]
    torch.testing.assert_close(subject.add(x, y, region), without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_no_hooks_are_left_behind(fails: bool) -> None:
    rows: list[int] = []
    model = Pair(lambda pair, x: pair.second(pair.first(x)).view(-1, 7 if rows else 3))
    x, y = torch.randn(SAMPLES, 4), torch.zeros(SAMPLES, dtype=torch.long)
    per_sample = PerSample(model, Structure(x[:1]))
    rows += [7] * fails
    with pytest.raises(RuntimeError) if fails else nullcontext():
        per_sample(x, y)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.privacy
def test_other_calls_than_in_the_trial_are_refused() -> None:
    skips: list[int] = []
    model = Pair(lambda pair, x: pair.second(x if skips else pair.first(x)))
    x, y = torch.randn(SAMPLES, 4), torch.zeros(SAMPLES, dtype=torch.long)
    per_sample = PerSample(model, Structure(x[:1]))
    skips.append(1)
    with pytest.raises(ModelError, match="called its layers differently"):
        per_sample(x, y)
