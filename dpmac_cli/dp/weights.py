"""Weights of records: factors from 0 to 1 on gradients that are already clipped.

Clipping takes the size of a gradient away, and with it whatever its loss was multiplied by. So a
weight multiplies the gradient afterwards: a record adds w c (g - m). With w in [0, 1] it moves the
sum by at most as much as with weight 1, and the accountant has nothing to learn. For a ball about 0
the ratios of weights are exact. With a centre m, the released mean is m + sum w c (g - m) / B: its
fixed point is the same weighted mean, which it reaches more slowly.

A unit of several records adds the clipped mean of its weighted gradients, sum w g / sum w, times
the mean of its weights.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dpmac_cli.dp.clipping.batches import Batch, map_rows, samples_in
from dpmac_cli.dp.copies import without_memory
from dpmac_cli.dp.torch_errors import type_and_place
from dpmac_cli.errors import InputError, ModelError, raise_errors

#: Takes inputs and labels of some rows, and the network's outputs, shape (rows, ...). Returns a
#: weight per row, shape (rows,): any number, cut to [0, 1] by :func:`bounded`.
Weigh: TypeAlias = Callable[[Batch, Batch, Tensor], Tensor]

#: Remedy in messages.
REMEDY = (
    "Clipping takes the size of a gradient away, so these weights would have no effect. Remove "
    "them from the loss, and pass weights=, a function that returns one weight for each record: "
    "it multiplies the gradient after clipping."
)


class Weights(NamedTuple):
    """Weights of some samples, which multiply their gradients after clipping.

    Attributes:
        value: in [0, 1], float64, shape (samples,).
        cut: whether the weight was outside [0, 1] or NaN, bool, shape (samples,). Private.
    """

    value: Tensor
    cut: Tensor


def bounded(numbers: Tensor) -> Weights:
    """Return numbers as weights in [0, 1]: those below become 0, those above 1, and NaN 0.

    Args:
        numbers: weights that a program or a loss computed, any numbers, shape (samples,). The
            result has no graph to them.

    Example:
        >>> weights = bounded(torch.tensor([0.5, 2.0, float("nan")]))
        >>> weights.value.tolist(), weights.cut.tolist()
        ([0.5, 1.0, 0.0], [False, True, True])
    """
    exact = numbers.detach().double()
    value = torch.nan_to_num(exact, nan=0.0).clamp(0.0, 1.0)
    return Weights(value, exact != value)


def equal_weights(losses: Tensor) -> Weights:
    """Return weight 1 for each loss, none of them cut.

    Args:
        losses: losses of any shape, which is that of the weights.
    """
    ones = torch.ones_like(losses, dtype=torch.float64)
    return Weights(ones, torch.zeros_like(losses, dtype=torch.bool))


def relative(weights: Tensor) -> Tensor:
    """Return the weights w of rows, divided by their mean over the last dimension.

    The mean of losses l times these factors is the weighted mean, sum w l / sum w.

    Args:
        weights: at least 0, shape (..., rows).

    Returns:
        Factors in the same shape; 0 where the weights of all rows are 0.

    Example:
        >>> relative(torch.tensor([1.0, 0.5, 0.0]))
        tensor([2., 1., 0.])
    """
    mean = weights.mean(-1, keepdim=True)
    return torch.where(mean > 0, weights / mean, 0.0)


def of_unit(losses: Tensor, rows: Weights) -> tuple[Tensor, Weights]:
    """Return the loss and the weight of each unit of privacy, from those of its rows.

    A unit has several records, or a sample several views; each is a row with a loss l and a
    weight w.

    Args:
        losses: losses of the rows, shape (units..., rows).
        rows: weights of the rows, in the same shape.

    Returns:
        Losses sum w l / sum w, 0 where all w are 0, shape (units...); and weights, the mean of w,
        which count as cut where that of a row was.

    Example:
        >>> weights = bounded(torch.tensor([1.0, 0.5]))
        >>> loss, weight = of_unit(torch.tensor([3.0, 6.0]), weights)
        >>> loss, float(weight.value)
        (tensor(4.), 0.75)
    """
    loss = (losses * relative(rows.value).to(losses.dtype)).mean(-1)
    return loss, Weights(rows.value.mean(-1), rows.cut.any(-1))


def of_classes(weights: Sequence[float], device: torch.device) -> Weigh:
    """Return a function that gives each row the weight of its class.

    Args:
        weights: public weights of the classes, above 0. They are divided by the largest.
        device: device of the labels.

    Returns:
        A function of inputs, labels and outputs of rows, of which it uses only the labels, int64,
        shape (rows,): see :data:`Weigh`.

    Example:
        >>> weigh = of_classes([1.0, 4.0], torch.device("cpu"))
        >>> weigh((), torch.tensor([1, 0]), torch.empty(0)).tolist()
        [1.0, 0.25]
    """
    table = torch.tensor(weights, dtype=torch.float64, device=device)
    table = table / table.max()

    def weigh(_: Batch, labels: Tensor, __: Tensor) -> Tensor:
        return table[labels]

    return weigh


def of_quantile(level: float) -> Weigh:
    """Return a function of row weights with which the absolute error predicts a quantile.

    The pinball loss (Koenker and Bassett 1978), whose minimum is the Q-quantile, is the absolute
    error times Q where the target is above the prediction, and times 1 - Q where it is not. The
    weights are these factors, divided by the larger of both.

    Args:
        level: Q in (0, 1): a share Q of the targets is below the predictions.

    Returns:
        A function of inputs, targets and outputs, shape (rows, 1) each, of which it uses the last
        two: see :data:`Weigh`.

    Example:
        >>> weigh = of_quantile(0.8)
        >>> targets, outputs = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]])
        >>> [round(weight, 3) for weight in weigh((), targets, outputs).tolist()]
        [0.25, 1.0]
    """
    largest = max(level, 1 - level)
    above = level / largest
    below = (1 - level) / largest

    def weigh(_: Batch, targets: Tensor, outputs: Tensor) -> Tensor:
        return torch.where(targets > outputs, above, below).squeeze(1)

    return weigh


class RecordWeights:
    """Weights that a program computes, called on one record at a time.

    A weight is a public function of one record. It is divided by the largest one, which the program
    states: the largest of the records would be private.

    Args:
        function: returns one weight per row, shape (rows,), from the inputs of one record, or from
            its inputs and labels; or from its batch.
        largest: number by which weights are divided, above 0.
        arguments: names of the function's arguments, which tell how many it takes: one or two.

    Raises:
        InputError: ``function`` is not callable, or ``largest`` is not a number above 0.

    Example:
        >>> weigh = RecordWeights(lambda x: x[:, 0], 4.0, "x")
        >>> weigh(torch.tensor([[1.0], [4.0]]), (), torch.empty(0)).tolist()
        [0.25, 1.0]
    """

    def __init__(self, function: Callable[..., Tensor], largest: float, *arguments: str) -> None:
        errors = []
        anything: Any = function  # a program's mistake may be of any type
        if not callable(anything):
            errors.append(
                f"weights must be a function weights({', '.join(arguments)}) that returns one "
                f"weight per record, not a {type(function).__name__}."
            )
        if not (isinstance(largest, (int, float)) and 0 < largest < math.inf):
            errors.append(f"largest_weight must be a number above 0, not {largest!r}.")
        raise_errors(errors)
        self._function = function
        self._largest = largest
        self._arguments = arguments

    @property
    def name(self) -> str:
        """Return the name of the function with its module, "module:function", for the report."""
        function: Any = self._function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return f"{function.__module__}:{name}"

    def check_example(self, x: Batch, y: Batch) -> None:
        """Reject weights outside [0, largest] on a public example, which would be cut in training.

        Args:
            x: inputs of the example, shape (rows, ...). The message may quote a weight.
            y: its labels, shape (rows, ...).

        Raises:
            InputError: the weight of a row is not in [0, largest].
            ModelError: see :meth:`__call__`.
        """
        outputs = torch.empty(0)  # which no weights of a program see
        for i in range(samples_in(x)):
            row = itemgetter(slice(i, i + 1))
            weight = self(map_rows(row, x), map_rows(row, y), outputs)
            if bool(bounded(weight).cut):
                raise InputError(
                    f"Row {i} of the example has the weight {float(weight) * self._largest:g}, but "
                    f"weights go from 0 to largest_weight, {self._largest:g}. What is outside "
                    "would be cut. Set largest_weight to the largest number that weights returns."
                )

    def __call__(self, x: Batch, y: Batch, outputs: Tensor) -> Tensor:
        """Return the weights of rows, divided by the largest one, float64, shape (rows,).

        Args:
            x: inputs.
            y: labels.
            outputs: not used: see :data:`Weigh`.

        Raises:
            ModelError: the function failed, or did not return one real number per row.
        """
        del outputs
        rows = samples_in(x)
        arguments = (x, y)[: len(self._arguments)]
        called = f"weights({', '.join(self._arguments)})"
        # What it writes to its copy is lost, so that no record changes the weight of another.
        function = without_memory(self._function, called)
        try:
            weights: Any = function(*arguments)
        except Exception as failure:
            if "vmap" in str(failure):
                raise  # a function of one record that vmap cannot run, which has a remedy
            raise ModelError(
                f"{called} failed on one record: {type_and_place(failure)}. It is called with one "
                f"record at a time, and returns its weight, a tensor of shape ({rows},)."
            ) from failure
        is_tensor = isinstance(weights, Tensor)
        if not is_tensor or weights.numel() != rows or weights.is_complex():
            shape = tuple(weights.shape) if is_tensor else type(weights).__name__
            raise ModelError(
                f"{called} returned {shape} for {rows} record{'s' * (rows > 1)}. It must return "
                f"one weight for each record, a tensor of shape ({rows},)."
            )
        numbers: Tensor = weights.reshape(rows).double()
        return numbers / self._largest


#: Losses of torch with a weight for each number, which is one of the record if it has one number.
WEIGHTED = frozenset(
    {
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.huber_loss,
        functional.l1_loss,
        functional.mse_loss,
    }
)
#: Losses of torch whose class weights are taken apart, and the argument that has them.
TAKEN: Mapping[Callable[..., Tensor], str] = MappingProxyType(
    {
        functional.cross_entropy: "weight",
        functional.nll_loss: "weight",
        functional.multi_margin_loss: "weight",
        functional.binary_cross_entropy_with_logits: "pos_weight",
    }
)


class WeightsApart(TorchFunctionMode):
    """Mode that computes torch's losses without their class weights, and notes those weights.

    In the block below ``with``, a loss such as ``CrossEntropyLoss(weight=...)`` of one record is
    that without ``weight``; the weight of the record's class is in :attr:`weights`, and multiplies
    the record's gradient after clipping.

    Args:
        rows: number of rows of the record: 1, or the number of records of a unit.
        scale: factor on losses that had weights, for :func:`check_alone`.

    Attributes:
        weights: weights of the rows, divided by the largest weight of a class, float64, shape
            (rows,); None if no loss had weights.
        taken: name of torch's function that had them; "" for none.

    Raises:
        ModelError: in the block, for weights that no weight of a record can replace.

    Example:
        >>> loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0]))
        >>> with WeightsApart() as apart:
        ...     losses = loss(torch.zeros(1, 2), torch.tensor([0]))
        >>> apart.weights.tolist()
        [0.25]
    """

    def __init__(self, rows: int = 1, scale: float = 1.0) -> None:
        super().__init__()
        self._rows, self._scale = rows, scale
        self.weights: Tensor | None = None
        self.taken = ""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = TAKEN.get(func)
        if name is None and func not in WEIGHTED:
            return func(*args, **kwargs)
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        if func in WEIGHTED:
            self._check_row_weights(func, arguments)
        if name is None or arguments[name] is None:
            return func(*args, **kwargs)
        self._check(func, name, arguments)
        weights = _weights_of_labels(name, arguments)
        if self.weights is not None:
            self._refuse(func, f"{name}= a second time for one record")
        self.weights, self.taken = weights, func.__name__
        arguments[name] = None
        reduction = arguments["reduction"]
        arguments["reduction"] = "none"
        losses = func(*call.args, **call.kwargs).reshape(self._rows)
        # The mean of these is the mean with weights, sum w l / sum w.
        factors = relative(bounded(weights).value).to(losses.dtype)
        losses = losses * factors * self._scale
        if reduction == "none":
            return losses
        if reduction == "sum":
            return losses.sum()
        return losses.mean()

    def _check_row_weights(self, func: Any, arguments: Mapping[str, Any]) -> None:
        """Raise ModelError for the weight of a record whose loss has one number."""
        one_number_per_row = arguments["input"].numel() == self._rows
        if one_number_per_row and arguments.get("weight") is not None:
            self._refuse(func, "weight=")

    def _check(self, func: Any, name: str, arguments: Mapping[str, Any]) -> None:
        """Raise ModelError unless each row has one hard label."""
        outputs, target = arguments["input"], arguments["target"]
        if arguments["size_average"] is not None or arguments["reduce"] is not None:
            self._refuse(func, f"{name}= and size_average= or reduce=")
        if arguments.get("label_smoothing"):
            self._refuse(func, f"{name}= and label smoothing")
        if name == "weight" and target.is_floating_point():
            self._refuse(func, f"{name}= and soft labels")
        if name == "pos_weight" and outputs.numel() != self._rows:
            self._refuse(func, f"{name}= and {outputs.numel()} outputs per record")
        if target.numel() != self._rows:
            self._refuse(func, f"{name}= and {target.numel()} targets per record")

    def _refuse(self, func: Any, reason: str) -> NoReturn:
        """Raise ModelError; ``reason`` names the arguments."""
        raise ModelError(f"The loss calls {func.__name__} with {reason}. {REMEDY}")


def _weights_of_labels(name: str, arguments: Mapping[str, Any]) -> Tensor:
    """Return the weight of each row's label, divided by the largest weight; shape (rows,)."""
    weight = arguments[name].double()
    target = arguments["target"]
    if name == "pos_weight":
        positive = weight.reshape(())
        label = target.double().reshape(-1)
        negative_or_soft = torch.where(label == 0, 1.0, torch.nan)  # soft labels have no weight
        of_labels = torch.where(label == 1, positive, negative_or_soft)
        largest = positive.clamp(min=1.0)
    else:
        label = target.reshape(-1)
        ignored = label == arguments.get("ignore_index", -1)  # -1 is no label
        of_labels = torch.where(ignored, 0.0, weight[label.clamp(0, len(weight) - 1)])
        largest = weight.max()
    relative_to_largest: Tensor = of_labels / largest
    return relative_to_largest


def check_alone(losses: Callable[[WeightsApart], Tensor], rows: int = 1) -> str:
    """Reject a loss that adds terms without class weights to one with them; return that one's name.

    The weight of a record multiplies its whole gradient, so such a sum cannot be trained on.

    Args:
        losses: returns the loss of one record, computed in the block of the mode that it gets.
            Called once, and twice if there are class weights.
        rows: number of rows of the record, see :class:`WeightsApart`.

    Returns:
        Name of the loss of torch that has class weights, such as "cross_entropy"; "" for none.

    Raises:
        ModelError: the loss has other terms, or weights that no weight of a record can replace.
    """
    apart = WeightsApart(rows)
    first = losses(apart)
    if apart.weights is None:
        return ""
    # Twice the losses that had weights are twice the sum, unless it has other terms.
    second = losses(WeightsApart(rows, scale=2.0))
    if not torch.allclose(2 * first, second, 1e-4, 1e-6):
        raise ModelError(
            "The loss adds other terms to a loss with class weights, but the weight of a record "
            f"multiplies its whole gradient. {REMEDY}"
        )
    return apart.taken
