"""Proofs that samples are kept apart: what mixes them is never proven, what does not mostly is."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from dpmac_cli.models import tracing
from dpmac_cli.models.hooks import UnprovenError
from dpmac_cli.models.independence import independence
from dpmac_cli.models.tracing import (
    SAMPLES,
    Dependence,
    check_independent,
    check_independent_forward,
)
from dpmac_cli.models.trial import Trial
from dpmac_cli.models.uniformity import check_uniform
from tests.tiers import one_in

SHAPE, CLASSES = (4, 6, 6), 3
PIXELS = 4 * 6 * 6
TRIAL = Trial.of(SHAPE, CLASSES)


class Through(nn.Module):
    """Two layers with a function of the whole batch between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(4, 4, 1), function
        self.head = nn.LazyLinear(CLASSES)
        self(torch.zeros(2, *SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.function(self.first(x)).flatten(1))
        return logits


def through(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Through(function)


def case(name: str, function: Callable[[Tensor], Tensor]) -> object:
    return pytest.param(function, id=name)


def _assigned(x: Tensor) -> Tensor:
    """A batch of which a row is written over, in place, by another."""
    x = x.clone()
    x[0].copy_(x[1])
    return x


def _over_words(x: Tensor) -> Tensor:
    """Attention over the batch: its samples are taken for the words of a sentence."""
    words = x.flatten(2).transpose(0, 1)
    return F.scaled_dot_product_attention(words, words, words).transpose(0, 1)


MIXING = [
    case("mean", lambda x: x - x.mean(0)),
    case("sum of all", lambda x: x / (1 + x.square().sum())),
    case("maximum", lambda x: x / x.amax((0, 2, 3), keepdim=True)),
    case("deviation", lambda x: x / (1 + x.std(0))),
    case("softmax", lambda x: x.softmax(0)),
    case("running sum", lambda x: x.cumsum(0)),
    case("sort", lambda x: x.sort(0).values),
    case("flip", lambda x: x.flip(0)),
    case("roll", lambda x: x.roll(1, 0)),
    case("first sample", lambda x: x + x[:1]),
    case("neighbour", lambda x: torch.cat([x[1:], x[:1]])),
    case("assignment", _assigned),
    case("product", lambda x: (x.flatten(1) @ x.flatten(1).T) @ x.flatten(1)),
    case("attention", _over_words),
    case("samples as channels", lambda x: F.conv2d(x.transpose(0, 1), x.new_ones(1, 1, 1, 1))
         if len(x) == 1 else x - F.avg_pool2d(x.permute(1, 2, 3, 0), (1, 1)).mean(-1).unsqueeze(0)),
    case("reshape", lambda x: x.transpose(0, 1).reshape(x.shape)),
    case("interpolation", lambda x: F.avg_pool1d(x.flatten(1).T, 3, 1, 1).T),
    case("layer norm", lambda x: F.layer_norm(x.movedim(0, -1), (len(x),)).movedim(-1, 0)),
    case("weights of samples", lambda x: F.conv2d(x, x[:4, :, :1, :1])),
    case("running maximum", lambda x: x.cummax(0).values),
    case("size of the batch", lambda x: x / x.shape[0]),
    case("length of the batch", lambda x: x / len(x)),
    case("place in the batch", lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1, 1)),
    case("constants that are as many", lambda x: x / x.new_ones(x.shape[0]).sum()),
    case("a constant spread out", lambda x: x / torch.ones(1).expand(x.shape[0]).sum()),
    case("a number in a constant", lambda x: x / x.new_full((1,), x.shape[0])),
    case("places by a sum", lambda x: x * torch.ones_like(x).cumsum(0)),
    case("a far roll", lambda x: x + x.roll(60, 0)),
    case("a far diagonal", lambda x: x.flatten(1).triu(-200)),
    case("a far convolution", lambda x: F.conv1d(
        x.flatten(1).T, x.new_ones(PIXELS, 1, 3), padding=60, dilation=60, groups=PIXELS).T),
    case("single precision alone", lambda x: x - x.mean(0) if x.dtype == torch.float32 else x),
    case("pairs", lambda x: (x[:, None] - x[None]).sum(1)),
    case("from a size on", lambda x: x - x.mean(0) if len(x) > 16 else x),
    case("up to a size", lambda x: x - x.mean(0) if len(x) < 3 else x),
    case("groups", lambda x: x - x.view(-1, 8, *SHAPE).mean(1).repeat(8, 1, 1, 1)
         if len(x) % 8 == 0 else x),
    case("control flow", lambda x: x / 255 if x.max() > 1 else x),
    case("a number", lambda x: x / (1 + x.abs().max().item())),
    case("selection", lambda x: x + x[x.sum((1, 2, 3)) > 0].sum(0)),
    case("numpy", lambda x: x - torch.from_numpy(x.detach().numpy().mean(0))),
    case("unknown", lambda x: torch.linalg.qr(x.flatten(1))[0]),
    case("shuffled by draws", lambda x: x[torch.rand(x.shape[0]).argsort()]),
    case("drawn by the mean", lambda x: x * torch.bernoulli(x.sigmoid().mean(0))),
    case("noise of all", lambda x: x * torch.rand(x.shape[0]).sum()),
    case("a shifted view", lambda x: x.as_strided((x.shape[0], 144), (0, 1))),
    case("a later view", lambda x: torch.cat([x, x]).as_strided(x.shape, x.stride(), 144)),
]  # fmt: skip


@pytest.mark.privacy
@pytest.mark.parametrize(
    "function",
    one_in(5, MIXING, "size of the batch", "places by a sum", "constants that are as many"),
)
def test_what_mixes_samples_is_not_proven(function: Callable[[Tensor], Tensor]) -> None:
    model = through(lambda x: x)
    model.function = function  # type: ignore[assignment]
    with pytest.raises(UnprovenError):
        check_independent_forward(model, TRIAL.inputs)
    with pytest.raises(UnprovenError):
        check_independent(model, TRIAL)


class _Swapped(torch.autograd.Function):
    """Hands every sample the gradient of another."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].flip(0)


class _SwappedIfLarge(torch.autograd.Function):
    """The same for large batches only."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        [g] = gradients
        return g.flip(0) if len(g) > 100 else g


def _hooked_if_large(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g / g.norm() if len(g) > 100 else g)  # type: ignore[no-untyped-call]
    return x


def _hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: g - g.mean(0))  # type: ignore[no-untyped-call]
    return x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x / len(x), "depend on the batch size"),
        (lambda x: x / 9 if x.max() > 1 else x, r"computed from samples at test_tracing\.py, line"),
        (lambda x: x.flip(0), "flip works along the samples of a batch"),
        (lambda x: x.cummax(2).values, "not known how cummax treats samples"),
    ],
)
def test_a_person_is_told_what_could_not_be_proven(
    function: Callable[[Tensor], Tensor], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = through(lambda x: x)
    model.function = function  # type: ignore[assignment]
    with pytest.raises(UnprovenError, match=said):
        check_independent(model, TRIAL)
    assert capfd.readouterr().err == "", "torch.export would print its graph"


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_Swapped.apply, "In the gradients of layer first a row|a custom backward function"),
        (_SwappedIfLarge.apply, "a custom backward function"),
        (_hooked, "registers hooks"),
        (_hooked_if_large, "registers hooks"),
    ],
)
def test_what_mixes_backwards_alone_is_not_proven(
    function: Callable[[Tensor], Tensor], said: str
) -> None:
    check_uniform(through(function), TRIAL.inputs)
    with pytest.raises(UnprovenError, match=said):
        check_independent(through(function), TRIAL)


