"""Layers and small networks that people write, for benchmarks/layers.py and tests.

Every layer of torch.nn that has parameters or mixes samples is here, in variants, and typical ways
to put them together.
"""

from collections.abc import Callable, Iterator
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

VECTOR, SEQUENCE, SIGNAL, IMAGE, VOLUME = (16,), (12, 16), (8, 24), (8, 12, 12), (4, 6, 6, 6)
#: Tokens are below this number.
TOKENS = 30
#: Tokens of networks of usual size.
WORDS = 2000


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
    tokens: int = 0
    refused: str = ""
    records: int = 256

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


def energy(outputs: Any) -> Tensor:
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


def of_words(part: nn.Module) -> nn.Module:
    """A part behind an embedding."""
    return nn.Sequential(nn.Embedding(TOKENS, 16), part)


# The cases, by group.


def linear() -> Iterator[tuple[Any, ...]]:
    yield "Linear", lambda: nn.Linear(16, 8), VECTOR
    yield "Linear, without bias", lambda: nn.Linear(16, 8, bias=False), VECTOR
    yield "Linear, at 12 positions", lambda: nn.Linear(16, 8), SEQUENCE
    yield "Linear, on images", lambda: nn.Linear(12, 8), IMAGE
    yield "Linear, bias frozen", lambda: frozen(nn.Linear(16, 8), "bias"), VECTOR
    yield "Linear, weight frozen", lambda: frozen(nn.Linear(16, 8), "weight"), VECTOR
    yield "Bilinear", lambda: Do(lambda s, x: s.part(x, x), part=nn.Bilinear(16, 16, 4)), VECTOR
    yield (
        "LazyLinear, not called",
        lambda: nn.LazyLinear(8),
        VECTOR,
        "shape of network.weight is unknown",
    )
    yield "LazyLinear, called once", lambda: called(nn.LazyLinear(8), VECTOR), VECTOR


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


