"""Trials of a network on made-up batches: each sample as it is alone, in 32 bits or more."""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpmac_cli.dp.clipping.clipped_sum import ClippedSum
from dpmac_cli.dp.clipping.forms import choose_form
from dpmac_cli.dp.clipping.layers import Layer, find_layers, flatten_parameters
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import ModelError
from dpmac_cli.models.state import first_change

#: Layers whose random draws training deals with: they depend on no sample.
DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
#: Why 32 bits are needed.
ROUNDING = (
    "In fewer than 32 bits, rounding moves the clipped sum by more than the noise is scaled for."
)
#: Samples of most trials, and sizes of batches that networks were seen to treat in another way.
FEW, SIZES = 5, (1, 2, 8, 16, 17)


def prepared(model: nn.Module, frozen: bool) -> nn.Module:
    """Put a model into the mode in which it is run and make its dropout layers identities."""
    model = model.train(not frozen)
    for module in model.modules():
        if type(module) in DROPOUT:
            module.forward = lambda x: x  # still in training mode, which other code may look at
    return model


def made_up(samples: int, shape: tuple[int, ...]) -> Tensor:
    """Return a batch of normal numbers, float64, shape (samples, *shape), the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)


def batches(shape: tuple[int, ...], physical_batch: int | None) -> Iterator[Tensor]:
    """Yield batches that revealed networks that mix samples; of many sizes if one is given."""
    x = made_up(FEW, shape)
    by_sample = (-1, *[1] * len(shape))
    few = torch.arange(FEW, dtype=torch.float64)
    yield x * (10 ** (few - 2)).view(by_sample)  # of very different scale
    yield x.abs() * (-1) ** few.view(by_sample)  # of different sign
    dim = x.abs() / 100
    dim[-1] *= 1e5
    yield dim  # all dim and one bright, the last and the first
    yield dim.flip(0)
    yield torch.full_like(x, 0.5)
    yield torch.zeros_like(x)
    broken = x.clone()
    broken[1].view(-1)[0] = math.nan
    yield broken
    if physical_batch is not None:
        around = (physical_batch - 1, physical_batch, physical_batch + 1)
        for size in sorted({*SIZES, *around} - {0, FEW}):
            scales = torch.linspace(-2, 2, size, dtype=torch.float64)
            yield made_up(size, shape) * (10**scales).view(by_sample)


@torch.no_grad()
def check_forward(model: nn.Module, shape: tuple[int, ...], trials: Iterable[Tensor]) -> None:
    """Reject a model that mixes samples in forward passes, draws at random, or changes itself.

    Each batch is compared with three of its samples alone. The model is in float64 and
    :func:`prepared`. Raises ModelError.
    """
    before, x = copy.deepcopy(model), made_up(FEW, shape)
    seen = _watch(model, x)
    _check_state(before, model)
    again = _watch(model, x)
    if again.keys() == seen.keys() and not all(_close(again[name], seen[name]) for name in seen):
        raise ModelError(
            "The model gives another output for the same batch. If it draws at random, adding a "
            "record would move the draws of others: use nn.Dropout layers, which are supported. "
            "If it keeps something of what it has seen, that is of private records: keep nothing."
        )
    for x in trials:
        try:
            together = _watch(model, x)
        except Exception:  # user code may raise anything; check_model turns it into a ModelError
            if bool(x.isfinite().all()):
                raise
            continue  # Records are finite, so a model may reject NaN.
        for row in {0, len(x) // 2, len(x) - 1}:
            alone = _watch(model, x[row : row + 1])
            if bool(x[row].isfinite().all()):
                _check_apart(together, alone, row, len(x))
    _check_state(before, model)


def _check_state(before: nn.Module, after: nn.Module) -> None:
    changed = first_change(before, after)
    if changed is not None:
        raise ModelError(
            f"A forward pass changes {changed}: statistics of private data would be kept without "
            "noise. Switch that off (for normalisation layers, track_running_stats=False); keep "
            "nothing from one batch to the next."
        )


def _check_apart(
    together: Mapping[str, Tensor], alone: Mapping[str, Tensor], row: int, samples: int
) -> None:
    if together.keys() != alone.keys():
        raise ModelError(
            "Which layers the model uses, and how often, depends on the batch: one sample would "
            "decide it for the others. Use the same layers equally often for every batch."
        )
    for name, rows in together.items():
        if rows.ndim == 0 or len(rows) != samples:
            raise ModelError(
                f"{name} have shape {tuple(rows.shape)} for a batch of {samples}: the first "
                "dimension must be the samples, one row each. Keep other dimensions behind it."
            )
        if not _close(alone[name], rows[row : row + 1]):
            raise ModelError(
                f"{name} depend, for one sample, on the other samples of its batch or on its "
                "place among them (for example x - x.mean(0)): the model mixes samples. Make every "
                "operation work on one sample alone, in its own row."
            )


def _watch(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the logits for a batch, and the inputs of every layer with parameters of its own."""
    seen: dict[str, Tensor] = {}
    uses: Counter[str] = Counter()

    def note(name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        uses[name] += 1
        for number, value in enumerate(v for v in inputs if isinstance(v, Tensor)):
            seen[f"The inputs of layer {name} ({number}, use {uses[name]})"] = value.clone()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        seen["The logits"] = model(x)
    return seen


def _close(a: Tensor, b: Tensor, tolerance: float = 1e-9, least: float = 1.0) -> bool:
    """Return whether values differ by rounding alone, relative to the largest or to ``least``."""
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    finite = b[b.isfinite()].abs()
    size = max(least, float(finite.max())) if len(finite) else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)


