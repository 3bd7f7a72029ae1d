"""Layers and small networks that people write, for benchmarks/layers.py and tests.

Every layer of torch.nn that has parameters or mixes samples is here, in variants, and typical ways
to put them together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from dpmac_cli.dp.clipping.custom_layers import ConstantNorm, LinearWithPlaces, StandardisedConv2d

VECTOR, SEQUENCE, SIGNAL, IMAGE, VOLUME = (16,), (12, 16), (8, 24), (8, 12, 12), (4, 6, 6, 6)
#: Tokens are below this number.
TOKENS = 30
#: A network, or a function that returns one.
Build = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A network on records of one shape; its outputs may have any shape.

    Attributes:
        group, name: where it is in the table.
        build: returns the network.
        shape: shape of a record, of tokens below ``tokens`` if it is not 0.
        records: number of records in a batch.
        refused: why it is refused by default, as a pattern of the message; "" if it is trained.
    """

    group: str
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int
    refused: str
    records: int

    def batch(self) -> Tensor:
        """Return made-up records."""
        generator, shape = torch.Generator().manual_seed(0), (self.records, *self.shape)
        if self.tokens:
            return torch.randint(self.tokens, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    @staticmethod
    def loss(model: Any, batch: Any) -> Tensor:
        """Return one loss per record that depends on every output."""
        return energy(model(batch))


def energy(outputs: Any, _: Any = None) -> Tensor:
    """Return a loss per record of outputs that are a tensor, a tuple, or have ``logits``."""
    first = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)
    rows = first.reshape(first.shape[0], -1)
    loss: Tensor = (rows.square() / 2 + rows.sin()).mean(1)
    return loss


