"""Layers that compute their weight: sums are those of each record alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from tests.dp.reference import Subject
from tests.dp.test_clipped_sums import assert_matches_oracle

SAMPLES = 5
IMAGE, SEQUENCE = (3, 7, 7), (6, 4)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class ScaledConv(nn.Conv2d):
    """Weight standardisation with a gain, as timm computes it by batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, **options: Any) -> None:
        super().__init__(inputs, outputs, kernel, **options)
        self.gain = nn.Parameter(torch.full((outputs, 1, 1, 1), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        gain = self.gain.view(-1)
        weight = functional.batch_norm(flat, None, None, weight=gain, training=True)
        return functional.conv2d(
            x, weight.view_as(self.weight), self.bias, self.stride, self.padding, groups=self.groups
        )


class SameConv(nn.Conv2d):
    """A convolution that pads its input itself, and computes no weight."""

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 1, 0, 1))
        return functional.conv2d(padded, self.weight, self.bias, self.stride)


class TwoDilations(nn.Conv2d):
    """The difference of two convolutions with one kernel, which have other patches."""

    def forward(self, x: Tensor) -> Tensor:
        near = functional.conv2d(x, self.weight, self.bias, padding=1)
        return near - functional.conv2d(x, self.weight, self.bias, padding=2, dilation=2)


class TwoStrides(nn.Conv2d):
    """Two convolutions with one kernel and other numbers of positions."""

    def forward(self, x: Tensor) -> Tensor:
        near = functional.conv2d(x, self.weight, self.bias, padding=1)
        return near + functional.conv2d(x, self.weight, self.bias, stride=7)


class PositiveLinear(nn.Linear):
    """A linear layer with positive weights and a bias of its own scale."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.exp()
        return functional.linear(x, functional.softplus(self.weight), bias)


class UsedTwice(PositiveLinear):
    """The weight is used beside the product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.square().sum()


class OfRecord(PositiveLinear):
    """The weight depends on the record."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * x.mean(), self.bias)


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.part(self.part(x).tanh())
        return outputs


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, part: nn.GRU) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.part(x)[0]
        return outputs[:, -1]


def frozen_gain(layer: Any) -> nn.Module:
    layer.gain.requires_grad_(False)
    part: nn.Module = layer
    return part


#: Layers with the shape of a record, and whether their gradients follow from calls.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "scaled convolution": (partial(ScaledConv, 3, 4, 3, stride=2, padding=1), IMAGE, True),
    "in groups": (partial(ScaledConv, 3, 6, 3, groups=3, bias=False), IMAGE, True),
    "with a frozen gain": (lambda: frozen_gain(ScaledConv(3, 4, 3)), IMAGE, True),
    "called twice": (lambda: Twice(ScaledConv(3, 3, 3, padding=1)), IMAGE, True),
    "padded by itself": (partial(SameConv, 3, 4, 2, stride=2), IMAGE, True),
    "at two dilations": (partial(TwoDilations, 3, 4, 3), IMAGE, True),
    "at two strides": (partial(TwoStrides, 3, 4, 3), IMAGE, True),
    "positive weights": (partial(PositiveLinear, 4, 3), SEQUENCE, True),
    "a weight with another use": (partial(UsedTwice, 4, 3), SEQUENCE, False),
    "a weight of the record": (partial(OfRecord, 4, 3), SEQUENCE, False),
}


@pytest.mark.promise("one")
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("kind", ["ball", "ellipsoid"])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_each_record_alone(
    name: str, kind: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not held:
        monkeypatch.setattr("dpmac_cli.dp.clipping.layer_gradients.PIECE", 100)
        monkeypatch.setattr("dpmac_cli.dp.clipping.layer_gradients.HELD", 0)
    build, shape, by_calls = CASES[name]
    x = torch.randn(SAMPLES, *shape).double()
    model = nn.Sequential(build(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    model.double()(x)
    subject = Subject(model, x)
    assert subject.per_sample.vmapped
    assert (subject.layers[0].name in subject.per_sample.recorded) == by_calls
    assert_matches_oracle(subject, x, torch.arange(SAMPLES) % 3, kind)


@pytest.mark.promise("one")
def test_gradients_are_those_at_the_weights_of_the_step() -> None:
    """Weights change in each step, and so does the Jacobian."""
    x, y = torch.randn(SAMPLES, *IMAGE).double(), torch.arange(SAMPLES) % 3
    model = nn.Sequential(ScaledConv(3, 4, 3), nn.Flatten(), nn.Linear(100, 3)).double()
    subject = Subject(model, x)
    subject.theta.add_(torch.randn_like(subject.theta), alpha=0.3)
    vector_to_parameters(subject.theta, subject._alone.parameters())
    assert_matches_oracle(subject, x, y, "ball")


@pytest.mark.promise("one")
def test_other_layers_keep_their_rules_beside_a_computed_weight() -> None:
    x, y = torch.randn(SAMPLES, *SEQUENCE).double(), torch.arange(SAMPLES) % 3
    model = nn.Sequential(
        PositiveLinear(4, 4), Last(nn.GRU(4, 5, batch_first=True)), nn.Linear(5, 3)
    )
    subject = Subject(model.double(), x)
    assert subject.per_sample.recorded == {"0", "1.part.ih_l0", "1.part.hh_l0", "2"}
    assert_matches_oracle(subject, x, y, "ball")
