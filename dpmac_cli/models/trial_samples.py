"""Made-up samples for validation, and losses of a network's outputs.

A network is tried before it sees a record, so that its faults can be printed: they follow from
made-up numbers alone.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpmac_cli.dp.clipping.batches import (
    NORMAL,
    PUBLIC,
    SHARES,
    Batch,
    Structure,
    map_rows,
    samples_in,
    tensors_in,
)
from dpmac_cli.dp.clipping.vmap_support import unwrapped
from dpmac_cli.dp.weights import RecordWeights
from dpmac_cli.randomness.layers import forked, seed_all

#: Number of parameters to name; of more, the first and the last are named.
NAMED = 5
#: Number of samples on which a network is tried.
TRIED = 5
#: Least number of different rows of an example whose numbers replace all that would be made up:
#: with fewer, trials of how a network treats several records would see too little.
ENOUGH = 7
#: Operations that round no number.
EXACT = frozenset({"_to_copy", "copy_", "clone", "detach", "index", "cat", "stack", "embedding"})
#: A loss of the network and a batch: one number per record, shape (records,).
BatchLoss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Trial:
    """Made-up samples for a network that returns logits, or its own losses.

    Attributes:
        inputs: structure of a sample.
        classes: number of classes; None for a network that returns one loss per sample.
    """

    inputs: Structure
    classes: int | None

    @staticmethod
    def of(
        model: nn.Module, shape: tuple[int, ...], classes: int, example: Tensor | None = None
    ) -> "Trial":
        """Return the trial of a classifier of tensors, shape (samples, *shape), in its dtype.

        Args:
            model: the classifier, whose parameters tell the dtype.
            shape: shape of a sample.
            classes: number of classes.
            example: made-up samples to try it on; None for random numbers.
        """
        dtype = dtype_of(model)
        if example is not None:
            structure = Structure(example.to(dtype), numbers=(PUBLIC,))
        else:
            structure = Structure(torch.zeros(1, *shape, dtype=dtype))
        return Trial(structure, classes)

    def losses(self, outputs: Tensor) -> Tensor:
        """Return a loss per sample with a gradient for every output, also for a single one.

        Args:
            outputs: logits, shape (samples, classes), or losses, which are returned as they are.
        """
        if self.classes is None:
            return outputs
        return (outputs.square() / 2 + outputs).sum(1)

    def samples(self, count: int) -> Batch:
        """Return fixed random samples, numbers in float64 unless they keep their dtype.

        Args:
            count: number of samples, which is the number of rows of each tensor.
        """
        return self.inputs.made_up(count, double=True)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a network's inputs: float64 if all its parameters are, else float32.

    Args:
        model: the network. Without parameters it takes float32.
    """
    kinds = {p.dtype for p in model.parameters()}
    return torch.float64 if kinds == {torch.float64} else torch.float32


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter of a network; the CPU without any."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


class Objective(nn.Module):
    """Losses of a network on a batch, as a network that returns them.

    Args:
        network: the network.
        loss: a function of the network and a batch that returns one loss per sample, shape
            (samples,), or their mean, shape (). A loss that is a module is a part of this one, so
            its parameters and buffers are validated, too.
    """

    def __init__(self, network: nn.Module, loss: BatchLoss) -> None:
        super().__init__()
        self.network = unwrapped(network)
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        """Return the losses of a batch, shape (samples,), or their mean, shape ().

        Args:
            batch: batch of the program, with one row per sample.
        """
        return self.loss(self.network, batch)


def fitted(model: nn.Module, structure: Structure, weigh: RecordWeights | None = None) -> Structure:
    """Return a structure whose made-up rows a network or its loss can be tried on.

    Trials are most precise in float64, which a network fails in if it has tensors of its own in
    float32, such as a frozen teacher, or casts its inputs. Normally distributed numbers fit most
    networks, but no loss of probabilities. The first combination is chosen with which losses are
    finite; the structure as it is, if there is none.

    Args:
        model: maps a batch to losses. It is not changed.
        structure: structure of a sample, perhaps with the rows of a public example.
        weigh: weights of a program, which are tried on the same rows; None without.
    """
    try:
        for way in _ways(model, structure):
            if _works(model, way, weigh):
                return way
    except (Exception, SystemExit):  # noqa: BLE001  (it cannot be copied: validation says so)
        return structure
    return structure


