"""Parameters that are read directly in a forward method, such as a class token or a LayerScale.

If such a parameter is broadcast over a batch, every row gets its own copy. The gradients with
respect to the copies are its per-sample gradients, whatever else the network computes. An embedding
of positions that are the same for all rows is such a parameter, too.

If it is multiplied with rows, as in ``F.linear(x, self.layer.weight)``, the product is recorded
like a call of a Linear layer. Rows may be those of samples with their positions in one dimension,
as many for each sample.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dpmac_cli.dp.clipping.batches import Batch, samples_in, tensors_in, with_another
from dpmac_cli.dp.losses import DETACHING

#: Functions of two tensors that broadcast both of them.
ELEMENTWISE = frozenset(
    getattr(owner, form.format(name))
    for name in ("add", "mul", "sub", "div", "truediv")
    for owner, forms in ((torch, "{}"), (Tensor, "{} {}_ __{}__ __r{}__ __i{}__"))
    for form in forms.split()
    if hasattr(owner, form.format(name))
)
#: Functions that repeat a tensor along dimensions.
EXPANDING = frozenset({Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, Tensor.repeat})

#: Functions that read a tensor at places, which are whole numbers.
INDEXING = frozenset(
    {functional.embedding, Tensor.__getitem__, torch.index_select, Tensor.index_select}
)

PLACES = (torch.int64, torch.int32)

#: Modules that hold parameters and are never called.
CONTAINERS = (nn.ParameterList, nn.ParameterDict)

#: Products of rows, the first argument, and a matrix, the second one.
PRODUCTS = frozenset(
    {functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
)
#: Sums of a term, the first argument, and such a product.
ADDED_PRODUCTS = frozenset({torch.addmm, Tensor.addmm})

#: Maps gradients w.r.t. copies of the value that was read to those w.r.t. the parameter, per row.
PullBack: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Read:
    """One use of a parameter: by copies for each row, or a product with rows.

    Attributes:
        edge: edge of the copies, or of the product.
        pull_back: map of gradients w.r.t. copies.
        rows: rows that are multiplied with the parameter, if any; version: their version counter.
        layer: layer that stands for the product.
        swapped: whether the rows are its output gradients, and the product's gradients its inputs:
            it stands for a product with the transposed matrix.
    """

    edge: GradientEdge
    pull_back: PullBack = Tensor.detach
    rows: Tensor | None = None
    version: int = 0
    layer: nn.Module | None = None
    swapped: bool = False


class _Started(torch.autograd.Function):
    """Start the graph at an output without copying; in-place operations may follow."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def start_graph(output: Tensor, *, view: bool = False) -> Tensor:
    """Return an output with a node in the graph; ``view``: it may be a view of another tensor."""
    if view:
        # In-place operations on a view would replace the node of its graph.
        output = torch.ops.aten._unsafe_view(output, output.shape)
    if output.requires_grad:
        return output
    with torch._C.DisableTorchFunction():  # it is no operation of the network
        started: Tensor = _Started.apply(output, output.new_zeros((), requires_grad=True))
    return started


def edge_of(output: Tensor) -> GradientEdge:
    """Return the edge of an output, unseen by modes that watch what the network reads."""
    with torch._C.DisableTorchFunction():
        return get_gradient_edge(output)