class Do(nn.Module):
    """Parts, and a function of itself and the inputs that uses them."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def raw(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 4)


def first_of(module: nn.Module) -> nn.Module:
    """A module that returns a tuple."""
    return Do(lambda s, x: s.part(x)[0], part=module)


def attention(call: Callable[[Any, Tensor], Any], **options: Any) -> nn.Module:
    options = {"batch_first": True, **options}
    return Do(lambda s, x: call(s.part, x)[0], part=nn.MultiheadAttention(16, 4, **options))


def itself(part: Any, x: Tensor) -> Any:
    return part(x, x, x, need_weights=False)


def after(*layers: nn.Module) -> nn.Module:
    """Layers without parameters behind one that has some."""
    return nn.Sequential(nn.Linear(16, 16), *layers)


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), *layers)


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


# The cases, by group. Further values are why it is refused, or the number of tokens.


def linear() -> Iterator[tuple[Any, ...]]:
    yield "Linear", lambda: nn.Linear(16, 8), VECTOR
    yield "Linear, without bias", lambda: nn.Linear(16, 8, bias=False), VECTOR
    yield "Linear, at 12 positions", lambda: nn.Linear(16, 8), SEQUENCE
    yield "Linear, on images", lambda: nn.Linear(12, 8), IMAGE
    for name in ("bias", "weight"):
        yield f"Linear, {name} frozen", lambda name=name: frozen(nn.Linear(16, 8), name), VECTOR
    yield "Bilinear", lambda: Do(lambda s, x: s.part(x, x), part=nn.Bilinear(16, 16, 4)), VECTOR
    lazy, unknown = partial(nn.LazyLinear, 8), "shape of network.weight is unknown"
    yield "LazyLinear, not called", lazy, VECTOR, unknown


def convolutions() -> Iterator[tuple[Any, ...]]:
    kinds: Any = (
        ("1d", nn.Conv1d, nn.ConvTranspose1d, SIGNAL),
        ("2d", nn.Conv2d, nn.ConvTranspose2d, IMAGE),
        ("3d", nn.Conv3d, nn.ConvTranspose3d, VOLUME),
    )
    variants: dict[str, dict[str, Any]] = {
        "": {},
        ", stride 2": {"stride": 2, "padding": 1},
        ", dilation 2": {"dilation": 2, "padding": 2},
        ", 2 groups": {"groups": 2},
        ", without bias": {"bias": False},
        ', padding="same"': {"padding": "same"},
        ", reflect padding": {"padding": 1, "padding_mode": "reflect"},
        ", circular padding": {"padding": 1, "padding_mode": "circular"},
    }
    for dims, conv, transposed, shape in kinds:
        channels = shape[0]
        for said, options in variants.items():
            yield f"Conv{dims}{said}", partial(conv, channels, 8, 3, **options), shape
        depthwise = partial(conv, channels, channels, 3, groups=channels)
        yield f"Conv{dims}, depthwise", depthwise, shape
        options = {"stride": 2, "output_padding": 1, "padding": 1}
        yield f"ConvTranspose{dims}", partial(transposed, channels, 8, 3, **options), shape
    for groups in (1, 2):
        standardised = partial(StandardisedConv2d, 8, 4, 3, stride=2, padding=1, groups=groups)
        yield f"StandardisedConv2d, {groups} groups", standardised, IMAGE


def norms() -> Iterator[tuple[Any, ...]]:
    kinds: Any = (
        ("1d", nn.BatchNorm1d, nn.InstanceNorm1d, SIGNAL),
        ("2d", nn.BatchNorm2d, nn.InstanceNorm2d, IMAGE),
        ("3d", nn.BatchNorm3d, nn.InstanceNorm3d, VOLUME),
    )
    for dims, batch, instance, shape in kinds:
        size = shape[0]
        yield f"BatchNorm{dims}", partial(batch, size), shape, "mixes the samples"
        yield f"InstanceNorm{dims}, affine", partial(instance, size, affine=True), shape
    yield "SyncBatchNorm", lambda: nn.SyncBatchNorm(8), IMAGE, "mixes the samples"
    kept = lambda: image(nn.InstanceNorm2d(8, track_running_stats=True))
    yield "InstanceNorm2d, running statistics", kept, IMAGE, "A forward pass changes"
    yield "ConstantNorm", lambda: ConstantNorm(nn.BatchNorm2d(8), "0"), IMAGE
    yield "GroupNorm", lambda: nn.GroupNorm(4, 8), IMAGE
    yield "GroupNorm, on vectors", lambda: nn.GroupNorm(4, 16), VECTOR
    for norm in (nn.LayerNorm, nn.RMSNorm):
        yield norm.__name__, partial(norm, 16), SEQUENCE
        yield f"{norm.__name__}, of two dimensions", partial(norm, (12, 16)), SEQUENCE
    yield "LayerNorm, without bias", lambda: nn.LayerNorm(16, bias=False), SEQUENCE


def embeddings() -> Iterator[tuple[Any, ...]]:
    words = (12,)
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        ", padding_idx": {"padding_idx": 0},
        ", sparse": {"sparse": True},
    }
    for said, options in kinds.items():
        yield f"Embedding{said}", partial(nn.Embedding, TOKENS, 16, **options), words, TOKENS
    for name, value in (("max_norm", 1.0), ("scale_grad_by_freq", True)):
        refused = partial(nn.Embedding, TOKENS, 16, **{name: value})  # type: ignore[arg-type]
        yield f"Embedding, {name}", refused, words, TOKENS, name
    for mode in ("sum", "mean", "max"):
        bag = partial(nn.EmbeddingBag, TOKENS, 16, mode=mode)
        yield f"EmbeddingBag, {mode}", bag, words, TOKENS
    yield "LinearWithPlaces", places, words, TOKENS


def places() -> nn.Module:
    """Twelve inputs, of which the last six are numbers of places."""
    part = LinearWithPlaces(12, 6, TOKENS // 3, 8)
    return Do(lambda s, x: s.part(x.to(s.part.numbers.weight.dtype)), part=part)


def recurrent() -> Iterator[tuple[Any, ...]]:
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        name = kind.__name__
        make = lambda kind=kind, **options: first_of(kind(16, 8, batch_first=True, **options))
        yield name, make, SEQUENCE
        deep = partial(make, num_layers=2, bidirectional=True, dropout=0.2)
        yield f"{name}, 2 layers, bidirectional", deep, SEQUENCE
        second = lambda kind=kind: Do(
            lambda s, x: s.part(x.transpose(0, 1))[0].transpose(0, 1), part=kind(16, 8)
        )
        yield f"{name}, samples second", second, SEQUENCE
    for name in ("weight_ih_l0", "bias_hh_l0"):
        part = lambda name=name: first_of(frozen(nn.GRU(16, 8, batch_first=True), name))
        yield f"GRU, {name} frozen", part, SEQUENCE
    from_states = lambda: Do(_from_states, part=nn.LSTM(16, 8, batch_first=True))
    yield "LSTM, from states to states", from_states, SEQUENCE
    packed = lambda: Do(_packed, part=nn.LSTM(16, 8, batch_first=True))
    yield "LSTM, packed sequence", packed, SEQUENCE
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield cell.__name__, lambda cell=cell: Do(_cells, part=cell(16, 8)), SEQUENCE


def _from_states(self: Any, x: Tensor) -> Any:
    first = x.mean() * 0 + x.new_full((1, len(x), 8), 0.5)
    out, (hidden, cell) = self.part(x, (first, first.sin()))
    return torch.cat([out, hidden.transpose(0, 1), cell.transpose(0, 1)], 1)


def _packed(self: Any, x: Tensor) -> Any:
    lengths = torch.full((x.shape[0],), x.shape[1] - 2)
    out, _ = self.part(pack_padded_sequence(x, lengths, batch_first=True))
    return pad_packed_sequence(out, batch_first=True)[0]


def _cells(self: Any, x: Tensor) -> Any:
    state = None
    for place in x.unbind(1):
        state = self.part(place, state)
    return state


def attentions() -> Iterator[tuple[Any, ...]]:
    variants: dict[str, dict[str, Any]] = {
        "": {},
        ", without bias": {"bias": False},
        ", add_bias_kv": {"add_bias_kv": True},
        ", add_zero_attn": {"add_zero_attn": True},
        ", dropout": {"dropout": 0.2},
    }
    for said, options in variants.items():
        yield f"MultiheadAttention{said}", partial(attention, itself, **options), SEQUENCE
    calls: dict[str, Callable[[Any, Tensor], Any]] = {
        "returns its weights": lambda part, x: part(x, x, x),
        "to other keys": lambda part, x: part(x, x.flip(1), x.tanh(), need_weights=False),
        "attn_mask": lambda part, x: part(x, x, x, attn_mask=_causal(x), need_weights=False),
        "masks for each head": _masked_by_head,
    }
    for said, call in calls.items():
        yield f"MultiheadAttention, {said}", partial(attention, call), SEQUENCE
    narrow = lambda part, x: part(x, x[:, :, :8], x[:, :, :6], need_weights=False)
    yield "MultiheadAttention, kdim and vdim", partial(attention, narrow, kdim=8, vdim=6), SEQUENCE
    fixed = lambda: frozen(attention(itself), "part.in_proj_weight")
    yield "MultiheadAttention, projection frozen", fixed, SEQUENCE
    for change in (_norm_inside, _tripled):
        changed = lambda change=change: change(attention(itself))
        yield f"MultiheadAttention, {change.__name__}", changed, SEQUENCE
    over = partial(attention, itself, batch_first=False)
    yield "MultiheadAttention over the batch", over, SEQUENCE, "computes something else for a batch"
    encoder = partial(nn.TransformerEncoderLayer, 16, 4, 32, 0.0, batch_first=True)
    for first in (False, True):
        yield f"TransformerEncoderLayer, {first=}", partial(encoder, norm_first=first), SEQUENCE
    mask = lambda: Do(lambda s, x: s.part(x, _causal(x)), part=encoder())
    yield "TransformerEncoderLayer, causal mask", mask, SEQUENCE
    whole = partial(nn.Transformer, 16, 4, 1, 1, 32, 0.0, batch_first=True)
    yield "Transformer", lambda: Do(lambda s, x: s.part(x, x.flip(1)), part=whole()), SEQUENCE
    yield "attention of four Linear layers", Attention, SEQUENCE


def _causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)


def _masked_by_head(part: Any, x: Tensor) -> Any:
    """One mask for each sample and head, added to the scores."""
    later = _causal(x).to(x.dtype)
    hidden = (x[:, :, 0] > 0.5) & (torch.arange(x.shape[1]) > 0)  # all see the first
    by_row = x[:, :1, :1].unsqueeze(1) * torch.stack([later, 1 - later, later, -later])
    masks = {"attn_mask": by_row.flatten(0, 1), "key_padding_mask": hidden.to(x.dtype)}
    return part(x, x, x, need_weights=False, **masks)


def _norm_inside(module: Any) -> nn.Module:
    parametrizations.weight_norm(module.part.out_proj)
    return module  # type: ignore[no-any-return]


def _tripled(module: Any) -> nn.Module:
    module.part.register_forward_hook(lambda _, __, found: (3 * found[0], found[1]))
    return module  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention of four heads as people write it, like Opacus's DPMultiheadAttention."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q, self.k, self.v)
        q, k, v = (part(x).unflatten(2, (4, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def without_parameters() -> Iterator[tuple[Any, ...]]:
    pointwise: tuple[nn.Module, ...] = (
        *(nn.ReLU(inplace=True), nn.GELU(), nn.Tanh(), nn.LogSigmoid(), nn.Softmax(-1), nn.GLU()),
        *(nn.Threshold(0.1, 0.0), nn.Dropout(0.2), nn.AlphaDropout(0.2)),
    )
    for layer in pointwise:
        yield f"Linear, then {type(layer).__name__}", partial(after, layer), SEQUENCE
    planar: tuple[nn.Module, ...] = (
        *(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(3), nn.LPPool2d(2, 2)),
        *(nn.FractionalMaxPool2d(2, output_size=5), nn.Dropout2d(0.2), nn.PixelShuffle(2)),
        *(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Unfold(3), nn.ReflectionPad2d(1)),
        *(nn.LocalResponseNorm(3), nn.GroupNorm(4, 8, affine=False)),
    )
    for layer in planar:
        yield f"Conv2d, then {type(layer).__name__}", partial(image, layer), IMAGE
    over = lambda: after(nn.Softmax(0))
    yield "Linear, then Softmax over the batch", over, VECTOR, "computes something else"
    yield "PReLU", lambda: nn.PReLU(8), IMAGE


def parameters() -> Iterator[tuple[Any, ...]]:
    yield "one weight in two Linear layers", partial(_of_one_weight, nn.Linear, 16, 16), VECTOR
    yield "one weight in two Conv1d layers", partial(_of_one_weight, nn.Conv1d, 8, 8, 1), SIGNAL
    yield "an Embedding and a head of one weight", TiedWords, (12,), TOKENS
    for words, length in ((TOKENS, 1), (90, 3)):
        padded = partial(TiedWords, words, 4, padding_idx=1)
        yield f"the same of {words} words, with padding", padded, (length,), 4
    again = lambda s, x: s.part(s.part(x).tanh())
    twice: dict[str, tuple[Build, tuple[int, ...]]] = {
        "Linear": (lambda: nn.Linear(16, 16), SEQUENCE),
        "GroupNorm": (lambda: nn.GroupNorm(4, 8), IMAGE),
        "LayerNorm": (lambda: nn.LayerNorm(16), SEQUENCE),
        "StandardisedConv2d": (lambda: StandardisedConv2d(8, 8, 3, padding=1), IMAGE),
    }
    for said, (build, shape) in twice.items():
        yield f"{said}, called twice", lambda build=build: Do(again, part=build()), shape
    scales = lambda s, x: s.part(x).mean((2, 3)) + s.part(F.avg_pool2d(x, 2)).mean((2, 3))
    for groups in (1, 2):
        part = partial(nn.Conv2d, 8, 4, 3, padding=1, groups=groups)
        made = lambda part=part: Do(scales, part=part())
        yield f"Conv2d at two scales, {groups} groups", made, IMAGE
    yield "first use without gradients", lambda: Do(_stopped, part=nn.Linear(16, 16)), VECTOR
    by_function: dict[str, tuple[Any, tuple[int, ...], Build]] = {
        "F.linear(x, layer.weight)": (
            lambda s, x: F.linear(x, s.part.weight),
            SEQUENCE,
            lambda: nn.Linear(16, 8, bias=False),
        ),
        "layer(x) @ layer.weight": (
            lambda s, x: s.part(x) @ s.part.weight,
            SEQUENCE,
            lambda: nn.Linear(16, 8),
        ),
        "2 * layer.bias": (
            lambda s, x: F.linear(x, s.part.weight) + 2 * s.part.bias,
            SEQUENCE,
            lambda: nn.Linear(16, 8),
        ),
        "F.conv2d(x, layer.weight)": (
            lambda s, x: F.conv2d(x, s.part.weight),
            IMAGE,
            lambda: nn.Conv2d(8, 4, 3, bias=False),
        ),
    }
    for said, (function, shape, build) in by_function.items():
        make = lambda function=function, build=build: Do(function, part=build())
        yield said, make, shape
    yield "x @ self.p", lambda: Do(lambda s, x: x @ s.p, p=raw(16, 8)), SEQUENCE
    beside: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[int, ...]]] = {
        "x + self.p": (lambda s, x: x + s.p, (12, 16)),
        "x * self.p.exp() (temperature)": (lambda s, x: x * s.p.exp(), ()),
    }
    for said, (function, size) in beside.items():
        yield said, partial(_beside, function, size), SEQUENCE
    yield "weight_norm", lambda: parametrizations.weight_norm(nn.Linear(16, 8)), SEQUENCE
    spectral = lambda: parametrizations.spectral_norm(nn.Linear(16, 8))
    yield "spectral_norm", spectral, SEQUENCE, "A forward pass changes"
    yield "Conv1D of transformers", lambda: Conv1D(8, 16), SEQUENCE
    yield "LoRA of Linear layers", LoRA, SEQUENCE
    yield "LoRA of parameters", partial(LoRA, raw=True), SEQUENCE


def _beside(function: Callable[[Any, Tensor], Any], size: tuple[int, ...]) -> nn.Module:
    """A parameter of a network that also has a layer."""
    return Do(lambda s, x: s.head(function(s, x)), p=raw(*size), head=nn.Linear(16, 8))


def _stopped(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = x + self.part(x)
    return self.part(x)


def _of_one_weight(kind: Any, *sizes: int) -> nn.Module:
    one, other = kind(*sizes), kind(*sizes)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


class TiedWords(nn.Module):
    """An embedding and a head of one weight, as in GPT-2."""

    def __init__(self, words: int = TOKENS, width: int = 16, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, **options)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(x).tanh())
        return logits


class LoRA(nn.Module):
    """A frozen layer and a trained product of two narrow ones."""

    def __init__(self, width: int = 16, rank: int = 2, *, raw: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        down, up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.raw = raw
        self.down: Any = down.weight if raw else down
        self.up: Any = up.weight if raw else up

    def forward(self, x: Tensor) -> Tensor:
        if self.raw:
            return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Conv1D(nn.Module):
    """GPT-2's Linear layer in transformers, whose weight is transposed."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = raw(inputs, outputs), raw(outputs)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], -1)


