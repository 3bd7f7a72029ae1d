"""Parameters that a network's own forward reads: their gradients, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.utils.parametrizations import weight_norm

from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import Layer, find_layers, flatten_parameters
from dpmac_cli.dp.clipping.per_sample_gradients import choose_form
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError

from .reference import Subject, whiten

SAMPLES, TOKENS, WIDTH = 5, 3, 4

Forward = Callable[[Any, Tensor], Tensor]


class Reading(nn.Module):
    """Reads ``p`` in some way, between two layers."""

    def __init__(self, shape: tuple[int, ...], read: Forward) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.read(self, self.first(x)).tanh()).sum(1)
        return logits


def token(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.p.expand(len(x), -1, -1), x], 1)


def repeated_token(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m.p.repeat(len(x), 1, 1), x], dim=1)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = 2 * x
    y += m.p
    return y.mul_(m.p)


def assigned(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:] = m.p
    return x + y


#: Ways to read a parameter that give each row a copy: its shape, and what is done.
KNOWN: dict[str, tuple[tuple[int, ...], Forward]] = {
    "class-token": ((1, 1, WIDTH), token),
    "repeated": ((1, 1, WIDTH), repeated_token),
    "expand-as": ((1, 1, WIDTH), lambda m, x: x * m.p.expand_as(x[:, :1])),
    "broadcast-to": ((1, TOKENS, WIDTH), lambda m, x: x * torch.broadcast_to(m.p, x.shape)),
    "position": ((1, TOKENS, WIDTH), lambda m, x: x + m.p),
    "position-without-rows": ((TOKENS, WIDTH), lambda m, x: m.p + x),
    "scale": ((WIDTH,), lambda m, x: m.p * x),
    "scale-by-column": ((TOKENS, 1), lambda m, x: torch.mul(x, m.p)),
    "number": ((), lambda m, x: x / m.p),
    "subtracted": ((WIDTH,), lambda m, x: torch.sub(m.p, x, alpha=3)),
    "divided": ((WIDTH,), lambda m, x: m.p / (2 + x.square())),
    "twice": ((WIDTH,), lambda m, x: (x + m.p) * m.p),
    "half-of-the-tokens": ((1, 1, WIDTH), lambda m, x: x[:, :2] - m.p),
    "in-place": ((WIDTH,), in_place),
    "detached-too": ((WIDTH,), lambda m, x: x * m.p + m.p.detach() * m.p.data.sum()),
    "view": ((WIDTH * TOKENS,), lambda m, x: x * m.p.view(1, TOKENS, WIDTH)),
    "with-new-dimensions": ((TOKENS,), lambda m, x: m.p[:, None] * x),
    "slice": ((1, TOKENS + 2, WIDTH), lambda m, x: x + m.p[:, :TOKENS]),
    "through-functions": ((WIDTH,), lambda m, x: x * m.p.exp() + F.softmax(m.p, 0)),
    "of-two": ((WIDTH,), lambda m, x: x * (m.p + m.p)),
    "in-a-list": ((1, 1, WIDTH), lambda m, x: x + torch.cat([m.p, m.p]).sum(0)),
    "known-and-computed": ((WIDTH,), lambda m, x: x * m.p + m.p.square()),
    "expanded-from-a-vector": ((WIDTH,), lambda m, x: x * m.p.expand(len(x), TOKENS, WIDTH)),
    "einops-style-token": (
        (1, 1, WIDTH),
        lambda m, x: x + m.p.reshape(WIDTH)[None].expand(len(x), WIDTH)[:, None],
    ),
    "at-places": ((TOKENS + 2, WIDTH), lambda m, x: x + m.p[torch.arange(TOKENS)]),
    "at-some-places": ((TOKENS, WIDTH), lambda m, x: x * m.p[:, torch.tensor([0, 1, 1, 0])]),
    "selected": ((WIDTH, TOKENS), lambda m, x: x - m.p.index_select(1, torch.arange(TOKENS)).T),
    "looked-up": ((9, WIDTH), lambda m, x: x + F.embedding(torch.arange(TOKENS)[None], m.p)),
    "asked-about": ((WIDTH,), lambda m, x: (x + m.p.to(x.dtype)) / m.p.shape[0] / m.p.numel()),
}

#: Ways that are not known, or that rows share.
UNKNOWN: dict[str, tuple[tuple[int, ...], Forward]] = {
    "product": ((WIDTH,), lambda m, x: x * (x @ m.p)[..., None]),
    "with-another": ((WIDTH,), lambda m, x: x * (m.p + m.last.bias.sum())),
    "known-and-not": ((WIDTH,), lambda m, x: x * m.p + torch.where(x > 0, m.p, x)),
    "repeated-positions": ((1, 1, WIDTH), lambda m, x: x + m.p.repeat(len(x), TOKENS, 1)),
    "assigned": ((WIDTH,), assigned),
    "in-pieces": ((2 * WIDTH,), lambda m, x: x * m.p.chunk(2)[0]),
    "of-other-rows": ((1, WIDTH), lambda m, x: x + m.p.expand(TOKENS, WIDTH)),
    "at-places-of-rows": ((TOKENS, WIDTH), lambda m, x: x + m.p[(x[..., 0] > 0).long()]),
    "where-a-mask-is": ((2 * TOKENS, WIDTH), lambda m, x: x + m.p[torch.arange(6) % 2 > 0]),
}


def oracle(model: nn.Module, layers: list[Layer], x: Tensor, y: Tensor) -> Tensor:
    """g_i by autograd, a sample at a time, (samples, d)."""
    parameters = [p.requires_grad_() for of in layers for p in of.parameters.values()]
    rows = []
    for i in range(len(x)):
        outputs = model(x[i : i + 1].flatten(0, x.ndim - 3))
        losses = nn.functional.cross_entropy(outputs, y[i].flatten())
        found = torch.autograd.grad(losses, parameters)
        rows.append(torch.cat([g.flatten() for g in found]))
    for p in parameters:
        p.requires_grad_(False)
    return torch.stack(rows)


def samples(views: int = 1) -> tuple[Tensor, Tensor]:
    shape = (SAMPLES, TOKENS, WIDTH) if views == 1 else (SAMPLES, views, TOKENS, WIDTH)
    labels = torch.arange(SAMPLES * views).view(SAMPLES, *[views] * (views > 1)) % 3
    return torch.randn(shape, dtype=torch.float64), labels


def example() -> Tensor:
    return torch.zeros(2, TOKENS, WIDTH, dtype=torch.float64)


@pytest.mark.privacy
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", KNOWN)
def test_gradients_by_copies_are_those_of_autograd(name: str, views: int) -> None:
    torch.manual_seed(0)
    model = Reading(*KNOWN[name]).double()
    layers = find_layers(model, example())
    assert [(layer.name, layer.direct) for layer in layers] == [
        ("p", True),
        ("first", False),
        ("last", False),
    ]
    theta = flatten_parameters(layers)
    x, y = samples(views)
    g = oracle(model, layers, x, y)
    subject = Subject(
        model, layers, theta, ClippedChunkSum(model, layers, SAMPLES, views=views), 1.0, views
    )
    torch.testing.assert_close(subject.stored_gradients(x, y), g, rtol=1e-10, atol=1e-12)
    region = ball(float(g.norm(dim=1).median()), theta)
    norms = whiten(g, region).norm(dim=1)
    found = subject.squared_norms(x, y, region)
    torch.testing.assert_close(found.value.sqrt(), norms, rtol=1e-10, atol=1e-12)
    assert (whiten(subject.add(x, y, region).unsqueeze(0), region).norm()) <= SAMPLES


@pytest.mark.privacy
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_makes_one_layer_of_the_module(name: str) -> None:
    """Clipped by vmap as a whole, as without an example."""
    torch.manual_seed(0)
    model = Reading(*UNKNOWN[name]).double()
    layers = find_layers(model, example())
    assert [(layer.name, layer.direct) for layer in layers] == [("", False)]
    flatten_parameters(layers)
    x, y = samples()
    found = choose_form(layers[0], record_uses(model, layers, x, y)[1][0], ball=True)
    total = torch.empty(layers[0].stop, dtype=torch.float64)
    found.weighted_sum(torch.ones(SAMPLES, dtype=torch.float64), None, total)
    torch.testing.assert_close(total, oracle(model, layers, x, y).sum(0))


def test_theta_is_in_the_same_order_with_an_example_and_without() -> None:
    model = Reading(*KNOWN["position"])
    split, whole = find_layers(model, example().float()), find_layers(model)
    assert [id(p) for of in split for p in of.parameters.values()] == [
        id(p) for of in whole for p in of.parameters.values()
    ]
    assert (split[-1].stop, len(whole)) == (whole[-1].stop, 1)


def test_a_module_that_fails_on_the_example_is_one_layer() -> None:
    model = Reading((WIDTH,), lambda m, x: x * m.p)
    assert len(find_layers(model, torch.zeros(2, TOKENS, WIDTH + 1))) == 1


@pytest.mark.parametrize("trainable", [False, True])
def test_a_frozen_parameter_needs_no_layer(trainable: bool) -> None:
    model = Reading(*KNOWN["scale"])
    model.q = nn.Parameter(torch.ones(WIDTH), requires_grad=trainable)
    expected = ["p", "q", "first", "last"] if trainable else ["p", "first", "last"]
    layers = find_layers(model, example().float())
    assert [layer.name for layer in layers] == expected
    assert [layer.name for layer in layers if layer.idle] == ["q"] * trainable


def test_computed_weights_stay_with_their_module() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(WIDTH, 3)), nn.Flatten())
    frozen = next(p for name, p in model.named_parameters() if name.endswith("bias"))
    frozen.requires_grad_(False)
    assert [layer.name for layer in find_layers(model, example().float())] == ["0"]


@pytest.mark.privacy
@pytest.mark.parametrize("how", ["known-and-not", "product", "assigned"])
def test_another_use_than_on_the_example_is_an_error(how: str) -> None:
    """Its gradient would lack a part."""
    _, other = UNKNOWN[how]
    odd: list[bool] = []
    model = Reading((WIDTH,), lambda m, x: x * m.p + (other(m, x) if odd else 0)).double()
    layers = find_layers(model, example())
    assert layers[0].direct
    flatten_parameters(layers)
    odd.append(True)
    with pytest.raises(ModelError, match=r"The parameter p was used differently"):
        record_uses(model, layers, *samples())


@pytest.mark.privacy
def test_a_parameter_that_rows_share_is_not_copied() -> None:
    """The first dimension is not that of the samples: a copy for each would be another gradient."""
    model = Reading((2, 1, WIDTH), lambda m, x: x + m.p.sum(0))
    model.read = lambda m, x: x + (x[:2] * m.p).sum(0)  # as many rows as the example, by chance
    assert not find_layers(model.double(), example())[0].direct


@pytest.mark.privacy
def test_rows_that_are_not_samples_have_no_copies() -> None:
    """Positions in front: as many copies as positions would be taken for samples."""

    def read(m: Any, x: Tensor) -> Tensor:
        out: Tensor = (x.transpose(0, 1) + m.p).transpose(0, 1)
        return out

    model = Reading((WIDTH,), read).double()
    assert not find_layers(model, example())[0].direct


@pytest.mark.privacy
def test_as_many_positions_as_the_example_has_samples_are_not_taken_for_them() -> None:
    """A draw of as many samples by chance would add up positions, each clipped to 1."""

    def read(m: Any, x: Tensor) -> Tensor:
        out: Tensor = (x.transpose(0, 1)[:2] + m.p).transpose(0, 1)
        return out

    model = Reading((WIDTH,), read).double()
    assert not find_layers(model, example())[0].direct


def test_without_gradients_nothing_is_copied() -> None:
    def read(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = m.p.exp()  # no gradient, in autograd either
        out: Tensor = x * m.p + shift
        return out

    model = Reading((WIDTH,), read).double()
    layers = find_layers(model, example())
    assert layers[0].direct
    flatten_parameters(layers)
    x, y = samples()
    _, uses = record_uses(model, layers, x, y)
    assert [len(used) for used in uses] == [1, 1, 1]
    assert uses[0][0].inputs == ()
    assert uses[0][0].delta.shape == (len(x), WIDTH)