class Copies(TorchFunctionMode):
    """Context manager that replaces some parameters with one copy per row of the batch.

    Products of rows with one of them are recorded.

    Values computed from a single parameter, such as a slice, a reshape, or entries at places that
    do not depend on rows, are copied in the same way.

    Args:
        parameters: the parameters.
        samples: number of samples of the batch.
        rows: rows per sample of each parameter, by its id; by default those of its first use.

    Attributes:
        by_parameter: uses of each parameter, by its id.
        refused: ids of parameters that were read in an unsupported way.
        rows: rows per sample of each parameter, by its id.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        samples: int,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__()
        # Placeholder of each tensor that a network reads, and the parameter it is computed from.
        self._read = {id(p): (p.detach().requires_grad_(), p) for p in parameters}
        self.by_parameter: dict[int, list[Read]] = {i: [] for i in self._read}
        self.refused: set[int] = set()
        self.rows, self._samples = dict(rows or {}), samples

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function; replace a parameter among its arguments with copies."""
        named = dict(kwargs or {})
        if func is Tensor.expand_as:
            func, args = Tensor.expand, (args[0], args[1].shape)
        given = tensors_in((args, named))
        read = [x for x in given if id(x) in self._read]
        if not read or not torch.is_grad_enabled() or func in DETACHING:
            return func(*args, **named)
        product, factors = _product_of(func, args)
        if self._is_product(product, factors, named):
            return self._multiplied(product, *factors)
        if func in ELEMENTWISE and len(args) == 2:
            copies = {
                id(x): found for x in read if (found := self._broadcast(x, *args)) is not None
            }
            if copies:
                self.refused.update(id(self._read[id(x)][1]) for x in read if id(x) not in copies)
                return func(*[copies.get(id(x), x) for x in args], **named)
        of = {id(parameter): parameter for _, parameter in (self._read[id(x)] for x in read)}
        places = [x for x in given if func in INDEXING and x.dtype in PLACES]
        if len(of) == 1 and len(read) + len(places) == len(given):
            args, named = tree_map(lambda x: self._read.get(id(x), (x,))[0], (args, named))
            return self._computed(func, args, func(*args, **named), *of.values())
        self.refused.update(of)
        return func(*args, **named)

    def _is_product(self, func: Any, args: Any, named: Any) -> bool:
        """Return whether a function multiplies rows of the batch with a parameter."""
        if func not in PRODUCTS or named:
            return False
        rows, matrix = args[:2]
        known = id(matrix) in self.by_parameter and matrix.ndim == 2
        alone = isinstance(rows, Tensor) and id(rows) not in self._read
        return known and alone and rows.ndim > 1 and self._has_rows(len(rows), matrix)

    def _has_rows(self, length: int, parameter: nn.Parameter) -> bool:
        """Return whether a dimension has as many rows per sample as others of a parameter."""
        rows, rest = divmod(length, self._samples)
        return rest == 0 < rows == self.rows.setdefault(id(parameter), rows)

    def _multiplied(
        self, func: Any, rows: Tensor, matrix: nn.Parameter, bias: Tensor | None = None
    ) -> Any:
        """Record a product of rows with a parameter, and return it."""
        product = start_graph(func(rows, matrix.detach()), view=True)
        with torch._C.DisableTorchFunction():  # making layers is no operation of the network
            layer = nn.Linear(matrix.shape[1], len(matrix), bias=False, device="meta")
        edge, swapped = edge_of(product), func is not functional.linear
        self.by_parameter[id(matrix)].append(
            Read(edge, rows=rows.detach(), version=rows._version, layer=layer, swapped=swapped)
        )
        return product if bias is None else self.__torch_function__(torch.add, (), (product, bias))

    def _computed(self, func: Any, args: Any, result: Any, parameter: nn.Parameter) -> Any:
        """Return a function's result for a single parameter, or copies of it for the rows."""
        if not isinstance(result, Tensor) or result._version > 0:
            if result is None or tensors_in(result):
                self.refused.add(id(parameter))
        elif func in EXPANDING and result.requires_grad:
            once = result.shape[1:] == args[0].shape[args[0].ndim == result.ndim :]
            copied = self._is_copied(args[0], result.shape, parameter)
            if copied and (once or func is not Tensor.repeat):
                return self._keep(args[0], parameter, result)
            self.refused.add(id(parameter))  # may have the size of the next batch
        elif result.requires_grad:
            self._read[id(result)] = result, parameter
        return result

    def _broadcast(self, read: Tensor, *operands: Any) -> Tensor | None:
        """Return copies in the shape that two operands broadcast to; None if rows would share."""
        if not all(isinstance(x, Tensor) for x in operands):
            return None
        shape = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
        source, parameter = self._read[id(read)]
        if not self._is_copied(read, shape, parameter):
            return None
        return self._keep(source, parameter, source.detach().expand(shape))

    def _is_copied(self, read: Tensor, shape: torch.Size, parameter: nn.Parameter) -> bool:
        """Return whether a shape has the batch's rows and the value that is read does not."""
        without = read.ndim < len(shape) or read.shape[:1] == (1,)
        return len(shape) > 0 and without and self._has_rows(shape[0], parameter)

    def _keep(self, source: Tensor, parameter: nn.Parameter, copies: Tensor) -> Tensor:
        started = copies.detach().requires_grad_()
        back = partial(_pull_back, source, self._read[id(parameter)][0])
        self.by_parameter[id(parameter)].append(Read(edge_of(started), back))
        return started


