"""Model validation: reject networks in which one sample can change what another one computes.

Clipping bounds what a sample does to its own gradient. An operation that mixes samples lets it into
the gradients of others and voids the guarantee. Known layers are rejected by name, others by trials
on made-up batches. A trial can be passed by luck; :func:`independence` asks for a proof
(:mod:`dpmac_cli.models.tracing`) and otherwise has each sample run alone.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpmac_cli.dp.clipping.layers import find_layers
from dpmac_cli.errors import DpmacError, ModelError
from dpmac_cli.models import trials
from dpmac_cli.models.dependence import UnprovenError
from dpmac_cli.models.state import first_opaque
from dpmac_cli.models.tracing import check_hooks, check_independent, check_independent_forward
from dpmac_cli.torch_errors import what_failed

#: How a network is known to be independent across samples, from the surest to the least sure.
Independence = Literal["built in", "isolated", "traced", "probed"]

# Layers that compute statistics over the batch, so that one sample changes another's output.
MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)


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
        shape, classes: shape of one sample, number of classes.
        frozen: only the last layer, a linear one, is trained. The rest is checked in evaluation
            mode, in which it is run: batch norm is a public constant there.
        isolated: each sample is run alone, so mixing does not matter.
        built_in: the network is dpmac's own, for which a single trial is enough.
        physical_batch: samples that are run at a time; if given, batches of many sizes are tried.

    Raises:
        ModelError: naming the layer and the remedy.
    """
    _check_layers(model, frozen)
    _check_values(model, frozen)
    try:
        single = copy.deepcopy(model)
    except (Exception, SystemExit) as failure:
        raise ModelError(
            f"The model cannot be copied: {what_failed(failure)} Copies are made to validate it. "
            "Instead of torch.nn.utils.weight_norm use torch.nn.utils.parametrizations.weight_norm."
        ) from failure
    with _explained(shape):
        probe = trials.prepared(copy.deepcopy(single), frozen).double()
        scored = copy.deepcopy(probe).eval()
        with torch.no_grad():
            _check_output(probe, trials.made_up(1 if isolated else trials.FEW, shape), classes)
            _check_output(scored, trials.made_up(trials.FEW, shape), classes, scored=True)
        if not frozen and not built_in:
            trials.check_precision(single, shape)
    if isolated:
        return
    remedy = " Or add --isolate, which runs the network on each sample alone."
    with _explained(shape, remedy):
        batches = trials.batches(shape, physical_batch)
        trials.check_forward(probe, shape, [next(batches)] if built_in else batches)
        if not frozen and not built_in:
            trials.check_backward(probe, shape, classes)


def independence(
    model: nn.Module, shape: tuple[int, ...], classes: int, frozen: nn.Module | None = None
) -> tuple[Independence, str]:
    """Prove that a user-supplied network is independent across samples, or return why not.

    Args:
        model: has passed :func:`check_model`, with this shape and number of classes.
        frozen: the part of it that is not trained, if only its last layer is.

    Returns:
        "traced" or "isolated", and in the latter case why, as a sentence.
    """
    probe = trials.prepared(copy.deepcopy(frozen or model), frozen is not None)
    try:
        if (opaque := first_opaque(frozen or model)) is not None:
            raise UnprovenError(f"Its {opaque} could keep something that cannot be looked at.")
        if frozen is None:
            check_hooks(model)  # which copies may lack
            for layer in find_layers(probe, torch.zeros(2, *shape)):
                # Random draws in it could not be repeated.
                inside = [] if layer.direct else list(layer.module.modules())[1:]
                if any(isinstance(part, trials.DROPOUT) and part.p > 0 for part in inside):
                    name = layer.name or "The model"
                    raise UnprovenError(f"{name} holds parameters itself, and dropout layers too.")
            check_independent(probe, shape, classes)
        else:
            check_independent_forward(probe, shape)
    except UnprovenError as failure:
        return "isolated", str(failure)
    return "traced", ""


@contextlib.contextmanager
def _explained(shape: tuple[int, ...], remedy: str = "") -> Iterator[None]:
    """Turn what user code raises on made-up samples, which are not private, into a ModelError.

    Rejections get the remedy for a network that treats samples in its own order.
    """
    try:
        yield
    except (Exception, SystemExit) as failure:
        reason = failure.__cause__ if isinstance(failure, DpmacError) else failure
        if reason is None:
            raise ModelError(f"{failure}{remedy}") from None
        raise ModelError(
            f"The model, given samples of shape {shape} in float64, failed: "
            f"{what_failed(reason)} It must take any number of such samples, one alone too; what "
            "it makes by itself takes its dtype and device from them (x.new_zeros)."
        ) from failure


def _check_layers(model: nn.Module, frozen: bool) -> None:
    """Reject layers that are known to mix samples."""
    for name, module in model.named_modules():
        if isinstance(module, MIXING_LAYERS) and not frozen:
            raise ModelError(
                f"The layer {name} is a {type(module).__name__}, which mixes the samples of a "
                "batch and keeps statistics of them without noise. Use "
                "nn.GroupNorm(groups, channels) instead, or have that done by --fix-norm."
            )
        bounded = getattr(module, "max_norm", None) is not None
        if bounded or getattr(module, "scale_grad_by_freq", False):
            raise ModelError(
                f"The layer {name} changes its weights, or its gradients, by what is in the batch. "
                "Leave out max_norm and scale_grad_by_freq."
            )


def _check_values(model: nn.Module, frozen: bool) -> None:
    """Reject parameters and buffers that cannot be trained or published."""
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise ModelError(
                f"The shape of {name} is not known before the network is used. Give the layer's "
                "sizes, or call the network once on zeros in its factory."
            )
        exact = value.is_floating_point() and value.itemsize >= 4
        if value.requires_grad and not exact and not frozen:
            raise ModelError(
                f"The parameter {name} is {value.dtype}. {trials.ROUNDING} Convert the network "
                "in its factory (.float()), or add --to-float32."
            )
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise ModelError(f"{name} is a sparse, quantized or meta tensor. Use a dense one.")
        if value.is_floating_point() and not bool(value.double().isfinite().all()):
            raise ModelError(f"{name} begins with NaN or infinity. Begin with finite numbers.")


def _check_output(model: nn.Module, x: Tensor, classes: int, *, scored: bool = False) -> None:
    """Reject a model whose output does not fit the classes; NaN only counts as wrong if scored."""
    logits: Any = model(x)
    if not isinstance(logits, Tensor):
        found = f"a {type(logits).__name__}"
    elif logits.ndim != 2 or logits.shape[1] != classes:
        found = f"{tuple(logits.shape)}"
    elif not logits.is_floating_point() and not scored:
        found = f"{logits.dtype} numbers"
    elif not bool(logits.isfinite().any()) and not scored:
        found = "NaN or infinity alone"
    else:
        return
    raise ModelError(
        f"The model gives {found} for {len(x)} samples of shape {tuple(x.shape[1:])}. Return one "
        f"tensor of real logits, of shape (samples, {classes}): a column for each of the {classes} "
        "classes."
    )
