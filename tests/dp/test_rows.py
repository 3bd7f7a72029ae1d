"""Several rows per sample in one dimension: what shows them, and what is not taken for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpmac_cli import ClippedSum, ball
from dpmac_cli.dp.clipping.ghost_clipping import PositionProducts
from dpmac_cli.dp.clipping.layers import find_layers
from dpmac_cli.dp.clipping.per_sample_gradients import choose_form
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.errors import ModelError

from .test_uncalled_layers import COUNT, LENGTH, RADIUS, WIDTH, Conv1D, Do, linear, net, raw

EXAMPLE = torch.zeros(2, LENGTH, WIDTH)


def assert_at_most_the_radius(model: nn.Module, batch: Tensor, loss: Any) -> ClippedSum:
    clipped = ClippedSum(model, loss, ball(RADIUS), batch_size=COUNT)
    total = clipped(batch).clone()
    rest = [clipped(torch.cat([batch[:i], batch[i + 1 :]])) for i in range(len(batch))]
    assert max(float((total - other).double().norm()) for other in rest) <= RADIUS
    return clipped


def test_rows_per_sample_are_those_of_every_call() -> None:
    folded = net(lambda s, x: s.part(x.flatten(0, 1)).view_as(x), part=linear)
    assert [layer.rows for layer in find_layers(folded.build(), EXAMPLE)] == [1, LENGTH, 1]
    both = net(lambda s, x: s.part(s.part(x.flatten(0, 1)).view_as(x)), part=linear)
    assert [layer.rows for layer in find_layers(both.build(), EXAMPLE)] == [1, 1, 1]


@pytest.mark.privacy
def test_a_length_that_is_a_multiple_by_chance_is_not_taken_for_rows() -> None:
    """Gradients by position would be taken for those by sample."""
    second = Do(lambda s, x: s.part(x.transpose(0, 1)).transpose(0, 1).flatten(1), part=linear())
    for length in (2, 4, 6):
        [layer] = find_layers(second, torch.zeros(2, length, WIDTH))
        assert layer.rows == 1


@pytest.mark.privacy
def test_a_parameter_with_different_rows_in_two_uses_is_not_copied() -> None:
    def read(s: Any, x: Tensor) -> Tensor:
        out: Tensor = x @ s.p + (x.flatten(0, 1) @ s.p).view_as(x)
        return out

    model = Do(lambda s, x: s.part(read(s, x)).flatten(1), part=linear(), p=raw(WIDTH, WIDTH)())
    assert [layer.direct for layer in find_layers(model, EXAMPLE)] == [False]


@pytest.mark.privacy
def test_other_rows_than_during_validation_are_an_error() -> None:
    folds = [True]
    model = Do(lambda s, x: s.part(x.flatten(0, 1) if folds else x).view(len(x), -1), part=linear())
    layers = find_layers(model, EXAMPLE)
    assert layers[0].rows == LENGTH
    folds.clear()
    with pytest.raises(ModelError, match="does not have one row per sample"):
        record_uses(model, layers, torch.randn(COUNT, LENGTH, WIDTH), torch.zeros(COUNT).long())


@pytest.mark.privacy
def test_positions_before_samples_are_not_taken_for_rows() -> None:
    """Rows of one sample are then not adjacent."""

    def first(s: Any, x: Tensor) -> Tensor:
        rows: Tensor = s.part(x.transpose(0, 1).flatten(0, 1))
        return rows.view(LENGTH, -1, WIDTH).transpose(0, 1)

    turned = net(first, part=linear)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        squares: Tensor = model(batch).square()
        return squares.sum(1)

    clipped = assert_at_most_the_radius(turned.build(), turned.batch(COUNT)[0], loss)
    assert clipped.prepare(turned.batch(COUNT)[0]).isolated is not None


class ConstantRows(nn.Module):
    """Adds to each sample what a layer computes of constants, positions before samples."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Buffer(torch.randn(LENGTH, 1, WIDTH))
        self.part, self.head = linear(), nn.Linear(LENGTH * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.places.expand(-1, x.shape[0], -1).reshape(-1, WIDTH)
        out: Tensor = self.head(x.flatten(1)) + self.part(rows).view(LENGTH, -1, WIDTH).sum(0)
        return out


@pytest.mark.privacy
def test_rows_of_constants_are_not_taken_for_those_of_samples() -> None:
    """Their gradients depend on no sample, but on the size of the batch."""
    torch.manual_seed(0)
    batch = 1e-3 * torch.randn(COUNT, LENGTH, WIDTH)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch)
        return outputs.sum(1)

    clipped = assert_at_most_the_radius(ConstantRows(), batch, loss)
    assert clipped.prepare(batch).isolated is not None


def test_an_affine_layer_of_a_program_takes_the_form_of_a_linear_layer() -> None:
    model = nn.Sequential(Conv1D(64, 300), nn.Flatten())
    x = torch.randn(128, 4, 64)
    layers = find_layers(model, x[:2])
    assert [(layer.name, layer.rows) for layer in layers] == [("0.weight", 4), ("0.bias", 4)]
    _, uses = record_uses(model, layers, x, torch.zeros(len(x)).long())
    form = choose_form(layers[0], uses[0], layers[0].rows, ball=True)
    assert isinstance(form, PositionProducts)
