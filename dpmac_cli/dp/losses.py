"""Per-sample losses: maps from outputs and labels of a batch to one loss per sample.

A loss that mixes samples would let one sample affect the gradients of others, so user-supplied
losses run on each sample separately.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    mse_loss,
    nll_loss,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpmac_cli.dp.vmap_rules import OwnOperators, OwnRuleError, without_own_rules
from dpmac_cli.errors import ModelError
from dpmac_cli.torch_errors import what_failed

#: Takes outputs, shape (samples, outputs), and targets, shape (samples,) for classes, otherwise
#: like the outputs. Returns shape (samples,).
Loss = Callable[[Tensor, Tensor], Tensor]
#: Functions whose result has no gradient with respect to their argument. ``data`` is a property,
#: which torch's stubs declare as a Tensor.
DETACHING = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
NO_PARAMETERS: Mapping[int, str] = MappingProxyType({})
#: Exponent of the focal loss, as in its paper.
FOCUS = 2.0

#: Error above which the Huber loss is linear; targets are in [-1, 1].
HUBER = 0.1

plain: Loss = partial(cross_entropy, reduction="none")


def returned(outputs: Tensor, _: Any) -> Tensor:
    """Return the outputs of a network that computes its own losses, shape (samples,)."""
    return outputs


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return mse_loss(outputs, targets, reduction="none")


def _huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return huber_loss(outputs, targets, reduction="none", delta=HUBER) / HUBER


def _poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.exp() - outputs * (targets + 1) / 2  # of shares of the largest count


def _quantile(outputs: Tensor, targets: Tensor, level: float) -> Tensor:
    errors = targets - outputs
    return torch.maximum(level * errors, (level - 1) * errors)


#: Losses of numbers, one value per output. The parameter of a loss follows a colon in its name.
OF_NUMBERS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"mse": _squared, "huber": _huber, "poisson": _poisson, "quantile": _quantile}
)


def _of_numbers(each: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of each sample's numbers.

    Raises ModelError for targets of another shape: torch would compare each sample with all others.
    """
    if outputs.shape != targets.shape:
        raise ModelError(
            f"The network's outputs have shape {tuple(outputs.shape)}, but the numbers to predict "
            f"{tuple(targets.shape)}. They need one output for each number."
        )
    return each(outputs, targets.to(outputs.dtype)).mean(1)


def build_loss(
    name: str,
    smoothing: float = 0.0,
    weights: Sequence[float] = (),
    device: torch.device | None = None,
) -> Loss:
    """Return a loss by name.

    Args:
        name: "cross-entropy"; "focal" (Lin et al. 2017, arXiv 1708.02002); "bce", the mean of
            the binary cross-entropies of several labels; for targets scaled to [-1, 1] "mse",
            "huber", which is linear for errors above :data:`HUBER`, "quantile:Q", the pinball loss
            of the Q-quantile (Koenker and Bassett 1978); or for counts "poisson", up to a constant
            the negative log-likelihood of targets (t + 1) / 2 with mean exp(output).
        smoothing: label smoothing (Szegedy et al. 2016, arXiv 1512.00567), in [0, 1).
        weights: public weights of each class, or of the positives of each label.
    """
    kind, _, parameter = name.partition(":")
    if kind in OF_NUMBERS:
        each = partial(OF_NUMBERS[kind], **({"level": float(parameter)} if parameter else {}))
        return partial(_of_numbers, each)
    factors = torch.tensor(weights, dtype=torch.float64, device=device) if weights else None

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        weight = None if factors is None else factors.to(outputs.dtype)
        if name == "bce":
            targets = labels.to(outputs.dtype) * (1 - smoothing) + smoothing / 2
            return binary_cross_entropy_with_logits(
                outputs, targets, reduction="none", pos_weight=weight
            ).mean(1)
        losses = cross_entropy(outputs, labels, weight, label_smoothing=smoothing, reduction="none")
        if name == "focal":
            losses = (1 - torch.exp(-plain(outputs, labels))) ** FOCUS * losses
        return losses

    return loss