def called(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    module(torch.zeros(2, *shape))
    return module


def convolutions() -> Iterator[tuple[Any, ...]]:
    kinds: Any = (
        ("1d", nn.Conv1d, nn.ConvTranspose1d, nn.LazyConv1d, SIGNAL),
        ("2d", nn.Conv2d, nn.ConvTranspose2d, nn.LazyConv2d, IMAGE),
        ("3d", nn.Conv3d, nn.ConvTranspose3d, nn.LazyConv3d, VOLUME),
    )
    variants: dict[str, dict[str, Any]] = {
        "": {},
        ", stride 2": {"stride": 2, "padding": 1},
        ", dilation 2": {"dilation": 2, "padding": 2},
        ", 2 groups": {"groups": 2},
        ", without bias": {"bias": False},
        ', padding="same"': {"padding": "same"},
        ", reflect padding": {"padding": 1, "padding_mode": "reflect"},
        ", replicate padding": {"padding": 1, "padding_mode": "replicate"},
        ", circular padding": {"padding": 1, "padding_mode": "circular"},
    }
    for dims, conv, transposed, lazy, shape in kinds:
        channels = shape[0]
        for said, options in variants.items():
            yield f"Conv{dims}{said}", partial(conv, channels, 8, 3, **options), shape
        depthwise = partial(conv, channels, channels, 3, groups=channels)
        yield f"Conv{dims}, depthwise", depthwise, shape
        yield f"ConvTranspose{dims}", partial(transposed, channels, 8, 3), shape
        options = {"stride": 2, "output_padding": 1, "padding": 1}
        yield (
            f"ConvTranspose{dims}, stride 2",
            partial(transposed, channels, 8, 3, **options),
            shape,
        )
        yield f"LazyConv{dims}, not called", partial(lazy, 8, 3), shape, "is unknown"


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
    yield "InstanceNorm2d", lambda: image(nn.InstanceNorm2d(8)), IMAGE
    kept = lambda: image(nn.InstanceNorm2d(8, track_running_stats=True))
    yield "InstanceNorm2d, running statistics", kept, IMAGE, "A forward pass changes"
    yield "GroupNorm", lambda: nn.GroupNorm(4, 8), IMAGE
    yield "GroupNorm, on vectors", lambda: nn.GroupNorm(4, 16), VECTOR
    yield "GroupNorm, not affine", lambda: image(nn.GroupNorm(4, 8, affine=False)), IMAGE
    yield "LayerNorm", lambda: nn.LayerNorm(16), SEQUENCE
    yield "LayerNorm, of two dimensions", lambda: nn.LayerNorm((12, 16)), SEQUENCE
    yield "LayerNorm, without bias", lambda: nn.LayerNorm(16, bias=False), SEQUENCE
    yield (
        "LayerNorm, not affine",
        lambda: after(nn.LayerNorm(16, elementwise_affine=False)),
        SEQUENCE,
    )
    yield "RMSNorm", lambda: nn.RMSNorm(16), SEQUENCE
    yield "RMSNorm, of two dimensions", lambda: nn.RMSNorm((12, 16)), SEQUENCE
    yield "RMSNorm, with eps", lambda: nn.RMSNorm(16, eps=1e-3), SEQUENCE
    yield "RMSNorm, not affine", lambda: after(nn.RMSNorm(16, elementwise_affine=False)), SEQUENCE
    yield "LocalResponseNorm", lambda: image(nn.LocalResponseNorm(3)), IMAGE


def embeddings() -> Iterator[tuple[Any, ...]]:
    words, several = (12,), {"tokens": TOKENS}
    yield "Embedding", lambda: nn.Embedding(TOKENS, 16), words, several
    yield "Embedding, padding_idx", lambda: nn.Embedding(TOKENS, 16, padding_idx=0), words, several
    yield "Embedding, sparse", lambda: nn.Embedding(TOKENS, 16, sparse=True), words, several
    limited = {**several, "refused": "max_norm"}
    yield "Embedding, max_norm", lambda: nn.Embedding(TOKENS, 16, max_norm=1.0), words, limited
    counted = {**several, "refused": "scale_grad_by_freq"}
    scaled = partial(nn.Embedding, TOKENS, 16, scale_grad_by_freq=True)
    yield "Embedding, scale_grad_by_freq", scaled, words, counted
    for mode in ("sum", "mean", "max"):
        bag = partial(nn.EmbeddingBag, TOKENS, 16, mode=mode)
        yield f"EmbeddingBag, {mode}", bag, words, several
    padded = partial(nn.EmbeddingBag, TOKENS, 16, padding_idx=0)
    yield "EmbeddingBag, padding_idx", padded, words, several
    weighed = lambda: Do(
        lambda s, x: s.part(x, per_sample_weights=x * s.part.weight.detach()[0, 0]),
        part=nn.EmbeddingBag(TOKENS, 16, mode="sum"),
    )
    yield "EmbeddingBag, per_sample_weights", weighed, words, several
    yield (
        "EmbeddingBag, offsets",
        lambda: Do(_offsets, part=nn.EmbeddingBag(TOKENS, 16)),
        words,
        several,
    )


def _offsets(self: Any, x: Tensor) -> Any:
    """One bag for each record, as a flat tensor and where each begins."""
    begins = torch.arange(0, x.numel(), x.shape[1], device=x.device)
    return self.part(x.flatten(), begins)


def recurrent() -> Iterator[tuple[Any, ...]]:
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        name = kind.__name__
        make = lambda kind=kind, **options: first_of(kind(16, 8, batch_first=True, **options))
        yield name, make, SEQUENCE
        yield f"{name}, 2 layers", partial(make, num_layers=2), SEQUENCE
        yield f"{name}, bidirectional", partial(make, bidirectional=True), SEQUENCE
        yield f"{name}, dropout between layers", partial(make, num_layers=2, dropout=0.2), SEQUENCE
        second = lambda kind=kind: Do(
            lambda s, x: s.part(x.transpose(0, 1))[0].transpose(0, 1), part=kind(16, 8)
        )
        yield f"{name}, samples second", second, SEQUENCE
    yield (
        "LSTM, packed sequence",
        lambda: Do(_packed, part=nn.LSTM(16, 8, batch_first=True)),
        SEQUENCE,
    )
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield cell.__name__, lambda cell=cell: Do(_cells, part=cell(16, 8)), SEQUENCE


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
    yield "MultiheadAttention", partial(attention, itself), SEQUENCE
    variants: dict[str, dict[str, Any]] = {
        "without bias": {"bias": False},
        "add_bias_kv": {"add_bias_kv": True},
        "add_zero_attn": {"add_zero_attn": True},
        "dropout": {"dropout": 0.2},
    }
    for said, options in variants.items():
        yield f"MultiheadAttention, {said}", partial(attention, itself, **options), SEQUENCE
    calls: dict[str, Callable[[Any, Tensor], Any]] = {
        "returns its weights": lambda part, x: part(x, x, x),
        "to other keys": lambda part, x: part(x, x.flip(1), x.tanh(), need_weights=False),
        "attn_mask": lambda part, x: part(x, x, x, attn_mask=_causal(x), need_weights=False),
        "is_causal": lambda part, x: part(
            x, x, x, attn_mask=_causal(x), is_causal=True, need_weights=False
        ),
        "key_padding_mask": lambda part, x: part(
            x, x, x, key_padding_mask=x[:, :, 0] > 1, need_weights=False
        ),
    }
    for said, call in calls.items():
        yield f"MultiheadAttention, {said}", partial(attention, call), SEQUENCE
    narrow = lambda part, x: part(x, x[:, :, :8], x[:, :, :6], need_weights=False)
    yield "MultiheadAttention, kdim and vdim", partial(attention, narrow, kdim=8, vdim=6), SEQUENCE
    second = lambda: Do(
        lambda s, x: itself(s.part, x.transpose(0, 1))[0].transpose(0, 1),
        part=nn.MultiheadAttention(16, 4),
    )
    yield "MultiheadAttention, samples second", second, SEQUENCE
    over = partial(attention, itself, batch_first=False)
    yield "MultiheadAttention over the batch", over, SEQUENCE, "computes something else for a batch"
    encoder = partial(nn.TransformerEncoderLayer, 16, 4, 32, batch_first=True)
    yield "TransformerEncoderLayer", partial(encoder, dropout=0.0), SEQUENCE
    yield (
        "TransformerEncoderLayer, norm_first",
        partial(encoder, dropout=0.0, norm_first=True),
        SEQUENCE,
    )
    yield "TransformerEncoderLayer, dropout", encoder, SEQUENCE
    mask = lambda: Do(lambda s, x: s.part(x, _causal(x)), part=encoder(dropout=0.0))
    yield "TransformerEncoderLayer, causal mask", mask, SEQUENCE
    stack = lambda: nn.TransformerEncoder(encoder(dropout=0.0), 2)
    yield "TransformerEncoder", stack, SEQUENCE
    decoder = partial(nn.TransformerDecoderLayer, 16, 4, 32, 0.0, batch_first=True)
    yield "TransformerDecoderLayer", lambda: Do(_both, part=decoder()), SEQUENCE
    whole = partial(nn.Transformer, 16, 4, 1, 1, 32, 0.0, batch_first=True)
    yield "Transformer", lambda: Do(_both, part=whole()), SEQUENCE
    yield "attention of four Linear layers", Attention, SEQUENCE
    yield "the same, with RoPE and grouped queries", partial(Attention, 2, rotary=True), SEQUENCE
    yield "attention over relative positions", partial(Attention, relative=True), SEQUENCE


def _causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)