def networks() -> Iterator[tuple[Any, ...]]:
    block: Build = lambda: Do(
        lambda s, x: x + s.two(F.gelu(s.one(s.norm(x)))),
        norm=nn.LayerNorm(16),
        one=nn.Linear(16, 32),
        two=nn.Linear(32, 16),
    )
    again = lambda s, x: checkpoint(s.part, x, use_reentrant=False)
    yield "checkpointed block", lambda: Do(again, part=block()), SEQUENCE
    experts: Build = lambda: nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
    routed = lambda: Do(_routed, gate=nn.Linear(16, 3), experts=experts())
    yield "mixture of experts, routed", routed, SEQUENCE
    vector: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
        "output with .logits": (lambda s, x: SimpleNamespace(logits=s.part(x)), ""),
        "called by name": (lambda s, x: s.part(input=x), ""),
        "custom autograd.Function": (lambda s, x: Doubled.apply(s.part(x)), ""),
        "more rows than samples": (lambda s, x: s.part(x.repeat(3, 1)).view(3, len(x), -1)[0], ""),
        "if x.max() > 1": (lambda s, x: s.part(x / 2 if x.max() > 1 else x), ""),
        "x - x.mean(0)": (lambda s, x: s.part(x - x.mean(0)), "computes something else"),
    }
    for said, (function, refused) in vector.items():
        build = lambda function=function: Do(function, part=nn.Linear(16, 8))
        yield said, build, VECTOR, refused
    folded = lambda s, x: s.part(x.flatten(0, 1)).unflatten(0, (-1, 12))
    yield "Linear on positions as rows", lambda: Do(folded, part=nn.Linear(16, 8)), SEQUENCE
    yield "two inputs and two outputs", lambda: Do(_both, part=Two()), VECTOR
    idle = lambda: Do(lambda s, x: s.part(x), part=nn.Linear(16, 8), idle=nn.Linear(2, 2))
    yield "a layer that is not called", idle, VECTOR
    yield "forward hook that scales", _hooked, SEQUENCE


