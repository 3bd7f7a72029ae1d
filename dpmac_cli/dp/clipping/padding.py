"""Rows of embeddings that are never trained, because their modules declare a ``padding_idx``.

torch never changes such a row. Here it is no coordinate of the mechanism: it is in no norm, no sum
and no moment, and gets no noise. If something else uses the weight, such as a tied head, the row is
an ordinary one.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

#: Modules that declare a row of their weight as padding.
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
#: Operations of autograd with which these modules read their weight, see :func:`read_otherwise`.
READS = frozenset({"EmbeddingBackward0", "EmbeddingBagBackward0"})

#: Name of a weight in :func:`read_otherwise`.
Name = TypeVar("Name")


def declared(modules: Iterable[nn.Module]) -> int | None:
    """Return the row of a weight that all modules which share it declare as their padding.

    Args:
        modules: the modules that have the weight, at least one.

    Returns:
        ``padding_idx`` of all of them; None if they declare none, or different ones.

    Example:
        >>> padded, plain = nn.Embedding(5, 2, padding_idx=1), nn.Embedding(5, 2)
        >>> declared([padded]), declared([padded, plain])
        (1, None)
    """
    rows = set[int | None]()
    for module in modules:
        rows.add(module.padding_idx if isinstance(module, EMBEDDINGS) else None)
    return rows.pop() if len(rows) == 1 else None


def read_otherwise(loss: Tensor, padded: Mapping[Name, tuple[Tensor, int]]) -> set[Name]:
    """Return the names of weights that are read not only by embeddings which skip their padding.

    The operations are those of the graph of a loss, so no gradient's value decides.

    Args:
        loss: a loss with its graph, shape ().
        padded: by name, weights that require gradients, each with the row that its modules declare
            as padding.

    Returns:
        The names of weights of which the padding is an ordinary row.
    """
    name_of = {id(weight): name for name, (weight, _) in padded.items()}
    remaining: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set[Any](remaining)
    names = set[Name]()
    while remaining:
        operation = remaining.pop()
        for source, _ in operation.next_functions:
            if source is None:
                continue
            variable = getattr(source, "variable", None)  # of a leaf of the graph
            name = name_of.get(id(variable))
            if name is not None and not _skips(operation, padded[name][1]):
                names.add(name)
            if source not in seen:
                seen.add(source)
                remaining.append(source)
    return names


def _skips(operation: Any, row: int) -> bool:
    """Return whether an operation of autograd is an embedding with this row as padding."""
    return operation.name() in READS and operation._saved_padding_idx == row