@pytest.mark.privacy
@pytest.mark.parametrize("where", ["layer", "parameter"])
def test_hooks_that_were_there_before_are_not_proven(where: str) -> None:
    model = through(torch.relu)
    layer = model.get_submodule("head")
    if where == "layer":
        layer.register_full_backward_hook(lambda *_: None)
    else:
        weight: Tensor = layer.get_parameter("weight")
        weight.register_hook(lambda g: g / g.norm())  # type: ignore[no-untyped-call]
    assert "has hooks of backward passes" in independence(model, SHAPE, CLASSES)[1]


@pytest.mark.privacy
def test_layers_that_see_samples_in_another_order_are_not_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits are in order: only the layer between is not."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(PIXELS, PIXELS), nn.Linear(PIXELS, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.first(x.flatten(1).flip(0)).flip(0))
            return logits

    monkeypatch.setattr(tracing, "check_uniform", lambda *_: None)  # which finds it, too

    with pytest.raises(UnprovenError, match="In the inputs of layer first"):
        check_independent(Turned(), TRIAL)


def _over_channels(x: Tensor) -> Tensor:
    """Attention within each sample."""
    words = x.flatten(2)
    return F.scaled_dot_product_attention(words, words, words)


def _dropped_over_channels(x: Tensor) -> Tensor:
    """Attention within each sample, with dropout."""
    words = x.flatten(2)
    return F.scaled_dot_product_attention(words, words, words, dropout_p=0.5)