def _ways(model: nn.Module, structure: Structure) -> Iterator[Structure]:
    """Yield ways to make up numbers, the most precise and most random first.

    All numbers are normal; or the first tensor is, which are often inputs, and the others are rows
    of the public example, or shares that sum to 1, as targets may be; or all are shares; or all are
    rows of the example, if it has enough of them. Each in float64, and then in the batch's dtype.
    """
    numbers = [t for t in tensors_in(structure.template) if t.is_floating_point()]
    others = max(0, len(numbers) - 1)
    kinds = [(NORMAL,) * len(numbers)]
    if others and structure.keep:
        kinds.append((NORMAL, *(PUBLIC,) * others))
    if others:
        kinds.append((NORMAL, *(SHARES,) * others))
    if numbers:
        kinds.append((SHARES,) * len(numbers))
    if structure.keep and all(len(torch.unique(t, dim=0)) >= ENOUGH for t in numbers):
        kinds += [(PUBLIC,) * len(numbers)]
    of_one_dtype = {t.dtype for t in numbers} <= {dtype_of(model)}
    for keep_dtype in (False, True) if of_one_dtype else (True,):
        for kind in kinds:
            yield replace(structure, numbers=kind, keep_dtype=keep_dtype)


def _works(model: nn.Module, structure: Structure, weigh: RecordWeights | None) -> bool:
    """Return whether a network has finite losses for made-up samples, none of them rounded more.

    Samples run one by one, as records in training. With made-up numbers in float64, nothing may be
    computed in float32: trials would take its rounding for an effect of other samples.
    """
    network = copy.deepcopy(model)
    network = network if structure.keep_dtype else network.double()
    rows = structure.made_up(TRIED, double=True)
    noticed = _InFloat32()  # type: ignore[no-untyped-call]
    losses = list[Tensor]()
    try:
        with forked(), torch.no_grad(), noticed:
            seed_all(0)
            for row in range(samples_in(rows)):
                record = map_rows(itemgetter(slice(row, row + 1)), rows)
                losses += tensors_in(network(record))
                if weigh is not None:
                    weigh(record, record, torch.empty(0))
    except (Exception, SystemExit):  # noqa: BLE001  (of any kind: another way may work)
        return False
    finite = all(bool(loss.isfinite().all()) for loss in losses)
    return finite and (structure.keep_dtype or not noticed.computed)


class _InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Notices whether something is computed of numbers in float32.

    Attributes:
        computed: whether an operation that rounds had inputs and results in float32.
    """

    computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket.__name__ in EXACT):
            inputs, results = tensors_in((args, kwargs)), tensors_in(result)
            reads_float32 = any(t.dtype == torch.float32 for t in inputs)
            writes_float32 = any(t.dtype == torch.float32 for t in results)
            self.computed |= reads_float32 and writes_float32
        return result


def trained_parts(model: nn.Module, size: int | None = None) -> str:
    """Return which parameters of a network are trained and which are frozen, as a sentence.

    Example:
        >>> trained_parts(nn.Linear(2, 3))
        '9 parameters are trained: weight, bias.'

    Args:
        model: the network.
        size: number of trained numbers, if it is known without rows that are padding.
    """
    clauses = list[str]()
    for state in ("trained", "frozen"):
        sizes = dict[str, int]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad == (state == "trained"):
                sizes[name.removeprefix("network.")] = parameter.numel()
        if not sizes:
            continue
        count = sum(sizes.values())
        if state == "trained" and size is not None:
            count = size
        names = list(sizes)
        if len(names) > NAMED:
            names = [*names[:2], "...", *names[-2:]]
        clauses.append(f"{count:,} parameters are {state}: {', '.join(names)}")
    return f"{'; '.join(clauses)}."
