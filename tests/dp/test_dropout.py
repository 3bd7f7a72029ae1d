"""Random draws in a forward pass: gradients are those of the losses that were drawn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from dpmac_cli.dp.clipping.batches import Structure
from dpmac_cli.dp.clipping.layer_rules import instantiate
from dpmac_cli.dp.clipping.layers import flatten_parameters
from dpmac_cli.dp.clipping.per_sample import PerSample
from dpmac_cli.errors import ModelError

SAMPLES, TOKENS, WIDTH, CLASSES = 5, 3, 4, 3


class Attending(nn.Module):
    """torch's attention, with dropout, given what it attends to in some way."""

    def __init__(
        self, given: Callable[[Tensor], tuple[Any, ...]], *, learnt_key: bool = False, **named: Any
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            WIDTH, 2, dropout=0.4, batch_first=True, add_bias_kv=learnt_key
        )
        self.given, self.named = given, named

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(*self.given(x), **self.named)
        return out if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)


class Recurring(nn.Module):
    """A recurrent layer, given its inputs in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.given: Callable[[Tensor], Tensor] = torch.Tensor.clone

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(self.given(x))[0]
        return out


class Fused(nn.Module):
    """Attention as timm has it: by a function that is told how much to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, 2)
        return scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p)


class DropPath(nn.Module):
    """Leaves out some samples of a residual branch, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5).div_(0.5)
        return x + dropout(x, 0.2) * kept


def encoder(*, norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.4, batch_first=True, norm_first=norm_first)


NETS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attending(lambda x: (x, x, x), need_weights=False),
    "attention-and-its-weights": lambda: Attending(lambda x: (x, x, x)),
    "weights-of-each-head": lambda: Attending(lambda x: (x, x, x), average_attn_weights=False),
    "other-keys": lambda: Attending(lambda x: (x, x.flip(1), x)),
    "other-values": lambda: Attending(lambda x: (x, x, x.tanh())),
    "mask": lambda: Attending(lambda x: (x, x, x, None, False, torch.eye(TOKENS) < 1)),
    "encoder": lambda: encoder(norm_first=False),
    "encoder-norm-first": lambda: encoder(norm_first=True),
    "fused": Fused,
    "drop-path": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), DropPath()),
}


def made(middle: nn.Module) -> nn.Module:
    return nn.Sequential(middle, nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)).double()


def records() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, TOKENS, WIDTH).double(), torch.arange(SAMPLES) % CLASSES


@pytest.mark.privacy
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_the_losses_that_were_drawn(name: str) -> None:
    """Each record has its own draws; norms, sums and gradients belong to the same ones."""
    torch.manual_seed(0)
    model = made(NETS[name]())
    x, y = records()
    model(x)
    per_sample = PerSample(model, Structure(x[:1]))
    assert per_sample.vmapped, per_sample.notes
    theta = flatten_parameters(per_sample.layers)
    epsilon, direction = 1e-6, torch.randn_like(theta)
    torch.manual_seed(1)
    losses, found = per_sample(x, y)
    pairs = zip(per_sample.layers, found, strict=True)
    g = torch.cat(
        [
            of if isinstance(of, Tensor) else torch.cat([*instantiate(layer, of)], 1)
            for layer, of in pairs
        ],
        1,
    )
    slopes = []
    for sign in (1, -1):
        theta.add_(direction, alpha=sign * epsilon)
        torch.manual_seed(1)
        slopes.append(per_sample(x, y)[0])
        theta.sub_(direction, alpha=sign * epsilon)
    by_difference = (slopes[0] - slopes[1]) / (2 * epsilon)
    torch.testing.assert_close(g @ direction, by_difference, rtol=1e-5, atol=1e-7)
    assert not any("forward" in vars(module) for module in model.modules())
    torch.manual_seed(2)
    assert not torch.allclose(losses, per_sample(x, y)[0])
    assert len({*per_sample(x[:1].expand(SAMPLES, -1, -1), y[:1].expand(SAMPLES))[0].tolist()}) > 1


@pytest.mark.privacy
def test_attention_that_is_not_plain_is_left_as_it_is() -> None:
    model = made(Attending(lambda x: (x, x, x), learnt_key=True))
    x = records()[0]
    model(x)
    layers = PerSample(model, Structure(x[:1])).layers
    assert [layer.name for layer in layers][:2] == ["0.attention", "0.attention.out_proj"]


@pytest.mark.privacy
def test_a_call_in_another_way_than_on_the_example_is_an_error() -> None:
    middle = Recurring()
    model = made(middle)
    x, y = records()
    model(x)
    per_sample = PerSample(model, Structure(x[:1]))
    middle.given = lambda x: x.flatten(0, 1)  # without a batch
    with pytest.raises(ModelError, match="is called differently in this step"):
        per_sample(x, y)