def _bilinear(x: Tensor, y: Tensor) -> Tensor:
    """Products of the columns of two images."""
    return F.bilinear(x, y, torch.linspace(-1, 1, 216, dtype=x.dtype).view(6, 6, 6))


def _pooled(x: Tensor) -> Tensor:
    """Pooling in ConvNeXt, of which torch gives a view with other strides."""
    return F.adaptive_avg_pool2d(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), 1)


APART = [
    case("activation", lambda x: F.gelu(x) + F.hardswish(x) + F.leaky_relu(x) + x.relu().sqrt()),
    case("in place", lambda x: x.clone().mul_(2).add_(1).clamp_(-3, 3)),
    case("each its mean", lambda x: x - x.mean((1, 2, 3), keepdim=True)),
    case("each its softmax", lambda x: x.flatten(2).softmax(-1)),
    case("group norm", lambda x: F.group_norm(x, 2)),
    case("layer norm", lambda x: F.layer_norm(x, SHAPE[1:])),
    case("pooling", lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)),
    case("upsampling", lambda x: F.interpolate(x, scale_factor=2)),
    case("padding", lambda x: F.pad(x, (1, 1, 1, 1))),
    case("there and back", lambda x: x.transpose(0, 1).reshape(4, -1, 36).transpose(0, 1)),
    case("each with itself", lambda x: x.flatten(2) @ x.flatten(2).mT),
    case("attention", _over_channels),
    case("pieces", lambda x: torch.cat([part.sin() for part in x.chunk(2, 1)], 1)),
    case("zeros", lambda x: x + x.new_zeros(x.shape[0], 1, 1, 1)),
    case("own choice", lambda x: torch.where(x.amax((1, 2, 3), keepdim=True) > 1, x / 9, x)),
    case("gate", lambda x: F.glu(x, 1)),
    case("dropout", lambda x: F.dropout2d(F.alpha_dropout(F.dropout(x)))),
    case("draws", lambda x: x + torch.rand(x.shape[0], 1, 1, 1) * torch.randn_like(x)),
    case("draws in place", lambda x: x * x.new_empty(x.shape).normal_() + x.clone().uniform_()),
    case("drop path", lambda x: x * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5)),
    case("drawn by each", lambda x: x * torch.bernoulli(x.sigmoid())),
    case("drawn in attention", _dropped_over_channels),
    case("channels last", lambda x: x.to(memory_format=torch.channels_last).mean((2, 3), True)),
    case("pooled channels last", _pooled),
    case("parts", lambda x: torch.stack([x[:, 0], x[:, 2]], 1)),
    case("channels by number", lambda x: x[:, torch.tensor([0, 0, 3, 1])]),
    case("products of pairs", lambda x: _bilinear(x, x.sin())),
]


@pytest.mark.parametrize("function", one_in(4, APART))
def test_what_keeps_samples_apart_is_proven(function: Callable[[Tensor], Tensor]) -> None:
    check_independent(through(function), TRIAL)


