"""Ways to run a validated network: on whole batches, or on each sample alone.

:func:`independence` tries to prove that samples are independent (:mod:`dpmac_cli.models.tracing`),
and that per-sample gradients follow from the calls of layers. Where either fails, each sample runs
alone, except for a network that is seen to mix samples, which is rejected.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch, Structure, map_rows
from dpmac_cli.dp.clipping.clipped_sum import ClippedChunkSum
from dpmac_cli.dp.clipping.deep_copy import duplicate
from dpmac_cli.dp.clipping.layers import Layer, find_layers, flatten_parameters
from dpmac_cli.errors import ModelError, named
from dpmac_cli.models import tracing
from dpmac_cli.models.hooks import UnprovenError, check_global_hooks, check_hooks
from dpmac_cli.models.state import first_opaque
from dpmac_cli.models.trial import Trial
from dpmac_cli.models.validation import (
    DROPOUT,
    FEW,
    ISOLATE,
    check_trial,
    explained,
    prepared,
    randomise_zeros,
    same_draws,
)

#: Reason why a network is independent across samples.
Independence = Literal["built in", "isolated", "traced"]
#: Note for a network that is run on each sample alone, with the reason.
ALONE = (
    "The network is run on each sample alone, which is slower. {} An operation across samples then "
    "sees only one."
)
#: Reason for that if tracing fails.
UNPROVEN = "It could not be proven independent across samples: {}"


def independence(
    model: nn.Module, shape: tuple[int, ...], classes: int, frozen: nn.Module | None = None
) -> tuple[Independence, str]:
    """Decide how a user-supplied classifier runs.

    The model has passed :func:`.check_model` with this shape and number of classes. ``frozen`` is
    its frozen part, if only its last layer is trained. Returns "traced" if it is proven independent
    across samples, or "isolated" and the reason in sentences.

    Raises ModelError if it cannot run on whole batches, and is seen to mix samples.
    """
    return independence_on(model, Trial.of(shape, classes), frozen)


def independence_on(
    model: nn.Module, trial: Trial, frozen: nn.Module | None = None
) -> tuple[Independence, str]:
    """Decide how a network runs on any samples: see :func:`independence`."""
    try:
        if frozen is None:
            check_global_hooks()
            _check_recorded(model, trial)
        _check_proven(model, trial, frozen)
    except ModelError as failure:
        check_trained(model, trial)
        check_unmixed(model, trial, failure)
        return "isolated", str(failure)
    except UnprovenError as failure:
        return "isolated", UNPROVEN.format(failure)
    return "traced", ""


def validated_network(
    objective: nn.Module, inputs: Structure, *, isolated: bool = False
) -> tuple[Independence, tuple[str, ...]]:
    """Validate a network that returns its own losses; return how it must run, and notes.

    Args:
        objective: maps a batch to one loss per sample, shape (samples,). It is not changed.
        inputs: structure of a sample.
        isolated: run it on each sample alone in any case.

    Raises ModelError, which names the layer and the remedy.
    """
    trial = Trial(inputs, None)
    check_trial(objective, trial, isolated=True)
    if isolated:
        return "isolated", ()
    try:
        check_trial(objective, trial)
    except ModelError as failure:
        return "isolated", (ALONE.format(str(failure).removesuffix(named(ISOLATE))),)
    kind, why = independence_on(objective, trial)
    return kind, () if kind == "traced" else (ALONE.format(why),)


def _check_proven(model: nn.Module, trial: Trial, frozen: nn.Module | None) -> None:
    """Raise UnprovenError if a network cannot be proven independent across samples."""
    probe = prepared(duplicate(frozen or model), frozen is not None)
    if (opaque := first_opaque(frozen or model)) is not None:
        raise UnprovenError(f"Its {opaque} may store information that cannot be inspected.")
    if frozen is not None:
        tracing.check_independent_forward(probe, trial.inputs)
        return
    check_hooks(model)  # copies may lack hooks
    for layer in find_layers(probe, trial.inputs.made_up(2)):
        # Its random draws could not be repeated.
        inside = [] if layer.direct else list(layer.module.modules())[1:]
        if any(isinstance(part, DROPOUT) and part.p > 0 for part in inside):
            name = layer.name or "The model"
            raise UnprovenError(f"{name} has both its own parameters and dropout layers.")
    tracing.check_independent(probe, trial)
    check_hooks(probe)  # a forward pass may have put some in


def _in_doubles(model: nn.Module) -> nn.Module:
    """Return a copy of a network for trials, in float64."""
    probe = prepared(duplicate(model).double(), frozen=False)
    randomise_zeros(probe)
    return probe


def _check_recorded(model: nn.Module, trial: Trial) -> None:
    """Raise ModelError if per-sample gradients do not follow from the calls of layers."""
    with explained(trial):
        try:
            check_gradients(_in_doubles(model), trial, FEW)
        except ModelError:
            # A dimension may have this size by chance, which would give another reason.
            check_gradients(_in_doubles(model), trial, FEW + 2)
            raise


@torch.enable_grad()
def check_gradients(model: nn.Module, trial: Trial, count: int) -> None:
    """Reject a model whose recorded gradients are not its complete gradients.

    Such a model uses a weight outside its layer. The model is in float64 and :func:`.prepared`; its
    parameters are modified. Raises ModelError.
    """
    x, y = trial.samples(count, double=True)
    layers = find_layers(model, x)
    theta = flatten_parameters(layers)
    total = torch.empty_like(theta)
    with same_draws():
        gradients = ClippedChunkSum(model, layers, loss=trial.loss).gradients(x, y, ball=True)
    for layer, form in gradients:
        form.weighted_sum(theta.new_ones(count), None, total[layer.start : layer.stop])
    trained = [p.requires_grad_() for layer in layers for p in layer.parameters.values()]
    with same_draws():
        loss = trial.loss(model(x), y).sum()
    parts = torch.autograd.grad(loss, trained, materialize_grads=True)
    whole = torch.cat([part.to_dense().flatten() for part in parts])
    for layer in layers:
        own = slice(layer.start, layer.stop)
        off = float((total[own] - whole[own]).norm() / whole[own].norm().clamp(min=1e-12))
        if off > 1e-6:
            raise _incomplete(layer)


class _IncompleteError(ModelError):
    """The calls of a layer do not give its gradient. ``mixing``: the cause if samples are mixed."""

    mixing = ""


def _incomplete(layer: Layer) -> ModelError:
    """Return why the calls of a layer do not account for its gradient, and what to do."""
    said = f"The calls of layer {layer.name} do not give its complete gradient"
    found = _IncompleteError(
        f"{said}: its parameters are also used without calling it (for example "
        f"F.linear(x, self.{layer.name}.weight)). Call the layer instead."
    )
    found.mixing = (
        f"They are mixed in or after the layer {layer.name}. For attention and recurrent layers, "
        "which work along positions, use batch_first=True."
    )
    return found


@torch.enable_grad()
def check_trained(model: nn.Module, trial: Trial) -> None:
    """Reject a network none of whose trainable parameters affects its output. Raises ModelError."""
    with explained(trial):
        probe = _in_doubles(model)
        trained = [p for p in probe.parameters() if p.requires_grad]
        x, y = trial.samples(FEW, double=True)
        with same_draws():
            loss = trial.loss(probe(x), y).sum()
        if loss.requires_grad:
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            if any(g is not None for g in found):
                return
        raise ModelError(
            "No trainable parameter affects the model's output, so nothing would be trained. Leave "
            "out detach() and torch.no_grad() in its forward."
        )


@torch.no_grad()
def check_unmixed(model: nn.Module, trial: Trial, failure: ModelError) -> None:
    """Reject a network whose output for a sample is seen to change with the others of its batch.

    The batch is replaced with copies of one of its samples. ``failure`` is the reason why the
    network cannot run on whole batches. Raises ModelError.
    """
    with explained(trial):
        x, _ = trial.samples(FEW, double=True)
        for row in (0, FEW - 1):
            alike = map_rows(partial(_all_like, row), x)
            one, other = (_output(model, batch)[row] for batch in (x, alike))
            if not torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True):
                raise ModelError(
                    "The network mixes samples: its output for a sample changes if others of the "
                    f"batch do. {getattr(failure, 'mixing', failure)}{ISOLATE}"
                )


def _all_like(row: int, rows: Tensor) -> Tensor:
    return rows[row : row + 1].expand_as(rows).clone()


def _output(model: nn.Module, batch: Batch) -> Tensor:
    """Return what a fresh copy of a network computes of a batch."""
    with same_draws():
        output: Any = _in_doubles(model)(batch)
    found: Tensor = output
    return found