def _both(self: Any, x: Tensor) -> Any:
    return self.part(x, x.flip(1))


class Attention(nn.Module):
    """Attention of four heads as people write it, like Opacus's DPMultiheadAttention."""

    def __init__(
        self, shared: int = 4, *, width: int = 16, rotary: bool = False, relative: bool = False
    ) -> None:
        super().__init__()
        self.size = width // 4  # of a head
        self.q, self.k, self.v = (nn.Linear(width, self.size * n) for n in (4, shared, shared))
        self.out, self.rotary = nn.Linear(width, width), rotary
        self.bias = nn.Parameter(torch.zeros(4, 12, 12)) if relative else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.rotary:
            angles = torch.arange(12, device=x.device, dtype=x.dtype).unsqueeze(1) / 10
            q, k = (_rotated(t, angles) for t in (q, k))
        repeated = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeated, 1) for t in (k, v))
        scores = q @ k.mT / self.size**0.5
        if self.bias is not None:
            scores = scores + self.bias
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def _rotated(t: Tensor, angles: Tensor) -> Tensor:
    one, other = t.chunk(2, -1)
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1
    )


def without_parameters() -> Iterator[tuple[Any, ...]]:
    pointwise: tuple[nn.Module, ...] = (
        *(nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(), nn.ELU(), nn.SELU(), nn.LeakyReLU()),
        *(nn.Softplus(), nn.Hardswish(), nn.Mish(), nn.Tanh(), nn.LogSigmoid(), nn.Softmax(-1)),
        *(nn.GLU(), nn.Threshold(0.1, 0.0), nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.Softshrink()),
    )
    for layer in pointwise:
        yield f"Linear, then {type(layer).__name__}", partial(after, layer), SEQUENCE
    planar: tuple[nn.Module, ...] = (
        *(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(3)),
        *(nn.LPPool2d(2, 2), nn.FractionalMaxPool2d(2, output_size=5), nn.Dropout2d(0.2)),
        *(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear")),
        *(nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Unfold(3)),
        *(nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1), nn.ZeroPad2d(1)),
        *(nn.Softmax2d(), nn.Flatten(), nn.Upsample(size=20, mode="bicubic")),
    )
    for layer in planar:
        said = f", {layer.mode}" if isinstance(layer, nn.Upsample) else ""
        yield f"Conv2d, then {type(layer).__name__}{said}", partial(image, layer), IMAGE
    over = lambda: after(nn.Softmax(0))
    yield "Linear, then Softmax over the batch", over, VECTOR, "computes something else"
    yield "PReLU", nn.PReLU, VECTOR
    yield "PReLU, of 8 channels", lambda: nn.PReLU(8), IMAGE