def _of_instances(x: Tensor) -> Tensor:
    """Instance norm that keeps a running mean."""
    return F.instance_norm(x, torch.zeros(4), torch.ones(4), use_input_stats=True)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "function",
    [
        case("of a batch", lambda x: F.batch_norm(x, None, None, training=True)),
        case(
            "of pairs",
            lambda x: F.batch_norm(x.view(-1, 8, 6, 6), None, None, training=True).view_as(x),
        ),
        case("running", _of_instances),
    ],
)
def test_statistics_of_a_batch_are_not_traced(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnprovenError):
        check_independent(through(function), TRIAL)


@pytest.mark.privacy
def test_only_statistics_that_are_not_kept_are_followed_by_channel() -> None:
    """Without the graph, which refuses most of these before."""
    x = torch.randn(SAMPLES, 3, 5)
    kept = torch.zeros(3 * SAMPLES), torch.ones(3 * SAMPLES)
    cases: Any = (((None, None), True), (kept, False))
    for statistics, proven in cases:
        dependence = Dependence()
        dependence.mark(x)
        with nullcontext() if proven else pytest.raises(UnprovenError), dependence:
            out = F.batch_norm(
                x.view(1, -1, 5), statistics[0], statistics[1], training=True
            ).view_as(x)
            dependence.check_rows("the output", out)
    dependence = Dependence()
    dependence.mark(x)
    with pytest.raises(UnprovenError, match="depends on other samples"), dependence:
        dependence.check_rows("the output", F.batch_norm(x, None, None, training=True))


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norms_are_proven(affine: bool) -> None:
    norm = nn.InstanceNorm2d(4, affine=affine)
    check_independent(through(norm), TRIAL)


def test_frozen_networks_are_proven_with_batch_norm_in_evaluation_mode() -> None:
    frozen = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
    check_independent_forward(frozen.eval(), TRIAL.inputs)
    with pytest.raises(UnprovenError):
        check_independent_forward(frozen.train(), TRIAL.inputs)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()
    check_independent_forward(nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (6, 6)),
                                            nn.Flatten(1, 2), layer), TRIAL.inputs)  # fmt: skip


@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
def test_proofs_are_found_whatever_precision_a_program_has_set(precision: str) -> None:
    """torch.export reads older settings, which contradict those of whole backends."""
    backends: Any = torch.backends
    before = backends.fp32_precision
    try:
        backends.fp32_precision = precision
        check_uniform(through(torch.relu), TRIAL.inputs)
        assert backends.fp32_precision == precision
    finally:
        backends.fp32_precision = before


@pytest.mark.privacy
def test_a_view_that_moves_numbers_is_not_the_same_for_every_batch() -> None:
    moved = through(lambda x: x.as_strided(x.shape, (0, 36, 6, 1)))
    with pytest.raises(UnprovenError, match="as_strided moves elements"):
        check_uniform(moved, TRIAL.inputs)


def test_the_samples_that_are_told_apart_are_several() -> None:
    assert SAMPLES > 2


@pytest.mark.privacy
def test_each_part_of_a_proof_refuses_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = through(lambda x: x)
    model.function = lambda x: x.cummax(0).values  # type: ignore[assignment]
    with pytest.raises(UnprovenError, match="not known how cummax"):
        check_uniform(model, TRIAL.inputs)
    monkeypatch.setattr(tracing, "check_uniform", lambda *_: None)
    with pytest.raises(UnprovenError, match="not known how"):
        check_independent(model, TRIAL)


def _column_by_place(x: Tensor) -> Tensor:
    """Number 5 b in a batch is of sample b, also if they are dealt out in turn to four samples."""
    first = F.pad(x.flatten(1)[:, :1], (0, 4))
    return x + first.flatten().view(5, -1).t()[:, :4, None, None]


def _of_parts(parts: Tensor) -> Tensor:
    """Sums of four parts each, which are not those of one sample."""
    return parts.view(4, -1, 1, 3, 3).sum(0).repeat(1, 1, 2, 2)


def _in_groups(x: Tensor) -> Tensor:
    """Norms of as many groups as samples, of rows with positions first."""
    rows = x.movedim(1, 0).flatten(0, 1).flatten(1)
    normal = torch.native_group_norm(rows, None, None, x.shape[0], 4, 36, 1, 1e-5)[0]
    return normal.view(4, -1, 36).movedim(0, 1)


