"""Named architectures, and the door that models which mix samples do not pass."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpmac_cli import factories
from dpmac_cli.architectures import resnet18, wide_resnet
from dpmac_cli.catalog import Dataset, Features
from dpmac_cli.digest import identical
from dpmac_cli.dp.layers import find_layers, flatten_parameters
from dpmac_cli.dp.mechanism import ball
from dpmac_cli.dp.per_sample import ClippedSum, Metric
from dpmac_cli.errors import DpmacError, ModelError
from dpmac_cli.faults import what_failed
from dpmac_cli.features import scattered

LOGITS = "The logits"
# Layers that compute statistics over the batch, so that one sample changes another's output.
MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)


def _linear(dataset: Dataset) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(dataset.shape), len(dataset.classes)))


def _mlp(hidden: int) -> Callable[[Dataset], nn.Module]:
    def build(dataset: Dataset) -> nn.Module:
        channels, height, width = dataset.shape
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * height * width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, len(dataset.classes)),
        )

    return build


def _cnn(dataset: Dataset) -> nn.Module:
    channels, height, width = dataset.shape
    if min(height, width) < 4:
        raise ModelError(
            f"The network cnn needs images of at least 4 by 4 pixels, and the shape of these is "
            f"{dataset.shape}. Try --model mlp."
        )

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(channels, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        *convolution(64, 64),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, len(dataset.classes)),
    )


BUILDERS: Mapping[str, Callable[[Dataset], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp(1000),
    "mlp-small": _mlp(64),
    "cnn": _cnn,
    "wrn-16-4": partial(wide_resnet, 16, 4),
    "wrn-40-4": partial(wide_resnet, 40, 4),
    "resnet18": resnet18,
}


def build_model(
    name: str,
    dataset: Dataset,
    seed: int,
    *,
    fix_norm: bool = False,
    features: Features | None = None,
    frozen: bool = False,
) -> nn.Module:
    """A freshly initialised model, checked at the door.

    Args:
        name: a key of :data:`BUILDERS`, or where a factory is: "file.py:factory".
        dataset: gives the input shape and the number of classes.
        seed: of the initial weights; touches no global generator.
        fix_norm: put group norm in the place of batch norm.
        features: that the named network takes in place of images; the model takes images.
        frozen: all of it but its last layer stays as it is, in evaluation mode.

    Raises:
        InputError: there is no such factory.
        ModelError: the factory fails, or the model mixes samples, or does not fit the data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = factories.is_factory(name)
        taken = seen_by_network(dataset, features)
        model = factories.build(name, taken) if own else BUILDERS[name](taken)
        if fix_norm:
            model, _ = factories.without_batch_norm(model)
        if features is not None:
            model = scattered(model, dataset.shape, features)
    check_model(model, dataset.shape, len(dataset.classes), frozen=frozen)
    return model


def seen_by_network(dataset: Dataset, features: Features | None) -> Dataset:
    """A data set as the named network sees it: of images, or of their features."""
    if features is None:
        return dataset
    return replace(dataset, shape=features.shape_of(dataset.shape))


def check_model(
    model: nn.Module, shape: tuple[int, ...], classes: int, *, frozen: bool = False
) -> None:
    """Refuse a model in which one sample can change what another sample computes.

    Clipping bounds what a sample does to its own gradient, so a layer that lets it into the
    gradients of others voids the guarantee. Known layers are refused by name; anything else that
    mixes is caught by changing one sample at a time and watching every layer's inputs and the
    logits, and what comes back to its outputs. Buffers and parameters that a forward pass changes
    (running statistics would be published un-noised) are refused likewise.

    Args:
        model: maps (samples, *shape) to logits, (samples, classes).
        shape: of one sample.
        classes: how many there are.
        frozen: only the last layer, a linear one, is trained. What lies before it is checked in
            evaluation mode, in which it is run: batch norm is a public constant there.

    Raises:
        ModelError: naming the layer and the remedy.
    """
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
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise ModelError(f"{name} is a sparse, quantized or meta tensor. Use a dense one.")
        if value.is_floating_point() and not bool(value.double().isfinite().all()):
            raise ModelError(f"{name} begins with NaN or infinity. Begin with finite numbers.")
    probe = copy.deepcopy(model).double().train(not frozen)
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0].mul_(20)  # an outlier shows what a maximum over the batch would hide
    try:
        _check_behaviour(probe, x, classes)
        if not frozen:
            _check_gradients(probe, x, classes)
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


