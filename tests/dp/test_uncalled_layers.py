"""Layers that are not called with rows of samples: of positions, without effect, read by others.

Also layers with several rows per sample, affine layers that a program writes, and hooks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.utils import parametrizations

from dpmac_cli import ClippedSum, ball
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.layers import find_layers, flatten_parameters
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.errors import ModelError
from tests.tiers import one_in

from .reference import prepare
from .test_per_sample import (
    CLASSES,
    KINDS,
    Net,
    assert_matches_oracle,
    frozen,
    head,
    views_of,
)

LENGTH, WIDTH, COUNT, RADIUS = 3, 4, 6, 0.1

Forward = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Do(nn.Module):
    """Parts, and a function of itself and the inputs that uses them."""

    def __init__(self, function: Forward, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def net(function: Forward, **parts: Callable[[], Any]) -> Net:
    """A layer, a function that uses parts, and a head."""

    def build() -> nn.Module:
        inner = Do(function, **{name: make() for name, make in parts.items()})
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Tanh(), head(LENGTH * WIDTH))

    return Net(build, (LENGTH, WIDTH))


def table(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(LENGTH + 2, WIDTH, **options)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def places() -> Tensor:
    return torch.arange(LENGTH)


def one_table_twice() -> Any:
    one, other = table()(), table()()
    other.weight = one.weight
    return nn.ModuleList([one, other])


def attend(part: Any, x: Tensor, **options: Any) -> Tensor:
    rows, others = x.transpose(0, 1), x.flip(1).transpose(0, 1)
    out: Tensor = part(rows, others, rows, **options)[0]
    return out.transpose(0, 1)


def norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


class PlacedWords(nn.Module):
    """Words and places, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(CLASSES, WIDTH), table()()
        self.head = head(LENGTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head((self.words(x) + self.places(places()[None])).tanh())
        return logits


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


#: Embeddings of places that are the same for all samples.
PLACES: Mapping[str, Net] = {
    "one row": net(lambda s, x: x + s.part(places()[None]), part=table()),
    "no row": net(lambda s, x: x + s.part(places()), part=table()),
    "one row later": net(lambda s, x: x + s.part(places())[None], part=table()),
    "repeated places": net(lambda s, x: x * s.part(places() % 2), part=table()),
    "a function of it": net(lambda s, x: x + 2 * s.part(places()[None]).sin(), part=table()),
    "expanded": net(lambda s, x: x + s.part(places()).expand(x.shape[0], -1, -1), part=table()),
    "beside words": Net(PlacedWords, (LENGTH,), CLASSES),
    "used twice": net(lambda s, x: (x + s.part(places())) * s.part(places() + 2), part=table()),
    "with padding": net(lambda s, x: x + s.part(places()), part=table(padding_idx=1)),
    "two tables of one weight": net(
        lambda s, x: x + s.part[0](places()) * s.part[1](places() + 1), part=one_table_twice
    ),
}

#: Layers and parameters on which no output depends.
IDLE: Mapping[str, Net] = {
    "never called": net(lambda s, x: s.used(x), used=linear, part=linear),
    "its output dropped": net(lambda s, x: (s.part(x), s.used(x))[1], used=linear, part=linear),
    "without a gradient": net(
        lambda s, x: s.used(x) + s.part(x).detach(), used=linear, part=linear
    ),
    "a parameter": net(lambda s, x: s.used(x), used=linear, p=lambda: nn.Parameter(torch.ones(3))),
    "attention": net(lambda s, x: s.used(x), used=linear, part=attention),
    "a recurrent layer": net(lambda s, x: s.used(x), used=linear, part=lambda: nn.LSTM(2, 3)),
    "a convolution": net(lambda s, x: s.used(x), used=linear, part=lambda: nn.Conv1d(2, 3, 1)),
    "a computed weight": net(
        lambda s, x: s.used(x), used=linear, part=lambda: parametrizations.weight_norm(linear())
    ),
    "a list": net(
        lambda s, x: s.used(x),
        used=linear,
        part=lambda: nn.ParameterList([torch.ones(2), torch.ones(3)]),
    ),
    "two of one weight": net(lambda s, x: s.used(x), used=linear, part=one_table_twice),
}

#: Modules that read a weight of a layer which they do not call, or also call.
READ: Mapping[str, Net] = {
    "a convolution": net(
        lambda s, x: F.conv1d(x, s.part.weight, padding=1),
        part=lambda: nn.Conv1d(LENGTH, LENGTH, 3, bias=False),
    ),
    "a norm": net(lambda s, x: s.part(x) * F.layer_norm(x, (4,), s.part.weight), part=norm),
}


#: Products of samples and a weight whose layer is not, or also, called.
PRODUCTS: Mapping[str, Net] = {
    "a product": net(lambda s, x: F.linear(x, s.part.weight, s.part.bias), part=linear),
    "without its bias": net(lambda s, x: F.linear(x, s.part.weight), part=linear),
    "a call and a product": net(lambda s, x: s.part(x).sin() @ s.part.weight, part=linear),
    "several": net(lambda s, x: F.linear(x @ s.part.weight, s.part.weight).sin(), part=linear),
    "changed in place": net(lambda s, x: F.linear(x, s.part.weight).add_(1).sin_(), part=linear),
    "with a bias of its own": net(
        lambda s, x: F.linear(x, s.part.weight, torch.cat([s.p, s.p.sin()])),
        part=linear,
        p=lambda: nn.Parameter(torch.randn(WIDTH // 2)),
    ),
    "of its own": net(
        lambda s, x: s.part(torch.matmul(x, s.p)),
        part=linear,
        p=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH)),
    ),
    "frozen bias": net(
        lambda s, x: s.part(x) @ s.part.weight, part=lambda: frozen(linear(), "bias")
    ),
    "behind nothing": Net(
        lambda: Do(lambda s, x: F.linear(x, s.part.weight), part=nn.Linear(WIDTH, CLASSES)),
        (WIDTH,),
    ),
}


class Conv1D(nn.Module):
    """A Linear layer as in GPT-2 of transformers, with a transposed weight."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Scale(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.p


def folded(function: Forward) -> Forward:
    """A function of rows that are the positions of all samples."""
    return lambda s, x: function(s, x.flatten(0, 1)).unflatten(0, (-1, LENGTH))


def raw(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape))


#: Layers with a row for each position of each sample.
ROWS: Mapping[str, Net] = {
    "linear": net(folded(lambda s, x: s.part(x)), part=linear),
    "called twice": net(folded(lambda s, x: s.part(s.part(x).sin())), part=linear),
    "a norm": net(folded(lambda s, x: s.part(x)), part=norm),
    "a convolution": net(
        folded(lambda s, x: s.part(x[:, None]).mean(1)),
        part=lambda: nn.Conv1d(1, 2, 3, padding=1),
    ),
    "words": net(folded(lambda s, x: x + s.part((x[:, 0] > 0).long())), part=table()),
    "without a rule": net(folded(lambda s, x: s.part(x)), part=Scale),
    "a parameter": net(folded(lambda s, x: s.part(x * s.p)), part=linear, p=raw(WIDTH)),
    "a function of a parameter": net(
        folded(lambda s, x: s.part(x * s.p.exp())), part=linear, p=raw(WIDTH)
    ),
    "a product": net(folded(lambda s, x: F.linear(x, s.part.weight, s.part.bias)), part=linear),
    "mm": net(folded(lambda s, x: torch.mm(x, s.part.weight)), part=linear),
}

#: Affine layers that a program writes, and products beside other uses.
AFFINE: Mapping[str, Net] = {
    "Conv1D": net(lambda s, x: s.part(x), part=Conv1D),
    "two": net(
        lambda s, x: s.two(s.one(x)), one=lambda: Conv1D(WIDTH, 2), two=lambda: Conv1D(2, WIDTH)
    ),
    "called twice": net(lambda s, x: s.part(s.part(x).sin()), part=Conv1D),
    "on vectors": Net(lambda: nn.Sequential(Conv1D(), nn.Tanh(), head(WIDTH)), (WIDTH,)),
    "frozen bias": net(lambda s, x: s.part(x), part=lambda: frozen(Conv1D(), "bias")),
    "frozen weight": net(lambda s, x: s.part(x), part=lambda: frozen(Conv1D(), "weight")),
    "and a sum": net(lambda s, x: F.linear(x, s.part.weight) + s.part.weight[:LENGTH], part=linear),
}


def hooked(
    part: Callable[[], nn.Module], after: Callable[..., Any] | None, before: Any = None
) -> Callable[[], nn.Module]:
    """A part with hooks of forward passes."""

    def build() -> nn.Module:
        made = part()
        if after is not None:
            made.register_forward_hook(after)
        if before is not None:
            made.register_forward_pre_hook(before)
        return made

    return build


def tripled(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return 3 * output.sin()


def squared(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].square(),)


#: Layers with hooks that change outputs or inputs.
HOOKED: Mapping[str, Net] = {
    "output": net(lambda s, x: s.part(x), part=hooked(linear, tripled)),
    "input": net(lambda s, x: s.part(x), part=hooked(linear, None, squared)),
    "without a rule": net(lambda s, x: s.part(x), part=hooked(Scale, tripled, squared)),
    "affine": net(lambda s, x: s.part(x), part=hooked(Conv1D, tripled, squared)),
}

#: Attention whose samples are in the second dimension.
SECOND: Mapping[str, Net] = {
    "attention, with weights": net(
        lambda s, x: attend(s.part, x, need_weights=True), part=lambda: nn.MultiheadAttention(4, 2)
    ),
    "attention, without weights": net(
        lambda s, x: attend(s.part, x, need_weights=False), part=lambda: nn.MultiheadAttention(4, 2)
    ),
}

NETS = {
    f"{kind}: {name}": made
    for kind, nets in {
        "places": PLACES,
        "idle": IDLE,
        "read": READ,
        "second": SECOND,
        "product": PRODUCTS,
        "rows": ROWS,
        "affine": AFFINE,
        "hooked": HOOKED,
    }.items()
    for name, made in nets.items()
}


@pytest.mark.privacy
@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETS)
def test_norms_and_sums_match_the_oracle(name: str, kind: str, views: int) -> None:
    x, y = views_of(NETS[name], views)
    rows = x.flatten(0, 1) if views > 1 else x
    x, rows = (t.double() if t.is_floating_point() else t for t in (x, rows))
    subject = prepare(NETS[name].build().double(), views=views, example=rows[:2])
    assert_matches_oracle(subject, x, y, kind)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().sum(1)
    return found


@pytest.mark.privacy
@pytest.mark.parametrize("name", one_in(4, list(NETS)))
def test_a_record_moves_the_sum_by_at_most_the_radius(name: str) -> None:
    """Of a network that is proven independent across samples, and not run on each one alone."""
    batch, _ = NETS[name].batch(COUNT)
    clipped = ClippedSum(NETS[name].build(), loss, ball(RADIUS), batch_size=COUNT)
    total = clipped(batch).clone()
    assert clipped.prepare(batch).isolated is None
    rest = [clipped(torch.cat([batch[:i], batch[i + 1 :]])) for i in range(COUNT)]
    moved = [float((total - other).double().norm()) for other in rest]
    assert 0.99 * RADIUS < max(moved) <= RADIUS


@pytest.mark.parametrize("name", one_in(4, IDLE))
def test_what_is_without_effect_is_named_and_gets_no_gradient(name: str) -> None:
    model = IDLE[name].build()
    clipped = ClippedSum(model, loss, ball(RADIUS), batch_size=COUNT)
    total = clipped.by_parameter(clipped(torch.randn(COUNT, LENGTH, WIDTH)))
    [note] = clipped.notes
    idle = [part for key, part in total.items() if not key.startswith(("0.", "1.used", "3."))]
    assert idle
    assert not any(part.any() for part in idle)
    assert "The loss does not depend on network.1.p" in note  # .p or .part
    assert "noise only" in note


@pytest.mark.privacy
@pytest.mark.parametrize(
    "use", [lambda s, x: s.part(x), lambda s, x: F.linear(x, s.part.weight)], ids=["call", "read"]
)
def test_what_has_an_effect_after_validation_is_an_error(use: Forward) -> None:
    """Its gradient would be taken for zero."""
    awake: list[bool] = []
    made = net(lambda s, x: s.used(x) + (use(s, x) if awake else 0), used=linear, part=linear)
    model, (x, y) = made.build(), made.batch()
    layers = find_layers(model, x[:2])
    assert [layer.name for layer in layers if layer.idle] == ["1.part.weight", "1.part.bias"]
    flatten_parameters(layers)
    record_uses(model, layers, x, y)
    awake.append(True)
    with pytest.raises(ModelError, match=r"1\.part\.weight, 1\.part\.bias has an effect in this"):
        ClippedChunkSum(model, layers).gradients(x, y, ball=True)
    assert not any(p.requires_grad for p in model.parameters())


def test_a_gradient_that_is_zero_at_first_is_not_idle() -> None:
    """The first factor of LoRA, because the second one is zero."""
    up = nn.Linear(2, WIDTH, bias=False)
    nn.init.zeros_(up.weight)
    made = net(lambda s, x: x + s.up(s.down(x)), down=lambda: nn.Linear(WIDTH, 2), up=lambda: up)
    assert not any(layer.idle for layer in find_layers(made.build(), made.batch()[0][:2]))


@pytest.mark.privacy
@pytest.mark.parametrize(
    "read",
    [
        lambda s, x: s.part((x[:, :, 0] > 0).long()),
        lambda s, x: s.part.weight[(x[:, :, 0] > 0).long()],
        lambda s, x: s.part((x[:1, :, 0] > 0).long()),
        lambda s, x: s.part((x[:, :, 0].sum(0) > 0).long()),
    ],
    ids=["rows", "rows read", "first row", "sum over rows"],
)
def test_places_that_depend_on_samples_are_not_taken_for_the_same(read: Forward) -> None:
    """They are an embedding of tokens, or mix samples, for which the proof fails."""
    made = net(lambda s, x: x + read(s, x), part=table())
    model, (x, _) = made.build(), made.batch()
    clipped = ClippedSum(model, loss, ball(RADIUS), batch_size=COUNT)
    try:
        sums = clipped.prepare(x)
    except ModelError as failure:
        assert "mixes samples" in str(failure)  # noqa: PT017  (either is right)
        return
    direct = {layer.name for layer in sums.clipped_sum.layers if layer.direct}
    assert sums.isolated is not None or direct == set()


def test_a_module_that_reads_is_one_layer_and_the_others_keep_their_rules() -> None:
    made = READ["a convolution"]
    layers = find_layers(made.build(), made.batch()[0][:2])
    assert [layer.name for layer in layers] == ["0", "1", "3.1"]


def test_a_network_of_many_layers_that_reads_one_weight_is_not_one_layer() -> None:
    """On each sample alone, the others keep their rules."""

    def read(s: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), s.part.weight)

    model = Do(lambda s, x: s.head(read(s, x)), part=norm(), head=head(WIDTH))
    assert [layer.name for layer in find_layers(model, torch.ones(2, WIDTH))] == ["part", "head.1"]
    alone = Do(read, part=nn.LayerNorm(WIDTH, bias=False))
    assert [layer.name for layer in find_layers(alone, torch.ones(2, WIDTH))] == [""]


@pytest.mark.privacy
def test_another_product_than_during_validation_is_an_error() -> None:
    """Its gradient would lack a part."""
    odd: list[bool] = []
    made = net(
        lambda s, x: F.linear(x, s.part.weight) + (s.part.weight.sum() * x.sum() if odd else 0),
        part=linear,
    )
    model, (x, y) = made.build(), made.batch()
    layers = find_layers(model, x[:2])
    flatten_parameters(layers)
    record_uses(model, layers, x, y)
    odd.append(True)
    with pytest.raises(ModelError, match=r"1\.part\.weight was used differently"):
        record_uses(model, layers, x, y)


@pytest.mark.privacy
def test_products_of_other_rows_than_samples_are_not_recorded() -> None:
    """As many positions as samples, by chance, would be taken for them."""
    turned = lambda s, x: F.linear(x.transpose(0, 1), s.part.weight).transpose(0, 1)  # noqa: E731
    made = net(turned, part=linear)
    layers = find_layers(made.build(), torch.zeros(LENGTH, LENGTH, WIDTH))
    assert not any(layer.direct and not layer.idle for layer in layers)


@pytest.mark.privacy
def test_as_many_samples_as_places_are_not_taken_for_rows() -> None:
    """The gradient by place would be taken for that by sample."""
    made = PLACES["no row"]
    x, y = made.batch(LENGTH)
    subject = prepare(made.build().double(), example=torch.zeros(7, LENGTH, WIDTH).double())
    assert_matches_oracle(subject, x.double(), y, "ball")


@pytest.mark.privacy
def test_rows_that_are_changed_after_a_product_are_an_error() -> None:
    def changed(s: Any, x: Tensor) -> Tensor:
        x = 2 * x
        product = F.linear(x, s.part.weight)
        x.detach().zero_()
        return product

    made = net(changed, part=lambda: nn.Linear(WIDTH, WIDTH, bias=False))
    model, (x, y) = made.build(), made.batch()
    layers = find_layers(model, x[:2])
    flatten_parameters(layers)
    with pytest.raises(ModelError, match=r"input of layer 1\.part\.weight was changed in place"):
        record_uses(model, layers, x, y)