def _product_of(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return a function with its factors first, and a term after them, if it adds a product."""
    if func in ADDED_PRODUCTS and len(args) == 3:
        term, *factors = args
        return torch.mm, (*factors, term)
    return func, args


def _pull_back(source: Tensor, leaf: Tensor, by_copies: Tensor) -> Tensor:
    """Map gradients w.r.t. copies of ``source`` to those w.r.t. its parameter, (rows, *shape)."""
    shape = (1,) * (by_copies.ndim - source.ndim) + source.shape
    rows = len(by_copies)
    by_row = by_copies.sum_to_size(rows, *shape[1:]).reshape(rows, *source.shape)
    if source is leaf:
        return by_row
    [found] = torch.autograd.grad(source, leaf, by_row, retain_graph=True, is_grads_batched=True)
    return found


def copied_parameters(
    model: nn.Module, example: Batch, read: Set[int] = frozenset(), idle: Set[int] = frozenset()
) -> dict[int, int]:
    """Return parameters whose uses :class:`Copies` all supports, by id, with rows per sample.

    They are found on an example batch. Only trained parameters without those in ``idle`` are
    checked: of embeddings, of modules that contain other modules with parameters, of those with a
    parameter in ``read``, both by id, and of modules of the program's own that multiply rows with
    one. A second batch size must give the same result, as other dimensions may have the batch size,
    or its multiple, by chance.
    """
    asked, multiplying = _asked(model, read, idle)
    if not (asked or multiplying):
        return {}
    parameters = [p for held in (*asked, *multiplying) for p in held]
    found = list[dict[int, int]]()
    for batch in (example, with_another(example)):
        copies = Copies(parameters, samples_in(batch))
        try:
            with torch.enable_grad(), copies:
                model(batch)
        except Exception:  # noqa: BLE001  (user code may raise anything, and would in training)
            return {}
        known = {p: copies.rows[p] for p, uses in copies.by_parameter.items() if uses}
        for held in multiplying:
            uses = [use for p in held for use in copies.by_parameter[id(p)]]
            if all(use.layer is None for use in uses):  # vmap of the module costs less
                known = {p: rows for p, rows in known.items() if p not in set(map(id, held))}
        found.append({p: rows for p, rows in known.items() if p not in copies.refused})
    first, second = found
    return {p: rows for p, rows in first.items() if second.get(p) == rows}


def _asked(
    model: nn.Module, read: Set[int], idle: Set[int]
) -> tuple[list[list[nn.Parameter]], list[list[nn.Parameter]]]:
    """Return the parameters of modules that are checked, and those checked only for products."""
    asked, multiplying = list[list[nn.Parameter]](), list[list[nn.Parameter]]()
    for module in model.modules():
        of = {} if isinstance(module, CONTAINERS) else directly_held(module)
        held = [p for p in of.values() if p.requires_grad and id(p) not in idle]
        if not held:
            continue
        apart = type(module) is nn.Embedding or _has_parts(module)
        if apart or not _ids(of).isdisjoint(read):
            asked.append(held)
        elif not type(module).__module__.startswith("torch."):
            multiplying.append(held)
    return asked, multiplying


def directly_held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that only a module's own forward can read, by name within it.

    These are its own, and those in its lists and dicts of parameters.
    """
    held = dict(module.named_parameters(recurse=False))
    for key, child in module.named_children():
        if isinstance(child, CONTAINERS):
            held |= {f"{key}.{name}": p for name, p in directly_held(child).items()}
    return held


def _has_parts(module: nn.Module) -> bool:
    """Return whether modules with parameters are inside, besides lists of parameters."""
    return len({id(p) for p in module.parameters()}) > len(_ids(directly_held(module)))


def _ids(held: Mapping[str, nn.Parameter]) -> set[int]:
    return {id(p) for p in held.values()}
