"""Model validation: reject networks in which one sample can change what another one computes.

Clipping bounds what a sample does to its own gradient, so that an operation which lets it into the
gradients of others voids the guarantee. Known layers are rejected by name, others by trying the
network on made-up batches. A trial can be passed by luck; :func:`independence` asks for a proof
(:mod:`dpmac_cli.models.tracing`), and where there is none has each sample run alone.
"""

import contextlib
import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpmac_cli.dp.clipping.clipped_sum import ClippedSum
from dpmac_cli.dp.clipping.forms import choose_form
from dpmac_cli.dp.clipping.layers import Layer, find_layers, flatten_parameters
from dpmac_cli.dp.clipping.norms import Metric
from dpmac_cli.dp.clipping.recorder import record_uses
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.errors import DpmacError, ModelError
from dpmac_cli.models.dependence import UnprovenError
from dpmac_cli.models.features import FrozenFeatures
from dpmac_cli.models.tracing import check_hooks, check_independent, check_independent_forward
from dpmac_cli.storage.digest import identical
from dpmac_cli.torch_errors import what_failed

#: How it is known that a network keeps samples apart, from the surest to the least sure.
Independence = Literal["built in", "isolated", "traced", "probed"]

LOGITS = "The logits"
ALONE = "Or add --isolate, which runs the network on each sample alone."
# Layers that compute statistics over the batch, so that one sample changes another's output.
MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)
#: Their draws are random in training, and depend on no sample.
DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
#: Samples of most trials, and sizes of batches that networks were seen to treat in another way.
FEW, SIZES = 5, (1, 2, 8, 16, 17)


def check_model(
    model: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    *,
    frozen: bool = False,
    isolated: bool = False,
    built_in: bool = False,
    physical_batch: int | None = None,
) -> None:
    """Reject a model that mixes samples, keeps something of them, or cannot be trained.

    Args:
        model: maps (samples, *shape) to logits, (samples, classes). It is not changed.
        shape: of one sample.
        classes: how many there are.
        frozen: only the last layer, a linear one, is trained. What lies before it is checked in
            evaluation mode, in which it is run: batch norm is a public constant there.
        isolated: each sample is run alone, so that mixing need not be looked for.
        built_in: it is one of dpmac's own, of which a single trial is enough.
        physical_batch: samples that are worked on at a time; where given, batches of this and
            other sizes are tried, which takes longer.

    Raises:
        ModelError: naming the layer and the remedy.
    """
    _check_layers(model, frozen)
    try:
        probe = copy.deepcopy(model)
    except (Exception, SystemExit) as failure:
        raise ModelError(
            f"The model cannot be copied: {what_failed(failure)} Copies are made to validate it. "
            "Instead of torch.nn.utils.weight_norm use torch.nn.utils.parametrizations.weight_norm."
        ) from failure
    try:
        single, probe = copy.deepcopy(probe), _prepared(probe, frozen).double()
        scored = copy.deepcopy(probe).eval()
        with torch.no_grad():
            _check_output(probe, _batch(1 if isolated else FEW, shape), classes)
            _check_output(scored, _batch(FEW, shape), classes, scored=True)
        if not frozen and not built_in:
            check_precision(single, shape, classes)
        if not isolated:
            trials = itertools.islice(_trials(shape, physical_batch), 1 if built_in else None)
            with _remedied():
                with torch.no_grad():
                    _check_behaviour(probe, shape, trials)
                if not frozen and not built_in:
                    _check_gradients(probe, *_samples(FEW, shape, classes))
    except (Exception, SystemExit) as failure:
        # Of these samples, which are no records, what it says may be told.
        reason = failure.__cause__ if isinstance(failure, DpmacError) else failure
        if reason is None:
            raise
        raise ModelError(
            f"The model, given samples of shape {shape} in float64, failed: "
            f"{what_failed(reason)} It must take any number of such samples, one alone too; what "
            "it makes by itself takes its dtype and device from them (x.new_zeros)."
        ) from failure


@contextlib.contextmanager
def _remedied() -> Iterator[None]:
    """Have every refusal name the remedy that takes what treats samples in an order of its own."""
    try:
        yield
    except ModelError as failure:
        if ALONE in str(failure) or failure.__cause__ is not None:
            raise
        raise ModelError(f"{failure} {ALONE}") from None


