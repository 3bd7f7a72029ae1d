"""Comparison of a batch with its samples alone: a network must compute the same for both.

Training sees one sample at a time, so a network that computes something else for a batch would be
trained on other values than its author meant. Samples are made up.
"""

import contextlib
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from dpmac_cli.dp.clipping.batches import Batch, map_rows, tensors_in
from dpmac_cli.dp.clipping.one_sample import SINGLE
from dpmac_cli.dp.clipping.vmap_support import constant_draws
from dpmac_cli.errors import ModelError
from dpmac_cli.models.trial_samples import Trial

#: Number of samples in a trial.
FEW = 5
#: Message for a loss that returns a number for a batch that no step can train on.
NOT_THE_MEAN = (
    "The loss returns one number for a batch, which is not the mean of the losses that its samples "
    "have alone, and dpmac trains on each sample alone. Return one real loss per sample, a tensor "
    "of shape (samples,): cross_entropy(output, target, reduction='none'), or for tokens, "
    "(losses * mask).sum(1). If the loss of each sample alone is what you mean, add {isolate=True}."
)


@torch.no_grad()
def check_alone(model: nn.Module, trial: Trial) -> None:
    """Reject a model that computes something else for a batch than for one sample at a time.

    In training it would see one at a time. Outputs are compared by row. A loss that returns one
    number for a batch has no rows, so it is compared with the mean of the losses alone.

    Args:
        model: a copy of the network, without dropout (:func:`.prepared`), in float64 where that is
            possible.
        trial: made-up samples.

    Raises:
        ModelError: names the first part whose values differ, if there is one.
    """
    in_float32 = trial.inputs.keep_dtype
    batch = trial.samples(FEW)
    values_of_batch = _values_by_part(model, batch)
    _, outputs_of_batch = values_of_batch[-1]
    reduced = isinstance(outputs_of_batch, Tensor) and outputs_of_batch.ndim == 0
    losses = list[Tensor]()
    mixing_part: str | None = None
    for row in range(FEW):
        values = _values_by_part(model, map_rows(itemgetter(slice(row, row + 1)), batch))
        _, outputs = values[-1]
        if reduced:
            losses.append(outputs.reshape(()).double())
        elif not _differ(outputs_of_batch, outputs, row, in_float32):
            continue
        if mixing_part is None:
            mixing_part = _first_difference(values_of_batch, values, row, in_float32)
        if not reduced:
            raise _mixed(model, mixing_part or "")
    if reduced and not _is_mean(outputs_of_batch.double(), torch.stack(losses), in_float32):
        raise ModelError(NOT_THE_MEAN) if mixing_part is None else _mixed(model, mixing_part)


def _is_mean(of_batch: Tensor, losses: Tensor, in_float32: bool) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its samples.

    A step averages the gradients of such losses, so it trains on what the loss of a batch means.

    Args:
        of_batch: one loss for a batch, shape ().
        losses: loss of each of its samples alone, shape (samples,).
        in_float32: whether they are not computed in float64.
    """
    relative, absolute = _rounding(losses, in_float32)
    return torch.allclose(of_batch, losses.mean(), relative, absolute, equal_nan=True)


def _first_difference(
    of_batch: list[tuple[str, Any]], alone: list[tuple[str, Any]], row: int, in_float32: bool
) -> str | None:
    """Return the name of the first part that computes something else for a row of a batch.

    Args:
        of_batch, alone: values of the batch and of the row alone, see :func:`_values_by_part`.
        row: number of the row.
        in_float32: whether they are not computed in float64.

    Returns:
        "" for the model itself; None if no values of the same shape differ.
    """
    for (name, values), (_, values_alone) in zip(of_batch, alone, strict=False):
        if _differ(values, values_alone, row, in_float32):
            return name
    return None


def _values_by_part(model: nn.Module, x: Batch) -> list[tuple[str, Any]]:
    """Return what modules compute in order: the inputs of a part are computed by its parent.

    Args:
        model: the model.
        x: a batch of samples.

    Returns:
        Names of modules and values: inputs as (arguments, keywords) by the name of the parent, and
        outputs by the name of the module. The last one is the output of the model.
    """
    values: list[tuple[str, Any]] = []

    def entered(name: str, _: nn.Module, arguments: Any, keywords: Any) -> None:
        parent = name.rpartition(".")[0]
        values.append((parent, (arguments, keywords)))

    def ended(name: str, _: nn.Module, __: Any, outputs: Any) -> None:
        values.append((name, outputs))

    with contextlib.ExitStack() as hooks, constant_draws():
        for name, module in model.named_modules():
            for hook in (
                module.register_forward_pre_hook(partial(entered, name), with_kwargs=True),
                module.register_forward_hook(partial(ended, name)),
            ):
                hooks.callback(hook.remove)
        model(x)
    return values


def _differ(batch: Any, one: Any, row: int, in_float32: bool) -> bool:
    """Return whether values of a row of a batch are others alone, by more than rounding.

    Args:
        batch: any nesting of tensors. Those without one row per sample are not compared.
        one: the same of the row alone.
        row: number of the row.
        in_float32: whether they are not computed in float64.
    """
    for of_batch, alone in zip(tensors_in(batch), tensors_in(one), strict=False):
        if of_batch.shape[:1] != (FEW,):
            continue
        of_row = of_batch[row : row + 1]
        if of_row.shape != alone.shape:
            continue
        relative, absolute = _rounding(of_batch, in_float32)
        if not torch.allclose(of_row.double(), alone.double(), relative, absolute, equal_nan=True):
            return True
    return False


def _rounding(values: Tensor, in_float32: bool) -> tuple[float, float]:
    """Return how much rounding may change values, relative to each, and in all."""
    if not in_float32:
        return 1e-6, 1e-9
    if not values.numel():
        return SINGLE, 0.0
    largest = values.double().abs().nan_to_num(posinf=0).max()
    return SINGLE, SINGLE * float(largest)


def _mixed(model: nn.Module, name: str) -> ModelError:
    """Return why a model is rejected whose results for one sample depend on others.

    Args:
        model: the model.
        name: name of the part that computes something else; "" for the model itself.
    """
    part = model.get_submodule(name)
    where = f"The {type(part).__name__} {name}".rstrip() if name else "The network or its loss"
    layer = isinstance(part, nn.RNNBase | nn.MultiheadAttention)
    remedy = (
        "Use batch_first=True, so that samples are in the first dimension"
        if layer
        else "Remove operations across samples, such as x.mean(0), F.batch_norm or a loss of pairs"
    )
    return ModelError(
        f"{where} computes something else for a batch than for one sample at a time, and "
        "dpmac trains on each sample alone, which bounds its influence. So it would be trained on "
        f"other values than you meant. {remedy}. If you mean it, add {{isolate=True}}."
    )
