"""Random draws in a forward pass: gradients are those of the losses that were drawn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.example_pass import run_example
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters
from dpmac_cli.dp.clipping.projections import calling_projections
from dpmac_cli.errors import ModelError

from .reference import Subject

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
    torch.manual_seed(0)
    model = made(NETS[name]())
    x, y = records()
    model(x)
    layers = find_layers(model, x[:2])
    torch.manual_seed(1)
    # Behind its attention, an encoder's draws are laid out otherwise in memory.
    calls = [(layer.name, layer.module, layer.composite) for layer in layers]
    with calling_projections(calls if name.startswith("encoder") else []):
        losses = cross_entropy(model(x), y, reduction="none")
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])

    theta = flatten_parameters(layers)
    subject = Subject(model, layers, theta, ClippedChunkSum(model, layers, SAMPLES), 1.0)
    torch.manual_seed(1)
    found = subject.stored_gradients(x, y)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not any("forward" in vars(module) for module in model.modules())
    torch.manual_seed(2)
    assert not torch.allclose(found, subject.stored_gradients(x, y))


@pytest.mark.privacy
def test_attention_that_is_not_plain_is_left_as_it_is() -> None:
    model = made(Attending(lambda x: (x, x, x), learnt_key=True)).float()
    x = records()[0].float()
    model(x)
    assert run_example(model, x).plain == set()
    assert find_layers(model, x[:2])[0].name == "0.attention"


@pytest.mark.privacy
def test_attention_that_is_not_plain_cannot_drop() -> None:
    """Its forward is run again for gradients, where other draws would be made."""
    model = made(Attending(lambda x: (x, x, x), learnt_key=True))
    x, y = records()
    model(x)
    layers = find_layers(model, x[:2])
    flatten_parameters(layers)
    subject = Subject(model, layers, torch.zeros(1), ClippedChunkSum(model, layers, SAMPLES), 1.0)
    with pytest.raises(ModelError, match=r"0\.attention \(MultiheadAttention\).*dropout=0"):
        subject.stored_gradients(x, y)


@pytest.mark.privacy
def test_a_call_in_another_way_than_on_the_example_is_an_error() -> None:
    middle = Attending(lambda x: (x, x, x))
    model = made(middle)
    x, y = records()
    model(x)
    layers = find_layers(model, x[:2])
    flatten_parameters(layers)
    middle.given = lambda x: (x.flatten(0, 1),) * 3  # without a batch
    subject = Subject(model, layers, torch.zeros(1), ClippedChunkSum(model, layers, SAMPLES), 1.0)
    with pytest.raises(ModelError, match=r"layer 0\.attention was called differently"):
        subject.stored_gradients(x, y)
