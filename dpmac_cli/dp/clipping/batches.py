"""Batches: pytrees of tensors with one row per sample in the first dimension.

A batch is a tensor, or any nesting of dicts, lists, tuples and named tuples of tensors. The number
of rows of a drawn batch is private; its structure, without values, is public.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from dpmac_cli.errors import InputError, raise_errors

#: A pytree of tensors, shape (samples, ...) each.
Batch: TypeAlias = Any
#: How numbers are made up: normally distributed, between 0 and 1, or as in a public example.
NORMAL, SHARES, PUBLIC = "normal", "between 0 and 1", "those of the example"
#: A batch without tensors, such as the labels of a network that returns its own losses.
NOTHING: Batch = ()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a batch, an argument or a result, in the order of the pytree.

    Args:
        value: a tensor, or any nesting of dicts, lists and tuples. What is no tensor is left out.

    Example:
        >>> [tuple(t.shape) for t in tensors_in({"x": torch.zeros(2, 3), "name": "a"})]
        [(2, 3)]
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def samples_in(batch: Batch) -> int:
    """Return the number of rows of a batch, that of its first tensor.

    Args:
        batch: tensors of shape (samples, ...). Without any, or for one of shape (), it has 0 rows.

    Example:
        >>> samples_in({"x": torch.zeros(5, 3), "y": torch.zeros(5)})
        5
    """
    tensors = tensors_in(batch)
    if not tensors or tensors[0].ndim == 0:
        return 0
    return len(tensors[0])


def shapes_in(batch: Batch) -> str:
    """Return the shape of a row of each tensor, for messages.

    Args:
        batch: tensors of shape (samples, ...).

    Example:
        >>> shapes_in({"x": torch.zeros(5, 3), "y": torch.zeros(5)})
        '(3,), ()'
    """
    return ", ".join(str(tuple(t.shape[1:])) for t in tensors_in(batch))


def map_rows(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Return a batch of the same structure with a function applied to every tensor.

    Args:
        function: maps a tensor to a tensor.
        batch: any nesting of tensors. What is no tensor stays as it is.

    Example:
        >>> map_rows(lambda t: t[:1], (torch.arange(3), {"y": torch.ones(3)}))
        (tensor([0]), {'y': tensor([1.])})
    """
    if isinstance(batch, Tensor):
        return function(batch)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def by_row(batch: Batch, views: int) -> Batch:
    """Return a batch with one row for each view of each sample, shape (samples * views, ...).

    Args:
        batch: tensors of shape (samples, views, ...); or (samples, ...) for one view, which are
            returned as they are.
        views: number of inputs per sample, such as augmented views.

    Example:
        >>> by_row(torch.zeros(4, 2, 3), views=2).shape
        torch.Size([8, 3])
    """
    return batch if views == 1 else map_rows(lambda t: t.flatten(0, 1), batch)


def parts_by_name(batch: Batch) -> dict[str, Any]:
    """Return the leaves of a batch by their place in it, as code, for messages.

    Args:
        batch: any nesting; its leaves need not be tensors.

    Example:
        >>> parts_by_name({"labels": 3})
        {"batch['labels']": 3}
    """
    leaves, _ = tree_flatten_with_path(batch)
    return {f"batch{keystr(path)}": leaf for path, leaf in leaves}