#: What depends on other samples, or on the place among them, only in batches of other sizes than
#: four, or in a way that the rows of an operation do not show.
HIDDEN = [
    case("a column by place", _column_by_place),
    case("norms in groups", _in_groups),
    case("pixels", lambda x: x + _of_parts(F.pixel_unshuffle(x[:, 0], 2))),
    case("patches", lambda x: x + _of_parts(F.unfold(x[:, 0], 2, stride=2))),
    case(
        "constants by place",
        lambda x: (
            x * torch.tensor([1.0, -1.0]).expand(x.shape[0], 2).flatten().view(2, -1, 1, 1, 1)[0]
        ),
    ),
    case(
        "constants that are moved",
        lambda x: x * F.pad(torch.ones(x.shape[0], 1, 1, 1), (0, 0, 0, 0, 0, 0, 1, -1)),
    ),
]


@pytest.mark.privacy
@pytest.mark.parametrize("function", HIDDEN)
def test_the_graph_shows_what_four_samples_do_not(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnprovenError, match=r"could mix the samples|along the samples"):
        check_uniform(through(function), TRIAL.inputs)


@pytest.mark.privacy
def test_what_a_network_does_only_in_steps_is_not_proven() -> None:
    """There, its parameters are views of a flat vector, and require no gradients."""

    def mix(layer: Any, _: object, out: Tensor) -> Tensor:
        large = not layer.weight.requires_grad and len(out) > 20
        return out + out.mean(0) if large else out

    model = through(lambda x: x)
    model.get_submodule("first").register_forward_hook(mix)
    with pytest.raises(UnprovenError):
        check_independent(model, TRIAL)


#: What mixes the samples of a batch of four.
OF_FOUR = [
    *HIDDEN[2:4],
    case("products with a neighbour", lambda x: _bilinear(x, x.roll(1, 0))),
    case("a neighbour's products", lambda x: _bilinear(x.roll(1, 0), x)),
    case("frequencies", lambda x: torch.fft.fft(x, dim=0).real),
    case("real frequencies", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), n=4, dim=0)),
    case("two in one place", lambda x: x.index_put((torch.tensor([0, 0, 2, 3]),), x)),
    case(
        "two in one place, its own last",
        lambda x: x.index_put((torch.tensor([0, 0, 2, 3]),), x[torch.tensor([1, 0, 2, 3])]),
    ),
]


@pytest.mark.privacy
@pytest.mark.parametrize("function", [*MIXING[:15], *OF_FOUR])
def test_what_mixes_is_followed_without_the_graph(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "check_uniform", lambda *_: None)
    model = through(lambda x: x)
    model.function = function  # type: ignore[assignment]
    with pytest.raises(UnprovenError):
        check_independent_forward(model, TRIAL.inputs)


#: What could separate the rows of a sample in one dimension.
SEPARATING = [
    case(
        "positions first",
        lambda x: x.movedim(1, 0).flatten(0, 1).view(4, -1, 6, 6).movedim(0, 1),
    ),
    case("repeated", lambda x: x.repeat(2, 1, 1, 1).view(2, *x.shape).sum(0)),
]


@pytest.mark.privacy
@pytest.mark.parametrize("function", SEPARATING)
def test_what_could_separate_the_rows_of_a_sample_is_not_proven_for_several(
    function: Callable[[Tensor], Tensor],
) -> None:
    model = through(function)
    check_uniform(model, TRIAL.inputs)
    with pytest.raises(UnprovenError, match="could separate the rows of a sample"):
        check_uniform(model, TRIAL.inputs, 4)


def test_rows_that_stay_adjacent_are_proven() -> None:
    folded = through(lambda x: (x.flatten(0, 1).flatten(1).softmax(1) * 2).view_as(x))
    check_uniform(folded, TRIAL.inputs, 4)


@pytest.mark.privacy
def test_gradients_are_followed_through_functions_with_a_backward_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_check_backward", lambda *_: None)
    with pytest.raises(UnprovenError, match="In the gradients of layer first a row"):
        check_independent(through(_Swapped.apply), TRIAL)
