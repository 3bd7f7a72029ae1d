"""Parameters that a network's own forward reads, as a class token or a LayerScale.

Where such a parameter is broadcast over a batch, every row is given a copy of its own. The
gradients by the copies are its per-sample gradients, whatever else the network computes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Functions of two tensors that broadcast both.
ELEMENTWISE = frozenset(
    function
    for name in ("add", "mul", "sub", "div")
    for function in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"{name}_"))
) | frozenset(
    getattr(Tensor, f"__{side}{name}__")
    for name in ("add", "mul", "sub", "truediv")
    for side in ("", "r", "i")
)
#: Functions that repeat a tensor for every row, without changing it otherwise.
EXPANDING = frozenset(
    {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to, Tensor.repeat}
)
#: Functions whose result has no gradient by the parameter. ``data`` is a property, which torch's
#: stubs declare as a Tensor.
DETACHING = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]


class Copies(TorchFunctionMode):
    """Gives each of some parameters as many copies as a batch has rows, while it is active.

    Attributes:
        by_parameter: the copies that each was given, by its id.
        refused: ids of those that were read in a way that is not known.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], rows: int) -> None:
        super().__init__()
        self.by_parameter: dict[int, list[Tensor]] = {id(p): [] for p in parameters}
        self.refused: set[int] = set()
        self._rows = rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; replace a parameter among its arguments by copies."""
        named = dict(kwargs or {})
        read = [x for x in _tensors((*args, *named.values())) if id(x) in self.by_parameter]
        if not read or not torch.is_grad_enabled():
            return func(*args, **named)
        if len(read) == 1 and func in ELEMENTWISE and len(args) == 2:
            copies = self._broadcast(read[0], *args)
            if copies is not None:
                return func(*[copies if x is read[0] else x for x in args], **named)
        result = func(*args, **named)
        if len(read) == 1 and func in EXPANDING and args[0] is read[0]:
            if self._is_copied(read[0], result.shape) and result.shape[1:] == read[0].shape[1:]:
                return self._keep(read[0], result)
        elif func in DETACHING or not any(x is not read[0] for x in _tensors((result,))):
            return result
        self.refused.update(map(id, read))
        return result

    def _broadcast(self, parameter: Tensor, *operands: Any) -> Tensor | None:
        """Return copies in the shape that two operands broadcast to; None if rows would share."""
        if not all(isinstance(x, Tensor) for x in operands):
            return None
        shape = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
        if not self._is_copied(parameter, shape):
            return None
        return self._keep(parameter, parameter.detach().expand(shape))

    def _is_copied(self, parameter: Tensor, shape: torch.Size) -> bool:
        """Return whether a shape has rows for those of the batch, and the parameter has none."""
        without = parameter.ndim < len(shape) or parameter.shape[:1] == (1,)
        return len(shape) > 0 and shape[0] == self._rows and without

    def _keep(self, parameter: Tensor, copies: Tensor) -> Tensor:
        started = copies.detach().requires_grad_()
        self.by_parameter[id(parameter)].append(started)
        return started


def copied_parameters(model: nn.Module, example: Tensor) -> set[int]:
    """Return the ids of parameters that :class:`Copies` knows every use of, on an example batch.

    Those are asked about that are held beside other modules with parameters. A batch of another
    size must agree: a dimension that is not the samples may have the size of one by chance.
    """
    asked = [
        p
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if any(True for child in module.children() for _ in child.parameters())
    ]
    if not asked:
        return set()
    known = {id(p) for p in asked}
    for batch in (example, torch.cat([example, example[:1]])):
        copies = Copies(iter(asked), len(batch))
        try:
            with torch.enable_grad(), copies:
                model(batch)
        except Exception:  # noqa: BLE001  (user code may raise anything, and will again in training)
            return set()
        known &= {p for p, found in copies.by_parameter.items() if found} - copies.refused
    return known


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors among some values, and in lists, tuples and mappings of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(tuple(value))
        elif isinstance(value, dict):
            yield from _tensors(tuple(value.values()))