def parameters() -> Iterator[tuple[Any, ...]]:
    yield "one weight in two Linear layers", _tied_layers, VECTOR
    tokens = {"tokens": TOKENS}
    yield "an Embedding and a head of one weight", TiedWords, (12,), tokens
    again = lambda s, x: s.part(s.part(x).tanh())
    yield "one Linear layer, called twice", lambda: Do(again, part=nn.Linear(16, 16)), VECTOR
    uncalled = lambda: Do(
        lambda s, x: F.linear(x, s.part.weight), part=nn.Linear(16, 8, bias=False)
    )
    yield "F.linear(x, layer.weight)", uncalled, SEQUENCE
    both = lambda s, x: s.part(x) @ s.part.weight
    yield "layer(x) @ layer.weight", lambda: Do(both, part=nn.Linear(16, 8)), SEQUENCE
    conv = lambda: Do(lambda s, x: F.conv2d(x, s.part.weight), part=nn.Conv2d(8, 4, 3, bias=False))
    yield "F.conv2d(x, layer.weight)", conv, IMAGE
    yield "x @ self.p", lambda: Do(lambda s, x: x @ s.p, p=raw(16, 8)), SEQUENCE
    yield (
        "the same, beside a Linear layer",
        lambda: _beside(lambda s, x: x @ s.p, raw(16, 16)),
        SEQUENCE,
    )
    yield (
        "einsum with self.p",
        lambda: _beside(lambda s, x: torch.einsum("bti,io->bto", x, s.p), raw(16, 16)),
        SEQUENCE,
    )
    yield "x + self.p", lambda: _beside(lambda s, x: x + s.p, raw(12, 16)), SEQUENCE
    yield "x * self.p (LayerScale)", lambda: _beside(lambda s, x: x * s.p, raw(16)), SEQUENCE
    yield (
        "x + self.p[:n]",
        lambda: _beside(lambda s, x: x + s.p[: x.shape[1]], raw(20, 16)),
        SEQUENCE,
    )
    yield (
        "x * self.p.exp() (temperature)",
        lambda: _beside(lambda s, x: x * s.p.exp(), raw()),
        SEQUENCE,
    )
    token = lambda s, x: torch.cat([s.p.expand(x.shape[0], -1, -1), x], 1)
    yield "a class token", lambda: _beside(token, raw(1, 1, 16)), SEQUENCE
    several: Callable[[], Any] = lambda: nn.ParameterList([raw(16, 16), raw(16, 16)])
    listed = lambda s, x: x @ s.p[0] @ s.p[1]
    yield "ParameterList", lambda: _beside(listed, several()), SEQUENCE
    summed = lambda s, x: x + s.p[0] + s.p[1]
    added: Callable[[], Any] = lambda: nn.ParameterList([raw(16), raw(12, 16)])
    yield "ParameterList, added", lambda: _beside(summed, added()), SEQUENCE
    by_name = lambda s, x: x @ s.p["a"] + s.p["b"]
    named: Callable[[], Any] = lambda: nn.ParameterDict({"a": raw(16, 16), "b": raw(16)})
    yield "ParameterDict", lambda: _beside(by_name, named()), SEQUENCE
    table = lambda s, x: s.head(x + s.table(torch.arange(12, device=x.device)))
    places = partial(Do, table)
    yield (
        "Embedding of positions",
        lambda: places(table=nn.Embedding(12, 16), head=nn.Linear(16, 8)),
        SEQUENCE,
    )
    yield "weight_norm", lambda: parametrizations.weight_norm(nn.Linear(16, 8)), SEQUENCE
    yield "orthogonal", lambda: parametrizations.orthogonal(nn.Linear(16, 16)), SEQUENCE
    yield (
        "spectral_norm",
        lambda: parametrizations.spectral_norm(nn.Linear(16, 8)),
        SEQUENCE,
        "A forward pass changes",
    )
    yield "Conv1D of transformers", lambda: Conv1D(8, 16), SEQUENCE
    yield "LoRA of Linear layers", LoRA, SEQUENCE
    yield "LoRA of parameters", partial(LoRA, raw=True), SEQUENCE