@torch.no_grad()
def _check_behaviour(model: nn.Module, x: Tensor, classes: int) -> None:
    """Watch a float64 copy of the model, in the mode it is run in, at work on a random batch."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # its noise differs between batches, and depends on no sample
    state = {name: b.clone() for name, b in _state(model)}
    seen = _first_look(model, x, classes)
    _check_state(model, state)
    again = _watch(model, x)
    if again.keys() == seen.keys() and not all(_close(again[name], seen[name]) for name in seen):
        raise ModelError(
            "The model gives another output for the same batch. If it draws at random, a record "
            "more would move the draws of others: draw by nn.Dropout layers, which are dealt with. "
            "If it keeps something of what it has seen, that is of private records: keep nothing."
        )
    for name, rows in seen.items():
        if rows.ndim == 0 or len(rows) != len(x):
            raise ModelError(
                f"{name} have shape {tuple(rows.shape)} for a batch of {len(x)}: the first "
                "dimension must be the "
                "samples, one row each. Keep other dimensions behind it."
            )
    for sample in range(len(x)):
        others = torch.arange(len(x)) != sample
        moved = x.clone()
        moved[sample].mul_(-3).add_(1)
        together, alone = _watch(model, moved), _watch(model, x[sample : sample + 1])
        if not together.keys() == alone.keys() == seen.keys():
            raise ModelError(
                "Which layers the model uses, and how often, depends on the batch: one sample "
                "would decide it for the others. Use the same layers equally often for every batch."
            )
        for name, rows in together.items():
            same = _close(rows, seen[name], others) and _close(
                alone[name], seen[name][sample : sample + 1]
            )
            if not same:
                raise ModelError(
                    f"{name} depend, for one sample, on the other samples of its batch or on its "
                    "place among them (for example x - x.mean(0)): the model mixes samples. Make "
                    "every operation work on one sample alone, in its own row."
                )
    _check_state(model, state)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    changed = [name for name, b in _state(model) if not identical(b, state[name])]
    if changed:
        raise ModelError(
            f"A forward pass changes {changed[0]}: statistics of private data would be kept "
            "without noise. Switch that off (for normalisation layers, track_running_stats=False)."
        )


def _check_gradients(model: nn.Module, x: Tensor, classes: int) -> None:
    """Do with a float64 copy what training does, and see that backwards, too, samples keep apart.

    Hooks and functions with a backward of their own could mix what a forward pass does not.
    """
    layers = find_layers(model)
    theta = flatten_parameters(layers)
    clipped = ClippedSum(model, layers, len(x))
    y = torch.arange(len(x)) % classes
    clipped.of(x, y, Metric(ball(1.0, theta)), torch.empty_like(theta))
    _, together = clipped.uses(x, y)
    for sample in range(2):
        row = slice(sample, sample + 1)
        _, alone = clipped.uses(x[row], y[row])
        for layer, many, one in zip(layers, together, alone, strict=True):
            for use, by_itself in zip(many, one, strict=True):
                if not _alike(use.delta[row], by_itself.delta):
                    raise ModelError(
                        f"The gradients by the outputs of layer {layer.name} depend, for one "
                        "sample, on the other samples of its batch (for example by a hook, g / "
                        "g.norm(), or by the backward of a torch.autograd.Function): the model "
                        "mixes samples backwards. Make every operation, and its gradient, work on "
                        "one sample alone."
                    )
    clipped.close()


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether gradients differ by rounding alone, however small they are."""
    size = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else b.new_ones(())
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6 * float(size), equal_nan=True)


def _first_look(model: nn.Module, x: Tensor, classes: int) -> dict[str, Tensor]:
    """:func:`_watch`, of a model that may not fit the classes."""
    batch = f"{len(x)} samples of shape {tuple(x.shape[1:])}"
    seen = _watch(model, x)
    logits = seen[LOGITS]
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
    if not logits.is_floating_point() or not bool(logits.isfinite().any()):
        what = "NaN or infinity alone" if logits.is_floating_point() else f"{logits.dtype} numbers"
        raise ModelError(f"The model gives {what} for {batch}; real logits are wanted.")
    return seen


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


def _close(a: Tensor, b: Tensor, rows: Tensor | None = None) -> bool:
    if a.shape != b.shape:
        return False
    if rows is not None:
        a, b = a[rows], b[rows]
    return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