def _routed(self: Any, x: Tensor) -> Any:
    """Each position by the expert of its largest score."""
    scores = self.gate(x)
    chosen, out = scores.argmax(-1), 0
    for number, expert in enumerate(self.experts):
        mask = (chosen == number).unsqueeze(-1)
        out = out + torch.where(mask, expert(x), 0.0) * scores[..., number : number + 1]
    return out


class Two(nn.Module):
    """A layer with two inputs and two outputs, of which one is made of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = raw(16), nn.Linear(16, 16)

    def forward(self, x: Tensor, by: Any = 1.0) -> tuple[Tensor, Tensor]:
        first = torch.tanh(x * self.weight * by)
        return first, self.inner(first.square() * self.weight)


def _both(self: Any, x: Tensor) -> Any:
    one, other = self.part(self.part(x, by=x)[1], 2.0)
    return one * other


def _hooked() -> nn.Module:
    layer = nn.Linear(16, 8)
    layer.register_forward_hook(lambda module, given, output: 3 * output)
    return layer


class Doubled(torch.autograd.Function):
    """Multiply by two, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


GROUPS: Mapping[str, Callable[[], Iterator[tuple[Any, ...]]]] = {
    "Linear": linear,
    "convolutions": convolutions,
    "norms": norms,
    "embeddings": embeddings,
    "recurrent": recurrent,
    "attention": attentions,
    "layers without parameters": without_parameters,
    "parameters": parameters,
    "networks": networks,
}


def cases_of(group: str, rows: Iterable[tuple[Any, ...]], records: int = 256) -> Iterator[Case]:
    """Yield the cases of a group."""
    for name, build, shape, *more in rows:
        tokens = sum(value for value in more if isinstance(value, int))
        refused = "".join(value for value in more if isinstance(value, str))
        yield Case(group, name, build, shape, tokens, refused, records)


CASES = tuple(case for group, rows in GROUPS.items() for case in cases_of(group, rows()))
