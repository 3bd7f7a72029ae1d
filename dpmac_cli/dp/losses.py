"""Per-sample losses: maps from outputs and labels of a batch to one loss per sample.

In training, each is called with the outputs of one sample at a time. No loss has the weights of
records or classes in it, because clipping would take them away: :mod:`dpmac_cli.dp.weights`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    cross_entropy,
    huber_loss,
    l1_loss,
    mse_loss,
)

from dpmac_cli.dp.torch_errors import (
    DIFFERENTIATED,
    HELD_DTYPE,
    differentiates,
    mixes_dtypes,
    what_failed,
)
from dpmac_cli.dp.weights import (
    Weigh,
    WeightsApart,
    bounded,
    of_classes,
    of_quantile,
    relative,
)
from dpmac_cli.errors import ModelError
from dpmac_cli.tasks.task import FUNCTIONS

#: Takes outputs, shape (samples, outputs), and targets, shape (samples,) for classes, otherwise
#: like the outputs. Returns shape (samples,).
Loss = Callable[[Tensor, Tensor], Tensor]
#: Exponent of the focal loss, as in its paper.
FOCUS = 2.0

#: Error above which the Huber loss is linear; targets are in [-1, 1].
HUBER = 0.1

#: Cross-entropy of logits, shape (samples, classes), and labels, shape (samples,).
plain: Loss = partial(cross_entropy, reduction="none")


def returned(outputs: Tensor, _: Any) -> Tensor:
    """Return the outputs: the loss of a network that computes its own losses.

    Args:
        outputs: one loss per sample, shape (samples,).
        _: labels, which are not used: the network has seen them.
    """
    return outputs


def _next_token(outputs: Tensor, _: Tensor) -> Tensor:
    """Return the losses that are the only outputs of a language model, shape (samples,)."""
    return outputs[:, 0]


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return (output - target)^2, in the shape of both."""
    return mse_loss(outputs, targets, reduction="none")


def _huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return error^2 / (2 HUBER) for errors up to HUBER, and |error| - HUBER / 2 above."""
    return huber_loss(outputs, targets, reduction="none", delta=HUBER) / HUBER


def _absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return |output - target|, in the shape of both."""
    return l1_loss(outputs, targets, reduction="none")


#: Losses of numbers, one value per output. The level of a quantile acts by weights after clipping.
OF_NUMBERS: Mapping[str, Loss] = MappingProxyType(
    {"mse": _squared, "huber": _huber, "quantile": _absolute}
)