@dataclass(frozen=True)
class Structure:
    """Shapes and dtypes of a batch's tensors, to make up batches of such rows. Not private.

    Attributes:
        template: a batch of at least one row. Of tensors of numbers, only shape, dtype and device
            are used, unless ``numbers`` says otherwise.
        keep: whether integers are those of the template, in turn. Otherwise they alternate between
            1 and 0, which are valid as classes, tokens, and masks of either meaning: every one of
            the first tensor, two or more of the others, so that no mask hides all of a kind.
        numbers: how the numbers of each tensor of numbers are made up, :data:`NORMAL` by default.
        keep_dtype: whether numbers keep their dtype where float64 is asked for.

    Example:
        >>> structure = Structure.of({"x": torch.ones(5, 3), "y": torch.zeros(5, dtype=torch.long)})
        >>> made_up = structure.made_up(samples=2)
        >>> made_up["x"].shape, made_up["y"]
        (torch.Size([2, 3]), tensor([1, 0]))
    """

    template: Batch
    keep: bool = False
    numbers: tuple[str, ...] = ()
    keep_dtype: bool = False

    @staticmethod
    def of(batch: Batch) -> "Structure":
        """Return the structure of a private batch, none of whose values are kept.

        Args:
            batch: tensors of shape (samples, ...).
        """
        return Structure(map_rows(lambda t: t.new_zeros((1, *t.shape[1:])), batch))

    def made_up(self, samples: int, *, double: bool = False) -> Batch:
        """Return a batch of made-up rows, the same in each call: random numbers, and 1s and 0s.

        Args:
            samples: number of rows of each tensor.
            double: whether numbers are in float64, unless the structure keeps their dtype.

        Returns:
            Tensors of shape (samples, ...) in the nesting of the template, on its device.
        """
        generator = torch.Generator().manual_seed(0)
        turns = count(1)
        kinds = iter(self.numbers)

        def numbers(like: Tensor) -> Tensor:
            """Return rows of numbers."""
            kind = next(kinds, NORMAL)
            dtype = torch.float64 if double and not self.keep_dtype else like.dtype
            if kind == PUBLIC:
                return _repeated_rows(like, samples).to(dtype)
            shape = (samples, *like.shape[1:])
            drawn_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            draw = torch.randn if kind == NORMAL else torch.rand
            return draw(shape, generator=generator, dtype=drawn_dtype).to(like.device, dtype)

        def integers(like: Tensor) -> Tensor:
            """Return rows of integers or truth values, which alternate between 1 and 0."""
            if self.keep:
                return _repeated_rows(like, samples)
            shape = (samples, *like.shape[1:])
            width = max(shape[-1], 1)
            places = torch.arange(samples * like[:1].numel()) % width
            times = min(next(turns), max(1, width // 2))  # 1, 0, 1, 0; then 1, 1, 0, 0
            alternating: Tensor = 1 - places // times % 2
            return alternating.view(shape).to(like)

        def rows(like: Tensor) -> Tensor:
            return numbers(like) if like.is_floating_point() else integers(like)

        return map_rows(rows, self.template)

    def to(self, device: torch.device) -> "Structure":
        """Return the same structure with made-up rows on another device.

        Args:
            device: the device.
        """
        template = map_rows(lambda t: t.to(device), self.template)
        return replace(self, template=template)

    def __str__(self) -> str:
        """Return the shapes of a sample, for messages: "(1, 28, 28)", or one for each tensor."""
        return shapes_in(self.template)


def _repeated_rows(rows: Tensor, samples: int) -> Tensor:
    """Return as many rows as there are samples, from the first to the last and again."""
    index = torch.arange(samples, device=rows.device) % len(rows)
    return rows[index]


def check_rows(batch: Batch, structure: Structure | None) -> None:
    """Reject a batch of a program that is not tensors with the same number of rows each.

    A tensor with one row for all records would give each of them what was computed from others, and
    a network was only validated on records of one structure.

    Args:
        batch: a batch of a program, of any type.
        structure: structure that was validated, whose shapes of rows, dtypes and devices the batch
            must have; None for any.

    Raises:
        InputError: names the parts of the batch that cannot be used.
    """
    parts = parts_by_name(batch)
    errors = []
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.ndim == 0:
            kind = type(part).__name__
            errors.append(
                f"{name} is a {kind}, not a tensor. Use dicts, lists or tuples of tensors."
            )
    if not parts:
        errors.append("The batch contains no tensor.")
    raise_errors(errors)
    rows = {len(part) for part in parts.values()}
    if len(rows) > 1:
        raise InputError(
            "The tensors of the batch have different numbers of rows. Each must have one row per "
            f"record in its first dimension: {', '.join(parts)}."
        )
    if structure is not None and _form(batch) != _form(structure.template):
        raise InputError(
            "The batch has other parts, shapes or types than the one that was validated: "
            f"{_form(batch)}, not {_form(structure.template)}. Pad records to a fixed length."
        )


def _form(batch: Batch) -> dict[str, tuple[Any, ...]]:
    """Return shape of a row, dtype and device of each part."""
    form: dict[str, tuple[Any, ...]] = {}
    for name, t in parts_by_name(batch).items():
        form[name] = (*t.shape[1:], t.dtype, t.device)
    return form