def _beside(function: Callable[[Any, Tensor], Any], p: Any) -> nn.Module:
    """A parameter of a network that also has a layer."""
    return Do(lambda s, x: s.head(function(s, x)), p=p, head=nn.Linear(16, 8))


def _tied_layers() -> nn.Module:
    one, other = nn.Linear(16, 16), nn.Linear(16, 16)
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


class TiedWords(nn.Module):
    """An embedding and a head of one weight, as in GPT-2."""

    def __init__(self, words: int = TOKENS, width: int = 16) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
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


def networks() -> Iterator[tuple[Any, ...]]:
    block: Callable[[], Any] = lambda: Do(
        lambda s, x: x + s.two(F.gelu(s.one(s.norm(x)))),
        norm=nn.LayerNorm(16),
        one=nn.Linear(16, 32),
        two=nn.Linear(32, 16),
    )
    yield "residual block", block, SEQUENCE
    yield (
        "checkpointed block",
        lambda: Do(lambda s, x: checkpoint(s.part, x, use_reentrant=False), part=block()),
        SEQUENCE,
    )
    gate = lambda s, x: x * s.two(F.relu(s.one(x.mean((2, 3))))).sigmoid()[:, :, None, None]
    yield (
        "squeeze and excitation",
        lambda: Do(gate, one=nn.Linear(8, 4), two=nn.Linear(4, 8)),
        IMAGE,
    )
    pooled = lambda s, x: (s.score(x).softmax(1) * x).sum(1)
    yield "attention pooling", lambda: Do(pooled, score=nn.Linear(16, 1)), SEQUENCE
    mixture = lambda s, x: (
        s.gate(x).softmax(-1).unsqueeze(-1) * torch.stack([e(x) for e in s.experts], -2)
    ).sum(-2)
    experts: Callable[[], Any] = lambda: nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
    yield (
        "mixture of experts, soft",
        lambda: Do(mixture, gate=nn.Linear(16, 3), experts=experts()),
        SEQUENCE,
    )
    yield (
        "mixture of experts, routed",
        lambda: Do(_routed, gate=nn.Linear(16, 3), experts=experts()),
        SEQUENCE,
    )
    yield (
        "output with .logits",
        lambda: Do(lambda s, x: SimpleNamespace(logits=s.part(x)), part=nn.Linear(16, 8)),
        SEQUENCE,
    )
    folded = lambda s, x: s.part(x.flatten(0, 1)).unflatten(0, (-1, 12))
    yield "Linear on positions as rows", lambda: Do(folded, part=nn.Linear(16, 8)), SEQUENCE
    yield (
        "an encoder called with names",
        lambda: Do(lambda s, x: s.part(inputs=x, mask=x > 0), part=Masked()),
        SEQUENCE,
    )
    yield "forward hook that scales", _hooked, SEQUENCE
    yield (
        "custom autograd.Function",
        lambda: Do(lambda s, x: Doubled.apply(s.part(x)), part=nn.Linear(16, 8)),
        VECTOR,
    )
    yield (
        "the same, with a rule for vmap",
        lambda: Do(lambda s, x: DoubledAnywhere.apply(s.part(x)), part=nn.Linear(16, 8)),
        VECTOR,
    )
    yield (
        "FFT layer",
        lambda: _beside(
            lambda s, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * s.p[0], n=12, dim=1), raw(1, 1)
        ),
        SEQUENCE,
    )
    scan = lambda s, x: s.out((s.one(x).sigmoid() * s.two(x)).cumsum(1))
    yield (
        "linear recurrence",
        lambda: Do(scan, one=nn.Linear(16, 8), two=nn.Linear(16, 8), out=nn.Linear(8, 8)),
        SEQUENCE,
    )
    unet = lambda s, x: s.up(
        torch.cat([x, F.interpolate(s.down(F.max_pool2d(x, 2)).relu(), scale_factor=2)], 1)
    )
    yield (
        "U-Net of one level",
        lambda: Do(unet, down=nn.Conv2d(8, 8, 3, padding=1), up=nn.Conv2d(16, 8, 3, padding=1)),
        IMAGE,
    )
    yield (
        "if x.max() > 1",
        lambda: Do(lambda s, x: s.part(x / 2 if x.max() > 1 else x), part=nn.Linear(16, 8)),
        VECTOR,
    )
    yield (
        "x - x.mean(0)",
        lambda: Do(lambda s, x: s.part(x - x.mean(0)), part=nn.Linear(16, 8)),
        VECTOR,
        "computes something else",
    )
    yield (
        "similarity to the other records",
        lambda: Do(lambda s, x: s.part(x) @ s.part(x).T, part=nn.Linear(16, 8)),
        VECTOR,
        "computes something else",
    )