class _WithoutMeans(TorchFunctionMode):
    """Reject means that differ between a sample alone and a batch.

    torch divides the mean by the weights of the labels, and leaves out labels that are ignored.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (cross_entropy, nll_loss):
            bound = inspect.signature(func).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            _check_mean(func.__name__, **bound.arguments)
        return func(*args, **(kwargs or {}))


def _check_mean(
    name: str, target: Tensor, weight: Any, reduction: str, ignore_index: int, **_: Any
) -> None:
    """Raise ModelError if the mean over one sample is not its loss."""
    if reduction != "mean":
        return
    if weight is not None:
        raise ModelError(
            f"The loss calls {name} with class weights and reduction='mean', which divides by the "
            "weights. As it runs on each sample separately, they would have no effect. Use "
            "reduction='sum', or leave out loss= and set class_weights='1,2' (a number per class)."
        )
    if bool((target == ignore_index).any()):
        raise ModelError(
            f"The loss calls {name} with ignore_index={ignore_index} and reduction='mean', which "
            "is NaN for a sample whose label is ignored, as it runs on each sample separately. Use "
            "reduction='sum', with which such a sample adds nothing."
        )


class _Closed(TorchFunctionMode):
    """Context manager in which trained parameters can be read only as constants.

    Raises ModelError otherwise: gradients through a loss that uses the network itself do not belong
    to single calls of its layers.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() or func in DETACHING:
            return result
        used = [x for x in tree_leaves((args, kwargs)) if id(x) in self._parameters]
        if used and any(isinstance(x, Tensor) for x in tree_leaves(result)):
            raise ModelError(
                f"The loss uses {self._parameters[id(used[0])]} of the network, so its gradient "
                "would be incomplete: per-sample gradients follow only from the calls that the "
                "network makes for its own output. Compute constants under torch.no_grad(). For a "
                "penalty on the weights use weight_decay; for other terms, return them from the "
                "network."
            )
        return result


def alone(
    loss: Loss, outputs: Tensor, labels: Tensor, parameters: Mapping[int, str] = NO_PARAMETERS
) -> Loss:
    """Return a user-supplied loss that runs on each sample separately, by vmap or in a loop.

    State that it stores in globals or closures cannot be isolated. It is called with one output,
    shape (1, classes), and its label. ``outputs`` and ``labels`` are examples, not private;
    ``parameters`` are the names of the network's parameters by id. Raises ModelError if it fails
    on the examples, does not return one finite number per sample, returns different values for the
    same sample, or uses parameters other than as constants.
    """

    def single(output: Tensor, label: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), label.unsqueeze(0)).reshape(())

    def looped(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([single(*pair) for pair in zip(outputs, labels, strict=True)])

    try:
        with _WithoutMeans(), _Closed(parameters), torch.enable_grad(), OwnOperators() as own:
            found, again = looped(outputs, labels), looped(outputs, labels)
    except ModelError:
        raise
    except Exception as failure:
        raise ModelError(
            f"The loss failed on one sample, an output of shape {(1, *outputs.shape[1:])} and a "
            f"label of shape {(1, *labels.shape[1:])}: {what_failed(failure)} Return a tensor of "
            "one loss: cross_entropy(output, target, reduction='none')."
        ) from failure
    if not (found.is_floating_point() and bool(found.isfinite().all()) and found.equal(again)):
        raise ModelError(
            "The loss must return one finite real number per sample, the same for the same sample. "
            "It must not store anything between calls or use random numbers."
        )

    @without_own_rules()
    def mapped(outputs: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = vmap(single)(outputs, labels)
        return losses

    try:
        vmapped = not own.found and torch.allclose(mapped(outputs, labels), found)
    # vmap has no rule for some operations, or the program's own.
    except (RuntimeError, TypeError, ValueError, OwnRuleError):
        vmapped = False

    def closed(outputs: Tensor, labels: Tensor) -> Tensor:
        with _Closed(parameters):
            return mapped(outputs, labels) if vmapped else looped(outputs, labels)

    return closed