def _of_numbers(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample's number, shape (samples,).

    Args:
        loss: loss per number, such as :func:`_squared`.
        outputs: shape (samples, 1).
        targets: shape (samples, 1).

    Raises:
        ModelError: targets have another shape: torch would compare each sample with all others.
    """
    if outputs.shape != targets.shape:
        raise ModelError(
            f"The network's outputs have shape {tuple(outputs.shape)}, but the numbers to predict "
            f"{tuple(targets.shape)}. Both need shape (samples, 1)."
        )
    losses = loss(outputs, targets.to(outputs.dtype))
    return losses.squeeze(1)


def build_loss(name: str, smoothing: float = 0.0) -> Loss:
    """Return the per-sample loss of a name, without weights of records: see :func:`build_weights`.

    Args:
        name: a loss of a registered task; "cross-entropy"; "focal" (Lin et al. 2017, arXiv
            1708.02002); for targets scaled to [-1, 1] "mse", "huber", which is linear for errors
            above :data:`HUBER`, or "quantile:Q", the absolute error, of which weights make the
            Q-quantile; "next-token", which a language model computes itself.
        smoothing: label smoothing (Szegedy et al. 2016, arXiv 1512.00567), in [0, 1); used by
            "cross-entropy" and "focal" alone.

    Returns:
        A function of outputs and targets that returns one loss per sample, shape (samples,). Any
        other name gives the cross-entropy.

    Raises:
        ModelError: in a call, for numbers to predict whose shape is not that of the outputs.

    Example:
        >>> loss = build_loss("mse")
        >>> loss(torch.tensor([[0.5], [1.0]]), torch.tensor([[0.0], [1.0]]))
        tensor([0.2500, 0.0000])
    """
    kind, _, _ = name.partition(":")
    if kind in FUNCTIONS:
        return FUNCTIONS[kind]
    if kind == "next-token":
        return _next_token
    if kind in OF_NUMBERS:
        return partial(_of_numbers, OF_NUMBERS[kind])

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(outputs, labels, label_smoothing=smoothing, reduction="none")
        if name == "focal":
            probability = torch.exp(-plain(outputs, labels))  # of the label
            losses = (1 - probability) ** FOCUS * losses
        return losses

    return loss


def build_weights(name: str, weights: Sequence[float], device: torch.device) -> Weigh | None:
    """Return the weights of records that belong to a loss of :func:`build_loss`.

    Args:
        name: name of the loss.
        weights: public weights of the classes, above 0; () for equal weights. Not used for
            "quantile:Q", whose weights follow from Q.
        device: device of the labels.

    Returns:
        A function that returns one weight per row: see :data:`~dpmac_cli.dp.weights.Weigh`; None
        if all weights are 1.

    Example:
        >>> build_weights("mse", (), torch.device("cpu")) is None
        True
    """
    kind, _, level = name.partition(":")
    if kind == "quantile":
        return of_quantile(float(level))
    return of_classes(weights, device) if weights else None


def check_loss(loss: Loss, outputs: Tensor, labels: Tensor) -> None:
    """Reject a user-supplied loss that is not a function of one sample, by trying it on examples.

    In training it is called with the outputs of one sample and its label. Here, too; and once with
    the whole batch, where it may also fail.

    Args:
        loss: the loss.
        outputs: made-up outputs, shape (samples, outputs). Not private: messages may quote them.
        labels: made-up labels, shape (samples, ...).

    Raises:
        ModelError: the loss fails, does not return one finite number per sample, or returns other
            values for a batch, or for the same sample again.
    """
    try:
        losses = _one_by_one(loss, outputs, labels)
        again = _one_by_one(loss, outputs, labels)
    except ModelError:
        raise
    except Exception as failure:
        remedy = "Return a tensor of one loss: cross_entropy(output, target, reduction='none')."
        if mixes_dtypes(failure):
            remedy = HELD_DTYPE
        if differentiates(failure):
            remedy = DIFFERENTIATED
        raise ModelError(
            f"The loss failed on one sample, an output of shape {(1, *outputs.shape[1:])} and a "
            f"label of shape {(1, *labels.shape[1:])}: {what_failed(failure)} {remedy}"
        ) from failure
    finite = losses.is_floating_point() and bool(losses.isfinite().all())
    if not (finite and losses.equal(again)):
        raise ModelError(
            "The loss must return one finite real number per sample, the same for the same sample. "
            "It must not store anything between calls or use random numbers. With ignore_index "
            "use reduction='sum', with which a sample whose label is ignored adds nothing."
        )
    _check_batch(loss, outputs, labels, losses)


def _one_by_one(loss: Loss, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of samples, each of which the loss is called with alone."""
    losses = []
    for output, label in zip(torch.split(outputs, 1), torch.split(labels, 1), strict=True):
        with torch.enable_grad(), WeightsApart():
            losses.append(loss(output, label).reshape(()))
    return torch.stack(losses)


def _check_batch(loss: Loss, outputs: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Raise ModelError if a batch has a result that is not one of its samples' ``losses``.

    A result for a batch may be the losses, their mean or their sum. It may also fail, or have
    another shape: a loss may be written for one sample, and is called with one.
    """
    apart = WeightsApart(len(outputs))
    try:
        with apart:
            of_batch = loss(outputs, labels)
    except Exception:  # noqa: BLE001  (it may be written for one sample, and is called with one)
        return
    if apart.weights is not None:
        factors = relative(bounded(apart.weights).value)
        losses = losses * factors.to(losses.dtype)
    expected = [losses] if of_batch.ndim else [losses.mean(), losses.sum()]
    if of_batch.shape != expected[0].shape:
        return
    if not any(torch.allclose(of_batch, value, 1e-4, 1e-6) for value in expected):
        raise ModelError(
            "The loss computes something else for a batch than for one sample at a time, and dpmac "
            "computes it for each sample alone, which bounds its influence. Remove operations "
            "across samples, such as comparing pairs of them or choosing the hardest. Weights of "
            "records belong in weights=, a function that returns one for each record."
        )