def _routed(self: Any, x: Tensor) -> Any:
    """Each position by the expert of its largest score."""
    scores = self.gate(x)
    chosen, out = scores.argmax(-1), 0
    for number, expert in enumerate(self.experts):
        mask = (chosen == number).unsqueeze(-1)
        out = out + torch.where(mask, expert(x), 0.0) * scores[..., number : number + 1]
    return out


class Conv1D(nn.Module):
    """GPT-2's Linear layer in transformers, whose weight is transposed."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = raw(inputs, outputs), raw(outputs)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], -1)


class Masked(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.part(self.scale * inputs * mask.to(inputs.dtype))
        return out


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


class DoubledAnywhere(torch.autograd.Function):
    """The same, for vmap too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def usual_sizes() -> Iterator[tuple[Any, ...]]:
    """Networks of usual size, whose costs are those of training."""
    few, words = {"records": 64}, {"records": 64, "tokens": WORDS}
    texts, pictures, steps = (64, 256), (32, 16, 16), (50, 64)
    mlp = lambda: nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
    yield "multilayer perceptron, 784 to 500 to 10", mlp, (784,)
    kinds: tuple[tuple[str, Callable[[int], nn.Module]], ...] = (
        ("GroupNorm", partial(nn.GroupNorm, 8)),
        ("InstanceNorm2d", partial(nn.InstanceNorm2d, affine=True)),
    )
    for said, norm in kinds:
        yield f"two convolutions of 64 channels, {said}", partial(_convolved, norm), pictures, few
    signal = lambda: nn.Sequential(nn.Conv1d(32, 64, 5), nn.ReLU(), nn.Conv1d(64, 64, 5))
    yield "two Conv1d of 64 channels", signal, (32, 128), few
    volume = lambda: nn.Sequential(nn.Conv3d(4, 16, 3), nn.ReLU(), nn.Conv3d(16, 16, 3))
    yield "two Conv3d of 16 channels", volume, (4, 10, 10, 10), few
    for said, normal in (("LayerNorm", nn.LayerNorm), ("RMSNorm", nn.RMSNorm)):
        yield f"{said} and two Linear layers, 256 to 1,024", partial(_wide, normal), texts, few
    conv1d = lambda: nn.Sequential(Conv1D(1024, 256), nn.GELU(), Conv1D(256, 1024))
    yield "two Conv1D of transformers, 256 to 1,024", conv1d, texts, few
    folded = lambda s, x: s.part(x.flatten(0, 1)).unflatten(0, (-1, 64))
    wide: Callable[[], Any] = lambda: nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)
    )
    rows = lambda: Do(folded, part=wide())
    yield "two Linear layers on positions as rows, 256 to 1,024", rows, texts, few
    yield "attention of four Linear layers, 256 wide", partial(Attention, width=256), texts, few
    itself_only = lambda: Do(
        lambda s, x: itself(s.part, x)[0], part=nn.MultiheadAttention(256, 4, batch_first=True)
    )
    yield "MultiheadAttention, 256 wide", itself_only, texts, few
    encoder = lambda: nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    yield "TransformerEncoderLayer, 256 wide", encoder, texts, few
    yield (
        "LSTM, 128 wide, 50 steps",
        lambda: first_of(nn.LSTM(64, 128, batch_first=True)),
        steps,
        few,
    )
    yield "GRU, 128 wide, 50 steps", lambda: first_of(nn.GRU(64, 128, batch_first=True)), steps, few
    yield "LoRA of rank 8, 256 wide", partial(LoRA, 256, 8), texts, few
    tied = partial(TiedWords, WORDS, 128)
    yield "an Embedding and a head of one weight, 2,000 words", tied, (32,), words


def _convolved(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(32, 64, 3, padding=1), norm(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), norm(64), nn.ReLU()),
    )


def _wide(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


GROUPS = {
    "usual sizes": usual_sizes,
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


def _cases() -> Iterator[Case]:
    for group, rows in GROUPS.items():
        for name, build, shape, *more in rows():
            options: Any = {}
            for said in more:
                options |= said if isinstance(said, dict) else {"refused": said}
            yield Case(group, name, build, shape, **options)


CASES = tuple(_cases())