def independence(
    model: nn.Module, shape: tuple[int, ...], classes: int, frozen: nn.Module | None = None
) -> tuple[Independence, str]:
    """Prove that a user-supplied network keeps samples apart, or find that it must be isolated.

    Args:
        model: of :func:`check_model`, which it has passed.
        shape, classes: as there.
        frozen: the part of it that is not trained, if only its last layer is.

    Returns:
        "traced" or "isolated", and in the latter case why, as a sentence.
    """
    probe = _prepared(copy.deepcopy(frozen or model), frozen is not None)
    try:
        if (opaque := next(_opaque(frozen or model, "", set()), None)) is not None:
            raise UnprovenError(f"Its {opaque} could keep something that cannot be looked at.")
        if frozen is None:
            check_hooks(model)  # which copies may lack
            _check_recordable(model)
            check_independent(probe, shape, classes)
        else:
            check_independent_forward(probe, shape)
    except UnprovenError as failure:
        return "isolated", str(failure)
    return "traced", ""


def _opaque(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Names of objects within another whose state cannot be compared, such as iterators."""
    if id(value) in seen:
        return
    seen.add(id(value))
    known = isinstance(value, _COMPARED) or callable(value) or hasattr(value, "__dict__")
    if not known:
        yield name
    for key, part in _parts(value).items():
        yield from _opaque(part, f"{name}.{key}".lstrip("."), seen)


def _check_recordable(model: nn.Module) -> None:
    """Find layers whose random draws could not be repeated for their gradients."""
    for layer in find_layers(model):
        inside = list(layer.module.modules())[1:]
        if any(isinstance(module, DROPOUT) and module.p > 0 for module in inside):
            raise UnprovenError(
                f"{layer.name or 'The model'} holds parameters itself, and dropout layers too."
            )


def _prepared(model: nn.Module, frozen: bool) -> nn.Module:
    """A model in the mode in which it is run, its dropout layers being identities."""
    model = model.train(not frozen)
    for module in model.modules():
        if type(module) in DROPOUT:
            module.forward = _identity  # still in training mode, which other code may look at
    return model


def _identity(x: Tensor) -> Tensor:
    return x


def check_precision(model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Reject a network that computes in fewer than 32 bits on the device on which it lies.

    Raises:
        ModelError: naming the operation.
    """
    device = next(model.parameters(), torch.empty(0)).device
    x, y = (tensor.to(device) for tensor in _samples(1, shape, classes))
    if isinstance(model, FrozenFeatures):  # which may round: they are computed once
        x, model = model.features(x).to(x.dtype), model.head
    network = copy.deepcopy(model).train()
    with _FullPrecision():  # type: ignore[no-untyped-call]
        _gradients_of_loss(network, x, y)


def _check_layers(model: nn.Module, frozen: bool) -> None:
    """Reject what is known by name, and parameters that cannot be trained."""
    for name, module in model.named_modules():
        if isinstance(module, MIXING_LAYERS) and not frozen:
            raise ModelError(
                f"The layer {name} is a {type(module).__name__}, which mixes the samples of a "
                "batch and keeps statistics of them without noise. Use "
                "nn.GroupNorm(groups, channels) instead, or have that done by --fix-norm."
            )
        if getattr(module, "max_norm", None) is not None or getattr(
            module, "scale_grad_by_freq", False
        ):
            raise ModelError(
                f"The layer {name} changes its weights, or its gradients, by what is in the batch. "
                "Leave out max_norm and scale_grad_by_freq."
            )
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise ModelError(
                f"The shape of {name} is not known before the network is used. Give the layer's "
                "sizes, or call the network once on zeros in its factory."
            )
        exact = value.is_floating_point() and value.itemsize >= 4
        if value.requires_grad and not exact and not frozen:
            raise ModelError(
                f"The parameter {name} is {value.dtype}. In fewer than 32 bits, rounding moves the "
                "clipped sum by more than the noise is scaled for. Convert the network in its "
                "factory (.float()), or add --to-float32."
            )
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise ModelError(f"{name} is a sparse, quantized or meta tensor. Use a dense one.")
        if value.is_floating_point() and not bool(value.double().isfinite().all()):
            raise ModelError(f"{name} begins with NaN or infinity. Begin with finite numbers.")


class _FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Rejects any operation whose result has fewer than 32 bits, as under autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4:
                raise ModelError(
                    f"The model computes {func.overloadpacket.__name__} in {value.dtype}, as under "
                    "torch.autocast. In fewer than 32 bits, rounding moves the clipped sum by more "
                    "than the noise is scaled for. Leave out autocast and casts to half."
                )
        return result


@torch.enable_grad()
def _gradients_of_loss(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Run a model forwards and backwards."""
    with torch.random.fork_rng():
        loss = cross_entropy(model(x), y)
        trained = [p for p in model.parameters() if p.requires_grad]
        if loss.requires_grad and trained:
            torch.autograd.grad(loss, trained, allow_unused=True)


def _batch(samples: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, *shape, generator=generator, dtype=dtype)


def _samples(samples: int, shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """Inputs in float32 and labels."""
    return _batch(samples, shape, torch.float32), torch.arange(samples) % classes


def _trials(shape: tuple[int, ...], physical_batch: int | None) -> Iterator[Tensor]:
    """Batches in which networks that mix samples were seen to give themselves away."""
    x = _batch(FEW, shape)
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
            yield _batch(size, shape) * (10**scales).view(by_sample)


def _check_behaviour(model: nn.Module, shape: tuple[int, ...], trials: Iterable[Tensor]) -> None:
    """Watch a float64 copy of the model, in the mode it is run in, on made-up batches."""
    before = copy.deepcopy(model)
    seen = _watch(model, _batch(FEW, shape))
    _check_state(before, model)
    _check_repeats(seen, _watch(model, _batch(FEW, shape)))
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


def _check_repeats(seen: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    if again.keys() == seen.keys() and not all(_close(again[name], seen[name]) for name in seen):
        raise ModelError(
            "The model gives another output for the same batch. If it draws at random, adding a "
            "record would move the draws of others: draw by nn.Dropout layers, which are dealt "
            "with. If it keeps something of what it has seen, that is of private records: keep "
            f"nothing. {ALONE}"
        )


def _check_apart(
    together: Mapping[str, Tensor], alone: Mapping[str, Tensor], row: int, samples: int
) -> None:
    """Reject a model in which a sample is treated otherwise in a batch than alone."""
    if together.keys() != alone.keys():
        raise ModelError(
            "Which layers the model uses, and how often, depends on the batch: one sample would "
            f"decide it for the others. Use the same layers equally often for every batch. {ALONE}"
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
                f"operation work on one sample alone, in its own row. {ALONE}"
            )


def _check_state(before: nn.Module, after: nn.Module) -> None:
    changed = next(_changes(before, after, "", set()), None)
    if changed is not None:
        raise ModelError(
            f"A forward pass changes {changed}: statistics of private data would be kept without "
            "noise. Switch that off (for normalisation layers, track_running_stats=False); keep "
            f"nothing from one batch to the next. {ALONE}"
        )


def _changes(before: Any, after: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Names of what differs between an object and a copy that was made of it before."""
    if id(after) in seen:
        return
    seen.add(id(after))
    was, found = _parts(before), _parts(after)
    if type(before) is not type(after) or was.keys() != found.keys() or not _equal(before, after):
        yield name
    else:
        for key, value in found.items():
            yield from _changes(was[key], value, f"{name}.{key}".lstrip("."), seen)


def _parts(value: Any) -> Mapping[Any, Any]:
    """What an object consists of; nothing for what is compared as a whole."""
    if isinstance(value, nn.Module):
        own = {key: part for key, part in vars(value).items() if key not in _OF_TORCH}
        if type(value).get_extra_state is not nn.Module.get_extra_state:
            own["get_extra_state()"] = value.get_extra_state()
        return {**value._parameters, **value._buffers, **value._modules, **own}
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    whole = isinstance(value, (Tensor, np.ndarray, torch.Generator, type)) or callable(value)
    return {} if whole else getattr(value, "__dict__", {})


def _equal(before: Any, after: Any) -> bool:
    """Whether two values of one type are equal, as far as they do not consist of parts."""
    if isinstance(after, Tensor):
        return identical(before, after)
    if isinstance(after, torch.Generator):
        return torch.equal(before.get_state(), after.get_state())
    if isinstance(after, np.ndarray):
        return np.array_equal(before, after)
    if isinstance(after, (np.generic, str, bytes, int, float, complex, set)):
        return repr(before) == repr(after)  # NaN, too, is as it was
    return True


#: Kinds of values whose state is all that comparing them looks at.
_COMPARED = (
    *(type(None), bool, int, float, complex, str, bytes, set, frozenset, list, tuple, dict, deque),
    *(Tensor, np.ndarray, np.generic, torch.Generator, torch.dtype, torch.device, Enum, PurePath),
)
#: What torch keeps in every module.
_OF_TORCH = vars(nn.Module()).keys()


@torch.enable_grad()
def _check_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Do with a float64 copy what training does, and see that backwards, too, samples keep apart.

    Hooks and functions with a backward of their own could mix what a forward pass does not. And
    what a layer's calls leave must be its whole gradient.
    """
    x = x.to(torch.float64)
    layers = find_layers(model)
    theta = flatten_parameters(layers)
    total = torch.empty_like(theta)
    ClippedSum(model, layers, len(x)).of(x, y, Metric(ball(1.0, theta)), total)
    _, together = record_uses(model, layers, x, y)
    for layer, used in zip(layers, together, strict=True):
        part = total[layer.start : layer.stop]
        choose_form(layer, used).weighted_sum(x.new_ones(len(x)), None, part)
    for sample in range(2):
        row = slice(sample, sample + 1)
        _, alone = record_uses(model, layers, x[row], y[row])
        for layer, many, one in zip(layers, together, alone, strict=True):
            for use, by_itself in zip(many, one, strict=True):
                if not _alike(use.delta[row], by_itself.delta):
                    raise ModelError(
                        f"The gradients by the outputs of layer {layer.name} depend, for one "
                        "sample, on the other samples of its batch (for example by a hook, g / "
                        "g.norm(), or by the backward of a torch.autograd.Function): the model "
                        "mixes samples backwards. Make every operation, and its gradient, work on "
                        f"one sample alone. {ALONE}"
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
                f"self.{layer.name}.weight)). Only call it. {ALONE}"
            )


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether gradients differ by rounding alone, however small they are."""
    size = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else b.new_ones(())
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(size), equal_nan=True)


def _check_output(model: nn.Module, x: Tensor, classes: int, *, scored: bool = False) -> None:
    """Reject a model whose output does not fit the classes."""
    batch = f"{len(x)} samples of shape {tuple(x.shape[1:])}"
    logits: Any = model(x)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"The model gives a {type(logits).__name__} for {batch}; one tensor of logits, of "
            f"shape (samples, {classes}), is wanted."
        )
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise ModelError(
            f"The model gives {tuple(logits.shape)} for {batch}; logits of shape (samples, "
            f"{classes}) are wanted, a column for each of the {classes} classes."
        )
    if scored:  # what is no number counts as wrong there
        return
    if not logits.is_floating_point() or not bool(logits.isfinite().any()):
        what = "NaN or infinity alone" if logits.is_floating_point() else f"{logits.dtype} numbers"
        raise ModelError(f"The model gives {what} for {batch}; real logits are wanted.")


def _watch(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The logits for a batch, and what every layer with parameters of its own was given."""
    seen: dict[str, Tensor] = {}

    def watcher(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        uses = itertools.count(1)

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            del module
            use = next(uses)
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            for number, value in enumerate(tensors):
                seen[f"The inputs of layer {name} ({number}, use {use})"] = value.clone()

        return note

    hooks = [
        module.register_forward_pre_hook(watcher(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        seen[LOGITS] = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether values differ by rounding alone."""
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    size = max(1.0, float(b[b.isfinite()].abs().max())) if bool(b.isfinite().any()) else 1.0
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9 * size, equal_nan=True)