@torch.enable_grad()
def check_backward(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Reject a model that mixes samples in a backward pass, or uses a weight outside of its layer.

    The model is in float64 and :func:`prepared`; its parameters are moved. Raises ModelError.
    """
    x, y = made_up(FEW, shape), torch.arange(FEW) % classes
    layers = find_layers(model, x)
    theta = flatten_parameters(layers)
    total = torch.empty_like(theta)
    ClippedSum(model, layers, len(x)).of(x, y, Metric(ball(1.0, theta)), total)
    _, together = record_uses(model, layers, x, y)
    for layer, used in zip(layers, together, strict=True):
        part = total[layer.start : layer.stop]
        choose_form(layer, used, ball=True).weighted_sum(x.new_ones(len(x)), None, part)
    for row in (slice(0, 1), slice(1, 2)):
        _, alone = record_uses(model, layers, x[row], y[row])
        for layer, many, one in zip(layers, together, alone, strict=True):
            pairs = zip(many, one, strict=True)
            if not all(_close(a.delta[row], b.delta, 1e-6, least=0.0) for a, b in pairs):
                raise ModelError(
                    f"The gradients by the outputs of layer {layer.name} depend, for one sample, "
                    "on the other samples of its batch (for example by a hook, g / g.norm(), or by "
                    "the backward of a torch.autograd.Function): the model mixes samples "
                    "backwards. Make every operation, and its gradient, work on one sample alone."
                )
    _check_whole(model, layers, total, x, y)


def _check_whole(
    model: nn.Module, layers: list[Layer], found: Tensor, x: Tensor, y: Tensor
) -> None:
    """Compare a summed gradient with that of autograd, layer by layer."""
    trained = [p.requires_grad_() for layer in layers for p in layer.parameters.values()]
    loss = cross_entropy(model(x), y, reduction="sum")
    parts = torch.autograd.grad(loss, trained, materialize_grads=True)
    whole = torch.cat([part.flatten() for part in parts])
    for layer in layers:
        part = slice(layer.start, layer.stop)
        off = float((found[part] - whole[part]).norm() / whole[part].norm().clamp(min=1e-12))
        if off > 1e-6:
            raise ModelError(
                f"The gradient of layer {layer.name} from its calls is {off:.0%} off the whole: "
                "its parameters are also used without calling it (for example F.linear(x, "
                f"self.{layer.name}.weight)). Only call it."
            )


class _FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Rejects any operation whose result has fewer than 32 bits, as under autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4:
                raise ModelError(
                    f"The model computes {func.overloadpacket.__name__} in {value.dtype}, as under "
                    f"torch.autocast. {ROUNDING} Leave out autocast and casts to half."
                )
        return result


@torch.enable_grad()
def check_precision(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Reject a network with an operation below 32 bits on its device. Raises ModelError."""
    x = made_up(1, shape).float()
    x = x.to(next(model.parameters(), x).device)
    network = copy.deepcopy(model).train()
    trained = [p for p in network.parameters() if p.requires_grad]
    with torch.random.fork_rng(), _FullPrecision():  # type: ignore[no-untyped-call]
        loss = cross_entropy(network(x), torch.zeros(1, dtype=torch.long, device=x.device))
        if loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)
